"""Weights that a library lays out anew in every call are laid out once.

A convolution whose kernel wants channels last starts with kernels that bring its input and its weight into that layout.
Before, in each launch::

    nchwToNhwc(x -> workspace)
    nchwToNhwc(weight -> workspace + n)          # the same bytes each time
    implicit_gemm(workspace, workspace + n -> y)

After::

    nchwToNhwc(x -> workspace)
    implicit_gemm(workspace, kept -> y)          # kept: filled once by the very same kernel

Why no byte moves: ``kept`` is filled by the library's own kernel with the parameters it was recorded with, the
destination apart, and the kernel that reads it is the recorded one. The destination is workspace of one library call,
so nobody reads it but the kernel that follows. When the weight is written, the conversion runs again before the next
launch.

Left alone: a conversion of anything but a whole tensor at a fixed address that the recording does not write; one whose
kernel writes more than the tensor has bytes; and one after which not exactly one pointer of the next kernels is the
destination.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cadence_fx.passes.captured import CapturedGraph, CapturedNode, EditContext, Pointer, pointers

__all__ = ["KeepConversions"]

# Kernels that read their second parameter and write their third, all of it and nothing else (cuDNN 9). Template
# arguments: dtypes of source, destination and arithmetic; `f` in the mangled name is float.
_CONVERSION = re.compile(r"nchwToNhwcKernelIfff")
_SOURCE, _DESTINATION = (1, 0), (2, 0)
_NEAR = 4  # the reader is among the next nodes of the same library call
_GUARD = 4096  # bytes behind a kept tensor that the kernel has to leave alone
_PATTERN = 0x5A


# Converted weights, which all classes share.
_memory: weakref.WeakValueDictionary[Any, torch.Tensor] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class _Found:
    node: CapturedNode
    weight: torch.Tensor
    reader: CapturedNode
    place: Pointer


class KeepConversions:
    """Runs layout conversions of constants once, and again when these have been written."""

    name = "keep_conversions"

    def __call__(self, graph: CapturedGraph, ctx: EditContext) -> bool:
        found = list(self._find(graph, ctx))
        kept: dict[tuple[int, tuple[bytes, ...]], torch.Tensor | None] = {}
        removed = 0
        for each in found:
            key = (each.weight.data_ptr(), each.node.params[: _DESTINATION[0]])
            if key not in kept:
                kept[key] = self._keep(graph, ctx, each)
            memory = kept[key]
            if memory is not None:
                graph.repoint(each.reader, {each.place: memory.data_ptr()})
                graph.remove(each.node)
                removed += 1
        size = sum(memory.numel() for memory in kept.values() if memory is not None) / 2**20
        if found:
            ctx.notes.append(
                f"{self.name}: {removed} of {len(found)} conversions of constants run once, {size:.1f} MiB"
            )
        return removed > 0

    def _find(self, graph: CapturedGraph, ctx: EditContext) -> Sequence[_Found]:
        constants = {tensor.data_ptr(): tensor for tensor in ctx.constants if tensor.is_contiguous()}
        found = []
        for node in graph.nodes:
            if node.kind != "kernel" or not _CONVERSION.search(node.name) or len(node.params) != 3:
                continue
            weight = constants.get(_word(node, _SOURCE))
            if weight is None or weight.dtype != torch.float32:
                continue
            target = _word(node, _DESTINATION)
            readers = [
                (each, place) for each in _following(graph, node) for place, _ in pointers(each, target, target + 1)
            ]
            if len(readers) == 1:
                found.append(_Found(node, weight, *readers[0]))
        return found

    def _keep(self, graph: CapturedGraph, ctx: EditContext, found: _Found) -> torch.Tensor | None:
        """Memory with the converted weight, if the kernel writes exactly as many bytes as the weight has."""
        if found.weight.is_inference():
            ctx.notes.append(f"{self.name}: a weight made in inference mode is left alone, nobody counts its writes")
            return None
        size = found.weight.nbytes
        key = (
            ctx.device,
            found.weight.data_ptr(),
            found.node.name,
            found.node.launch,
            found.node.params[: _DESTINATION[0]],
        )
        known = _memory.get(key)  # as long as it lives, so does the weight: whoever keeps it watches the weight
        memory = known
        if memory is None:
            memory = torch.full((size + _GUARD,), _PATTERN, dtype=torch.uint8, device=ctx.device)
        convert: Callable[[], None] = graph.alone([found.node], [{_DESTINATION: memory.data_ptr()}])
        convert()
        if not bool((memory[size:] == _PATTERN).all()):
            ctx.notes.append(f"{self.name}: {found.node.name} writes more than its source has; left alone")
            return None
        if known is None:
            _memory[key] = memory
            ctx.added += memory.nbytes
        ctx.kept.append(memory)
        ctx.refreshes.append(([found.weight], convert))
        return memory


def _word(node: CapturedNode, place: Pointer) -> int:
    index, offset = place
    return int.from_bytes(node.params[index][offset : offset + 8], "little")


def _following(graph: CapturedGraph, node: CapturedNode) -> list[CapturedNode]:
    """The next kernels of the same branch, up to the first that something else waits for or that waits for more."""
    found: list[CapturedNode] = []
    while len(found) < _NEAR:
        after = graph.after(node)
        if len(after) != 1 or after[0].kind != "kernel" or len(graph.before(after[0])) != 1:
            break
        node = after[0]
        found.append(node)
        if _CONVERSION.search(node.name):
            break
    return found
