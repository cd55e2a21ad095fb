"""Call keys: everything that decides which kernels run, as one flat tuple of plain values (paper section 3.3, clause
i).

A key never reads tensor data. Two calls with equal keys run the same kernels on tensors of the same geometry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cadence_fx._torch_switches import ambient_names, ambient_state

# Vectorised kernels look at most at this alignment, in bytes; the allocator gives every fresh tensor at least as much.
ALIGNMENT = 16
SCALARS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


class Unkeyable(Exception):
    """An argument that the engine refuses to key on. The message names it."""


def tensor_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, stride, dtype, device and alignment class of a tensor whose memory is not fixed, and whether it is lazy.

    Raises:
        Unkeyable: a sparse, nested or otherwise unstrided tensor.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise Unkeyable(f"a tensor of layout {tensor.layout}")
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.data_ptr() % ALIGNMENT,
        is_lazy(tensor),
    )


def region_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, dtype and device of a state, and whether it is lazy. Its memory will be the carry's, so its strides do not
    matter."""
    return (tensor.shape, tensor.dtype, tensor.device, is_lazy(tensor))


def fixed_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The geometry of a tensor that is bound by pointer.

    Raises:
        Unkeyable: a sparse, quantized or otherwise unusual tensor.
    """
    if not is_plain(tensor):
        raise Unkeyable(f"an aliased tensor of layout {tensor.layout} and {tensor.dtype} on {tensor.device}")
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, is_lazy(tensor))


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a tensor is conjugated or negated when it is read: its memory holds other numbers than it does."""
    return tensor.is_neg() or tensor.is_conj()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but numbers in memory: strided, not quantized, not on the meta device."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta and not tensor.is_nested


def scalar_key(value: Any) -> tuple[Any, ...]:
    """A scalar argument by type and value (1, 1.0 and True differ; so do 0.0 and -0.0).

    Raises:
        Unkeyable: not a plain scalar.
    """
    if not isinstance(value, SCALARS):
        raise Unkeyable(f"an argument of type {type(value).__name__}")
    return (type(value), repr(value) if isinstance(value, (float, complex)) else value)


def call_key(
    args: Sequence[Any], regions: Sequence[int], staged: Sequence[int], scalars: Sequence[int], device_type: str
) -> tuple[Any, ...]:
    """The flat key of one call.

    Args:
        args: flat arguments.
        regions, staged, scalars: indices of state tensors, other tensors that are copied in, and scalars.
        device_type: of the device the call runs on.

    Raises:
        Unkeyable: a scalar argument is not a plain value.
    """
    return (
        ambient_state(device_type),
        *[region_key(args[i]) for i in regions],
        *[tensor_key(args[i]) for i in staged],
        *[scalar_key(args[i]) for i in scalars],
    )


def compare(known: dict[str, tuple[Any, ...]], found: dict[str, tuple[Any, ...]]) -> tuple[str, str] | None:
    """How a call differs from a known one of the same sizes: (reason, words), or None.

    Both map an argument's accessor to its `tensor_key` or `region_key`; the ambient state goes under the empty name.
    """
    for name, key in found.items():
        other = known.get(name)
        if other is None or other == key:
            continue
        if name == "":
            changed = [what for what, a, b in zip(ambient_names(key), key, other, strict=True) if a != b]
            return "mode", f"{' and '.join(changed)} not as it was when classes were captured"
        for mine, theirs, reason in zip(key, other, PARTS[len(key)], strict=True):
            if mine != theirs:
                return reason, f"{name} has {reason} {mine}, and {theirs} was captured"
    return None


# Names of the parts of a key, by how many there are: a scalar, a state, a tensor.
PARTS = {
    2: ("scalar", "scalar"),
    4: ("shape", "dtype", "device", "layout"),
    6: ("shape", "stride", "dtype", "device", "alignment", "layout"),
}


def describe(tensor: torch.Tensor) -> str:
    """`float32[1, 8, 402, 128] on cuda:0` for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"
