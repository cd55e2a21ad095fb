"""The host's part of a graph. Here float64 plays the device, and every other dtype the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from cadence_fx.errors import NotCapturable
from cadence_fx.passes import PassContext, SplitHost, run_passes
from tests.passes.toolbox import assert_same_bytes, context, flat_outputs, listing, slot, trace


def on_host(tensor: Tensor) -> bool:
    return tensor.dtype != torch.float64


X = torch.randn(4, dtype=torch.float64)
W = torch.randn(4)


def split(
    function: Callable[..., object], *examples: Tensor, fixed: bool = True
) -> tuple[torch.fx.GraphModule, PassContext]:
    """Split, with every argument but the first at a fixed address."""
    gm = trace(function, *examples)
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    ctx = PassContext(frozen_inputs=frozenset(names[1:] if fixed else ()))
    return run_passes(gm, ctx, [SplitHost(on_host)]), ctx


def run(gm: torch.fx.GraphModule, ctx: PassContext, *args: Tensor) -> list[Tensor]:
    """What the engine does: the host's part, the copies, then the rest."""
    part = ctx.host
    assert part is not None
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    values = part.graph(*(args[names.index(name)] for name in part.inputs))
    sent = len(part.residents) + len(part.held)
    for target, value in zip((*part.residents, *part.held), values, strict=False):
        target.copy_(value)
    outputs = list(gm(*args))
    for index, value in zip(part.outputs, values[sent:], strict=True):
        outputs[index] = value
    return flat_outputs(outputs)


def same(function: Callable[..., object], *examples: Tensor) -> tuple[torch.fx.GraphModule, PassContext]:
    """Split and compare three calls in which arguments on the host change in between; written ones end up the same."""
    gm, ctx = split(function, *examples)
    mine, theirs = [t.clone() for t in examples], [t.clone() for t in examples]
    for _ in range(3):
        assert_same_bytes(run(gm, ctx, *mine), flat_outputs(function(*theirs)))
        assert_same_bytes(mine, theirs)
        for tensor in (*mine[1:], *theirs[1:]):
            tensor.add_(1)
    return gm, ctx


def test_attribute_that_is_moved_in_every_call() -> None:
    gm, ctx = same(lambda x, w: (x * w.to(torch.float64),), X, W)
    assert_expected_inline(
        listing(gm),
        """\
def forward(self, x_1, w_1):
    _resident_0 = self._resident_0
    mul = aten.mul.Tensor(x_1, _resident_0)
    return (mul,)""",
    )
    assert ctx.host is not None
    assert_expected_inline(
        listing(ctx.host.graph),
        """\
def forward(self, w_1):
    return (w_1,)""",
    )
    assert not ctx.host.writes and ctx.host.residents[0].dtype == torch.float64
    assert ctx.notes == ["split_host: 1 value to the device, 0 held, 0 from the host"]


def test_what_the_host_computes_first() -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return (x * (w[:2].repeat(2) * 3).sin().to(torch.float64),)

    gm, ctx = same(step, X, W)
    assert "sin" not in listing(gm) and ctx.host is not None and "sin" in listing(ctx.host.graph)


def test_table_that_the_host_fills() -> None:
    """No constant, since it is written."""

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        table = torch.zeros(4)
        table[1:3] = w[:2]
        return (x + table.to(torch.float64), x * w.to(torch.float64))

    same(step, X, W)


def test_counter_on_the_host() -> None:
    """Recorded on a device, it would count once and stand still."""

    def step(x: Tensor, steps: Tensor) -> tuple[Tensor, ...]:
        steps.add_(1)
        return (x * 2, steps * 3, steps)

    gm, ctx = same(step, X, torch.zeros((), dtype=torch.int64))
    assert_expected_inline(
        listing(gm),
        """\
def forward(self, x_1, steps_1):
    mul = aten.mul.Tensor(x_1, 2)
    return (mul, None, None)""",
    )
    assert ctx.host is not None and ctx.host.writes and ctx.host.outputs == (1, 2)


