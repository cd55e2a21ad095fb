"""Writes on constants become constants; every reader has the bytes that were there when it read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from cadence_fx.passes import ConstantWrites, HoistSlow, MergeCommon, PassContext, run_passes
from tests.passes.toolbox import assert_same_bytes, flat_outputs, keep, listing, trace

X = torch.arange(4)


def separate(function: Callable[..., object], *examples: Tensor) -> tuple[torch.fx.GraphModule, PassContext]:
    """The pass alone, every argument but the first at a fixed address; the results are compared."""
    gm = trace(function, *examples)
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    ctx = PassContext(frozen_inputs=frozenset(names[1:]))
    gm = run_passes(gm, ctx, [ConstantWrites()])
    for _ in range(2):
        given = [example.clone() for example in examples]
        expected = function(*(example.clone() for example in examples))
        assert_same_bytes(flat_outputs(gm(*given)), flat_outputs(expected))
    return gm, ctx


def counted(x: Tensor) -> tuple[Tensor, ...]:
    counter = torch.zeros(1, dtype=torch.int64)
    seen = counter.view(-1, 1)
    before = seen + x
    counter.add_(1)
    after = seen >= x
    counter.mul_(3)
    return before, after, seen - x


def test_a_counter_that_is_made_in_the_call() -> None:
    gm, ctx = separate(counted, X)
    assert_expected_inline(
        listing(gm),
        """\
def forward(self, x_1):
    zeros = aten.zeros.default([1], dtype = torch.int64, device = device(type='cpu'), pin_memory = False)
    view = aten.view.default(zeros, [-1, 1])
    add = aten.add.Tensor(view, x_1)
    add_tensor = aten.add.Tensor(zeros, 1)
    view_1 = aten.view.default(add_tensor, [-1, 1])
    ge = aten.ge.Tensor(view_1, x_1)
    mul_tensor = aten.mul.Tensor(add_tensor, 3)
    view_2 = aten.view.default(mul_tensor, [-1, 1])
    sub = aten.sub.Tensor(view_2, x_1)
    return (add, ge, sub)""",
    )
    assert ctx.notes == ["constant_writes: 2 writes on 1 constants are values of their own"]


def test_what_is_counted_in_every_layer_is_then_computed_once_and_kept() -> None:
    def layers(x: Tensor) -> Tensor:
        for _ in range(5):
            x = counted(x)[2]
        return x

    gm = trace(layers, X)
    ctx = PassContext(keep=keep)
    gm = run_passes(gm, ctx, [ConstantWrites(), MergeCommon(), HoistSlow()])
    assert_expected_inline(
        listing(gm),
        """\
