"""The native clock of every value: the slowest rate at which it can change, the join of what it depends on."""

from __future__ import annotations

import enum
import operator
from collections.abc import Container
from typing import Any

import torch
import torch.fx as fx

from cadence_fx.passes.base import PassContext
from cadence_fx.passes.constants import is_constant_attribute
from cadence_fx.passes.effects import draws, reads_value
from cadence_fx.passes.graphs import RUNS_EAGER, GraphFacts, OpOverload, may_write, schema, tensors_in

__all__ = ["NativeClock", "native_clocks", "steady_inputs"]


class NativeClock(enum.IntEnum):
    """When a value can change, from never to in every call. The join of two is the larger one."""

    CONSTANT = 0
    PROCESS = 1  # with the weights: inputs at fixed addresses, whoever writes them between calls
    CALL = 2


def steady_inputs(ctx: PassContext) -> frozenset[str]:
    """Names of the placeholders that keep their memory and that only others write, between calls: no states."""
    return ctx.frozen_inputs - ctx.unsteady.keys() - {slot.placeholder for slot in ctx.regions}


def native_clocks(
    gm: fx.GraphModule, facts: GraphFacts, steady: Container[str], settled: Container[fx.Node] = ()
) -> dict[fx.Node, NativeClock]:
    """The native clock of each node.

    A value that the graph writes, draws, takes from memory without contents, needs on the host or gets from an operator
    that does not repeat follows the call, whatever it depends on.

    Args:
        steady: the placeholders of slow values, as `steady_inputs` has them.
        settled: alias classes whose writes count like operators that make what they write. What reads such memory has
            the clock of what made it: of CALL if that is, whatever is written later.
    """
    clocks: dict[fx.Node, NativeClock] = {}
    for node in gm.graph.nodes:
        clocks[node] = _clock(gm, node, facts, steady, settled, clocks)
    return clocks


def _clock(
    gm: fx.GraphModule,
    node: fx.Node,
    facts: GraphFacts,
    steady: Container[str],
    settled: Container[fx.Node],
    clocks: dict[fx.Node, NativeClock],
) -> NativeClock:
    is_settled = facts.alias_class(node) in settled
    if not _holds_tensors(node.meta.get("val")) or (facts.writes_to(node) and not is_settled):
        return NativeClock.CALL
    if node.op == "placeholder":
        return NativeClock.PROCESS if node.name in steady else NativeClock.CALL
    if node.op == "get_attr":
        return NativeClock.CONSTANT if is_constant_attribute(gm, node) else NativeClock.CALL
    if node.op != "call_function" or not _only_computes(node) or (may_write(node) and not is_settled):
        return NativeClock.CALL
    return max((clocks[used] for used in node.all_input_nodes), default=NativeClock.CONSTANT)


def _holds_tensors(val: Any) -> bool:
    if isinstance(val, (list, tuple)):
        return bool(val) and all(isinstance(each, torch.Tensor) for each in val)
    return bool(tensors_in(val))


def _only_computes(node: fx.Node) -> bool:
    """Whether a call does nothing but compute its result, or what it writes, from nothing but its arguments."""
    target: Any = node.target
    if target is operator.getitem:
        return True
    if RUNS_EAGER in node.meta:
        return False
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    if reads_value(target) or draws(node) or not schema(node).returns:
        return False
    return "empty" not in target._schema.name  # memory that nothing has written may hold anything
