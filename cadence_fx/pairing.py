"""Pairing: which output of a graph is the new state of which region.

Dynamo's graphs return one flat list, in an order that says nothing about the structure the user returns. Warm-up
watches a call and knows; without it the pairing follows shape, data flow and the declared result. A wrong pairing
costs copies, never bytes: a state that is passed in and is not the carry's own is copied in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from cadence_fx.binding import Binding, Instance
from cadence_fx.catalog import CatalogEntry
from cadence_fx.errors import RetentionMismatch
from cadence_fx.passes.graphs import location, output_node

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
    """

    def __init__(self, binding: Binding) -> None:
        self.binding = binding
        self.outputs: dict[Key, int | None] = {}

    def complete(self, aten: fx.GraphModule, args: Sequence[Any], point: CatalogEntry, written: set[int]) -> None:
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
            if known is not None:
                expected = _next_shape(instance, point, args)
                found = list(outputs[known].meta["val"].shape)
                if found != expected:
                    raise _mismatch(instance, point, args, found, outputs[known])
            elif instance.index in written:
                self.outputs[instance.key] = None
            else:
                self._choose(instance, outputs, placeholders[instance.index], point, args)

    def _choose(
        self, instance: Instance, outputs: Any, source: fx.Node, point: CatalogEntry, args: Sequence[Any]
    ) -> None:
        expected, dtype = _next_shape(instance, point, args), args[instance.index].dtype
        taken = set(self.outputs.values())
        tensors = {
            i: out.meta["val"]
            for i, out in enumerate(outputs)
            if isinstance(out, fx.Node) and isinstance(out.meta.get("val"), torch.Tensor)
        }
        fits = [
            i for i, val in tensors.items() if i not in taken and list(val.shape) == expected and val.dtype == dtype
        ]
        if fits:
            wanted = instance.region.result
            fed = [i for i in fits if _feeds(source, outputs[i])]
            self.outputs[instance.key] = wanted if isinstance(wanted, int) and wanted in fits else (fed or fits)[0]
            return
        # No output has the declared shape. One that differs on the frame axis alone is the state, with another
        # retention.
        axis = instance.axis
        for i, val in tensors.items():
            shape = list(val.shape)
            if (
                axis is not None
                and len(shape) == len(expected)
                and shape[:axis] + shape[axis + 1 :] == expected[:axis] + expected[axis + 1 :]
            ):
                raise _mismatch(instance, point, args, shape, outputs[i])


def _next_shape(instance: Instance, point: CatalogEntry, args: Sequence[Any]) -> list[int]:
    shape = list(args[instance.index].shape)
    if instance.axis is not None:
        shape[instance.axis] = extents(instance, point, args)[1]
    return shape


def _mismatch(
    instance: Instance, point: CatalogEntry, args: Sequence[Any], found: list[int], node: fx.Node
) -> RetentionMismatch:
    extent, following, advance = extents(instance, point, args)
    declared = f"{instance.region.retention.describe()} ({extent} frames + {advance} new -> {following})"
    return RetentionMismatch(instance.name, declared, f"a state of shape {found}", location(node))


def _feeds(source: fx.Node, target: fx.Node) -> bool:
    """Whether the value of `target` depends on `source`."""
    seen: set[fx.Node] = set()
    pending = [target]
    while pending:
        node = pending.pop()
        if node is source:
            return True
        if node not in seen:
            seen.add(node)
            pending.extend(node.all_input_nodes)
    return False
