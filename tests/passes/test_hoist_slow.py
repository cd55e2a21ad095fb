"""What only constants and weights decide leaves the call; bytes stay, also when weights are written."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.nn import functional as F

from cadence_fx.passes import HoistSlow, PassContext, VerifyCapturable, default_passes, run_passes
from cadence_fx.passes import hoist_slow as module
from tests.passes.toolbox import assert_same_bytes, context, flat_outputs, keep, listing, run_on_carries, slot, trace

X, W = torch.randn(2, 4), torch.randn(4)


def hoist(
    function: Callable[..., object], *examples: Tensor, unsteady: dict[str, str] | None = None
) -> tuple[torch.fx.GraphModule, PassContext]:
    """Hoist, with every argument but the first at a fixed address."""
    gm = trace(function, *examples)
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    ctx = PassContext(frozen_inputs=frozenset(names[1:]), unsteady=unsteady or {}, keep=keep)
    return run_passes(gm, ctx, [HoistSlow(), VerifyCapturable()]), ctx


def fill(gm: torch.fx.GraphModule, ctx: PassContext, *args: Tensor) -> None:
    """What the engine does when a weight has been written."""
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    if ctx.slow is not None:
        assert ctx.slow.graph(*(args[names.index(name)] for name in ctx.slow.inputs)) == ()


def same(function: Callable[..., object], *examples: Tensor) -> tuple[torch.fx.GraphModule, PassContext]:
    """Hoist, and compare with the function on data with odd values, with weights that are written in between."""
    gm, ctx = hoist(function, *examples)
    given = [example.clone() for example in examples]
    for kind in (0.0, -0.0, float("nan"), float("inf")):
        fill(gm, ctx, *given)
        for _ in range(2):
            assert_same_bytes(flat_outputs(gm(*given)), flat_outputs(function(*given)))
        for tensor in given:
            if tensor.is_floating_point():
                tensor.mul_(-1.5).view(-1)[0] = kind
    return gm, ctx


def operators(gm: torch.fx.GraphModule) -> list[str]:
    calls = [node for node in gm.graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    return [str(node.target).removeprefix("aten.") for node in calls]


def modulate(x: Tensor, time: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    shift, scale = F.linear(F.silu(time), weight, bias).chunk(2, -1)
    return (F.layer_norm(x, (4,)) * (1 + scale) + shift,)


MODULATION = (X, torch.randn(4), torch.randn(8, 4), torch.randn(8))


def test_modulation_by_a_fixed_time() -> None:
    gm, ctx = same(modulate, *MODULATION)
    assert_expected_inline(
        listing(gm),
        """\
def forward(self, x_1, time_1, weight_1, bias_1):
    _kept_0 = self._kept_0
    chunk = aten.chunk.default(_kept_0, 2, -1)
    getitem = chunk[0]
    layer_norm = aten.layer_norm.default(x_1, [4])
    _kept_1 = self._kept_1
    mul = aten.mul.Tensor(layer_norm, _kept_1)
    add_1 = aten.add.Tensor(mul, getitem)
    return (add_1,)""",
    )
    part = ctx.slow
    assert part is not None and part.inputs == ("time_1", "weight_1", "bias_1")
    assert [tuple(resident.shape) for resident in part.residents] == [(8,), (4,)]
    assert_expected_inline(
        listing(part.graph),
        """\
