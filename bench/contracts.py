"""The tables of docs/adapters.md: what each family's adapter declares at released sizes, and how long the adapters are.

    python -m bench.contracts            # prints the tables
    python -m bench.contracts --write    # puts them into docs/adapters.md

Contracts come from the adapters: from numbers alone, or from the vendor's modules without memory behind them. Those of
PersonaPlex need a checkout (CADENCE_PERSONAPLEX); without one its rows stay as they are on the page.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

import torch

from bench import vendor
from bench.vendor import personaplex
from cadence_fx import adapters
from cadence_fx.adapters import personaplex as persona_codec
from cadence_fx.adapters import personaplex_lm as persona_dialogue
from cadence_fx.contract import Contract, Region
from cadence_fx.errors import CatalogTooWide

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "adapters.md"
BEGIN, END = "<!-- made by python -m bench.contracts --write -->", "<!-- end -->"


def tables(page: str) -> str:
    """Both tables, as markdown; what cannot be made here is taken from the page."""
    return "\n\n".join((contracts_table(adapters.families(), page), adapters_table(adapters.families())))


def contracts_table(families: Iterable[adapters.Family], page: str) -> str:
    """A row for each callable of each family: its clocks, its states, and the classes that follow."""
    for name in ("models.loaders", "models.lm"):
        vendor.load(name, vendor.MOSHI)  # so that it can be imported by its own name
    rows: list[tuple[str, ...]] = [("family", "callable", "clocks", "states", "classes", "how they come about")]
    for family in families:
        if family.name in _CHECKOUT and not vendor.available(vendor.PERSONAPLEX):
            rows += _rows_on(page, family.name)
            continue
        for name, contract in _CHECKOUT.get(family.name, family.contracts)().items():
            rows.append((family.name, f"`{name}`", _clocks(contract), _states(contract), *_classes(contract)))
    return _markdown(rows)


def _persona_codec() -> dict[str, Contract]:
    with torch.device("meta"):
        mimi = personaplex.build_mimi(device="meta")
    steps = persona_codec.EncodeStep, persona_codec.DecodeStep
    return {kind.__name__: kind(mimi, 1, mimi.num_codebooks).contract() for kind in steps}


def _persona_dialogue() -> dict[str, Contract]:
    kind = persona_dialogue.DialogueStep
    with torch.device("meta"):
        return {kind.__name__: kind(personaplex.build_lm_gen(device="meta"), 1).contract()}


# Families whose modules are in a checkout alone.
_CHECKOUT = {"personaplex-mimi": _persona_codec, "personaplex": _persona_dialogue}


def _rows_on(page: str, family: str) -> list[tuple[str, ...]]:
    """The contracts of a family as the page has them."""
    return [tuple(row[2:-2].split(" | ")) for row in page.splitlines() if row.startswith(f"| {family} | `")]


def adapters_table(families: Iterable[adapters.Family]) -> str:
    """A row for each family: the releases it is tested with, and the executable lines of its adapter."""
    rows = [("family", "models", "tested releases", "adapter", "shared with other families")]
    for family in families:
        releases = ", ".join(f"`{release}`" for release in family.releases)
        rows.append((family.name, family.models, releases, _lines(family.modules), _lines(family.shared)))
    return _markdown(rows)


def executable_lines(source: str) -> int:
    """Lines of a module on which a statement begins; docstrings are none."""
    statements = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt))
    return len({node.lineno for node in statements if not _is_text(node)})


def lines_of(module: str) -> int:
    """Executable lines of a module in adapters/."""
    return executable_lines((ROOT / "adapters" / f"{module}.py").read_text())


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _lines(modules: Sequence[str]) -> str:
    counts = [lines_of(module) for module in modules]
    each = ", ".join(f"`{module}` {count}" for module, count in zip(modules, counts, strict=True))
    return f"{sum(counts)} lines: {each}" if counts else "none"


def _clocks(contract: Contract) -> str:
    said = []
    for clock in contract.clocks:
        ticks = contract.stride_of(clock.name)
        said.append(f"{clock.name} {'x' if clock.is_periodic else '+'}{ticks}")
    return ", ".join(said)


def _states(contract: Contract) -> str:
    """What moves by name, and how many do not."""
    carried = [region for region in contract.regions if region.persistent]
    moving = [_extent(region) for region in carried if region.start != region.bound]
    rings = [region for region in carried if type(region.retention).__name__ == "Ring"]
    said = [*moving, *dict.fromkeys(f"ring of {region.bound:,}" for region in rings)]
    if still := len(carried) - len(moving) - len(rings):
        said.append(f"{still} that keep{'s' * (still == 1)} {'its' if still == 1 else 'their'} extent")
    scratch = len(contract.regions) - len(carried)
    return ", ".join([*said, *([f"{scratch} workspaces"] if scratch else [])]) or "none"


def _extent(region: Region) -> str:
    growth = f" x {region.growth}" if region.growth != Fraction(1) else ""
    return f"{region.name} {region.start:,} to {region.bound:,}{growth}"


def _classes(contract: Contract) -> tuple[str, str]:
    width = contract.width()
    try:
        return f"{len(contract.catalog())}", width.arithmetic
    except CatalogTooWide as error:
        return "refused", f"{error.arithmetic}, and {error.limit} are allowed"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def written(page: str, new: str) -> str:
    """The page with other tables between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the page has no {BEGIN} followed by {END}")
    return f"{before}{BEGIN}\n\n{new}\n\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the tables into docs/adapters.md")
    options = parser.parse_args(arguments)
    if not vendor.available(vendor.MOSHI):
        print("the vendor package is not installed: pip install --no-deps moshi==0.2.13", file=sys.stderr)
        return 2
    page = PAGE.read_text()
    if options.write:
        PAGE.write_text(written(page, tables(page)))
    else:
        print(tables(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
