"""What must come after what in a graph, if not all of it runs in one row.

A *call* is a node that may launch something; views, tuple elements, placeholders and constants are none. A call comes
after the calls its arguments come from, and after every call that touches the same bytes, if one of the two writes
them: memory is compared by alias class, and within a class by boxes, so that the write of one layer's slice of a cache
does not wait for the reads of the others'. Where nothing can be told, the order of the graph is kept.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch.fx as fx

from cadence_fx.passes.base import RegionSlot
from cadence_fx.passes.boxes import Box, box_of, covers, disjoint
from cadence_fx.passes.effects import draws, is_collective
from cadence_fx.passes.graphs import KNOWN_NAMESPACES, GraphFacts, OpOverload, may_write, schema, tensors_in

__all__ = ["Dependencies", "foreign"]

# Beyond these, the accesses of one memory are kept in the order of the graph.
_MOST_BOXES = 4096
_MOST_READERS = 256


def foreign(node: fx.Node) -> bool:
    """Whether a node is somebody else's operator: what it touches besides its arguments is not known."""
    if node.op in ("call_module", "call_method"):
        return True
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if not isinstance(node.target, OpOverload):
        return bool(node.all_input_nodes)  # without tensors it switches a mode of the host
    return node.target.namespace not in KNOWN_NAMESPACES


@dataclass(slots=True)
class _Memory:
    """The accesses so far of one memory, by box; each box knows its last writer and who has read it since."""

    boxes: dict[tuple[object, Box | None], int] = field(default_factory=dict)
    meets: list[list[int]] = field(default_factory=list)
    within: list[list[int]] = field(default_factory=list)  # the boxes that a write of this one replaces
    writer: list[int | None] = field(default_factory=list)
    readers: list[list[int]] = field(default_factory=list)
    last: int | None = None  # of a memory whose accesses stay in order
    in_order: bool = False

    def touch(self, origin: object, box: Box | None, call: int, writes: bool) -> Iterable[int]:
        """Note an access; returns the calls it must come after."""
        if self.in_order:
            before, self.last = self.last, call
            return () if before is None else (before,)
        which = self.boxes.get((origin, box))
        if which is None:
            which = self._add(origin, box)
        found: set[int] = set()
        for other in self.meets[which]:
            if (writer := self.writer[other]) is not None:
                found.add(writer)
            if writes:
                found.update(self.readers[other])
        if writes:
            for other in self.within[which]:
                self.writer[other] = call
                self.readers[other] = []
        elif not self.readers[which] or self.readers[which][-1] != call:
            self.readers[which].append(call)
        if len(self.boxes) > _MOST_BOXES or len(self.readers[which]) > _MOST_READERS:
            found.update(writer for writer in self.writer if writer is not None)
            found.update(reader for readers in self.readers for reader in readers)
            self.in_order, self.last = True, call
        return found

    def _add(self, origin: object, box: Box | None) -> int:
        which = len(self.writer)
        meets, within = [which], [which]
        for (whose, other), index in self.boxes.items():
            known = box is not None and other is not None and whose == origin
            if known and (box.last < other.first or other.last < box.first or disjoint(box, other)):  # type: ignore[union-attr,arg-type]
                continue
            meets.append(index)
            self.meets[index].append(which)
            if known and covers(box, other):  # type: ignore[arg-type]
                within.append(index)
            if known and covers(other, box):  # type: ignore[arg-type]
                self.within[index].append(which)
        self.boxes[origin, box] = which
        self.meets.append(meets)
        self.within.append(within)
        self.writer.append(None)
        self.readers.append([])
        return which


