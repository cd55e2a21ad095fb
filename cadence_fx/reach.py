"""Which inputs may be given other values: those whose values only ever become other values.

A certificate tries a class on data the user never sent. An index that is computed from a float, a branch on the host
or a probability would turn odd data into an error (on a GPU into one that ends the process), so the computation is
watched once on the call's own data: an input is left alone when its values reach an integer that is used, the host, an
assertion, the parameter of a random draw, or an operator that is not PyTorch's own. Memory that is handed to others
than operators (`numpy()`, `data_ptr()`) is followed no further: what is ever in it decides.

The same run shows whether the computation looks past the elements of an input, at memory that a copy does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cadence_fx._torch import TorchDispatchMode, TorchFunctionMode, WithoutFunctionModes
from cadence_fx.layout import span
from cadence_fx.signature import is_plain

# Operators that give a tensor elements of its storage that it does not have.
_RESTRIDES = {"as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "set_"}
# What hands out a tensor's memory or its values without an operator.
_EXPORTS = {"numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage", "_typed_storage"}


class Reach(TorchDispatchMode):
    """Follows the values of some tensors, known by their memory, through everything that runs while the mode is on.

    Memory is followed, so views, writes in place and writes into parts are too. A set of inputs is an int of one bit
    each.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._follows: dict[int, tuple[StorageWeakRef, int]] = {}
        self._exported: set[int] = set()
        self._decisive = 0
        self._roots = {_home(tensor): (i, tensor) for i, tensor in enumerate(inputs) if tensor.numel()}
        self._strays = 0
        for i, tensor in enumerate(inputs):
            self._add(tensor, 1 << i)
        self._exports = _Exports(self)

    def __enter__(self) -> Reach:
        super().__enter__()
        self._exports.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._exports.__exit__(*error)
        super().__exit__(*error)

    def export(self, tensor: torch.Tensor) -> None:
        """A tensor's memory is read, now or later, by others than operators."""
        self._exported.add(_home(tensor))
        self._decisive |= self._of(tensor)

    def decides(self, index: int) -> bool:
        """Whether the values of this input have decided more than values."""
        return bool(self._decisive >> index & 1)

    def strays(self, index: int) -> bool:
        """Whether the memory around the elements of this input may have been looked at."""
        return bool(self._strays >> index & 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with WithoutFunctionModes():  # what this mode itself asks of tensors is no export
            return self._watch(func, args, kwargs or {})

    def _watch(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.overloadpacket.__name__ in _RESTRIDES:
            for i in _strayed(self._roots, func, args, kwargs):
                self._strays |= 1 << i
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
        if not _has_memory(tensor) or _home(tensor) in self._exported:
            self._decisive |= inputs
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


def _strayed(roots: Any, func: Any, args: Any, kwargs: Any) -> Iterator[int]:
    """The inputs of which an operator may see more than their elements: anything but elements of a dense one."""
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    source = given.get("source", None if func.overloadpacket.__name__ == "set_" else given["self"])
    if source is None:
        return
    home = source.data_ptr() if isinstance(source, torch.UntypedStorage) else _home(source)
    if home not in roots:
        return
    index, root = roots[home]
    if (
        "source" not in given
        and given.get("storage_offset") is None
        and span(root.shape, root.stride()) == root.numel()
    ):
        start = given["self"].storage_offset() - root.storage_offset()
        if start + span(given["size"], given["stride"]) <= root.numel():
            return
    yield index


class _Exports(TorchFunctionMode):
    """Tells a `Reach` of tensors whose memory is handed out."""

    def __init__(self, reach: Reach) -> None:
        super().__init__()
        self._reach = reach

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.Tensor) and _is_export(func):
            self._reach.export(args[0])
        return func(*args, **(kwargs or {}))


def _is_export(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in _EXPORTS or (name == "__get__" and func == torch.Tensor.__cuda_array_interface__.__get__)  # type: ignore[attr-defined]


def _has_memory(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) or tensor.is_quantized


def _home(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if _has_memory(tensor) else 0
