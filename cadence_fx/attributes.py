"""Which attributes of a module a later call reads: other content in them makes a difference elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
            if any(_differs(stream, place, arguments, expected, content) for content in _contents(stream, place, draw)):
                read.add(place)
        stream = here
    return read


def _seeded(live: Live, arguments: Arguments) -> Ran:
    torch.manual_seed(0)
    return live.watch(copied(arguments))


def _differs(stream: Live, place: Place, arguments: Arguments, expected: Ran, content: torch.Tensor) -> bool:
    """Whether a call that finds other content at a place makes anything else another one."""
    other = stream.twin()
    with torch.no_grad():
        other.get(place).copy_(content)
    try:
        actual = _seeded(other, arguments)
    except ExampleFailed:  # an index that is out of range now
        return True
    others = [{p: t for p, t in made.after.items() if p != place} for made in (expected, actual)]
    return not _same(expected.results, actual.results) or not _same(*others)


def _contents(live: Live, place: Place, draw: torch.Generator) -> Iterator[torch.Tensor]:
    """Other content for a tensor. Code that rounds, compares or takes the nearest of several gives the same for numbers
    that differ a little, so there are also much larger ones, and such as make all that is computed of them another."""
    held = live.get(place).detach()
    if held.dtype.is_floating_point or held.dtype.is_complex:
        yield drawn(held, draw)
        yield drawn(held, draw).mul_(1000)
        yield torch.full_like(held, math.nan)
        return
    yield torch.zeros_like(held) if bool(held.any()) else torch.ones_like(held)
    # Elsewhere than on the host, an index out of range ends the process.
    if held.device.type == "cpu" and held.dtype is not torch.bool:
        yield torch.full_like(held, 100)


def _same(left: Mapping[Any, torch.Tensor], right: Mapping[Any, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(bytes_equal(left[key], right[key]) for key in left)
