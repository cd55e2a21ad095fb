"""A stream that is played on a copy of a module, with random data: what each call meets, keeps and leaves.

The states that a call returns are given to the next one, until extents repeat. A state that grows for long is not fed
call by call: states of later extents are made up, twice as far each time, until the code cuts them or memory is at its
end, and then the last calls before the cut and the first after it are made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from cadence_fx import paths
from cadence_fx._torch_calls import NotTraced
from cadence_fx.calls import Arguments, Live, Place, Slot, copied, drawn
from cadence_fx.errors import ExampleFailed
from cadence_fx.following import Follower, Lost, frames_by_bytes
from cadence_fx.joined import Frames, Joined, is_cut_beyond
from cadence_fx.leaves import tensor_paths

Shape = tuple[int, ...]
CALLS = 40  # made one after the other before states are made up
REPEATS = 3  # calls whose extents stay, after which a stream has settled
PATIENT = 24  # as many, where each call may do something else for all that its sizes say
_MOST_BYTES = 64 << 20  # of states that are made up
_FURTHEST = 1 << 16  # calls ahead
_TRACED = 48  # calls that are traced


@dataclasses.dataclass(slots=True)
class Visit:
    """One call that was made.

    Attributes:
        shapes: of each state, before and after.
        read: what each position along an axis holds, by the bytes of the call.
        graph: the same by its graph, or why the graph does not say; empty where the call was not traced.
        joined: where the graph has old and fresh frames together before they are cut, if that had to be looked for.
        lines: the user's line that makes each state.
        flush: whether the call was one of those that end a turn.
    """

    shapes: dict[Slot, tuple[Shape, Shape]]
    read: dict[tuple[Slot, int], Frames | None]
    graph: dict[tuple[Slot, int], Frames | Lost]
    joined: dict[tuple[Slot, int], Joined]
    lines: dict[Slot, str | None]
    flush: bool


@dataclasses.dataclass(slots=True)
class Walk:
    """Everything that was seen of a stream.

    Attributes:
        settled: the extents no longer change.
        unbounded: states that grow as far as they were followed -> the extents that they reached.
        ended: why the code stops at some extent, if it does.
        unsteady: states whose extents depend on the data.
        not_traced: why calls could not be traced.
        cycles: the extents come back to what they were, and go on changing.
        jumped: states were made up, so that not all calls up to the bound were made.
    """

    visits: list[Visit] = dataclasses.field(default_factory=list)
    settled: bool = False
    unbounded: dict[Slot, Shape] = dataclasses.field(default_factory=dict)
    ended: ExampleFailed | None = None
    unsteady: set[Slot] = dataclasses.field(default_factory=set)
    not_traced: NotTraced | None = None
    cycles: bool = False
    jumped: bool = False


class Stream:
    """One live stream on a copy of a module, whose states and inputs hold random numbers."""

    def __init__(self, live: Live, slots: Sequence[Slot], first: Arguments, seed: int) -> None:
        self.live, self.slots = live.twin(), slots
        self.draw = torch.Generator().manual_seed(seed)
        self.states: dict[Slot, torch.Tensor] = {}
        for slot in slots:
            if slot.place.root == "argument":
                self.states[slot] = drawn(paths.get(first, slot.place.path), self.draw)
            else:
                held = self.live.get(slot.place)
                with torch.no_grad():
                    held.copy_(drawn(held, self.draw))

    def twin(self) -> Stream:
        """Another stream that goes on from here."""
        made = object.__new__(Stream)
        made.live, made.slots = self.live.twin(), self.slots
        made.draw = torch.Generator()
        made.draw.set_state(self.draw.get_state())
        made.states = copied(self.states)
        return made

    def state(self, slot: Slot) -> torch.Tensor:
        """The present state."""
        return self.states[slot] if slot.place.root == "argument" else self.live.get(slot.place)

    def put(self, slot: Slot, value: torch.Tensor) -> None:
        """Make something else the present state."""
        if slot.place.root == "argument":
            self.states[slot] = value
        else:
            self.live.put(slot.place, value)

    def feed(self, template: Arguments) -> Arguments:
        """The arguments of the next call: the states, and random inputs in the shapes of an example."""
        arguments = copied(template)
        places = {slot.place.path: slot for slot in self.slots if slot.place.root == "argument"}
        for path in tensor_paths(arguments):
            value = self.states[places[path]] if path in places else drawn(paths.get(arguments, path), self.draw)
            arguments = paths.put(arguments, path, value)
        for path, slot in places.items():  # where the example has no tensor
            arguments = paths.put(arguments, path, self.states[slot])
        return arguments

    def call(self, arguments: Arguments) -> None:
        """Make a call and take over the states that it leaves."""
        result = self.live.run(arguments)
        for slot in self.slots:
            if slot.place.root == "argument" and slot.result is not None:
                value = paths.get(result, slot.result)
                if not isinstance(value, torch.Tensor):
                    raise ExampleFailed(f"the state {slot.place} is no tensor after a call", None)
                self.states[slot] = value

    def shapes(self) -> dict[Slot, Shape]:
        """The shapes of all states."""
        return {slot: tuple(self.state(slot).shape) for slot in self.slots}


class Walker:
    """Plays a stream from an example call; see `Walk`.

    Args:
        written: attributes that calls change.
        first, later: the calls of a turn.
        flush: a call of other sizes, which ends a turn.
        repeats: calls whose extents stay, after which a stream has settled.
        witness: is shown each state before and after each call, and whether that ended a turn; calls are not traced
            then, and other numbers are drawn.
    """

    def __init__(
        self,
        live: Live,
        slots: Sequence[Slot],
        written: Sequence[Place],
        first: Arguments,
        later: Arguments,
        flush: Arguments | None,
        repeats: int = REPEATS,
        witness: Callable[[Slot, torch.Tensor, torch.Tensor, bool], None] | None = None,
    ) -> None:
        self.live, self.slots, self.written = live, slots, written
        self.first, self.later, self.flush = first, later, flush
        self.repeats, self.witness = repeats, witness
        self.found = Walk()
        self._traced: dict[tuple[object, ...], int] = {}

    def walk(self) -> Walk:
        """All of it. Raises `ExampleFailed` where not even the first calls can be made."""
        stream = Stream(self.live, self.slots, self.first, 3 if self.witness is None else 11)
        repeats, seen = 0, set()
        for number in range(CALLS):
            before = stream.shapes()
            template = self.first if number == 0 else self.later
            if self.flush is not None and repeats <= 1:
                self._visit(stream.twin(), self.flush, flush=True)
            self._visit(stream, template)
            after = stream.shapes()
            key = tuple(after.values())
            repeats = repeats + 1 if before == after else 0
            if repeats >= self.repeats:
                self.found.settled = True
                break
            if repeats == 0 and key in seen:
                self.found.cycles = True
                break
            seen.add(key)
        self.found.settled |= repeats >= REPEATS
        if self.witness is None:
            self._compare_with_other_data()
        if not self.found.settled and not self.found.cycles and not self.found.unsteady:
            self._jump(stream)
        return self.found

    def _visit(self, stream: Stream, template: Arguments, *, flush: bool = False) -> Visit:
        arguments = stream.feed(template)
        before = {slot: stream.state(slot).detach().clone() for slot in self.slots}
        visit = Visit({}, {}, {}, {}, {}, flush)
        follower = self._follower(stream, arguments, flush) if self.witness is None else None
        stream.call(arguments)
        for slot in self.slots:
            old, new = before[slot], stream.state(slot)
            visit.shapes[slot] = tuple(old.shape), tuple(new.shape)
            if self.witness is not None:
                self.witness(slot, old, new, flush)
                continue
            for axis in _axes(old.shape, new.shape):
                visit.read[slot, axis] = frames_by_bytes(old, new, axis)
                if follower is not None:
                    where = slot.place, follower.graph.after(slot), axis
                    frames = visit.graph[slot, axis] = follower.frames(*where)
                    if isinstance(frames, Lost) or not is_cut_beyond(frames, old.shape[axis]):
                        continue  # what is kept shows how much came
                    if (joined := follower.joined(*where)) is not None:
                        visit.joined[slot, axis] = joined
            visit.lines[slot] = follower.line(follower.graph.after(slot)) if follower is not None else None
        self.found.visits.append(visit)
        return visit

    def _follower(self, stream: Stream, arguments: Arguments, flush: bool) -> Follower | None:
        """Follows the call that is about to be made; each combination of extents is traced twice, or more often where
        a stream is followed for longer after it has settled."""
        key = (flush, *stream.shapes().values())
        self._traced[key] = self._traced.get(key, 0) + 1
        if self.found.not_traced is not None or self._traced[key] > self.repeats - 1 or len(self._traced) > _TRACED:
            return None
        try:
            return Follower(stream.live.trace(arguments, self.written))
        except NotTraced as error:
            self.found.not_traced = error
            return None

    def _compare_with_other_data(self) -> None:
        """Play the first calls again with other data: extents that differ depend on it."""
        stream = Stream(self.live, self.slots, self.first, 4)
        calls = [visit for visit in self.found.visits if not visit.flush]
        for number, visit in enumerate(calls):
            arguments = stream.feed(self.first if number == 0 else self.later)
            try:
                stream.call(arguments)
            except ExampleFailed:
                break
            for slot, shape in stream.shapes().items():
                if shape != visit.shapes[slot][1]:
                    self.found.unsteady.add(slot)
            if self.found.unsteady:
                break

    # -- states that are made up ---------------------------------------------------------------------------------------

    def _jump(self, stream: Stream) -> None:
        """Find the extents at which states are cut, from states that are made up."""
        self.found.jumped = True
        start = stream.shapes()
        steps = self._steps()
        if steps is None:
            return
        bounds: dict[Slot, int] = {}
        ahead = 1
        while ahead <= _FURTHEST and len(bounds) < len(steps):
            made = stream.twin()
            if not self._put_ahead(made, start, steps, ahead):
                break
            met = made.shapes()
            try:
                made.call(made.feed(self.later))
            except ExampleFailed as error:
                self.found.ended = error
                break
            for slot, (axis, step) in steps.items():
                if slot not in bounds and made.shapes()[slot][axis] < met[slot][axis] + step:
                    bounds[slot] = made.shapes()[slot][axis]
            reached = met
            ahead *= 2
            self.found.unbounded = {slot: reached[slot] for slot in steps if slot not in bounds}
        if len(bounds) == len(steps):
            self._visit_around(stream, start, steps, bounds)

    def _steps(self) -> dict[Slot, tuple[int, int]] | None:
        """The axis and the frames a call of each state that grows; None unless each has grown steadily."""
        found: dict[Slot, tuple[int, int]] = {}
        calls = [visit for visit in self.found.visits if not visit.flush][-REPEATS:]
        for slot in self.slots:
            moves = {tuple(b - a for a, b in zip(*visit.shapes[slot], strict=True)) for visit in calls}
            move = moves.pop()
            grown = [axis for axis, by in enumerate(move) if by]
            if moves or len(grown) > 1 or any(by < 0 for by in move):
                return None
            if grown:
                found[slot] = grown[0], move[grown[0]]
        return found

    def _put_ahead(
        self,
        stream: Stream,
        start: Mapping[Slot, Shape],
        steps: Mapping[Slot, tuple[int, int]],
        ahead: int,
        bounds: Mapping[Slot, int] | None = None,
    ) -> bool:
        """Give a stream the states that it would have so many calls later; False where they are too large."""
        shapes = {}
        for slot, (axis, step) in steps.items():
            shape = list(start[slot])
            shape[axis] += step * ahead
            if bounds is not None:
                shape[axis] = min(shape[axis], bounds[slot])
            shapes[slot] = shape
        like = {slot: stream.state(slot) for slot in steps}
        if sum(torch.Size(shape).numel() * like[slot].element_size() for slot, shape in shapes.items()) > _MOST_BYTES:
            return False
        for slot, shape in shapes.items():
            stream.put(slot, drawn(like[slot].new_zeros(shape), stream.draw))
        return True

    def _visit_around(
        self,
        stream: Stream,
        start: Mapping[Slot, Shape],
        steps: Mapping[Slot, tuple[int, int]],
        bounds: Mapping[Slot, int],
    ) -> None:
        """The calls about the cut of each state, and when all are cut, as if they had been reached."""
        cut = {-(-(bounds[slot] - start[slot][axis]) // step) for slot, (axis, step) in steps.items()}
        for ahead in _about(cut):
            made = stream.twin()
            if not self._put_ahead(made, start, steps, ahead, bounds):
                return
            if self.flush is not None:
                self._visit(made.twin(), self.flush, flush=True)
            visit = self._visit(made, self.later)
        if all(old == new for old, new in visit.shapes.values()):
            self.found.settled = True


def _about(numbers: set[int]) -> Iterator[int]:
    yield from sorted(
        {number + by for number in numbers for by in (-2, -1, 0) if number + by >= 0} | {max(numbers) + 1}
    )


def _axes(old: Sequence[int], new: Sequence[int]) -> list[int]:
    """Axes that may count frames: the one along which two shapes differ, or all of them."""
    if len(old) != len(new):
        return []
    moved = [axis for axis, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    return moved if len(moved) == 1 else [] if moved else list(range(len(old)))
