"""A plain callable whose objects somebody rebinds between two calls: weights, attributes, lists, closures, globals."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cadence_fx import ExactShapeReplay
from tests.harness import assert_same

FACTOR = 2.0


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = 1.5
        self.gains = [1.0, 2.0]
        self.extra: dict[str, Tensor] = {"bias": torch.ones(4)}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale * self.gains[1] + self.extra["bias"]


def weights(module: Layered) -> dict[str, Tensor]:
    return {name: torch.randn_like(value) for name, value in module.state_dict().items()}


def replace_data(module: Layered) -> None:
    module.get_submodule("layers.2").weight.data = torch.full((4, 4), 0.25)


def assign(module: Layered) -> None:
    torch.manual_seed(4)
    module.load_state_dict(weights(module), assign=True)


def convert(module: Layered) -> None:
    module.double().float()


def swap_layer(module: Layered) -> None:
    torch.manual_seed(5)
    module.layers[1] = nn.Linear(4, 4)


def scale(module: Layered) -> None:
    module.scale = -0.5


def gain(module: Layered) -> None:
    module.gains[1] = 0.5


def extra(module: Layered) -> None:
    module.extra["bias"] = torch.zeros(4)


CHANGES = [replace_data, assign, convert, swap_layer, scale, gain, extra]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_a_change_is_seen_once_and_replayed_afterwards(change: Callable[[Layered], None]) -> None:
    module = Layered()
    eager, replay = copy.deepcopy(module), ExactShapeReplay(module)
    with torch.no_grad():
        for i in range(8):
            if i == 3:
                change(module)
                change(eager)
            x = torch.randn(2, 4)
            assert_same(replay(x), eager(x), f"call {i}")
    ledger = replay.ledger
    assert dict(ledger.misses) == {"rebound": 1} and dict(ledger.invalidations) == {"rebound": 1}
    assert ledger.captures == 2 and ledger.replays == 7
    assert any("another than in the capture" in detail for detail in ledger.details["rebound"])


def test_the_name_of_what_has_changed() -> None:
    module = Layered()
    replay, x = ExactShapeReplay(module), torch.randn(2, 4)
    with torch.no_grad():
        replay(x)
        scale(module)
        replay(x), replay(x)
        replace_data(module)
        replay(x)
    assert list(replay.ledger.details["rebound"]) == [
        "self.scale is another than in the capture",
        "the memory of self.layers.2.weight is another than in the capture",
    ]


def test_a_value_that_never_rests_runs_eager() -> None:
    module = Layered()
    replay = ExactShapeReplay(module)
    with torch.no_grad():
        for i in range(12):
            module.scale = i / 2
            x = torch.randn(2, 4)
            assert_same(replay(x), module(x), f"call {i}")
    assert set(replay.ledger.misses) == {"rebound", "unstable_state"} and replay.ledger.captures == 3


def test_closures_and_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    bias = torch.ones(4)

    def f(x: Tensor) -> Tensor:
        return x * FACTOR + bias

    replay, x = ExactShapeReplay(f), torch.randn(4)
    assert_same(replay(x), f(x), "as captured")
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert_same(replay(x), f(x), "another global")
    assert_same(replay(x), f(x), "captured anew")
    bias = torch.zeros(4)
    assert_same(replay(x), f(x), "another cell")
    assert dict(replay.ledger.misses) == {"rebound": 2}


def test_frozen_is_taken_at_its_word() -> None:
    """On a GPU the class goes on with what it was captured with; a host recording runs the code, and follows."""
    module = Layered()
    replay = ExactShapeReplay(module, frozen=True)
    x = torch.randn(2, 4)
    with torch.no_grad():
        for change in (replace_data, scale, extra):
            replay(x)
            change(module)
        replay(x)
    assert replay.ledger.misses == Counter() and replay.ledger.captures == 1 and replay.ledger.replays == 4


class Count:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0

    def step(self, x: Tensor) -> Tensor:
        self.n += 1
        return x * self.n


class Keeps(nn.Module):
    """Its state is what the code of a kind keeps: `keep` makes it and `step` moves it on."""

    def __init__(self, keep: Callable[[], Any], step: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.kept, self.step = keep(), step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self.kept, x)


def add_in_place(kept: Any, x: Tensor) -> Tensor:
    kept += 1
    return x * float(kept[0])


def double_data(kept: Tensor, x: Tensor) -> Tensor:
    kept.data = kept.data * 2
    return x * kept


KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor], str]] = {
    "slots": (Count, lambda kept, x: kept.step(x), "mutates_state"),
    "bound method": (lambda: Count().step, lambda kept, x: kept(x), "mutates_state"),
    "numpy array": (lambda: np.zeros(1), add_in_place, "mutates_state"),
    "data of a parameter": (lambda: nn.Parameter(torch.ones(1)), double_data, "mutates_state"),
    "iterator": (lambda: itertools.count(1), lambda kept, x: x * next(kept), "opaque_state"),
    "nested replay": (lambda: ExactShapeReplay(Count().step), lambda kept, x: kept(x), "mutates_state"),
    "bit generator": (
        lambda: np.random.PCG64(1),
        lambda kept, x: x * float(np.random.Generator(kept).random()),
        "host_random",
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_trying_a_class_moves_nothing_that_the_callable_keeps(name: str) -> None:
    keep, step, reason = KEPT[name]
    replay, eager = ExactShapeReplay(Keeps(keep, step)), Keeps(keep, step)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(replay(torch.ones(2)), eager(torch.ones(2)))
    assert reason in replay.ledger.refusals and replay.ledger.replays == 0


@pytest.mark.parametrize("change", [Tensor.t, lambda w: w.view(torch.int32), lambda w: w[:2, :2]])
def test_another_geometry_at_the_same_address_is_seen(change: Callable[[Tensor], Tensor]) -> None:
    weight = torch.randn(4, 4)
    replay = ExactShapeReplay(lambda x: weight.sum(0).sum() + x)
    replay(torch.ones(2))
    (entry,) = replay.classes
    assert entry.reached is not None and entry.reached.changed() is None
    weight.data = change(weight)
    assert entry.reached.changed() is not None
    for _ in range(2):
        x = torch.randn(2)
        assert_same(replay(x), weight.sum(0).sum() + x, "output")
    assert replay.ledger.invalidations == {"rebound": 1} and replay.ledger.replays == 2
