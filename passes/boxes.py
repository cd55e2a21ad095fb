"""Which bytes of its memory a view covers, and whether two views can meet.

Before and after do not matter here; this is arithmetic on the geometry of traced values. A box is a list of digits: an
address is written in the mixed radix of the strides, and a strided view covers a range of each digit. Two boxes in the
same radix are apart as soon as one digit's ranges are: ``x[:, :4]`` and ``x[:, 4:]`` lie within one another as
intervals, and share no byte. Whatever does not fit this picture is taken to overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Box", "box_of", "covers", "disjoint"]

_Ranges = tuple[tuple[int, int], ...]  # (first, last) of each digit


@dataclass(frozen=True, slots=True)
class Box:
    """The bytes of a strided view, counted from where its memory begins."""

    first: int
    last: int
    steps: tuple[tuple[int, int], ...]  # (stride in bytes, size), sizes above one, largest stride first


def box_of(tensor: torch.Tensor, base: int = 0) -> Box | None:
    """The box of a traced tensor, from byte ``base`` of its storage; None where no box can be told."""
    if tensor.layout != torch.strided:
        return None
    sizes: list[Any] = [*tensor.shape]
    strides: list[Any] = [*tensor.stride()]
    offset: Any = tensor.storage_offset()
    if not all(isinstance(number, int) for number in (*sizes, *strides, offset)):
        return None
    width = tensor.element_size()
    first = offset * width - base
    if 0 in sizes:
        return Box(first, first - 1, ())
    steps = [(stride * width, size) for stride, size in zip(strides, sizes, strict=True) if size > 1 and stride]
    if width > 1:
        steps.append((1, width))
    last = first + sum(stride * (size - 1) for stride, size in steps)
    return Box(first, last, tuple(sorted(steps, reverse=True)))


def disjoint(left: Box, right: Box) -> bool:
    """Whether the two provably share no byte."""
    if left.last < right.first or right.last < left.first:
        return True
    both = _digits(left, right)
    return both is not None and any(a[1] < b[0] or b[1] < a[0] for a, b in zip(*both, strict=True))


def covers(outer: Box, inner: Box) -> bool:
    """Whether every byte of ``inner`` provably is one of ``outer``."""
    if inner.last < inner.first or outer == inner:
        return True
    if inner.first < outer.first or outer.last < inner.last:
        return False
    both = _digits(outer, inner)
    return both is not None and all(a[0] <= b[0] and b[1] <= a[1] for a, b in zip(*both, strict=True))


def _digits(left: Box, right: Box) -> tuple[_Ranges, _Ranges] | None:
    """The ranges of both boxes in the radix of all their strides; None where an address could be written twice."""
    radix = sorted({stride for box in (left, right) for stride, _ in box.steps}, reverse=True)
    if any(larger % smaller for larger, smaller in zip(radix, radix[1:], strict=False)):
        return None
    origin = min(0, left.first, right.first)
    ranges = _ranges(left, origin, radix), _ranges(right, origin, radix)
    return None if ranges[0] is None or ranges[1] is None else ranges  # type: ignore[return-value]


def _ranges(box: Box, origin: int, radix: list[int]) -> _Ranges | None:
    sizes = dict(box.steps)
    if len(sizes) != len(box.steps):
        return None  # two dimensions of one stride
    rest = box.first - origin
    found = []
    above = None
    for stride in radix:
        digit, rest = divmod(rest, stride)
        last = digit + sizes.get(stride, 1) - 1
        if above is not None and last >= above // stride:
            return None  # runs over into the next digit
        found.append((digit, last))
        above = stride
    return tuple(found)
