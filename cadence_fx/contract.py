"""The contract: which tensors are state, which clock each follows, and what is kept of it (paper section 3.1).

Everything a stream can reach follows from these numbers; ``width`` and ``catalog`` say what that is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from itertools import product
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cadence_fx._region import Input, Lifetime, Mutability, Region
from cadence_fx._table import contract_table
from cadence_fx._width import Width, contract_width
from cadence_fx.clock import Clock, check_count, scale
from cadence_fx.errors import ContractError, UnusedClock, unknown_name
from cadence_fx.paths import parse, spell

if TYPE_CHECKING:
    from cadence_fx.catalog import Catalog

__all__ = ["Contract", "Input", "Lifetime", "Mutability", "Region", "Width"]

Part = TypeVar("Part")


def _parts(value: object, kind: type[Part], field: str) -> tuple[Part, ...]:
    """``value`` as a tuple of ``kind``."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ContractError(f"expected {kind.__name__} objects in a list or tuple, found {value!r}", field=field)
    parts = tuple(value)
    for part in parts:
        if not isinstance(part, kind):
            raise ContractError(f"expected {kind.__name__} objects, found {part!r}", field=field)
    return parts


def _refuse_repeats(what: str, field: str, names: Iterable[object]) -> None:
    seen: set[object] = set()
    for name in names:
        if name in seen:
            raise ContractError(f"two {field} have the same {what}, {name!r}", field=field)
        seen.add(name)


