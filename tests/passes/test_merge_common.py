"""Equal nodes are computed once where nobody can tell, and operators that return their input are left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cadence_fx.extremes import plant_extremes
from cadence_fx.passes import MergeCommon, PassContext, run_passes
from tests.passes.test_random_programs import Program, perform, programs
from tests.passes.toolbox import assert_same_bytes, context, flat_outputs, listing, run_on_carries, slot, trace

X = torch.randn(2, 3, 4)


def merge(function: Callable[..., object], *examples: Tensor, notes: list[str] | None = None) -> torch.fx.GraphModule:
    """The rewritten graph, whose results and writes on arguments have been compared with the function's."""
    ctx = PassContext()
    merged = run_passes(trace(function, *examples), ctx, [MergeCommon()])
    for seed in range(2):
        inputs = [example.clone() for example in examples]
        for value in inputs:
            if seed and value.is_floating_point():
                plant_extremes(value, seed)
        want_inputs = [value.clone() for value in inputs]
        torch.manual_seed(seed)
        want = [value.clone() for value in flat_outputs(function(*want_inputs))]
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        with torch.no_grad():
            got = flat_outputs(merged(*inputs))
        assert torch.equal(torch.get_rng_state(), state)
        assert_same_bytes([value.clone() for value in got], want)
        assert_same_bytes(inputs, want_inputs)
    if notes is not None:
        notes += ctx.notes
    return merged


def operators(gm: torch.fx.GraphModule) -> list[str]:
    calls = [node.target.__name__ for node in gm.graph.nodes if node.op == "call_function"]
    return [name for name in calls if name != "getitem"]


def test_steps_share_what_does_not_depend_on_them() -> None:
    def steps(x: Tensor) -> tuple[Tensor, ...]:
        for _ in range(3):
            frequencies = torch.exp(torch.arange(4) * -0.5).unsqueeze(0)
            batch = torch.cat([x, torch.zeros_like(x)]).reshape(4, 3, 4)
            x = torch.nn.functional.dropout(batch[:2] * frequencies, 0.1, False)
        return (x,)

    notes: list[str] = []
    gm = merge(steps, X, notes=notes)
    assert_expected_inline(
        listing(gm),
        """\
def forward(self, x_1):
    arange = aten.arange.default(4, device = device(type='cpu'), pin_memory = False)
    mul = aten.mul.Tensor(arange, -0.5)
    exp = aten.exp.default(mul)
    unsqueeze = aten.unsqueeze.default(exp, 0)
    zeros_like = aten.zeros_like.default(x_1, pin_memory = False)
    cat = aten.cat.default([x_1, zeros_like])
    slice_1 = aten.slice.Tensor(cat, 0, 0, 2)
    mul_1 = aten.mul.Tensor(slice_1, unsqueeze)
    zeros_like_1 = aten.zeros_like.default(mul_1, pin_memory = False)
    cat_1 = aten.cat.default([mul_1, zeros_like_1])
    slice_2 = aten.slice.Tensor(cat_1, 0, 0, 2)
    mul_3 = aten.mul.Tensor(slice_2, unsqueeze)
    zeros_like_2 = aten.zeros_like.default(mul_3, pin_memory = False)
    cat_2 = aten.cat.default([mul_3, zeros_like_2])
    slice_3 = aten.slice.Tensor(cat_2, 0, 0, 2)
    mul_5 = aten.mul.Tensor(slice_3, unsqueeze)
    dropout_2 = aten.dropout.default(mul_5, 0.1, False)
    return (dropout_2,)""",
    )
    assert notes == ["merge_common: 8 operators are computed once with others, 5 that return their input are left out"]


def test_layers_share_an_activation_and_its_views() -> None:
    def layers(x: Tensor) -> tuple[Tensor, ...]:
        halves = [torch.nn.functional.silu(x.transpose(1, 2)).chunk(2, -1) for _ in range(3)]
        return (sum(first * second for first, second in (half[:2] for half in halves)),)  # type: ignore[return-value]

    names = operators(merge(layers, torch.randn(2, 4, 3)))
    assert [names.count(name) for name in ("transpose.int", "silu.default", "chunk.default")] == [1, 1, 1]
    assert names.count("mul.Tensor") == 1 and names.count("add.Tensor") == 3


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 1.0 + x * 1, x * -1.0),
        lambda x: (x + 0 + (x + 0.0), x - 0.0 + (x + -0.0)),
        lambda x: (x * True + x,),
    ],
)
def test_numbers_that_compare_equal_are_not_the_same(function: Callable[..., object]) -> None:
    """1 and 1.0, 0.0 and -0.0, 1 and True; and none of these is a copy of x."""
    before = operators(trace(function, X))
    assert operators(merge(function, X)) == before


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (torch.rand(3) + torch.rand(3) + x[0, 0, 0],),
        lambda x: (torch.rand_like(x) * torch.rand_like(x),),
        lambda x: (torch.nn.functional.dropout(x, 0.5, True) + torch.nn.functional.dropout(x, 0.5, True),),
    ],
)
def test_draws_are_never_one(function: Callable[..., object]) -> None:
    assert operators(merge(function, X)) == operators(trace(function, X))


