"""Writes on states as early as they may stand: through workspaces, behind every read of what they destroy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.fx as fx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cadence_fx.passes import ForwardStores, PassContext, ReinplaceRetention, run_passes
from cadence_fx.passes.graphs import RUNS_EAGER, GraphFacts, may_write
from cadence_fx.passes.savings import nbytes
from tests.passes.toolbox import assert_same_bytes, context, flat_outputs, on_device, run_on_carries, slot, trace

STEPS, DEPTH, NEW = 3, 4, 2
SCRATCH = frozenset({"rows_1", "work_1"})


def solver(frames: int, kept: int, tail: int) -> Callable[..., tuple[Tensor, ...]]:
    """Steps over layers: new frames go before the old ones, by way of a workspace of the step and one of the call."""

    def run(x: Tensor, carry: Tensor, rows: Tensor, work: Tensor) -> tuple[Tensor, Tensor]:
        n = frames + NEW
        for step in range(STEPS):
            for layer in range(DEPTH):
                k, v = carry[step, layer].chunk(2, 2)
                k, v = torch.cat([x * 1.5, k], 1), torch.cat([x - 1, v], 1)
                x = x + (torch.softmax(x @ k.transpose(1, 2), -1) @ v)
                rows[layer][:, :n].copy_(torch.cat([k, v], 2))
            work[step][:, :, :n].copy_(rows[:, :, :n])
        held = work[:STEPS, :, :, :n]
        start = max(kept, n - tail)
        return x, torch.cat([held.narrow(3, 0, kept), held.narrow(3, start, n - start)], 3).contiguous()

    return run


def examples(frames: int) -> list[Tensor]:
    room = frames + NEW + 1
    shapes = (2, NEW, 4), (STEPS, DEPTH, 2, frames, 8), (DEPTH, 2, room, 8), (STEPS, DEPTH, 2, room, 8)
    return [torch.randn(shape) for shape in shapes]


def rewritten(frames: int, kept: int, tail: int) -> tuple[fx.GraphModule, fx.GraphModule, PassContext]:
    function = solver(frames, kept, tail)
    gm = trace(function, *examples(frames))
    ctx = context(gm, slot(gm, "carry_1", 1, 3))
    ctx.scratch_inputs = SCRATCH
    after = run_passes(gm, ctx, [ForwardStores(), ReinplaceRetention()])
    for _ in range(2):
        given_ = examples(frames)
        want = function(*[value.clone() for value in given_])
        assert_same_bytes(run_on_carries(after, ctx, given_), want)
    return gm, after, ctx


def kernels(gm: fx.GraphModule) -> int:
    """Operators that are more than views."""
    facts = GraphFacts(gm.graph)
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    return sum(bool(may_write(n)) or not any(facts.aliases(arg, n) for arg in n.all_input_nodes) for n in calls)


def peak(gm: fx.GraphModule) -> int:
    """Most bytes made in the graph that are alive at once, each memory from its first node to the last of its users."""
    facts = GraphFacts(gm.graph)
    outside = {facts.alias_class(node) for node in gm.graph.nodes if node.op in ("placeholder", "get_attr")}
    first: dict[fx.Node, tuple[int, int]] = {}
    last: dict[fx.Node, int] = {}
    for node, at in facts.order.items():
        for used in (node, *node.all_input_nodes):
            rep = facts.alias_class(used)
            if rep not in outside and used.op != "output":
                first.setdefault(rep, (at, nbytes(used)))
                last[rep] = at
    changes = [(at, size) for at, size in first.values()] + [(last[rep] + 1, -size) for rep, (_, size) in first.items()]
    most = alive = 0
    for _, size in sorted(changes):
        alive += size
        most = max(most, alive)
    return most


@pytest.mark.parametrize(("frames", "kept", "tail"), [(12, 8, 4), (8, 8, 4), (10, 8, 4)])
def test_workspaces_are_seen_through(frames: int, kept: int, tail: int) -> None:
    """Neither workspace is used; each layer's keys and values go straight into the carry, and are freed behind it."""
    gm, after, ctx = rewritten(frames, kept, tail)
    assert not any(node.users for node in after.graph.find_nodes(op="placeholder") if node.name in SCRATCH)
    writes = after.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    assert len(writes) == 2 * STEPS * DEPTH
    # Before: cat and a copy for each layer, a copy for each step, a cat at the end.
    saved = 2 * STEPS * DEPTH + STEPS + 1
    assert kernels(after) == kernels(gm) - saved + len(writes)
    assert "before the end" in ctx.notes[-2]
    one_layer = 2 * 2 * (frames + NEW) * 4 * 4
    assert peak(after) < peak(gm) and peak(after) < 6 * one_layer


def test_frames_that_stay_where_they_are_are_not_written() -> None:
    """The saturated window keeps its last frames at their place: only the first ones are written."""
    _, after, _ = rewritten(12, 8, 4)
    writes = after.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    assert {node.meta["val"].shape for node in writes} == {(2, 8, 4)}


def test_workspace_that_others_see_is_still_written() -> None:
    gm = trace(solver(12, 8, 4), *examples(12))
    ctx = context(gm, slot(gm, "carry_1", 1, 3))
    after = run_passes(gm, ctx, [ForwardStores(), ReinplaceRetention()])
    given_ = examples(12)
    again = [value.clone() for value in given_]
    want = solver(12, 8, 4)(*again)
    assert_same_bytes(run_on_carries(after, ctx, given_), want)
    assert_same_bytes(given_[2:], again[2:])


