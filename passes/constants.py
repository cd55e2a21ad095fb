"""Values a graph computes from constants alone, with the kernels the graph would have used."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from cadence_fx.passes.graphs import GraphFacts, OpOverload, is_impure

__all__ = ["VARIES", "Constants", "attribute", "is_constant_attribute"]

VARIES = "cadence_varies"  # in the meta of a tensor attribute that is filled anew before each launch


def attribute(gm: fx.GraphModule, node: fx.Node) -> Any:
    """What a ``get_attr`` node reads."""
    value: Any = gm
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    return value


def is_constant_attribute(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a ``get_attr`` node reads a plain tensor that stays what it is unless the graph itself writes it."""
    value = attribute(gm, node)
    return type(value) is torch.Tensor and value.device.type != "meta" and not node.meta.get(VARIES)


class Constants:
    """Evaluates nodes whose whole ancestry is constant: no placeholder, no random number, no write.

    Tensor attributes of the graph module count as constants unless they are parameters or the graph writes them:
    weights and buffers of a model come in as placeholders. Results are kept, so each node is computed once.
    """

    def __init__(self, gm: fx.GraphModule, facts: GraphFacts) -> None:
        self._gm = gm
        self._facts = facts
        self._known: dict[fx.Node, Any] = {}

    def is_constant(self, node: fx.Node) -> bool:
        """Whether the value is fixed; nothing is computed."""
        pending = [node]
        seen = set()
        while pending:
            current = pending.pop()
            if current in seen or current in self._known:
                continue
            seen.add(current)
            if not self._is_constant_here(current):
                return False
            pending += current.all_input_nodes
        return True

    def tensor(self, node: fx.Node) -> torch.Tensor | None:
        """The value of ``node`` if it is a constant tensor, else None."""
        if not self.is_constant(node):
            return None
        value = self._value(node)
        return value if isinstance(value, torch.Tensor) else None

    def _is_constant_here(self, node: fx.Node) -> bool:
        if self._facts.writes_to(node):
            return False
        if node.op == "get_attr":
            return is_constant_attribute(self._gm, node)
        if node.op != "call_function" or is_impure(node):
            return node.op == "call_function" and node.target is torch.ops.aten.detach_.default
        if node.target is operator.getitem:
            return True
        # Memory that nothing has written holds no constant.
        return isinstance(node.target, OpOverload) and "empty" not in node.target._schema.name

    def _value(self, node: fx.Node) -> Any:
        if node not in self._known:
            order = [node]
            for current in order:  # grows while it is walked: every unknown ancestor, each after one of its users
                order += [arg for arg in current.all_input_nodes if arg not in self._known]
            with torch.no_grad():
                for current in reversed(order):
                    if current not in self._known:
                        self._known[current] = self._compute(current)
        return self._known[node]

    def _compute(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return attribute(self._gm, node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: self._known[arg])
        target: Any = node.target
        return target(*args, **kwargs)
