"""Memory that the graph makes and changes in place, from what never changes, becomes a value for each state it is in.

Before, with a counter that a step makes anew and counts up::

    zeros = aten.zeros.default([1])
    view = aten.view.default(zeros, [-1, 1])
    now = aten.add.Tensor(view, x)
    add_ = aten.add_.Tensor(zeros, 1)
    then = aten.ge.Tensor(positions, view)                 # reads what ``add_`` has written

After::

    zeros = aten.zeros.default([1])
    view = aten.view.default(zeros, [-1, 1])
    now = aten.add.Tensor(view, x)
    add = aten.add.Tensor(zeros, 1)
    view_1 = aten.view.default(add, [-1, 1])
    then = aten.ge.Tensor(positions, view_1)

It removes nothing by itself: what it makes is computed once with its like (`merge_common`) and kept (`hoist_slow`), and
neither may touch memory that is written.

Why no byte moves: an elementwise operator in place and its twin that makes a result run one kernel on one input, and
the result has the shape, the strides and the dtype that the memory had; every reader gets the state that was there when
it read, through views like those it had. Only for memory that the graph itself makes, that does not leave it, and that
is always written as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from cadence_fx.passes.base import PassContext, PassResult
from cadence_fx.passes.graphs import RUNS_EAGER, GraphFacts, OpOverload, may_write, output_node, trace_again
from cadence_fx.passes.native_clocks import NativeClock, native_clocks, steady_inputs
from cadence_fx.passes.placement import is_view

__all__ = ["ConstantWrites"]

aten = torch.ops.aten


@dataclass(slots=True)
class _Memory:
    """A tensor that the graph makes.

    Attributes:
        root: the node that makes it.
        bases: of each view of it, what it is a view of.
        writes: of each node that writes it, the operator that makes the same value; None for a plain copy.
    """

    root: fx.Node
    bases: dict[fx.Node, fx.Node] = field(default_factory=dict)
    writes: dict[fx.Node, Any] = field(default_factory=dict)

    @property
    def members(self) -> set[fx.Node]:
        return {self.root, *self.bases, *self.writes}


class ConstantWrites:
    """Makes writes on constants constants themselves."""

    name = "constant_writes"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        facts = ctx.facts_of(gm.graph)
        found = _constant(gm, facts, steady_inputs(ctx), _memories(gm.graph, facts))
        order = dict(facts.order)  # of nodes that are put in, too: they stand where what they replace did
        for memory in found:
            _separate(gm.graph, order, memory)
        if found:
            writes = sum(len(memory.writes) for memory in found)
            ctx.notes.append(f"{self.name}: {writes} writes on {len(found)} constants are values of their own")
        return PassResult(gm, bool(found))


def _memories(graph: fx.Graph, facts: GraphFacts) -> dict[fx.Node, _Memory]:
    """By alias class: what is written, always as a whole, and stays in the graph."""
    by_class: dict[fx.Node, list[fx.Node]] = {rep: [] for rep in facts.writes}
    for node in graph.nodes:
        if (members := by_class.get(facts.alias_class(node))) is not None:
            members.append(node)
    leaving = {facts.alias_class(result) for result in output_node(graph).all_input_nodes}
    found = {rep: _memory(facts, members) for rep, members in by_class.items() if rep not in leaving}
    return {rep: memory for rep, memory in found.items() if memory is not None and memory.writes}


def _memory(facts: GraphFacts, members: list[fx.Node]) -> _Memory | None:
    memory = _Memory(members[0])
    if not _is_made(memory.root):
        return None
    for node in members[1:]:
        bases = [used for used in node.all_input_nodes if facts.aliases(used, node)]
        if may_write(node):
            continue
        if len(bases) != 1 or not is_view(facts, node, bases[0]):
            return None
        memory.bases[node] = bases[0]
    for node in facts.writes_to(memory.root):
        if not _is_like(node.args[0] if node.args else None, memory.root) or len(may_write(node)) != 1:
            return None
        if node.target is aten.copy_.default:
            if not _is_plain_copy(facts, node, memory.root):
                return None
            memory.writes[node] = None
        elif (twin := _twin(node, memory.root)) is not None:
            memory.writes[node] = twin
        else:
            return None
    # What writes one memory and is another would be in two classes.
    return memory if memory.members == {*members, *memory.writes} else None


def _is_made(node: fx.Node) -> bool:
    """Whether a node makes memory of its own, and fills it."""
    val, target = node.meta.get("val"), node.target
    return (
        node.op == "call_function"
        and isinstance(target, OpOverload)
        and target.namespace == "aten"
        and "empty" not in target._schema.name
        and not may_write(node)
        and isinstance(val, torch.Tensor)
        and val.is_contiguous()
        and val.storage_offset() == 0
    )


def _is_like(node: Any, other: fx.Node) -> bool:
    """Whether two traced tensors have one geometry and one dtype."""
    if not isinstance(node, fx.Node) or not isinstance(val := node.meta.get("val"), torch.Tensor):
        return False
    return _geometry(val) == _geometry(other.meta["val"])


def _geometry(val: torch.Tensor) -> tuple[Any, ...]:
    return val.shape, val.stride(), val.storage_offset(), val.dtype, val.device, val.is_conj(), val.is_neg()


def _is_plain_copy(facts: GraphFacts, node: fx.Node, root: fx.Node) -> bool:
    """Whether a copy is of a tensor of that geometry that nobody writes, and that can be read instead."""
    source = node.args[1]
    return isinstance(source, fx.Node) and _is_like(source, root) and not facts.writes_to(source)


def _twin(node: fx.Node, root: fx.Node) -> Any:
    """The operator that makes what an elementwise one writes; None where there is none, or it makes another tensor."""
    target: Any = node.target
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags or RUNS_EAGER in node.meta:
        return None
    namespace, name = target._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    twin = getattr(packet, target._overloadname, None)
    if twin is None or twin is target or twin._schema.is_mutable or _arguments(twin) != _arguments(target):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    made = twin(*args, **kwargs)
    return twin if _geometry(made) == _geometry(root.meta["val"]) else None


def _arguments(target: Any) -> list[tuple[str, str]]:
    """Names and types: overloads of one name may take their arguments in another order, as `pow` of a number does."""
    return [(argument.name, str(argument.type)) for argument in target._schema.arguments]


def _constant(
    gm: fx.GraphModule, facts: GraphFacts, steady: frozenset[str], memories: dict[fx.Node, _Memory]
) -> list[_Memory]:
    """Those of the memories that are in the same states in every call as long as no weight is written."""
    while memories:
        # All are taken for constant until something is found that is written on one of them and is not.
        clocks = native_clocks(gm, facts, steady, memories.keys())
        left = {
            rep: memory
            for rep, memory in memories.items()
            if all(clocks[node] < NativeClock.CALL for node in (memory.root, *memory.writes))
        }
        if len(left) == len(memories):
            break
        memories = left
    return list(memories.values())


def _separate(graph: fx.Graph, order: dict[fx.Node, int], memory: _Memory) -> None:
    """Give every reader of the memory the value that was there when it read."""
    members = memory.members
    readers = {user for member in members for user in member.users if user not in memory.bases}
    states = _States(graph, order, memory)
    for reader in sorted(readers, key=order.__getitem__):
        used = [arg for arg in reader.all_input_nodes if arg in members]
        if reader not in memory.writes:
            for member in used:
                reader.replace_input_with(member, states.view(member, reader))
            continue
        states.write(reader)
    for node in sorted({*memory.bases, *memory.writes}, key=order.__getitem__, reverse=True):
        if not node.users:
            graph.erase_node(node)


class _States:
    """The value that the memory has, while the graph is walked."""

    def __init__(self, graph: fx.Graph, order: dict[fx.Node, int], memory: _Memory) -> None:
        self._graph = graph
        self._order = order
        self._memory = memory
        self._now = memory.root
        self._views: dict[fx.Node, fx.Node] = {}

    def view(self, member: fx.Node, before: fx.Node) -> fx.Node:
        """``member`` as it is ``before`` a node."""
        if self._now is self._memory.root and member not in self._memory.writes:
            return member
        if member not in self._memory.bases:
            return self._now
        if member not in self._views:
            base = self._memory.bases[member]
            now = self.view(base, before)
            with self._graph.inserting_before(before):
                self._views[member] = node = self._graph.node_copy(member, lambda arg: now if arg is base else arg)
            trace_again(node)
            self._order[node] = self._order[before]
        return self._views[member]

    def write(self, node: fx.Node) -> None:
        """From now on the memory has what ``node`` has written."""
        twin = self._memory.writes[node]
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: self._read(arg, node))
        if twin is None:
            self._now = args[1]  # type: ignore[assignment]
        else:
            with self._graph.inserting_before(node):
                self._now = self._graph.call_function(twin, args, kwargs)
            self._now.meta = dict(node.meta)
            trace_again(self._now)
            self._order[self._now] = self._order[node]
        self._views = {}

    def _read(self, node: fx.Node, before: fx.Node) -> fx.Node:
        return self.view(node, before) if node in self._memory.members else node
