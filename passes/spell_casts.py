"""Casts that autocast makes of slow values inside an operator become operators, so that they can be kept.

Before, under ``torch.autocast``::

    y = aten.conv1d.default(x, weight, bias)         # casts its float32 arguments first, in every launch

After::

    cast = aten._to_copy.default(weight, dtype=torch.bfloat16)
    cast_1 = aten._to_copy.default(bias, dtype=torch.bfloat16)
    y = aten.conv1d.default(x, cast, cast_1)

``hoist_slow``, which comes next, keeps ``cast`` and ``cast_1``. Eager keeps casts, too: of weights that require grad,
until the context is left. A recording cannot read these, which are freed with the context.

Why no byte moves: it is the cast that autocast itself makes, and an argument that has the dtype already is passed on.

Left alone: arguments that come with the call, since nothing is saved; those that are not float32; and operators whose
result has the dtype of their arguments, which autocast does not touch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from cadence_fx.passes.base import PassContext, PassResult
from cadence_fx.passes.graphs import emit
from cadence_fx.passes.native_clocks import NativeClock, native_clocks, steady_inputs

__all__ = ["SpellCasts"]

aten = torch.ops.aten

# Operators that autocast runs in its dtype on every device, and that take arguments of one dtype only: where a result
# is of another one, the arguments have been cast to it.
_LOWERED: frozenset[Any] = frozenset(
    {
        aten.addbmm.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.bmm.default,
        aten.conv1d.default,
        aten.conv1d.padding,
        aten.conv2d.default,
        aten.conv2d.padding,
        aten.conv3d.default,
        aten.conv3d.padding,
        aten.conv_transpose1d.default,
        aten.conv_transpose2d.input,
        aten.conv_transpose3d.input,
        aten.linear.default,
        aten.matmul.default,
        aten.mm.default,
    }
)
_LOWER = (torch.bfloat16, torch.float16)


class SpellCasts:
    """Writes out the casts of slow arguments, where there is somebody to keep them."""

    name = "spell_casts"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        lowered = [(node, dtype) for node in gm.graph.nodes if (dtype := _lowered_to(node)) is not None]
        if ctx.keep is None or not lowered:
            return PassResult(gm, False)
        clocks = native_clocks(gm, ctx.facts_of(gm.graph), steady_inputs(ctx))
        casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}  # nobody writes a slow value: one for all that read it
        for node, dtype in lowered:
            for used in node.all_input_nodes:
                if not _is_single(used) or clocks[used] == NativeClock.CALL:
                    continue
                if (used, dtype) not in casts:
                    with gm.graph.inserting_before(node):
                        casts[used, dtype] = emit(gm.graph, aten._to_copy.default, used, like=node, dtype=dtype)
                node.replace_input_with(used, casts[used, dtype])
        if casts:
            ctx.notes.append(f"{self.name}: {len(casts)} casts of slow values are operators now")
        return PassResult(gm, bool(casts))


def _lowered_to(node: fx.Node) -> torch.dtype | None:
    """The dtype that autocast computes an operator in; None where it casts nothing."""
    val = node.meta.get("val")
    if node.target not in _LOWERED or not isinstance(val, torch.Tensor) or val.dtype not in _LOWER:
        return None
    return val.dtype


def _is_single(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.dtype == torch.float32
