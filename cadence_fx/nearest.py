"""Which known call is most like a given one, and in what fields the two differ.

A call is described as `GraphPlanner.signature` does: the key of each argument under what the user calls it, the ambient
state under the empty name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cadence_fx._torch_switches import ambient_names
from cadence_fx.signature import PARTS

Signature = Mapping[str, tuple[Any, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """One field in which a call differs from a class.

    Attributes:
        argument: what the user calls it; empty for a switch of PyTorch's.
        field: `axis 1`, `dtype`, `alignment`, `value`, or the name of the switch.
        expected, found: what the class was captured with, and what the call has.
    """

    argument: str
    field: str
    expected: Any
    found: Any

    def __str__(self) -> str:
        what = f"{self.argument}, {self.field}" if self.argument else self.field
        return f"{what}: {self.expected} was captured, {self.found} found"


def differences(known: Signature, found: Signature) -> list[Difference]:
    """Every field in which a call differs from a known one; an argument that only one of them has is none."""
    return [each for name in found if name in known for each in _of(name, known[name], found[name])]


def _of(name: str, known: tuple[Any, ...], found: tuple[Any, ...]) -> Iterator[Difference]:
    if known == found:
        return
    if not name:
        for what, right, mine in zip(ambient_names(found), known, found, strict=True):
            if right != mine:
                yield Difference("", what, right, mine)
        return
    for part, right, mine in zip(PARTS[len(found)], known, found, strict=False):
        if right == mine:
            continue
        if part == "shape" and len(right) == len(mine):
            for axis, (a, b) in enumerate(zip(right, mine, strict=True)):
                if a != b:
                    yield Difference(name, f"axis {axis}", a, b)
        elif part == "scalar":
            yield Difference(name, "value", known[1], found[1])
            return
        elif part != "stride" or known[0] == found[0]:  # of another shape the strides are others in any case
            yield Difference(name, part, _plain(right), _plain(mine))


def _plain(value: Any) -> Any:
    """Tuples and sizes as lists, what is no JSON as text."""
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)


def nearest(known: Iterable[tuple[Any, Signature]], found: Signature) -> tuple[Any, list[Difference]] | None:
    """Of labelled signatures the one with the fewest differences, the smallest in sizes among those; None without any.

    An earlier one comes before a later one that is as near.
    """
    compared = ((label, differences(signature, found)) for label, signature in known)
    return min(compared, key=lambda pair: (len(pair[1]), sum(map(_distance, pair[1]))), default=None)


def _distance(difference: Difference) -> int:
    a, b = difference.expected, difference.found
    return abs(a - b) if difference.field.startswith("axis") else 0
