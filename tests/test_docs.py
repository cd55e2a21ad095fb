"""The pages in docs/: examples run, links lead somewhere, and errors.md knows every class and every counted reason."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cadence_fx import errors
from cadence_fx.errors import CadenceError
from cadence_fx.hazard import KINDS
from cadence_fx.passes import pipeline
from cadence_fx.remedies import clause_of, remedy_for

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
ERRORS = (ROOT / "docs/errors.md").read_text()
SOURCES = [path for folder in ("cadence_fx", "passes", "adapters") for path in sorted((ROOT / folder).glob("*.py"))]
WORD = re.compile(r"[a-z]+(_[a-z]+)*")

# Reasons that are not spelled where they are counted: the module and the expression that brings them. They are read
# off `compare` in signature.py, `make_room` in storage.py and the constructor of NotCapturable.
RELAYED = {
    ("graph", "error.reason"),
    ("graph", "*found"),
    ("verify_capturable", "reason"),
    ("capture", "*full"),
    ("foresee", "*problem"),
    ("foresee", "error.reason"),
    ("explain", "error.reason"),
    ("table", "*problem"),
}
NEVER_COUNTED = {"watched"}  # calls that warm-up makes to look at; `_miss` skips them

needs_entry_point = pytest.mark.skipif(
    "cadence" not in torch.compiler.list_backends(), reason="the backend is named, which takes an installed entry point"
)


def examples(page: str) -> str:
    """The python blocks of a page as one module, each at its own line, so that tracebacks name lines of the page."""
    text = (ROOT / "docs" / page).read_text()
    module = ""
    for block in re.finditer(r"```python\n(.+?)```", text, re.DOTALL):
        start = text.count("\n", 0, block.start(1))
        module += "\n" * (start - module.count("\n")) + block[1]
    return module


@needs_entry_point
@pytest.mark.parametrize(
    "page", ["adapters", "contract", "infer", "exactness", "passes", "debugging", "doctor", "plan"]
)
def test_the_examples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = examples(f"{page}.md")
    assert code
    monkeypatch.setattr(pipeline, "_registered", [])  # passes.md registers a pass
    (tmp_path / f"docs_{page}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        importlib.import_module(f"docs_{page}")  # imported, since Dynamo imports the modules whose functions it inlines
    finally:
        sys.modules.pop(f"docs_{page}", None)


@pytest.mark.parametrize("page", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


def called(node: ast.AST) -> str:
    """The name of what a call calls: ``Miss`` for ``Miss(…)``, ``.miss`` for ``self.ledger.miss(…)``."""
    if not isinstance(node, ast.Call) or not node.args:
        return ""
    if isinstance(node.func, ast.Attribute):
        return f".{node.func.attr}"
    return node.func.id if isinstance(node.func, ast.Name) else ""


def counted(tree: ast.AST, module: str) -> Iterator[str]:
    """Reasons in calls that make or count one. Those taken from elsewhere must be known to this test."""
    for node in ast.walk(tree):
        if called(node) not in {"Miss", "NotCapturable", ".miss", ".refuse", ".invalidate"}:
            continue
        assert isinstance(node, ast.Call)
        first = node.args[0]
        if isinstance(first, ast.Constant):
            yield str(first.value)
        elif ast.unparse(first) != "miss.reason":  # the ledger being told of a Miss, which was read where it was made
            assert (module, ast.unparse(first)) in RELAYED, f"{module}: where does {ast.unparse(first)!r} come from?"


def returned(function: ast.AST) -> Iterator[str]:
    """Text constants that a function returns: alone, as the first of a pair, or on either side of a condition."""
    pending = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
    while pending:
        value = pending.pop()
        if isinstance(value, ast.IfExp):
            pending += [value.body, value.orelse]
        elif isinstance(value, ast.Tuple):
            pending.append(value.elts[0])
        elif isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value


def relayed(tree: ast.AST, module: str) -> Iterator[str]:
    """Reasons that come through the expressions of RELAYED."""
    source = {"signature": "compare", "verify_capturable": "_refusal", "storage": "blocked"}.get(module)
    if source is None:
        return
    (function,) = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == source]
    yield from returned(function)
    for node in ast.walk(tree):  # the parts of a key, each a reason when it differs
        if isinstance(node, ast.Assign) and "PARTS" in ast.unparse(node.targets[0]):
            for names in ast.literal_eval(node.value).values():
                yield from names


def reasons_in_code() -> set[str]:
    found: set[str] = set()
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        found |= {*counted(tree, path.stem), *relayed(tree, path.stem)}
    return found - NEVER_COUNTED


def section(title: str) -> set[str]:
    """The first names in the rows of the tables under a heading of errors.md."""
    body = ERRORS.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"^\| `(\w+)`", body, re.MULTILINE))


def test_every_error_class_is_documented_with_its_reason() -> None:
    classes = {v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, CadenceError)}
    assert section("Errors") == {kind.__name__ for kind in classes}
    for kind in classes:
        assert re.search(rf"^\| `{kind.__name__}` \| `{kind.reason}` \|", ERRORS, re.MULTILINE), kind.reason


def test_every_counted_reason_is_documented() -> None:
    reasons = reasons_in_code()
    assert {"undeclared_size", "host_read", "mode", "alignment", "address"} <= reasons  # the search itself works
    assert all(WORD.fullmatch(reason) for reason in reasons)
    assert section("Reasons") == reasons


def test_remedies_are_those_of_the_page() -> None:
    """Of a reason with several rows, the first is the one of a call."""
    told: dict[str, str] = {}
    for reason, remedy in re.findall(
        r"^\| `(\w+)` \| .+ \| (.+) \|$", ERRORS.split("\n## Reasons\n", 1)[1], re.MULTILINE
    ):
        told.setdefault(reason, re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", remedy).replace("`", ""))
    assert {reason: remedy_for(reason) for reason in told} == told
    assert all(clause_of(reason) for reason in told)


def test_every_kind_of_hazard_is_documented() -> None:
    rows = re.findall(
        r"^\| (`\w+`(?:, `\w+`)*) \| .+ \| (?:yes|no|with)", (ROOT / "docs/doctor.md").read_text(), re.MULTILINE
    )
    assert sorted(re.findall(r"\w+", " ".join(rows))) == sorted(KINDS)