def test_nothing_is_written_before_an_operator_that_may_raise() -> None:
    """On the host a call can end halfway; its state must be whole then."""

    def run(x: Tensor, cache: Tensor, table: Tensor, which: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return table[which.long()] + y.sum(), torch.cat([cache, y], 1)

    gm = trace(run, torch.randn(1, 2, 3), torch.randn(1, 6, 3), torch.randn(5, 3), torch.zeros(2))
    after = run_passes(gm, context(gm, slot(gm, "cache_1", 1, 1)), [ReinplaceRetention()])
    names = [node.target.__name__ for node in after.graph.nodes if node.op == "call_function"]
    assert names.index("index.Tensor") < names.index("copy_.default") < names.index("add.Tensor")


@pytest.mark.parametrize("eager", [False, True])
def test_a_device_stops_only_at_what_is_not_recorded(eager: bool) -> None:
    """A launch is all or nothing; between two of them an operator may raise, and the state must be whole there."""

    def run(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return torch.sin(y) + y.sum(), torch.cat([cache, y], 1)

    gm = on_device(trace(run, torch.randn(1, 2, 3), torch.randn(1, 6, 3)))
    if eager:
        next(n for n in gm.graph.nodes if n.target is torch.ops.aten.sin.default).meta[RUNS_EAGER] = {}
    after = run_passes(gm, context(gm, slot(gm, "cache_1", 1, 1)), [ReinplaceRetention()])
    names = [node.target.__name__ for node in after.graph.nodes if node.op == "call_function"]
    assert (names.index("sin.default") < names.index("copy_.default")) is eager
    assert names.index("copy_.default") < names.index("add.Tensor")


Step = tuple[str, int, int, int, int]
OPERATIONS = ("read", "read", "row", "cat", "store", "store_rows", "load", "view", "scale")
numbers = st.integers(0, 11)
programs = st.lists(st.tuples(st.sampled_from(OPERATIONS), *[numbers] * 4), min_size=1, max_size=12)


def perform(values: list[Tensor], carry: Tensor, work: Tensor, step: Step) -> None:
    """One operation; values are (2, 3), carry and workspace (3, 2, n)."""
    operation, i, j, m, n = step
    value = values[-1 - i % len(values)]
    row, low = m % carry.shape[0], n % (carry.shape[2] - 2)
    if operation == "read":
        values.append(value + carry[row, :, low : low + 3])
    elif operation == "row":
        values.append(value + carry[:, j % 2].sum() + carry[row].mean())
    elif operation == "cat":
        values.append(torch.cat([value[:, 1:], carry[row, :, low : low + 1]], 1))
    elif operation == "store":
        work[row, :, :3].copy_(value)
    elif operation == "store_rows":
        work[row, j % 2].fill_(m)
    elif operation == "load":
        values.append(work[row, :, low % 3 : low % 3 + 3] * 1)
    elif operation == "view":
        values.append(carry[row, :, low : low + 3])
    elif operation == "scale":
        values.append(value * 0.5)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(program=programs, extents=st.tuples(st.integers(3, 6), st.integers(3, 6)), picks=st.tuples(*[numbers] * 5))
def test_readers_anywhere(program: list[Step], extents: tuple[int, int], picks: tuple[int, ...]) -> None:
    """New rows are values of any age, slices of the old state and of a workspace, beside readers in any place."""
    old, new = extents

    def run(x: Tensor, carry: Tensor, work: Tensor) -> tuple[Tensor, ...]:
        values = [x * 2]
        work.zero_()
        for step in program:
            perform(values, carry, work, step)
        rows = [torch.nn.functional.pad(values[-1 - which % len(values)], (0, new - 3)) for which in picks[:3]]
        if picks[3] % 3 == 0:
            rows[picks[4] % 3] = work[picks[4] % 3][:, :1].expand(2, new)
        elif picks[3] % 3 == 1 and new <= old:
            rows[picks[4] % 3] = carry[picks[4] % 2, :, old - new :]
        return values[-1], values[len(values) // 2], torch.stack(rows)

    def inputs() -> list[Tensor]:
        return [torch.randn(2, 3), torch.randn(3, 2, old), torch.randn(3, 2, 6)]

    gm = trace(run, *inputs())
    ctx = context(gm, slot(gm, "carry_1", 2, 2))
    ctx.scratch_inputs = frozenset({"work_1"})
    after = run_passes(gm, ctx, [ForwardStores(), ReinplaceRetention()])
    given_ = inputs()
    want = [value.clone() for value in flat_outputs(run(*[value.clone() for value in given_]))]
    assert_same_bytes(run_on_carries(after, ctx, given_), want)


def test_states_traced_in_one_memory() -> None:
    """A read of one could be taken for a read of the other: their writes stay at the end."""

    with FakeTensorMode() as mode, torch.no_grad():
        both = mode.from_tensor(torch.randn(2, 4, 3))

        def step(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
            y = x * 2
            return x + a.sum() + b.sum(), torch.cat([a[1:], y]), torch.cat([b[1:], y])

        gm = make_fx(step, pre_dispatch=True)(mode.from_tensor(torch.randn(1, 3)), both[0], both[1])
    after = run_passes(gm, context(gm, slot(gm, "a_1", 1, 0), slot(gm, "b_1", 2, 0)), [ReinplaceRetention()])
    names = [node.target.__name__ for node in after.graph.nodes if node.op == "call_function"]
    assert "copy_.default" not in names[: max(i for i, name in enumerate(names) if name == "sum.default")]
