"""What an operator does besides computing its results, as far as its schema and its tags tell.

Only for operators of PyTorch's own is that the whole truth: tests hold the tags of every one of them that has a
generator, a dropout or the like among its arguments. What others' operators do is seen when they run.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from cadence_fx.passes.graphs import RUNS_EAGER, OpOverload, bound_args, tensors_in
from cadence_fx.passes.movement import DROPOUTS, FACTORIES, FILLS, IDENTITIES, MOVES, SHAPED_LIKE
from cadence_fx.passes.operators import operator_of

__all__ = ["all_known", "draws", "is_collective", "keeps_own_randomness", "may_raise", "only_gathers", "reads_value"]

aten = torch.ops.aten
_COLLECTIVES = {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"}
_DROPOUTS = DROPOUTS | {
    aten.alpha_dropout_.default,
    aten.dropout_.default,
    aten.feature_alpha_dropout_.default,
    aten.feature_dropout_.default,
}


# Operators that take any values of their arguments, once the shapes fit.
_TOTAL = (
    MOVES
    | IDENTITIES
    | FACTORIES
    | FILLS
    | SHAPED_LIKE
    | {
        aten.add.Tensor,
        aten.addmm.default,
        aten.amax.default,
        aten.amin.default,
        aten.avg_pool1d.default,
        aten.baddbmm.default,
        aten.bmm.default,
        aten.conv1d.default,
        aten.conv2d.default,
        aten.conv_transpose1d.default,
        aten.convolution.default,
        aten.cumsum.default,
        aten.group_norm.default,
        aten.layer_norm.default,
        aten.linear.default,
        aten.linspace.default,
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        aten.matmul.default,
        aten.mean.default,
        aten.mean.dim,
        aten.mm.default,
        aten.mul.Tensor,
        aten.native_layer_norm.default,
        aten.rms_norm.default,
        aten.scaled_dot_product_attention.default,
        aten.softmax.int,
        aten.sub.Tensor,
        aten.sum.default,
        aten.sum.dim_IntList,
    }
)


def may_raise(node: fx.Node) -> bool:
    """Whether an operator may raise on the host, for some values of its arguments: all that are not known never to.

    One that is not recorded may: it allocates in every call.
    """
    if RUNS_EAGER in node.meta:
        return True
    if node.op != "call_function" or node.target in _TOTAL or node.target in _DROPOUTS:
        return node.op in ("call_module", "call_method")
    if not isinstance(node.target, OpOverload) or torch.Tag.pointwise not in node.target.tags:
        return True
    # Integers are divided by zero, or raised to negative powers.
    return not all(val.dtype.is_floating_point for arg in node.all_input_nodes for val in tensors_in(arg.meta["val"]))


def is_collective(target: Any) -> bool:
    """Whether an operator talks to other processes."""
    return getattr(target, "namespace", "") in _COLLECTIVES


def reads_value(target: Any) -> bool:
    """Whether the host needs a value of the arguments to go on: as a number, or as the size of a result."""
    return operator_of(target).reads_value


def only_gathers(target: Any, args: Sequence[Any]) -> bool:
    """Whether this call is an indexing without masks: the shapes of the indices alone tell that of the result."""
    if target is not aten.index.Tensor:
        return False
    return not any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def draws(node: fx.Node) -> bool:
    """Whether a node may draw random numbers. Dropout that is switched off does not."""
    target: Any = node.target
    if not isinstance(target, OpOverload) or not operator_of(target).may_draw:
        return False
    values = bound_args(node)
    if any(values.get(name, True) is False for name in ("train", "training")):
        return False
    never = ("dropout_p", "dropout", "p") if target in _DROPOUTS else ("dropout_p", "dropout")
    return not any(name in values and values[name] == 0 for name in never)


def keeps_own_randomness(node: fx.Node) -> bool:
    """Whether what a node draws on an accelerator goes on from call to call outside of any generator.

    Recurrent layers with dropout between them: the library that computes them keeps a state of its own.
    """
    return draws(node) and "dropout" in bound_args(node)


def all_known(graph: fx.Graph) -> bool:
    """Whether every operator is PyTorch's own, so that its tags tell what it does."""
    calls = [node.target for node in graph.nodes if node.op == "call_function"]
    return all(target is operator.getitem or getattr(target, "namespace", "") in ("aten", "prims") for target in calls)
