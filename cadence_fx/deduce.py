"""From what was seen of a state to the facts of its region: axis, start, bound, growth and retention.

A fact is `PROVED` where the graph of every call that was made says so, `OBSERVED` where only calls do, and `AMBIGUOUS`
where several declarations explain all that was seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import product

from cadence_fx._units import counted
from cadence_fx.calls import Slot
from cadence_fx.following import Lost, Policy, Seen, agree, fitting
from cadence_fx.joined import Frames, Joined
from cadence_fx.pairs import Doubt
from cadence_fx.retention import KeepLast, Pinned, Retention, Ring
from cadence_fx.walk import Visit, Walk

PROVED, OBSERVED, AMBIGUOUS = "proved", "observed", "ambiguous"


@dataclasses.dataclass(slots=True)
class Deduced:
    """One state as a contract would have it.

    Attributes:
        added: frames that a call adds; 0 where nothing tells.
        flushed: frames that a call adds which ends a turn; None where nothing tells or there is none.
        confidence, why: of the retention.
        joined: where a graph shows what extents do not: how many frames a call adds to a state that is always cut.
        axis_confidence: of the axis: of a state that never moves, any would do.
        line: the user's line that makes the next state.
    """

    slot: Slot
    axis: int
    start: int
    added: int
    retention: Retention
    confidence: str
    why: str
    axis_confidence: str
    line: str | None
    joined: Joined | None = None
    flushed: int | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """What instances of one region have in common."""
        return self.axis, self.start, self.added, self.flushed, self.retention, self.slot.place.root


class Undeclarable(Exception):
    """No contract can say what a state does; the stream has no catalog."""

    def __init__(self, doubt: Doubt) -> None:
        super().__init__(str(doubt))
        self.doubt = doubt


def deduce(walk: Walk, slot: Slot) -> Deduced:
    """The facts of one state. Raises `Undeclarable`."""
    calls = [visit for visit in walk.visits if not visit.flush]
    shapes = [visit.shapes[slot] for visit in calls]
    line = next((visit.lines[slot] for visit in reversed(calls) if visit.lines.get(slot)), None)

    def undeclarable(why: str) -> Undeclarable:
        return Undeclarable(Doubt(str(slot.place), why, line))

    if slot in walk.unsteady:
        raise undeclarable("its extent depends on the data: the same calls with other numbers left another one")
    if len({len(shape) for pair in shapes for shape in pair}) > 1:
        raise undeclarable("its rank changes")
    moved = {axis for old, new in shapes for axis, (a, b) in enumerate(zip(old, new, strict=True)) if a != b}
    if len(moved) > 1:
        raise undeclarable(f"it changes along axes {' and '.join(map(str, sorted(moved)))} at once")
    if not moved:
        return _constant(walk, slot, calls, line)
    (axis,) = moved
    if any(new[axis] < old[axis] for old, new in shapes):
        raise undeclarable("its extent grows and falls again, which no retention policy says")
    if slot in walk.unbounded:
        step = shapes[-1][1][axis] - shapes[-1][0][axis]
        reached = walk.unbounded[slot][axis]
        until = f"; at {counted(reached, 'frame')} and more, {walk.ended}" if walk.ended else ""
        raise undeclarable(
            f"unbounded: it grows by {counted(step, 'frame')} a call along axis {axis}, followed to {reached}{until}"
        )
    if not walk.settled:
        raise undeclarable("its extent does not settle, and does not grow steadily")
    return _growing(walk, slot, calls, axis, line)


def _growing(walk: Walk, slot: Slot, calls: Sequence[Visit], axis: int, line: str | None) -> Deduced:
    sizes = [(visit.shapes[slot][0][axis], visit.shapes[slot][1][axis]) for visit in calls]
    start, bound = sizes[0][0], max(new for _, new in sizes)
    frames, proved, why = _frames(calls, slot, axis)
    steps = {new - old for old, new in sizes if new < bound}
    if len(steps) > 1:
        raise Undeclarable(
            Doubt(str(slot.place), f"it grows by {' or '.join(map(str, sorted(steps)))} frames a call", line)
        )
    seen = [Seen(old, new, kept) for (old, new), kept in zip(sizes, frames, strict=True) if kept is not None]
    plain = [Seen(each.old, each.new, _unnumbered(each.frames)) for each in seen]
    joined = None if steps else _joined(calls, slot, axis)
    for added, told_apart in product(sorted(steps) or _candidates(sizes, seen, joined), (True, False)):
        policies = _policies(seen if told_apart else plain, bound, added, joined if told_apart else None)
        if len(seen) == len(calls) and policies:
            if not steps and not (joined and told_apart) and _may_be_more(plain, policies[0], added):
                raise Undeclarable(Doubt(str(slot.place), _unsure(added), line))
            confidence, told = _confidence(policies, proved, why, walk)
            if not told_apart:
                confidence, told = _least(confidence, OBSERVED), "which of the fresh frames it keeps cannot be told"
            sure = PROVED if proved else OBSERVED
            return Deduced(slot, axis, start, added, policies[0], confidence, told, sure, line, joined)
    if len(seen) == len(calls) or not steps:
        raise Undeclarable(Doubt(str(slot.place), "no retention policy keeps the frames that it keeps", line))
    (added,) = steps
    if any(min(old + added, bound) != new for old, new in sizes):
        raise Undeclarable(Doubt(str(slot.place), "its extents are not those of any retention policy", line))
    why = f"only the extents are known: {why}"
    return Deduced(slot, axis, start, added, KeepLast(bound), AMBIGUOUS, why, OBSERVED, line)


def _joined(calls: Sequence[Visit], slot: Slot, axis: int) -> Joined | None:
    """Where the graphs of the calls have old and fresh frames together, if all that do have as many fresh ones."""
    found = [visit.joined[slot, axis] for visit in calls if (slot, axis) in visit.joined]
    return found[-1] if len({(joined.added, joined.order) for joined in found}) == 1 else None


def _candidates(sizes: Sequence[tuple[int, int]], seen: Sequence[Seen], joined: Joined | None) -> list[int]:
    """Numbers of frames that a call may add when the first one already fills the state. Those of a value that are
    appended and that no call keeps, the last ones, may be looked ahead at and not be added."""
    least = max(new - old for old, new in sizes)
    if joined is not None:
        ends = {index + 1 for old, index in joined.frames if not old and index is not None}
        return [joined.added, *(sorted(ends)[-1:] if joined.order == "append" else ())]
    fresh = {sum(not old for old, _ in each.frames) for each in seen}
    return sorted(number for number in fresh | {least} if number >= least)


def _policies(seen: Sequence[Seen], bound: int, added: int, joined: Joined | None) -> list[Policy]:
    """Those that keep what the calls kept, in the order in which a graph joins the frames."""
    policies = fitting(seen, bound, added)
    return [policy for policy in policies if joined is None or policy.order == joined.order]


def _unnumbered(frames: Frames) -> Frames:
    """Frames of which nobody knows which of the fresh ones they are."""
    return tuple((old, index if old else None) for old, index in frames)


def _least(*confidences: str) -> str:
    return min(confidences, key=(AMBIGUOUS, OBSERVED, PROVED).index)


def _may_be_more(plain: Sequence[Seen], policy: Policy, added: int) -> bool:
    """Whether a call could add one frame more and leave the same: what is beyond the newest that it keeps is cut."""
    return policy in fitting(plain, policy.bound, added + 1)


def _unsure(added: int) -> str:
    return f"ambiguous: a call adds {added} frames or more; what is beyond them is cut in every call"


def _confidence(policies: Sequence[Policy], proved: bool, why: str, walk: Walk) -> tuple[str, str]:
    orders = {policy.order for policy in policies if isinstance(policy, KeepLast)}
    if len(orders) > 1:
        return AMBIGUOUS, "nothing tells whether the code appends or prepends: no call keeps frames of the one before"
    if not proved:
        return OBSERVED, why
    if walk.jumped:
        return (
            OBSERVED,
            "the graphs of the first calls and of those about the bound say so; not all between were traced",
        )
    return PROVED, "the graph of every class says so"


def _frames(calls: Sequence[Visit], slot: Slot, axis: int) -> tuple[list[Frames | None], bool, str]:
    """What each call kept, whether graphs say so for each combination of extents, and if not, why not.

    A combination is traced twice; where both graphs are the same, later calls of it are taken for the same.
    """
    kept: list[Frames | None] = []
    why = ""
    traced: dict[tuple[object, ...], set[Frames | Lost]] = {}
    for visit in calls:
        if (slot, axis) in visit.graph:
            traced.setdefault(tuple(visit.shapes.values()), set()).add(visit.graph[slot, axis])
    for visit in calls:
        graphs = traced.get(tuple(visit.shapes.values()), set())
        graph = visit.graph.get((slot, axis), next(iter(graphs)) if len(graphs) == 1 else None)
        read = visit.read.get((slot, axis))
        if isinstance(graph, Lost) or graph is None:
            lost = f"{graph.reason}{f' ({graph.where})' if graph.where else ''}" if graph is not None else ""
            why = why or lost or "not every call could be traced"
            kept.append(read)
        elif read is not None and not agree(graph, read):
            why = "bytes of a call are not where its graph has them"
            kept.append(None)
        else:
            kept.append(graph)
    return kept, not why, why


def _constant(walk: Walk, slot: Slot, calls: Sequence[Visit], line: str | None) -> Deduced:
    """A state whose extent never moves: one that shifts, a ring, or one that is replaced."""
    shape = calls[0].shapes[slot][0]
    in_place = slot.result is None
    for axis, size in enumerate(shape):
        frames, proved, why = _frames(calls, slot, axis)
        seen = [Seen(size, size, kept) for kept in frames if kept is not None]
        joined = _joined(calls, slot, axis)
        if joined is None and size < 2 or len(seen) < len(calls) or not all(_tells(each.frames) for each in seen):
            continue
        plain = [Seen(size, size, _unnumbered(each.frames)) for each in seen]
        for added in _candidates([(size, size)], seen, joined):
            policies = _policies(seen, size, added, joined) if added else []
            if policies and (joined is not None or not _may_be_more(plain, policies[0], added)):
                confidence, told = _confidence(policies, proved, why, walk)
                sure = PROVED if proved else OBSERVED
                return Deduced(slot, axis, size, added, policies[0], confidence, told, sure, line, joined)
    for axis, size in enumerate(shape):
        added = _ring_step([visit.read.get((slot, axis)) for visit in calls])
        if in_place and added:
            why = f"each call overwrites the {added} oldest of {counted(size, 'frame')}, in turn"
            traced = [visit.graph[slot, axis] for visit in calls if (slot, axis) in visit.graph]
            if traced and not any(isinstance(graph, Lost) for graph in traced):
                why += "; Python counts its position, so that each one is a graph of its own"
            return Deduced(slot, axis, size, added, Ring(size), OBSERVED, why, OBSERVED, line)
    axis = next((axis for axis, size in enumerate(shape) if size), 0)
    why = "its extent never moves; what it holds is computed anew, and is not compared with anything"
    return Deduced(slot, axis, shape[axis], 0, Pinned(shape[axis]), OBSERVED, why, AMBIGUOUS, line)


def _tells(frames: Frames) -> bool:
    """Whether frames say along which axis a state moves: some are fresh, and the others old, or known by number."""
    fresh = [index for old, index in frames if not old]
    return bool(fresh) and (len(fresh) < len(frames) or None not in fresh)


def _ring_step(reads: Sequence[Frames | None]) -> int:
    """How many frames each call overwrites, each time those after the last; 0 where it is not so."""
    written: list[list[int]] = []
    for frames in reads:
        if frames is None or any(old and index != at for at, (old, index) in enumerate(frames)):
            return 0
        written.append([at for at, (old, _) in enumerate(frames) if not old])
    count, size = len(written[0]), len(reads[0] or ())
    if not 0 < count < size or len(written) < 2:
        return 0
    for before, after in zip(written, written[1:], strict=False):
        if sorted((at + count) % size for at in before) != after:
            return 0
    return count


def flushed(deduced: Deduced, visits: Sequence[Visit], most: int) -> int | None:
    """Frames that the calls which end a turn add to a state: the one number, up to ``most``, that explains them all.

    None where there are several. Raises `Undeclarable` where there is none.
    """
    slot, axis, policy = deduced.slot, deduced.axis, deduced.retention
    if policy.fixed:
        if any(visit.shapes[slot][1] != visit.shapes[slot][0] for visit in visits):
            raise Undeclarable(Doubt(str(slot.place), "its extent moves in the call that ends a turn", deduced.line))
        return None
    frames, _, _ = _frames(visits, slot, axis)
    sizes = [tuple(shape[axis] for shape in visit.shapes[slot]) for visit in visits]
    fits = []
    for added in range(most + 1):
        if any(policy.attended(old + added) != new for old, new in sizes):
            continue
        seen = [Seen(old, new, kept) for (old, new), kept in zip(sizes, frames, strict=True) if kept is not None]
        if policy in fitting(seen, policy.bound, added):
            fits.append(added)
    if not fits:
        why = "the call that ends a turn keeps other frames of it than the retention of all others says"
        raise Undeclarable(Doubt(str(slot.place), why, deduced.line))
    return fits[0] if len(fits) == 1 else None
