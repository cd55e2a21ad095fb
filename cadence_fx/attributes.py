"""Which attributes of a module a later call reads: other content in them makes a difference elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cadence_fx.bytesops import bytes_equal
from cadence_fx.calls import Arguments, Live, Place, Ran, copied, drawn
from cadence_fx.errors import ExampleFailed

_LOOKS = 3  # calls in which other content is tried


def read_later(live: Live, places: Sequence[Place], first: Arguments, follow_up: Arguments) -> set[Place]:
    """The attributes whose content makes a difference elsewhere, in any of several calls."""
    draw = torch.Generator().manual_seed(1)
    stream, read = live.twin(), set[Place]()
    for number in range(_LOOKS):
        arguments = first if number == 0 else follow_up
        here = stream.twin()
        try:
            expected = _seeded(here, arguments)
        except ExampleFailed:
            return set(places)
        for place in places:
            if place in read:
                continue
            other = stream.twin()
            held = other.get(place)
            with torch.no_grad():
                held.copy_(_another(held, draw))
            try:
                actual = _seeded(other, arguments)
            except ExampleFailed:  # an index that is out of range now
                read.add(place)
                continue
            others = [{p: t for p, t in made.after.items() if p != place} for made in (expected, actual)]
            if not _same(expected.results, actual.results) or not _same(*others):
                read.add(place)
        stream = here
    return read


def _seeded(live: Live, arguments: Arguments) -> Ran:
    torch.manual_seed(0)
    return live.watch(copied(arguments))


def _another(held: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Other content for a tensor: random numbers, or for what is no float the one of 0 and 1 that it is not."""
    if held.dtype.is_floating_point or held.dtype.is_complex:
        return drawn(held, draw)
    return torch.zeros_like(held) if bool(held.any()) else torch.ones_like(held)


def _same(left: Mapping[Any, torch.Tensor], right: Mapping[Any, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(bytes_equal(left[key], right[key]) for key in left)
