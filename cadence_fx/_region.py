"""The pieces of a contract that name tensors: Region and Input. Import them from ``cadence_fx.contract``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, replace
from fractions import Fraction
from typing import Literal, get_args

from cadence_fx._units import counted
from cadence_fx.clock import check_count, check_ratio, scale
from cadence_fx.errors import ContractError
from cadence_fx.paths import parse, spell
from cadence_fx.retention import Retention

Lifetime = Literal["operator", "unit", "turn", "session", "process"]
Mutability = Literal["carry", "read_only"]

SCRATCH_LIFETIMES = ("operator", "unit")

MAX_ACCESSOR = 200  # characters; paths are parsed recursively


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != "" and value.isprintable()


def _check_accessor(value: object, name: str, region: str | None) -> None:
    if not isinstance(value, str) or not _is_text(value) or len(value) > MAX_ACCESSOR:
        problem = f"expected an accessor such as \"cache[0]['k']\", found {value!r}"
        raise ContractError(problem, field=name, region=region)
    try:
        first = parse(value)[0]
    except ContractError as error:
        raise ContractError(error.problem, field=name, region=region) from error
    if name == "argument" and not (isinstance(first, str) and first.isidentifier()):
        raise ContractError(f"must begin with the name of an argument, found {value!r}", field=name, region=region)


def _check_choice(value: object, name: str, choices: tuple[str, ...], region: str) -> None:
    if value not in choices:
        raise ContractError(f"expected one of {', '.join(choices)}, found {value!r}", field=name, region=region)


def _check_axis(value: object, region: str | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ContractError(f"expected an axis number, found {value!r}", field="axis", region=region)


@dataclass(frozen=True, slots=True)
class Region:
    """One piece of state: where it lives, its axis, clock, growth, retention and lifetime (paper section 3.1).

    * ``argument`` or ``attribute`` (exactly one): an accessor, ``"cache[0]['k']"`` or ``"layers.*.hist"``; a ``*``
      stands for every element, one instance each. ``result`` is where the new state leaves: an index among the
      results or an accessor into them; None when the state is written in place or stored back on the module.
    * ``axis`` and ``clock`` are one axis and one clock name, or tuples of equal length for a product clock, of which
      at most one clock is not periodic. The extent on a periodic clock's axis is its period.
    * ``growth`` is frames per tick of the frame clock. ``start`` is the extent at the start of the lifetime; left
      out, it is the bound where the extent never moves (Pinned, Ring, read_only), and 0 elsewhere.
    * ``lifetime``: "turn" starts again at every turn boundary, "session" and "process" never do; "operator" and
      "unit" are scratch, which holds nothing between calls and has no extent in the catalog.

    Raises ContractError naming region and field. What needs the clocks themselves is checked by Contract.
    """

    name: str
    _: KW_ONLY
    argument: str | None = None
    attribute: str | None = None
    result: int | str | None = None
    axis: int | tuple[int, ...]
    clock: str | tuple[str, ...]
    start: int = None  # type: ignore[assignment]  # left out; a number once constructed
    growth: int | Fraction = 1
    retention: Retention
    lifetime: Lifetime = "turn"
    mutability: Mutability = "carry"
    placement: str | None = None
    # Position of the frame clock among ``clocks``: None without one, -1 until a contract has told which are periodic.
    _frame: int | None = field(default=-1, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        name = self.name
        if not _is_text(name) or name != name.strip():
            raise ContractError(f"a region's name must be printable text, found {name!r}", field="name")
        self._check_place()
        self._check_axes()
        object.__setattr__(self, "growth", check_ratio(self.growth, "growth", region=name))
        if isinstance(self.retention, type) or not isinstance(self.retention, Retention):
            raise ContractError(
                f"expected a policy such as KeepLast(8), found {self.retention!r}", field="retention", region=name
            )
        _check_choice(self.lifetime, "lifetime", get_args(Lifetime), name)
        _check_choice(self.mutability, "mutability", get_args(Mutability), name)
        if self.placement is not None and not _is_text(self.placement):
            problem = f"expected a device such as 'cuda:0', found {self.placement!r}"
            raise ContractError(problem, field="placement", region=name)
        self._check_start()

    def _check_place(self) -> None:
        named = [where for where in ("argument", "attribute") if getattr(self, where) is not None]
        if len(named) != 1:
            raise ContractError(
                f"expected exactly one of argument and attribute, found {' and '.join(named) or 'neither'}",
                field=named[-1] if named else "argument",
                region=self.name,
            )
        _check_accessor(getattr(self, named[0]), named[0], self.name)
        if isinstance(self.result, (bool, int)):
            check_count(self.result, "result", least=0, region=self.name)
        elif self.result is not None:
            _check_accessor(self.result, "result", self.name)
        if self.result is not None and self.mutability == "read_only":
            raise ContractError("a read_only region has no result", field="result", region=self.name)

    def _check_axes(self) -> None:
        if isinstance(self.clock, list):
            object.__setattr__(self, "clock", tuple(self.clock))
        if isinstance(self.axis, list):
            object.__setattr__(self, "axis", tuple(self.axis))
        for axis in self.axes:
            _check_axis(axis, self.name)
        for clock in self.clocks:
            if not isinstance(clock, str):
                raise ContractError(f"expected the name of a clock, found {clock!r}", field="clock", region=self.name)
        paired = isinstance(self.axis, tuple) == isinstance(self.clock, tuple)
        if not paired or len(self.axes) != len(self.clocks) or not self.axes:
            raise ContractError(
                f"axis and clock must be one each or tuples of equal length, found {self.axis!r} and {self.clock!r}",
                field="axis",
                region=self.name,
            )
        for what, values in (("axis", self.axes), ("clock", self.clocks)):
            if len(set(values)) != len(values):
                raise ContractError(f"named twice in {values!r}", field=what, region=self.name)

    def _check_start(self) -> None:
        unmoving = self.retention.fixed or self.mutability == "read_only"
        if self.start is None:
            object.__setattr__(self, "start", self.bound if unmoving else 0)
        check_count(self.start, "start", least=0, region=self.name)
        if self.start > self.bound:
            problem = f"starts at {self.start}, above the bound {self.bound} ({self.retention.describe()})"
            raise ContractError(problem, field="start", region=self.name)
        if unmoving and self.start != self.bound:
            problem = f"starts at {self.start}, but its extent is always {self.bound} ({self.retention.describe()})"
            raise ContractError(problem, field="start", region=self.name)

    def with_periodic(self, periodic: frozenset[str]) -> Region:
        """This region, knowing which clocks are periodic, and so which of its axes counts frames."""
        frames = [position for position, clock in enumerate(self.clocks) if clock not in periodic]
        if len(frames) > 1:
            names = ", ".join(repr(self.clocks[position]) for position in frames)
            raise ContractError(f"all but one must be periodic, and {names} are not", field="clock", region=self.name)
        known = replace(self)
        object.__setattr__(known, "_frame", frames[0] if frames else None)
        return known

    @property
    def clocks(self) -> tuple[str, ...]:
        return self.clock if isinstance(self.clock, tuple) else (self.clock,)

    @property
    def axes(self) -> tuple[int, ...]:
        return self.axis if isinstance(self.axis, tuple) else (self.axis,)

    @property
    def accessor(self) -> str:
        """The argument or the attribute, whichever is declared."""
        return self.argument if self.argument is not None else str(self.attribute)

    @property
    def place(self) -> str:
        """The accessor in its one canonical spelling, with attributes under ``self``."""
        spelled = spell(parse(self.accessor))
        return spelled if self.argument is not None else f"self.{spelled}"

    @property
    def frame_clock(self) -> str | None:
        """The clock whose advance adds frames; None when every clock is periodic. Known once in a contract."""
        return None if (at := self._frame_at()) is None else self.clocks[at]

    @property
    def frame_axis(self) -> int | None:
        """The axis that counts frames; None when every clock is periodic. Known once in a contract."""
        return None if (at := self._frame_at()) is None else self.axes[at]

    def _frame_at(self) -> int | None:
        if self._frame == -1:
            raise ContractError(
                "which axis counts frames depends on the clocks; read it from contract.region(name)",
                field="clock",
                region=self.name,
            )
        return self._frame

    @property
    def bound(self) -> int:
        """The largest attended extent, in frames."""
        return self.retention.bound

    @property
    def persistent(self) -> bool:
        """True when the region holds something between calls, and so has an extent in the catalog."""
        return self.lifetime not in SCRATCH_LIFETIMES

    def added(self, advance: int) -> int:
        """Frames that a call adds when its frame clock advances ``advance`` ticks; ContractError unless whole."""
        if self.mutability == "read_only":
            return 0
        frames = scale(advance, self.growth)
        if frames is None:
            raise ContractError(
                f"{counted(advance, 'tick')} of {self.clock!r} at {self.growth} frames a tick are no whole "
                "number of frames",
                field="growth",
                region=self.name,
            )
        return frames

    def raw(self, extent: int, advance: int) -> int:
        """The extent before retention, of a call that meets ``extent`` frames and advances ``advance`` ticks."""
        return extent if self.retention.in_place else extent + self.added(advance)

    def next_extent(self, extent: int, advance: int) -> int:
        """The extent after that call."""
        return self.retention.attended(self.raw(extent, advance))


@dataclass(frozen=True, slots=True)
class Input:
    """An argument whose ``axis`` has the size ``offset + rate * advance`` when ``clock`` advances ``advance`` ticks."""

    argument: str
    _: KW_ONLY
    axis: int
    clock: str
    rate: int | Fraction = 1
    offset: int = 0

    def __post_init__(self) -> None:
        _check_accessor(self.argument, "argument", None)
        _check_axis(self.axis, None)
        if not isinstance(self.clock, str):
            raise ContractError(f"expected the name of a clock, found {self.clock!r}", field="clock")
        object.__setattr__(self, "rate", check_ratio(self.rate, "rate"))
        if isinstance(self.offset, bool) or not isinstance(self.offset, int):
            raise ContractError(f"expected a whole number, found {self.offset!r}", field="offset")

    def size(self, advance: int) -> int:
        """The size of the axis; ContractError when it is not a whole number of at least 0."""
        scaled = scale(advance, self.rate)
        if scaled is None or scaled + self.offset < 0:
            raise ContractError(
                f"{self.argument!r} axis {self.axis}: {self.offset} + {self.rate} x {counted(advance, 'tick')} of "
                f"{self.clock!r} is not a size",
                field="offset" if scaled is not None else "rate",
            )
        return scaled + self.offset

    def describe(self) -> str:
        """One line of text: ``mel axis 2: 6 + 2 x frames``."""
        scaled = self.clock if self.rate == 1 else f"{self.rate} x {self.clock}"
        return f"{self.argument} axis {self.axis}: {f'{self.offset} + ' if self.offset else ''}{scaled}"
