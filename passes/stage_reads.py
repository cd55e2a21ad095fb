"""What a counter of the host picks out of a table is picked before the graph runs, and comes in like any argument.

This works on the graph as Dynamo gives it, before any class exists: in a class's own graph a counter is a number.

Before::

    add = t + 2
    rows = pe[(slice(None), slice(t, add))]       # t is a symbol: with t in the signature, every call is a class
    y = x + rows

After, with ``rows`` a placeholder that takes the value of the same expression in every call::

    y = x + rows

Why no byte moves: what is taken out runs as it stands, in eager, on the call's own arguments: arithmetic on Python
numbers, views (which read nothing), and ranges made of such numbers. The class sees a tensor of the same geometry.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from cadence_fx.passes.subgraph import ancestors, cut_out

__all__ = ["STAGED", "stage_reads"]

STAGED = "cadence_staged"  # in the meta of a placeholder that is filled from the others in every call

_VIEWS = frozenset({"narrow", "select"})  # methods that take numbers and give views


def stage_reads(
    gm: fx.GraphModule, counters: set[str], tables: set[str]
) -> tuple[fx.GraphModule, fx.GraphModule] | None:
    """Take what only ``counters`` (numbers) and ``tables`` (tensors) decide out of a Dynamo graph.

    Returns:
        (first, rest), or None where a counter picks nothing. ``first`` takes the placeholders of ``gm`` and gives the
        values of the placeholders that ``rest`` has besides those, at their end. ``gm`` is Dynamo's and stays as it is.
    """
    if not counters:
        return None
    gm = _copy(gm)
    placeholders = gm.graph.find_nodes(op="placeholder")
    outside = {node for node in placeholders if node.name in tables}
    moving = {node for node in placeholders if node.name in counters}
    for node in gm.graph.nodes:
        inputs = node.all_input_nodes
        if not moving.isdisjoint(inputs) and (moving | outside).issuperset(inputs) and _may_run_first(node):
            moving.add(node)
    picked = [n for n in gm.graph.nodes if n in moving and _is_tensor(n) and any(u not in moving for u in n.users)]
    if not picked:
        return None
    first, _ = cut_out(gm, ancestors(picked) | set(placeholders), picked)
    last = placeholders[-1]
    for node in picked:
        with gm.graph.inserting_after(last):
            last = gm.graph.placeholder(node.name)
        last.meta = {**node.meta, STAGED: True}
        node.replace_all_uses_with(last, delete_user_cb=lambda user: user not in moving)
    for node in reversed([node for node in gm.graph.nodes if node in moving and node.op != "placeholder"]):
        if not node.users:
            gm.graph.erase_node(node)
    gm.graph.lint()
    gm.recompile()
    return first, gm


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copies[node] = graph.node_copy(node, lambda arg: copies[arg])
    return fx.GraphModule(gm, graph)


def _may_run_first(node: fx.Node) -> bool:
    if not _is_tensor(node):
        return node.op == "call_function" and _is_number(node.meta.get("example_value"))
    if node.target is operator.getitem:
        index: Any = node.args[1]
        parts = index if isinstance(index, tuple) else (index,)
        return all(_is_plain(part) for part in parts)
    if node.op == "call_method":
        return node.target in _VIEWS
    return node.target is torch.arange and "out" not in node.kwargs


def _is_plain(part: Any) -> bool:
    """Whether an index gives a view: a number, a slice, None or an ellipsis."""
    if isinstance(part, fx.Node):
        return _is_number(part.meta.get("example_value"))
    if isinstance(part, slice):
        return all(_is_plain(bound) for bound in (part.start, part.stop, part.step))
    return part is None or part is Ellipsis or isinstance(part, int)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)
