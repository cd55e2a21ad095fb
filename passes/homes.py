"""Where the memory of a node is, and when it is written, for passes that move or drop a read."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import torch.fx as fx

from cadence_fx.passes.base import PassContext
from cadence_fx.passes.graphs import GraphFacts

__all__ = ["Homes"]


class Homes:
    """Alias classes of a graph, where the storage of a new state counts as that of the old one: the graph has two
    placeholders for it."""

    def __init__(self, graph: fx.Graph, facts: GraphFacts, ctx: PassContext) -> None:
        self._facts = facts
        named = {node.name: node for node in graph.nodes if node.op == "placeholder"}
        self._shared = {
            facts.alias_class(named[slot.destination]): facts.alias_class(named[slot.placeholder])
            for slot in ctx.regions
            if slot.destination in named and slot.placeholder in named
        }
        self._writes: dict[fx.Node, list[int]] = {}  # home -> positions of the nodes that may write it, in order
        for rep, nodes in facts.writes.items():
            self._writes.setdefault(self._shared.get(rep, rep), []).extend(facts.order[node] for node in nodes)
        for positions in self._writes.values():
            positions.sort()

    def home(self, node: fx.Node) -> fx.Node:
        """The representative of all that may share memory with ``node``."""
        rep = self._facts.alias_class(node)
        return self._shared.get(rep, rep)

    def writes_before(self, node: fx.Node, position: int) -> int:
        """How many nodes before ``position`` may have written the memory of ``node``."""
        return bisect_left(self._writes.get(self.home(node), ()), position)

    def written_between(self, node: fx.Node, after: int, before: int) -> bool:
        """Whether anything at a position ``after < position < before`` may write the memory of ``node``."""
        positions = self._writes.get(self.home(node), ())
        return bisect_right(positions, after) < bisect_left(positions, before)
