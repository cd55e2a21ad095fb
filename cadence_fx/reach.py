"""Which inputs may be given other values: those whose values only ever become other values.

A certificate tries a class on data the user never sent. An index that is computed from a float, a branch on the host
or a probability would turn odd data into an error (on a GPU into one that ends the process), so the computation is
watched once on the call's own data: an input is left alone when its values reach an integer that is used, the host, an
assertion, the parameter of a random draw, or an operator that is not PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cadence_fx._torch import TorchDispatchMode


class Reach(TorchDispatchMode):
    """Follows the values of some tensors, known by their memory, through everything that runs while the mode is on.

    Memory is followed, so views, writes in place and writes into parts are too. A set of inputs is an int of one bit
    each.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._follows: dict[int, tuple[StorageWeakRef, int]] = {}
        for i, tensor in enumerate(inputs):
            self._add(tensor, 1 << i)
        self._decisive = 0

    def decides(self, index: int) -> bool:
        """Whether the values of this input have decided more than values."""
        return bool(self._decisive >> index & 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = list(_tensors([*args, *kwargs.values()]))
        written = list(_tensors(_written(func, args, kwargs)))
        result = func(*args, **kwargs)
        made = list(_tensors(result if isinstance(result, (list, tuple)) else [result]))
        reached = 0
        for tensor in read:
            found = self._of(tensor)
            reached |= found
            if not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
                self._decisive |= found
        followed = [tensor for tensor in read if self._of(tensor)]
        if followed and _is_decisive(func, read, followed, written, made):
            self._decisive |= reached
        known = {_home(tensor) for tensor in read}
        for tensor in [*written, *(t for t in made if _home(t) not in known)]:
            self._add(tensor, reached)
        return result

    def _of(self, tensor: torch.Tensor) -> int:
        """The inputs whose values have gone into a tensor's memory, since it was allocated."""
        owner, inputs = self._follows.get(_home(tensor), (None, 0))
        return inputs if owner is not None and not owner.expired() else 0

    def _add(self, tensor: torch.Tensor, inputs: int) -> None:
        found = self._of(tensor)
        if _home(tensor) and found | inputs != found:  # empty tensors have no home
            self._follows[_home(tensor)] = StorageWeakRef(tensor.untyped_storage()), found | inputs


def _is_decisive(func: Any, read: list[Any], followed: list[Any], written: list[Any], made: list[Any]) -> bool:
    """Whether an operator does more with the values it follows than computing others from them."""
    if func.namespace not in ("aten", "prims") or torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape in func.tags and (len(read) == 1 or any(t is not read[0] for t in followed)):
        return True  # the first of several is what is selected from, the others select
    if not made and not written:
        return True  # it can only check them
    if any(out.device.type != source.device.type for out in made for source in read):
        return True
    if torch.Tag.nondeterministic_seeded in func.tags:
        # Samplers take a generator, and what they neither write nor only measure is the parameter of a distribution.
        sampler = any(argument.name == "generator" for argument in func._schema.arguments)
        return sampler and len(read) > len(written) and not func._schema.name.endswith("_like")
    return False


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[i] if i < len(args) else kwargs.get(argument.name)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _home(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
