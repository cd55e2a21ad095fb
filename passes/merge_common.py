"""What is computed twice is computed once, and what returns its input is left out.

Before::

    time = aten.arange.start(0, 128)               # made by every solver step
    exp = aten.exp.default(time)
    time_1 = aten.arange.start(0, 128)
    exp_1 = aten.exp.default(time_1)
    dropout = aten.dropout.default(x, 0.1, False)  # outside training: x itself
    y = aten.mul.Tensor(dropout, exp_1)

After::

    time = aten.arange.start(0, 128)
    exp = aten.exp.default(time)
    y = aten.mul.Tensor(x, exp)

Why no byte moves: an operator that draws nothing, has no effect and is given the same arguments gives the same bytes,
as long as nothing has written what it reads in between. Two results become one piece of memory only if nobody writes
either of them and not both leave the graph, since eager returns two tensors that the caller may write. Views of one
tensor are the same memory anyway, whatever is written. A view is left out where it has the memory, the geometry and the
dtype of its input. ``x * 1`` and ``x + 0`` are computed: they make another NaN, and another zero of ``-0.0``.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
import torch.fx as fx

from cadence_fx._torch import storage_identity
from cadence_fx.passes.base import PassContext, PassResult
from cadence_fx.passes.graphs import (
    ALLOCATIONS,
    KNOWN_NAMESPACES,
    GraphFacts,
    OpOverload,
    is_impure,
    location,
    output_node,
    schema,
    tensors_in,
    trace_again,
)
from cadence_fx.passes.homes import Homes
from cadence_fx.passes.movement import is_inert_dropout
from cadence_fx.passes.operators import operator_of

__all__ = ["MergeCommon"]


class MergeCommon:
    """Merges equal nodes in one walk, each being looked up by what it computes and by what was written before it."""

    name = "merge_common"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        read_once = _merge_attributes(gm.graph)
        facts = GraphFacts(gm.graph) if read_once else ctx.facts_of(gm.graph)
        merging = _Merging(gm.graph, facts, ctx)
        for node in list(gm.graph.nodes):
            merging.visit(node)
        if merging.merged or merging.left_out:
            ctx.notes.append(
                f"{self.name}: {merging.merged} operators are computed once with others, "
                f"{merging.left_out} that return their input are left out"
            )
        if merging.kept:
            ctx.notes.append(f"{self.name}: {len(merging.kept)} repeats stay, such as {merging.kept[0]}")
        return PassResult(gm, bool(read_once or merging.merged or merging.left_out))


class _Merging:
    def __init__(self, graph: fx.Graph, facts: GraphFacts, ctx: PassContext) -> None:
        self._graph = graph
        self._facts = facts
        self._results = set(output_node(graph).all_input_nodes)
        self._leaving = {self._facts.alias_class(result) for result in self._results}
        self._reshaped = self._classes_reshaped_in_place()
        self._homes = Homes(graph, self._facts, ctx)
        # Told by the traced values, which no longer show it once what they are views of has been merged.
        self._inert = {node for node in graph.nodes if _returns_input(node)}
        self._views = self._certain_views()
        self._known: dict[Hashable, fx.Node] = {}
        self.merged = 0
        self.left_out = 0
        self.kept: list[str] = []

    def visit(self, node: fx.Node) -> None:
        """Merge ``node`` or leave it out, if that can be."""
        if node.op in ("placeholder", "get_attr", "output"):
            return
        if _may_do_anything(node):
            self._known.clear()
        if self._facts.alias_class(node) in self._reshaped:
            return
        if node in self._inert and node not in self._results:
            self._replace(node, node.args[0])  # type: ignore[arg-type]
            self.left_out += 1
        elif _is_function(node) and not self._merge(node) and node in self._views:
            _show_memory(node)

    def _merge(self, node: fx.Node) -> bool:
        """Whether an equal node has taken the place of ``node``."""
        view = node in self._views
        key = self._key(node, view)
        known = self._known.setdefault(key, node) if key is not None else node
        if known is node:
            return False
        if (problem := self._problem(node, known, view)) is not None:
            self.kept.append(f"{node.name} at {location(node)}: {problem}")
            return False
        self._replace(node, known)
        self.merged += 1
        return True

    def _problem(self, node: fx.Node, known: fx.Node, view: bool) -> str | None:
        """Why two equal nodes must stay two."""
        if view:
            return "both leave the graph" if node in self._results and known in self._results else None
        mine, others = self._facts.alias_class(node), self._facts.alias_class(known)
        if mine in self._facts.writes or others in self._facts.writes:
            return "one of the two is written"
        if mine in self._leaving and others in self._leaving:
            return "both leave the graph"
        if mine in self._leaving:
            self._leaving.add(others)
        return None

    def _key(self, node: fx.Node, view: bool) -> Hashable | None:
        """What ``node`` computes; None for what cannot be compared. A view does not depend on what it shows."""
        given = _canonical((node.args, node.kwargs))
        if given is None:
            return None
        at = self._facts.order[node]
        written = () if view else tuple(self._homes.writes_before(source, at) for source in node.all_input_nodes)
        return node.target, given, written

    def _certain_views(self) -> set[fx.Node]:
        """Views for certain. What is made of a value that may or may not be its input is no such view."""
        unclear = {
            self._facts.alias_class(node)
            for node in self._graph.nodes
            if isinstance(node.target, OpOverload)
            and torch.Tag.maybe_aliasing_or_mutating in node.target.tags
            and node not in self._inert
        }
        return {
            node
            for node in self._graph.nodes
            if _is_view(node) and _is_function(node) and self._facts.alias_class(node) not in unclear
        }

    def _classes_reshaped_in_place(self) -> set[fx.Node]:
        return {
            self._facts.alias_class(node)
            for node in self._graph.nodes
            if isinstance(node.target, OpOverload) and torch.Tag.inplace_view in node.target.tags
        }

    def _replace(self, node: fx.Node, by: fx.Node) -> None:
        node.replace_all_uses_with(by)
        self._graph.erase_node(node)


def _merge_attributes(graph: fx.Graph) -> int:
    """Read each tensor of the module once: all that is known about its memory then belongs to one node."""
    first: dict[str, fx.Node] = {}
    merged = 0
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        known = first.setdefault(str(node.target), node)
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)
            merged += 1
    return merged


def _may_do_anything(node: fx.Node) -> bool:
    """Whether a node may change how others compute: a switch of a mode, or a callable that nobody knows."""
    if node.target is operator.getitem and node.op == "call_function":
        return False
    return not isinstance(node.target, OpOverload) or node.target.namespace not in KNOWN_NAMESPACES


def _is_function(node: fx.Node) -> bool:
    """Whether the value depends on the arguments alone, and consists of tensors."""
    if node.op != "call_function" or is_impure(node) or not tensors_in(node.meta.get("val")):
        return False
    if node.target is operator.getitem:
        return True
    # Memory that nothing has written holds whatever was there.
    return node.target not in ALLOCATIONS and "empty" not in schema(node).name


def _is_view(node: fx.Node) -> bool:
    """Whether the value certainly is memory of an argument, so that writes in between are seen through both of two."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or not operator_of(node.target).aliased:
        return False
    given = {
        storage_identity(tensor) for source in node.all_input_nodes for tensor in tensors_in(source.meta.get("val"))
    }
    return given.issuperset(map(storage_identity, tensors_in(node.meta.get("val"))))


