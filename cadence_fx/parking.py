"""Workspaces without memory while nobody needs it.

What a workspace holds means nothing between calls, so its memory can be given back between them: a parked tensor keeps
its shape and strides over a storage of no bytes. The engine gives it memory for eager calls and captures; a class whose
kernels use it keeps it awake, since they know its address, and so does an eager call that autograd has recorded, since
a backward may read it. Code outside the compiled callable that uses a parked tensor must do so inside `awake`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.autograd.graph import increment_version

__all__ = ["Awake", "awake", "is_parked", "park"]


def is_parked(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements and no memory for them."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def park(tensors: Iterable[torch.Tensor]) -> None:
    """Give the memory of workspaces back. Those whose storage cannot be resized are left alone.

    It counts as a write: a backward that needs what they held raises, where it would read memory that is gone.
    """
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.resizable() and storage.nbytes():
            storage.resize_(0)
        if is_parked(tensor) and not tensor.is_inference():
            increment_version(tensor)


class Awake:
    """Which of the parked tensors of an `awake` block are parked again at its end."""

    def __init__(self, woken: Sequence[torch.Tensor]) -> None:
        self.woken = list(woken)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave the memory of these, and of whatever shares it, where it is."""
        if not self.woken:
            return
        kept = {tensor.untyped_storage()._cdata for tensor in tensors}
        self.woken = [tensor for tensor in self.woken if tensor.untyped_storage()._cdata not in kept]


@contextlib.contextmanager
def awake(tensors: Sequence[torch.Tensor]) -> Iterator[Awake]:
    """Memory, full of zeros, for those of the tensors that are parked; they are parked again afterwards."""
    block = Awake([tensor for tensor in tensors if is_parked(tensor)])
    needed: dict[int, int] = {}
    for tensor in block.woken:
        home = tensor.untyped_storage()._cdata
        needed[home] = max(needed.get(home, 0), _extent(tensor))
    for tensor in block.woken:
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            storage.resize_(needed[storage._cdata])
            # A plain tensor over it: the workspace itself may not be written in every mode.
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            raw.set_(storage, 0, (storage.nbytes(),), (1,)).zero_()  # type: ignore[call-overload]
    try:
        yield block
    finally:
        park(block.woken)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the start of the storage to the last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((tensor.storage_offset() + last + 1) * tensor.element_size())
