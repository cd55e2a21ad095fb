"""Views of nodes, emitted into a graph: of a box, and of where a piece has its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from cadence_fx.passes.graphs import emit, tensor_val
from cadence_fx.passes.pieces import Piece, Source

__all__ = ["Rows", "emit_box", "emit_copy", "emit_source"]

aten = torch.ops.aten


def emit_box(graph: fx.Graph, node: fx.Node, start: tuple[int, ...], size: tuple[int, ...], like: fx.Node) -> fx.Node:
    """``node[start : start + size]``, at the insertion point, with the origin of ``like``."""
    for dim, (first, length) in enumerate(zip(start, size, strict=True)):
        if (first, length) != (0, tensor_val(node).shape[dim]):
            node = emit(graph, aten.slice.Tensor, node, dim, first, first + length, like=like)
    return node


def emit_source(graph: fx.Graph, piece: Piece, like: fx.Node, without: Sequence[int] = ()) -> fx.Node:
    """The source of ``piece`` with the dimensions of the value, but those in ``without``; size one where it is
    broadcast."""
    assert isinstance(piece.source, Source)
    index = piece.source.index
    size = tuple(1 if d is None else piece.size[d] for d, _ in index)
    node = emit_box(graph, piece.source.node, tuple(s for _, s in index), size, like)
    for dim in reversed([e for e, (d, _) in enumerate(index) if d is None]):
        node = emit(graph, aten.select.int, node, dim, 0, like=like)
    followed = [d for d, _ in index if d is not None]
    if followed != sorted(followed):
        node = emit(graph, aten.permute.default, node, [followed.index(d) for d in sorted(followed)], like=like)
    for dim in [at for at, d in enumerate(d for d in range(len(piece.size)) if d not in without) if d not in followed]:
        node = emit(graph, aten.unsqueeze.default, node, dim, like=like)
    return node


def emit_copy(graph: fx.Graph, place: fx.Node, source: fx.Node, like: fx.Node) -> None:
    """``place.copy_(source)`` at the insertion point. Its value is that of ``place``: nothing is traced."""
    node = graph.call_function(aten.copy_.default, (place, source))
    node.meta.update({key: like.meta[key] for key in ("stack_trace", "nn_module_stack") if key in like.meta})
    node.meta["val"] = tensor_val(place)


class Rows:
    """Places in placeholders, for writes: views that several writes share are made once, ahead of ``head``."""

    def __init__(self, graph: fx.Graph, head: fx.Node) -> None:
        self._graph = graph
        self._head = head
        self._known: dict[tuple[Any, ...], fx.Node] = {}

    def place(self, node: fx.Node, piece: Piece, like: fx.Node) -> tuple[fx.Node, list[int]]:
        """The box of ``piece`` in ``node``, and its dimensions that are left out: those its source does not have."""
        index = piece.source.index if isinstance(piece.source, Source) else ()
        followed = {d for d, _ in index}
        without = [d for d, n in enumerate(piece.size) if index and n == 1 and d not in followed]
        if not without:
            return emit_box(self._graph, node, piece.start, piece.size, like), without
        row = node
        with self._graph.inserting_before(self._head):
            for dim, (first, length) in enumerate(zip(piece.start, piece.size, strict=True)):
                if dim not in without and (first, length) != (0, tensor_val(node).shape[dim]):
                    row = self._view(aten.slice.Tensor, row, dim, first, first + length, like=like)
            for gone, dim in enumerate(without):
                row = self._view(aten.select.int, row, dim - gone, piece.start[dim], like=like)
        return row, without

    def _view(self, target: Any, *args: Any, like: fx.Node) -> fx.Node:
        if (target, *args) not in self._known:
            self._known[target, *args] = emit(self._graph, target, *args, like=like)
        return self._known[target, *args]
