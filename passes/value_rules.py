"""Placement rules of operators that make a value of their own, and of those that write in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cadence_fx.passes.graphs import tensor_val
from cadence_fx.passes.pieces import Fill, Piece, Stale, crop, expand, insert_dim, merge, overwrite, shift
from cadence_fx.passes.reader import Reader, Rule, Unresolvable
from cadence_fx.passes.view_rules import slice_bounds

__all__ = ["VALUE_RULES", "WRITE_RULES"]

aten = torch.ops.aten


def _cat(r: Reader) -> list[Piece]:
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


def _stack(r: Reader) -> list[Piece]:
    out = tensor_val(r.node)
    dim = r.args["dim"] % out.dim()
    parts = r.args["tensors"]
    if any(tensor_val(part).dtype != out.dtype for part in parts):
        raise Unresolvable(r.node.name)
    return [p for at, part in enumerate(parts) for p in shift(insert_dim(r.pieces(part), dim), dim, at)]


def _pad(r: Reader) -> list[Piece]:
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


def _roll(r: Reader) -> list[Piece]:
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


def _slice_scatter(r: Reader) -> list[Piece]:
    dim = r.dim()
    low, _ = slice_bounds(r, r.shape(r.base)[dim])
    return overwrite(r.pieces(r.base), shift(_scattered(r), dim, low))


def _select_scatter(r: Reader) -> list[Piece]:
    dim = r.dim()
    at = r.args["index"] % r.shape(r.base)[dim]
    return overwrite(r.pieces(r.base), shift(insert_dim(_scattered(r), dim), dim, at))


def _scattered(r: Reader) -> list[Piece]:
    source = r.args["src"]
    if tensor_val(source).dtype != tensor_val(r.base).dtype:
        raise Unresolvable(r.node.name)
    return r.pieces(source)


def _index_copy(r: Reader) -> list[Piece]:
    return overwrite(r.pieces(r.base), _index_copied(r))


def _index_copied(r: Reader) -> list[Piece]:
    source = r.args["source"]
    if not r.shape(r.base) or tensor_val(source).dtype != tensor_val(r.base).dtype:
        raise Unresolvable(r.node.name)
    dim, places = r.dim(), r.indices(r.args["index"])
    if len(set(places)) != len(places):  # the kernel does not say which of two writes stays
        raise Unresolvable(r.node.name)
    parts = r.pieces(source)
    return merge([p for i, at in enumerate(places) for p in shift(crop(parts, dim, i, i + 1), dim, at)])


def _index_select(r: Reader) -> list[Piece]:
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


def _zeros(r: Reader) -> list[Piece]:
    return _fill_whole(r.shape(r.node), 0)


def _ones(r: Reader) -> list[Piece]:
    return _fill_whole(r.shape(r.node), 1)


def _full(r: Reader) -> list[Piece]:
    return _fill_whole(r.shape(r.node), r.scalar(r.args["fill_value"]))


def _empty(r: Reader) -> list[Piece]:
    shape = r.shape(r.node)
    return [Piece((0,) * len(shape), shape, Stale())] if 0 not in shape else []


VALUE_RULES: dict[Any, Rule] = {
    **dict.fromkeys([aten.cat.default, aten.concat.default, aten.concatenate.default], _cat),
    aten.stack.default: _stack,
    **dict.fromkeys([aten.constant_pad_nd.default, aten.pad.default], _pad),
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


def _copied(r: Reader) -> list[Piece]:
    source = r.args["src"]
    if tensor_val(source).dtype != tensor_val(r.base).dtype:
        raise Unresolvable(r.node.name)
    return expand(r.pieces(source), r.shape(source), r.shape(r.base))


def _filled(r: Reader) -> list[Piece]:
    return _fill_whole(r.shape(r.base), r.scalar(r.args.get("value", 0)))


# What an in-place operator puts into its target, in coordinates of the target.
WRITE_RULES: dict[Any, Rule] = {
    aten.copy_.default: _copied,
    aten.fill_.Scalar: _filled,
    aten.fill_.Tensor: _filled,
    aten.zero_.default: _filled,
    aten.index_copy_.default: _index_copied,
}
