"""What an output is besides its bytes: where it is, how it lies there, and whose memory that is.

A result with other strides than eager's has the same elements, and a `view` of it may raise, or a kernel sum it in
another order. One that shares memory where eager's does not changes when the other is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import torch

from cadence_fx.signature import SCALARS, is_lazy, is_plain, scalar_key


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """What a plain tensor is besides its bytes.

    Attributes:
        lazy: whether it is conjugated or negated when it is read.
        memory: whose it is.
        offset: of its first element in memory that it shares with other outputs, where results are cut out of it.
    """

    device: torch.device
    strides: tuple[int, ...]
    lazy: bool
    memory: str
    offset: int

    def against(self, other: Form) -> str:
        """How it differs from another, in words: `strides (1, 4), not (4, 1)`."""
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"{field.name} {mine}, not {theirs}"
        return "nothing"


def odd_value(mine: Any, theirs: Any) -> str | None:
    """How two outputs differ of which not both are tensors, in words; None where the comparison is another's."""
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return None
    if isinstance(mine, SCALARS) and isinstance(theirs, SCALARS):
        return None if scalar_key(mine) == scalar_key(theirs) else f"{mine!r}, not {theirs!r}"
    kinds = type(mine).__name__, type(theirs).__name__
    return None if kinds[0] == kinds[1] else f"{kinds[0]}, not {kinds[1]}"


def forms(
    outputs: Sequence[Any], args: Sequence[Any], copied: Collection[int], carried: Collection[int]
) -> list[Form | None]:
    """The form of each output; None for what is no plain tensor, and for new states, whose carries have their own.

    Args:
        args: what the outputs were computed from.
        copied: indices of those whose memory no result keeps: views of it are handed out as copies.
        carried: indices of the new states among the outputs.
    """
    own = [i for i, out in enumerate(outputs) if i not in carried and isinstance(out, torch.Tensor) and is_plain(out)]
    homes: dict[int, list[int]] = {}
    for i in own:
        if outputs[i].numel():
            homes.setdefault(_home(outputs[i]), []).append(i)
    lent = {_home(arg): i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and is_plain(arg)}
    found: list[Form | None] = [None] * len(outputs)
    for i in own:
        out = outputs[i]
        sharing = homes.get(_home(out), [i]) if out.numel() else [i]
        source = lent.get(_home(out)) if out.numel() else None
        memory, offset = "its own", 0
        if source is not None:
            memory = memory if source in copied else f"argument {source}'s"
        elif len(sharing) > 1:
            memory, offset = f"that of outputs {', '.join(map(str, sharing))}", int(out.storage_offset())
        found[i] = Form(out.device, tuple(out.stride()), is_lazy(out), memory, offset)
    return found


def _home(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