def forward(self, time_1, weight_1, bias_1):
    silu = aten.silu.default(time_1)
    linear = aten.linear.default(silu, weight_1, bias_1)
    _kept_0 = self._kept_0
    _fill = cadence_fx_passes_hoist_slow__fill(_kept_0, linear)
    chunk = aten.chunk.default(linear, 2, -1)
    getitem_1 = chunk[1]
    add = aten.add.Tensor(getitem_1, 1)
    _kept_1 = self._kept_1
    _fill_1 = cadence_fx_passes_hoist_slow__fill(_kept_1, add)
    return ()""",
    )
    assert ctx.notes == ["hoist_slow: 3 operators are run once, 2 values of 3 inputs are kept in 48 bytes"]


def test_views_of_what_is_kept_stay_views() -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        table = w.repeat(4, 1).exp()
        return (x + table[1:3], x * table.transpose(0, 1)[:2], x - table.expand(2, 4, 4)[:, 0])

    gm, ctx = same(step, X, W)
    assert ctx.slow is not None and len(ctx.slow.residents) == 1
    assert "exp" not in operators(gm) and "expand.default" in operators(gm)


def test_order_of_axes_is_kept() -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return (x.sum() + w.permute(1, 0, 2).exp(),)

    gm, ctx = same(step, X, torch.randn(3, 4, 5))
    assert ctx.slow is not None and ctx.slow.residents[0].stride() == (5, 20, 1)
    assert flat_outputs(gm(X, torch.randn(3, 4, 5)))[0].stride() == (5, 20, 1)


def test_constants_without_any_input() -> None:
    gm, ctx = same(lambda x: (x * torch.linspace(0, 1, 4).mul(3.14).cos(),), X)
    assert operators(gm) == ["mul.Tensor"] and ctx.slow is not None and ctx.slow.inputs == ()


def test_one_result_of_several() -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        values, order = torch.sort(w)
        return (x + values, x[:, order])

    gm, ctx = same(step, X, W)
    assert operators(gm) == ["add.Tensor", "index.Tensor"] and ctx.slow is not None and len(ctx.slow.residents) == 2


def test_equal_values_are_kept_once() -> None:
    """As solver steps do that compute the same table each."""

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return (x + w.exp().view(1, 4), x * w.exp().view(1, 4) + w.exp2())

    gm, ctx = same(step, X, W)
    assert ctx.slow is not None and len(ctx.slow.residents) == 2
    assert [node.target for node in gm.graph.find_nodes(op="get_attr")] == ["_kept_0", "_kept_0", "_kept_1"]


def test_dropout_outside_training_is_no_obstacle() -> None:
    gm, _ = same(lambda x, w: (x + torch.dropout(w.exp(), 0.5, False).sin(),), X, W)
    assert operators(gm) == ["add.Tensor"]


def test_autocast_inside_the_graph() -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            inside = F.linear(w.view(1, 4), w.repeat(4, 1).exp())
        return (x + inside.float() + F.linear(w.view(1, 4), w.repeat(4, 1).exp()),)

    gm = trace(step, X, W)
    ctx = PassContext(frozen_inputs=frozenset({"w_1"}), keep=keep)
    hoisted = run_passes(gm, ctx, [HoistSlow()])
    fill(hoisted, ctx, X, W)
    assert ctx.slow is not None and len(ctx.slow.residents) == 2 and "linear.default" not in operators(hoisted)
    assert_same_bytes(flat_outputs(hoisted(X, W)), flat_outputs(step(X, W)))


def test_grad_mode_inside_the_graph_does_not_reach_what_is_kept() -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            y = w.exp()
        return (x + y.detach(),)

    gm, ctx = hoist(step, X, W)
    weight = torch.nn.Parameter(W.clone())
    with torch.no_grad():
        fill(gm, ctx, X, weight)
        assert ctx.slow is not None and not ctx.slow.residents[0].requires_grad
        assert_same_bytes(flat_outputs(gm(X, weight)), flat_outputs(step(X, weight)))


def test_a_state_is_computed_with_what_is_kept() -> None:
    def step(x: Tensor, cache: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        raw = torch.cat([cache, x * w.exp()], 0)
        return raw.sum(0), raw[-4:]

    x, cache = torch.randn(2, 4), torch.randn(4, 4)
    gm = trace(step, x, cache, W)
    ctx = context(gm, slot(gm, "cache_1", 1, 0, advance=2))
    ctx.frozen_inputs, ctx.keep = frozenset({"w_1"}), keep
    rewritten = run_passes(gm, ctx, default_passes())
    assert ctx.slow is not None
    ctx.slow.graph(W)
    assert_same_bytes(run_on_carries(rewritten, ctx, [x, cache, W]), flat_outputs(step(x, cache, W)))


# -- what stays --------------------------------------------------------------------------------------------------------


def unchanged(function: Callable[..., object], *examples: Tensor, **options: dict[str, str]) -> list[str]:
    gm, ctx = hoist(function, *examples, **options)
    assert ctx.slow is None and not gm.graph.find_nodes(op="get_attr")
    assert_same_bytes(flat_outputs(gm(*examples)), flat_outputs(function(*examples)))
    return ctx.notes


def test_nothing_leaves_where_nobody_would_compute_it() -> None:
    gm = trace(lambda x, w: (x + w.exp(),), X, W)
    ctx = PassContext(frozen_inputs=frozenset({"w_1"}))
    assert not HoistSlow()(gm, ctx).modified and ctx.slow is None


def test_views_of_weights_stay() -> None:
    assert unchanged(lambda x, w: (x + w.view(1, 4).expand(2, 4), x * w[1:2]), X, W) == []


def test_values_of_the_call_stay() -> None:
    assert unchanged(lambda x, w: ((x + w).exp(),), X, W) == []


def test_value_that_is_returned_stays() -> None:
    """The caller may write what he is given."""
    gm, ctx = same(lambda x, w: (x + 1, w.exp(), w.sin().neg().view(2, 2)), X, W)
    assert "exp.default" in operators(gm) and "neg.default" in operators(gm) and "sin.default" not in operators(gm)
    assert ctx.notes[0].startswith("hoist_slow: exp and 1 others not kept, since it leaves the graph")


def test_value_that_is_written_stays() -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        table = w.exp()
        row = table[1:]
        table.add_(1)
        return (x + table, x[:, 1:] * row)

    gm, _ = hoist(step, X, W)
    assert "exp.default" in operators(gm)
    for _ in range(2):
        assert_same_bytes(flat_outputs(gm(X, W)), flat_outputs(step(X, W)))


def test_values_of_a_weight_that_is_written_stay() -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x + w[1:].exp().sum()
        w[:2].mul_(0.5)
        return (y,)

    gm, ctx = hoist(step, X, W.clone())
    assert ctx.slow is None
    mine, theirs = W.clone(), W.clone()
    for _ in range(2):
        assert_same_bytes(flat_outputs(gm(X, mine)), flat_outputs(step(X, theirs)))


def test_random_and_uninitialised_values_stay() -> None:
    gm, ctx = hoist(lambda x, w: (x + torch.rand(4) * w + torch.empty(4).mul(0),), X, W)
    assert ctx.slow is None and "rand.default" in operators(gm)


def test_states_are_no_weights() -> None:
    gm = trace(lambda x, state: (x + state.exp(), state * 1), X, W)
    ctx = context(gm, slot(gm, "state_1", 1, 0))
    ctx.frozen_inputs, ctx.keep = frozenset({"state_1"}), keep
    assert not HoistSlow()(gm, ctx).modified and ctx.slow is None


def test_inputs_from_which_nothing_may_be_computed_in_advance() -> None:
    notes = unchanged(lambda x, w: (x + w.view(4, 1).exp()[0],), X, W, unsteady={"w_1": "its writes are not counted"})
    assert notes == ["hoist_slow: nothing is computed in advance from w_1, since its writes are not counted"]
    assert unchanged(lambda x, w: (x + w,), X, W, unsteady={"w_1": "whatever"}) == []


def test_a_weight_blown_up_stays_what_it_is() -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return (x + w.exp().expand(100_000, 4).contiguous().sum(),)

    gm, ctx = hoist(lambda x, w: (x[0, 0] + w.exp().expand(100_000, 4).contiguous(),), X, W)
    assert operators(gm) == ["select.int", "select.int", "expand.default", "contiguous.default", "add.Tensor"]
    assert ctx.slow is not None and [r.numel() for r in ctx.slow.residents] == [4]
    assert "not kept, since it takes more than 1048576 bytes" in ctx.notes[0]
    gm, ctx = same(step, X, W)  # only the sum is read
    assert operators(gm) == ["add.Tensor"] and ctx.slow is not None


def test_all_together_must_not_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest go first; of what they are computed from, the small ones are kept."""
    monkeypatch.setattr(module, "ROOM", 100)

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return (x + w.exp(), x * w.sin(), x[:, :1] * w.cos().repeat(5) + w.tan().repeat(5))

    gm, ctx = same(step, X, W)
    assert ctx.slow is not None and sum(r.numel() * 4 for r in ctx.slow.residents) <= 100
    assert operators(gm).count("repeat.default") == 2 and {"cos.default", "exp.default"}.isdisjoint(operators(gm))
    assert "repeat and 1 others not kept, since all of them take more than 100 bytes" in ctx.notes[0]


