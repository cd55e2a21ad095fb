"""Small copies that stand together become one kernel, where none of them depends on another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from cadence_fx.extremes import plant_extremes
from cadence_fx.passes import BatchCopies, PassContext, run_passes
from tests.passes.toolbox import (
    assert_same_bytes,
    context,
    flat_outputs,
    listing,
    on_device,
    run_on_carries,
    slot,
    trace,
)


def batch(function: Callable[..., object], *examples: Tensor, notes: list[str] | None = None) -> fx.GraphModule:
    """The graph of a device rewritten, and run on the host: results and written arguments have the same bytes."""
    ctx = PassContext()
    batched = run_passes(on_device(trace(function, *examples)), ctx, [BatchCopies()])
    inputs = [example.clone() for example in examples]
    for at, value in enumerate(inputs):
        if value.is_floating_point():
            plant_extremes(value, at)
    mine = [value.clone() for value in inputs]
    with torch.no_grad():
        want = flat_outputs(function(*inputs))
        assert_same_bytes(flat_outputs(batched(*mine)), want)
    assert_same_bytes(mine, inputs)
    if notes is not None:
        notes += ctx.notes
    return batched


def operators(gm: fx.GraphModule) -> list[str]:
    return [node.target.__name__ for node in gm.graph.nodes if node.op == "call_function"]


A, B, C = (torch.randn(1, 4, 3) for _ in range(3))


def test_states_of_several_layers() -> None:
    def store(a: Tensor, b: Tensor, c: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        a.copy_(y)
        b.copy_(x)
        c.narrow(1, 0, 2).copy_(y.narrow(1, 2, 2))
        return (y,)

    notes: list[str] = []
    gm = batch(store, A, B, C, A.clone(), notes=notes)
    assert_expected_inline(
        listing(gm),
        """\
