"""Kernels that clear the result of a product go where the result is in memory that has been cleared already.

Before, on the way of every product whose result ``cleared_products`` has placed::

    scal_kernel(y)                               # y = 0, or beta * y with beta 0
    sgemm_largek(y, weight, x, counters)

After::

    sgemm_largek(y, weight, x, counters)

Why no byte moves: the memory holds positive zeros when the product begins, and a scaled zero is zero.

Left alone: a scaling of anything else than the start of a result in that memory, one that does not scale in place, and
one that no known product of the same branch follows on the same result.
"""

from __future__ import annotations

import bisect
import re

from cadence_fx._units import counted
from cadence_fx.passes.captured import CapturedGraph, CapturedNode, EditContext

__all__ = ["DropScalings"]

# Kernels (cuBLAS 13): a scaling takes source and destination second and third, a product its result first.
_SCALING, _PRODUCT = re.compile(r"scal_kernel"), re.compile(r"sgemm_largek_lds64")


class DropScalings:
    """Takes out what clears results that are clear."""

    name = "drop_scalings"

    def __call__(self, graph: CapturedGraph, ctx: EditContext) -> bool:
        ranges = sorted((memory.data_ptr(), memory.data_ptr() + memory.nbytes) for memory in ctx.cleared)
        found = [node for node in graph.nodes if _clears(graph, node, ranges)]
        for node in found:
            graph.remove(node)
        if found:
            ctx.notes.append(f"{self.name}: {counted(len(found), 'kernel')} that would clear a result left out")
        return bool(found)


def _clears(graph: CapturedGraph, node: CapturedNode, ranges: list[tuple[int, int]]) -> bool:
    if node.kind != "kernel" or not _SCALING.search(node.name) or len(node.params) != 4:
        return False
    source, target = (int.from_bytes(raw[:8], "little") for raw in node.params[1:3])
    at = bisect.bisect_right(ranges, (target, 1 << 64)) - 1
    if source != target or at < 0 or not target < ranges[at][1]:
        return False
    after = graph.after(node)
    return (
        len(after) == 1
        and after[0].kind == "kernel"
        and bool(_PRODUCT.search(after[0].name))
        and int.from_bytes(after[0].params[0][:8], "little") == target
    )
