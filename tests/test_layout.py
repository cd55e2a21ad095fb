"""The tree keeps the rules of docs/design.md: layers, one home for private torch names, and no model in the core."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "cadence_fx": "cadence_fx",
    "cadence_fx.cli": "cadence_fx/cli",
    "cadence_fx.passes": "passes",
    "cadence_fx.adapters": "adapters",
}
MODELS = re.compile(r"(?<![a-z])(moshi|mini.?cpm|token2wav|lychee|personaplex|freeze.?omni|hift|silero)", re.IGNORECASE)


def sources() -> dict[str, Path]:
    """Every module of the package by its import name. The links inside cadence_fx/ are not followed."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).glob("*.py")):
            found[package if path.stem == "__init__" else f"{package}.{path.stem}"] = path
    return found


def documented_layers() -> dict[str, int]:
    """Layer of each module, and of the sub-packages, read from the table in docs/design.md."""
    layers = {}
    for row in re.findall(r"^\| (\d+) \| (.+?) \|", (ROOT / "docs/design.md").read_text(), re.MULTILINE):
        for name in re.findall(r"`([a-z_]+)/?`", row[1]):
            layers[f"cadence_fx.{name}"] = int(row[0])
    return layers


def imported_modules(tree: ast.AST, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each module of the package that the code imports, wherever in the file it does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # `from cadence_fx import errors` imports a module; in `from cadence_fx.errors import X`, X is no module.
            children = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [child if child in modules else node.module for child in children]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "cadence_fx":
                yield node.lineno, name


def module_layers() -> dict[str, int]:
    """Layer of every module that has one.

    A module of a sub-package has the sub-package's layer, the package itself tops all, and a private helper that the
    table does not list (`_region`) belongs to the lowest layer that imports it.
    """
    table = documented_layers()
    layers = {"cadence_fx": max(table.values()) + 1}
    for module in SOURCES:
        top = ".".join(module.split(".")[:2])
        if top in table:
            layers[module] = table[top]
    imports = {module: {name for _, name in IMPORTS[module]} for module in SOURCES}
    for _ in SOURCES:  # helpers of helpers settle after at most this many rounds
        for helper in SOURCES:
            importers = [layers[module] for module in layers if helper in imports[module]]
            if helper.split(".")[-1].startswith("_") and helper not in table and importers:
                layers[helper] = min(importers)
    return layers


def torch_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of each use of torch, with local aliases resolved: `fx.Node` gives `torch.fx.Node`."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                aliases[alias.asname or top] = alias.name if alias.asname else top
                if top == "torch":
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node.lineno, f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        parts: list[str] = []
        base: ast.AST = node
        while isinstance(base, ast.Attribute):
            parts.append(base.attr)
            base = base.value
        if parts and isinstance(base, ast.Name) and aliases.get(base.id, "").split(".")[0] == "torch":
            yield base.lineno, ".".join([aliases[base.id], *reversed(parts)])


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


SOURCES = sources()
TREES = {module: ast.parse(path.read_text()) for module, path in SOURCES.items()}
IMPORTS = {module: list(imported_modules(tree, set(SOURCES))) for module, tree in TREES.items()}
EACH_MODULE = pytest.mark.parametrize("module", SOURCES)


def each_module_but(*exempt: str) -> pytest.MarkDecorator:
    """All modules except those whose name begins with one of `exempt`."""
    return pytest.mark.parametrize("module", [name for name in SOURCES if not name.startswith(exempt)])


@EACH_MODULE
def test_imports_point_down(module: str) -> None:
    layers = module_layers()
    assert module in layers, f"{module} has no layer in docs/design.md"
    wrong = [f"line {line}: {name}" for line, name in IMPORTS[module] if layers.get(name, 99) > layers[module]]
    assert not wrong, f"{module} is of layer {layers[module]}"


def test_documented_modules_exist() -> None:
    assert not [name for name in documented_layers() if name not in SOURCES]


@EACH_MODULE
def test_sub_packages_do_not_know_each_other(module: str) -> None:
    for this, other in (("passes", "adapters"), ("adapters", "passes")):
        if module.startswith(f"cadence_fx.{this}"):
            assert not [name for _, name in IMPORTS[module] if name.startswith(f"cadence_fx.{other}")]


@each_module_but("cadence_fx._torch")
def test_private_torch_names_live_in_one_module(module: str) -> None:
    names = torch_names(TREES[module])
    assert not [f"line {line}: {name}" for line, name in names if is_private(name)]


@each_module_but("cadence_fx.adapters")
def test_only_adapters_name_models(module: str) -> None:
    lines = SOURCES[module].read_text().splitlines()
    assert not [f"line {number}: {line}" for number, line in enumerate(lines, 1) if MODELS.search(line)]


@each_module_but("cadence_fx._torch", "cadence_fx.passes")
def test_the_core_names_no_operator(module: str) -> None:
    names = torch_names(TREES[module])
    assert not [f"line {line}: {name}" for line, name in names if name.startswith("torch.ops.")]


def test_declared_packages_are_the_folders() -> None:
    """A sub-folder with code that is not declared works in an editable install and is missing from the wheel."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["package-dir"] == FOLDERS
    assert sorted(settings["packages"]) == sorted(FOLDERS)
    for folder in FOLDERS.values():
        nested = [path for path in (ROOT / folder).iterdir() if path.is_dir() and any(path.glob("*.py"))]
        known = {path for path in nested if path.is_symlink() or str(path.relative_to(ROOT)) in FOLDERS.values()}
        assert not [path.name for path in nested if path not in known], "declare the sub-package in pyproject.toml"


def test_links_show_type_checkers_the_same_tree() -> None:
    for name in ("passes", "adapters"):
        assert (ROOT / "cadence_fx" / name).resolve() == ROOT / name
    assert (ROOT / "cadence_fx/py.typed").is_file()


@pytest.mark.parametrize(
    "code, expected",
    [
        ("import torch\ntorch._C.f()", "torch._C.f"),
        ("import torch as t\nt.fx._x", "torch.fx._x"),
        ("from torch import _dynamo", "torch._dynamo"),
        ("from torch.utils._pytree import tree_map", "torch.utils._pytree.tree_map"),
        ("import torch._inductor.config", "torch._inductor.config"),
        ("from torch import ops as o\no.aten.cat", "torch.ops.aten.cat"),
    ],
)
def test_torch_names_sees_through_aliases(code: str, expected: str) -> None:
    assert expected in [name for _, name in torch_names(ast.parse(code))]


def test_words_inside_words_are_no_models() -> None:
    assert not MODELS.search("an overlapping shift")
    assert MODELS.search("HiFTGenerator") and MODELS.search("MiniCPM-o") and MODELS.search("freeze_omni")
