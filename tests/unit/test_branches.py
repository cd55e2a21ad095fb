"""The run on branches, on streams that only keep time: every access is ordered, memory outlives its uses."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.fx as fx
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cadence_fx.branches import BranchedForward, on_branches
from cadence_fx.passes import Branches, PassContext, RegionSlot
from cadence_fx.passes.branch_plan import plan_branches
from cadence_fx.passes.parallel_branches import branch_work
from tests.branches import OneRow, Race, Watched, watched_run
from tests.passes.toolbox import assert_same_bytes, context, flat_outputs, slot, trace

Step = tuple[str, int, int, int, int]
OPERATIONS = (
    "add", "product", "norm", "cat", "slice", "turn", "view", "chunk", "clone", "write", "write_all", "scale_in_place",
    "dropout", "draw", "empty",
)  # fmt: skip


def perform(values: list[Tensor], operation: str, i: int, j: int, m: int, n: int) -> Tensor:
    """One operation along axis 1 on two earlier values (3, ?, 4); the numbers are folded into what fits."""
    v, w = values[-1 - i % len(values)], values[-1 - j % len(values)]
    size = v.shape[1]
    low = m % (size + 1)
    high = low + n % (size - low + 1)
    match operation:
        case "add":
            return v + w if v.shape == w.shape else v * 0.5
        case "product":
            return v.transpose(1, 2).matmul(v).matmul(torch.ones(4, 4)).tanh()[:, :2]
        case "norm":
            return torch.nn.functional.layer_norm(v, [4])
        case "cat":
            return torch.cat([v, w], 1)[:, :12]
        case "slice":
            return v[:, low:high]
        case "turn":
            return v.flip(1).transpose(0, 1).contiguous().transpose(0, 1)
        case "view":
            return v.unsqueeze(0).transpose(1, 2).transpose(1, 2).squeeze(0)
        case "chunk":
            return v.split([low, size - low], 1)[n % 2]
        case "clone":
            return v.clone()
        case "dropout":
            return torch.nn.functional.dropout(v, 0.5, training=bool(m % 2))
        case "draw":
            return v + torch.rand_like(v)
        case "empty":
            return torch.empty_like(v).copy_(w if w.shape == v.shape else v)
        case "write":
            wide = min(high - low, w.shape[1])
            v[:, low : low + wide] = w[:, :wide].clone() if m % 2 else w[:, :wide]
        case "write_all":
            v.fill_(0.25) if m % 2 else v.copy_(v * 1.5)
        case "scale_in_place":
            v[:, low:high].mul_(2)
    return v


def program(steps: Sequence[Step], results: Sequence[int]) -> Callable[..., tuple[Tensor, ...]]:
    def run(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        values = [x + 0, a, b]
        for step in steps:
            values.append(perform(values, *step))
        return tuple(values[which % len(values)] for which in results)

    return run


def traced(function: Callable[..., object], *examples: Tensor) -> fx.GraphModule:
    gm = trace(function, *examples)
    out = gm.graph.output_node()
    if not isinstance(out.args[0], (list, tuple)):
        out.args = ((out.args[0],),)
        gm.recompile()
    return gm


def planned(gm: fx.GraphModule, seed: int, held: int = 1 << 20, ctx: PassContext | None = None) -> Branches:
    """A plan with branches and durations drawn at random: every one must be right, not only those worth having."""
    rng = random.Random(seed)
    work = branch_work(gm, ctx or PassContext(), lambda _: rng.choice([0.0, 1.0, 2.0, 20.0]))
    branch = [0 if pinned else rng.randrange(4) for pinned in work.needs.pinned]
    return plan_branches(work, branch, held)


steps = st.lists(st.tuples(st.sampled_from(OPERATIONS), *[st.integers(0, 11)] * 4), min_size=2, max_size=24)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps, st.tuples(*[st.integers(0, 30)] * 2), st.integers(0, 1 << 30), st.sampled_from([0, 200, 1 << 20]))
def test_random_programs(steps: list[Step], results: tuple[int, int], seed: int, held: int) -> None:
    examples = [torch.randn(3, size, 4) for size in (4, 6, 5)]
    with torch.no_grad():
        gm = traced(program(steps, results), *examples)
        plan = planned(gm, seed, held)

        def inputs() -> list[Tensor]:
            return seeded([example.clone() for example in examples], seed)

        mine, stock = inputs(), inputs()
        want = [*flat_outputs(gm(*stock)), *stock]
        try:
            found, watch = watched_run(gm, plan, inputs(), lambda: seeded(mine, seed))
        except OneRow as reason:  # a dropout that is off gives its input, and is not traced as that
            assume("dropout" not in str(reason))
            raise
        assert_same_bytes([*flat_outputs(found), *mine], want)
    assert watch.waits == sum(len(step.waits) for step in plan.steps) + len(plan.joins)


def seeded(tensors: list[Tensor], seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return tensors


def block(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
    """Two layers of attention over a cache in which each layer writes its own slices."""
    for layer in range(2):
        q, k, v = (torch.nn.functional.linear(x, weight) for weight in (wq, wk, wv))
        keys, values = cache[layer].chunk(2, -1)
        keys[:, 4:].copy_(torch.nn.functional.layer_norm(k, [8]))
        values[:, 4:].copy_(v)
        x = x + torch.nn.functional.scaled_dot_product_attention(q, keys, values)
        cache[layer, :, :4].copy_(cache[layer, :, 2:6].clone())
    return (x,)


def block_inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, 8), *[torch.randn(8, 8) for _ in range(3)], torch.randn(2, 2, 7, 16)]


def test_every_wait_is_needed() -> None:
    """With any one of them left out, the watch finds a race."""
    with torch.no_grad():
        gm = traced(block, *block_inputs())
        found = 0
        for seed in range(6):
            plan = planned(gm, seed)
            _, watch = watched_run(gm, plan, block_inputs(), block_inputs)
            assert watch.waits > 10 and all(watch.launched)
            for number in range(watch.waits):
                try:
                    watched_run(gm, plan, block_inputs(), block_inputs, ignore=number)
                except Race:
                    found += 1
                    continue
                # Only a wait for more than has to be waited for, which would have been done by then, can be spared.
                assert number < watch.waits
        assert found > 60


def test_a_value_that_is_let_go_of_too_early_is_found() -> None:
    with torch.no_grad():
        gm = traced(block, *block_inputs())
        plan = planned(gm, 1)
        users = {node: i for i, step in enumerate(plan.steps) for node in step.node.all_input_nodes}
        moved, steps = 0, list(plan.steps)
        for i, step in enumerate(plan.steps):
            for node in step.drops:
                early = users.get(node, i) + 1
                if early < i and step.branch == plan.steps[early].branch:
                    steps[i] = replace(steps[i], drops=tuple(d for d in steps[i].drops if d is not node))
                    steps[early] = replace(steps[early], drops=(*steps[early].drops, node))
                    moved += 1
        assert moved
        with pytest.raises(Race, match="let go of"):
            watched_run(gm, replace(plan, steps=tuple(steps)), block_inputs(), block_inputs)


def test_old_and_new_state_are_one_memory() -> None:
    """The carry comes in under two names; nothing else tells that a write on one is a write on the other."""

    def step(old: Tensor, x: Tensor, new: Tensor) -> tuple[Tensor, ...]:
        y = old * 2
        new[:, :4].copy_(old[:, 2:6])
        new[:, 4:6].copy_(x)
        return y, new

    def inputs() -> list[Tensor]:
        carry = torch.arange(12.0)
        return [carry.view(2, 6), torch.ones(2, 2), carry.view(2, 6)]

    gm = traced(step, *inputs())
    site: RegionSlot = replace(slot(gm, "old_1", 1, 1), destination="new_1")
    raced = 0
    for seed in range(8):
        watched_run(gm, planned(gm, seed, ctx=context(gm, site)), inputs(), inputs)
        plan = planned(gm, seed)  # which knows nothing of it, and is not followed
        forward = BranchedForward(gm, plan, lambda plan=plan: Watched(plan.count), lambda _: None)  # type: ignore[misc]
        forward(*inputs())
        assert forward.one_row is not None and "shares memory with" in forward.one_row
        raced += 1
    assert raced == 8


def test_inputs_that_are_views_of_one_memory_stay_in_one_row() -> None:
    def step(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return a.add_(x), b + 1

    gm = traced(step, *[torch.zeros(4)] * 3)
    notes: list[str] = []
    forward = BranchedForward(gm, planned(gm, 0), lambda: Watched(4), notes.append)
    whole = torch.zeros(6)
    assert_same_bytes(flat_outputs(forward(torch.ones(4), whole[:4], whole[2:])), [whole[:4], whole[2:] + 1])
    assert notes == ["one branch after all: b_1 shares memory with a_1"]
    assert_same_bytes(flat_outputs(forward(torch.ones(4), whole[:4], whole[2:])), [whole[:4], whole[2:] + 1])


def test_a_view_that_turns_out_to_be_a_copy() -> None:
    def step(x: Tensor) -> tuple[Tensor, ...]:
        return (x.exp().reshape(-1) + 1,)

    gm = traced(step, torch.zeros(3, 4))
    notes: list[str] = []
    forward = BranchedForward(gm, planned(gm, 0), lambda: Watched(4), notes.append)
    forward(torch.zeros(4, 3).t())
    assert notes and "makes a value, and was traced as a view" in notes[0]


def test_an_error_on_a_branch_leaves_all_branches_joined() -> None:
    with torch.no_grad():
        gm = traced(block, *block_inputs())
        plan = planned(gm, 2)
        for number in range(len(plan.steps)):
            watch = Watched(plan.count)
            forward = BranchedForward(gm, plan, lambda watch=watch: watch, lambda _: None)  # type: ignore[misc]
            forward(*block_inputs())
            failing = plan.steps[number].node
            failing.target, target = _fail, failing.target
            try:
                with pytest.raises(ZeroDivisionError), watch:
                    forward(*block_inputs())
            finally:
                failing.target = target
            watch.check_end()


def _fail(*args: object, **kwargs: object) -> None:
    raise ZeroDivisionError


def test_on_the_host_there_is_one_row() -> None:
    gm = traced(lambda x: (x + 1,), torch.zeros(3))
    assert on_branches(gm, planned(gm, 0), torch.device("cpu"), lambda _: None) is None
    assert on_branches(gm, None, torch.device("cuda"), lambda _: None) is None
