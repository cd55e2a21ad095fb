"""Values that are computed once, on a device: launches read them, and writes on weights reach the next launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cadence_fx
from tests.backend import test_kept_values as host
from tests.backend.test_kept_values import CONTRACT, COUNTED, UNCOUNTED, C, Solver
from tests.harness import compile_with

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
WRITES = {
    name: write for name, write in COUNTED.items() if name not in ("load", "assign", "train", "replace", "buffer")
}


@pytest.fixture(autouse=True)
def _serving(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(host, "noise", lambda: torch.randn(1, 2, C, device=DEVICE))
    with torch.no_grad():
        yield


def load(module: nn.Module) -> None:
    module.load_state_dict({name: torch.randn_like(value) for name, value in module.state_dict().items()})


def play() -> host.Play:
    return host.Play(Solver().to(DEVICE))


@pytest.mark.parametrize("write", [*WRITES.values(), load], ids=[*WRITES, "load"])
def test_writes_that_pytorch_counts(write: Callable[[Any], object]) -> None:
    both = play()
    both.call(4)
    for _ in range(2):
        both.both(write)
        both.call(3)
        both.restart()
        both.call(4)
    assert both.missed().keys() <= {"address"} and len(both.notes()) >= 3


@pytest.mark.parametrize("name", ["data", "data of all", "data put back"])
def test_refresh(name: str) -> None:
    both = play()
    both.call(4)
    both.both(UNCOUNTED[name])
    cadence_fx.refresh(both.step)
    both.call(4)
    assert both.missed() == {}


def test_classes_share_what_they_keep() -> None:
    both = play()
    both.call(8)
    sizes = cadence_fx.report(both.step)["bytes"]
    assert sizes["predicted_kept"] == sizes["measured_kept"] == host.KEPT_BYTES


def test_weights_written_on_another_stream() -> None:
    both = play()
    both.call(4)
    for _ in range(4):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            both.both(lambda m: m.time.weight.mul_(1.25))
            both.call(2)
        torch.cuda.current_stream().wait_stream(stream)
        both.call(2)
    assert both.missed() == {}


class Counting(nn.Module):
    """Writes a buffer in every call."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.key = nn.Linear(C, C)
        self.scale: Tensor
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, self.key(x)], 1)
        self.scale.mul_(1.01)
        return frames.sum(1), frames[:, -6:]


class Reading(nn.Module):
    """Keeps values of a buffer that somebody else writes."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.key = nn.Linear(C, C)
        self.scale: Tensor
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, self.key(x)], 1)
        return frames.sum(1) * self.scale.exp(), frames[:, -6:]


def test_a_buffer_that_another_replay_writes() -> None:
    """A launch writes it, and so does eager in its place; both must be seen."""
    scale = torch.ones(C, device=DEVICE)
    reads = Reading(scale).to(DEVICE)
    read = host.Play(reads)
    assert any("operators are run once" in note for note in read.notes())
    writer = compile_with(Counting(scale).to(DEVICE), CONTRACT)
    cadence_fx.warm_up(writer, host.noise(), host.noise())
    cache = host.noise()
    read.call(3)
    for turn in range(3):
        _, cache = writer(host.noise(), cache)
        read.eager.scale.copy_(scale)
        read.call(2)
        assert cadence_fx.report(writer)["replays"] == turn + 1
    assert read.missed() == {}


def test_a_buffer_that_a_replay_of_a_plain_callable_writes() -> None:
    scale = torch.ones(C, device=DEVICE)
    read = host.Play(Reading(scale).to(DEVICE))
    writer = cadence_fx.ExactShapeReplay(Counting(scale).to(DEVICE))
    for _ in range(4):
        writer(host.noise(), host.noise())
        read.eager.scale.copy_(scale)
        read.call(2)
    assert cadence_fx.report(writer)["replays"] >= 3 and read.missed() == {}


def test_memory_goes_with_the_classes() -> None:
    torch.cuda.synchronize()
    both = play()
    both.call(4)
    first = torch.cuda.memory_allocated()
    for _ in range(3):
        both.both(lambda m: m.double().float())
        both.call(4)
        both.restart()
        both.call(4)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() < first + (1 << 20)