def _returns_input(node: fx.Node) -> bool:
    """Whether ``node`` returns its first argument as it is, or shows it with the same geometry."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or node.target is operator.getitem:
        return False
    have, want = source.meta.get("val"), node.meta.get("val")
    if not isinstance(have, torch.Tensor) or not isinstance(want, torch.Tensor):
        return False
    if is_inert_dropout(node):
        # Eager returns the very tensor. The traced value has memory of its own, and may have other strides, with which
        # everything after it was traced.
        return have.stride() == want.stride()
    # What most nodes fail comes first.
    if not GraphFacts.same_memory(have, want) or not _is_view(node) or not _is_function(node):
        return False
    return _geometry(have) == _geometry(want)


def _show_memory(node: fx.Node) -> None:
    """Trace a view anew if its argument has become another, so that later passes see whose memory it is."""
    if not _is_view(node):
        trace_again(node)


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    strided = (tensor.stride(), tensor.storage_offset()) if tensor.layout is torch.strided else ()
    kind = (tensor.dtype, tensor.device, tensor.layout, tensor.is_conj(), tensor.is_neg(), tensor.requires_grad)
    return tuple(tensor.shape), strided, kind


def _canonical(value: Any) -> Hashable | None:
    """Arguments as a key that tells 0.0, -0.0, 0 and False apart; None if they hold what cannot be compared."""
    if type(value) in (fx.Node, int):
        return type(value), value
    if isinstance(value, (list, tuple)):
        items = [_canonical(item) for item in value]
        return None if None in items else ("items", *items)
    if isinstance(value, dict):
        return _canonical([[name, value[name]] for name in sorted(value)])
    if isinstance(value, float):
        return float, value.hex()
    if isinstance(value, complex):
        return complex, value.real.hex(), value.imag.hex()
    if isinstance(value, slice):
        return _canonical(["slice", value.start, value.stop, value.step])
    known = (fx.Node, bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
    return (type(value), value) if isinstance(value, known) else None
