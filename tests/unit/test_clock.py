"""Clocks: the three forms, their advances, and what each refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from cadence_fx.clock import Clock
from cadence_fx.errors import ContractError


def test_base_clock_advances_stride_then_flush_lengths() -> None:
    clock = Clock("frames", 50, flush=[56, 2, 50, 2])
    assert clock.flush == (2, 50, 56)
    assert clock.advances == (50, 2, 56)
    assert clock.is_base and not clock.is_derived and not clock.is_periodic


@pytest.mark.parametrize("flush", [range(2, 7, 2), [6, 4, 2], {2, 4, 6}, (n for n in (2, 4, 6))])
def test_flush_takes_any_iterable(flush: Any) -> None:
    assert Clock("frames", 50, flush=flush).flush == (2, 4, 6)


def test_clocks_are_values() -> None:
    clock = Clock("frames", 50, flush=range(2, 57, 2))
    assert clock == Clock("frames", 50, flush=list(range(2, 57, 2)))
    assert len({clock, Clock("frames", 50), Clock("frames", 50)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        clock.stride = 5  # type: ignore[misc]


def test_symbol_is_a_nonnegative_integer() -> None:
    symbol = Clock("frames", 50).symbol
    assert symbol.name == "frames" and symbol.is_integer and symbol.is_nonnegative
    assert symbol == Clock("frames", 10).symbol  # the same counter, whatever its stride


def test_derived_and_periodic_forms() -> None:
    derived = Clock("mel", of="tokens", rate=Fraction(4, 2))
    assert derived.is_derived and derived.rate == 2 and type(derived.rate) is int
    with pytest.raises(ContractError, match="ask the contract"):
        derived.advances  # noqa: B018
    periodic = Clock("step", period=10)
    assert periodic.is_periodic and periodic.advances == ()


UNTYPED: Any = Clock  # for arguments that a type checker would refuse first


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: UNTYPED("frames"), "clocks.frames.stride"),
        (lambda: UNTYPED("frames", 50, period=2), "clocks.frames.period"),
        (lambda: UNTYPED("frames", 50, of="tokens"), "clocks.frames.of"),
        (lambda: UNTYPED("frames", 0), "clocks.frames.stride"),
        (lambda: UNTYPED("frames", -1), "clocks.frames.stride"),
        (lambda: UNTYPED("frames", True), "clocks.frames.stride"),
        (lambda: UNTYPED("frames", 2.0), "clocks.frames.stride"),
        (lambda: UNTYPED("frames", 50, lookahead=-1), "clocks.frames.lookahead"),
        (lambda: UNTYPED("frames", 50, flush=[0]), "clocks.frames.flush"),
        (lambda: UNTYPED("frames", 50, flush=[2.5]), "clocks.frames.flush"),
        (lambda: UNTYPED("frames", 50, flush=4), "clocks.frames.flush"),
        (lambda: UNTYPED("frames", 50, flush="24"), "clocks.frames.flush"),
        (lambda: UNTYPED("frames", 50, rate=2), "clocks.frames.rate"),
        (lambda: UNTYPED("mel", of="tokens", rate=0), "clocks.mel.rate"),
        (lambda: UNTYPED("mel", of="tokens", rate=0.5), "clocks.mel.rate"),
        (lambda: UNTYPED("mel", of="tokens", flush=[2]), "clocks.mel.flush"),
        (lambda: UNTYPED("mel", of=3), "clocks.mel.of"),
        (lambda: UNTYPED("step", period=0), "clocks.step.period"),
        (lambda: UNTYPED("step", period=2, lookahead=1), "clocks.step.lookahead"),
        (lambda: UNTYPED("two words", 1), "name"),
        (lambda: UNTYPED(7, 1), "name"),
    ],
)
def test_a_wrong_clock_names_its_field(build: Callable[[], object], field: str) -> None:
    with pytest.raises(ContractError) as caught:
        build()
    assert caught.value.field == field
    assert field in str(caught.value)


def test_describe_shortens_long_flush_lists() -> None:
    assert Clock("f", 50, lookahead=6, flush=range(2, 57, 2)).describe() == (
        "f: 50 a call, look-ahead 6, flush 2..56 (28 lengths)"
    )
    assert Clock("f", 50, flush=[2, 4]).describe() == "f: 50 a call, flush 2, 4"
    assert Clock("mel", of="f", rate=Fraction(1, 2)).describe() == "mel: 1/2 x f"
    assert Clock("step", period=10).describe() == "step: 10 ticks inside every call"
