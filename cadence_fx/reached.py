"""What a class of a plain callable has found in Python objects: looked at again before each of its launches.

A recording has the values of Python objects and the addresses of tensors that the callable reached by itself frozen in
it. When one of them is another, the class no longer is what the callable would do.
"""

from __future__ import annotations

from typing import Any

import torch

from cadence_fx.python_state import PythonState


def _mark(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor is, and how its bytes are read."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset()


class Reached:
    """The Python state that a class was captured with, and where its tensors were. Keeps those tensors alive.

    Args:
        frozen: the user vouches for it all, and nothing is looked at.
    """

    def __init__(self, state: PythonState, frozen: bool) -> None:
        self._state = state
        self._frozen = frozen
        self._tensors = [t for t in state.tensors if t.layout is torch.strided and t.device.type != "meta"]
        self._marks = list(map(_mark, self._tensors))

    def changed(self) -> str | None:
        """What is no longer as it was, in words: an attribute that was rebound, a tensor whose memory is another."""
        if self._frozen:
            return None
        if not self._state.is_same():
            return f"{self._state.changes()[0]} is another than in the capture"
        for tensor, mark in zip(self._tensors, self._marks, strict=True):
            if _mark(tensor) != mark:
                return f"the memory of {self._name(tensor)} is another than in the capture"
        return None

    def needs_grad(self) -> bool:
        """Whether any of the tensors requires grad now."""
        return any(tensor.requires_grad for tensor in self._tensors)

    def _name(self, tensor: torch.Tensor) -> str:
        for module in self._state.modules:
            for name, value in (*module._parameters.items(), *module._buffers.items()):
                if value is tensor:
                    return f"{type(module).__name__}.{name}"
        return f"a tensor {list(tensor.shape)}"
