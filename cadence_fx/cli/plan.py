"""`cadence plan`: what a contract reaches, before anything is run."""

from __future__ import annotations

import argparse

from cadence_fx.cli.output import FAILED, OK
from cadence_fx.serialize import load

HELP = "What can be captured, in how many classes and bytes, from a contract file; nothing is run."
EXAMPLES = """
  cadence plan decoder.toml
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("contract", help="a contract, .toml or .json")


def run(arguments: argparse.Namespace) -> int:
    """Prints the contract; 1 when it reaches more classes than it allows."""
    contract = load(arguments.contract)
    print(contract)
    return OK if contract.width().classes <= contract.max_classes else FAILED
