"""Layouts of states: the strides eager would give a state, kept beside a carry that is always contiguous.

Released code returns states as slices and transposes, and a kernel that reads such a state directly may sum in
another order than over contiguous memory. So a carry remembers the layout its contents have in eager, and whoever
computes on them in another way than by moving them gets a copy in that layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cadence_fx.signature import ALIGNMENT

# Strides in elements, and the address modulo ALIGNMENT; None for a contiguous, aligned tensor.
Layout = tuple[tuple[int, ...], int] | None


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout of a tensor; None when a contiguous copy has the same."""
    if tensor.numel() == 0:
        return None
    offset = tensor.data_ptr() % ALIGNMENT
    return None if tensor.is_contiguous() and offset == 0 else (tuple(tensor.stride()), offset)


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements of a tensor are one in memory, so that no write can fill a buffer of its strides."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def same_geometry_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A private copy with the same strides, where `clone` would close holes and make expanded elements several."""
    if tensor.numel() and is_expanded(tensor):
        return in_layout(tensor, (tuple(tensor.stride()), 0))
    buffer = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return buffer.copy_(tensor)


def is_channels_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether strides are those of a channels-last image or volume, a format that operators pass on."""
    if len(shape) not in (4, 5):
        return False
    order = sorted(range(len(shape)), key=lambda axis: strides[axis])
    return order[0] == 1


def span(shape: Any, strides: tuple[int, ...]) -> int:
    """Elements between the first and the last one of a strided tensor, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def in_layout(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A private copy of a tensor in a layout; the tensor itself when the layout is None."""
    if layout is None:
        return tensor
    strides, offset = layout
    pad = offset // tensor.element_size()
    memory = torch.empty(pad + span(tensor.shape, strides), dtype=tensor.dtype, device=tensor.device)
    full = memory.as_strided(tensor.shape, strides, pad)
    target, source = full, tensor
    for axis, stride in enumerate(strides):
        if stride == 0:  # expanded: all elements along this axis are one
            target, source = target.narrow(axis, 0, 1), source.narrow(axis, 0, 1)
    target.copy_(source)
    return full
