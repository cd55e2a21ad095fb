"""What a callable of which nothing is known does to the world: seen by watching it run once.

Bytes that happen to stay the same do not show a write, so every operator is asked for its schema. Memory that is not
among the arguments is saved before it is written for the first time, and generators before they are first given to an
operator; both can be put back. What cannot be put back, a message to another process, is stopped before it is sent.

Only operators are seen. A `print`, a file, a clock or a lock leaves no trace here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cadence_fx._torch import TorchDispatchMode, same_generator
from cadence_fx.generators import Generators
from cadence_fx.passes.effects import is_collective, only_gathers, reads_value


class Stopped(BaseException):
    """The run was ended before an operator whose effect could not be undone; the message names the operator.

    No `Exception`, so that code which catches those does not go on after it.
    """


# What gives the host a tensor's bytes and is no operator. Only tensors on the host can be given away like this.
HANDS_OVER = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__}


class FunctionWatcher(TorchFunctionMode):
    """Watches for functions that hand a tensor's bytes to the host without an operator.

    Attributes:
        reads: the first of them; None when there was none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.reads is None and func in HANDS_OVER:
            self.reads = func.__name__
        return func(*args, **(kwargs or {}))


class WriteWatcher(TorchDispatchMode):
    """Watches the operators that run while the mode is on.

    Attributes:
        written: addresses of all written storages.
        generators: each generator that an operator was given, with its state before the first one.
        reads: the first operator that made the host wait for a value; None when there was none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()
        self.generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self.reads: str | None = None
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_collective(func):
            raise Stopped(str(func))
        if self.reads is None and reads_value(func) and not only_gathers(func, args):
            self.reads = str(func)
        for i, argument in enumerate(func._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            if isinstance(value, torch.Generator) and not any(same_generator(value, g) for g, _ in self.generators):
                self.generators.append((value, value.get_state()))
            if argument.alias_info is not None and argument.alias_info.is_write:
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

    def put_back(self, known: Generators) -> None:
        """Everything written is as it was, and every generator seen that nobody else looks after.

        Args:
            known: generators that are put back elsewhere.
        """
        for memory, before in self._saved.values():
            memory.copy_(before)
        for generator, state in self.generators:
            if not known.knows(generator):
                generator.set_state(state)
