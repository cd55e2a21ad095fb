"""Random straight-line programs on two states, with writes on buffers and on the states: bytes stay equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cadence_fx.passes import Proved, prove_retention, run_passes
from tests.passes.toolbox import assert_same_bytes, context, run_on_carries, slot, trace

Step = tuple[str, int, int, int, int]
OPERATIONS = (
    "cat", "slice", "roll", "clone", "zeros", "pad", "stack", "turn", "view", "scale",
    "write", "write_all", "fill", "scale_in_place", "index_copy", "dropout", "scatter",
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    batch: int
    extents: tuple[int, int, int]  # of x and of the two states
    steps: tuple[Step, ...]
    results: tuple[int, int, int, int]  # which values are y, z and the new states

    def examples(self) -> list[Tensor]:
        return [torch.randn(self.batch, extent, 2) for extent in self.extents]

    def function(self) -> Callable[..., tuple[Tensor, ...]]:
        def run(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
            values = [x + 0, a, b]
            for step in self.steps:
                values.append(perform(values, *step))
            return tuple(values[which % len(values)] for which in self.results)

        return run


def perform(values: list[Tensor], operation: str, i: int, j: int, m: int, n: int) -> Tensor:
    """One operation along axis 1 on two earlier values; the numbers are folded into what fits."""
    v, w = values[-1 - i % len(values)], values[-1 - j % len(values)]
    size = v.shape[1]
    low = m % (size + 1)
    high = low + n % (size - low + 1)
    if operation in ("write", "index_copy", "scatter"):
        high = min(high, low + w.shape[1])
        low = min(low, high)
    if operation == "cat":
        return torch.cat([v, w], 1) if size + w.shape[1] <= 24 else v
    if operation == "slice":
        return v[:, low:high]
    if operation == "roll":
        return torch.roll(v, m, 1) if size else v
    if operation == "clone":
        return v.clone()
    if operation == "zeros":
        return torch.zeros_like(v)
    if operation == "pad":
        return torch.nn.functional.pad(v, (0, 0, m % 3, n % 3))
    if operation == "stack":
        return torch.stack([*v.unbind(1), *w.unbind(1)][:8], 1) if size + w.shape[1] else v
    if operation == "turn":
        return v.transpose(0, 1).flip(2).transpose(0, 1).contiguous()
    if operation == "view":
        return v.unsqueeze(0).squeeze(0).transpose(1, 2).transpose(1, 2)
    if operation == "scale":
        return v * 1.5
    if operation == "write":
        v[:, low:high] = w[:, : high - low].clone()
    elif operation == "write_all":
        v.copy_(w[:, :1].clone()) if w.shape[1] else v.zero_()
    elif operation == "fill":
        v[:, low:high].fill_(0.25)
    elif operation == "scale_in_place":
        v[:, low:high].mul_(2)
    elif operation == "index_copy":
        return v.index_copy(1, torch.arange(low, high), w[:, : high - low])
    elif operation == "dropout":
        return torch.nn.functional.dropout(v, 0.5, False)
    elif operation == "scatter":
        return torch.slice_scatter(v, w[:, : high - low], 1, low, high)
    return v


numbers = st.integers(0, 7)
programs = st.builds(
    Program,
    st.integers(1, 2),
    st.tuples(st.integers(1, 3), st.integers(0, 6), st.integers(0, 6)),
    st.lists(st.tuples(st.sampled_from(OPERATIONS), numbers, numbers, numbers, numbers), max_size=12).map(tuple),
    st.tuples(*[st.integers(0, 15)] * 4),
)
SETTINGS = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@SETTINGS
@given(program=programs)
def test_bytes_stay_equal(program: Program) -> None:
    function, examples = program.function(), program.examples()
    gm = trace(function, *examples)
    ctx = context(gm, slot(gm, "a_1", 2, 1), slot(gm, "b_1", 3, 1))
    rewritten = run_passes(gm, ctx)
    inputs = program.examples()
    want = [value.clone() for value in function(*[value.clone() for value in inputs])]
    assert_same_bytes(run_on_carries(rewritten, ctx, inputs), want)


@SETTINGS
@given(program=programs)
def test_what_is_proved_is_true(program: Program) -> None:
    """Frames that the proof names as old ones are those frames, byte for byte."""
    function = program.function()
    gm = trace(function, *program.examples())
    x, a, b = program.examples()
    result = function(x, a.clone(), b.clone())[2]

    class Anything:
        """A policy that declares no order, so that every verdict is what was found."""

        def survivors(self, old: int, new: int) -> None:
            return None

    region = slot(gm, "a_1", 2, 1)
    object.__setattr__(region.declared, "retention", Anything())
    verdict = prove_retention(gm, region)
    if isinstance(verdict, Proved):
        at = 0
        for span in verdict.spans:
            if span.source == "old":
                assert_same_bytes([result[:, at : at + len(span)]], [a[:, span.start : span.stop]])
            at += len(span)
        assert at == result.shape[1]
