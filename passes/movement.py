"""Which aten operators only place bytes.

An operator *moves* if every element of its result is an element of an argument or one constant, chosen by shapes and
plain numbers alone. It *selects* if the same holds but the choice is in a tensor: it moves where that tensor is a
constant, and where it is not, nobody knows before the call which bytes go where. Everything else computes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from cadence_fx.passes.constants import Constants
from cadence_fx.passes.graphs import bound_args

__all__ = [
    "DROPOUTS",
    "FACTORIES",
    "FILLS",
    "IDENTITIES",
    "INDEXED",
    "MOVES",
    "SELECTS",
    "SHAPED_LIKE",
    "TRANSFERS",
    "converts_nothing",
    "index_arguments",
    "is_inert_dropout",
    "is_movement",
]

aten = torch.ops.aten

# Views and copies of whole values; the result is the argument where dtype and shape agree.
IDENTITIES: frozenset[Any] = frozenset(
    {
        aten.alias.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.detach.default,
        aten.detach_.default,
        aten.lift_fresh_copy.default,
        aten.to.dtype,
        aten.to.device,
        aten.to.dtype_layout,
        aten.to.other,
        aten.type_as.default,
        aten._to_copy.default,
    }
)

# Outside training, and with probability zero, these return their input itself.
DROPOUTS: frozenset[Any] = frozenset(
    {
        aten.alpha_dropout.default,
        aten.dropout.default,
        aten.feature_alpha_dropout.default,
        aten.feature_dropout.default,
    }
)

# Operators that may take bytes from one device to another, and those that index, which do it for their indices.
TRANSFERS: frozenset[Any] = frozenset(
    {
        aten._to_copy.default,
        aten.copy_.default,
        aten.to.device,
        aten.to.dtype,
        aten.to.dtype_layout,
        aten.to.other,
    }
)
INDEXED: frozenset[Any] = frozenset({aten.index.Tensor, aten.index_put.default, aten.index_put_.default})

# Values in which every element is the same constant, or memory not yet written.
FACTORIES: frozenset[Any] = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.full.default,
        aten.full_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.new_full.default,
        aten.new_ones.default,
        aten.new_zeros.default,
        aten.ones.default,
        aten.ones_like.default,
        aten.zeros.default,
        aten.zeros_like.default,
    }
)

# Writes of one constant over the whole target.
FILLS: frozenset[Any] = frozenset({aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default})

MOVES: frozenset[Any] = frozenset(
    {
        operator.getitem,
        aten._unsafe_view.default,
        aten.as_strided.default,
        aten.broadcast_to.default,
        aten.cat.default,
        aten.chunk.default,
        aten.concat.default,
        aten.concatenate.default,
        aten.constant_pad_nd.default,
        aten.copy_.default,
        aten.diagonal.default,
        aten.expand.default,
        aten.flatten.using_ints,
        aten.flip.default,
        aten.mT.default,
        aten.movedim.int,
        aten.movedim.intlist,
        aten.narrow.default,
        aten.pad.default,
        aten.permute.default,
        aten.repeat.default,
        aten.repeat_interleave.self_int,
        aten.reshape.default,
        aten.roll.default,
        aten.select.int,
        aten.select_scatter.default,
        aten.slice.Tensor,
        aten.slice_scatter.default,
        aten.split.Tensor,
        aten.split.sizes,
        aten.split_with_sizes.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.stack.default,
        aten.t.default,
        aten.tensor_split.indices,
        aten.tensor_split.sections,
        aten.transpose.int,
        aten.unbind.int,
        aten.unflatten.int,
        aten.unfold.default,
        aten.unsqueeze.default,
        aten.view.default,
    }
)

# Views whose other argument lends nothing but its shape.
SHAPED_LIKE: frozenset[Any] = frozenset({aten.expand_as.default, aten.reshape_as.default, aten.view_as.default})

# Operators that choose by a tensor, with the names of the arguments that hold the choice.
SELECTS: dict[Any, tuple[str, ...]] = {
    aten.gather.default: ("index",),
    aten.index.Tensor: ("indices",),
    aten.index_copy.default: ("index",),
    aten.index_copy_.default: ("index",),
    aten.index_fill.int_Scalar: ("index",),
    aten.index_fill_.int_Scalar: ("index",),
    aten.index_put.default: ("indices",),
    aten.index_put_.default: ("indices",),
    aten.index_select.default: ("index",),
    aten.masked_fill.Scalar: ("mask",),
    aten.masked_fill_.Scalar: ("mask",),
    aten.masked_scatter.default: ("mask",),
    aten.masked_scatter_.default: ("mask",),
    aten.scatter.src: ("index",),
    aten.scatter_.src: ("index",),
    aten.take_along_dim.default: ("indices",),
    aten.where.self: ("condition",),
}


def index_arguments(node: fx.Node) -> tuple[fx.Node, ...]:
    """The tensors by which a selecting node chooses; empty for every other node."""
    if node.target not in SELECTS:
        return ()
    values = bound_args(node)
    chosen: list[fx.Node] = []
    for name in SELECTS[node.target]:
        value = values[name]
        chosen += [item for item in (value if isinstance(value, (list, tuple)) else [value]) if item is not None]
    return tuple(chosen)


def is_movement(node: fx.Node, constants: Constants) -> bool:
    """Whether ``node`` only places bytes, and places them the same in every call."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        many = node.args[0]
        return isinstance(many, fx.Node) and is_movement(many, constants)
    if node.target in FACTORIES or node.target in FILLS or is_inert_dropout(node):
        return True
    if node.target in SELECTS and not all(constants.is_constant(index) for index in index_arguments(node)):
        return False
    return node.target in MOVES | IDENTITIES | SHAPED_LIKE | SELECTS.keys() and converts_nothing(node)


def is_inert_dropout(node: fx.Node) -> bool:
    """Whether ``node`` is a dropout that returns its input."""
    if node.target not in DROPOUTS:
        return False
    values = bound_args(node)
    return values["train"] is False or values["p"] == 0


def converts_nothing(node: fx.Node) -> bool:
    """Whether elements of the result are elements of the arguments: no change of dtype, no sum."""
    values = bound_args(node)
    if values.get("accumulate"):
        return False
    val = node.meta["val"]
    dtype = (val[0] if isinstance(val, (list, tuple)) else val).dtype
    exempt = [*index_arguments(node), *([values["other"]] if node.target in SHAPED_LIKE else [])]
    data = [arg for arg in node.all_input_nodes if arg not in exempt]
    return all(isinstance(arg.meta.get("val"), torch.Tensor) and arg.meta["val"].dtype == dtype for arg in data)
