"""Other data for an input: random values of the same range, and extreme ones planted among its own.

Everything is written in place, drawn from generators of its own with fixed seeds, and the same each time.
"""

from __future__ import annotations

import math

import torch

from cadence_fx.bytesops import as_integers

# Bits of the exponent and of the mantissa of each kind of float that is varied; others keep their values.
_FORMATS = {torch.float16: (5, 10), torch.bfloat16: (8, 7), torch.float32: (8, 23), torch.float64: (11, 52)}
_SEED = 20_000


def is_varied(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be given other data: it has elements, and they are floats or complex numbers."""
    return tensor.numel() > 0 and _real(tensor).dtype in _FORMATS


def redraw(tensor: torch.Tensor, seed: int) -> None:
    """Fill a tensor with random values between its smallest and its largest finite one (around one if it is constant).

    Zeros of both signs, denormals and the smallest normal number are planted among them.
    """
    real = _real(tensor)
    low, high = (float(bound) for bound in torch.aminmax(real))
    if not (math.isfinite(low) and math.isfinite(high)):
        low, high = (float(bound) for bound in torch.aminmax(torch.nan_to_num(real, 0, 0, 0)))
    if low == high:
        low, high = low - max(abs(low), 1), high + max(abs(high), 1)
    most = torch.finfo(real.dtype).max / 4  # what lies between two bounds must be a number too
    low, high = max(low, -most), min(high, most)
    generator = torch.Generator(real.device).manual_seed(_SEED + seed)
    real.uniform_(low, high, generator=generator)
    _plant(real, small_patterns(real.dtype), seed)


def plant_extremes(tensor: torch.Tensor, seed: int) -> None:
    """Plant NaNs of both signs with several payloads, infinities and the largest numbers at random places."""
    real = _real(tensor)
    _plant(real, large_patterns(real.dtype), seed)


def small_patterns(dtype: torch.dtype) -> list[int]:
    """Bit patterns of values around zero: 0.0 and -0.0, the smallest and the largest denormal, the smallest normal."""
    _, mantissa = _FORMATS[dtype]
    one = 1 << mantissa
    return _both_signs(dtype, [0, 1, one - 1, one])


def large_patterns(dtype: torch.dtype) -> list[int]:
    """Bit patterns of NaNs (quiet with three payloads, signalling), infinity and the largest finite number."""
    exponent, mantissa = _FORMATS[dtype]
    infinity = ((1 << exponent) - 1) << mantissa
    quiet = 1 << (mantissa - 1)
    nans = [infinity | quiet, infinity | quiet | 1, infinity | quiet | 42, infinity | 1]
    return _both_signs(dtype, [*nans, infinity, infinity - 1])


def _both_signs(dtype: torch.dtype, patterns: list[int]) -> list[int]:
    """As signed integers of the width of `dtype`, each with the sign bit clear and set."""
    width = 1 + sum(_FORMATS[dtype])
    return [value for pattern in patterns for value in (pattern, pattern - (1 << (width - 1)))]


def _plant(real: torch.Tensor, patterns: list[int], seed: int) -> None:
    """Overwrite a few elements, at most an eighth of them and at least one, at places that the seed chooses."""
    count = max(1, min(4 * len(patterns), real.numel() // 8))
    generator = torch.Generator().manual_seed(_SEED + seed)
    places = torch.randint(real.numel(), (count,), generator=generator).unique()
    order = torch.randperm(len(patterns), generator=generator)
    bits = torch.tensor(patterns)[order].repeat(4)[: len(places)]
    integers = as_integers(real)
    if not real.shape:
        integers = integers.view(1)
    index = tuple(axis.to(real.device) for axis in torch.unravel_index(places, integers.shape))
    integers.index_put_(index, bits.to(device=real.device, dtype=integers.dtype))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
