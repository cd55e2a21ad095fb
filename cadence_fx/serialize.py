"""Contracts as TOML and JSON. Reading a file builds numbers and strings, and nothing in it is ever executed.

The file mirrors the constructors: tables ``clocks``, ``regions`` and ``inputs``, one field each for each parameter,
defaults left out. A Fraction is the string "1/2"; a retention policy is a table whose ``policy`` is its class name.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from cadence_fx._toml import toml_text
from cadence_fx.clock import Clock
from cadence_fx.contract import Contract, Input, Region
from cadence_fx.errors import ContractError, ContractFileError, nearest_name
from cadence_fx.retention import KeepLast, Pinned, PromptPlusLast, Ring

MAX_BYTES = 1 << 20
PLAN = "plan"  # a table beside the contract's, which `planned` reads and a contract does not need

_POLICIES: dict[str, type] = {policy.__name__: policy for policy in (KeepLast, PromptPlusLast, Pinned, Ring)}
_TABLES: dict[str, type] = {"clocks": Clock, "regions": Region, "inputs": Input}
_RATIO = re.compile(r"([0-9]{1,1000})/([0-9]{1,1000})\Z")
_RATIO_FIELDS = ("rate", "growth")


def _declared(cls: type) -> list[Field[Any]]:
    """The fields of ``cls`` that its constructor takes."""
    return [field for field in fields(cls) if field.init]


def _plain(value: object) -> Any:
    """``value`` as what TOML and JSON both have: numbers, strings, lists and tables."""
    if isinstance(value, Fraction):
        return f"{value.numerator}/{value.denominator}"
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if type(value) in _POLICIES.values():
        return {"policy": type(value).__name__, **_record(value)}
    if type(value) in _TABLES.values():
        return _record(value)
    return value


def given_fields(part: Any) -> dict[str, Any]:
    """The fields of a contract or of a part of one that differ from their defaults, in declaration order."""
    values = [(field, getattr(part, field.name)) for field in _declared(type(part))]
    return {field.name: value for field, value in values if value != field.default}


def _record(part: Any) -> dict[str, Any]:
    """The same, as what TOML and JSON have."""
    return {name: _plain(value) for name, value in given_fields(part).items()}


def to_dict(contract: Contract) -> dict[str, Any]:
    """``contract`` as nested dicts and lists; ``from_dict`` gives an equal contract back."""
    record = _record(contract)
    tables = {name: record.pop(name) for name in _TABLES if record.get(name)}
    return {**record, **tables}


def from_dict(data: Mapping[str, Any], *, source: str = "contract") -> Contract:
    """The contract that ``data`` describes. ``source`` is named in errors, usually the file.

    Raises ContractFileError for an unknown or missing field or a wrong table. What the constructors refuse
    comes back as ContractFileError too, with their field and region.
    """
    if isinstance(data, Mapping):
        data = {name: value for name, value in data.items() if name != PLAN}
    values = dict(_known(data, [field.name for field in _declared(Contract)], source, ""))
    for table, cls in _TABLES.items():
        rows = values.get(table, [])
        if not isinstance(rows, list):
            raise ContractFileError(source, f"expected a list of tables, found {rows!r}", field=table)
        values[table] = [_part(cls, row, source, f"{table}[{number}]") for number, row in enumerate(rows)]
    contract: Contract = _build(Contract, values, source, "")
    return contract


def _at(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _known(data: object, known: list[str], source: str, where: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ContractFileError(source, f"expected a table, found {data!r}", field=where or None)
    for name in data:
        if name not in known:
            near = nearest_name(str(name), known)
            hint = f"; did you mean {near!r}?" if near else f" (known: {', '.join(known)})"
            raise ContractFileError(source, f"{name!r} is not a field{hint}", field=_at(where, str(name)))
    return data


def _part(cls: type, row: object, source: str, where: str) -> Any:
    values = dict(_known(row, [field.name for field in _declared(cls)], source, where))
    for name in _RATIO_FIELDS:
        if isinstance(text := values.get(name), str):
            values[name] = _ratio(text, source, f"{where}.{name}")
    if "retention" in values:
        values["retention"] = _policy(values["retention"], source, f"{where}.retention")
    return _build(cls, values, source, where)


def _ratio(text: str, source: str, where: str) -> Fraction:
    match = _RATIO.match(text)
    if not match or int(match[2]) == 0:
        raise ContractFileError(source, f'expected a ratio such as "1/2", found {text!r}', field=where)
    return Fraction(int(match[1]), int(match[2]))


def _policy(table: object, source: str, where: str) -> Any:
    name = table.get("policy") if isinstance(table, Mapping) else None
    cls = _POLICIES.get(name) if isinstance(name, str) else None
    if cls is None:
        near = nearest_name(name, list(_POLICIES)) if isinstance(name, str) else None
        hint = f"; did you mean {near!r}?" if near else ""
        raise ContractFileError(
            source, f"expected a policy among {', '.join(_POLICIES)}, found {name!r}{hint}", field=f"{where}.policy"
        )
    values = _known(table, ["policy", *(field.name for field in _declared(cls))], source, where)
    return _build(cls, {key: value for key, value in values.items() if key != "policy"}, source, where)


def _build(cls: type, values: Mapping[str, Any], source: str, where: str) -> Any:
    for field in _declared(cls):
        if field.name not in values and field.default is MISSING:
            raise ContractFileError(source, "this field is missing", field=_at(where, field.name))
    try:
        return cls(**values)
    except ContractError as error:
        place = error.field
        if where and place:  # a part knows its own field; the file's reader needs the row as well
            place = _at(where, place.rpartition(".")[2])
        raise ContractFileError(source, error.problem, field=place, region=error.region) from error


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {repeated!r} is given twice")
    return dict(pairs)


def _json_text(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def json_data(text: str) -> Any:
    """The data of a JSON text; ValueError for what is malformed or names a key twice."""
    return json.loads(text, object_pairs_hook=_refuse_repeats)


_FORMATS: dict[str, tuple[Callable[[dict[str, Any]], str], Callable[[str], Any]]] = {
    "toml": (toml_text, tomllib.loads),
    "json": (_json_text, json_data),
}


def _format(name: str, source: str) -> tuple[Callable[[dict[str, Any]], str], Callable[[str], Any]]:
    if name not in _FORMATS:
        raise ContractFileError(source, f"expected toml or json, found {name!r}")
    return _FORMATS[name]


def dumps(contract: Contract, format: str = "toml") -> str:
    """``contract`` as the text of a TOML or JSON file."""
    write, _ = _format(format, "contract")
    return write(to_dict(contract))


def loads(text: str, format: str = "toml", *, source: str = "contract") -> Contract:
    """The contract in ``text``; ContractFileError when it is malformed, too large or not a contract."""
    _, read = _format(format, source)
    return from_dict(parsed(text, read, format, source), source=source)


def parsed(text: str, read: Callable[[str], Any], format: str, source: str) -> Any:
    """What `read` makes of a file's text; ContractFileError when it is too large or malformed."""
    if len(text.encode(errors="surrogatepass")) > MAX_BYTES:
        raise ContractFileError(source, f"larger than {MAX_BYTES:,} bytes, which no contract needs")
    try:
        return read(text)
    except (ValueError, RecursionError) as error:
        raise ContractFileError(source, f"malformed {format.upper()}: {error}") from error


def load(path: str | Path) -> Contract:
    """The contract in the file at ``path``, TOML or JSON by its suffix."""
    source, suffix = str(path), Path(path).suffix.removeprefix(".")
    _format(suffix, source)
    return loads(text_of(path), suffix, source=source)


def text_of(path: str | Path) -> str:
    """The text of a file, or so much of it that `parsed` refuses it; ContractFileError when it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES + 1).decode()
    except (OSError, ValueError) as error:
        raise ContractFileError(str(path), f"cannot be read: {error}") from error


def save(contract: Contract, path: str | Path) -> None:
    """Write ``contract`` to ``path``, as TOML or JSON by its suffix."""
    write, _ = _format(Path(path).suffix.removeprefix("."), str(path))
    Path(path).write_text(write(to_dict(contract)), encoding="utf-8", newline="\n")
