"""Cutting a piece out of a graph, as a graph of its own that shares the tensors it refers to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.fx as fx

__all__ = ["ancestors", "cut_out"]


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """``nodes`` and everything they are computed from."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def cut_out(
    gm: fx.GraphModule, nodes: set[fx.Node], results: Sequence[fx.Node]
) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """A graph of ``nodes``, in their order, that returns ``results``; and the names of its placeholders.

    ``nodes`` must hold all ancestors of its members.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node in nodes:
            copies[node] = graph.node_copy(node, lambda arg: copies[arg])
    graph.output(tuple(copies[node] for node in results))
    names = tuple(node.name for node in gm.graph.nodes if node in nodes and node.op == "placeholder")
    return fx.GraphModule(gm, graph), names
