"""The last look at a graph before it is recorded: can it be replayed at all?

A recorder replays kernels on fixed addresses. What reads a value on the host, depends on a size not yet known, copies
from host memory, draws a random number on the host of an accelerator, gives a tensor other memory, or writes memory
that is neither declared nor made in the graph would be frozen as it was when recorded, silently. Each is refused by
name. The graph is not changed.

What is drawn on the device is no obstacle: its kernels read the state of the generator in each launch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx as fx

from cadence_fx.errors import NotCapturable
from cadence_fx.passes.base import PassContext, PassResult
from cadence_fx.passes.effects import draws, is_collective, keeps_own_randomness, reads_value
from cadence_fx.passes.fold_host_constants import leaves_host
from cadence_fx.passes.graphs import GraphFacts, OpOverload, bound_args, location, may_write
from cadence_fx.passes.movement import INDEXED, TRANSFERS

__all__ = ["VerifyCapturable"]

aten = torch.ops.aten
# Reads that no tag tells of.
_HOST_READS = {
    aten.is_nonzero.default,
    aten.istft.default,
    aten.where.default,
    aten.tensor_split.tensor_indices_or_sections,
}
# Give a tensor other memory (`t.data = ...`): a replay would leave whoever holds the tensor with the old one.
_MOVES = {getattr(aten.set_, name) for name in aten.set_.overloads()}
_SYMBOLS = {torch.SymInt, torch.SymFloat, torch.SymBool}
# Kernels of a device that copy from the host in their midst: coefficients of a series.
_HOST_COPIES = {aten.matrix_exp.default, aten.linalg_matrix_exp.default}


class VerifyCapturable:
    """Raises ``NotCapturable`` for the first node that cannot be recorded.

    ``crosses(source, target)`` says whether bytes going from one tensor to the other leave the host.
    """

    name = "verify_capturable"

    def __init__(self, crosses: Callable[[torch.Tensor, torch.Tensor], bool] = leaves_host) -> None:
        self._crosses = crosses

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        facts = ctx.facts_of(gm.graph)
        allowed = _writable(gm.graph, facts, ctx)
        accelerated = any(_is_accelerated(node) for node in gm.graph.nodes)
        for node in gm.graph.nodes:
            if (reason := self._refusal(node, facts, allowed, accelerated)) is not None:
                raise NotCapturable(reason, node.name, location(node))
        return PassResult(gm, False)

    def _refusal(self, node: fx.Node, facts: GraphFacts, allowed: set[fx.Node], accelerated: bool) -> str | None:
        if _is_symbolic(node):
            return "symbolic_size"
        if node.op in ("call_module", "call_method"):
            return "opaque_call"
        if node.op != "call_function" or node.target is operator.getitem:
            return None
        if not isinstance(node.target, OpOverload):
            # Switches of a mode (gradients, autocast) take no tensor and launch nothing.
            return "opaque_call" if node.all_input_nodes else None
        if is_collective(node.target):
            return "collective"
        if node.target in _MOVES:
            return "moves_memory"
        if _reads_host(node):
            return "host_read"
        if accelerated and keeps_own_randomness(node):
            return "draws_random"
        if accelerated and draws(node) and not _is_accelerated(node):
            return "host_random"
        if node.target in _HOST_COPIES and _is_accelerated(node):
            return "host_copy"
        for source, target in _transfers(node):
            if self._crosses(source, target):
                return "host_copy"
            if self._crosses(target, source):
                return "host_read"
        if any(facts.alias_class(target) not in allowed for target in may_write(node)):
            return "undeclared_write"
        return None


def _writable(graph: fx.Graph, facts: GraphFacts, ctx: PassContext) -> set[fx.Node]:
    """Alias classes that a replay may write: declared states, inputs at fixed addresses, cleared memory, and values
    made in the graph."""
    declared = {name for slot in ctx.regions for name in (slot.placeholder, slot.destination)}
    declared |= ctx.frozen_inputs if ctx.written is None else ctx.frozen_inputs & ctx.written
    cleared = {memory.data_ptr() for memory in ctx.cleared}
    outside = {
        facts.alias_class(node)
        for node in graph.nodes
        if (node.op == "get_attr" and _address(graph, node) not in cleared)
        or (node.op == "placeholder" and node.name not in declared)
    }
    return {facts.alias_class(node) for node in graph.nodes} - outside


def _address(graph: fx.Graph, node: fx.Node) -> int | None:
    value = getattr(graph.owning_module, str(node.target), None)
    return value.data_ptr() if isinstance(value, torch.Tensor) else None


def _is_symbolic(node: fx.Node) -> bool:
    return any(map(_holds_symbol, (node.meta.get("val"), node.args, *node.kwargs.values())))


def _holds_symbol(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, *value.stride()) if value.layout == torch.strided else value.shape
        return not _SYMBOLS.isdisjoint(map(type, sizes))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_symbol, value))
    return type(value) in _SYMBOLS


def _reads_host(node: fx.Node) -> bool:
    """Whether the host needs a value to go on: it is read as a number, or decides the shape of the result."""
    target: Any = node.target
    if target in _HOST_READS:
        return True
    if target in INDEXED:  # a mask is turned into positions, whose number the host must know
        masks = [index for index in bound_args(node)["indices"] if index is not None and _is_mask(index)]
        return bool(masks) and not (len(masks) == 1 and _fills(node))
    if target in (aten.repeat_interleave.self_Tensor, aten.repeat_interleave.Tensor):
        return bound_args(node)["output_size"] is None
    return reads_value(target)


def _is_mask(index: fx.Node) -> bool:
    return index.meta["val"].dtype in (torch.bool, torch.uint8)


def _fills(node: fx.Node) -> bool:
    """Whether an indexed write puts one number of the host everywhere, which PyTorch carries out as a masked fill."""
    values = bound_args(node)
    written = values["values"].meta["val"] if "values" in values else None
    return written is not None and written.numel() == 1 and written.device.type == "cpu" and not values["accumulate"]


def _is_accelerated(node: fx.Node) -> bool:
    """Whether the value of a node, or one of several, is on an accelerator."""
    val = node.meta.get("val")
    tensors = val if isinstance(val, (list, tuple)) else [val]
    return any(isinstance(t, torch.Tensor) and t.device.type != "cpu" for t in tensors)


def _transfers(node: fx.Node) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of tensors between which the operator copies."""
    if node.target in TRANSFERS:
        values = bound_args(node)
        source = values["src"] if node.target is aten.copy_.default else values["self"]
        yield source.meta["val"], node.meta["val"]
    elif node.target in INDEXED:
        values = bound_args(node)
        for index in values["indices"]:
            if index is not None:
                yield index.meta["val"], values["self"].meta["val"]
