"""Copies that change nothing go, and nested cats become one: golden graphs, refusals, equal bytes and strides."""

from __future__ import annotations

from collections.abc import Callable

import torch
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cadence_fx.passes import ElideCopies, PassContext, run_passes
from cadence_fx.passes.graphs import GraphFacts
from tests.passes.toolbox import assert_same_bytes, flat_outputs, listing, trace

Function = Callable[..., object]
X = (1, 2, 4)


def rewrite(function: Function, *shapes: tuple[int, ...]) -> torch.fx.GraphModule:
    """The rewritten graph, after bytes, strides and written arguments were found equal to eager."""
    gm = trace(function, *[torch.randn(shape) for shape in shapes])
    rewritten = run_passes(gm, PassContext(), [ElideCopies()])
    given_ = [torch.randn(shape) for shape in shapes]
    twins = [value.clone() for value in given_]
    want = flat_outputs(function(*twins))
    with torch.no_grad():
        got = flat_outputs(rewritten(*given_))
    assert_same_bytes([*got, *given_], [*want, *twins])
    assert [value.stride() for value in got] == [value.stride() for value in want]
    for node in rewritten.graph.nodes:  # traced values tell aliases truly
        if node.op == "call_function" and "view" in node.name:
            assert GraphFacts.same_memory(node.meta["val"], node.args[0].meta["val"])
    return rewritten


def ops(gm: torch.fx.GraphModule) -> list[str]:
    return [node.target.__name__ for node in gm.graph.nodes if node.op == "call_function"]


def test_cat_of_a_copy_of_a_cat() -> None:
    def pack(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        left = torch.cat([x.clone(), y], 1).reshape(1, -1, 4)
        return (torch.cat([left, torch.cat([z])], 1),)

    assert_expected_inline(
        listing(rewrite(pack, X, X, X)),
        """\
def forward(self, x_1, y_1, z_1):
    cat_2 = aten.cat.default([x_1, y_1, z_1], 1)
    return (cat_2,)""",
    )


def test_views_of_a_copy_are_views_of_its_source() -> None:
    def viewed(x: Tensor) -> tuple[Tensor, ...]:
        copy = x.contiguous().clone()
        return (torch.relu(copy.view(2, 4)) + copy.view(8).view(2, 4),)

    assert ops(rewrite(viewed, X)) == ["view.default", "relu.default", "view.default", "view.default", "add.Tensor"]


def stays(function: Function, *shapes: tuple[int, ...]) -> None:
    assert rewrite(function, *shapes).code == trace(function, *[torch.randn(shape) for shape in shapes]).code


def test_what_is_refused() -> None:
    def leaves(x: Tensor) -> tuple[Tensor, ...]:
        copy = x.clone()
        return (copy.view(8), copy + 1)

    def source_is_written(x: Tensor) -> tuple[Tensor, ...]:
        copy = x.clone()
        x.mul_(2)
        return (copy + 1,)

    def copy_is_written(x: Tensor) -> tuple[Tensor, ...]:
        copy = x.clone()
        copy.mul_(2)
        return (copy + x,)

    def converts(x: Tensor) -> tuple[Tensor, ...]:
        return (x.to(torch.float64) + 1,)

    def other_strides(x: Tensor) -> tuple[Tensor, ...]:
        return (torch.relu(x.transpose(1, 2).contiguous()),)

    def other_alignment(x: Tensor) -> tuple[Tensor, ...]:
        return (torch.relu(x[0, 0, 1:].clone()),)

    def another_axis(x: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat([torch.cat([x, x], 1), torch.zeros(1, 4, 4)], 2),)

    def promotes(x: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat([torch.cat([x, x.half()], 1), x], 1),)

    def read_elsewhere(x: Tensor) -> tuple[Tensor, ...]:
        inner = torch.cat([x, x], 1)
        return (torch.cat([inner, x], 1), inner.sum(1))

    def part_is_written(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        inner = torch.cat([x, y], 1)
        y.add_(1)
        return (torch.cat([inner, x], 1),)

    for function in (leaves, source_is_written, copy_is_written, converts, other_strides, other_alignment):
        stays(function, X)
    for function in (another_axis, promotes, read_elsewhere):
        stays(function, X)
    stays(part_is_written, X, X)


def test_strides_of_the_result_decide() -> None:
    """A cat of channels-last values is channels-last: which of them come first may matter."""

    def pack(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        channels_last = x.contiguous(memory_format=torch.channels_last)
        return (torch.cat([torch.cat([channels_last, y], 1), y], 1),)

    rewrite(pack, (2, 3, 2, 2), (2, 3, 2, 2))


Step = tuple[str, int, int]
numbers = st.integers(0, 7)
kinds = ("clone", "contiguous", "to", "cat", "cat", "cat2", "single", "view", "turn", "write", "relu", "half")
steps = st.lists(st.tuples(st.sampled_from(kinds), numbers, numbers), max_size=12)


def perform(values: list[Tensor], operation: str, i: int, j: int) -> None:
    """One operation on earlier values of shape (n, 4)."""
    left, right = values[-1 - i % len(values)], values[-1 - j % len(values)]
    if operation == "clone":
        values.append(left.clone())
    elif operation == "contiguous":
        values.append(left.contiguous())
    elif operation == "to":
        values.append(left.to(torch.float32, copy=bool(j % 2)))
    elif operation == "cat" and left.shape[0] + right.shape[0] < 40:
        values.append(torch.cat([left, right]))
    elif operation == "cat2":
        values.append(torch.cat([left[:, :2], left[:, 2:]], -1))
    elif operation == "single":
        values.append(torch.cat([left]))
    elif operation == "view":
        values.append(left.reshape(-1, 2, 2).reshape(-1, 4))
    elif operation == "turn":
        values.append(left.t().clone().t())
    elif operation == "write":
        left[: 1 + j % left.shape[0]].mul_(2)
    elif operation == "relu":
        values.append(torch.relu(left))
    elif operation == "half":
        values.append(left[: 1 + left.shape[0] // 2])


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(program=steps, results=st.tuples(numbers, numbers))
def test_random_programs(program: list[Step], results: tuple[int, int]) -> None:
    def run(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        values = [x, y * 2]
        for step in program:
            perform(values, *step)
        return tuple(values[-1 - which % len(values)] + 0 for which in results)

    rewrite(run, (2, 4), (3, 4))
