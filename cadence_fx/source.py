"""A contract as the Python text that makes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from cadence_fx.contract import Contract
from cadence_fx.serialize import given_fields

_WIDTH = 110


def python_source(
    contract: Contract, comments: Mapping[str, Sequence[str]] | None = None, name: str = "contract"
) -> str:
    """Text that makes an equal contract when it runs, after ``import cadence_fx as cadence``. What else it needs it
    imports.

    Args:
        comments: lines to stand above the region, or the clock, of that name.
    """
    told = comments or {}
    lines = [f"{name} = cadence.Contract("]
    for field, parts in (("clocks", contract.clocks), ("regions", contract.regions), ("inputs", contract.inputs)):
        if not parts:
            continue
        lines.append(f"    {field}=[")
        for part in parts:
            lines += [f"        # {line}" for line in told.get(getattr(part, "name", ""), ())]
            lines += _part(part)
        lines.append("    ],")
    tables = ("clocks", "regions", "inputs")
    rest = {key: value for key, value in given_fields(contract).items() if key not in tables}
    lines += [f"    {key}={_value(value)}," for key, value in rest.items()]
    imports = ["from fractions import Fraction", ""] if any("Fraction(" in line for line in lines) else []
    return "\n".join([*imports, *lines, ")"])


def _part(part: Any) -> list[str]:
    kind, fields = type(part).__name__, given_fields(part)
    first = next(iter(fields))
    words = [_value(fields.pop(first)), *(f"{key}={_value(value)}" for key, value in fields.items())]
    flat = f"        cadence.{kind}({', '.join(words)}),"
    if len(flat) <= _WIDTH:
        return [flat]
    return [f"        cadence.{kind}(", *(f"            {word}," for word in words), "        ),"]


def _value(value: Any) -> str:
    if isinstance(value, Fraction):
        return f"Fraction({value.numerator}, {value.denominator})"
    if dataclasses.is_dataclass(value):
        words = [_value(each) for each in given_fields(value).values()]
        return f"cadence.{type(value).__name__}({', '.join(words)})"
    if isinstance(value, str):
        return f'"{value}"' if not set(value) & {'"', "\\"} and value.isprintable() else repr(value)
    return repr(list(value)) if isinstance(value, tuple) else repr(value)
