"""The command `cadence`: which module serves which word, and what becomes of a user's mistake.

A command is a module of this package with

* ``HELP``, what it is for, in one sentence; ``EXAMPLES``, command lines that work, for the end of its help;
* ``configure(parser)``, which adds its arguments;
* ``run(arguments)``, which returns the exit code: 0, or 1 for a negative verdict.

A mistake of the user's (`Mistake`, any `CadenceError`, wrong arguments) is one line on stderr and the exit code 2.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from typing import NoReturn, Protocol, cast

from cadence_fx.cli.named import current_folder
from cadence_fx.cli.output import FAILED, OK, WRONG_USE, Mistake, aligned, print_error
from cadence_fx.errors import CadenceError, unknown_name

# In the order of the help; a module is imported when its command is asked for, and for the list of commands.
COMMANDS = {
    "plan": "cadence_fx.cli.plan",
    "infer": "cadence_fx.cli.infer",
    "doctor": "cadence_fx.cli.doctor",
    "explain": "cadence_fx.cli.explain",
}
_ABOUT = "Plan, infer and explain the exact capture of streaming models."
_INTERRUPTED = 130  # what a shell reports for Ctrl-C


class Command(Protocol):
    """A module of a command."""

    HELP: str
    EXAMPLES: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Does what was asked for; returns the exit code."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `Mistake`s."""

    def error(self, message: str) -> NoReturn:
        raise Mistake(f"{message} (see '{self.prog} --help')")


def command(name: str) -> Command:
    """The module that serves a command; `Mistake` for a word that is none."""
    if name not in COMMANDS:
        raise Mistake(unknown_name("command", name, list(COMMANDS)))
    return cast(Command, import_module(COMMANDS[name]))


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of one command."""
    module = command(name)
    parser = Parser(
        prog=f"cadence {name}",
        description=module.HELP,
        epilog=f"examples:\n{module.EXAMPLES.rstrip()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.configure(parser)
    return parser


def _overview() -> str:
    rows = [(name, command(name).HELP) for name in COMMANDS]
    lines = ["usage: cadence COMMAND ...", "", _ABOUT, "", "commands:", *aligned(rows), ""]
    return "\n".join([*lines, "cadence COMMAND --help has the arguments and examples of one."])


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return OK if words else WRONG_USE
    if words[0] == "--version":
        print(f"cadence-fx {metadata.version('cadence-fx')}")
        return OK
    name, *rest = words
    if name.startswith("-"):
        raise Mistake(f"{name} is not an option of cadence itself (see 'cadence --help')")
    asked, arguments = command(name), parser_of(name).parse_args(rest)
    with current_folder():
        try:
            return asked.run(arguments)
        except SystemExit as error:  # of the user's code: its verdict is none of ours
            raise Mistake(f"the code that was called ends the process: SystemExit: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, without the program's name (`sys.argv` by default); returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names in files may be in letters that the terminal does not have
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _dispatch(sys.argv[1:] if argv is None else argv)
        if sys.stdout is not None:  # it may be closed
            sys.stdout.flush()
    except (Mistake, CadenceError) as error:
        print_error(str(error))
        return WRONG_USE
    except SystemExit as done:  # argparse has printed a help
        return done.code if isinstance(done.code, int) else OK
    except KeyboardInterrupt:
        return _INTERRUPTED
    except OSError as error:  # what a command reads and writes itself is a `Mistake`; this is the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # whoever reads it has seen enough
            return FAILED
        print_error(f"the output cannot be written: {error.strerror}")
        return WRONG_USE
    return code
