"""Counters that a library clears before each of its kernels are cleared together, once a launch.

A matrix product that is split along its inner dimension counts in a few words of workspace which part is done; a memset
clears them first. Before, on the way of every such product::

    memset(counters, 512 bytes)
    scal_kernel(y)
    sgemm_largek(y, weight, x, counters)

After, with counters of its own for each product::

    memset(all counters)                         # first node of the graph
    ...
    scal_kernel(y)
    sgemm_largek(y, weight, x, counters_17)

Why no byte moves: each product finds the zeros it found before, in memory that no other kernel has, and its arithmetic
and the order of its parts are the recorded kernel's.

Left alone: a memset that no known kernel of the same library call follows, one of more bytes than counters have, and
one whose memory the kernel does not get in exactly the places known for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from cadence_fx.passes.captured import CapturedGraph, CapturedNode, EditContext, Pointer, pointers

__all__ = ["ClearOnce"]

# Kernels, and where they take their counters (cuBLAS 13).
_COUNTING = {re.compile(r"sgemm_largek_lds64"): {(15, 0), (16, 0)}}
_PASSING = re.compile(r"scal_kernel")  # may stand between; takes no counters
_LARGEST = 4096  # bytes of a memset that is taken for one of counters


class ClearOnce:
    """Gives each product counters of its own, which one memset clears at the start."""

    name = "clear_once"

    def __call__(self, graph: CapturedGraph, ctx: EditContext) -> bool:
        found = list(_find(graph))
        if len(found) < 2:
            return False
        step = max(512, max(node.nbytes for node, _, _ in found))
        memory = torch.zeros(step * len(found), dtype=torch.uint8, device=ctx.device)
        for slot, (node, product, places) in enumerate(found):
            base = memory.data_ptr() + slot * step
            graph.repoint(product, {place: base + word - node.address for place, word in places})
            graph.remove(node)
        graph.clear_first(memory)
        ctx.kept.append(memory)
        ctx.added += memory.nbytes
        ctx.notes.append(f"{self.name}: {len(found)} memsets are one, of {memory.numel()} bytes")
        return True


def _find(graph: CapturedGraph) -> Iterator[tuple[CapturedNode, CapturedNode, list[tuple[Pointer, int]]]]:
    for node in graph.nodes:
        if node.kind != "memset" or node.value or node.nbytes > _LARGEST:
            continue
        product = _product(graph, node)
        if product is None:
            continue
        places = list(pointers(product, node.address, node.address + node.nbytes))
        known = next(known for pattern, known in _COUNTING.items() if pattern.search(product.name))
        if {place for place, _ in places} == known:
            yield node, product, places


def _product(graph: CapturedGraph, node: CapturedNode) -> CapturedNode | None:
    """The kernel that counts in what ``node`` clears: the next of its branch that is no known bystander."""
    for _ in range(2):
        after = graph.after(node)
        if len(after) != 1 or after[0].kind != "kernel" or len(graph.before(after[0])) != 1:
            return None
        node = after[0]
        if any(pattern.search(node.name) for pattern in _COUNTING):
            return node
        if not _PASSING.search(node.name):
            return None
    return None
