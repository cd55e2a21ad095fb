"""Amounts as people write them: of memory, and of anything else that is counted."""

from __future__ import annotations

import re
from fractions import Fraction

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([kmgt]?)(i?)b?\Z", re.IGNORECASE)


def counted(count: int, noun: str) -> str:
    """``1 class``, ``0 axes``, ``2,001 frames``: a number of things whose name, in the singular, is ``noun``."""
    plural = noun.removesuffix("is") + "es" if noun.endswith(("s", "x", "ch")) else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def size_text(count: int) -> str:
    """Bytes with a unit that shows them: ``572.5 MiB``."""
    for unit, width in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= width:
            return f"{count / width:,.1f} {unit}"
    return f"{count} B"


def parse_size(text: str) -> int:
    """Bytes of ``"80GiB"``, ``"1.5 GB"`` or ``"4096"``: with an i, powers of 1,024; ValueError for anything else."""
    match = _SIZE.match(text.strip())
    if not match or (match[3] and not match[2]):
        raise ValueError(f"expected a size such as 80GiB, found {text!r}")
    base = 1024 if match[3] else 1000
    return int(Fraction(match[1]) * base ** _POWERS[match[2].lower()])
