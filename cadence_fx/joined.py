"""Where a call joins a state and its fresh frames, before anything is cut.

A state that is cut to its bound in every call does not show in its extent how many frames a call brings. The graph
does, if it has one value with all frames of the old state at one end and fresh ones at the other, of which the next
state is a part: the raw extent (paper section 3.1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import prod

import torch
from torch import fx

from cadence_fx.passes.constants import Constants
from cadence_fx.passes.graphs import GraphFacts
from cadence_fx.passes.ids import IdRun, NotFollowed
from cadence_fx.retention import Order

_TRIED = 8  # values that are followed, those nearest to the next state first

Frames = tuple[tuple[bool, int | None], ...]  # for each position: whether of the old state, and which (None: unknown)


@dataclasses.dataclass(frozen=True, slots=True)
class Joined:
    """One value with all old frames of a state and ``added`` fresh ones along ``axis``, in this order in memory.

    Attributes:
        number: of the value among the `tensors_made` of its graph.
        shape: of the value.
        frames: what each position of the next state holds of it, fresh frames by their number among the fresh ones.
    """

    number: int
    shape: tuple[int, ...]
    axis: int
    added: int
    order: Order
    frames: Frames


def is_cut_beyond(frames: Frames, old: int) -> bool:
    """Whether more fresh frames may have come than a state of ``old`` frames shows: not where the cut went through its
    old frames, and all between the cut and the newest is there."""
    fresh = [at for at, (is_old, _) in enumerate(frames) if not is_old]
    kept = len(frames) - len(fresh)
    if not fresh or len(set(fresh)) != fresh[-1] - fresh[0] + 1 or kept in (0, old):
        return bool(fresh)
    appended = fresh[-1] == len(frames) - 1 and frames[fresh[0] - 1] == (True, old - 1)
    prepended = fresh[0] == 0 and frames[fresh[-1] + 1 :][:1] == ((True, 0),)
    return not (appended or prepended)


def find_joined(
    graph: fx.Graph, facts: GraphFacts, constants: Constants, run: IdRun, old: fx.Node, result: fx.Node, axis: int
) -> Joined | None:
    """The value nearest to ``result`` that holds all frames of ``old`` and fresh ones, if there is one.

    Args:
        run: follows ``old`` to ``result``, the next state, whose frames lie along ``axis`` as those of ``old`` do.
    """
    before, kept = _shape(old), run.result.shape[axis]
    if before is None or before[axis] == 0:
        return None
    rest = sorted(before[:axis] + before[axis + 1 :])
    tried = 0
    for node in reversed(run.nodes):
        shape = _shape(node)
        if shape is None or node in (old, result) or len(shape) != len(before) or facts.writes_to(node):
            continue
        axes = [
            at
            for at, size in enumerate(shape)
            if size > max(kept, before[axis])
            and sorted(shape[:at] + shape[at + 1 :]) == rest
            and (at == axis or before[axis] > 1)  # one frame alone may be told along any axis of size 1
        ]
        for at in axes:
            tried += 1
            try:
                inside = _held(IdRun(graph, facts, constants, old, node).result, at, before, axis)
                taken = _held(IdRun(graph, facts, constants, node, result).result, axis, shape, at)
            except NotFollowed:
                continue
            found = _arranged(inside, taken, before[axis])
            if found is not None:
                return Joined(tensors_made(graph).index(node), shape, at, *found)
            if tried >= _TRIED:
                return None
    return None


def _arranged(
    inside: Sequence[int | None] | None, taken: Sequence[int | None] | None, old: int
) -> tuple[int, Order, Frames] | None:
    """How many fresh frames a value has, on which side, and what is taken of it.

    Args:
        inside: for each of its positions, the old frame that it holds, None for a fresh one.
        taken: for each position of the next state, which position of the value it holds.
        old: how many old frames there are.
    """
    if inside is None or taken is None:
        return None
    whole, fresh = list(range(old)), [None] * (len(inside) - old)
    if [*inside] == [*whole, *fresh]:
        order: Order = "append"
        first = old
    elif [*inside] == [*fresh, *whole]:
        order, first = "prepend", 0
    else:
        return None
    frames: list[tuple[bool, int | None]] = []
    for at in taken:
        if at is None:
            return None
        held = inside[at]
        frames.append((False, at - first) if held is None else (True, held))
    return len(fresh), order, tuple(frames)


def tensors_made(graph: fx.Graph) -> list[fx.Node]:
    """The operators that return a tensor, in order of execution: the same ones whether sizes are symbols or numbers."""
    return [node for node in graph.nodes if node.op == "call_function" and _shape(node) is not None]


def _held(numbers: torch.Tensor, along: int, shape: Sequence[int], axis: int) -> list[int | None] | None:
    """For each position of a value, the frame of what was followed whose elements it holds, None where it holds none;
    None in all where a position holds elements of several, or of what only the call decides.

    Args:
        numbers, along: element numbers of the value, and the axis of its positions.
        shape, axis: of what was followed.
    """
    if numbers.numel() == 0:
        return None
    flat = numbers.movedim(along, 0).reshape(numbers.shape[along], -1).long()
    index = flat // prod(shape[axis + 1 :]) % shape[axis]
    index[flat >= prod(shape)] = -1
    if bool((flat < 0).any()) or bool((index != index[:, :1]).any()):
        return None
    return [None if at < 0 else at for at in index[:, 0].tolist()]


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
