"""Host reads whose value only constants and inputs at fixed addresses decide are made when the graph is built.

Before::

    istft = aten.istft.default(spec, 16, 4, 16, window)    # checks its window on the host: no recorder can capture it

After::

    view_as_real = aten.view_as_real.default(spec)         # what istft executes here, operator by operator
    ...
    mul = aten.mul.Tensor(_fft_c2r, view)
    unfold_backward = aten.unfold_backward.default(mul, [1, 116], 1, 16, 4)
    ...                                                    # the envelope of the window, computed as before
    div = aten.div.Tensor(slice_1, slice_2)

Why no byte moves: the operators are recorded from the composite operator itself, run once on the traced values of its
arguments; only the read and what nothing but the read needs are left out. What the read must give is a `Premise`:
checked when it is constant, and otherwise left for the engine to check at capture and whenever an input it depends on
was written. Where it fails, or depends on anything that changes from call to call, the operator stays as it is, and the
call that finds it in eager gets eager's own error.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.fx as fx

from cadence_fx._torch import TorchDispatchMode, run_composite, tree_map_only
from cadence_fx.passes.base import PassContext, PassResult, Premise
from cadence_fx.passes.constants import Constants
from cadence_fx.passes.graphs import GraphFacts, bound_args, erase_dead_code, is_impure, location
from cadence_fx.passes.subgraph import ancestors, cut_out

__all__ = ["HoistHostReads"]

aten = torch.ops.aten

# Composite operators that read one flag on the host and raise when it is true.
_CHECKING: frozenset[Any] = frozenset({aten.istft.default})
_READS: frozenset[Any] = frozenset(
    {aten.equal.default, aten.is_nonzero.default, aten.item.default, aten._local_scalar_dense.default}
)
_FINDS_NOTHING = False  # what such a read gives where the operator goes on


class HoistHostReads:
    """Opens operators that check a constant on the host, and keeps the check as a premise of the class."""

    name = "hoist_host_reads"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        found = [node for node in gm.graph.nodes if node.target in _CHECKING]
        opened = sum(self._open(gm, node, ctx) for node in found)
        if opened:
            erase_dead_code(gm.graph)
            ctx.notes.append(f"{self.name}: {opened} host reads are made once")
        return PassResult(gm, bool(found))

    def _open(self, gm: fx.GraphModule, node: fx.Node, ctx: PassContext) -> bool:
        with gm.graph.inserting_before(node):
            recorder = _Recorder(gm.graph, node)
            result = recorder.run()
        premises = []
        for read in recorder.reads:
            premise = _premise(gm, read, ctx, location(node) or node.name)
            if premise is None:
                for made in reversed(recorder.made):
                    gm.graph.erase_node(made)
                return False
            premises.append(premise)
        # A check of constants has just been made, for good.
        ctx.premises += [premise for premise in premises if premise.inputs]
        node.replace_all_uses_with(result)
        gm.graph.erase_node(node)
        for read in recorder.reads:
            gm.graph.erase_node(read)
        return True


def _premise(gm: fx.GraphModule, read: fx.Node, ctx: PassContext, what: str) -> Premise | None:
    """What the read relies on; None where it may change from call to call, or already fails."""
    facts = GraphFacts(gm.graph)
    needed = ancestors([read])
    states = {slot.placeholder for slot in ctx.regions}
    for node in needed - {read}:
        if facts.writes_to(node):
            return None
        if node.op == "placeholder" and (node.name not in ctx.frozen_inputs or node.name in states):
            return None
        if node.op == "call_function" and is_impure(node):
            return None
    graph, inputs = cut_out(gm, needed, [read])
    if not inputs:
        constants = Constants(gm, facts)
        if not all(map(constants.is_constant, read.all_input_nodes)) or graph()[0] is not _FINDS_NOTHING:
            return None
    return Premise(what, graph, inputs, _FINDS_NOTHING)


class _Recorder(TorchDispatchMode):
    """Puts what a composite operator executes into the graph, as nodes before it."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        super().__init__()
        self._graph = graph
        self._node = node
        self._known: dict[int, fx.Node] = {}
        self._alive: list[Any] = []
        self.made: list[fx.Node] = []
        self.reads: list[fx.Node] = []

    def run(self) -> fx.Node:
        """Execute the operator on its traced values; returns the node of its result."""
        values = fx.map_arg(list(bound_args(self._node).values()), self._value)
        mode = next((v.fake_mode for v in self._alive if hasattr(v, "fake_mode")), contextlib.nullcontext())
        with mode, self:
            result = run_composite(self._node.target, *values)
        return self._known[id(result)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = func in _READS
        out = _FINDS_NOTHING if reads else func(*args, **(kwargs or {}))
        if not reads and not isinstance(out, torch.Tensor):
            return out  # what a traced value tells of itself, such as its device
        given = tree_map_only(torch.Tensor, lambda t: self._known[id(t)], (args, kwargs or {}))
        node = self._graph.call_function(func, *given)
        for key in ("stack_trace", "nn_module_stack"):
            if key in self._node.meta:
                node.meta[key] = self._node.meta[key]
        self.made.append(node)
        if reads:
            self.reads.append(node)
        else:
            node.meta["val"] = out
            self._keep(out, node)
        return out

    def _value(self, node: fx.Node) -> Any:
        self._keep(node.meta["val"], node)
        return node.meta["val"]

    def _keep(self, value: Any, node: fx.Node) -> None:
        self._known[id(value)] = node
        self._alive.append(value)
