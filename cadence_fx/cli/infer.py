"""`cadence infer`: the contract of a module, from example calls."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cadence_fx._torch_calls import raised_at
from cadence_fx.cli.output import FAILED, OK, Mistake, print_json
from cadence_fx.errors import unknown_name
from cadence_fx.infer import infer

HELP = "The contract of a module from one or two example calls, each fact with how sure it is and the line it is from."
EXAMPLES = """
  cadence infer decoder:model --call decoder:first --call decoder:second
  cadence infer 'decoder:Decoder()' --call 'decoder:example()' -o decoder.toml

The module and the calls are Python objects, named package.module:attribute; with () they are what a call of it returns.
They are executed because you name them. A call is a tuple of arguments, or a pair of these and a dict of named ones.
Exit code 0: a contract was found; 1: there is none, and why; 2: a mistake in what was asked for.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("module", help="the module: package.module:attribute")
    parser.add_argument(
        "--call",
        action="append",
        required=True,
        metavar="OBJECT",
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
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = infer(named(arguments.module, callable), *(named(call, _is_call) for call in arguments.call))
    finally:
        sys.path.remove(str(Path.cwd()))
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
        print(f"{arguments.output}: {found.contract.width()}")
    else:
        print(found)
    return OK if found.contract is not None else FAILED


def named(text: str, fits: Callable[[Any], bool]) -> Any:
    """The object that a user names, executed if it ends with (); `Mistake` where there is none, or not such a one."""
    where, colon, path = text.partition(":")
    if not colon or not where or not path:
        raise Mistake(f"{text!r} names no object: write package.module:attribute")
    path, called = path.removesuffix("()"), path.endswith("()")
    try:
        value: Any = importlib.import_module(where)
    except Exception as error:
        raise Mistake(f"{where} cannot be imported: {_told(error)}") from error
    for name in path.split("."):
        if not hasattr(value, name):
            raise Mistake(f"{where}: {unknown_name('attribute', name, [n for n in dir(value) if n[0] != '_'][:20])}")
        value = getattr(value, name)
    if called:
        try:
            value = value()
        except Exception as error:
            raise Mistake(f"{text} raised {_told(error)}") from error
    if not fits(value):
        hint = "; with () it is called" if callable(value) else ""
        raise Mistake(f"{text} is a {type(value).__name__}, which cannot be used here{hint}")
    return value


def _is_call(value: Any) -> bool:
    return isinstance(value, (tuple, list))


def _told(error: Exception) -> str:
    where = raised_at(error)
    return f"{type(error).__name__}: {error}{f' ({where})' if where else ''}"
