"""Copies that change nothing are left out, and a `cat` of a `cat` is one `cat`.

Before::

    held = aten.clone(x)
    left = aten.cat([held, y], 1)
    both = aten.cat([left, z], 1)

After::

    both = aten.cat([x, y, z], 1)

Why no byte moves: a copy is left out where it has the dtype, the device, the strides and the alignment of its source,
where neither it nor its source is written from then on, and where it does not leave the graph, so that every reader
runs the same kernel on the same bytes. A `cat` only places bytes; the inner one goes where nothing else reads it,
nothing has been converted, no part is written before the outer one reads it, and the result has the same strides
without it.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from cadence_fx.passes.base import PassContext, PassResult
from cadence_fx.passes.graphs import GraphFacts, bound_args, output_node, tensor_val, trace_again
from cadence_fx.passes.movement import IDENTITIES

__all__ = ["ElideCopies"]

aten = torch.ops.aten
_CATS = {aten.cat.default, aten.concat.default, aten.concatenate.default}
_ALIGNMENT = 16  # bytes; kernels are chosen by it


class ElideCopies:
    """Leaves out copies and inner cats."""

    name = "elide_copies"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        graph = gm.graph
        facts = ctx.facts_of(graph)
        leaving = {facts.alias_class(node) for node in output_node(graph).all_input_nodes}
        members: dict[fx.Node, list[fx.Node]] = {}
        for node in facts.order:
            members.setdefault(facts.alias_class(node), []).append(node)
        copies = cats = 0
        for node in list(facts.order):
            if node.op != "call_function":
                continue
            if node.target in _CATS:
                cats += _flatten(facts, node)
            source = _copied(node)
            if source is not None and _is_needless(facts, node, source, leaving):
                node.replace_all_uses_with(source)
                for view in members[facts.alias_class(node)]:
                    if facts.order[view] > facts.order[node]:
                        trace_again(view)
                graph.erase_node(node)
                copies += 1
        if not copies and not cats:
            return PassResult(gm, False)
        ctx.notes.append(f"{self.name}: {copies} copies and {cats} inner cats are left out")
        return PassResult(gm, True)


def _copied(node: fx.Node) -> fx.Node | None:
    """What ``node`` is a plain copy of, if it is one."""
    if node.target in IDENTITIES:
        base = bound_args(node)["self"]
    elif node.target in _CATS and len(bound_args(node)["tensors"]) == 1:
        base = bound_args(node)["tensors"][0]
    else:
        return None
    return base if isinstance(base, fx.Node) and isinstance(base.meta.get("val"), torch.Tensor) else None


def _is_needless(facts: GraphFacts, copy: fx.Node, source: fx.Node, leaving: set[fx.Node]) -> bool:
    if facts.aliases(copy, source) or facts.alias_class(copy) in leaving or not copy.users:
        return False
    if facts.writes_to(copy) or facts.writes_to(source, after=facts.order[copy]):
        return False
    return _same_geometry(tensor_val(copy), tensor_val(source))


def _same_geometry(left: torch.Tensor, right: torch.Tensor) -> bool:
    if (left.dtype, left.device, left.shape) != (right.dtype, right.device, right.shape):
        return False
    if any(tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() for tensor in (left, right)):
        return False
    apart = (left.storage_offset() - right.storage_offset()) * left.element_size()
    return left.stride() == right.stride() and apart % _ALIGNMENT == 0


def _flatten(facts: GraphFacts, cat: fx.Node) -> int:
    """Put the parts of inner cats into ``cat``; returns how many went."""
    out = tensor_val(cat)
    dim = bound_args(cat)["dim"] % max(out.dim(), 1)
    parts: list[fx.Node] = []
    inner = []
    for part in bound_args(cat)["tensors"]:
        base = _unviewed(part)
        if base.target in _CATS and _goes(facts, base, part, cat, dim):
            inner.append(part)
            parts += bound_args(base)["tensors"]
        else:
            parts.append(part)
    if not inner:
        return 0
    made = aten.cat.default([tensor_val(part) for part in parts], dim)
    if (made.shape, made.dtype, made.stride()) != (out.shape, out.dtype, out.stride()):
        return 0
    cat.args, cat.kwargs = (parts, dim), {}
    for part in dict.fromkeys(inner):
        while not part.users:
            base = part.args[0]
            cat.graph.erase_node(part)
            if not isinstance(base, fx.Node):
                break
            part = base
    return len(inner)


def _unviewed(node: fx.Node) -> fx.Node:
    """``node`` without views that show all of their base just as it is."""
    while node.target in (aten.view.default, aten.reshape.default, aten.alias.default, aten.contiguous.default):
        base = node.args[0]
        assert isinstance(base, fx.Node)
        if not GraphFacts.same_memory(tensor_val(node), tensor_val(base)) or not _same_geometry(
            tensor_val(node), tensor_val(base)
        ):
            break
        node = base
    return node


def _goes(facts: GraphFacts, inner: fx.Node, part: fx.Node, outer: fx.Node, dim: int) -> bool:
    """Whether ``outer`` alone reads ``inner``, by way of ``part``, and may read what it is made of instead."""
    at = part
    while at is not inner:
        if len(at.users) != 1:
            return False
        at = at.args[0]  # type: ignore[assignment]
    if len(inner.users) != 1 or list(part.users) != [outer] or facts.writes_to(inner):
        return False
    val = tensor_val(inner)
    if bound_args(inner)["dim"] % max(val.dim(), 1) != dim or val.dtype != tensor_val(outer).dtype:
        return False
    between = {"after": facts.order[inner], "before": facts.order[outer]}
    return all(
        tensor_val(piece).dtype == val.dtype
        and tensor_val(piece).dim() == val.dim()
        and not facts.writes_to(piece, **between)
        for piece in bound_args(inner)["tensors"]
    )
