"""Which result of a module is the next state of which argument, and which attributes are states.

An attribute that a call binds anew or writes, and that a later call reads, is one. An argument is one where the graph
shows a result that holds frames of it and of something else, or where a second call was given what the first returned.
Where two arguments could be meant, neither is chosen: that is for a second example call, or for the user, to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import torch

from cadence_fx import paths
from cadence_fx._torch_calls import NotTraced
from cadence_fx.attributes import read_later
from cadence_fx.bytesops import bytes_equal
from cadence_fx.calls import Arguments, Graph, Live, Place, Ran, Slot, copied, drawn
from cadence_fx.errors import ExampleFailed
from cadence_fx.following import Follower, Lost
from cadence_fx.leaves import accessor, objects_with_tensors, tensor_paths
from cadence_fx.passes.graphs import tensor_val
from cadence_fx.paths import Path

_PROBES = 6  # calls with a smaller input that are traced


@dataclasses.dataclass(frozen=True, slots=True)
class Doubt:
    """What could not be decided, and why; ``where`` is the user's line, if one is known."""

    what: str
    why: str
    where: str | None = None

    def __str__(self) -> str:
        return f"{self.what}: {self.why}" + (f" ({self.where})" if self.where else "")


@dataclasses.dataclass(slots=True)
class Pairs:
    """The states that were found, and what is in doubt. ``written``: attributes that calls change, states or not.
    ``not_fed``: arguments to which the second call did not give what the first returned. ``counts``: the module keeps
    numbers that Python changes."""

    slots: list[Slot]
    doubts: list[Doubt]
    written: list[Place] = dataclasses.field(default_factory=list)
    not_fed: set[Place] = dataclasses.field(default_factory=set)
    not_traced: NotTraced | None = None
    counts: bool = False

    def has(self, place: Place) -> bool:
        return any(slot.place == place for slot in self.slots)


def find_pairs(live: Live, first: Arguments, second: Arguments | None) -> Pairs:
    """The states of a module, from the first call of a turn and, if given, the call that follows it."""
    stream = live.twin()
    ran = stream.watch(copied(first))
    found = Pairs([], [])
    for path in objects_with_tensors(first):
        why = "is an object, and what it holds is not followed: pass its tensors, or let the module keep it"
        found.doubts.append(Doubt(str(Place("argument", path)), why))
    _attributes(live, stream, first, second, ran, found)
    graph: Graph | None = None
    try:
        graph = live.trace(copied(first), found.written)
    except NotTraced as error:
        found.not_traced = error
        found.slots = [dataclasses.replace(slot, proved=False) for slot in found.slots]
    _in_place(ran, graph, second, found)
    if second is not None:
        _by_second_call(ran, second, found)
        _not_given(ran, second, found)
    for path in tensor_paths(second if second is not None else {}):
        if Place("argument", path) not in ran.before:
            why = "is no tensor in the first example call: begin with a call that is given one"
            found.doubts.append(Doubt(str(Place("argument", path)), why))
    if graph is not None:
        follower = Follower(graph)
        _by_graph(live, first, ran, follower, found)
        found.slots = [_with_proof(slot, follower) for slot in found.slots]
    if second is None:
        _left(ran, found)
    return found


def _attributes(live: Live, stream: Live, first: Arguments, second: Arguments | None, ran: Ran, found: Pairs) -> None:
    follow_up = second if second is not None else first
    try:
        again = stream.watch(copied(follow_up))
    except ExampleFailed:  # arguments that only fit a first call
        again = ran
    for path, value in again.numbers.items():
        if again is not ran and ran.numbers.get(path, value) != value:
            found.counts = True
            why = "is a number that Python counts: code that reads it does other things in each call"
            found.doubts.append(Doubt(str(Place("attribute", path)), why))
    for path, kind in ran.passed_over.items():
        why = f"is a {kind}, and what it holds is not followed: a list of tensors would be"
        found.doubts.append(Doubt(str(Place("attribute", path)), why))
    for path, place in ran.shared.items():
        why = f"lies in the memory of {place}, which the next call writes: clone() what is to stay"
        found.doubts.append(Doubt(f"result {accessor(path)}", why))
    candidates = []
    for place in ran.after:
        if place.root != "attribute" or place not in ran.changed | again.changed:
            continue
        if place not in ran.before:
            if place in again.changed:  # else it is a table that the first call makes
                why = "is made by the first call: make one call, or put an empty tensor there, before inferring"
                found.doubts.append(Doubt(str(place), why))
            continue
        found.written.append(place)
        if ran.after[place].dim() == 0:
            found.doubts.append(Doubt(str(place), "changes in a call and has no axis; a state needs one of size 1"))
        else:
            candidates.append(place)
    read = read_later(live, candidates, first, follow_up)
    for place in candidates:
        if place in read:
            found.slots.append(Slot(place, None, True))
        else:
            why = "is written by each call and read by none that was made: scratch, if that is always so"
            found.doubts.append(Doubt(str(place), why))


