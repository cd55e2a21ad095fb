"""Inference of states that are cut in every call: the growth is the right one, or none is said."""

from __future__ import annotations

import copy
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cadence_fx
from cadence_fx import KeepLast, Pinned, PromptPlusLast, infer
from tests import always_cut as cut
from tests.harness import assert_same
from tests.unprepared import C, frames


def sound(size: int) -> Tensor:
    return torch.randn(1, C, size)


Added = dict[str, tuple[int, Any]]
KEPT = KeepLast(3)

# Module, arguments of a call, frames that a call adds to each state and its retention, strides of the clocks.
TOLD: list[tuple[str, Callable[[], nn.Module], tuple[Tensor, ...], Added, dict[str, int]]] = [
    ("as they are", lambda: cut.Context("plain"), (sound(8),), {"state": (8, KEPT)}, {"frame": 8}),
    ("computed", lambda: cut.Context("tanh"), (sound(8),), {"state": (8, KEPT)}, {"frame": 8}),
    ("as many as are kept", lambda: cut.Context("tanh"), (sound(3),), {"state": (3, KEPT)}, {"frame": 3}),
    ("fewer", lambda: cut.Context("tanh"), (sound(2),), {"state": (2, KEPT)}, {"frame": 2}),
    ("from one frame", lambda: cut.Context("tanh", 1), (sound(8),), {"state": (8, KEPT)}, {"frame": 8}),
    ("from nothing", lambda: cut.Context("tanh", 0), (sound(8),), {"state": (8, KEPT)}, {"frame": 8}),
    ("more frames", lambda: cut.Context("up"), (sound(8),), {"state": (16, KEPT)}, {"frame": 8}),
    ("fewer frames", lambda: cut.Context("down"), (sound(9),), {"state": (5, KEPT)}, {"frame": 5}),
    ("in front", lambda: cut.Context("prepend"), (sound(8),), {"state": (8, KeepLast(3, "prepend"))}, {"frame": 8}),
    ("not the newest", lambda: cut.Context("ahead"), (sound(8),), {"state": (6, KEPT)}, {"frame": 6}),
    ("in place", cut.InPlace, (sound(8),), {"state": (8, KEPT)}, {"frame": 8}),
    ("strided", cut.Strided, (sound(16),), {f"left_{i}": (16 >> i, KeepLast(2)) for i in range(3)}, {"frame": 16}),
    ("spectrum", cut.Spectrum, (torch.randn(1, 32),), {"left": (32, KeepLast(4))}, {"frame": 32}),
    ("delays", cut.DelayLine, (sound(8),), {"long": (8, KeepLast(5)), "short": (8, KeepLast(1))}, {"frame": 8}),
    ("sinks", cut.Sinks, (frames(9),), dict.fromkeys("kv", (9, PromptPlusLast(2, 4))), {"frame": 9}),
    (
        "two streams",
        cut.TwoStreams,
        (frames(8), frames(4)),
        {"heard": (8, KEPT), "said": (2, KeepLast(1))},
        {"audio": 8, "text": 2},
    ),
    ("summary", cut.Summary, (frames(8),), {"frames": (8, KEPT), "tokens": (1, KeepLast(2))}, {"x": 8, "frame": 1}),
]


@pytest.mark.parametrize("name, build, call, added, strides", TOLD, ids=[row[0] for row in TOLD])
def test_what_a_call_adds(
    name: str, build: Callable[[], nn.Module], call: tuple[Tensor, ...], added: Added, strides: dict[str, int]
) -> None:
    found = infer(build(), call)
    assert found.contract is not None, found
    contract = found.contract
    assert {clock.name: clock.stride for clock in contract.clocks} == strides
    assert {
        region.name: (region.added(contract.frame_stride(region)), region.retention) for region in contract.regions
    } == added
    assert {found.facts_of(region)["growth"].confidence for region in added} == {"proved"}


