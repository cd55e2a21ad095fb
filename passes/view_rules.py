"""Placement rules of views, and of copies of whole values."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from cadence_fx.passes.graphs import bound_args, tensor_val
from cadence_fx.passes.movement import DROPOUTS, IDENTITIES, is_inert_dropout
from cadence_fx.passes.pieces import Piece, crop, drop_dim, expand, insert_dim, permute
from cadence_fx.passes.reader import Reader, Rule, Unresolvable

__all__ = ["SPLITS", "VIEW_RULES", "slice_bounds"]

aten = torch.ops.aten
# What gives several views of one value.
SPLITS: frozenset[Any] = frozenset(
    {
        aten.split.Tensor,
        aten.split.sizes,
        aten.split_with_sizes.default,
        aten.chunk.default,
        aten.unbind.int,
        aten.tensor_split.sections,
        aten.tensor_split.indices,
    }
)


def slice_bounds(r: Reader, size: int) -> tuple[int, int]:
    if r.args["step"] != 1:
        raise Unresolvable(r.node.name)
    return slice(r.args["start"], r.args["end"]).indices(size)[:2]


def _same(r: Reader) -> list[Piece]:
    base, out = tensor_val(r.base), tensor_val(r.node)
    if (base.dtype, base.device, base.shape) != (out.dtype, out.device, out.shape):
        raise Unresolvable(r.node.name)
    return r.pieces(r.base)


def _dropout(r: Reader) -> list[Piece]:
    if not is_inert_dropout(r.node):
        raise Unresolvable(r.node.name)
    return r.pieces(r.node.all_input_nodes[0])


def _unit_dims(r: Reader) -> list[Piece]:
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


def _slice(r: Reader) -> list[Piece]:
    dim = r.dim()
    low, high = slice_bounds(r, r.shape(r.base)[dim])
    return crop(r.pieces(r.base), dim, low, max(low, high))


def _narrow(r: Reader) -> list[Piece]:
    dim = r.dim()
    start = r.scalar(r.args["start"])
    low = int(start.real) % max(r.shape(r.base)[dim], 1) if int(start.real) < 0 else int(start.real)
    return crop(r.pieces(r.base), dim, low, low + r.args["length"])


def _select(r: Reader) -> list[Piece]:
    dim = r.dim()
    at = r.args["index"] % r.shape(r.base)[dim]
    return drop_dim(crop(r.pieces(r.base), dim, at, at + 1), dim)


def _permute(r: Reader) -> list[Piece]:
    rank = len(r.shape(r.base))
    return permute(r.pieces(r.base), [d % rank for d in r.args["dims"]])


def _transpose(r: Reader) -> list[Piece]:
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


def _expand(r: Reader) -> list[Piece]:
    return expand(r.pieces(r.base), r.shape(r.base), r.shape(r.node))


def _item(r: Reader) -> list[Piece]:
    """One output of split, chunk or unbind."""
    many, which = r.node.args
    if not isinstance(many, fx.Node) or many.target not in SPLITS or not isinstance(which, int):
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


VIEW_RULES: dict[Any, Rule] = {
    operator.getitem: _item,
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
    **dict.fromkeys(IDENTITIES, _same),
    **dict.fromkeys(DROPOUTS, _dropout),
}