def _in_place(ran: Ran, graph: Graph | None, second: Arguments | None, found: Pairs) -> None:
    """Arguments that the call writes."""
    for place in ran.before:
        if place.root != "argument" or place not in ran.changed:
            continue
        if ran.after.get(place) is None or _is_other(graph, place):
            found.doubts.append(
                Doubt(str(place), "is replaced in the caller's own container; return the new state instead")
            )
        elif second is not None and (given := _at(second, place)) is not None and bytes_equal(given, ran.after[place]):
            found.slots.append(Slot(place, None, False, given=True))
        elif graph is not None and _holds(Follower(graph), place, graph.after(Slot(place, None, True))):
            found.slots.append(Slot(place, None, True))
        else:
            found.doubts.append(
                Doubt(
                    str(place),
                    "is written by the call; whether the next one is given it shows in a second example call",
                )
            )


def _is_other(graph: Graph | None, place: Place) -> bool:
    if graph is None:
        return False
    at = graph.places.index(place)
    return graph.traced.same[len(graph.results) + at] != at


def _at(arguments: Arguments, place: Place) -> torch.Tensor | None:
    try:
        value = paths.get(arguments, place.path)
    except LookupError:
        return None
    return value if isinstance(value, torch.Tensor) else None


def _free(ran: Ran, found: Pairs) -> tuple[list[Place], list[Path]]:
    taken = {slot.result for slot in found.slots}
    named = {doubt.what for doubt in found.doubts}
    places = [p for p in ran.before if p.root == "argument" and not found.has(p) and str(p) not in named]
    return places, [path for path in ran.results if path not in taken]


def _by_second_call(ran: Ran, second: Arguments, found: Pairs) -> None:
    """Arguments of the second call that are, byte for byte, results of the first."""
    places, results = _free(ran, found)
    claims: dict[Path, list[Place]] = {}
    for place in places:
        given = _at(second, place)
        if given is None or given.numel() == 0 or bytes_equal(given, ran.before[place]):
            continue
        matching = [path for path in results if bytes_equal(ran.results[path], given)]
        if not any(ran.results[path].shape == given.shape for path in results):
            found.not_fed.add(place)
        if len({id(ran.results[path]) for path in matching}) == 1:  # one result may be at several places
            claims.setdefault(matching[-1], []).append(place)
        elif matching:
            where = ", ".join(accessor(path) for path in matching)
            found.doubts.append(
                Doubt(
                    str(place), f"the second call was given what is at {where} of the first result, all of them equal"
                )
            )
    for path, claimants in claims.items():
        if len(claimants) == 1:
            found.slots.append(Slot(claimants[0], path, False, given=True))
        else:
            both = " and ".join(map(str, claimants))
            found.doubts.extend(
                Doubt(str(p), f"{both} of the second call are both what is at {accessor(path)} of the first result")
                for p in claimants
            )


def _not_given(ran: Ran, second: Arguments, found: Pairs) -> None:
    """Arguments that may be states by a result of their shape, of which the second call was given something else: it is
    an input, or the example does not go on where the first call ended."""
    places, results = _free(ran, found)
    like = {
        place: [p for p in results if _alike(ran.results[p], ran.before[place])]
        for place in places
        if (given := _at(second, place)) is not None and given.shape == ran.before[place].shape
    }
    maybe = {place: paths_ for place, paths_ in like.items() if paths_}
    for place, paths_ in maybe.items() if len(maybe) > 1 else ():
        where = " and ".join(map(accessor, paths_))
        why = f"what is returned at {where} has its shape, and the second call was given something else"
        found.doubts.append(Doubt(str(place), f"{why}: an input, or the calls do not follow each other"))


def _alike(result: torch.Tensor, given: torch.Tensor) -> bool:
    return result.shape == given.shape and result.dtype == given.dtype and given.dtype.is_floating_point


def _holds(follower: Follower, place: Place, output: int) -> bool:
    """Whether a returned value holds whole frames of a tensor that came in, along any axis, and others."""
    for axis in _comparable(follower.graph, place, output):
        frames = follower.frames(place, output, axis)
        if not isinstance(frames, Lost) and len({old for old, _ in frames}) == 2:
            return True
    return False


def _comparable(graph: Graph, place: Place, output: int) -> list[int]:
    """Axes along which a returned value may be a later extent of a tensor: all others are as long, and it is no
    shorter."""
    before = tensor_val(graph.placeholder(place))
    node = graph.traced.results[output]
    if node is None:
        return []
    after = tensor_val(node)
    if before.dtype != after.dtype or before.dim() != after.dim():
        return []
    return [
        axis
        for axis in range(before.dim())
        if before.shape[axis] <= after.shape[axis]
        and before.shape[:axis] + before.shape[axis + 1 :] == after.shape[:axis] + after.shape[axis + 1 :]
    ]


