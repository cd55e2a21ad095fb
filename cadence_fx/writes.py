"""What a callable of which nothing is known writes: seen by watching it run once.

Bytes that happen to stay the same do not show a write, so every operator is asked for its schema. Memory that is not
among the arguments is saved before it is written for the first time, and can be put back.
"""

from __future__ import annotations

from typing import Any

import torch

from cadence_fx._torch import TorchDispatchMode


class WriteWatcher(TorchDispatchMode):
    """Collects the storage addresses that operators write while the mode is on.

    Attributes:
        written: addresses of all written storages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                for tensor in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(tensor, torch.Tensor):
                        self._note(tensor)
        result = func(*args, **kwargs)
        for out in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(out, torch.Tensor) and out.numel():
                self._made.add(out.untyped_storage().data_ptr())
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        home = tensor.untyped_storage().data_ptr()
        self.written.add(home)
        if home not in self._saved and home not in self._made:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[call-overload]
            self._saved[home] = whole, whole.clone()

    def memories(self) -> list[torch.Tensor]:
        """The bytes of every storage that was written and not made while the mode was on."""
        return [memory for memory, _ in self._saved.values()]

    def put_back(self) -> None:
        """Everything written is as it was."""
        for memory, before in self._saved.values():
            memory.copy_(before)