@pytest.mark.parametrize(
    "kind",
    [cut.Dropped, cut.Reworked, cut.OneByOne, cut.Counted, cut.Phase, cut.Overlap, cut.Levels],
    ids=lambda kind: kind.__name__,
)
def test_what_nothing_tells_is_not_said(kind: type[nn.Module]) -> None:
    found = infer(kind(), (frames(8),))
    assert found.contract is not None, found
    (region,) = found.contract.regions
    assert isinstance(region.retention, Pinned) and "growth" not in found.facts_of(region.name)
    (clock,) = found.contract.clocks
    assert (clock.name, clock.stride) == ("call", 1)  # no clock is made up


@pytest.mark.parametrize("kind", [cut.Dropped, cut.OneByOne])
def test_no_contract_for_a_growth_between_two_extents_that_nothing_tells(kind: Any) -> None:
    """A state that begins shorter cannot be pinned."""
    found = infer(kind(1), (frames(8),))
    assert found.contract is None
    assert "self.state: ambiguous: a call adds 3 frames or more" in found.problems[0]
    assert "always_cut.py:" in found.problems[0]


@pytest.mark.parametrize(
    "way, size, stride, flush, growth",
    [
        ("tanh", 6, 8, [6], 1),
        ("tanh", 2, 8, [2], 1),
        ("prepend", 6, 8, [6], 1),
        ("up", 6, 8, [6], 2),
        ("down", 5, 4, [3], 1),
        ("ahead", 6, 6, [4], 1),
    ],
)
def test_a_call_that_ends_a_turn(way: str, size: int, stride: int, flush: list[int], growth: int) -> None:
    found = infer(cut.Context(way), (sound(8),), (sound(size),))
    assert found.contract is not None, found
    (clock,) = found.contract.clocks
    assert (clock.stride, list(clock.flush)) == (stride, flush)
    assert found.contract.region("state").growth == growth
    assert [entry.size(flush[0]) for entry in found.contract.inputs] == [size]


@pytest.mark.parametrize(
    "kind, sizes, growth",
    [
        (cut.Strided, (16, 10), [1, Fraction(1, 2), Fraction(1, 4)]),  # of 4 frames 2 are left, and 10 of 16
        (cut.Pairs, (8, 5), [1]),  # of 28 frames 10
    ],
)
def test_sizes_that_no_clock_explains(kind: type[nn.Module], sizes: tuple[int, int], growth: list[Any]) -> None:
    draw = sound if kind is cut.Strided else frames
    found = infer(kind(), *((draw(size),) for size in sizes))
    assert found.contract is not None and not found.contract.clocks[0].flush and not found.contract.inputs
    assert [region.growth for region in found.contract.regions] == growth
    assert any("no flush is declared" in text for text in found.ambiguous)


@pytest.mark.parametrize("kind", [cut.Strided, cut.Sinks, cut.Reworked], ids=lambda kind: kind.__name__)
def test_the_backend_serves_it(kind: Callable[[], nn.Module]) -> None:
    module = kind()
    first = sound(16) if kind is cut.Strided else frames(9)
    options: dict[str, Any] = {"contract": infer(module, (first,)).contract}
    torch._dynamo.reset()
    with torch.no_grad():
        step, eager = torch.compile(module, backend=cadence_fx.cadence, options=options), copy.deepcopy(module)
        cadence_fx.warm_up(step, first)
        for number in range(5):
            x = torch.randn_like(first)
            assert_same(step(x), eager(x), f"call {number}")
    assert cadence_fx.report(step)["replays"] == 5


def test_an_object_among_the_arguments_is_copied_and_not_followed() -> None:
    class Cache:
        def __init__(self) -> None:
            self.seen = torch.zeros(1, 2, C)

    def step(x: Tensor, cache: Cache) -> Tensor:
        cache.seen = torch.cat([cache.seen, x], 1)[:, -6:]
        return cache.seen.mean(1)

    given = Cache()
    found = infer(step, (frames(8), given))
    assert found.contract is None and given.seen.shape == (1, 2, C)
    assert any(text.startswith("cache: is an object") for text in found.ambiguous)
