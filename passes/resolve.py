"""Where the bytes of a value are: it is followed back through operators that only place bytes.

The question is asked for the *end* of the graph: a piece may name a node only if that node still holds the bytes when
every other operator has run. So the answer depends on time. A buffer that the graph makes and then fills by slice
assignment is replayed write by write; a value read before its memory was written again cannot be named at all.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from cadence_fx.passes.constants import Constants
from cadence_fx.passes.graphs import GraphFacts, bound_args, tensor_val
from cadence_fx.passes.movement import DROPOUTS, is_inert_dropout
from cadence_fx.passes.pieces import (
    Fill,
    Piece,
    Source,
    Stale,
    aligned,
    crop,
    drop_dim,
    expand,
    insert_dim,
    merge,
    overwrite,
    permute,
    shift,
    whole,
)

__all__ = ["Resolver", "Unresolvable"]

aten = torch.ops.aten
_DEEPEST = 120  # longer chains are copied whole; keeps well inside Python's recursion limit
_MOST_PIECES = 4096


class Unresolvable(Exception):
    """The bytes are nowhere to be had at the end of the graph."""


class Resolver:
    """Resolves values of one graph. ``free`` holds nodes that are computed whatever the answer is.

    A piece whose bytes a free node also holds names that node in ``instead``.
    """

    def __init__(self, facts: GraphFacts, constants: Constants, free: set[fx.Node]) -> None:
        self.facts = facts
        self.constants = constants
        self.free = free
        self._end = len(facts.order)
        self._known: dict[tuple[fx.Node, int], list[Piece] | None] = {}
        self._depth = 0

    def at_end(self, node: fx.Node) -> list[Piece]:
        """Pieces of ``node`` as it is at the end. Raises ``Unresolvable``, never for a node that is returned."""
        return [aligned(piece) for piece in self._at(node, self._end)]

    def _at(self, node: fx.Node, time: int) -> list[Piece]:
        """Pieces of what ``node`` held just before position ``time``."""
        key = (node, len(self.facts.writes_to(node, before=time)))
        if key not in self._known:
            self._known[key] = None  # stands while the answer is sought
            self._known[key] = self._seek(node, time)
        found = self._known[key]
        if found is None:
            raise Unresolvable(node.name)
        return found

    def _seek(self, node: fx.Node, time: int) -> list[Piece] | None:
        lasting = not self.facts.writes_to(node, after=time - 1)
        self._depth += 1
        try:
            if self._depth > _DEEPEST:
                raise Unresolvable(node.name)
            pieces = merge(self._through(node, time))
            if len(pieces) > _MOST_PIECES or any(isinstance(piece.source, Stale) for piece in pieces):
                raise Unresolvable(node.name)
        except Unresolvable:
            return whole(node, tensor_val(node).shape) if lasting else None
        finally:
            self._depth -= 1
        if lasting and node in self.free:
            pieces = [Piece(p.start, p.size, p.source, _same_place(node, p)) for p in pieces]
        return pieces

    def _through(self, node: fx.Node, time: int) -> list[Piece]:
        """Pieces by the operator of ``node``, with later writes on top. Raises ``Unresolvable`` without a rule."""
        if node.target in _WRITES:  # an in-place operator returns its target
            return self._at(bound_args(node)["self"], time)
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        if rule is None:
            raise Unresolvable(node.name)
        writes = self.facts.writes_to(node, before=time)
        if not writes:
            return rule(_Reader(self, node, self.facts.order[node]))
        bases = [arg for arg in node.all_input_nodes if self.facts.aliases(arg, node)]
        if bases:  # a view: what its base holds at that time, seen through the same window
            return rule(_Reader(self, node, time))
        pieces = rule(_Reader(self, node, self.facts.order[node]))
        for write in writes:
            pieces = overwrite(pieces, self._written(node, write))
        return pieces

    def _written(self, base: fx.Node, write: fx.Node) -> list[Piece]:
        """What ``write`` puts into ``base``, in coordinates of ``base``."""
        if write.target not in _WRITES:
            raise Unresolvable(write.name)
        values = bound_args(write)
        target: fx.Node = values["self"]
        window = self._window(base, target)
        if window is None:
            return []
        written = _WRITES[write.target](_Reader(self, write, self.facts.order[write]))
        return [_through_window(piece, window) for piece in written]

    def _window(self, base: fx.Node, view: fx.Node) -> Piece | None:
        """The affine place of ``view`` in ``base``; None if it is empty."""
        if tensor_val(view).numel() == 0:
            return None
        chain = [view]
        while chain[-1] is not base:
            inputs = [arg for arg in chain[-1].all_input_nodes if self.facts.aliases(arg, base)]
            if chain[-1].target not in _RULES and chain[-1].target not in _WRITES or len(inputs) != 1:
                raise Unresolvable(view.name)
            chain.append(inputs[0])
        pieces = whole(base, tensor_val(base).shape)
        for node in reversed(chain[:-1]):
            if node.target not in _WRITES:  # an in-place operator returns its target
                pieces = merge(_RULES[node.target](_Reader(self, node, 0, {node.all_input_nodes[0]: pieces})))
        if len(pieces) != 1 or not isinstance(pieces[0].source, Source):
            raise Unresolvable(view.name)
        return pieces[0]


class _Reader:
    """What a rule may ask about the node it explains: its arguments, and their pieces at the time in question."""

    def __init__(
        self, resolver: Resolver, node: fx.Node, time: int, given: dict[fx.Node, list[Piece]] | None = None
    ) -> None:
        self.resolver = resolver
        self.node = node
        self.time = time
        self._given = given
        self.args = bound_args(node) if node.target is not operator.getitem else {}

    def pieces(self, node: fx.Node) -> list[Piece]:
        if self._given is not None:
            return self._given[node] if node in self._given else _refuse(node)
        return self.resolver._at(node, self.time)

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(tensor_val(node).shape)

    @property
    def base(self) -> fx.Node:
        node: fx.Node = self.args["self"]
        return node

    def dim(self, name: str = "dim", rank: int | None = None) -> int:
        dim: int = self.args[name]
        return dim + (len(self.shape(self.base)) if rank is None else rank) if dim < 0 else dim

    def scalar(self, value: Any) -> float | int | bool | complex:
        if isinstance(value, fx.Node):
            constant = self.resolver.constants.tensor(value)
            if constant is None or constant.numel() != 1:
                raise Unresolvable(value.name)
            value = constant.item()
        return value  # type: ignore[no-any-return]

    def indices(self, value: Any) -> list[int]:
        constant = self.resolver.constants.tensor(value) if isinstance(value, fx.Node) else None
        if constant is None or constant.dim() > 1 or constant.dtype not in (torch.int64, torch.int32):
            raise Unresolvable(self.node.name)
        return [int(i) for i in constant.reshape(-1).tolist()]


def _refuse(node: fx.Node) -> list[Piece]:
    raise Unresolvable(node.name)


def _same_place(node: fx.Node, piece: Piece) -> Source:
    return Source(node, tuple((dim, start) for dim, start in enumerate(piece.start)))


def _through_window(piece: Piece, window: Piece) -> Piece:
    """A piece of a view, as a piece of the base that the view is a window of."""
    assert isinstance(window.source, Source)
    index = window.source.index
    followed = {d: e for e, (d, _) in enumerate(index) if d is not None}
    if any(d not in followed and extent != 1 for d, extent in enumerate(window.size)):
        raise Unresolvable("a write through an expanded view")  # several elements of the view are one of the base
    start = tuple(first if d is None else first + piece.start[d] for d, first in index)
    size = tuple(1 if d is None else piece.size[d] for d, _ in index)

    def moved(source: Source) -> Source:
        return Source(source.node, tuple((None if d is None else followed.get(d), s) for d, s in source.index))

    source = moved(piece.source) if isinstance(piece.source, Source) else piece.source
    return Piece(start, size, source, moved(piece.instead) if piece.instead else None)


# -- one rule an operator: pieces of the result from pieces of the arguments -------------------------------------------

_Rule = Callable[[_Reader], list[Piece]]


def _same(r: _Reader) -> list[Piece]:
    base, out = tensor_val(r.base), tensor_val(r.node)
    if (base.dtype, base.device, base.shape) != (out.dtype, out.device, out.shape):
        raise Unresolvable(r.node.name)
    return r.pieces(r.base)


def _dropout(r: _Reader) -> list[Piece]:
    if not is_inert_dropout(r.node):
        raise Unresolvable(r.node.name)
    return r.pieces(r.node.all_input_nodes[0])


def _unit_dims(r: _Reader) -> list[Piece]:
    """A view that only adds or drops dimensions of size one."""
    have, want = r.shape(r.base), r.shape(r.node)
    base, out = tensor_val(r.base), tensor_val(r.node)
    if [s for s in have if s != 1] != [s for s in want if s != 1] or base.dtype != out.dtype:
        raise Unresolvable(r.node.name)
    pieces = r.pieces(r.base)
    for dim in reversed([d for d, s in enumerate(have) if s == 1]):
        pieces = drop_dim(pieces, dim)
    for dim in [d for d, s in enumerate(want) if s == 1]:
        pieces = insert_dim(pieces, dim)
    return pieces


def _cat(r: _Reader) -> list[Piece]:
    out, parts = tensor_val(r.node), r.args["tensors"]
    dim = r.args["dim"] % out.dim()
    pieces: list[Piece] = []
    at = 0
    for part in parts:
        if tensor_val(part).dtype != out.dtype:
            raise Unresolvable(r.node.name)
        if tensor_val(part).dim() == out.dim():  # cat also takes, and skips, an empty one-dimensional tensor
            pieces += shift(r.pieces(part), dim, at)
            at += tensor_val(part).shape[dim]
    return pieces


def _stack(r: _Reader) -> list[Piece]:
    out = tensor_val(r.node)
    dim = r.args["dim"] % out.dim()
    parts = r.args["tensors"]
    if any(tensor_val(part).dtype != out.dtype for part in parts):
        raise Unresolvable(r.node.name)
    return [p for at, part in enumerate(parts) for p in shift(insert_dim(r.pieces(part), dim), dim, at)]


def _slice_bounds(r: _Reader, size: int) -> tuple[int, int]:
    if r.args["step"] != 1:
        raise Unresolvable(r.node.name)
    return slice(r.args["start"], r.args["end"]).indices(size)[:2]


def _slice(r: _Reader) -> list[Piece]:
    dim = r.dim()
    low, high = _slice_bounds(r, r.shape(r.base)[dim])
    return crop(r.pieces(r.base), dim, low, max(low, high))


def _narrow(r: _Reader) -> list[Piece]:
    dim = r.dim()
    start = r.scalar(r.args["start"])
    low = int(start.real) % max(r.shape(r.base)[dim], 1) if int(start.real) < 0 else int(start.real)
    return crop(r.pieces(r.base), dim, low, low + r.args["length"])


def _select(r: _Reader) -> list[Piece]:
    dim = r.dim()
    at = r.args["index"] % r.shape(r.base)[dim]
    return drop_dim(crop(r.pieces(r.base), dim, at, at + 1), dim)


def _permute(r: _Reader) -> list[Piece]:
    rank = len(r.shape(r.base))
    return permute(r.pieces(r.base), [d % rank for d in r.args["dims"]])


def _transpose(r: _Reader) -> list[Piece]:
    rank = len(r.shape(r.base))
    dims = list(range(rank))
    if "dim0" in r.args:
        a, b = r.args["dim0"] % rank, r.args["dim1"] % rank
    elif rank < 2:
        return r.pieces(r.base)
    else:
        a, b = rank - 2, rank - 1
    dims[a], dims[b] = dims[b], dims[a]
    return permute(r.pieces(r.base), dims)


def _expand(r: _Reader) -> list[Piece]:
    return expand(r.pieces(r.base), r.shape(r.base), r.shape(r.node))


def _item(r: _Reader) -> list[Piece]:
    """One output of split, chunk or unbind."""
    many, which = r.node.args
    if not isinstance(many, fx.Node) or many.target not in _SPLITS or not isinstance(which, int):
        raise Unresolvable(r.node.name)
    values = bound_args(many)
    base: fx.Node = values["self"]
    rank = len(r.shape(base))
    dim = values["dim"] % rank
    if many.target is aten.unbind.int:
        which %= r.shape(base)[dim]
        return drop_dim(crop(r.pieces(base), dim, which, which + 1), dim)
    sizes = [val.shape[dim] for val in many.meta["val"]]
    low = sum(sizes[: which % len(sizes)])
    return crop(r.pieces(base), dim, low, low + sizes[which])


def _pad(r: _Reader) -> list[Piece]:
    if r.args.get("mode", "constant") != "constant":
        raise Unresolvable(r.node.name)
    value = r.scalar(r.args["value"] if r.args["value"] is not None else 0)
    shape = list(r.shape(r.base))
    pieces = r.pieces(r.base)
    for pair in range(len(r.args["pad"]) // 2):
        dim = len(shape) - 1 - pair
        before, after = r.args["pad"][2 * pair : 2 * pair + 2]
        low, high = max(0, -before), shape[dim] - max(0, -after)
        pieces = shift(crop(pieces, dim, low, high), dim, max(0, before))
    return overwrite(_fill_whole(r.shape(r.node), value), pieces)


def _roll(r: _Reader) -> list[Piece]:
    if not r.args["dims"]:
        raise Unresolvable(r.node.name)
    shape = r.shape(r.base)
    pieces = r.pieces(r.base)
    for by, dim in zip(r.args["shifts"], r.args["dims"], strict=True):
        dim %= len(shape)
        by = by % shape[dim] if shape[dim] else 0
        cut = shape[dim] - by
        pieces = shift(crop(pieces, dim, 0, cut), dim, by) + crop(pieces, dim, cut, shape[dim])
    return pieces


def _slice_scatter(r: _Reader) -> list[Piece]:
    dim = r.dim()
    low, _ = _slice_bounds(r, r.shape(r.base)[dim])
    return overwrite(r.pieces(r.base), shift(_scattered(r), dim, low))


def _select_scatter(r: _Reader) -> list[Piece]:
    dim = r.dim()
    at = r.args["index"] % r.shape(r.base)[dim]
    return overwrite(r.pieces(r.base), shift(insert_dim(_scattered(r), dim), dim, at))


def _scattered(r: _Reader) -> list[Piece]:
    source = r.args["src"]
    if tensor_val(source).dtype != tensor_val(r.base).dtype:
        raise Unresolvable(r.node.name)
    return r.pieces(source)


def _index_copy(r: _Reader) -> list[Piece]:
    return overwrite(r.pieces(r.base), _index_copied(r))


def _index_copied(r: _Reader) -> list[Piece]:
    source = r.args["source"]
    if not r.shape(r.base) or tensor_val(source).dtype != tensor_val(r.base).dtype:
        raise Unresolvable(r.node.name)
    dim, places = r.dim(), r.indices(r.args["index"])
    if len(set(places)) != len(places):  # the kernel does not say which of two writes stays
        raise Unresolvable(r.node.name)
    parts = r.pieces(source)
    return merge([p for i, at in enumerate(places) for p in shift(crop(parts, dim, i, i + 1), dim, at)])


def _index_select(r: _Reader) -> list[Piece]:
    if "indices" in r.args:
        used = [(d, index) for d, index in enumerate(r.args["indices"]) if index is not None]
        if len(used) != 1:
            raise Unresolvable(r.node.name)
        dim, index = used[0]
        if tensor_val(index).dim() != 1:
            raise Unresolvable(r.node.name)
    else:
        dim, index = r.dim(), r.args["index"]
    if not r.shape(r.base):
        raise Unresolvable(r.node.name)
    size = r.shape(r.base)[dim]
    base = r.pieces(r.base)
    return [
        piece
        for at, which in enumerate(r.indices(index))
        for piece in shift(crop(base, dim, which % size, which % size + 1), dim, at)
    ]


def _fill_whole(shape: Sequence[int], value: float | int | bool | complex) -> list[Piece]:
    return [Piece((0,) * len(shape), tuple(shape), Fill(value))] if 0 not in shape else []


def _zeros(r: _Reader) -> list[Piece]:
    return _fill_whole(r.shape(r.node), 0)


def _ones(r: _Reader) -> list[Piece]:
    return _fill_whole(r.shape(r.node), 1)


def _full(r: _Reader) -> list[Piece]:
    return _fill_whole(r.shape(r.node), r.scalar(r.args["fill_value"]))


def _empty(r: _Reader) -> list[Piece]:
    shape = r.shape(r.node)
    return [Piece((0,) * len(shape), shape, Stale())] if 0 not in shape else []


_SPLITS = {
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.unbind.int,
    aten.tensor_split.sections,
    aten.tensor_split.indices,
}
_RULES: dict[Any, _Rule] = {
    operator.getitem: _item,
    **dict.fromkeys([aten.cat.default, aten.concat.default, aten.concatenate.default], _cat),
    aten.stack.default: _stack,
    aten.slice.Tensor: _slice,
    aten.narrow.default: _narrow,
    aten.select.int: _select,
    aten.permute.default: _permute,
    **dict.fromkeys([aten.transpose.int, aten.t.default, aten.mT.default], _transpose),
    **dict.fromkeys([aten.expand.default, aten.expand_as.default, aten.broadcast_to.default], _expand),
    **dict.fromkeys(
        [
            aten.unsqueeze.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.view.default,
            aten.reshape.default,
            aten._unsafe_view.default,
            aten.flatten.using_ints,
        ],
        _unit_dims,
    ),
    **dict.fromkeys(
        [
            aten.clone.default,
            aten.contiguous.default,
            aten.alias.default,
            aten.detach.default,
            aten.detach_.default,
            aten.lift_fresh_copy.default,
            aten.to.dtype,
            aten.to.device,
            aten.to.dtype_layout,
            aten.to.other,
            aten._to_copy.default,
            aten.view_as.default,
        ],
        _same,
    ),
    **dict.fromkeys([aten.constant_pad_nd.default, aten.pad.default], _pad),
    **dict.fromkeys(DROPOUTS, _dropout),
    aten.roll.default: _roll,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.index_copy.default: _index_copy,
    **dict.fromkeys([aten.index_select.default, aten.index.Tensor], _index_select),
    **dict.fromkeys([aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default], _zeros),
    **dict.fromkeys([aten.ones.default, aten.ones_like.default, aten.new_ones.default], _ones),
    **dict.fromkeys([aten.full.default, aten.full_like.default, aten.new_full.default], _full),
    **dict.fromkeys(
        [
            aten.empty.memory_format,
            aten.empty_like.default,
            aten.new_empty.default,
            aten.empty_strided.default,
            aten.new_empty_strided.default,
        ],
        _empty,
    ),
}


# -- in-place operators: what they put into their target, in coordinates of the target ---------------------------------

def _copied(r: _Reader) -> list[Piece]:
    source = r.args["src"]
    if tensor_val(source).dtype != tensor_val(r.base).dtype:
        raise Unresolvable(r.node.name)
    return expand(r.pieces(source), r.shape(source), r.shape(r.base))


def _filled(r: _Reader) -> list[Piece]:
    return _fill_whole(r.shape(r.base), r.scalar(r.args.get("value", 0)))


_WRITES: dict[Any, _Rule] = {
    aten.copy_.default: _copied,
    aten.fill_.Scalar: _filled,
    aten.fill_.Tensor: _filled,
    aten.zero_.default: _filled,
    aten.index_copy_.default: _index_copied,
}
