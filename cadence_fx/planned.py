"""Contract files with a table `plan`: what the tensors of the contract weigh, for `cadence plan`.

[plan]
operators = 1429

[plan.regions.cache]
shape = [1, "frame", 64]
stock = [1, 1000, 64]

[plan.inputs.x]
shape = [1, "frame", 64]
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cadence_fx._units import parse_size
from cadence_fx._yaml import yaml_data
from cadence_fx.clock import check_count
from cadence_fx.deployment import Deployment, PlannedCallable
from cadence_fx.errors import ContractError, ContractFileError, nearest_name
from cadence_fx.footprint import Footprint
from cadence_fx.serialize import PLAN, from_dict, json_data, parsed, text_of

_READERS: dict[str, Callable[[str], Any]] = {
    "toml": tomllib.loads,
    "json": json_data,
    "yaml": yaml_data,
    "yml": yaml_data,
}
MOST_CHECKS = 1_000_000
_FIELDS = ("weights", "operators", "regions", "inputs")
_WEIGHS = ("shape", "dtype", "stock", "instances")


def read_table(path: str | Path) -> dict[str, Any]:
    """The data of a .toml, .json, .yaml or .yml file; ContractFileError unless it is a table."""
    source, suffix = str(path), Path(path).suffix.removeprefix(".").lower()
    if suffix not in _READERS:
        raise ContractFileError(source, f"expected a .{', a .'.join(_READERS)} file")
    data = parsed(text_of(path), _READERS[suffix], suffix, source)
    if not isinstance(data, dict):
        raise ContractFileError(source, f"expected a table, found {type(data).__name__}")
    return data


def load_callable(path: str | Path) -> Deployment:
    """The contract in a file, with what its table `plan` says of bytes. Nothing in the file is executed."""
    source, data = str(path), read_table(path)
    _check_amount(data, source)
    contract = from_dict(data, source=source)
    given = known_fields(data.get(PLAN, {}), _FIELDS, source, PLAN)
    name = contract.name or Path(path).stem
    try:
        planned = PlannedCallable(
            name, contract,
            regions=_footprints(given.get("regions", {}), source, f"{PLAN}.regions"),
            inputs=_footprints(given.get("inputs", {}), source, f"{PLAN}.inputs"),
            operators=given.get("operators"),
        )  # fmt: skip
    except ContractFileError:
        raise
    except ContractError as error:
        field = f"{PLAN}.{error.field}" if error.field else PLAN
        raise ContractFileError(source, error.problem, field=field, region=error.region) from error
    return Deployment(name, (planned,), weights=_weights(given.get("weights"), source))


def _check_amount(data: Mapping[str, Any], source: str) -> None:
    """Each region and input is checked with each flush length, which a file could make take hours."""
    tables = [data.get(name) for name in ("clocks", "regions", "inputs")]
    clocks, *followers = [table if isinstance(table, list) else [] for table in tables]
    flush = [clock.get("flush") for clock in clocks if isinstance(clock, dict)]
    lengths = sum(len(each) for each in flush if isinstance(each, list))
    parts = sum(map(len, followers))
    if lengths * parts > MOST_CHECKS:
        raise ContractFileError(source, f"{lengths:,} flush lengths for {parts:,} regions and inputs are too many "
                                "to be checked", field="clocks")  # fmt: skip


def known_fields(data: object, known: tuple[str, ...], source: str, where: str) -> Mapping[str, Any]:
    """``data`` as a table of known fields; ContractFileError, with the nearest name, for any other."""
    if not isinstance(data, Mapping):
        raise ContractFileError(source, f"expected a table, found {type(data).__name__}", field=where)
    for name in data:
        if name not in known:
            near = nearest_name(str(name), known)
            hint = f"; did you mean {near!r}?" if near else f" (known: {', '.join(known)})"
            raise ContractFileError(source, f"{str(name)[:80]!r} is not a field{hint}", field=where)
    return data


def _footprints(data: object, source: str, where: str) -> dict[str, Footprint]:
    if not isinstance(data, Mapping):
        raise ContractFileError(source, f"expected a table, found {type(data).__name__}", field=where)
    found = {}
    for name, row in data.items():
        values = known_fields(row, _WEIGHS, source, f"{where}.{name}")
        if "shape" not in values:
            raise ContractFileError(source, "this field is missing", field=f"{where}.{name}.shape")
        try:
            found[str(name)] = Footprint(**values)
        except ContractError as error:
            raise ContractFileError(source, error.problem, field=f"{where}.{name}.{error.field}") from error
    return found


def _weights(value: object, source: str) -> int | None:
    try:
        return None if value is None else parse_size(value) if isinstance(value, str) else (
            check_count(value, "weights", least=0))  # fmt: skip
    except (ValueError, ContractError) as error:
        problem = error.problem if isinstance(error, ContractError) else str(error)
        raise ContractFileError(source, problem, field=f"{PLAN}.weights") from error