def test_draw_that_nobody_uses_still_moves_the_generator() -> None:
    def dead(x: Tensor) -> tuple[Tensor, ...]:
        torch.rand(2)
        torch.rand(2)
        return (torch.exp(x) + torch.exp(x) + torch.rand(1),)

    assert operators(merge(dead, X)) == ["rand.default"] * 2 + [
        "exp.default",
        "add.Tensor",
        "rand.default",
        "add.Tensor",
    ]


def test_memory_that_is_only_allocated_is_never_one() -> None:
    def allocate(x: Tensor) -> tuple[Tensor, ...]:
        first, second = torch.empty(3, 4), torch.empty(3, 4)
        return first.copy_(x[0]) + second.copy_(x[1]), torch.empty_like(x).copy_(x)

    assert operators(merge(allocate, X)).count("empty.memory_format") == 2


def test_input_written_in_between() -> None:
    def write(x: Tensor) -> tuple[Tensor, ...]:
        before = torch.exp(x[0])
        x[0].mul_(2)
        after = torch.exp(x[0])
        return (before + after + torch.exp(x[0]),)

    names = operators(merge(write, X))
    assert names.count("select.int") == 1 and names.count("exp.default") == 2


def test_results_that_are_written_stay_apart() -> None:
    def buffers(x: Tensor) -> tuple[Tensor, ...]:
        first, second = torch.zeros(3, 4), torch.zeros(3, 4)
        first.add_(x[0])
        return first * 2, second + 1

    notes: list[str] = []
    assert operators(merge(buffers, X, notes=notes)).count("zeros.default") == 2
    assert "merge_common: 1 repeats stay" in notes[-1] and "one of the two is written" in notes[-1]
    assert "test_merge_common.py" in notes[-1] or "None" in notes[-1]


def test_write_through_a_view_of_the_second() -> None:
    def buffers(x: Tensor) -> tuple[Tensor, ...]:
        first, second = torch.exp(x), torch.exp(x)
        second[:, 1:].transpose(0, 1)[0].fill_(3.0)
        return first * 2, second + 1

    assert operators(merge(buffers, X)).count("exp.default") == 2


def test_results_that_leave_stay_apart() -> None:
    """The caller may write one and not mean the other."""
    names = operators(merge(lambda x: (torch.exp(x), torch.exp(x)[0], torch.exp(x).sum()), X))
    assert names.count("exp.default") == 2  # the third is one with the first
    both = merge(lambda x: (x[0], x[0]), X)
    assert operators(both) == ["select.int", "select.int"]


def test_second_leaves_and_the_first_does_not() -> None:
    names = operators(merge(lambda x: (torch.exp(x).sum(), torch.exp(x), torch.exp(x).view(-1)), X))
    assert names.count("exp.default") == 2


def test_no_op_that_leaves_stays() -> None:
    """A result that is an argument itself is handed out in another way than a view of it."""
    assert operators(merge(lambda x: (x.view(2, 3, 4), torch.nn.functional.dropout(x, 0.5, False)), X)) == [
        "view.default",
        "dropout.default",
    ]


@pytest.mark.parametrize(
    "same",
    [
        lambda x: x.contiguous(),
        lambda x: x.to(torch.float32),
        lambda x: x.to("cpu"),
        lambda x: x.reshape(2, -1, 4),
        lambda x: x.view(2, 3, 4),
        lambda x: x.expand(-1, -1, 4),
        lambda x: x[:, :],
        lambda x: x.detach(),
        lambda x: torch.nn.functional.dropout(x, 0.3, False),
        lambda x: torch.feature_dropout(x, 0.0, True),
        lambda x: torch.ops.aten.alias(x),
        lambda x: x.permute(0, 1, 2),
    ],
)
def test_operators_that_return_their_input(same: Callable[[Tensor], Tensor]) -> None:
    assert operators(merge(lambda x: (torch.exp(same(x)),), X)) == ["exp.default"]


