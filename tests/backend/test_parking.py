"""Workspaces that no class uses may lose their memory: calls replay without it, and eager calls get it for a while."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cadence_fx
from cadence_fx import Clock, Contract, KeepLast, Region
from cadence_fx.errors import NotServed
from cadence_fx.lookup import program_of
from cadence_fx.parking import awake, is_parked, park
from tests.harness import assert_same, compile_with
from tests.toys import B, C, Toy

X = (B, 2, C)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Passes(Toy):
    """The new frames go through a workspace on their way into the state."""

    work: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("work", torch.zeros(B, 12, C), persistent=False)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        raw = torch.cat([cache, self.key(x)], 1)
        self.work[:, : raw.size(1)] = raw
        return self.attend(x, raw), self.work[:, : raw.size(1)][:, -6:].clone()


class Reads(Passes):
    """A kernel reads the workspace, and more of it than was written: it must stay."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        raw = torch.cat([cache, self.key(x)], 1)
        self.work[:, : raw.size(1)] = raw
        return self.attend(x, raw) + self.work.sum() * 0, raw[:, -6:]


class HandsOut(Passes):
    """A result is a view of the workspace."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        state = super().forward(x, cache)[1]
        return self.work[:, :2], state


def contract() -> Contract:
    regions = (
        Region("cache", argument="cache", result=1, axis=1, clock="frames", start=2, retention=KeepLast(6)),
        Region("work", attribute="work", axis=1, clock="frames", retention=KeepLast(6), lifetime="unit"),
    )
    return Contract((Clock("frames", 2),), regions)


def start(kind: type[Passes], *, parked: bool) -> tuple[Passes, Any]:
    module = kind()
    step = compile_with(module, contract())
    if parked:
        park([module.work])
    cadence_fx.warm_up(step, torch.randn(X), torch.randn(X))
    return module, step


def stream(module: Passes, step: Any, calls: int) -> None:
    """Calls beside eager ones, byte for byte."""
    mine = theirs = torch.randn(X)
    for _ in range(calls):
        x = torch.randn(X)
        with awake([module.work]):
            want, theirs = module(x, theirs)
            want = want.clone()
        got, mine = step(x, mine)
        assert_same(got, want, "output")
        assert_same(mine, theirs, "state")


def test_replay_without_a_workspace() -> None:
    module, step = start(Passes, parked=True)
    stream(module, step, 6)
    assert is_parked(module.work)
    assert program_of(step, "test").ledger.replays == 6
    with cadence_fx.disabled():
        stream(module, step, 2)
    assert is_parked(module.work)


def test_workspace_that_nobody_uses_may_move() -> None:
    module, step = start(Passes, parked=False)
    stream(module, step, 2)
    park([module.work])
    stream(module, step, 2)
    module.work.untyped_storage().resize_(1 << 20)
    stream(module, step, 2)
    ledger = program_of(step, "test").ledger
    assert ledger.replays == 6 and not ledger.misses


def test_workspace_that_a_kernel_reads_stays_awake() -> None:
    module, step = start(Reads, parked=True)
    assert not is_parked(module.work)
    stream(module, step, 4)
    assert program_of(step, "test").ledger.replays == 4


def test_a_launch_counts_as_a_write_of_the_workspace_that_it_uses() -> None:
    """A graph launches past PyTorch's count, and a backward that needs what the workspace held must raise."""
    for kind, used in ((Reads, True), (Passes, False)):
        _, step = start(kind, parked=True)
        for _, table in program_of(step, "test").graphs:
            for entry in table.classes.values():
                assert ("self.work" in [table.names[i] for i in entry.touched]) == used


def test_result_that_is_a_view_of_a_workspace_keeps_it() -> None:
    module, step = start(Passes, parked=True)
    handing, hands = start(HandsOut, parked=True)
    out, _ = hands(torch.randn(X), torch.randn(X))
    assert not is_parked(handing.work) and out.isfinite().all()
    assert is_parked(module.work)


class Saved(nn.Module):
    """No class uses the workspace, and autograd saves a part of it for the backward. What is written there requires
    grad where `trained`."""

    work: Tensor

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(C))
        self.trained = trained
        self.register_buffer("work", torch.zeros(12, B, C), persistent=False)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        raw = torch.cat([cache, x * self.weight if self.trained else x], 0)
        self.work[: raw.size(0)] = raw
        kept = self.work[: raw.size(0)]
        return kept * self.weight, kept[-6:].clone()


def saved_contract() -> Contract:
    cache, work = contract().regions
    return Contract(contract().clocks, (dataclasses.replace(cache, axis=0), dataclasses.replace(work, axis=0)))


@pytest.mark.parametrize("trained", [False, True])
def test_a_backward_reads_the_workspace_of_a_call_that_autograd_has_recorded(trained: bool) -> None:
    """Its memory was given back, and the backward read what is at address 0."""
    module = Saved(trained)
    twin = copy.deepcopy(module)
    step = compile_with(module, saved_contract())
    park([module.work])
    x, cache = torch.randn(2, B, C), torch.randn(2, B, C)
    cadence_fx.warm_up(step, x, cache)
    assert is_parked(module.work) and not module.work.requires_grad
    for _ in range(2):
        with torch.enable_grad():
            (y, new), (want, expected) = step(x, cache), twin(x, cache)
            assert_same(y, want, "output")
            assert_same(new, expected, "state")
            assert module.work.requires_grad == twin.work.requires_grad == trained  # a write of it does that in eager
            y.sum().backward(retain_graph=True)
            want.sum().backward(retain_graph=True)
        assert module.weight.grad is not None and twin.weight.grad is not None
        assert_same(module.weight.grad, twin.weight.grad, "gradient")
        assert not is_parked(module.work)
        assert_same(step(x, cache)[0], twin(x, cache)[0], "output of a replay")
    ledger = program_of(step, "test").ledger
    assert ledger.replays == 2 and ledger.misses == {"requires_grad": 2}


def test_a_backward_through_a_parked_workspace_raises() -> None:
    module = Saved(trained=False)
    with torch.enable_grad():
        y, _ = module(torch.randn(2, B, C), torch.randn(2, B, C))
        park([module.work])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_warm_up_in_grad_mode_leaves_no_graph_behind() -> None:
    module = Saved(trained=True)
    step = compile_with(module, saved_contract())
    with torch.enable_grad(), pytest.raises(NotServed, match="requires_grad"):
        cadence_fx.warm_up(step, torch.randn(2, B, C), torch.randn(2, B, C))
    assert not module.work.requires_grad and module.work.grad_fn is None


def test_audit_of_a_parked_step() -> None:
    module, step = start(Passes, parked=True)
    cache = torch.randn(X)
    with cadence_fx.audit(step) as ledger:
        for _ in range(3):
            _, cache = step(torch.randn(X), cache)
    assert ledger.calls == 3 and is_parked(module.work)


@pytest.mark.parametrize("inference", [False, True])
def test_awake_gives_zeros_and_takes_them_back(inference: bool) -> None:
    with torch.inference_mode(inference):
        base = torch.randn(4, 6)
        views = [base, base[1:], base.t()]
        park(views)
    assert all(map(is_parked, views))
    with awake(views) as block:
        assert not base.any() and base.untyped_storage().nbytes() == 96
        block.keep([views[2]])
    assert not is_parked(base)
    park([base])
    with pytest.raises(KeyError), awake([base]):
        raise KeyError
    assert is_parked(base) and not is_parked(torch.empty(0))
