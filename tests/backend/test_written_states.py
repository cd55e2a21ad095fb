"""States that code writes in place and hands on: the user holds the very tensor, and its views, as in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cadence_fx
from cadence_fx import Clock, Contract, Pinned, Region
from tests.harness import assert_same, compile_with, counts

CONTRACT = Contract([Clock("frame", 4)], [Region("pos", attribute="pos", axis=0, clock="frame", retention=Pinned(4))])


class Bound(nn.Module):
    """Writes a buffer and binds it anew."""

    def __init__(self) -> None:
        super().__init__()
        self.pos: Tensor
        self.register_buffer("pos", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x + self.pos
        self.pos += x
        return (y,)


class Returned(Bound):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.pos += x
        return self.pos, self.pos[1:], x + 1


class Viewed(Bound):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.pos.add_(x)
        return self.pos.view(2, 2), self.pos[::2], x + self.pos


class Moved(Bound):
    """Gives a buffer other memory, which no replay can do for whoever holds it."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x + self.pos
        self.pos.data = self.pos + x
        return (y,)


KINDS = [Bound, Returned, Viewed]


def play(kind: type[Bound], device: str, *, warm: bool) -> dict[str, Any]:
    """Calls of a compiled module beside eager's, every third with the backend switched off; returns the counts."""
    eager, module = kind().to(device), kind().to(device)
    step, state = compile_with(module, CONTRACT), module.pos
    held: list[tuple[Any, Any]] = []
    with torch.no_grad():
        if warm:
            cadence_fx.warm_up(step, torch.zeros(4, device=device))
        for call in range(8):
            x = torch.randn(4, device=device)
            with cadence_fx.disabled() if call % 3 == 2 else torch.no_grad():
                held.append((eager(x), step(x)))
            assert module.pos is state
            for expected, found in zip(*held[-1], strict=True):
                assert _owners(found, module) == _owners(expected, eager), f"call {call}"
    for expected, found in (pair for results in held for pair in zip(*results, strict=True)):
        assert_same(found, expected, "held")  # views of the state show what later calls have made of it
    assert_same(module.pos, eager.pos, "state")
    return counts(step)


def _owners(result: Tensor, module: Bound) -> list[bool]:
    """Whether a result is the state, and whether it lies in its memory."""
    memory = module.pos.untyped_storage().data_ptr()
    return [result is module.pos, result.untyped_storage().data_ptr() == memory]


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_in_place_is_the_users_own(kind: type[Bound], warm: bool) -> None:
    report = play(kind, "cpu", warm=warm)
    assert report["replays"] == 6 and report["misses"] == {"disabled": 2}


def test_a_state_that_is_given_other_memory_is_served_eager() -> None:
    report = play(Moved, "cpu", warm=True)
    assert report["replays"] == 0 and report["misses"] == {"disabled": 2, "moves_memory": 6}


class Counter(nn.Module):
    """Writes its argument and returns it."""

    def forward(self, x: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        y = x + pos
        pos += 1
        return y, pos


class Handed(Counter):
    def forward(self, x: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        return x + pos, pos.add_(x)


class Shown(Counter):
    def forward(self, x: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        pos += 1
        return pos[1:], pos


@pytest.mark.parametrize("chained", [True, False], ids=["returned", "own"])
@pytest.mark.parametrize("kind", [Counter, Handed, Shown])
def test_an_argument_that_is_written_and_returned_is_the_callers_own(kind: type[Counter], chained: bool) -> None:
    """The caller may pass on what came back, or the tensor that was written: it is the same one."""
    declared = Region("pos", argument="pos", result=1, axis=0, clock="frame", start=4, retention=Pinned(4))
    step, eager = compile_with(kind(), Contract([Clock("frame", 4)], [declared])), kind()
    held = []
    with torch.no_grad():
        cadence_fx.warm_up(step, torch.zeros(4), torch.zeros(4))
        state, expected_state = torch.zeros(4), torch.zeros(4)
        for call in range(5):
            x = torch.randn(4)
            held.append((eager(x, expected_state), step(x, state)))
            assert held[-1][1][1] is state, f"call {call}"
            assert_same(state, expected_state, f"call {call}")
            if chained:
                state, expected_state = held[-1][1][1], held[-1][0][1]
    for expected, found in (pair for results in held for pair in zip(*results, strict=True)):
        assert_same(found, expected, "held")
    # A view that the caller holds shows each call's writes, which only eager makes in its memory.
    assert set(counts(step)["misses"]) <= ({"held_state", "shared_state"} if kind is Shown else set())