def test_no_op_of_a_view_with_an_offset() -> None:
    gm = merge(lambda x: (torch.nn.functional.dropout(x[1], 0.3, False).chunk(2, -1)[1] * 2,), X)
    assert operators(gm) == ["select.int", "chunk.default", "mul.Tensor"]


def test_no_op_that_was_traced_with_other_strides_stays() -> None:
    """After it a reshape was traced as a view, and is a copy."""

    def reshaped(x: Tensor) -> tuple[Tensor, ...]:
        same = torch.nn.functional.dropout(x[:, 1:], 0.3, False)
        before = same.reshape(-1) * 2
        x.mul_(3)
        return before + same.reshape(-1), same.reshape(-1) + 1

    names = operators(merge(reshaped, X))
    assert names.count("dropout.default") == 1 and names.count("reshape.default") == 3


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.transpose(1, 2).contiguous(),
        lambda x: x.clone(),
        lambda x: x.to(torch.float64),
        lambda x: x.view(torch.int32),
        lambda x: x.view(6, 4),
        lambda x: x.to(torch.float32, copy=True),
        lambda x: x * 1,
        lambda x: x + 0,
        lambda x: torch.nn.functional.dropout(x, 0.3, True),
    ],
)
def test_operators_that_do_not_return_their_input(other: Callable[[Tensor], Tensor]) -> None:
    def use(x: Tensor) -> tuple[Tensor, ...]:
        return (torch.exp(other(x)),)

    assert operators(merge(use, X)) == operators(trace(use, X))


def test_copy_that_is_written_through_an_alias() -> None:
    """What returns its input is no copy: a write on it is one on the input, in eager and afterwards."""

    def write(x: Tensor) -> tuple[Tensor, ...]:
        same = torch.nn.functional.dropout(x, 0.5, False).contiguous()
        same[0].fill_(2.0)
        return (x * 2,)

    assert "dropout.default" not in operators(merge(write, X))


def test_shape_changed_in_place() -> None:
    def turn(x: Tensor) -> tuple[Tensor, ...]:
        first, second = torch.exp(x), torch.exp(x)
        view = second[0]
        view.t_()
        return first[0].matmul(view), second[0] * 2

    assert operators(merge(turn, X)).count("exp.default") == 2


def test_unknown_callable_in_between() -> None:
    """It may switch a mode that decides how the second one is computed."""
    gm = trace(lambda x: (torch.exp(x).sum() + torch.exp(x).amax(),), X)
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.amax.default):
        with gm.graph.inserting_before(node.args[0]):
            gm.graph.call_function(torch.set_flush_denormal, (False,))
    merged = run_passes(gm, PassContext(), [MergeCommon()])
    assert operators(merged).count("exp.default") == 2


def test_attributes_are_read_once() -> None:
    table = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def read(x: Tensor) -> tuple[Tensor, ...]:
        return (torch.ops.aten.mul(x, table) + torch.ops.aten.mul(x, table),)

    gm = merge(read, X)
    assert len(gm.graph.find_nodes(op="get_attr")) == 1 and operators(gm) == ["mul.Tensor", "add.Tensor"]


def test_graph_without_repeats_is_left_alone() -> None:
    ctx = PassContext()
    assert not MergeCommon()(trace(lambda x: (torch.exp(x),), X), ctx).modified and not ctx.notes


SETTINGS = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@SETTINGS
@given(program=programs, repeated=st.booleans())
def test_random_programs(program: Program, repeated: bool) -> None:
    """Alone, and before the states are written in place; each step may be spelled twice."""

    def function(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        values = [x + 0, a, b]
        for step in program.steps:
            if repeated and step[0] not in ("write", "write_all", "fill", "scale_in_place"):
                perform(values, *step)
            values.append(perform(values, *step))
        return tuple(values[which % len(values)] for which in program.results)

    examples = program.examples()
    gm = trace(function, *examples)
    want = [value.clone() for value in function(*[value.clone() for value in examples])]
    alone = run_passes(gm, PassContext(), [MergeCommon()])
    with torch.no_grad():
        assert_same_bytes([value.clone() for value in flat_outputs(alone(*[v.clone() for v in examples]))], want)
    ctx = context(gm, slot(gm, "a_1", 2, 1), slot(gm, "b_1", 3, 1))
    assert_same_bytes(run_on_carries(run_passes(gm, ctx), ctx, examples), want)
