"""Contract-owned storage: the carry of a region (paper section 3.2).

What was impossible before: released code makes a new cache tensor every chunk, at a new address, so no recorded
execution can refer to it. What is allowed now: the state of a region lives in one flat buffer, sized to the largest
attended extent, for the life of the stream. At extent L the state is the contiguous tensor of that shape over the
head of the buffer; its address never changes.

The book-keeping that makes this safe: a carry knows which tensor object stands for its current contents (it handed it
out) and which stood for earlier contents. The current one is recognised; a foreign tensor is *adopted* (copied in),
after a current one that somebody still holds has been *evacuated* (given private memory with the same bytes); an
earlier one is refused as stale.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch

from cadence_fx._torch import storage_owners
from cadence_fx.errors import StaleState
from cadence_fx.ledger import Ledger

# A tensor nobody else shares: itself, and the storage object made to ask.
_SOLE_OWNER = 2


class Carry:
    """One region instance's storage.

    Args:
        name: of the region instance, for messages.
        shape: of the state; the frame axis is replaced by the extent.
        axis: the frame axis, or None when the extent never changes.
        capacity: the largest attended extent, in frames.
        like: a tensor that gives dtype and device; storage is an inference tensor exactly if inference mode is on now.
    """

    def __init__(
        self, name: str, shape: Sequence[int], axis: int | None, capacity: int, like: torch.Tensor, ledger: Ledger
    ) -> None:
        self.name = name
        self.axis = axis
        self.capacity = capacity
        self._shape = list(shape)
        self._ledger = ledger
        self.flat = torch.zeros(math.prod(self.shape(capacity)), dtype=like.dtype, device=like.device)
        self.pointer = self.flat.data_ptr()
        self.extent: int | None = None
        self._views: dict[int, torch.Tensor] = {}
        self._current: weakref.ref[torch.Tensor] | None = None
        self._earlier: list[weakref.ref[torch.Tensor]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.flat.numel() * self.flat.element_size()

    def shape(self, extent: int) -> list[int]:
        """Shape of the state at an extent."""
        shape = list(self._shape)
        if self.axis is not None:
            shape[self.axis] = extent
        return shape

    def view(self, extent: int) -> torch.Tensor:
        """The state at an extent: contiguous, over the head of the buffer."""
        view = self._views.get(extent)
        if view is None:
            shape = self.shape(extent)
            view = self._views[extent] = self.flat[: math.prod(shape)].view(shape)
        return view

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor can be the state: same dtype, device and shape up to an extent within the capacity."""
        return tensor.device == self.flat.device and self.takes(tensor)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's contents can be the state, wherever the tensor is."""
        if tensor.dtype != self.flat.dtype or tensor.dim() != len(self._shape):
            return False
        extent = tensor.shape[self.axis] if self.axis is not None else self.capacity
        return extent <= self.capacity and list(tensor.shape) == self.shape(extent)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is this carry's buffer."""
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() == self.pointer

    # -- state in -----------------------------------------------------------------------------------------------------

    def enter(self, tensor: torch.Tensor, extent: int, *, in_place: bool = False) -> None:
        """Make the carry hold a call's incoming state.

        Free when the tensor is the one handed out last (or another view of the same current contents). Otherwise the
        tensor's bytes are copied in; with `in_place` the tensor object itself is pointed at the carry, because the
        code will write through it.

        Raises:
            StaleState: the tensor stood for contents that a later call has replaced.
        """
        if self._current is not None and self._current() is tensor and self.extent == extent:
            return
        if any(earlier() is tensor for earlier in self._earlier):
            raise StaleState(self.name)
        if self.owns(tensor):
            if extent == self.extent and tensor.data_ptr() == self.pointer and tensor.is_contiguous():
                if in_place:
                    self._current = weakref.ref(tensor)
                return
            raise StaleState(self.name)
        self.evacuate()
        view = self.view(extent)
        view.copy_(tensor)
        self._ledger.adoptions += 1
        self.extent = extent
        self._current = None
        if in_place:
            tensor.data = view
            self._current = weakref.ref(tensor)

    def release(self, tensor: torch.Tensor) -> None:
        """Give the tensor that came in private memory: it leaves the call as a result, with the bytes it has now."""
        if self.owns(tensor):
            tensor.data = tensor.clone()
        if self._current is not None and self._current() is tensor:
            self._current = None

    def may_point_here(self, tensor: torch.Tensor) -> bool:
        """Whether an in-place state can be moved into the carry unseen: nobody else shares its memory."""
        return self.owns(tensor) or storage_owners(tensor) <= _SOLE_OWNER

    def evacuate(self) -> None:
        """Give the tensor that stands for the current contents private memory, if anybody still holds it."""
        held = self._current() if self._current is not None else None
        if held is not None and self.owns(held):
            held.data = held.clone()
            self._ledger.evacuations += 1
        self._current = None
        self.extent = None

    # -- state out ----------------------------------------------------------------------------------------------------

    def hand_out(self, extent: int, *, shared: bool = False) -> torch.Tensor:
        """The tensor that stands for the contents a call has just written; the incoming one becomes stale.

        With `shared` the user holds it as something else besides the state, and gets private memory.
        """
        incoming = self._current
        self._earlier = [earlier for earlier in self._earlier if earlier() is not None]
        if incoming is not None and incoming() is not None:
            self._earlier.append(incoming)
        fresh = self.view(extent).clone() if shared else self.view(extent).detach()
        self._current = None if shared else weakref.ref(fresh)
        self.extent = extent
        return fresh

    def load(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take a state from anywhere; returns the tensor that stands for it."""
        extent = tensor.shape[self.axis] if self.axis is not None else self.capacity
        if self._current is not None and self._current() is tensor:
            return tensor
        self.evacuate()
        self.view(extent).copy_(tensor)
        self._ledger.adoptions += 1
        return self.hand_out(extent)

    def receive(self, tensor: torch.Tensor, extent: int, incoming: torch.Tensor | None) -> torch.Tensor:
        """Take a state that an eager call computed, so that the next call finds it in the carry.

        Args:
            incoming: the state that went into that call: consumed by it, so not evacuated.
        """
        if self._current is not None and self._current() is not None and self._current() is not incoming:
            self.evacuate()
        source = tensor.clone() if self.owns(tensor) else tensor
        self.view(extent).copy_(source)
        return self.hand_out(extent)