def _by_graph(live: Live, first: Arguments, ran: Ran, follower: Follower, found: Pairs) -> None:
    """Results that hold frames of an argument and fresh ones. An argument without elements is a state that begins
    empty: nothing is computed of it, so no call would be given one otherwise."""
    empty = [place for place in _free(ran, found)[0] if ran.before[place].numel() == 0]
    for place in empty:
        axes = [axis for axis, size in enumerate(ran.before[place].shape) if size == 0]
        if len(axes) == 1 and (filled := _resized(live, first, ran, found.written, place, axes[0], 2)) is not None:
            _claim([place], filled, ran, found)
        if not found.has(place):
            why = "begins empty, and no result holds frames of it; a second example call tells which is the next state"
            found.doubts.append(Doubt(str(place), why))
    others = [place for place in _free(ran, found)[0] if place not in empty]
    _claim(others, follower, ran, found)
    _by_smaller_inputs(live, first, follower, ran, found)


def _with_proof(slot: Slot, follower: Follower) -> Slot:
    """A pair that calls have shown, and the graph shows too."""
    proved = slot.proved or _holds(follower, slot.place, follower.graph.after(slot))
    return dataclasses.replace(slot, proved=proved)


def _claim(
    places: Sequence[Place],
    follower: Follower,
    ran: Ran,
    found: Pairs,
    may: Collection[tuple[Place, Path]] | None = None,
) -> None:
    """Pair each argument with the one result that holds frames of it, where that is one of no other argument.

    Args:
        may: the pairs that are possible; all, if left out.
    """
    results = _free(ran, found)[1]
    outputs = {path: follower.graph.results.index(path) for path in results if path in follower.graph.results}
    held = {
        place: [
            path for path, i in outputs.items() if (may is None or (place, path) in may) and _holds(follower, place, i)
        ]
        for place in places
    }
    for place, paths_ in held.items():
        rivals = [other for other in places if set(held[other]) & set(paths_)]
        if paths_ and place in found.not_fed:
            where = " and ".join(map(accessor, paths_))
            why = f"what is returned at {where} holds frames of it, but the second call was given something else"
            found.doubts.append(Doubt(str(place), why, follower.line(outputs[paths_[0]])))
        elif len(paths_) == 1 and rivals == [place]:
            found.slots.append(Slot(place, paths_[0], True))
        elif paths_:
            where = " and ".join(map(accessor, paths_))
            who = f" as of {', '.join(str(other) for other in rivals if other != place)}" if len(rivals) > 1 else ""
            why = f"what is returned at {where} holds frames of it{who}; a second example call tells which is the state"
            found.doubts.append(Doubt(str(place), why, follower.line(outputs[paths_[0]])))


def _by_smaller_inputs(live: Live, first: Arguments, follower: Follower, ran: Ran, found: Pairs) -> None:
    """States of which nothing is left when a call brings as many frames as they have: a call is traced that brings
    one. What cannot grow to a result in the first call is not its state in the smaller one either."""
    places, results = _free(ran, found)
    graph = follower.graph
    may = {(p, path) for p in places for path in results if _comparable(graph, p, graph.results.index(path))}
    tries = [(p, axis) for p in places for axis, size in enumerate(ran.before[p].shape) if size > 1]
    for place, axis in tries[:_PROBES]:
        others = [p for p in _free(ran, found)[0] if p != place and any(p == each for each, _ in may)]
        smaller = _resized(live, first, ran, found.written, place, axis, 1) if others else None
        if smaller is not None:
            _claim([*others, place], smaller, ran, found, may)


def _resized(
    live: Live, first: Arguments, ran: Ran, written: Sequence[Place], place: Place, axis: int, size: int
) -> Follower | None:
    """A call with another number of frames in one argument, if it can be traced."""
    given = ran.before[place]
    shape = [size if a == axis else n for a, n in enumerate(given.shape)]
    made = drawn(given.new_zeros(shape), torch.Generator().manual_seed(2))
    arguments = paths.put(copied(first), place.path, made)
    try:
        live.twin().run(copied(arguments))
        return Follower(live.trace(arguments, written))
    except (ExampleFailed, NotTraced):
        return None


def _left(ran: Ran, found: Pairs) -> None:
    """With one example call, arguments that have the shape of a result, or but for one axis, may be states all the
    same: computed anew, or of which nothing is left."""
    places, results = _free(ran, found)
    for place in places if len(places) > 1 else ():
        given = ran.before[place]
        alike = [p for p in results if ran.results[p].dtype == given.dtype and ran.results[p].dim() == given.dim()]
        for most, told in ((0, "its shape"), (1, "its shape but for one axis")):
            like = [p for p in alike if sum(map(int.__ne__, ran.results[p].shape, given.shape)) <= most]
            if like and given.dtype.is_floating_point:
                where = " and ".join(map(accessor, like))
                tells = "a second example call tells whether it is the next state"
                found.doubts.append(Doubt(str(place), f"what is returned at {where} has {told}; {tells}"))
                break
