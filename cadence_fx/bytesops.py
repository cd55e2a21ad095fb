"""Comparison of tensors as bytes: 0.0 and -0.0 differ, equal NaN payloads are equal."""

from __future__ import annotations

import hashlib

import torch

from cadence_fx.signature import is_plain

_INTEGER_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK, _PRIME = 1 << 20, (1 << 61) - 1


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements reinterpreted as integers of the same width (complex: a trailing axis of two).

    Raises:
        TypeError: a sparse, quantized or otherwise unusual tensor; `plain_parts` has what it consists of.
    """
    if not is_plain(tensor):
        raise TypeError(
            f"a tensor of layout {tensor.layout} and {tensor.dtype} on {tensor.device} has no bytes to view"
        )
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8) if tensor.is_contiguous() else tensor.contiguous().view(torch.uint8)
    return tensor.view(_INTEGER_OF_WIDTH[tensor.element_size()])


def bytes_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Same shape, dtype and device type, and the same bytes element by element (strides may differ)."""
    if left.layout != right.layout or left.dtype != right.dtype or left.is_nested != right.is_nested:
        return False
    mine, others = plain_parts(left), plain_parts(right)
    return len(mine) == len(others) and all(map(_plain_equal, mine, others))


def _plain_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bool(torch.equal(as_integers(left), as_integers(right).to(left.device)))


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What a tensor consists of, as plain tensors; a plain one of itself alone, one without data of its shape."""
    tensor = tensor.detach()
    if is_plain(tensor):
        return [tensor]
    if tensor.is_nested:
        return [part for row in tensor.unbind() for part in plain_parts(row)]
    shape = torch.tensor(tensor.shape, dtype=torch.int64)
    if tensor.is_meta:
        return [shape]
    if tensor.is_quantized:
        return [tensor.int_repr(), *_quantizer(tensor)]
    if tensor.layout is torch.sparse_coo:
        return [shape, torch.tensor(tensor.is_coalesced()), tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [shape, tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [shape, tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.to_dense()]


def _quantizer(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [torch.tensor(tensor.q_scale(), dtype=torch.float64), torch.tensor(tensor.q_zero_point())]
    axis = torch.tensor(tensor.q_per_channel_axis())
    return [axis, tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]


def first_difference(
    left: torch.Tensor, right: torch.Tensor
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...], int] | None:
    """Where two plain tensors of one shape differ as bytes.

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
        for part in plain_parts(tensor):
            sha.update(as_integers(part).contiguous().cpu().numpy().tobytes())
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
