"""Proof of retention: where does every byte of the new state come from? (paper section 4)

A policy that the code does not follow would be found only when bytes differ, which may be turns later. So the new
state is traced to the old one on element numbers (``ids``), position by position along the frame axis: a position holds
exactly one frame of the old state, or no byte of it. That is compared with what the declared policy lets survive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.fx as fx

from cadence_fx.passes.base import RegionSlot
from cadence_fx.passes.constants import Constants
from cadence_fx.passes.graphs import GraphFacts, location, output_node, tensor_val
from cadence_fx.passes.ids import IdRun, Leaf, NotFollowed
from cadence_fx.retention import Pinned, Span

__all__ = [
    "Contradicted",
    "Frame",
    "Proved",
    "Unproved",
    "Verdict",
    "follow_frames",
    "prove_retention",
    "prove_retentions",
]

_SAMPLE = 4096  # elements of a frame that are looked at to tell which fresh frame it is


@dataclass(frozen=True, slots=True)
class Proved:
    """The graph keeps what the policy says, byte for byte."""

    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Contradicted:
    """The graph keeps something else; ``position`` is the first along the frame axis that differs."""

    declared: tuple[Span, ...]
    found: tuple[Span, ...]
    position: int


@dataclass(frozen=True, slots=True)
class Unproved:
    """The graph may or may not keep what the policy says; ``node`` is where the proof ends."""

    reason: str
    node: str
    operator: str
    location: str | None


Verdict = Proved | Contradicted | Unproved


@dataclass(frozen=True, slots=True)
class Frame:
    """One position of a state: a frame of the old state, or a fresh one (``index`` None: nobody knows which)."""

    old: bool
    index: int | None
    leaf: Leaf | None = None


def prove_retention(gm: fx.GraphModule, slot: RegionSlot) -> Verdict:
    """The verdict on one slot of a static graph, before any rewrite."""
    return prove_retentions(gm, [slot])[0]


def prove_retentions(gm: fx.GraphModule, slots: Sequence[RegionSlot]) -> list[Verdict]:
    """Verdicts on several slots of one graph, which is analysed once."""
    facts = GraphFacts(gm.graph)
    constants = Constants(gm, facts)
    return [_prove(gm.graph, facts, constants, slot) for slot in slots]


def _prove(graph: fx.Graph, facts: GraphFacts, constants: Constants, slot: RegionSlot) -> Verdict:
    old = next(node for node in graph.nodes if node.op == "placeholder" and node.name == slot.placeholder)
    result = old if slot.output is None else output_node(graph).args[0][slot.output]  # type: ignore[index]
    if not isinstance(result, fx.Node):
        return Unproved("the new state is not a tensor of the graph", old.name, str(result), None)
    policy = slot.declared.retention
    extent = tensor_val(result).shape[slot.axis]
    if isinstance(policy, Pinned):
        pinned, everything = (Span("new", 0, policy.n),), (Span("new", 0, extent),)
        return Proved(everything) if extent == policy.n else Contradicted(pinned, everything, min(extent, policy.n))
    declared = policy.survivors(slot.extent, slot.advance)
    try:
        run = IdRun(graph, facts, constants, old, result)
        frames = follow_frames(run, old, result, slot.axis, slot.advance)
    except NotFollowed as end:
        return _unproved(end.reason, end.node)
    if declared is None:
        return Proved(_spans(frames, []))
    return _compare(declared, frames, result)


def _compare(declared: tuple[Span, ...], frames: list[Frame], result: fx.Node) -> Verdict:
    expected = [(span.source == "old", index) for span in declared for index in range(span.start, span.stop)]
    doubt: Unproved | None = None
    for position, (frame, (old, index)) in enumerate(zip(frames, expected, strict=False)):
        if frame.old == old and frame.index in (index, None):
            continue
        if not frame.old and frame.leaf is not None and (reason := _doubt(frame.leaf, old, frames, expected)):
            doubt = doubt or _unproved(reason, frame.leaf.node)  # a position that surely differs says more
        else:
            return Contradicted(declared, _spans(frames, expected), position)
    if len(frames) != len(expected):
        return Contradicted(declared, _spans(frames, expected), min(len(frames), len(expected)))
    return doubt or Proved(_spans(frames, expected))


def _doubt(leaf: Leaf, old: bool, frames: list[Frame], expected: Sequence[tuple[bool, int]]) -> str | None:
    """Why a fresh frame that is not the declared frame may be right all the same."""
    if old:  # it may compute the very bytes that it read
        return "computes what the policy says is kept" if leaf.from_state else None
    # The dimension that seems to count frames may count something else, unless it does so all along the run.
    run = [frame.index for frame, (kept, _) in zip(frames, expected, strict=False) if not (frame.old or kept)]
    return "may hold another fresh frame than the policy keeps" if len(set(run)) < max(len(run), 2) else None


def _unproved(reason: str, node: fx.Node) -> Unproved:
    return Unproved(reason, node.name, str(node.target), location(node))


def _spans(frames: list[Frame], expected: Sequence[tuple[bool, int]]) -> tuple[Span, ...]:
    """Frames as spans. A fresh frame whose number nobody knows gets the one expected there, else the next one."""
    spans: list[Span] = []
    fresh = 0
    for position, frame in enumerate(frames):
        index = frame.index
        if index is None:
            known = position < len(expected) and not expected[position][0]
            index = expected[position][1] if known else fresh
        fresh = fresh if frame.old else index + 1
        source = "old" if frame.old else "new"
        if spans and spans[-1].source == source and spans[-1].stop == index:
            spans[-1] = Span(spans[-1].source, spans[-1].start, index + 1)
        else:
            spans.append(Span("old" if frame.old else "new", index, index + 1))
    return tuple(spans)


def follow_frames(run: IdRun, old: fx.Node, result: fx.Node, axis: int, advance: int) -> list[Frame]:
    """What each position of ``result`` along ``axis`` holds of the placeholder ``old``, by the element numbers of
    ``run``, in a call that brings ``advance`` frames. Raises ``NotFollowed`` where it is neither one old frame nor
    fresh."""
    numbers = run.result
    before, after = tensor_val(old).shape, numbers.shape
    if numbers.numel() == 0:
        return [Frame(False, None)] * after[axis]
    others = [dim for dim in range(numbers.dim()) if dim != axis]
    least = numbers.amin(others).tolist() if others else numbers.tolist()
    most = numbers.amax(others).tolist() if others else numbers.tolist()
    if min(least) < 0:
        chooser = run.undecided[-1 - min(least)]
        raise NotFollowed("places bytes of the state by an index that only the call knows", chooser)
    count = tensor_val(old).numel()
    comparable = [size for d, size in enumerate(before) if d != axis] == [after[d] for d in others]
    inner, first_frame = prod(before[axis + 1 :]), _first_frame(before, axis)
    frames = []
    for position in range(after[axis]):
        frame = numbers.select(axis, position)
        if least[position] >= count:
            frames.append(_fresh_frame(run, frame, advance))
            continue
        if most[position] >= count:
            raise NotFollowed(f"holds bytes of old and new frames at position {position}", result)
        index = int(frame.reshape(-1)[0]) // inner % before[axis]
        if not comparable or not torch.equal(frame, first_frame + index * inner):
            raise NotFollowed(f"holds bytes of the old state at position {position}, but no whole frame of it", result)
        frames.append(Frame(True, index))
    return frames


def _first_frame(shape: Sequence[int], axis: int) -> torch.Tensor:
    """The numbers of frame 0 of a state of ``shape``."""
    outer, inner = prod(shape[:axis]), prod(shape[axis + 1 :])
    rows = torch.arange(outer, dtype=torch.int32).mul_(shape[axis] * inner)
    numbers = rows[:, None] + torch.arange(inner, dtype=torch.int32)
    return numbers.view((*shape[:axis], *shape[axis + 1 :]))


def _fresh_frame(run: IdRun, frame: torch.Tensor, advance: int) -> Frame:
    """A frame without old bytes; which one it is, if just one dimension of its leaf can count the fresh frames."""
    sample = frame.reshape(-1)
    sample = sample[:: max(1, sample.numel() // _SAMPLE)].long()
    leaf = run.leaf_of(int(sample[0]))
    if leaf is None or int(sample.min()) < leaf.first or int(sample.max()) >= leaf.first + prod(leaf.shape):
        return Frame(False, None)
    places = []
    for dim, size in enumerate(leaf.shape):
        if size == advance > 1:
            at = (sample - leaf.first) // prod(leaf.shape[dim + 1 :]) % size
            places += [int(at[0])] if bool((at == at[0]).all()) else []
    return Frame(False, places[0] if len(places) == 1 else None, leaf)
