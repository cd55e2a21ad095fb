"""What a call keeps of a state, frame by frame: in a traced graph and in the bytes of a call that was made.

The two are independent: the graph is followed on element numbers (``passes.provenance``), bytes are compared with
those that went in. `fitting` says which retention policies explain what was found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from cadence_fx._torch_calls import line_of
from cadence_fx.bytesops import as_integers
from cadence_fx.calls import Graph, Place
from cadence_fx.joined import Frames, Joined, find_joined, is_cut_beyond
from cadence_fx.passes.constants import Constants
from cadence_fx.passes.graphs import GraphFacts, tensor_val
from cadence_fx.passes.ids import IdRun, NotFollowed
from cadence_fx.passes.provenance import follow_frames
from cadence_fx.retention import KeepLast, PromptPlusLast


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
    """Why, and where, a state cannot be followed."""

    reason: str
    where: str | None


class Follower:
    """Follows states through one graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        gm = graph.traced.gm
        self._facts = GraphFacts(gm.graph)
        self._constants = Constants(gm, self._facts)
        self._runs: dict[tuple[fx.Node, fx.Node], IdRun | NotFollowed] = {}
        self._joined: dict[tuple[Place, int, int], Joined | None] = {}

    def frames(self, place: Place, output: int, axis: int) -> Frames | Lost:
        """What each position of a returned value along ``axis`` holds of the tensor that came in at ``place``.

        Args:
            output: number of the value; the tensor itself, at the end of the call, where it is written in place.
        """
        old, result = self._ends(place, output)
        if result is None:
            return Lost("the next state is no tensor of the graph", None)
        try:
            run = self._run(old, result)
            frames = _numbered(run, old, result, axis)
        except NotFollowed as end:
            return Lost(end.reason, line_of(end.node))
        if not is_cut_beyond(frames, tensor_val(old).shape[axis]):
            return frames
        joined = self.joined(place, output, axis)
        return frames if joined is None else joined.frames

    def joined(self, place: Place, output: int, axis: int) -> Joined | None:
        """Where the old frames and all fresh ones are together before they are cut, if there is such a value."""
        key = place, output, axis
        if key not in self._joined:
            self._joined[key] = self._find_joined(*key)
        return self._joined[key]

    def _find_joined(self, place: Place, output: int, axis: int) -> Joined | None:
        old, result = self._ends(place, output)
        if result is None:
            return None
        try:
            run = self._run(old, result)
        except NotFollowed:
            return None
        return find_joined(self.graph.traced.gm.graph, self._facts, self._constants, run, old, result, axis)

    def _ends(self, place: Place, output: int) -> tuple[fx.Node, fx.Node | None]:
        """The tensor that came in, and the returned value."""
        old: fx.Node = self.graph.placeholder(place)
        itself = self.graph.traced.same[output] == self.graph.places.index(place)
        return old, old if itself else self.graph.traced.results[output]

    def _run(self, old: fx.Node, result: fx.Node) -> IdRun:
        if (old, result) not in self._runs:
            graph = self.graph.traced.gm.graph
            try:
                self._runs[old, result] = IdRun(graph, self._facts, self._constants, old, result)
            except NotFollowed as end:
                self._runs[old, result] = end
        run = self._runs[old, result]
        if isinstance(run, NotFollowed):
            raise run
        return run

    def line(self, output: int) -> str | None:
        """The user's line that makes a returned value, or that writes it last."""
        node = self.graph.traced.results[output]
        if node is None:
            return None
        writes = self._facts.writes_to(node)
        return line_of(writes[-1] if writes else node) or line_of(node)


def _numbered(run: IdRun, old: fx.Node, result: fx.Node, axis: int) -> Frames:
    """Frames with the numbers of fresh ones, if old ones are kept beside them and these are all that a call brings."""
    frames = follow_frames(run, old, result, axis, 0)
    plain = tuple((frame.old, frame.index) for frame in frames)
    fresh = sum(not frame.old for frame in frames)
    if 1 < fresh < len(frames):
        found = follow_frames(run, old, result, axis, fresh)
        indices = [frame.index for frame in found if not frame.old]
        if None not in indices and len(set(indices)) == len(indices):
            return tuple((frame.old, frame.index) for frame in found)
    return plain


def frames_by_bytes(before: torch.Tensor, after: torch.Tensor, axis: int) -> Frames | None:
    """The same, read off the bytes of a call; None where bytes cannot tell: frames that are equal, or empty."""
    old, new = _rows(before, axis), _rows(after, axis)
    if old is None or new is None or (old and new and len(old[0]) != len(new[0])):
        return None
    places = {row: i for i, row in enumerate(old)}
    if len(places) < len(old):
        return None
    return tuple((row in places, places.get(row)) for row in new)


def _rows(tensor: torch.Tensor, axis: int) -> list[bytes] | None:
    frames = as_integers(tensor).movedim(axis, 0).contiguous()
    if frames[:1].numel() == 0 and len(frames):
        return None
    flat = frames.reshape(len(frames), -1).cpu() if len(frames) else frames
    return [bytes(row.numpy().tobytes()) for row in flat]


def agree(graph: Frames, read: Frames) -> bool:
    """Whether the bytes of a call are where its graph has them. A fresh frame may have the bytes of an old one."""
    return len(graph) == len(read) and all(a == b for a, b in zip(graph, read, strict=True) if a[0])


Policy = KeepLast | PromptPlusLast


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """One call as a state sees it: extents before and after, and what was kept, if it could be followed."""

    old: int
    new: int
    frames: Frames


def fitting(calls: Sequence[Seen], bound: int, added: int) -> list[Policy]:
    """Every policy of this bound that keeps exactly what each call kept when it added ``added`` frames, simplest first.

    All of them are the same for these calls: they differ only for extents or advances that were not met.
    """
    return [policy for policy in _policies(calls, bound) if all(_explains(policy, call, added) for call in calls)]


def _policies(calls: Sequence[Seen], bound: int) -> Iterator[Policy]:
    """Those that may be meant: what is kept of the head ends where some call left frames out."""
    yield KeepLast(bound)
    yield KeepLast(bound, "prepend")
    breaks = {at for call in calls if call.new == bound for at in _breaks(call.frames)}
    for prompt in sorted(breaks | {bound}):
        yield PromptPlusLast(prompt, bound - prompt)
        if prompt < bound:
            yield PromptPlusLast(prompt, bound - prompt, "prepend")
    yield PromptPlusLast(0, bound, "prepend")


def _breaks(frames: Frames) -> list[int]:
    """Positions whose frame does not follow the one before."""
    pairs = enumerate(zip(frames, frames[1:], strict=False), 1)
    return [
        at
        for at, ((old, index), (other, after)) in pairs
        if old != other or (index is not None and after is not None and after != index + 1)
    ]


def _explains(policy: Policy, call: Seen, added: int) -> bool:
    if policy.attended(call.old + added) != call.new:
        return False
    at = 0
    for span in policy.survivors(call.old, added):
        for index in range(span.start, span.stop):
            old, found = call.frames[at]
            if old != (span.source == "old") or (found != index and (old or found is not None)):
                return False
            at += 1
    return True
