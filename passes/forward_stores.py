"""What is stored in memory and read back is read where it was made, and memory that only carried it goes.

Before, with a buffer that the graph makes, or a workspace that means nothing between calls::

    k = aten.mul(x, w)
    row = aten.select(workspace, 0, 3)
    aten.copy_(row, k)                                     k = aten.mul(x, w)
    held = aten.slice(aten.select(workspace, 0, 3), 1, 0, 2)       ->    held = aten.slice(k, 1, 0, 2)
    y = aten.matmul(q, held)                               y = aten.matmul(q, held)

Why no byte moves: the last store that touches what is read covers it, was a ``copy_`` without a change of dtype, device
or shape, and its source has not been written since. The reader gets a view of the source with the shape, the strides
and the alignment of the view that it had, so it runs the same kernel on the same bytes. A buffer is given up only when
every read of it can be served so; otherwise it stays as it is, and so do all of its readers.

A store that a later one covers before anybody reads is never seen: it goes too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.fx as fx

from cadence_fx.passes.base import PassContext, PassResult
from cadence_fx.passes.constants import Constants
from cadence_fx.passes.emission import emit_source
from cadence_fx.passes.graphs import (
    GraphFacts,
    OpOverload,
    bound_args,
    erase_dead_code,
    location,
    may_write,
    tensor_val,
)
from cadence_fx.passes.movement import FILLS
from cadence_fx.passes.moves import boxes_meet
from cadence_fx.passes.pieces import Piece, Source, Stale, aligned, whole
from cadence_fx.passes.placement import is_view
from cadence_fx.passes.reader import Unresolvable
from cadence_fx.passes.windows import Windows, through_window

__all__ = ["ForwardStores"]

aten = torch.ops.aten
_FARTHEST = 256  # stores that are looked back at for one read
_ALIGNMENT = 16  # bytes; kernels are chosen by it


@dataclass(slots=True)
class _Store:
    """A write on memory. ``box``: where, in coordinates of the node that made the memory (None: anywhere)."""

    node: fx.Node
    base: fx.Node | None
    box: Piece | None
    source: Piece | None  # of the box, where it is a plain copy
    seen: bool = False  # whether anybody may have read it


@dataclass(slots=True)
class _Memory:
    """Memory that might be given up: its stores, in order, and its readers with what each would read instead."""

    stores: list[_Store] = field(default_factory=list)
    reads: list[tuple[fx.Node, fx.Node, Piece]] = field(default_factory=list)
    dead: list[_Store] = field(default_factory=list)
    seen: int = 0  # all stores before this one have been seen
    kept: str | None = None  # why it must stay


class ForwardStores:
    """Serves reads from where the bytes were made, and drops stores that nobody reads."""

    name = "forward_stores"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        graph = gm.graph
        facts = ctx.facts_of(graph)
        walk = _Walk(facts, Windows(facts, Constants(gm, facts)), _candidates(graph, facts, ctx.scratch_inputs))
        for node in facts.order:
            walk.visit(node)
        served = 0
        for memory in walk.memories.values():
            if memory.kept is None and memory.reads:
                served += _serve(graph, memory)
            if memory.kept is not None and memory.stores:
                ctx.notes.append(f"{self.name}: {memory.stores[0].node.name} stays: {memory.kept}")
        covered = [store for memory in walk.memories.values() for store in memory.dead]
        for store in covered:
            if not store.node.users:
                graph.erase_node(store.node)
        if not served and not covered:
            return PassResult(gm, False)
        erased = erase_dead_code(graph, ctx.scratch_inputs)
        ctx.notes.append(
            f"{self.name}: {served} reads of memory are served from where it was made; "
            f"{erased + len(covered)} operators are no longer needed"
        )
        return PassResult(gm, True)


def _candidates(graph: fx.Graph, facts: GraphFacts, scratch: frozenset[str]) -> set[fx.Node]:
    """Alias classes of memory that is written and that nobody outside sees."""
    outside = {
        facts.alias_class(node)
        for node in graph.nodes
        if node.op == "get_attr" or (node.op == "placeholder" and node.name not in scratch)
    }
    return facts.writes.keys() - outside


class _Walk:
    """One look at the graph, in its order."""

    def __init__(self, facts: GraphFacts, windows: Windows, candidates: set[fx.Node]) -> None:
        self._facts = facts
        self._windows = windows
        self.memories = {rep: _Memory() for rep in candidates}

    def visit(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            return
        written = may_write(node)
        filled = written if node.target is aten.copy_.default or node.target in FILLS else ()
        hits: dict[fx.Node, Piece] = {}
        for arg in node.all_input_nodes:
            memory = self.memories.get(self._facts.alias_class(arg))
            if memory is None or is_view(self._facts, node, arg):
                continue
            if arg in filled and arg is not bound_args(node).get("src"):
                continue  # what is there is not read
            hit = self._read(memory, node, arg) if arg not in written else None
            if hit is None:
                memory.kept = memory.kept or f"{node.name} reads {arg.name}, which is not one value ({location(node)})"
                self._all_seen(memory)
            else:
                hits[arg] = hit
                memory.reads.append((node, arg, hit))
        for target in written:
            memory = self.memories.get(self._facts.alias_class(target))
            if memory is not None:
                self._store(memory, node, target, hits)

    def _all_seen(self, memory: _Memory) -> None:
        for store in memory.stores[memory.seen :]:
            store.seen = True
        memory.seen = len(memory.stores)

    def _read(self, memory: _Memory, node: fx.Node, arg: fx.Node) -> Piece | None:
        """What ``node`` may read instead of ``arg``, if there is one such value."""
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
            return None
        if self._facts.aliases(node, arg):
            return None
        try:
            window = self._windows.of(arg)
        except (Unresolvable, ValueError):
            return None
        store = self._last_store(memory, window) if window is not None else None
        if window is None or store is None:
            return None
        store.seen = True
        piece = _seen_through(store.source, window) if store.source is not None else None
        if piece is None:
            return None
        source: Source = piece.source  # type: ignore[assignment]
        position = self._facts.order[store.node]
        if self._facts.writes_to(source.node, after=position, before=self._facts.order[node]):
            return None
        if any(self._facts.aliases(source.node, target) for target in may_write(node)):
            return None  # it would read what it writes
        loose = node.target is aten.copy_.default  # it takes any strides to the bytes of its target
        return piece if loose or _same_geometry(piece, source, tensor_val(arg)) else None

    def _last_store(self, memory: _Memory, window: Piece) -> _Store | None:
        """The store that covers a window, if no later one touches it."""
        base, start, size = _box(window)
        for store in reversed(memory.stores[-_FARTHEST:]):
            if store.box is None or store.base is not base:
                return None
            if boxes_meet(start, size, store.box.start, store.box.size):
                return store if _contains(store.box, start, size) else None
        return None

    def _store(self, memory: _Memory, node: fx.Node, target: fx.Node, hits: dict[fx.Node, Piece]) -> None:
        store = _Store(node, None, None, None, seen=True)
        if node.target is aten.copy_.default or node.target in FILLS:
            try:
                window = self._windows.of(target)
                if window is None:
                    return
                base, _, _ = _box(window)
                shape = tuple(tensor_val(target).shape)
                box = through_window(Piece((0,) * len(shape), shape, Stale()), window)
                store = _Store(node, base, box, self._source(memory, node, target, window, hits), bool(node.users))
            except (Unresolvable, ValueError):
                pass
        if store.box is not None:
            self._cover(memory, store)
        memory.stores.append(store)

    def _cover(self, memory: _Memory, top: _Store) -> None:
        """Stores right under ``top`` that nobody has seen are dead."""
        assert top.box is not None
        while memory.stores and not (last := memory.stores[-1]).seen:
            if last.box is None or last.base is not top.base or not _contains(top.box, last.box.start, last.box.size):
                break
            memory.dead.append(memory.stores.pop())
            memory.seen = min(memory.seen, len(memory.stores))

    def _source(
        self, memory: _Memory, node: fx.Node, target: fx.Node, window: Piece, hits: dict[fx.Node, Piece]
    ) -> Piece | None:
        """What a copy stores, as a piece of the node that made the memory; None where it is no plain copy."""
        if node.target is not aten.copy_.default:
            return None
        source: fx.Node = bound_args(node)["src"]
        have, want = tensor_val(source), tensor_val(target)
        if (have.dtype, have.device, have.shape) != (want.dtype, want.device, want.shape):
            return None
        if have.is_conj() or have.is_neg() or want.is_conj() or want.is_neg():
            return None
        if self._facts.aliases(source, target):
            return None
        return through_window(hits.get(source) or whole(source, have.shape)[0], window)


def _box(window: Piece) -> tuple[fx.Node, tuple[int, ...], tuple[int, ...]]:
    """Base, start and size of a window."""
    assert isinstance(window.source, Source)
    index = window.source.index
    return window.source.node, tuple(s for _, s in index), tuple(1 if d is None else window.size[d] for d, _ in index)


def _contains(outer: Piece, start: tuple[int, ...], size: tuple[int, ...]) -> bool:
    return all(a <= b and b + m <= a + n for a, n, b, m in zip(outer.start, outer.size, start, size, strict=True))


def _seen_through(stored: Piece, window: Piece) -> Piece | None:
    """What a view with this window shows of ``stored``, a piece of its base that covers it."""
    assert isinstance(stored.source, Source) and isinstance(window.source, Source)
    shown = window.source.index
    if any(n != 1 for d, n in enumerate(window.size) if d not in {followed for followed, _ in shown}):
        return None  # an expanded view
    index = tuple(
        (None, s) if e is None else (shown[e][0], s + shown[e][1] - stored.start[e]) for e, s in stored.source.index
    )
    return aligned(Piece((0,) * len(window.size), window.size, Source(stored.source.node, index)))


def _same_geometry(piece: Piece, source: Source, have: torch.Tensor) -> bool:
    """Whether a view of the source has the strides and the alignment of the tensor that it stands for."""
    base = tensor_val(source.node)
    strides = {d: stride for (d, _), stride in zip(source.index, base.stride(), strict=True) if d is not None}
    if [strides.get(d) for d in range(have.dim())] != list(have.stride()):
        return False
    offset = base.storage_offset() + sum(s * stride for (_, s), stride in zip(source.index, base.stride(), strict=True))
    return (offset - have.storage_offset()) * have.element_size() % _ALIGNMENT == 0


def _serve(graph: fx.Graph, memory: _Memory) -> int:
    for node, arg, piece in memory.reads:
        with graph.inserting_before(node):
            node.replace_input_with(arg, emit_source(graph, piece, node))
    return len(memory.reads)