def test_value_sent_before_it_is_written() -> None:
    def step(x: Tensor, steps: Tensor) -> tuple[Tensor, ...]:
        before = steps.to(torch.float64)
        steps.add_(1)
        return (x * before, x + steps.to(torch.float64))

    _, ctx = same(step, X, torch.zeros(4, dtype=torch.int64))
    assert ctx.host is not None and "clone" in listing(ctx.host.graph)


def test_positions_from_the_host() -> None:
    def step(x: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        y = x.clone()
        y[at % 4] = 2.0
        return (x[(at + 1) % 4], y)

    gm, ctx = same(step, X, torch.tensor([0, 2]))
    assert ctx.host is not None and len(ctx.host.residents) == 2 and "remainder" not in listing(gm)


def test_copy_into_memory_of_the_device() -> None:
    gm, ctx = split(lambda x, w: (x.clone().copy_(w),), X, X.clone())
    assert ctx.host is None and "copy_" in listing(gm)


def test_moved_copy_that_is_written_or_returned_is_fresh_in_every_call() -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = w.to(torch.float64)
        return (y, w.to(torch.float64).add_(x))

    gm, _ = same(step, X, W)
    assert listing(gm).count("aten.clone.default") == 2


def test_number_that_a_kernel_takes_by_value() -> None:
    def step(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return (x * (scale + 1),)

    gm, ctx = split(step, X, torch.tensor(0.5))
    assert_same_bytes(run(gm, ctx, X, torch.tensor(0.5)), flat_outputs(step(X, torch.tensor(0.5))))
    assert ctx.host is not None and not ctx.host.residents and len(ctx.host.held) == 1
    assert ctx.host.held_names == ("mul",) and "_held_0" in listing(gm)


def refused(function: Callable[..., object], *examples: Tensor, fixed: bool = True) -> str:
    with pytest.raises(NotCapturable) as caught:
        split(function, *examples, fixed=fixed)
    return caught.value.reason


def test_number_that_changes_with_every_call() -> None:
    def step(x: Tensor, steps: Tensor) -> tuple[Tensor, ...]:
        steps.add_(1)
        return (x * steps,)

    assert refused(step, X, torch.tensor(0)) == "host_value"


def test_host_random_numbers() -> None:
    assert refused(lambda x, w: (x * (w + torch.rand(4)).to(torch.float64),), X, W) == "host_random"


def test_write_on_an_argument_of_the_caller() -> None:
    assert refused(lambda x, w: (x * w.add_(1).to(torch.float64),), X, W, fixed=False) == "undeclared_write"


def test_copy_that_converts() -> None:
    """On which side it converts is the copy's own business."""
    assert refused(lambda x, w: (x.clone().copy_(w),), X, W) == "host_copy"


def test_state_on_the_host() -> None:
    gm = trace(lambda x, w: (x * w.to(torch.float64), w + 1), X, W)
    with pytest.raises(NotCapturable, match="host_state"):
        run_passes(gm, context(gm, slot(gm, "w_1", 1, 0)), [SplitHost(on_host)])


def test_read_back_from_the_device_is_left_to_the_last_pass() -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return ((x.float() + w).to(torch.float64) * x,)

    gm = trace(step, X, W)
    reason = refused(step, X, W)
    assert reason == "host_copy" and "aten.to.dtype" in listing(gm)


def test_graph_of_one_side_is_unchanged() -> None:
    for example in (X, W):
        gm = trace(lambda x: (x + 1,), example)
        ctx = PassContext()
        assert not SplitHost(on_host)(gm, ctx).modified and ctx.host is None


def test_argument_that_leaves_as_it_came_is_left_alone() -> None:
    gm, ctx = split(lambda x, w: (x + 1, w), X, W)
    assert ctx.host is None and gm(X, W)[1] is W
