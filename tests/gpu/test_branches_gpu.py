"""Graphs captured on several streams: equal bytes over many launches, repaired captures, memory that is used again."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor

import cadence_fx
from cadence_fx import Clock, Contract, KeepLast, Region
from cadence_fx.branches import BranchedForward, CudaStreams
from cadence_fx.passes import Branches, ParallelBranches, PassContext
from cadence_fx.passes.branch_plan import plan_branches
from cadence_fx.passes.parallel_branches import branch_work
from cadence_fx.recorder import DevicePool, record
from tests.harness import compile_with
from tests.passes.toolbox import assert_same_bytes, flat_outputs, trace

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
LAYERS, FRAMES, WIDTH = 6, 28, 256


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield


def stack(x: Tensor, weights: Tensor, kernels: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
    """Layers of attention over a cache, a convolution and two products; each layer moves its own part of the cache."""
    for layer in range(LAYERS):
        y = torch.nn.functional.layer_norm(x, [WIDTH])
        q, k, v = (torch.nn.functional.linear(y, weights[i]) for i in range(3))
        q, k = (torch.nn.functional.layer_norm(t, [WIDTH]) for t in (q, k))
        keys, values = (torch.cat([old, new], 1) for old, new in zip(cache[layer].chunk(2, -1), (k, v), strict=True))
        q, keys, values = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (q, keys, values))
        y = torch.nn.functional.scaled_dot_product_attention(q, keys, values).transpose(1, 2).flatten(2)
        y = torch.nn.functional.linear(y, weights[3])
        y = torch.nn.functional.conv1d(y.transpose(1, 2), kernels, padding=1).transpose(1, 2)
        joined = torch.cat([keys, values], -1).transpose(1, 2).flatten(2)
        cache[layer].copy_(joined[:, FRAMES:])
        x = x + torch.nn.functional.linear(torch.nn.functional.gelu(y), weights[4])
    return (x,)


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, FRAMES, WIDTH), (5, WIDTH, WIDTH), (WIDTH, WIDTH, 3), (LAYERS, 2, 4 * FRAMES, 2 * WIDTH)]
    return [torch.randn(shape, device=DEVICE) * scale for shape, scale in zip(shapes, (1, 0.06, 0.03, 1), strict=True)]


def branched(gm: fx.GraphModule, plan: Branches | None = None) -> tuple[BranchedForward, list[str]]:
    if plan is None:
        ctx = PassContext()
        ParallelBranches()(gm, ctx)
        plan = ctx.branches
    assert plan is not None and plan.count > 2
    notes: list[str] = []
    return BranchedForward(gm, plan, lambda: CudaStreams(DEVICE, plan.count), notes.append), notes


def replays(run: Callable[..., Any], rounds: int = 50) -> list[Tensor]:
    """The outputs of every launch of a recording, and its inputs as the last one has left them."""
    mine = inputs()
    recording = record(lambda: run(*mine), DEVICE)
    for tensor, value in zip(mine, inputs(), strict=True):
        tensor.copy_(value)
    found = []
    for _ in range(rounds):
        found += [output.clone() for output in flat_outputs(recording.launch())]
        mine[0].copy_(found[-1])
    torch.cuda.synchronize()
    recording.close()
    return [*found, *mine]


def test_attention_on_branches_over_many_launches() -> None:
    gm = trace(stack, *inputs())
    run, notes = branched(gm)
    assert_same_bytes(replays(run), replays(gm.forward))
    assert not notes


@pytest.mark.parametrize("seed", range(6))
def test_any_plan_gives_the_same_bytes(seed: int) -> None:
    """Branches drawn at random: far more forks than would pay, with memory let go of as early as it can be."""
    rng = random.Random(seed)
    gm = trace(stack, *inputs())
    work = branch_work(gm, PassContext(), lambda _: rng.choice([1.0, 20.0]))
    plan = plan_branches(work, [0 if pinned else rng.randrange(5) for pinned in work.needs.pinned], held=1 << 18)
    run, notes = branched(gm, plan)
    assert_same_bytes(replays(run, rounds=20), replays(gm.forward, rounds=20))
    assert not notes


def test_memory_is_used_again_on_every_branch() -> None:
    """The pool of a graph on branches is not far larger than that of one row."""
    gm = trace(stack, *inputs())
    run, _ = branched(gm)
    sizes = []
    for forward in (gm.forward, run):
        mine = inputs()
        recording = record(lambda forward=forward, mine=mine: forward(*mine), DEVICE)  # type: ignore[misc]
        sizes.append(recording.nbytes)
        recording.close()
        torch.cuda.empty_cache()
    assert sizes[1] < sizes[0] + (200 << 20)  # segments and library workspaces of the side streams


class Failing:
    """Raises at the node with this number from the third run on, which is the capture."""

    def __init__(self, gm: fx.GraphModule, plan: Branches, number: int) -> None:
        self.runs, self.fails = 0, True
        node = plan.steps[number].node
        target = node.target

        def call(*args: Any, **kwargs: Any) -> Any:
            self.runs += 1
            if self.runs == 3 and self.fails:
                raise ZeroDivisionError
            return target(*args, **kwargs)  # type: ignore[operator]

        node.target = call


def test_a_capture_that_fails_on_a_branch_is_repaired() -> None:
    gm = trace(stack, *inputs())
    expected = replays(gm.forward, rounds=3)
    healthy = record(lambda: [torch.rand(4, device=DEVICE)], DEVICE)
    ctx = PassContext()
    ParallelBranches()(gm, ctx)
    assert ctx.branches is not None
    sides = [i for i, step in enumerate(ctx.branches.steps) if step.branch and step.node not in ctx.branches.views]
    for number in (sides[0], sides[len(sides) // 2], sides[-1]):
        broken = trace(stack, *inputs())
        ctx = PassContext()
        ParallelBranches()(broken, ctx)
        plan = ctx.branches
        assert plan is not None
        Failing(broken, plan, number)
        run, _ = branched(broken, plan)
        mine = inputs()
        with pytest.raises(ZeroDivisionError):
            record(lambda run=run, mine=mine: run(*mine), DEVICE)  # type: ignore[misc]
        torch.rand(4, device=DEVICE)
        healthy.launch()
        whole, notes = branched(trace(stack, *inputs()))
        assert_same_bytes(replays(whole, rounds=3), expected)
        assert not notes
    pool = DevicePool.of(DEVICE)
    for i in range(3):
        with torch.cuda.stream(pool.side(i)):
            assert not torch.cuda.is_current_stream_capturing()
    healthy.close()


def test_an_invalid_operation_on_a_branch_is_repaired() -> None:
    """A read by the host invalidates the whole capture, side streams with it."""
    gm = trace(stack, *inputs())
    ctx = PassContext()
    ParallelBranches()(gm, ctx)
    plan = ctx.branches
    assert plan is not None
    step = next(step for step in plan.steps if step.branch and step.node not in plan.views)
    target = step.node.target
    runs = [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        runs[0] += 1
        result = target(*args, **kwargs)  # type: ignore[operator]
        if runs[0] == 3:
            result.sum().item()
        return result

    step.node.target = call
    run, _ = branched(gm, plan)
    mine = inputs()
    with pytest.raises(RuntimeError):
        record(lambda: run(*mine), DEVICE)
    step.node.target = target
    whole, _ = branched(trace(stack, *inputs()))
    assert_same_bytes(replays(whole, rounds=3), replays(gm.forward, rounds=3))
    torch.rand(4, device=DEVICE)


def test_draws_on_the_main_branch_follow_the_generator() -> None:
    def step(x: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        parts = [torch.nn.functional.dropout(torch.nn.functional.linear(x, weights[i]), 0.5) for i in range(3)]
        quiet = [torch.nn.functional.linear(x, weights[i]).tanh() for i in range(3)]
        return (torch.cat([*parts, *quiet, torch.randn_like(x)]),)

    given = [torch.randn(64, 512, device=DEVICE), torch.randn(3, 512, 512, device=DEVICE)]
    gm = trace(step, *given)
    ctx = PassContext()
    ParallelBranches()(gm, ctx)
    assert ctx.branches is not None
    plan = ctx.branches
    run = BranchedForward(gm, plan, lambda: CudaStreams(DEVICE, plan.count), lambda _: None)
    recording = record(lambda: run(*given), DEVICE)
    for seed in range(5):
        torch.manual_seed(seed)
        got = [output.clone() for output in flat_outputs(recording.launch())]
        after = torch.cuda.get_rng_state()
        torch.manual_seed(seed)
        assert_same_bytes(got, flat_outputs(gm(*given)))
        assert torch.equal(after, torch.cuda.get_rng_state())
    recording.close()


class Attend(torch.nn.Module):
    """Attention over the last frames, whose projections have the width to run beside one another."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (projection(x) for projection in self.projections[:3])
        keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)
        y = torch.nn.functional.scaled_dot_product_attention(q, keys, values)
        return self.projections[3](y) + x, keys[:, -2 * FRAMES :], values[:, -2 * FRAMES :]


def test_a_stream_compiled_with_branches() -> None:
    torch.manual_seed(0)
    module = Attend().to(DEVICE)
    regions = [
        Region(name, argument=name, result=i, axis=1, clock="frame", start=FRAMES, retention=KeepLast(2 * FRAMES))
        for i, name in enumerate(("keys", "values"), 1)
    ]
    step = compile_with(copy.deepcopy(module), Contract([Clock("frame", FRAMES)], regions))
    state = [torch.randn(2, FRAMES, WIDTH, device=DEVICE) for _ in range(2)]
    x = torch.randn(2, FRAMES, WIDTH, device=DEVICE)
    cadence_fx.warm_up(step, x, *(tensor.clone() for tensor in state))
    notes = [note for entry in cadence_fx.report(step)["class_table"] for note in entry["notes"]]
    assert any(note.startswith("parallel_branches: ") for note in notes), notes
    assert "admitted: rewritten in place" in notes and not any("one branch" in note for note in notes), notes
    eager, live = [tensor.clone() for tensor in state], [tensor.clone() for tensor in state]
    for _ in range(40):
        y, *eager = module(x, *eager)
        z, *live = step(x, *live)
        assert_same_bytes([z, *live], [y, *eager])
        x = y
