"""`cadence plan`: what can be captured, in how many classes and bytes, before anything is run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cadence_fx._units import parse_size
from cadence_fx.adapters.readers import EXAMPLE, READERS, deployment, reader
from cadence_fx.backend import declared_contract
from cadence_fx.cli.named import example
from cadence_fx.cli.output import FAILED, OK, Mistake, print_json, table, users_output
from cadence_fx.contract import Contract
from cadence_fx.deployment import Deployment
from cadence_fx.plan_example import from_example
from cadence_fx.plan_text import plan_text
from cadence_fx.planned import read_table
from cadence_fx.planner import plan
from cadence_fx.serialize import PLAN, from_dict

HELP = "What can be captured, in how many classes and bytes, from a contract, a config or an example; nothing is run."
EXAMPLES = f"""\
  cadence plan decoder.toml
  cadence plan encoder.toml decoder.toml --device-memory 80GiB
  cadence plan --families
  cadence plan --family {EXAMPLE} config.json flow.yaml --set prompt=302 --json
  cadence plan --family {EXAMPLE} --picture plan.svg
  cadence plan decoder.toml --example mypackage.decoder:example

exit codes: 0 all of it can be captured, 1 some of it cannot, 2 a mistake
"""
_COLOURS = {
    "captured": "green", "pinned": "green", "too wide": "red", "unbounded": "red", "traffic-dependent": "yellow",
}  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add = parser.add_argument
    add("files", nargs="*", metavar="FILE",
        help="contracts (.toml, .json, .yaml), or with --family the model's configuration files")  # fmt: skip
    add("--family", metavar="NAME", help="a released family, whose files are read; fields that are missing, and no "
        "file at all, stand for the released values")  # fmt: skip
    add("--families", action="store_true", help="list the families and their options")
    add("--set", action="append", default=[], metavar="OPTION=VALUE", help="an option of the family")
    add("--example", metavar="MODULE:OBJECT", help="imports the module and calls the object, which returns (module, "
        "args) or (module, args, kwargs) of a first call; its tensors give the bytes")  # fmt: skip
    add("--weights", metavar="SIZE", help="bytes of the weights, such as 705MiB")
    add("--device-memory", metavar="SIZE", help="tell how many sessions fit in so much, such as 80GiB")
    add("--max-classes", type=int, metavar="N", help="classes allowed for each callable, instead of the contract's")
    add("--json", action="store_true", help="as JSON")
    add("--picture", metavar="FILE", help="draw it, into a .png or .svg file, as well")


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan; 1 when some of it cannot be captured."""
    if arguments.families:
        return _list_families()
    report = plan(
        *_sources(arguments),
        weights=_size("--weights", arguments.weights),
        device_memory=_size("--device-memory", arguments.device_memory),
        max_classes=arguments.max_classes,
    )
    if arguments.picture:
        report.picture(arguments.picture)
    if arguments.json:
        print_json(report.as_dict())
    else:
        print(plan_text(report, lambda rows: table(rows, _COLOURS)))
    return OK if report.capturable else FAILED


def _list_families() -> int:
    rows = [("family", "options, as released", "about")]
    for name in READERS:
        found = reader(name)
        options = " ".join(f"{key}={_plain(value)}" for key, value in found.options.items())
        rows.append((name, options, found.about))
    print("\n".join(table(rows)))
    return OK


def _plain(value: int | str | tuple[int, ...]) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _size(option: str, text: str | None) -> int | None:
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise Mistake(f"{option}: {error}") from error


def _sources(arguments: argparse.Namespace) -> list[Path | Deployment]:
    files = [Path(file) for file in arguments.files]
    if arguments.family is not None and arguments.example is not None:
        raise Mistake("--family and --example exclude each other")
    if arguments.set and arguments.family is None:
        raise Mistake("--set is for the options of a --family")
    if arguments.example is not None:
        return [_from_example(arguments.example, files)]
    if arguments.family is not None:
        return [deployment(arguments.family, _merged(files), _options(arguments.set), source=_names(files))]
    if not files:
        raise Mistake("name a contract file, a --family or an --example (see 'cadence plan --help')")
    return list(files)


def _names(files: Sequence[Path]) -> str:
    return ", ".join(map(str, files)) or "configuration"


def _merged(files: Sequence[Path]) -> dict[str, Any]:
    """The tables of several files as one; a field that two of them give differently is a mistake."""
    merged: dict[str, Any] = {}
    for file in files:
        for name, value in read_table(file).items():
            if merged.setdefault(name, value) != value:
                raise Mistake(f"{file}: the field {name!r} has another value in a file before it")
    return merged


def _options(given: Sequence[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise Mistake(f"--set takes OPTION=VALUE, found {text!r}")
        if name in options:
            raise Mistake(f"--set gives {name!r} twice")
        options[name] = value
    return options


def _from_example(reference: str, files: Sequence[Path]) -> Deployment:
    if len(files) > 1:
        raise Mistake("--example is planned with one contract")
    module, args, kwargs = example(reference)
    contract: Contract | None
    if files:
        data = read_table(files[0])
        if PLAN in data:
            raise Mistake(f"{files[0]}: has a table {PLAN!r}, and the example gives the bytes, too; drop one of them")
        contract = from_dict(data, source=str(files[0]))
    else:
        contract = declared_contract(module)
    with users_output():
        return from_example(module, args, kwargs, contract=contract)
