"""The part of TOML that a contract needs, written: whole numbers, strings, lists, tables, and lists of tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def _string(text: str) -> str:
    """A basic string. TOML forbids control characters in one, so they are escaped by number."""
    escaped = (
        _ESCAPES.get(char) or (f"\\u{ord(char):04x}" if ord(char) < 0x20 or ord(char) == 0x7F else char)
        for char in text
    )
    return f'"{"".join(escaped)}"'


def _inline(value: object) -> str:
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_inline, value))}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_inline(item)}' for key, item in value.items())} }}"
    raise TypeError(f"a contract holds no {type(value).__name__}")


def toml_text(data: Mapping[str, Any]) -> str:
    """``data`` as a TOML document; its keys must be bare keys. Lists of tables become ``[[name]]`` sections."""
    lines: list[str] = []
    sections: list[str] = []
    for key, value in data.items():
        if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
            for row in value:
                sections += ["", f"[[{key}]]", *(f"{name} = {_inline(item)}" for name, item in row.items())]
        else:
            lines.append(f"{key} = {_inline(value)}")
    return "\n".join(lines + sections).lstrip("\n") + "\n"
