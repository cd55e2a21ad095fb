"""What the commands print: aligned tables, JSON, errors of one line, and colours where a terminal shows them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from cadence_fx._table import aligned

__all__ = [
    "FAILED",
    "OK",
    "WRONG_USE",
    "Mistake",
    "aligned",
    "one_line",
    "paint",
    "painted",
    "print_error",
    "print_json",
    "table",
    "users_output",
]

OK, FAILED, WRONG_USE = 0, 1, 2  # exit codes; FAILED is a negative verdict

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


class Mistake(Exception):
    """What the user asked for cannot be done; the message says why, in one line."""


def one_line(text: str, limit: int = 500) -> str:
    """``text`` without line breaks and control characters, cut to ``limit``: file contents end up in messages."""
    flat = "".join(char if char.isprintable() else " " for char in " ".join(text.split()))
    return flat if len(flat) <= limit else f"{flat[: limit - 3]}..."


def users_output() -> contextlib.AbstractContextManager[object]:
    """What the user's code prints inside goes to stderr: stdout has the answer alone."""
    return contextlib.redirect_stdout(sys.stderr)


def print_error(message: str) -> None:
    """One line on stderr."""
    print(f"{paint('error:', 'red', sys.stderr)} {one_line(message)}", file=sys.stderr)


def print_json(value: Any) -> None:
    """``value`` as JSON on stdout, keys in the order they were given, in letters that stdout has."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(json.dumps(value, indent=2, ensure_ascii=encoding.lower() not in ("utf-8", "utf8")))


def painted(stream: TextIO | None) -> bool:
    """Whether a stream gets colours: a terminal that is not dumb, and no NO_COLOR (https://no-color.org)."""
    return (
        stream is not None and stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """``text`` in a colour, if ``stream`` (stdout by default) gets any."""
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if painted(stream or sys.stdout) else text


def table(rows: Sequence[Sequence[str]], colours: Mapping[str, str] | None = None, indent: str = "  ") -> list[str]:
    """``rows`` as aligned lines, the first one bold; a cell whose whole text is in ``colours`` gets that colour."""
    lines = aligned(rows, indent)
    if not painted(sys.stdout) or not lines:
        return lines
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    out = [paint(lines[0], "bold")]
    for row in rows[1:]:
        cells = [
            paint(cell, (colours or {})[cell]) + " " * (width - len(cell))
            if cell in (colours or {})
            else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ]
        out.append((indent + "  ".join(cells)).rstrip())
    return out
