"""What a rewrite costs and saves, in one unit: bytes moved.

A kernel costs what it moves and its place in the graph. A write on a state costs less than a kernel between two others:
nothing waits for it. The figures are for the choice between rewrites alone; no result depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.fx as fx

from cadence_fx.passes.graphs import GraphFacts, may_write, tensors_in

__all__ = ["KERNEL", "WRITE", "cost_of_nodes", "nbytes"]

KERNEL = 4 << 20  # about two microseconds at some terabytes a second
WRITE = KERNEL // 4


def nbytes(node: fx.Node) -> int:
    """Bytes of what a node holds."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(node.meta.get("val")))


def cost_of_nodes(facts: GraphFacts, nodes: Iterable[fx.Node]) -> int:
    """What it costs to have ``nodes`` in the graph: kernels, what they move, and the workspaces among them."""
    cost = 0
    for node in nodes:
        if node.op == "placeholder":
            cost += nbytes(node)
        elif node.op == "call_function":
            written = may_write(node)
            if written:
                cost += KERNEL + 2 * sum(map(nbytes, written))
            elif not any(facts.aliases(arg, node) for arg in node.all_input_nodes):
                cost += KERNEL + 2 * nbytes(node)
    return cost
