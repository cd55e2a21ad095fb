"""How early a write on the new state may stand.

Old and new state begin at one address, so a write may stand as soon as its source is there and nothing that it destroys
is read any more: by a node of the graph, by another write, or by a result that is a view of the old state. What an
early write has read can be freed; were they all at the end, the graph would hold the new frames of every layer at once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import torch.fx as fx

from cadence_fx.passes.effects import may_raise
from cadence_fx.passes.graphs import RUNS_EAGER, GraphFacts, may_write, tensor_val
from cadence_fx.passes.movement import DROPOUTS, is_inert_dropout
from cadence_fx.passes.moves import Geometry, Move
from cadence_fx.passes.pieces import Source
from cadence_fx.passes.reader import Unresolvable
from cadence_fx.passes.view_rules import SPLITS, VIEW_RULES
from cadence_fx.passes.windows import Windows

__all__ = ["Carries", "is_view", "place"]

_MOST_BUCKETS = 8  # a read that spans more is kept apart, among those that every write is compared with
_MOST_COMPARED = 512  # where more would have to be looked at, the last read of all decides


@dataclass(frozen=True, slots=True)
class Carries:
    """The old states of a graph and how the new ones lie over them."""

    olds: Sequence[fx.Node]
    geometries: Sequence[Geometry]
    by_class: dict[fx.Node, int]


@dataclass(frozen=True, slots=True)
class _Read:
    """A read of a box of the old state, at a position in the graph."""

    position: int
    start: tuple[int, ...]
    size: tuple[int, ...]


class _Reads:
    """Reads of one carry, found by the addresses that they span."""

    def __init__(self, geometry: Geometry, reads: Sequence[_Read]) -> None:
        self._geometry = geometry
        self._all = reads
        self._last = max((read.position for read in reads), default=-1)
        _, end = geometry.span(geometry.old, (0,) * len(geometry.old), geometry.old)
        self._width = max(1, end // max(1, len(reads)))
        self._near: dict[int, list[_Read]] = {}
        self._wide: list[_Read] = []
        for read in reads:
            low, high = geometry.span(geometry.old, read.start, read.size)
            if (high - low) // self._width >= _MOST_BUCKETS:
                self._wide.append(read)
            else:
                for bucket in range(low // self._width, high // self._width + 1):
                    self._near.setdefault(bucket, []).append(read)

    def last(self, move: Move) -> int:
        """The position of the last read of what ``move`` destroys, -1 without one."""
        start, size = move.piece.start, move.piece.size
        low, high = self._geometry.span(self._geometry.new, start, size)
        candidates = self._all
        if (high - low) // self._width < _MOST_BUCKETS:
            buckets = range(low // self._width, high // self._width + 1)
            candidates = [*self._wide, *(read for bucket in buckets for read in self._near.get(bucket, ()))]
        if len(candidates) > _MOST_COMPARED:
            return self._last
        return max((r.position for r in candidates if self._geometry.meet(start, size, r.start, r.size)), default=-1)


def place(
    facts: GraphFacts,
    windows: Windows,
    live: Set[fx.Node],
    carries: Carries,
    moves: Sequence[Move],
    results: Iterable[fx.Node],
) -> tuple[dict[fx.Node, list[Move]], list[Move]]:
    """``moves`` as those that may follow a node of the graph, and those that must stand at its end.

    Args:
        live: nodes that stay; others read nothing.
        results: what is returned besides the states; views of old states among them are copied out at the end.
    """
    nodes = list(facts.order)
    moves = [move for move in moves if not move.stays(carries.geometries[move.into])]
    reads = _reads(facts, windows, live, carries)
    at_end = len(nodes)
    for result in results:
        if (which := carries.by_class.get(facts.alias_class(result))) is not None:
            reads[which] += _read(windows, carries, which, result, at_end)
    together = len(carries.by_class) < len(carries.olds)  # traced on states in one memory: nobody knows whose a read is
    late = [m for m in moves if together or m.reads is not None or facts.writes_to(carries.olds[m.into])]
    for move in late:
        if move.reads is not None:
            old = carries.geometries[move.reads].old
            start, size = move.source_box() if move.direct else ((0,) * len(old), old)
            reads[move.reads].append(_Read(at_end, start, size))
    known = [_Reads(geometry, mine) for geometry, mine in zip(carries.geometries, reads, strict=True)]
    first = max(order for node, order in facts.order.items() if node.op == "placeholder")
    raising = _last_that_may_raise(facts, live, carries)
    early: dict[fx.Node, list[Move]] = {}
    kept = set(map(id, late))
    for move in moves:
        if id(move) in kept:
            continue
        position = max(first, raising, known[move.into].last(move), _available(facts, move))
        if position == at_end:
            late.append(move)
        else:
            early.setdefault(nodes[position], []).append(move)
    return early, late


def _available(facts: GraphFacts, move: Move) -> int:
    """From which position on the source holds its bytes."""
    if not isinstance(move.piece.source, Source):
        return -1
    node = move.piece.source.node
    return max(facts.order[node], *(facts.order[write] for write in facts.writes_to(node)), -1)


def _last_that_may_raise(facts: GraphFacts, live: Set[fx.Node], carries: Carries) -> int:
    """On the host a call may end halfway, and then the old state must be whole. A device launches all or nothing, or
    parts with something that runs eager between them."""
    on_host = all(tensor_val(old).device.type == "cpu" for old in carries.olds)
    stops = may_raise if on_host else (lambda node: RUNS_EAGER in node.meta)
    return max((order for node, order in facts.order.items() if node in live and stops(node)), default=-1)


def _reads(facts: GraphFacts, windows: Windows, live: Set[fx.Node], carries: Carries) -> list[list[_Read]]:
    """For each carry, the reads by live nodes."""
    reads: list[list[_Read]] = [[] for _ in carries.olds]
    for node, position in facts.order.items():
        if node not in live or node.op in ("placeholder", "output"):
            continue
        for arg in node.all_input_nodes:
            which = carries.by_class.get(facts.alias_class(arg))
            if which is not None and not is_view(facts, node, arg):
                reads[which] += _read(windows, carries, which, arg, position)
    return reads


def is_view(facts: GraphFacts, node: fx.Node, base: fx.Node) -> bool:
    """Whether ``node`` looks at ``base`` without reading it: whoever uses it does."""
    if not facts.aliases(node, base) or may_write(node):
        return False
    if node.target in DROPOUTS:
        return is_inert_dropout(node)
    return node.target is operator.getitem or node.target in VIEW_RULES or node.target in SPLITS


def _read(windows: Windows, carries: Carries, which: int, node: fx.Node, position: int) -> list[_Read]:
    """What reading ``node`` reads of a carry: a box of it, or all of it where nobody knows."""
    shape = carries.geometries[which].old
    everything = [_Read(position, (0,) * len(shape), shape)]
    try:
        window = windows.of(node)
    except (Unresolvable, ValueError):
        return everything
    if window is None:
        return []
    if not isinstance(window.source, Source) or window.source.node is not carries.olds[which]:
        return everything
    index = window.source.index
    return [_Read(position, tuple(s for _, s in index), tuple(1 if d is None else window.size[d] for d, _ in index))]
