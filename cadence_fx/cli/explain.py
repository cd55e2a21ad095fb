"""`cadence explain`: why calls run eager, from a saved report, or for one call of a compiled callable."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cadence_fx._units import counted
from cadence_fx.cli.named import call, named
from cadence_fx.cli.output import FAILED, OK, Mistake, one_line, print_json, users_output
from cadence_fx.explain import explain
from cadence_fx.foresee import CAPTURE, REPLAY
from cadence_fx.remedies import clause_of, remedy_for

HELP = "Why calls run eager and what to do about it: of a saved report, or of one call, which is not made."
EXAMPLES = """\
  cadence explain report.json
  cadence explain mypackage.server:step --call mypackage.server:odd_call
  cadence explain mypackage.server:step --call mypackage.server:odd_call --mode inference --json

exit codes: 0 replayed, or no call missed; 1 some run eager; 2 a mistake
"""
_MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}
_MOST_BYTES = 64 << 20  # of a report that is read
_MISSING = (
    "--call is missing: {subject} is explained for one call, and --call MODULE:OBJECT names its arguments, "
    "such as: cadence explain {subject} --call {module}:odd_call"
)
_KINDS = ("misses", "refusals", "invalidations")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add = parser.add_argument
    add("subject", metavar="FILE|MODULE:OBJECT", help="a report (cadence.report(step).to_json()), or a compiled "
        "callable that its module has warmed up")  # fmt: skip
    add("--call", metavar="MODULE:OBJECT", help="calls the object, which returns the arguments as a tuple, or (args, "
        "kwargs); needed for a callable")  # fmt: skip
    add("--mode", choices=tuple(_MODES), default="no_grad", help="what the call would be made in (%(default)s)")
    add("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the explanation; 1 when calls run eager."""
    if arguments.call is None:
        if ":" in arguments.subject and not os.path.exists(arguments.subject):
            raise Mistake(_MISSING.format(subject=arguments.subject, module=arguments.subject.partition(":")[0]))
        return _of_report(Path(arguments.subject), arguments.json)
    step = named(arguments.subject)
    args, kwargs = call(arguments.call)
    with _MODES[arguments.mode](), users_output():
        told = explain(step, *args, **kwargs)
    if arguments.json:
        print_json(json.loads(told.to_json()))
    else:
        print(told)
    return OK if told.outcome in (REPLAY, CAPTURE) else FAILED


def _of_report(path: Path, as_json: bool) -> int:
    facts = _read(path)
    rows = [
        {
            "counted": kind.removesuffix("es") if kind == "misses" else kind.removesuffix("s"),
            "reason": reason,
            "count": count,
            "clause": clause_of(reason),
            "details": list(facts.get("details", {}).get(reason, {})),
            "remedy": remedy_for(reason),
        }
        for kind in _KINDS
        for reason, count in facts[kind].items()
    ]
    if as_json:
        print_json({"name": facts.get("name"), "replays": facts["replays"], "eager": rows})
    else:
        head = f"{one_line(str(facts.get('name')))}: {counted(facts['replays'], 'replay')}"
        print("\n".join([head, *map(_text, rows)]))
    return FAILED if facts["misses"] else OK


def _text(row: Mapping[str, Any]) -> str:
    clause = f" ({row['clause']})" if row["clause"] else ""
    lines = [f"  {row['counted']} {one_line(row['reason'])}: {row['count']}{clause}"]
    lines += [f"    why: {one_line(str(detail))}" for detail in row["details"] if detail]
    return "\n".join([*lines, f"    remedy: {row['remedy'] or 'unknown to this version'}"])


def _read(path: Path) -> dict[str, Any]:
    """A saved report; nothing in it is executed."""
    try:
        with open(path, "rb") as file:  # it may have no size, as a device or a pipe
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise Mistake(f"{path}: larger than {_MOST_BYTES >> 20} MiB, so no report")
        facts = json.loads(data.decode())
    except OSError as error:
        raise Mistake(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise Mistake(f"{path}: no JSON: {error}") from error
    if not isinstance(facts, dict) or not isinstance(facts.get("replays"), int):
        raise Mistake(f"{path}: no report; save one with cadence_fx.report(step).to_json()")
    counted = [facts.get(kind) for kind in (*_KINDS, "details")]
    if (
        not all(isinstance(each, dict) for each in counted)
        or not all(
            isinstance(count, int)
            for each in counted[:-1]
            for count in each.values()  # type: ignore[union-attr]
        )
        or not all(isinstance(seen, dict) for seen in facts["details"].values())
    ):
        raise Mistake(f"{path}: a report whose counts are damaged")
    return facts
