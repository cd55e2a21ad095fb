"""Which states are read in their own layout, and how a graph gets them in it.

Moving bytes gives the same bytes from any layout. Any other kernel may take another path, or sum in another order,
over other strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.fx as fx

from cadence_fx.errors import NotCapturable
from cadence_fx.passes.constants import Constants
from cadence_fx.passes.graphs import GraphFacts, may_write, output_node, tensor_val
from cadence_fx.passes.movement import is_movement

__all__ = ["give_layout", "reads_layout"]

aten = torch.ops.aten


def reads_layout(gm: fx.GraphModule, states: Sequence[fx.Node]) -> set[fx.Node]:
    """The states that anything but moves of bytes into fresh, contiguous memory reads, themselves or through views.

    So does whoever gets a view of one as a result, whose strides are eager's.
    """
    facts = GraphFacts(gm.graph)
    constants = Constants(gm, facts)
    by_class = {facts.alias_class(state): state for state in states}
    leaving = output_node(gm.graph).all_input_nodes
    found = {by_class[rep] for node in leaving if (rep := facts.alias_class(node)) in by_class}
    for node in gm.graph.nodes:
        read = {by_class[rep] for arg in node.all_input_nodes if (rep := facts.alias_class(arg)) in by_class}
        if node.op != "call_function" or not read:
            continue
        fresh = facts.alias_class(node) not in by_class and not may_write(node)
        strided = fresh and not (
            _is_contiguous(node.meta.get("val")) and _is_contiguous(_on_strides(node, read, facts))
        )
        if strided or not is_movement(node, constants):
            found |= read
    return found


def _is_contiguous(val: object) -> bool:
    return all(tensor.is_contiguous() for tensor in _tensors(val))


def _on_strides(node: fx.Node, states: set[fx.Node], facts: GraphFacts) -> object:
    """What ``node`` makes of states with other strides: some operators pass those of their argument on."""
    classes = {facts.alias_class(state) for state in states}

    def turned(arg: fx.Node) -> Any:
        val = arg.meta.get("val")
        if facts.alias_class(arg) not in classes or not isinstance(val, torch.Tensor):
            return val
        strides = [prod(val.shape[:axis]) for axis in range(val.dim())]
        return val.new_empty_strided(val.shape, strides)

    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), turned)
    try:
        return target(*args, **kwargs)
    except RuntimeError:  # such as a view of what cannot be viewed
        return torch.empty(2, 2, device="meta").t()


def _tensors(val: object) -> list[torch.Tensor]:
    values = val if isinstance(val, (list, tuple)) else [val]
    return [value for value in values if isinstance(value, torch.Tensor)]


def give_layout(gm: fx.GraphModule, state: fx.Node, strides: tuple[int, ...], pad: int) -> None:
    """Rewrite ``gm`` so that ``state`` may come in contiguous: everything reads a copy of it with ``strides``.

    Before: ``op(state)``, traced with a state of these strides. After::

        memory = new_empty(state, [pad + span])
        copy = as_strided(memory, shape, strides, pad)
        copy_(copy, state)
        op(copy)

    No byte moves: the copy holds the state's bytes at the state's strides, and, by ``pad`` elements, its alignment.
    """
    if 0 in strides:
        raise NotCapturable("layout", state.name)  # an expanded state: no copy can fill it
    val = tensor_val(state)
    shape = list(val.shape)
    span = pad + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    readers = list(state.users)
    last = list(gm.graph.find_nodes(op="placeholder"))[-1]
    state.meta["val"] = val.new_empty(shape)
    with gm.graph.inserting_after(last):
        memory = gm.graph.call_function(aten.new_empty.default, (state, [span]))
    memory.meta["val"] = val.new_empty([span])
    with gm.graph.inserting_after(memory):
        copy = gm.graph.call_function(aten.as_strided.default, (memory, shape, list(strides), pad))
    copy.meta["val"] = memory.meta["val"].as_strided(shape, strides, pad)
    with gm.graph.inserting_after(copy):
        filled = gm.graph.call_function(aten.copy_.default, (copy, state))
    filled.meta["val"] = copy.meta["val"]
    for reader in readers:
        reader.replace_input_with(state, copy)
    gm.graph.lint()
    gm.recompile()
