"""How a state grows with the sizes of the arguments: from a graph whose sizes are symbols, with sympy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import sympy

from cadence_fx import paths
from cadence_fx._torch_calls import NotTraced
from cadence_fx.calls import Arguments, Live, Place
from cadence_fx.deduce import Deduced
from cadence_fx.errors import ExampleFailed
from cadence_fx.leaves import tensor_paths
from cadence_fx.walk import Stream


@dataclasses.dataclass(frozen=True, slots=True)
class Growth:
    """A call adds ``rate`` frames for each element along ``axis`` of an argument, and ``offset`` in all.

    ``until``: the most frames, old and new ones, for which the graph says so; None where it sets no limit.
    """

    place: Place
    axis: int
    rate: sympy.Rational
    offset: int
    until: int | None

    def added(self, size: int) -> sympy.Rational:
        """Frames of a call whose argument has that size."""
        return self.rate * size + self.offset

    def __str__(self) -> str:
        rate = "" if self.rate == 1 else f"{self.rate} x "
        offset = f" {'+' if self.offset > 0 else '-'} {abs(self.offset)}" if self.offset else ""
        return f"{rate}axis {self.axis} of {self.place}{offset}"


def growths(
    live: Live, states: Sequence[Deduced], written: Sequence[Place], first: Arguments, later: Arguments
) -> dict[Place, Growth]:
    """What each growing state grows with, where one argument's size decides it, linearly."""
    growing = [state for state in states if state.retention.bound > state.start]
    if not growing:
        return {}
    slots = [state.slot for state in states]
    stream = Stream(live, slots, first, 5)
    template = first
    if all(state.start + 2 * state.added < state.retention.bound for state in growing):
        try:  # a later call has fewer extents that are 0 or 1, which code treats apart
            stream.call(stream.feed(first))
        except ExampleFailed:
            return {}
        template = later
    arguments = stream.feed(template)
    places = {slot.place for slot in slots}
    inputs = [Place("argument", path) for path in tensor_paths(arguments) if Place("argument", path) not in places]
    open_axes: dict[Place, Sequence[int]] = {state.slot.place: (state.axis,) for state in growing}
    open_axes |= {place: range(paths.get(arguments, place.path).dim()) for place in inputs}
    try:
        graph = stream.live.trace(arguments, written, open_axes)
    except NotTraced:
        return {}
    traced = graph.traced
    symbols = {
        traced.symbols[graph.places.index(place), axis]: (place, axis) for place in inputs for axis in open_axes[place]
    }
    found = {}
    for state in growing:
        own = traced.symbols[graph.places.index(state.slot.place), state.axis]
        sizes = traced.sizes[graph.after(state.slot)]
        if sizes is None:
            continue
        more = sympy.expand(sizes[state.axis] - own)
        if len(more.free_symbols) != 1 or not more.free_symbols <= symbols.keys():
            continue
        (symbol,) = more.free_symbols
        rate = sympy.diff(more, symbol)
        offset = sympy.simplify(more - rate * symbol)
        if rate.is_Rational and rate > 0 and offset.is_Integer:
            limits = [limit for guard in traced.guards if (limit := _limit(guard, own + more)) is not None]
            found[state.slot.place] = Growth(*symbols[symbol], rate, int(offset), min(limits, default=None))
    return found


def _limit(guard: sympy.Expr, raw: sympy.Expr) -> int | None:
    """The most that ``raw`` may be under a guard, if the guard says just that."""
    if not isinstance(guard, (sympy.StrictLessThan, sympy.LessThan, sympy.StrictGreaterThan, sympy.GreaterThan)):
        return None
    below = guard.lts - guard.gts  # lower side minus upper side: at most 0, or less
    number = sympy.expand(raw - below)
    if not number.is_Integer:
        return None
    return int(number) - isinstance(guard, (sympy.StrictLessThan, sympy.StrictGreaterThan))
