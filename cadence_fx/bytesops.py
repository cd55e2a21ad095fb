"""Comparison of tensors as bytes: 0.0 and -0.0 differ, equal NaN payloads are equal."""

from __future__ import annotations

import hashlib

import torch

_INTEGER_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK, _PRIME = 1 << 20, (1 << 61) - 1


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements reinterpreted as integers of the same width (complex: a trailing axis of two)."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8) if tensor.is_contiguous() else tensor.contiguous().view(torch.uint8)
    return tensor.view(_INTEGER_OF_WIDTH[tensor.element_size()])


def bytes_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Same shape, dtype and device type, and the same bytes element by element (strides may differ)."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bool(torch.equal(as_integers(left), as_integers(right).to(left.device)))


def first_difference(
    left: torch.Tensor, right: torch.Tensor
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...], int] | None:
    """Where two tensors of one shape differ as bytes.

    Returns:
        None if they do not; otherwise (index of the first differing element, per-axis inclusive (low, high) range of
        the differing indices, number of differing elements).
    """
    unequal = as_integers(left) != as_integers(right).to(left.device)
    if unequal.dim() > left.dim():
        unequal = unequal.any(-1)
    where = torch.nonzero(unequal)
    if where.shape[0] == 0:
        return None
    low, high = where.min(0).values.tolist(), where.max(0).values.tolist()
    return tuple(where[0].tolist()), tuple(zip(low, high, strict=True)), int(where.shape[0])


def digest(*tensors: torch.Tensor) -> str:
    """SHA-256 over the bytes of tensors in row-major order, as hexadecimal."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(as_integers(tensor).contiguous().cpu().numpy().tobytes())
    return sha.hexdigest()


def fingerprint(tensor: torch.Tensor) -> int:
    """64 bits over a tensor's bytes and their places, computed where the tensor is, in pieces."""
    flat = as_integers(tensor).reshape(-1)
    flat = flat.view(torch.int32) if flat.dtype is torch.int64 else flat
    weights = torch.randint(
        -(1 << 62), 1 << 62, (min(flat.numel(), _CHUNK),), generator=torch.Generator().manual_seed(1)
    )
    weights = (weights * 2 + 1).to(flat.device)
    total = 0
    for part in flat.split(_CHUNK) if flat.numel() else ():
        mixed = part.to(torch.int64) * weights[: part.numel()]
        total = (total * _PRIME + int((mixed ^ (mixed >> 32)).sum())) % (1 << 64)
    return total
