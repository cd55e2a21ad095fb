"""Which strides an elementwise kernel gives its result, for any number of operands."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["elementwise_strides", "same_strides"]

Operand = tuple[Sequence[int], Sequence[int]]  # sizes and strides


def elementwise_strides(sizes: Sequence[int], operands: Sequence[Operand]) -> tuple[int, ...]:
    """Strides of a new result of ``sizes`` computed from ``operands``, which broadcast to it.

    TensorIterator's rule: dimensions lie in memory as in the operands, the first that tells two of them apart deciding.
    Dimensions of size one may get any stride; ``same_strides`` does not look at them.
    """
    rank = len(sizes)
    given = [_broadcast(sizes, *operand) for operand in operands]
    order = list(reversed(range(rank)))  # fastest first
    for last in range(1, rank):
        at = last
        for before in reversed(range(last)):
            turn = _compare(order[before], order[at], sizes, given)
            if turn > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif turn < 0:
                break
    strides = [0] * rank
    step = 1
    for dim in order:
        strides[dim] = step
        step *= max(sizes[dim], 1)
    return tuple(strides)


def same_strides(sizes: Sequence[int], left: Sequence[int], right: Sequence[int]) -> bool:
    """Whether two tensors of ``sizes`` lay out their elements in the same way."""
    return all(size == 1 or a == b for size, a, b in zip(sizes, left, right, strict=True))


def _broadcast(sizes: Sequence[int], own: Sequence[int], strides: Sequence[int]) -> list[int]:
    missing = len(sizes) - len(own)
    kept = [0 if size != full else stride for size, full, stride in zip(own, sizes[missing:], strides, strict=True)]
    return [0] * missing + kept


def _compare(one: int, other: int, sizes: Sequence[int], given: Sequence[Sequence[int]]) -> int:
    """1 if dimension ``one`` has to be slower than ``other``, -1 if it has to be faster, 0 if nothing tells."""
    for strides in given:
        a, b = strides[one], strides[other]
        if a == 0 or b == 0:
            continue
        if a != b:
            return 1 if a > b else -1
        if sizes[one] > sizes[other]:
            return 1
    return 0