def forward(self, x_1):
    _kept_0 = self._kept_0
    view = aten.view.default(_kept_0, [-1, 1])
    add = aten.add.Tensor(view, x_1)
    _kept_1 = self._kept_1
    view_5 = aten.view.default(_kept_1, [-1, 1])
    ge = aten.ge.Tensor(view_5, x_1)
    _kept_2 = self._kept_2
    view_6 = aten.view.default(_kept_2, [-1, 1])
    sub = aten.sub.Tensor(view_6, x_1)
    add_1 = aten.add.Tensor(view, sub)
    ge_1 = aten.ge.Tensor(view_5, sub)
    sub_1 = aten.sub.Tensor(view_6, sub)
    add_2 = aten.add.Tensor(view, sub_1)
    ge_2 = aten.ge.Tensor(view_5, sub_1)
    sub_2 = aten.sub.Tensor(view_6, sub_1)
    add_3 = aten.add.Tensor(view, sub_2)
    ge_3 = aten.ge.Tensor(view_5, sub_2)
    sub_3 = aten.sub.Tensor(view_6, sub_2)
    add_4 = aten.add.Tensor(view, sub_3)
    ge_4 = aten.ge.Tensor(view_5, sub_3)
    sub_4 = aten.sub.Tensor(view_6, sub_3)
    return sub_4""",
    )
    assert ctx.slow is not None
    ctx.slow.graph()
    assert_same_bytes([gm(X)], [layers(X)])


def by_a_copy(x: Tensor) -> tuple[Tensor, ...]:
    offset = torch.zeros(2)
    offset[:] = torch.where(torch.ones(2, dtype=torch.bool), offset + 1, offset)
    first = offset.sum() + x
    offset.copy_(offset * -0.0)
    return first, offset + x[:2], offset[1] * x


def by_a_weight(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    scale = weight.clone().mul_(2)
    scale.sub_(weight[0])
    return (x * scale,)


def through_a_view_of_the_same_form(x: Tensor) -> tuple[Tensor, ...]:
    memory = torch.ones(2, 2)
    memory.view(2, 2).neg_()
    row, other = memory.unbind(0)
    memory.exp_()
    return row + x[:2], other * x[2:], memory.t() @ torch.ones(2, 4)


def by_what_it_has_itself(x: Tensor) -> tuple[Tensor, ...]:
    memory = torch.full((4,), 3)
    memory.mul_(memory)
    memory.add_(memory, alpha=2)
    return (memory + x,)


def by_one_another(x: Tensor) -> tuple[Tensor, ...]:
    first, second = torch.zeros(4), torch.ones(4)
    first.add_(1)
    second.mul_(2)
    first.mul_(second)
    second.sub_(first)
    return first + x, second * x


def test_memories_that_are_written_from_each_other() -> None:
    gm, ctx = separate(by_one_another, X)
    assert ctx.notes == ["constant_writes: 4 writes on 2 constants are values of their own"]
    assert "_." not in listing(gm)


@pytest.mark.parametrize(
    ("function", "writes"),
    [(by_a_copy, 2), (by_a_weight, 2), (through_a_view_of_the_same_form, 2), (by_what_it_has_itself, 2)],
)
def test_spellings(function: Callable[..., object], writes: int) -> None:
    examples = [X, torch.tensor([2.0, -0.0, 1.0, 5.0])][: function.__code__.co_argcount]
    gm, ctx = separate(function, *examples)
    assert ctx.notes == [f"constant_writes: {writes} writes on 1 constants are values of their own"]
    assert "_." not in listing(gm)


def in_part(x: Tensor) -> tuple[Tensor, ...]:
    memory = torch.zeros(4)
    memory[1:].add_(1)
    return (memory + x,)


def by_the_call(x: Tensor) -> tuple[Tensor, ...]:
    memory = torch.zeros(4)
    memory.add_(x)
    return (memory * 2,)


def by_another_that_the_call_writes(x: Tensor) -> tuple[Tensor, ...]:
    memory, other = torch.zeros(4), torch.ones(4)
    other.mul_(x)
    memory.add_(other)
    return (memory * 2,)


def handed_out(x: Tensor) -> tuple[Tensor, ...]:
    memory = torch.zeros(4)
    memory.add_(1)
    return memory + x, memory


def handed_in(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    weight.add_(1)
    return (weight + x,)


def drawn(x: Tensor) -> tuple[Tensor, ...]:
    memory = torch.zeros(4)
    memory.bernoulli_(0.0)
    return (memory + x,)


def without_contents(x: Tensor) -> tuple[Tensor, ...]:
    memory = torch.empty(4)
    memory.mul_(0).fill_(1)
    return (memory.clamp(1, 1) + x,)


def copied_from_what_is_written_later(x: Tensor) -> tuple[Tensor, ...]:
    memory, source = torch.zeros(4), torch.ones(4)
    memory.copy_(source)
    source[:2].add_(1)
    return memory + x, source + x


def with_another_dtype(x: Tensor) -> tuple[Tensor, ...]:
    memory = torch.ones(4, dtype=torch.float16)
    memory.mul_(torch.full((4,), 1.0001, dtype=torch.float32))
    return (memory + x,)


def by_an_operator_that_is_not_elementwise(x: Tensor) -> tuple[Tensor, ...]:
    memory = torch.zeros(4)
    memory.index_copy_(0, torch.tensor([1]), torch.ones(1))
    return (memory + x,)


def by_a_twin_with_other_arguments(x: Tensor) -> tuple[Tensor, ...]:
    memory, other = torch.full((4,), 3.0), torch.full((4,), 2.0)
    memory.pow_(2)
    other.polygamma_(1)
    return memory + x, other + x


def copied_from_what_is_read_as_its_conjugate(x: Tensor) -> tuple[Tensor, ...]:
    memory = torch.zeros(4, dtype=torch.complex64)
    memory.copy_(torch.complex(torch.ones(4), torch.ones(4)).conj())
    return (memory + x,)


@pytest.mark.parametrize(
    "function",
    [
        by_a_twin_with_other_arguments,
        copied_from_what_is_read_as_its_conjugate,
        in_part,
        by_the_call,
        by_another_that_the_call_writes,
        handed_out,
        handed_in,
        drawn,
        without_contents,
        copied_from_what_is_written_later,
        with_another_dtype,
        by_an_operator_that_is_not_elementwise,
    ],
)
def test_what_stays_as_it_is(function: Callable[..., object]) -> None:
    examples = [X, torch.randn(4)][: function.__code__.co_argcount]
    gm = trace(function, *examples)
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    ctx = PassContext(frozen_inputs=frozenset(names[1:]))
    assert listing(run_passes(gm, ctx, [ConstantWrites()])) == listing(gm)
    assert not ctx.notes
