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
        hidden: an operator may have written more than its schema tells.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()
        self.hidden = False
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.hidden |= torch.Tag.maybe_aliasing_or_mutating in func.tags
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

    def elsewhere(self, known: set[int]) -> bool:
        """Whether memory was written that is neither known nor made by the callable itself."""
        return bool(self._saved.keys() - known)

    def put_back(self) -> None:
        """Everything written is as it was."""
        for memory, before in self._saved.values():
            memory.copy_(before)