@dataclass(frozen=True, slots=True, repr=False)
class Contract:
    """Clocks, the regions and inputs that follow them, and how many classes may be captured.

    Any iterables are accepted and stored as tuples. Raises ContractError (UnusedClock for a clock that nothing
    follows) with ``field`` and, where one is at fault, ``region``.
    """

    clocks: Sequence[Clock]
    regions: Sequence[Region] = ()
    _: KW_ONLY
    inputs: Sequence[Input] = ()
    name: str | None = None
    max_classes: int = 64

    def __post_init__(self) -> None:
        object.__setattr__(self, "clocks", _parts(self.clocks, Clock, "clocks"))
        object.__setattr__(self, "regions", _parts(self.regions, Region, "regions"))
        object.__setattr__(self, "inputs", _parts(self.inputs, Input, "inputs"))
        if self.name is not None and not (isinstance(self.name, str) and self.name and self.name.isprintable()):
            raise ContractError(f"expected printable text, found {self.name!r}", field="name")
        check_count(self.max_classes, "max_classes", least=1)
        if not self.clocks:
            raise ContractError("a contract needs at least one clock", field="clocks")
        _refuse_repeats("name", "clocks", (clock.name for clock in self.clocks))
        _refuse_repeats("name", "regions", (region.name for region in self.regions))
        self._check_clocks()
        self._check_regions()
        self._check_inputs()
        self._check_use()

    def _check_clocks(self) -> None:
        for clock in self.clocks:
            if clock.of is None:
                continue
            base = self.clock(clock.of, f"clocks.{clock.name}.of")
            if not base.is_base:
                kind = "periodic" if base.is_periodic else "derived"
                raise ContractError(
                    f"clock {clock.name!r} must follow a base clock, and {base.name!r} is {kind}",
                    field=f"clocks.{clock.name}.of",
                )
            self.advances_of(clock.name)

    def _check_regions(self) -> None:
        _refuse_repeats("place", "regions", (region.place for region in self.regions))
        results = (spell(parse(str(region.result))) for region in self.regions if region.result is not None)
        _refuse_repeats("result", "regions", results)
        for region in self.regions:
            for name in region.clocks:
                self.clock(name, "clock", region.name)
        periodic = frozenset(clock.name for clock in self.clocks if clock.is_periodic)
        object.__setattr__(self, "regions", tuple(region.with_periodic(periodic) for region in self.regions))
        for region in self.regions:
            if region.frame_clock is not None:
                for advance in self.advances_of(region.frame_clock):
                    region.added(advance)
            else:
                self._check_unmoving(region)

    def _check_unmoving(self, region: Region) -> None:
        cells = 1
        for name in region.clocks:
            cells *= self.clock(name).period or 1
        if not region.retention.fixed or region.bound != cells:
            raise ContractError(
                f"every clock is periodic, so the extent is always {cells}; "
                f"expected Pinned({cells}) or Ring({cells}), found {region.retention!r}",
                field="retention",
                region=region.name,
            )

    def _check_inputs(self) -> None:
        taken = {(region.place, axis) for region in self.regions for axis in region.axes}
        for entry in self.inputs:
            clock = self.clock(entry.clock, "inputs.clock")
            place = (spell(parse(entry.argument)), entry.axis)
            if place in taken:
                raise ContractError(f"axis {entry.axis} of {entry.argument!r} is declared twice", field="inputs")
            taken.add(place)
            for advance in (clock.period,) if clock.period is not None else self.advances_of(clock.name):
                entry.size(advance)

    def _check_use(self) -> None:
        used = {name for region in self.regions for name in region.clocks} | {entry.clock for entry in self.inputs}
        used |= {clock.of for clock in self.clocks if clock.of is not None and clock.name in used}
        for clock in self.clocks:
            if clock.name not in used:
                raise UnusedClock(clock.name)

    def clock(self, name: str, field: str = "clocks", region: str | None = None) -> Clock:
        """The clock called ``name``; ContractError for ``field`` of ``region`` when there is none."""
        for clock in self.clocks:
            if clock.name == name:
                return clock
        raise ContractError(unknown_name("clock", name, [c.name for c in self.clocks]), field=field, region=region)

    def region(self, name: str) -> Region:
        """The region called ``name``, knowing its frame axis; ContractError when there is none."""
        for region in self.regions:
            if region.name == name:
                return region
        raise ContractError(unknown_name("region", name, [r.name for r in self.regions]), field="regions")

    def base_of(self, name: str) -> Clock:
        """The base clock behind the base or derived clock ``name``."""
        clock = self.clock(name)
        return clock if clock.of is None else self.clock(clock.of)

    def rate_of(self, name: str) -> Fraction:
        """Ticks of the clock ``name`` for each tick of its base clock."""
        return Fraction(self.clock(name).rate)

    def advances_of(self, name: str) -> tuple[int, ...]:
        """Every advance of one call in ticks of ``name``: the stride, then the flush lengths; () if periodic."""
        rate = self.rate_of(name)
        advances = []
        for base in self.base_of(name).advances:
            ticks = scale(base, rate)
            if ticks is None:
                problem = f"{base} ticks of {self.base_of(name).name!r} at rate {rate} are not a whole number"
                raise ContractError(problem, field=f"clocks.{name}.rate")
            advances.append(ticks)
        return tuple(advances)

    def stride_of(self, name: str) -> int:
        """Ticks of ``name`` in a normal call: the stride, scaled for a derived clock, or the period."""
        clock = self.clock(name)
        return clock.period if clock.period is not None else self.advances_of(name)[0]

    def frame_stride(self, region: Region) -> int:
        """Ticks of the region's frame clock in a normal call, 0 without one."""
        return 0 if region.frame_clock is None else self.stride_of(region.frame_clock)

    def iter_advances(self) -> Iterator[dict[str, int]]:
        """Each combination of advances one call can make, lazily: clock name to ticks, the normal call first."""
        bases = [clock for clock in self.clocks if clock.is_base]
        for combination in product(*(clock.advances for clock in bases)):
            ticks = {clock.name: advance for clock, advance in zip(bases, combination, strict=True)}
            for clock in self.clocks:
                if clock.of is not None:
                    ticks[clock.name] = int(ticks[clock.of] * clock.rate)
            yield {clock.name: ticks[clock.name] for clock in self.clocks if clock.name in ticks}

    @property
    def advances(self) -> tuple[dict[str, int], ...]:
        """All of ``iter_advances``: the normal call, then every combination in which a clock flushes."""
        return tuple(self.iter_advances())

    def envelope(self, region: str | Region) -> int:
        """The most frames in flight in one call: the bound, plus the largest advance or stride with look-ahead.

        It sizes workspaces, not carries (paper section 3.1, two extents). A region that is written in place, or not
        written, never passes its bound.
        """
        found = self.region(region if isinstance(region, str) else region.name)
        name = found.frame_clock
        if name is None or found.retention.in_place or found.mutability == "read_only":
            return found.bound
        clock = self.clock(name)
        lookahead = clock.lookahead or ceil(self.base_of(name).lookahead * clock.rate)
        presented = max(*self.advances_of(name), self.stride_of(name) + lookahead)
        return found.bound + ceil(presented * found.growth)

    def width(self) -> Width:
        """How many classes the contract reaches, with the arithmetic; nothing is enumerated."""
        return contract_width(self)

    def catalog(self) -> Catalog:
        """Every class, in stream order; CatalogTooWide when there are more than ``max_classes``."""
        from cadence_fx.catalog import enumerate_catalog  # the catalog is built from contracts, not the reverse

        return enumerate_catalog(self)

    @classmethod
    def load(cls, path: str | Path) -> Contract:
        """Read a ``.toml`` or ``.json`` file; ContractFileError names the file and the field."""
        from cadence_fx.serialize import load

        return load(path)

    def save(self, path: str | Path) -> None:
        """Write a ``.toml`` or ``.json`` file that ``load`` reads back as an equal contract."""
        from cadence_fx.serialize import save

        save(self, path)

    def __repr__(self) -> str:
        counts = [("clock", len(self.clocks)), ("region", len(self.regions)), ("input", len(self.inputs))]
        parts = [repr(self.name)] if self.name else []
        parts += [f"{count} {word}" + "s" * (count != 1) for word, count in counts if count]
        return f"Contract({', '.join(parts)})"

    def __str__(self) -> str:
        return contract_table(self)
