"""Constants made on the host and copied to the device in every call become constants on the device.

Before::

    arange = aten.arange(8, device=cpu)
    _to_copy = aten._to_copy(arange, device=cuda)      # a copy from pageable memory: no recorder can capture it
    index_copy_ = aten.index_copy_(cache, 1, _to_copy, x)

After::

    _folded_0 = self._folded_0                         # on the device since the graph was built
    index_copy_ = aten.index_copy_(cache, 1, _folded_0, x)

Why no byte moves: the value is computed once by the very operators of the graph, on the device where the graph ran
them, and the copy is carried out by the copying operator itself. Only deterministic operators on constants qualify.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from cadence_fx.passes.base import PassContext, PassResult
from cadence_fx.passes.constants import Constants
from cadence_fx.passes.graphs import GraphFacts, add_tensor, bound_args, erase_dead_code, output_node
from cadence_fx.passes.movement import INDEXED, TRANSFERS

__all__ = ["FoldHostConstants", "leaves_host"]

aten = torch.ops.aten


def leaves_host(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether bytes that go from ``source`` to ``target`` go from the host to a device."""
    return source.device.type == "cpu" and target.device.type != "cpu"


class FoldHostConstants:
    """Computes such constants when the graph is built. ``crosses(source, target)`` says which copies count."""

    name = "fold_host_constants"

    def __init__(self, crosses: Callable[[torch.Tensor, torch.Tensor], bool] = leaves_host) -> None:
        self._crosses = crosses

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        facts = ctx.facts_of(gm.graph)
        constants = Constants(gm, facts)
        results = {facts.alias_class(r) for r in output_node(gm.graph).all_input_nodes}
        folded = 0
        for node in list(gm.graph.nodes):
            if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            if node.target is aten.copy_.default:
                folded += self._fold_argument(gm, node, node.args[1], node.meta["val"], constants)
            elif node.target in TRANSFERS:
                folded += self._fold_copy(gm, node, facts, constants, results)
            elif node.target in INDEXED:
                values = bound_args(node)
                for index in values["indices"]:
                    folded += self._fold_argument(gm, node, index, values["self"].meta["val"], constants)
        if folded:
            erase_dead_code(gm.graph)
            ctx.notes.append(f"{self.name}: {folded} host constants are now on the device")
        return PassResult(gm, bool(folded))

    def _fold_copy(
        self, gm: fx.GraphModule, node: fx.Node, facts: GraphFacts, constants: Constants, results: set[fx.Node]
    ) -> int:
        source = node.all_input_nodes[0]
        if not self._crosses(source.meta["val"], node.meta["val"]) or not constants.is_constant(node):
            return 0
        if facts.writes_to(node) or facts.alias_class(node) in results:
            return 0  # every call needs a fresh copy: this one is written, or handed to the caller, who may write it
        value = constants.tensor(node)
        if value is None:
            return 0
        _replace(gm, node, node, value)
        return 1

    def _fold_argument(
        self, gm: fx.GraphModule, node: fx.Node, source: Any, target: torch.Tensor, constants: Constants
    ) -> int:
        if not isinstance(source, fx.Node) or not self._crosses(source.meta["val"], target):
            return 0
        value = constants.tensor(source)
        if value is None or (node.target is aten.copy_.default and value.dtype != target.dtype):
            return 0  # a copy that also converts may do so on either side; it stays as it is
        _replace(gm, source, node, value.to(target.device))
        return 1


def _replace(gm: fx.GraphModule, node: fx.Node, user: fx.Node, value: torch.Tensor) -> None:
    """Put a constant in the place of ``node``: for every user if ``user`` is ``node`` itself, else for that one."""
    with gm.graph.inserting_before(user):
        constant = add_tensor(gm, "_folded_", value, like=node.meta["val"])
    if user is node:
        node.replace_all_uses_with(constant)
    else:
        user.replace_input_with(node, constant)
