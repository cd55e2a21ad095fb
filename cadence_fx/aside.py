"""Copies of tensors that wait for a comparison or to be put back: where the tensor is while there is room, else on the
host.

Through the host a copy costs a hundred times as much, and a certificate takes several of everything that a class
returns. A device that has little left is not filled up by them: what is captured next needs the room.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

_SPARE = 4  # this part of a device stays free


def aside(value: Any) -> Any:
    """A private copy of a tensor with its bytes as they are now; what is no tensor, or has no bytes, itself."""
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return value
    value = value.detach()
    if value.device.type == "cuda" and value.layout is torch.strided and _has_room(value):
        with contextlib.suppress(torch.OutOfMemoryError):
            return value.clone()
    return value.to("cpu", copy=True)


def _has_room(tensor: torch.Tensor) -> bool:
    free, total = torch.cuda.mem_get_info(tensor.device)
    cached = torch.cuda.memory_reserved(tensor.device) - torch.cuda.memory_allocated(tensor.device)
    return free + cached - tensor.numel() * tensor.element_size() >= total // _SPARE