def forward(self, a_1, b_1, c_1, x_1):
    mul = aten.mul.Tensor(x_1, 2)
    narrow = aten.narrow.default(c_1, 1, 0, 2)
    narrow_1 = aten.narrow.default(mul, 1, 2, 2)
    _foreach_copy__default = aten._foreach_copy_.default([a_1, b_1, narrow], [mul, x_1, narrow_1])
    return (mul,)""",
    )
    assert notes == ["batch_copies: 3 copies are 1 kernel now"]


def test_work_in_between_ends_a_batch() -> None:
    """Copies that were put early, to free memory or to run beside other work, stay where they are."""

    def store(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        a.copy_(x)
        y = x * 2
        b.copy_(y)
        return (y,)

    assert operators(batch(store, A, B, C)).count("copy_.default") == 2


@pytest.mark.parametrize(
    "store",
    [
        lambda a, b, c: (a.copy_(b), b.copy_(c)),  # the second writes what the first reads
        lambda a, b, c: (a.copy_(b), c.copy_(a)),  # the second reads what the first writes
        lambda a, b, c: (a.copy_(b), a.copy_(c)),
        lambda a, b, c: (a.narrow(1, 0, 2).copy_(b.narrow(1, 0, 2)), a.narrow(1, 1, 2).copy_(c.narrow(1, 0, 2))),
        lambda a, b, c: (a.narrow(1, 0, 2).copy_(b.narrow(1, 0, 2)), c.narrow(1, 0, 2).copy_(a.narrow(1, 1, 2))),
    ],
)
def test_copies_that_depend_on_one_another(store: Callable[..., object]) -> None:
    def run(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        store(a, b, c)
        return (a + 1,)

    assert operators(batch(run, A, B, C)).count("copy_.default") == 2


def test_neighbours_in_one_memory() -> None:
    def run(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        a.narrow(1, 0, 2).copy_(b.narrow(1, 0, 2))
        a.narrow(1, 2, 1).copy_(b.narrow(1, 0, 1))
        b.narrow(1, 3, 1).copy_(a.narrow(1, 3, 1))
        return (a + 1,)

    assert operators(batch(run, A, B)).count("_foreach_copy_.default") == 1


@pytest.mark.parametrize(
    "store",
    [
        lambda a, b, x: (a.copy_(x.transpose(1, 2).contiguous().transpose(1, 2)), b.copy_(x)),  # strides differ
        lambda a, b, x: (a.select(2, 0).copy_(x.select(2, 1)), b.select(2, 0).copy_(x.select(2, 0))),  # not dense
        lambda a, b, x: (a.copy_(x.narrow(1, 0, 1)), b.copy_(x)),  # broadcast
        lambda a, b, x: (a.copy_(x.double()), b.copy_(x)),  # converts
    ],
)
def test_copies_that_would_be_carried_out_one_by_one(store: Callable[..., object]) -> None:
    def run(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        store(a, b, x)
        return (a + 1,)

    assert "_foreach_copy_.default" not in operators(batch(run, A, B, C))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.bool, torch.uint8], ids=str)
def test_dtypes_that_the_kernel_computes_with(dtype: torch.dtype) -> None:
    def store(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        a.copy_(x)
        b.copy_(x)
        return (x,)

    gm = on_device(trace(store, *[torch.zeros(3).to(dtype)] * 3))
    assert not BatchCopies()(gm, PassContext()).modified


def test_large_copies_and_copies_on_the_host_stay() -> None:
    def store(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        a.copy_(x)
        b.copy_(x)
        return (x + 1,)

    assert "_foreach_copy_.default" not in operators(batch(store, *[torch.zeros(20_000)] * 3))
    assert not BatchCopies()(trace(store, A, B, C), PassContext()).modified


def test_result_of_a_copy_that_is_used() -> None:
    def store(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return a.copy_(x) * 2, b.copy_(x) + 1

    assert "_foreach_copy_.default" not in operators(batch(store, A, B, C))


def test_old_and_new_state_are_one_memory() -> None:
    """The destination of a state begins where the old state does, which no storage tells."""

    def step(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        return x * 2, torch.cat([cache, x], 1).narrow(1, 1, 4)

    gm = trace(step, torch.randn(1, 1, 3), A)
    ctx = context(gm, slot(gm, "cache_1", 1, 1))
    rewritten = run_passes(gm, ctx)
    assert operators(rewritten).count("copy_.default") == 4
    batched = run_passes(on_device(rewritten), ctx, [BatchCopies()])
    inputs = [torch.randn(1, 1, 3), A.clone()]
    want = [value.clone() for value in step(*inputs)]
    assert_same_bytes(run_on_carries(batched, ctx, inputs), want)


moves = st.lists(st.tuples(*[st.integers(0, 5)] * 5), min_size=2, max_size=8)


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(moves=moves)
def test_random_copies(moves: Sequence[tuple[int, ...]]) -> None:
    def run(*given_: Tensor) -> tuple[Tensor, ...]:
        for target, source, start, other, length in moves:
            length = 1 + length % 3
            to, of = given_[target % 3], given_[source % 3]
            if target % 3 != source % 3:
                to.narrow(0, start % 4, length).copy_(of.narrow(0, other % 4, length))
        return (given_[0] + 1,)

    batch(run, *[torch.randn(6, 2) for _ in range(3)])


@pytest.mark.gpu
def test_bytes_and_kernels_on_a_device() -> None:
    def store(a: Tensor, b: Tensor, c: Tensor, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        a.copy_(x)
        b.copy_(y)
        c.narrow(0, 3, 40).copy_(z.narrow(0, 1, 40))
        return (x,)

    examples = [torch.randn(1, 512, 2), torch.randn(7, 3), torch.randn(100)] * 2
    gm = run_passes(on_device(trace(store, *examples)), PassContext(), [BatchCopies()])
    assert operators(gm).count("_foreach_copy_.default") == 1
    inputs = [example.cuda() for example in examples]
    for seed, value in enumerate(inputs):
        plant_extremes(value, seed)
    mine = [value.clone() for value in inputs]
    store(*inputs)
    gm(*mine)
    assert_same_bytes(mine, inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        gm(*mine)
        torch.cuda.synchronize()
    launches = [event for event in profile.events() if event.device_type.name == "CUDA"]
    assert len(launches) == 1, [event.name for event in launches]
