"""How many classes a contract reaches, from its numbers alone (paper section 3.5, equation 7).

One region that starts at A-, is bounded by A and grows by s frames a call visits K = ceil((A - A-) / s) + 1 extents.
The rest is how several regions, turn boundaries and flush lengths combine; nothing here enumerates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING

from cadence_fx._region import Region

if TYPE_CHECKING:
    from cadence_fx.contract import Contract


@dataclass(frozen=True, slots=True)
class Width:
    """The number of classes, how it comes about, and whether it is the count itself or an upper bound of it."""

    classes: int
    arithmetic: str
    exact: bool

    def __str__(self) -> str:
        return f"{self.arithmetic}{'' if self.exact else ' at most'}"


def region_extents(region: Region, stride: int) -> int:
    """K of one region: the extents it visits when every call advances ``stride`` ticks of its frame clock."""
    window = region.bound - region.start
    return -(-window // region.added(stride)) + 1 if window else 1


def region_arithmetic(region: Region, stride: int) -> str:
    """``ceil((402 - 302) / 50) + 1 = 3``, or ``1 (W = 0)`` for an extent that never moves."""
    if region.bound == region.start:
        return "1 (W = 0)"
    span = f"({region.bound:,} - {region.start:,}) / {region.added(stride):,}"
    return f"ceil({span}) + 1 = {region_extents(region, stride):,}"


def contract_width(contract: Contract) -> Width:
    """Width of a whole contract.

    Without session regions every turn is the same walk, so the states are those of the widest region, and each meets
    every advance. Session regions go on across turns: with the stride alone, the joint count is exact; with flush
    lengths their extents follow sums of strides and flushes, which is bounded by the ticks to saturation.
    """
    persistent = [region for region in contract.regions if region.persistent]
    turns = [region for region in persistent if region.lifetime == "turn"]
    sessions = [region for region in persistent if region.lifetime != "turn" and region.bound > region.start]
    turn_states, turn_text = _widest(contract, turns)
    advances = prod(len(contract.advances_of(clock.name)) for clock in contract.clocks if clock.is_base)
    times = f"; x {advances:,} advances (stride and flush)" if advances > 1 else ""
    if not sessions:
        states, exact, text = turn_states, True, turn_text
    elif advances == 1:
        session_states, session_text = _widest(contract, sessions)
        states, exact = _boundary_pairs(turn_states, session_states), True
        text = f"{turn_text} in a turn; {session_text} in a session; {states:,} together"
    else:
        session_states, session_text = _saturation(contract, sessions)
        states, exact = turn_states * session_states, False
        text = f"{turn_text} in a turn; x at most {session_text} in a session"
    classes = states * advances
    total = f" = {classes:,}" if times or sessions else ""
    return Width(classes, f"{text}{times}{total}", exact)


def _widest(contract: Contract, regions: Iterable[Region]) -> tuple[int, str]:
    """States of ``regions`` that start together and advance together: those of the one that saturates last."""
    best, text = 1, "one state"
    for region in regions:
        stride = contract.frame_stride(region)
        extents = region_extents(region, stride)
        if extents > best or text == "one state":
            best, text = extents, f"{region.name}: {region_arithmetic(region, stride)}"
    return best, text


def _boundary_pairs(turn: int, session: int) -> int:
    """Pairs (calls since the turn began, calls since the session began), each counted to its saturation.

    The first never exceeds the second, and once the session has saturated every position in a turn is reachable. So
    the pairs are: all ``turn`` of them at saturation, and min(j + 1, turn) after each j < session - 1 calls.
    """
    rising = session - 1
    ramp = min(rising, turn)
    return turn + ramp * (ramp + 1) // 2 + (rising - ramp) * turn


def _saturation(contract: Contract, sessions: list[Region]) -> tuple[int, str]:
    """An upper bound of the session states: for each base clock, the tick totals until its last region saturates."""
    totals: dict[str, int] = {}
    for region in sessions:
        clock = region.frame_clock
        assert clock is not None  # a region that moves has a frame clock
        base = contract.base_of(clock)
        per_tick = region.growth * contract.rate_of(clock)
        window = region.bound - region.start
        unit = gcd(*contract.advances_of(base.name))
        ticks = -(-window * per_tick.denominator // per_tick.numerator)
        totals[base.name] = max(totals.get(base.name, 1), -(-ticks // unit) + 1)
    states = prod(totals.values())
    return states, " x ".join(f"{count:,} totals of {name}" for name, count in totals.items())
