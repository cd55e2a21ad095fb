"""The catalog: every point a declared stream reaches, known before any traffic (paper section 3.5).

A point is what one call meets: the extent of every persistent region and the advance of every clock. The walk follows
the declaration literally. From a state, a normal call advances every clock by its stride and gives the next state; a
flush call ends the turn. A turn boundary, after either, puts turn regions back to their start and leaves session
regions where they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from cadence_fx._table import aligned
from cadence_fx.contract import Contract
from cadence_fx.errors import CatalogTooWide, ContractError, unknown_name

Named = tuple[tuple[str, int], ...]

_STILL = 8  # regions that keep their extent which an entry's text names; of more, only how many they are


def _lookup(pairs: Named, name: str, kind: str) -> int:
    for known, value in pairs:
        if known == name:
            return value
    raise ContractError(unknown_name(kind, name, [known for known, _ in pairs]), field=f"{kind}s")


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One reachable call: what it advances, the extents it meets, and the extents it leaves.

    ``advance`` names every base and derived clock; ``extents`` and ``next_extents`` every persistent region, in frames.
    ``flush`` is True when a clock advances by a flush length, which ends the turn.
    """

    advance: Named
    extents: Named
    next_extents: Named
    flush: bool

    def advance_of(self, clock: str) -> int:
        """Ticks that the call advances ``clock``; ContractError for an unknown or periodic one."""
        return _lookup(self.advance, clock, "clock")

    def extent_of(self, region: str) -> int:
        """Frames of ``region`` on entry; ContractError for an unknown or scratch one."""
        return _lookup(self.extents, region, "region")

    def next_of(self, region: str) -> int:
        """Frames of ``region`` after the call; ContractError for an unknown or scratch one."""
        return _lookup(self.next_extents, region, "region")

    def __str__(self) -> str:
        met = [(name, old, new) for (name, old), (_, new) in zip(self.extents, self.next_extents, strict=True)]
        still = sum(old == new for _, old, new in met)
        if still > _STILL:
            met = [each for each in met if each[1] != each[2]]
        moves = [f"{name} {old} -> {new}" for name, old, new in met]
        moves += [f"{still} regions that stay"] if still > _STILL else []
        ticks = ", ".join(f"{name} +{advance}" for name, advance in self.advance) or "no clock"
        return f"{ticks}{' (flush)' if self.flush else ''}: {', '.join(moves) or 'no state'}"


def _key(extents: Mapping[str, int], advance: Mapping[str, int]) -> tuple[frozenset[tuple[str, int]], ...]:
    return frozenset(extents.items()), frozenset(advance.items())


@dataclass(frozen=True, slots=True)
class Catalog:
    """The entries in stream order: the first turn's normal calls, other normal calls, then flush calls."""

    entries: tuple[CatalogEntry, ...]
    _index: dict[tuple[frozenset[tuple[str, int]], ...], CatalogEntry] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index = {_key(dict(entry.extents), dict(entry.advance)): entry for entry in self.entries}
        object.__setattr__(self, "_index", index)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[CatalogEntry]:
        return iter(self.entries)

    def __contains__(self, entry: object) -> bool:
        return entry in self.entries

    def find(self, extents: Mapping[str, int], advance: Mapping[str, int]) -> CatalogEntry | None:
        """The entry of a call that meets ``extents`` and advances ``advance`` (all of each), None off the catalog."""
        return self._index.get(_key(extents, advance))

    def table(self) -> str:
        """One line a class: number, advances, extents on entry and after."""
        rows = [("#", "advance", "extents", "kind")]
        for number, entry in enumerate(self.entries):
            ticks, moves = str(entry).split(": ", 1)
            rows.append((str(number), ticks.removesuffix(" (flush)"), moves, "flush" if entry.flush else "normal"))
        return "\n".join(aligned(rows, indent=""))

    def __str__(self) -> str:
        return self.table()


def enumerate_catalog(contract: Contract) -> Catalog:
    """Every point that the declared stream of ``contract`` visits.

    Raises CatalogTooWide when there are more than ``contract.max_classes``; from the arithmetic alone when it is
    exact, and otherwise by walking until one class too many.
    """
    width = contract.width()
    limit = contract.max_classes
    if width.exact and width.classes > limit:
        raise CatalogTooWide(width.classes, limit, width.arithmetic)
    found = list(islice(_walk(contract), limit + 1))
    if len(found) > limit:
        raise CatalogTooWide(width.classes, limit, width.arithmetic, exact=False)
    return Catalog(tuple(sorted(found, key=lambda entry: entry.flush)))


def _walk(contract: Contract) -> Iterator[CatalogEntry]:
    """Each class once. A turn is followed to its end before the states that its boundaries lead to."""
    regions = [region for region in contract.regions if region.persistent]
    names = [region.name for region in regions]
    start = tuple(region.start for region in regions)
    seen = {start}
    waiting = deque([start])
    while waiting:
        extents = waiting.popleft()
        for number, advance in enumerate(contract.iter_advances()):
            after = tuple(
                region.next_extent(extent, advance[region.frame_clock] if region.frame_clock is not None else 0)
                for region, extent in zip(regions, extents, strict=True)
            )
            flush = number > 0
            yield CatalogEntry(
                tuple(advance.items()),
                tuple(zip(names, extents, strict=True)),
                tuple(zip(names, after, strict=True)),
                flush,
            )
            turned = tuple(
                region.start if region.lifetime == "turn" else extent
                for region, extent in zip(regions, after, strict=True)
            )
            if not flush and after not in seen:
                seen.add(after)
                waiting.appendleft(after)
            if turned not in seen:
                seen.add(turned)
                waiting.append(turned)