def test_expanded_results_stay() -> None:
    """What no copy can have the strides of."""

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return (x + torch.broadcast_tensors(w.exp(), X)[0],)

    gm, _ = same(step, X, W)
    assert "exp.default" not in operators(gm)


def test_empty_values_stay() -> None:
    assert unchanged(lambda x, w: (torch.cat([x[:, :0], w[:0].exp().expand(2, 0), x], 1),), X, W) == []


def test_a_value_of_other_strides_than_traced_is_noticed() -> None:
    resident = torch.empty(2, 3)
    with pytest.raises(ValueError, match="strides"):
        module._fill(resident, torch.empty(3, 2).t())


def test_names_tell_what_computes_a_value() -> None:
    """Two classes share a value exactly where it is of one name."""

    def names(function: Callable[..., object], *examples: Tensor, origin: str = "here") -> set[str]:
        gm = trace(function, *examples)
        found: list[str] = []

        def note(name: str, like: Tensor) -> Tensor:
            found.append(name)
            return keep(name, like)

        last = gm.graph.find_nodes(op="placeholder")[-1].name
        ctx = PassContext(frozen_inputs=frozenset({last}), origins={last: origin}, keep=note)
        run_passes(gm, ctx, [HoistSlow()])
        return set(found)

    first = names(lambda x, w: (x + (w * 2).exp(),), X, W)
    assert first == names(lambda y, x, v: (x - (v * 2).exp() + y,), X, X, W)
    assert first != names(lambda x, w: (x + (w * 2).exp(),), X, W, origin="there")
    assert first != names(lambda x, w: (x + (w * 3).exp(),), X, W)
    assert (
        first != names(lambda x, w: (x + (w * -0.0).exp(),), X, W) != names(lambda x, w: (x + (w * 0.0).exp(),), X, W)
    )
    table = names(lambda x, w: (x + torch.tensor([1.0, 2, 3, 4]).exp(),), X, W)
    assert table == names(lambda x, w: (x * torch.tensor([1.0, 2, 3, 4]).exp(),), X, W)
    assert table != names(lambda x, w: (x + torch.tensor([1.0, 2, 3, 5]).exp(),), X, W)


def test_many_values() -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        for i in range(100):
            x = x * (w * i).exp() + (w + i)
        return (x,)

    gm, ctx = hoist(step, X, W)
    assert operators(gm) == ["mul.Tensor", "add.Tensor"] * 100
    assert ctx.slow is not None and len(ctx.slow.residents) == 200
