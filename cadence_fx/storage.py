"""Contract-owned storage: the carry of a region (paper section 3.2).

What was impossible before: released code makes a new cache tensor every chunk, at a new address, so no recorded
execution can refer to it. What is allowed now: the state of a region lives in one flat buffer, sized to the largest
attended extent, for the life of the stream. At extent L the state is the contiguous tensor of that shape over the head
of the buffer; its address never changes.

The book-keeping that makes this safe: each state handed out is a *generation*, with a storage object of its own over
the same memory. So any tensor tells by its storage, through whatever views, whether it is the current state, an
earlier one that a call has consumed, or foreign; and the storage's use count tells whether anybody still holds a
generation. A foreign state is *adopted* (copied in), after the current one, if it is still held, has been *evacuated*
(its tensor object is given private memory with the same bytes). Where that cannot be done, the carry is left alone
and the call runs eager.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch

from cadence_fx._torch import another_storage, storage_users, tensor_owners
from cadence_fx.errors import StaleState
from cadence_fx.layout import Layout, in_layout, layout_of
from cadence_fx.ledger import Ledger


class Generation:
    """One state that was handed out: a storage object of its own over the carry's memory, and views to hand out.

    Costs nothing on the device. Once nobody uses a generation it may stand for another state.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self.storage = another_storage(flat)
        self.identity: int = self.storage._cdata
        self._flat = flat
        self._views: dict[int, torch.Tensor] = {}

    def view(self, extent: int, like: torch.Tensor) -> torch.Tensor:
        """A new tensor of this generation at an extent, with the shape and strides of `like`."""
        view = self._views.get(extent)
        if view is None:
            view = torch.empty(0, dtype=like.dtype, device=like.device)
            view.set_(self.storage, 0, like.shape, like.stride())  # type: ignore[call-overload]
            self._views[extent] = view
        return view.detach()

    @property
    def users(self) -> int:
        """Tensors outside that use it."""
        return storage_users(self.identity) - len(self._views)


