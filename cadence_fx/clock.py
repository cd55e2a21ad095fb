"""Native clocks: deterministic counters with a fixed stride a call (paper section 3.1, the clock c_r of a region)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction

import sympy

from cadence_fx._units import counted
from cadence_fx.errors import ContractError


def check_count(value: object, field: str, *, least: int, region: str | None = None) -> int:
    """``value`` as an int of at least ``least``; ContractError otherwise (bool is not a number here)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ContractError(f"expected a whole number, found {value!r}", field=field, region=region)
    if value < least:
        raise ContractError(f"expected at least {least}, found {value}", field=field, region=region)
    return value


def check_ratio(value: object, field: str, *, region: str | None = None) -> int | Fraction:
    """``value`` as a positive int or Fraction; a Fraction of denominator 1 comes back as an int."""
    if isinstance(value, bool) or not isinstance(value, (int, Fraction)):
        raise ContractError(f"expected a whole number or a Fraction, found {value!r}", field=field, region=region)
    if value <= 0:
        raise ContractError(f"expected a number above 0, found {value}", field=field, region=region)
    return int(value) if value == int(value) else value


def scale(ticks: int, ratio: int | Fraction) -> int | None:
    """``ticks * ratio`` when that is whole, None otherwise."""
    whole, left = divmod(ticks * ratio.numerator, ratio.denominator)
    return whole if left == 0 else None


@dataclass(frozen=True, slots=True)
class Clock:
    """One counter, in one of three forms.

    * base: ``Clock("frames", 50)`` advances ``stride`` ticks a call; a call that ends a turn may advance one of
      ``flush`` ticks instead.
    * derived: ``Clock("mel", of="tokens", rate=2)`` advances ``rate`` times its base clock, flushes included.
    * periodic: ``Clock("step", period=10)`` runs ``period`` ticks inside every call and starts again.

    ``lookahead`` counts ticks that a call presents beyond its advance and that are discarded before retention: they
    enlarge the envelope and nothing else. A derived clock that declares none takes its base's, scaled.
    Raises ContractError, naming the field, for anything else.
    """

    name: str
    stride: int | None = None
    _: KW_ONLY
    lookahead: int = 0
    flush: Sequence[int] = ()  # any iterable is accepted; kept as a sorted tuple
    of: str | None = None
    rate: int | Fraction = 1
    period: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ContractError(f"a clock's name must be an identifier, found {self.name!r}", field="name")
        forms = [form for form in ("stride", "of", "period") if getattr(self, form) is not None]
        if len(forms) != 1:
            found = " and ".join(forms) or "none of them"
            raise ContractError(
                f"clock {self.name!r} must have exactly one of stride, of and period; found {found}",
                field=self._field(forms[-1] if forms else "stride"),
            )
        check_count(self.lookahead, self._field("lookahead"), least=0)
        object.__setattr__(self, "flush", self._sorted_flush(self.flush))
        object.__setattr__(self, "rate", check_ratio(self.rate, self._field("rate")))
        if self.stride is not None:
            check_count(self.stride, self._field("stride"), least=1)
        elif self.flush:
            raise ContractError(
                "flush belongs to the base clock: derived clocks scale it, and periodic clocks have no turns",
                field=self._field("flush"),
            )
        if self.of is None and self.rate != 1:
            raise ContractError("rate needs of: it scales another clock", field=self._field("rate"))
        if self.of is not None and not isinstance(self.of, str):
            raise ContractError(f"expected the name of a clock, found {self.of!r}", field=self._field("of"))
        if self.period is not None:
            check_count(self.period, self._field("period"), least=1)
            if self.lookahead:
                raise ContractError("a periodic clock presents no look-ahead", field=self._field("lookahead"))

    def _field(self, name: str) -> str:
        return f"clocks.{self.name}.{name}"

    def _sorted_flush(self, flush: object) -> tuple[int, ...]:
        field = self._field("flush")
        if isinstance(flush, (str, bytes)) or not isinstance(flush, Iterable):
            raise ContractError(f"expected numbers of ticks, such as range(2, 57, 2), found {flush!r}", field=field)
        return tuple(sorted({check_count(ticks, field, least=1) for ticks in flush}))

    @property
    def is_base(self) -> bool:
        return self.stride is not None

    @property
    def is_derived(self) -> bool:
        return self.of is not None

    @property
    def is_periodic(self) -> bool:
        return self.period is not None

    @property
    def symbol(self) -> sympy.Symbol:
        """The ticks that one call advances this clock, as a sympy symbol."""
        return sympy.Symbol(self.name, integer=True, nonnegative=True)

    @property
    def advances(self) -> tuple[int, ...]:
        """Every number of ticks one call may advance a base clock: the stride first, then the flush lengths.

        A periodic clock has none. A derived clock needs its base: ask ``Contract.advances_of``.
        """
        if self.is_derived:
            raise ContractError(f"{self.name!r} follows {self.of!r}: ask the contract for its advances", field="of")
        if self.stride is None:
            return ()
        return (self.stride, *(ticks for ticks in self.flush if ticks != self.stride))

    def describe(self) -> str:
        """One line of text: ``frames: 50 a call, flush 2..56``."""
        if self.period is not None:
            return f"{self.name}: {counted(self.period, 'tick')} inside every call"
        text = f"{self.name}: {self.stride} a call" if self.is_base else f"{self.name}: {self.rate} x {self.of}"
        if self.lookahead:
            text += f", look-ahead {self.lookahead}"
        if len(self.flush) > 4:
            text += f", flush {self.flush[0]}..{self.flush[-1]} ({len(self.flush)} lengths)"
        elif self.flush:
            text += f", flush {', '.join(map(str, self.flush))}"
        return text
