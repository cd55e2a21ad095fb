"""Pairing: which output of a graph is the new state of which region.

A graph returns one flat list, in an order that says nothing about the structure the user returns. The frame that Dynamo
compiles says it: what is at the declared place of the result, and what has been assigned to an attribute. Where the
frame cannot be read, warm-up watches a call. A state that is in neither place is not updated by this graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from cadence_fx._torch import CompileSite
from cadence_fx._units import counted
from cadence_fx.binding import Binding, Instance
from cadence_fx.catalog import CatalogEntry
from cadence_fx.errors import RetentionMismatch
from cadence_fx.passes.graphs import GraphFacts, location, output_node
from cadence_fx.paths import origin

Key = tuple[str, Any]


def extents(instance: Instance, point: CatalogEntry, args: Sequence[Any]) -> tuple[int, int, int]:
    """Extents on entry and exit, and frames added, of one instance in one class."""
    region = instance.region
    if instance.axis is None:
        size = args[instance.index].shape[0] if args[instance.index].dim() else 1
        return size, size, 0
    ticks = point.advance_of(region.frame_clock) if region.frame_clock is not None else 0
    return point.extent_of(region.name), point.next_of(region.name), region.added(ticks)


class Pairing:
    """The pairing of one Dynamo graph.

    Attributes:
        outputs: instance key -> index of its new state among the outputs; None when it is written in place.
        kept: keys of instances for which the frame puts nothing else in their place: the next state is the old one,
            if the graph does not write it.
    """

    def __init__(self, binding: Binding, gm: fx.GraphModule, site: CompileSite) -> None:
        self.binding = binding
        self.outputs: dict[Key, int | None] = {}
        (results,) = gm.graph.output_node().args
        numbers = {getattr(out, "name", None): i for i, out in enumerate(results)}  # type: ignore[arg-type]
        assigned = {origin(source, site.module_name).path: node for source, node in (site.assigned or {}).items()}
        for instance in binding.instances:
            if instance.region.attribute is not None:
                node = assigned.get(instance.path)
            elif instance.result_path is None:
                continue
            else:
                node = (site.returns or {}).get(instance.result_path)
                if node is None and instance.result_path == (0,):
                    node = (site.returns or {}).get(())
            if node in numbers:
                self.outputs[instance.key] = numbers[node]
        self._shown = set(self.outputs)
        names = {i.index: i.name for i in binding.inputs}
        self.kept = {i.key for i in binding.instances if _stays(i, names[i.index], site, assigned)}

    def complete(
        self, aten: fx.GraphModule, facts: GraphFacts, args: Sequence[Any], point: CatalogEntry, written: set[int]
    ) -> None:
        """Pair what is not paired yet, and check the extents of all of them in this class.

        Args:
            written: indices of the inputs that the graph writes.

        Raises:
            RetentionMismatch: a new state has another extent than the contract says.
        """
        outputs: Any = output_node(aten.graph).args[0]
        placeholders = aten.graph.find_nodes(op="placeholder")
        for instance in self.binding.instances:
            known = self.outputs.get(instance.key)
            # An operator that writes in place returns what it wrote: the user's own tensor, wherever that is put.
            if known is not None and instance.index in written:
                state, result = placeholders[instance.index], outputs[known]
                shown = instance.key in self._shown
                if facts.aliases(state, result) and (not shown or _geometry(state) == _geometry(result)):
                    known = self.outputs[instance.key] = None
            if known is not None:
                expected = _next_shape(instance, point, args)
                found = list(outputs[known].meta["val"].shape)
                if found != expected:
                    raise _mismatch(instance, point, args, found, outputs[known])
            elif instance.index in written:
                self.outputs[instance.key] = None


def _geometry(node: fx.Node) -> tuple[Any, ...]:
    val = node.meta["val"]
    return val.shape, val.stride(), val.storage_offset()


def _stays(instance: Instance, placeholder: str, site: CompileSite, assigned: Mapping[Any, str]) -> bool:
    """Whether what is at the place of the next state when the frame ends is what came in."""
    if site.returns is None or site.resumes:
        return False  # the call goes on, or has begun, elsewhere
    if instance.result_path is not None:
        at = site.returns.get(instance.result_path)
        return (site.returns.get(()) if at is None and instance.result_path == (0,) else at) == placeholder
    # What leaves in other ways than these may have been put anywhere, into a list of states for one.
    elsewhere = site.times - Counter(site.returns.values()) - Counter(assigned.values())
    return not elsewhere and assigned.get(instance.path, placeholder) == placeholder


def _next_shape(instance: Instance, point: CatalogEntry, args: Sequence[Any]) -> list[int]:
    shape = list(args[instance.index].shape)
    if instance.axis is not None:
        shape[instance.axis] = extents(instance, point, args)[1]
    return shape


def _mismatch(
    instance: Instance, point: CatalogEntry, args: Sequence[Any], found: list[int], node: fx.Node
) -> RetentionMismatch:
    extent, following, advance = extents(instance, point, args)
    declared = f"{instance.region.retention.describe()} ({counted(extent, 'frame')} + {advance} new -> {following})"
    return RetentionMismatch(instance.name, declared, f"a state of shape {found}", location(node))
