"""`cadence doctor`: the process, and the known hazards of a module."""

from __future__ import annotations

import argparse

import torch

from cadence_fx.cli.named import example
from cadence_fx.cli.output import FAILED, OK, paint, print_json, users_output
from cadence_fx.doctor import doctor
from cadence_fx.serialize import load

HELP = "Versions, device, switches and flags that matter, and the known hazards of a module with their lines."
EXAMPLES = """\
  cadence doctor
  cadence doctor mypackage.decoder:example
  cadence doctor mypackage.decoder:example --contract decoder.toml --json

exit codes: 0 nothing is in the way of capture, 1 something is, 2 a mistake
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add = parser.add_argument
    add("example", nargs="?", metavar="MODULE:OBJECT", help="imports the module and calls the object, which returns "
        "(module, args) or (module, args, kwargs) of a first call; it is made without gradients")  # fmt: skip
    add("--contract", metavar="FILE", help="what is declared (.toml, .json); by default what is tied to the module")
    add("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the diagnosis; 1 when something is in the way of capture."""
    contract = load(arguments.contract) if arguments.contract is not None else None
    if arguments.example is None:
        found = doctor()
    else:
        module, args, kwargs = example(arguments.example)
        with torch.no_grad(), users_output():
            found = doctor(module, *args, contract=contract, **kwargs)
    if arguments.json:
        print_json(found.as_dict())
    else:
        lines = str(found).splitlines()
        print("\n".join(paint(line, "red") if line.startswith("  stops") else line for line in lines))
    return FAILED if found.stops else OK
