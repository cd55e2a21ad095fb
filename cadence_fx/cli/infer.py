"""`cadence infer`: the contract of a module, from example calls."""

from __future__ import annotations

import argparse
from pathlib import Path

from cadence_fx._units import counted
from cadence_fx.cli.named import call, target
from cadence_fx.cli.output import FAILED, OK, Mistake, print_json, users_output
from cadence_fx.infer import infer

HELP = "The contract of a module from one or two example calls, each fact with how sure it is and the line it is from."
EXAMPLES = """
  cadence infer decoder:model --call decoder:first --call decoder:second
  cadence infer 'decoder:Decoder()' --call 'decoder:example()' -o decoder.toml

The module and the calls are Python objects, executed because you name them; with () they are what a call of it returns.
A call is a tuple of arguments, or a pair of these and a dict of named ones, or a function that returns such.
Exit code 0: a contract was found; 1: there is none, and why; 2: a mistake in what was asked for.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("module", metavar="MODULE:OBJECT", help="the module, or a function that keeps nothing")
    parser.add_argument(
        "--call",
        action="append",
        required=True,
        metavar="MODULE:OBJECT",
        help="an example call: the first of a turn, and, given again, the one that follows it",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print everything that was found as JSON")
    form.add_argument("--toml", action="store_true", help="print the contract as a file of contracts has it")
    form.add_argument("-o", "--output", metavar="FILE", help="write the contract to a .toml or .json file")


def run(arguments: argparse.Namespace) -> int:
    """Prints or writes the contract; 1 when there is none."""
    if arguments.output is not None and Path(arguments.output).suffix not in (".toml", ".json"):
        raise Mistake(f"{arguments.output}: a contract is written to .toml or .json")
    module, calls = target(arguments.module), [call(each) for each in arguments.call]
    with users_output():
        found = infer(module, *calls)
    if arguments.json:
        print_json(found.as_dict())
    elif found.contract is None:
        print(found)
    elif arguments.toml:
        print(found.toml(), end="")
    elif arguments.output is not None:
        try:
            found.save(arguments.output)
        except OSError as error:
            raise Mistake(f"{arguments.output}: cannot be written: {error.strerror}") from error
        states, classes = len(found.contract.regions), found.contract.width().classes
        print(f"{arguments.output}: {counted(states, 'region')}, {counted(classes, 'class')}")
    else:
        print(found)
    return OK if found.contract is not None else FAILED
