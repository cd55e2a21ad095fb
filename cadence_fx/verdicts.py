"""Whether a region or a callable can be captured, why, and what would change it (paper section 3.5, criterion 3.5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cadence_fx._units import counted

Word = Literal["captured", "pinned", "too wide", "unbounded", "traffic-dependent"]
CAPTURABLE = ("captured", "pinned")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One word, the reason for it, and what would change it; nothing has to change where that is empty."""

    word: Word
    reason: str
    remedy: str = ""

    @property
    def capturable(self) -> bool:
        return self.word in CAPTURABLE


def region_verdict(
    *, start: int, bound: int | None, stride: int, classes: int | None, limit: int, advances: int = 1,
    traffic: str | None = None, scratch: bool = False,
) -> Verdict:  # fmt: skip
    """The verdict on one region that goes from ``start`` to ``bound`` by ``stride`` frames a call.

    ``limit`` classes are allowed; each extent is met by ``advances`` advances.
    """
    extents = max(1, limit // advances)
    if traffic:
        remedy = "calls of declared query lengths: each length is one class more for every extent"
        return Verdict("traffic-dependent", f"query lengths follow traffic: {traffic}", remedy)
    if scratch:
        return Verdict("pinned", "holds nothing between calls")
    if bound is None or classes is None:
        widest = start + (extents - 1) * stride
        kept = f"{counted(widest, 'frame')}: {counted(extents, 'extent')}"
        return Verdict("unbounded", f"grows by {counted(stride, 'frame')} a call and nothing is dropped",
                       f"a retention rule that keeps at most {kept}")  # fmt: skip
    if bound == start:
        return Verdict("pinned", f"its extent is always {bound:,}")
    if classes <= extents:
        return Verdict("captured", counted(classes, "extent"))
    window = bound - start
    wanted = [f"a window of at most {counted((extents - 1) * stride, 'frame')}"]
    if extents > 1:
        wanted.insert(0, f"a stride of at least {counted(-(-window // (extents - 1)), 'frame')}")
    wanted.append(f"max_classes = {classes * advances:,}")
    return Verdict("too wide", f"{counted(classes, 'extent')}, and {_allowed(limit, advances)}", ", or ".join(wanted))


def _allowed(limit: int, advances: int = 1) -> str:
    extents = counted(max(1, limit // advances), "extent")
    each = f" ({extents} by {counted(advances, 'advance')})" if advances > 1 else ""
    return f"{counted(limit, 'class')} {'is' if limit == 1 else 'are'} allowed{each}"


def callable_verdict(regions: dict[str, Verdict], *, classes: int | None, limit: int, exact: bool,
                     states: int | None, advances: int) -> Verdict:  # fmt: skip
    """The verdict on a callable: that of its worst region, or its own where the regions together are too many."""
    for name, verdict in regions.items():
        if not verdict.capturable:
            return Verdict(verdict.word, f"{name}: {verdict.reason}", verdict.remedy)
    assert classes is not None  # only what is unbounded has no number, and that has been told
    if classes > limit:
        at_most = "" if exact else "at most "
        wanted = [f"max_classes = {classes:,}"]
        if states is not None and advances > 1 and states <= limit:
            wanted.insert(0, f"at most {counted(limit // states - 1, 'flush length')}")
        return Verdict("too wide", f"{at_most}{counted(classes, 'class')}, and {_allowed(limit)}", ", or ".join(wanted))
    if classes == 1:
        return Verdict("pinned", "one class")
    return Verdict("captured", f"{counted(classes, 'class')} of {limit:,} allowed")