class Carry:
    """One region instance's storage.

    Args:
        name: of the region instance, for messages.
        shape: of the state; the frame axis is replaced by the extent.
        axis: the frame axis, or None when the extent never changes.
        capacity: the largest attended extent, in frames.
        like: a tensor that gives dtype and device; storage is an inference tensor exactly if inference mode is on now.

    Attributes:
        extent: of the current contents, in frames; None while there are none.
        layout: the current contents have in eager.
    """

    def __init__(
        self, name: str, shape: Sequence[int], axis: int | None, capacity: int, like: torch.Tensor, ledger: Ledger
    ) -> None:
        self.name = name
        self.axis = axis
        self.capacity = capacity
        self._shape = list(shape)
        self._ledger = ledger
        elements = max(1, math.prod(self.shape(capacity)))
        self.flat = torch.zeros(elements, dtype=like.dtype, device=like.device)
        self.pointer = self.flat.data_ptr()
        self.extent: int | None = None
        self.layout: Layout = None
        self._contents: torch.Size | None = None  # shape of the current contents
        self._views: dict[int, torch.Tensor] = {}
        self._generation: Generation | None = None
        self._handed: weakref.ref[torch.Tensor] | None = None
        self._earlier: list[Generation] = []
        self._idle: list[Generation] = []

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
        return tensor.untyped_storage().data_ptr() == self.pointer

    # -- whose contents -----------------------------------------------------------------------------------------------

    def is_current(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the whole current state, as handed out or through views of it.

        Raises:
            StaleState: it is of contents that a later call has replaced.
        """
        storage = tensor.untyped_storage()
        if self._generation is not None and storage._cdata == self._generation.identity:
            return tensor.shape == self._contents and tensor.storage_offset() == 0 and tensor.is_contiguous()
        if storage.data_ptr() == self.pointer:
            raise StaleState(self.name)
        return False

    def layout_of(self, tensor: torch.Tensor) -> Layout:
        """The layout that an incoming state has in eager."""
        return self.layout if self.is_current(tensor) else layout_of(tensor)

    def blocked(self, tensor: torch.Tensor, *, in_place: bool = False) -> tuple[str, str] | None:
        """Why an incoming state could not be let in now, as (reason, words); None when it could. Nothing is changed.

        Raises:
            StaleState: see `is_current`.
        """
        if self.is_current(tensor):
            return None
        if in_place and (tensor_owners(tensor) > 1 or layout_of(tensor) is not None):
            return "shared_state", f"{self.name} is written in place and shares its memory, or is not contiguous"
        if self._is_held():
            return "held_state", self._held()
        return None

    def make_room(self, tensor: torch.Tensor, *, in_place: bool = False) -> tuple[str, str] | None:
        """Let an incoming state into the carry: the current one moves out if it is still held.

        Returns:
            Why that cannot be done, as (reason, words), with nothing changed; None when it can.

        Raises:
            StaleState: see `is_current`.
        """
        problem = self.blocked(tensor, in_place=in_place)
        if problem is not None or self.is_current(tensor):
            return problem
        return None if self._vacate() else ("held_state", self._held())

    def _held(self) -> str:
        return f"the state of {self.name} that would be overwritten is still held through a view"

    def _is_held(self) -> bool:
        """Whether somebody holds the current contents in another way than by the tensor that stands for them."""
        users = self._generation.users if self._generation is not None else 0
        return bool(users) and (users > 1 or self._stands() is None)

    def _vacate(self) -> bool:
        """Give the tensor that stands for the current contents private memory, if anybody still holds it.

        False when somebody holds the contents in another way; also when that begins while the bytes are copied.
        """
        if self._is_held():
            return False
        held = self._stands()
        if held is not None and self._generation is not None and self._generation.users:
            held.data = held.clone()
            self._ledger.evacuations += 1
            if self._generation.users:
                return False
        self._retire()
        self.extent = self._contents = None
        return True

    def _stands(self) -> torch.Tensor | None:
        """The tensor object that was handed out for the current contents, while it is alive and still does stand."""
        tensor = self._handed() if self._handed is not None else None
        return tensor if tensor is not None and self.owns(tensor) else None

    # -- state in -----------------------------------------------------------------------------------------------------

    def enter(self, tensor: torch.Tensor, extent: int, *, in_place: bool = False) -> None:
        """Make the carry hold a call's incoming state, for which `make_room` has made room.

        Free when the tensor is the current state. Otherwise its bytes are copied in; with `in_place` the tensor object
        itself is pointed at the carry, because the code will write through it.

        Raises:
            StaleState: see `is_current`.
        """
        if self.is_current(tensor):
            if in_place:
                self._handed = weakref.ref(tensor)
            return
        layout = layout_of(tensor)
        source = tensor.clone() if self.owns(tensor) else tensor
        self.view(extent).copy_(source)
        self._ledger.adoptions += 1
        self._describe(extent, layout)
        if in_place:
            tensor.data = self._issue(extent)
            self._handed = weakref.ref(tensor)

    def release(self, tensor: torch.Tensor) -> None:
        """Give the tensor that came in private memory: it leaves the call as a result, with the bytes it has now."""
        if self.owns(tensor):
            tensor.data = tensor.clone()

    # -- state out ----------------------------------------------------------------------------------------------------

    def hand_out(self, extent: int, *, layout: Layout = None, shared: bool = False) -> torch.Tensor:
        """The tensor that stands for the contents a call has just written; the incoming one becomes stale.

        Args:
            layout: that eager gives the state.
            shared: the user holds it as something else besides the state, and gets private memory.
        """
        self._retire()
        self._describe(extent, layout)
        if shared:
            return in_layout(self.view(extent), layout) if layout is not None else self.view(extent).clone()
        fresh = self._issue(extent)
        self._handed = weakref.ref(fresh)
        return fresh

    def _describe(self, extent: int, layout: Layout) -> None:
        self.extent, self.layout, self._contents = extent, layout, self.view(extent).shape
        if layout is not None:
            self._ledger.layouts = True

    def _issue(self, extent: int) -> torch.Tensor:
        """A new generation over the current contents."""
        self._generation = self._idle.pop() if self._idle else Generation(self.flat)
        return self._generation.view(extent, self.view(extent))

    def _retire(self) -> None:
        """The current generation is consumed; it is remembered for as long as anybody holds it."""
        if self._generation is not None:
            self._earlier.append(self._generation)
            self._generation = self._handed = None
        if self._earlier:
            held = [generation for generation in self._earlier if generation.users]
            if len(held) < len(self._earlier):
                self._idle += [generation for generation in self._earlier if generation not in held]
                self._earlier = held

    def load(self, tensor: torch.Tensor, layout: Layout = None) -> torch.Tensor | None:
        """Take a state from anywhere; returns the tensor that stands for it, or None when the carry is not free.

        Raises:
            StaleState: see `is_current`.
        """
        if self.is_current(tensor):
            return tensor
        source = tensor.clone() if self.owns(tensor) else tensor
        if not self._vacate():
            return None
        extent = tensor.shape[self.axis] if self.axis is not None else self.capacity
        self.view(extent).copy_(source)
        self._ledger.adoptions += 1
        return self.hand_out(extent, layout=layout if layout is not None else layout_of(tensor))

    def receive(self, tensor: torch.Tensor, extent: int, incoming: torch.Tensor) -> torch.Tensor:
        """Take a state that an eager call computed, so that the next call finds it in the carry.

        Left where it is when the carry still holds a state that somebody else needs.

        Args:
            incoming: the state that went into that call: consumed by it.
        """
        layout = layout_of(tensor)
        source = tensor.clone() if self.owns(tensor) else tensor
        if self._stands() is incoming and self._generation is not None and self._generation.users == 1:
            self._retire()
        elif not self._vacate():
            return source
        self.view(extent).copy_(source)
        return self.hand_out(extent, layout=layout)
