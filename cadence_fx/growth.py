"""How a state grows with the sizes of the arguments: from a graph whose sizes are symbols, with sympy.

A state that grows says so by its size. One that is cut to its bound in every call is looked at where old and fresh
frames are joined: the value is found in the graph of one call, and its size in the same graph with symbols.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import sympy

from cadence_fx import paths
from cadence_fx._torch import as_expr
from cadence_fx._torch_calls import NotTraced
from cadence_fx.calls import Arguments, Graph, Live, Place
from cadence_fx.deduce import Deduced
from cadence_fx.errors import ExampleFailed
from cadence_fx.following import Follower
from cadence_fx.joined import tensors_made
from cadence_fx.leaves import tensor_paths
from cadence_fx.walk import Stream

Axis = tuple[Place, int]
SIZE = sympy.Symbol("n", integer=True, positive=True)
_SETTLING = 8  # calls that are made before a state is taken for one that is always cut


@dataclasses.dataclass(frozen=True, slots=True)
class Growth:
    """A call adds ``frames``, an expression in the size `SIZE` of an argument along an axis.

    Attributes:
        counted: the argument and its axis.
        until: the most frames, old and new ones, for which the graph says so; None where it sets no limit.
    """

    counted: Axis
    frames: sympy.Expr
    until: int | None

    def added(self, size: int) -> int:
        """Frames of a call whose argument has that size."""
        return int(self.frames.subs(SIZE, size))

    @property
    def is_multiple(self) -> bool:
        """Whether twice as long an argument always brings twice as many frames."""
        return bool(sympy.simplify(self.frames / SIZE).is_Rational)

    def __str__(self) -> str:
        axis = f"axis {self.counted[1]} of {self.counted[0]}"
        rate = sympy.diff(self.frames, SIZE) if self.frames.is_polynomial(SIZE) else None
        if rate is None:
            return f"{self.frames}, n is {axis}"
        offset = int(self.frames - rate * SIZE)
        more = f" {'+' if offset > 0 else '-'} {abs(offset)}" if offset else ""
        return f"{'' if rate == 1 else f'{rate} x '}{axis}{more}"


def growths(
    live: Live, states: Sequence[Deduced], written: Sequence[Place], first: Arguments, later: Arguments
) -> dict[Place, Growth]:
    """What each state grows with, where the size of one argument decides it."""
    found = _growing(live, states, written, first, later)
    cut = [state for state in states if state.added and not state.retention.in_place and state.slot.place not in found]
    return found | _always_cut(live, states, cut, written, first, later) if cut else found


def _growing(
    live: Live, states: Sequence[Deduced], written: Sequence[Place], first: Arguments, later: Arguments
) -> dict[Place, Growth]:
    """By the size of the next state, of states that are not cut at first."""
    growing = [state for state in states if state.retention.bound > state.start]
    if not growing:
        return {}
    stream = Stream(live, [state.slot for state in states], first, 5)
    template = first
    if all(state.start + 2 * state.added < state.retention.bound for state in growing):
        try:  # a later call has fewer extents that are 0 or 1, which code treats apart
            stream.call(stream.feed(first))
        except ExampleFailed:
            return {}
        template = later
    arguments = stream.feed(template)
    inputs = _inputs(arguments, states)
    own = {state.slot.place: (state.axis,) for state in growing}
    try:
        graph = stream.live.trace(arguments, written, {**inputs, **own})
    except NotTraced:
        return {}
    symbols = _symbols(graph, inputs)
    found = {}
    for state in growing:
        before = graph.traced.symbols[graph.places.index(state.slot.place), state.axis]
        sizes = graph.traced.sizes[graph.after(state.slot)]
        if sizes is None or before not in sizes[state.axis].free_symbols:
            continue
        growth = _growth(sympy.expand(sizes[state.axis] - before), symbols)
        if growth is not None:
            limits = [limit for guard in graph.traced.guards if (limit := _limit(guard, sizes[state.axis])) is not None]
            found[state.slot.place] = dataclasses.replace(growth, until=min(limits, default=None))
    return found


def _always_cut(
    live: Live,
    states: Sequence[Deduced],
    cut: Sequence[Deduced],
    written: Sequence[Place],
    first: Arguments,
    later: Arguments,
) -> dict[Place, Growth]:
    """By the size of the value in which old and fresh frames are joined, of states at their bounds."""
    stream = Stream(live, [state.slot for state in states], first, 5)
    template = first
    try:
        for _ in range(_SETTLING):
            if all(stream.shapes()[state.slot][state.axis] == state.retention.bound for state in cut):
                break
            stream.call(stream.feed(template))
            template = later
        arguments = stream.feed(template)
        inputs = _inputs(arguments, states)
        plain = Follower(stream.live.trace(arguments, written))
        graph = stream.live.trace(arguments, written, inputs)
    except (ExampleFailed, NotTraced):
        return {}
    symbols = _symbols(graph, inputs)
    sizes = {symbol: paths.get(arguments, place.path).shape[axis] for symbol, (place, axis) in symbols.items()}
    made = tensors_made(graph.traced.gm.graph)
    found = {}
    for state in cut:
        joined = plain.joined(state.slot.place, plain.graph.after(state.slot), state.axis)
        if joined is None or joined.number >= len(made):
            continue
        shape = [as_expr(size) for size in made[joined.number].meta["val"].shape]
        if tuple(size.subs(sizes) for size in shape) != joined.shape:
            continue  # with symbols, other operators are called
        ahead = joined.added - state.added
        growth = _growth(shape[joined.axis] - (joined.shape[joined.axis] - joined.added) - ahead, symbols)
        if growth is not None:
            found[state.slot.place] = growth
    return found


def _inputs(arguments: Arguments, states: Iterable[Deduced]) -> dict[Place, Sequence[int]]:
    """The arguments that are no states, with all their axes."""
    places = {state.slot.place for state in states}
    inputs = [place for path in tensor_paths(arguments) if (place := Place("argument", path)) not in places]
    return {place: range(paths.get(arguments, place.path).dim()) for place in inputs}


def _symbols(graph: Graph, inputs: Mapping[Place, Sequence[int]]) -> dict[sympy.Symbol, Axis]:
    """The symbols of the sizes that were left open, with what they are the sizes of."""
    return {
        graph.traced.symbols[graph.places.index(place), axis]: (place, axis)
        for place, axes in inputs.items()
        for axis in axes
    }


def _growth(more: sympy.Expr, symbols: Mapping[sympy.Symbol, Axis]) -> Growth | None:
    """Frames that a call adds, as an expression in symbols; None where several sizes decide, or what is no input's, or
    none: a size for which the code has a loop or a branch is a number in its graph."""
    more = sympy.expand(more)
    if len(more.free_symbols) != 1 or not more.free_symbols <= symbols.keys():
        return None
    (symbol,) = more.free_symbols
    return Growth(symbols[symbol], more.subs(symbol, SIZE), None)


def _limit(guard: sympy.Expr, raw: sympy.Expr) -> int | None:
    """The most that ``raw`` may be under a guard, if the guard says just that."""
    if not isinstance(guard, (sympy.StrictLessThan, sympy.LessThan, sympy.StrictGreaterThan, sympy.GreaterThan)):
        return None
    below = guard.lts - guard.gts  # lower side minus upper side: at most 0, or less
    number = sympy.expand(raw - below)
    if not number.is_Integer:
        return None
    return int(number) - isinstance(guard, (sympy.StrictLessThan, sympy.StrictGreaterThan))
