"""Retention policies as extent maps (paper section 3.1, the policy pi_r that bounds a region; property C2).

A call meets a state of ``old`` frames and brings ``new`` fresh ones. In memory the raw extent is old then new when the
code appends, new then old when it prepends; the policy says which part of it is the state after the call.
Extents count frames along the region's frame axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import sympy

from cadence_fx.clock import check_count
from cadence_fx.errors import ContractError

Order = Literal["append", "prepend"]
Source = Literal["old", "new"]


@dataclass(frozen=True, slots=True)
class Span:
    """Frames ``start:stop`` of the old state or of the fresh frames, consecutive in the state after the call."""

    source: Source
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.source}[{self.start}:{self.stop}]"


@runtime_checkable
class Retention(Protocol):
    """What survives when the extent passes its bound."""

    @property
    def order(self) -> Order | None:
        """Where fresh frames go in memory; None when the policy does not say."""

    @property
    def bound(self) -> int:
        """The largest attended extent."""

    @property
    def fixed(self) -> bool:
        """True when the attended extent is ``bound`` whatever arrives."""

    @property
    def in_place(self) -> bool:
        """True when fresh frames overwrite old ones, so nothing beyond ``bound`` is ever in flight."""

    def attended(self, raw: int) -> int:
        """The extent after a call whose raw extent is ``raw``."""

    def attended_expr(self, raw: sympy.Expr) -> sympy.Expr:
        """``attended`` on a symbolic raw extent."""

    def survivors(self, old: int, new: int) -> tuple[Span, ...] | None:
        """The state after the call in memory order; None when the policy does not declare an order."""

    def describe(self) -> str:
        """Words for messages: ``last 8, appended``."""


def _raw_spans(old: int, new: int, order: Order, start: int, stop: int) -> list[Span]:
    """The pieces of the raw extent that lie in ``start:stop``, in memory order."""
    pieces: list[tuple[Source, int]] = [("old", old), ("new", new)]
    if order == "prepend":
        pieces.reverse()
    spans, base = [], 0
    for source, length in pieces:
        low, high = max(start - base, 0), min(stop - base, length)
        if low < high:
            spans.append(Span(source, low, high))
        base += length
    return spans


def _merged(spans: list[Span]) -> tuple[Span, ...]:
    """``spans`` with neighbours that continue each other joined."""
    out: list[Span] = []
    for span in spans:
        if out and out[-1].source == span.source and out[-1].stop == span.start:
            out[-1] = Span(span.source, out[-1].start, span.stop)
        else:
            out.append(span)
    return tuple(out)


def _check_order(order: object) -> None:
    if order not in ("append", "prepend"):
        raise ContractError(f"expected 'append' or 'prepend', found {order!r}", field="retention.order")


_PLACED = {"append": "appended", "prepend": "prepended"}


class _Growing:
    """What policies share whose extent grows to a bound."""

    __slots__ = ()
    fixed = False
    in_place = False

    @property
    def bound(self) -> int:
        raise NotImplementedError

    def attended(self, raw: int) -> int:
        return min(raw, self.bound)

    def attended_expr(self, raw: sympy.Expr) -> sympy.Expr:
        return sympy.Min(raw, self.bound)


class _Fixed:
    """What policies share whose extent never moves and whose order in memory is not declared."""

    __slots__ = ()
    fixed = True
    n: int

    @property
    def order(self) -> None:
        return None

    @property
    def bound(self) -> int:
        return self.n

    def attended(self, raw: int) -> int:
        return self.n

    def attended_expr(self, raw: sympy.Expr) -> sympy.Expr:
        return sympy.Integer(self.n)


@dataclass(frozen=True, slots=True)
class KeepLast(_Growing):
    """The newest ``n`` frames: the tail of the raw extent when the code appends, the head when it prepends."""

    n: int
    order: Order = "append"

    def __post_init__(self) -> None:
        check_count(self.n, "retention.n", least=1)
        _check_order(self.order)

    @property
    def bound(self) -> int:
        return self.n

    def survivors(self, old: int, new: int) -> tuple[Span, ...]:
        raw = old + new
        kept = self.attended(raw)
        start = raw - kept if self.order == "append" else 0
        return _merged(_raw_spans(old, new, self.order, start, start + kept))

    def describe(self) -> str:
        return f"last {self.n}, {_PLACED[self.order]}"


@dataclass(frozen=True, slots=True)
class PromptPlusLast(_Growing):
    """The first ``prompt`` and the last ``last`` frames of the raw extent, as they lie in memory.

    The split is by memory in both orders. With ``prepend`` the head is the newest frames, so the name "prompt" is
    then a misnomer; released code behaves so, and the declaration follows the code.
    """

    prompt: int
    last: int
    order: Order = "append"

    def __post_init__(self) -> None:
        check_count(self.prompt, "retention.prompt", least=0)
        check_count(self.last, "retention.last", least=0)
        if self.bound == 0:
            raise ContractError("prompt and last are both 0: nothing would be kept", field="retention.last")
        _check_order(self.order)

    @property
    def bound(self) -> int:
        return self.prompt + self.last

    def survivors(self, old: int, new: int) -> tuple[Span, ...]:
        raw = old + new
        if raw <= self.bound:
            return _merged(_raw_spans(old, new, self.order, 0, raw))
        head = _raw_spans(old, new, self.order, 0, self.prompt)
        tail = _raw_spans(old, new, self.order, raw - self.last, raw)
        return _merged(head + tail)

    def describe(self) -> str:
        return f"first {self.prompt} and last {self.last}, {_PLACED[self.order]}"


@dataclass(frozen=True, slots=True)
class Pinned(_Fixed):
    """Always ``n`` frames, replaced by each call in whatever way it likes."""

    in_place = False
    n: int

    def __post_init__(self) -> None:
        check_count(self.n, "retention.n", least=1)

    def survivors(self, old: int, new: int) -> tuple[Span, ...]:
        return (Span("new", 0, self.n),)

    def describe(self) -> str:
        return f"pinned at {self.n}"


@dataclass(frozen=True, slots=True)
class Ring(_Fixed):
    """Always ``n`` frames, written in place by index."""

    in_place = True
    n: int

    def __post_init__(self) -> None:
        check_count(self.n, "retention.n", least=1)

    def survivors(self, old: int, new: int) -> tuple[Span, ...] | None:
        return None

    def describe(self) -> str:
        return f"ring of {self.n}, written in place"
