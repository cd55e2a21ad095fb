"""Which calls leave the main branch, what they wait for, and what is left alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from cadence_fx.passes import Branches, ParallelBranches, PassContext, RegionSlot
from cadence_fx.passes.costs import duration
from cadence_fx.passes.dependencies import Dependencies
from cadence_fx.passes.graphs import GraphFacts, may_write
from cadence_fx.passes.parallel_branches import branch_work, longest_path
from tests.branches import watched_run
from tests.passes.toolbox import assert_same_bytes, flat_outputs, slot, trace

WIDTH = 8


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight)


def attention(x: Tensor, weights: Tensor, cache: Tensor, layers: int = 3) -> tuple[Tensor, ...]:
    """Per layer: three projections, attention over a cache, a copy into it, two more products."""
    for layer in range(layers):
        q, k, v = (linear(x, weights[i]) for i in range(3))
        q, k = (torch.nn.functional.layer_norm(t, [WIDTH]) for t in (q, k))
        keys, values = (torch.cat([old, new], 1) for old, new in zip(cache[layer].chunk(2, -1), (k, v), strict=True))
        y = linear(torch.nn.functional.scaled_dot_product_attention(q, keys, values), weights[3])
        cache[layer].copy_(torch.cat([keys, values], -1)[:, 3:])
        x = x + linear(torch.nn.functional.gelu(y), weights[4])
    return (x,)


def attention_inputs(layers: int = 3) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, WIDTH), torch.randn(5, WIDTH, WIDTH), torch.randn(layers, 2, 6, 2 * WIDTH)]


def planned(gm: fx.GraphModule, duration: Callable[[fx.Node], float] = duration) -> tuple[Branches | None, str]:
    ctx = PassContext()
    ParallelBranches(duration)(gm, ctx)
    return ctx.branches, ctx.notes[-1]


def branch_of(plan: Branches, name: str) -> int:
    return next(step.branch for step in plan.steps if step.node.name == name)


def waits_of(plan: Branches, name: str) -> set[str]:
    return {wait.name for step in plan.steps if step.node.name == name for wait in step.waits if wait is not None}


def needed(needs: Dependencies, name: str) -> set[str]:
    call = next(i for i, node in enumerate(needs.calls) if node.name == name)
    return {needs.calls[earlier].name for earlier in needs.before[call]}


def large_copies(node: fx.Node) -> float:
    return 24.0 if node.target is torch.ops.aten.copy_.default else duration(node)


def test_small_copies_stay() -> None:
    """Measured: a copy of 100 KiB costs 1.2 us in a row, and a fork holds up what it leaves by as much."""
    with torch.no_grad():
        plan, note = planned(trace(lambda x, weights, cache: attention(x, weights, cache), *attention_inputs()))
    assert plan is not None and "on 2 more branches" in note
    assert {branch_of(plan, "copy_"), branch_of(plan, "cat_2")} == {0}
    assert len({branch_of(plan, name) for name in ("linear", "linear_1", "linear_2")}) == 3


def test_projections_fork_and_copies_drain() -> None:
    with torch.no_grad():
        gm = trace(lambda x, weights, cache: attention(x, weights, cache), *attention_inputs())
    before = gm.code
    plan, note = planned(gm, large_copies)
    assert plan is not None and gm.code == before
    first = {name: branch_of(plan, name) for name in ("linear", "linear_1", "linear_2")}
    assert len(set(first.values())) == 3 and 0 in first.values()
    assert branch_of(plan, "scaled_dot_product_attention") == 0 and branch_of(plan, "layer_norm") == first["linear"]
    assert len(waits_of(plan, "scaled_dot_product_attention")) == 2
    drain = branch_of(plan, "copy_")
    assert drain not in {0, *first.values()} and branch_of(plan, "cat_2") == drain
    assert waits_of(plan, "cat_2") and not waits_of(plan, "copy_")
    assert [join.name for join in plan.joins] == ["copy__1", "copy__2"]
    assert "on 3 more branches" in note and plan.branched < 0.75 * plan.serial
    assert {step.node.meta["branch"] for step in plan.steps} == set(range(4))


def test_the_gain_by_hand() -> None:
    """Three products of 18 us and what little else there is; two of them leave, at a wait each on either side."""

    def step(x: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (linear(x, weights[i]) for i in range(3))
        return (torch.nn.functional.scaled_dot_product_attention(q, k, v),)

    gm = trace(step, torch.randn(1, 3, 8), torch.randn(3, 8, 8))
    ctx = PassContext()
    ParallelBranches(lambda node: 18.0 if "linear" in node.name else 50.0)(gm, ctx)
    assert ctx.branches is not None
    assert ctx.branches.serial == 3 * 18 + 50
    assert ctx.branches.branched == 1.75 + 18 + 1.75 + 50  # from the start to a branch, the product, the join
    assert longest_path(branch_work(gm, ctx, lambda node: 18.0 if "linear" in node.name else 50.0)) == 68


@pytest.mark.parametrize("layers", [1, 3])
def test_bytes_on_branches(layers: int) -> None:
    with torch.no_grad():
        gm = trace(lambda x, weights, cache: attention(x, weights, cache, layers), *attention_inputs(layers))
        plan, _ = planned(gm)
        assert plan is not None
        mine, stock = attention_inputs(layers), attention_inputs(layers)
        for tensors in (mine, stock):
            tensors[0].view(torch.int32)[0, 0, 0] = 0x7FC12345  # a payload
            tensors[2][0, 0, 0] = -0.0
        results, watch = watched_run(gm, plan, attention_inputs(layers), lambda: mine)
        assert_same_bytes([*flat_outputs(results), *mine], [*flat_outputs(gm(*stock)), *stock])
    assert all(watch.launched)


def test_too_little_to_gain_stays_in_one_row() -> None:
    gm = trace(lambda x: (x.exp() + x.sin(), x.cos()), torch.randn(4))
    plan, note = planned(gm)
    assert plan is None and note == "parallel_branches: one branch, 9 us by the estimate"
    assert not any("branch" in node.meta for node in gm.graph.nodes)


def test_draws_stay_in_order_on_the_main_branch() -> None:
    def step(x: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        arms = [torch.nn.functional.dropout(linear(x, weights[i]), 0.5) for i in range(3)]
        quiet = [torch.nn.functional.dropout(linear(x, weights[i]), 0.5, training=False) for i in range(3)]
        return (torch.cat([*arms, *quiet]),)

    gm = trace(step, torch.randn(2, 8), torch.randn(3, 8, 8))
    plan, _ = planned(gm)
    assert plan is not None
    drawing = [step for step in plan.steps if "dropout" in step.node.name]
    assert [step.branch for step in drawing[:3]] == [0, 0, 0] and any(step.branch for step in drawing[3:])


def test_somebody_elses_operator_leaves_the_graph_alone() -> None:
    gm = trace(lambda x, w: (linear(x, w) + linear(x, w + 1),), torch.randn(2, 8), torch.randn(8, 8))
    node = next(node for node in gm.graph.nodes if node.op == "call_function")
    node.target = _somebodys
    plan, note = planned(gm)
    assert plan is None and f"what {node.name} touches is not known" in note


def _somebodys(*args: Tensor) -> Tensor:
    return args[0]


# -- dependencies -----------------------------------------------------------------------------------------------------


def _cuts(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
    old = cache[0].chunk(2, -1)[0] + 1
    cache[1].copy_(x)
    cache[0, :, 4:].copy_(x[:, 4:])
    cache[0].chunk(2, -1)[0].copy_(x[:, :4])
    return old, cache[0, :, 3:5] * 2, cache.sum()


def dependencies(gm: fx.GraphModule, *slots: RegionSlot) -> Dependencies:
    return Dependencies(gm.graph, GraphFacts(gm.graph), slots)


def test_slices_of_a_cache_do_not_wait_for_one_another() -> None:
    needs = dependencies(trace(_cuts, torch.zeros(3, 8), torch.zeros(2, 3, 8)))
    assert needed(needs, "copy_") == set()  # another layer
    assert needed(needs, "copy__1") == set()  # the half of it that was not read
    assert needed(needs, "copy__2") == {"add"}  # written after it was read
    assert needed(needs, "mul") == {"copy__1", "copy__2"}
    assert needed(needs, "sum_1") == {"copy_", "copy__1", "copy__2"}


def test_writes_come_after_one_another_and_after_reads() -> None:
    def step(x: Tensor) -> tuple[Tensor, ...]:
        buffer = torch.empty_like(x)
        buffer[:2].copy_(x[:2])
        y = buffer * 2
        buffer.add_(1)
        buffer[1:].mul_(3)
        return y, buffer + 0

    needs = dependencies(trace(step, torch.zeros(4)))
    assert needed(needs, "mul") == {"empty_like", "copy_"}
    assert needed(needs, "add_") == {"empty_like", "copy_", "mul"}
    assert needed(needs, "mul_") == {"add_"} and needed(needs, "add") == {"add_", "mul_"}


def test_a_value_that_may_be_an_argument_meets_all_of_it() -> None:
    """A dropout that is off gives its input, and is not traced as that; old and new state are one memory as well."""

    def step(x: Tensor, old: Tensor, new: Tensor) -> tuple[Tensor, ...]:
        quiet = torch.nn.functional.dropout(old, 0.5, training=False)
        y = quiet[:2] + 1
        new[2:].copy_(x)
        return y, new

    gm = trace(step, torch.zeros(2), torch.zeros(4), torch.zeros(4))
    assert needed(dependencies(gm), "copy_") == set()
    site = replace(slot(gm, "old_1", 1, 0), destination="new_1")
    assert needed(dependencies(gm, site), "copy_") == {"dropout", "add"}


def test_a_memory_with_too_many_readers_is_kept_in_order() -> None:
    def step(x: Tensor) -> tuple[Tensor, ...]:
        results = [x + i for i in range(300)]
        x[:1].zero_()
        return (*results, x + 300)

    needs = dependencies(trace(step, torch.zeros(4)))
    writer = next(i for i, node in enumerate(needs.calls) if may_write(node))
    reached: set[int] = set()
    pending = [writer]
    while pending:
        new = set(needs.before[pending.pop()]) - reached
        reached |= new
        pending += new
    assert len(reached) == 300


def test_time_is_near_linear() -> None:
    """Eight times the graph in well under what a square of it would take."""

    def seconds(layers: int) -> float:
        with torch.no_grad():
            gm = trace(lambda x, weights, cache: attention(x, weights, cache, layers), *attention_inputs(layers))
        started = time.perf_counter()
        plan, _ = planned(gm)
        assert plan is not None
        return time.perf_counter() - started

    seconds(4)
    assert seconds(64) < 30 * max(seconds(8), 0.05)