class Dependencies:
    """The calls of a graph in order, and what each must come after.

    Attributes:
        calls: the nodes that may launch something.
        index: call -> its place in `calls`.
        before, after: for each call, the earlier calls it needs, and the later ones that need it.
        sources: for each node, the calls whose results it is or is a view of.
        views: nodes that launch nothing because their memory is an argument's.
        touched: alias class -> the calls that touch its memory, in order.
        written: alias classes that some call writes.
        pinned: for each call, whether it has to stay in the main row.
    """

    def __init__(self, graph: fx.Graph, facts: GraphFacts, slots: Iterable[RegionSlot] = ()) -> None:
        self.facts = facts
        self.calls: list[fx.Node] = []
        self.index: dict[fx.Node, int] = {}
        self.before: list[list[int]] = []
        self.pinned: list[bool] = []
        self.sources: dict[fx.Node, tuple[int, ...]] = {}
        self.views: set[fx.Node] = set()
        self.touched: dict[fx.Node, list[int]] = {}
        self._groups, self._origins = self._carries(graph, slots)
        self._numbers: dict[int, int] = {}  # of storages; these do not compare with the names of inputs
        self.written = {self._group(rep) for rep in self.facts.writes}
        self._memories: dict[fx.Node, _Memory] = {}
        self._accelerated = any(not _on_host(node) for node in graph.nodes if node.op != "output")
        for node in graph.nodes:
            if node.op == "call_function":
                self._add(node)
            else:
                self.sources[node] = ()
        self.after: list[list[int]] = [[] for _ in self.calls]
        for call, needed in enumerate(self.before):
            for earlier in needed:
                self.after[earlier].append(call)

    def memory_of(self, node: fx.Node) -> fx.Node:
        """The class of everything that may share memory with a node."""
        return self._group(self.facts.alias_class(node))

    def _group(self, rep: fx.Node) -> fx.Node:
        return self._groups.get(rep, rep)

    def _carries(
        self, graph: fx.Graph, slots: Iterable[RegionSlot]
    ) -> tuple[dict[fx.Node, fx.Node], dict[int, tuple[object, int]]]:
        """Old and new state begin at one address. And each input's storage -> (whose, the byte where it begins)."""
        by_name = {node.name: node for node in graph.nodes if node.op == "placeholder"}
        groups: dict[fx.Node, fx.Node] = {}
        origins: dict[int, tuple[object, int]] = {}
        for slot in slots:
            if slot.destination is None or slot.placeholder not in by_name:
                continue
            old, new = by_name[slot.placeholder], by_name[slot.destination]
            groups[self.facts.alias_class(new)] = self.facts.alias_class(old)
            for node in (old, new):
                value, (storage,) = node.meta["val"], self.facts.storages[node]
                origins[storage] = (slot.placeholder, value.storage_offset() * value.element_size())
        return groups, origins

    def _add(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        needed = {source for argument in inputs for source in self.sources[argument]}
        if self._is_view(node):
            self.views.add(node)
            self.sources[node] = tuple(sorted(needed))
            return
        call = len(self.calls)
        written = may_write(node)
        for argument in inputs:
            group = self.memory_of(argument)
            seen = self.touched.setdefault(group, [])
            if not seen or seen[-1] != call:
                seen.append(call)
            if group in self.written:
                memory = self._memories.setdefault(group, _Memory())
                for origin, box in self._boxes(argument):
                    needed.update(memory.touch(origin, box, call, argument in written))
        own = self.touched.setdefault(self.memory_of(node), [])
        if not own or own[-1] != call:
            own.append(call)
        needed.discard(call)
        self.calls.append(node)
        self.index[node] = call
        self.sources[node] = (call,)
        self.before.append(sorted(needed))
        self.pinned.append(self._is_pinned(node, written))

    def _is_view(self, node: fx.Node) -> bool:
        if node.target is operator.getitem:
            return True
        if not isinstance(node.target, OpOverload) or may_write(node):
            return False
        made = self.facts.storages[node]
        given = {storage for argument in node.all_input_nodes for storage in self.facts.storages[argument]}
        return bool(made) and given.issuperset(made)

    def _boxes(self, node: fx.Node) -> list[tuple[object, Box | None]]:
        found: list[tuple[object, Box | None]] = []
        for value, storage in zip(tensors_in(node.meta.get("val")), self.facts.storages[node], strict=True):
            origin, base = self._origins.get(storage, (self._numbers.setdefault(storage, len(self._numbers)), 0))
            found.append((origin, box_of(value, base)))
        return found or [(None, None)]

    def _is_pinned(self, node: fx.Node, written: tuple[fx.Node, ...]) -> bool:
        if not isinstance(node.target, OpOverload) or foreign(node):
            return True
        if draws(node) or is_collective(node.target):
            return True
        if self._accelerated and _on_host(node):
            return True
        return not schema(node).returns and not written


def _on_host(node: fx.Node) -> bool:
    """Whether all tensors of a node are on the host."""
    return all(tensor.device.type == "cpu" for tensor in tensors_in(node.meta.get("val")))
