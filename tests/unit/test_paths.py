"""Accessors: parsing, spelling, matching, and following them through containers and modules."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cadence_fx import paths
from cadence_fx.errors import ContractError

Pair = namedtuple("Pair", "k v")


@dataclass
class Box:
    left: Any
    right: Any


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("cache", ("cache",)),
        ("cache[0]['k']", ("cache", 0, "k")),
        ("layers.*.hist", ("layers", "*", "hist")),
        ("layers.0.hist", ("layers", 0, "hist")),
        ("caches[*].k", ("caches", "*", "k")),
        ("1[*]", (1, "*")),
        ("state['a b'][2]", ("state", "a b", 2)),
        ("[1]['k']", (1, "k")),
    ],
)
def test_parse(text: str, path: paths.Path) -> None:
    assert paths.parse(text) == path


@pytest.mark.parametrize("text", ["", "a b", "a[b]", "a()", "a[0", "a['k]", "import os", "a[1.5]", "a-b"])
def test_what_is_not_an_accessor(text: str) -> None:
    with pytest.raises(ContractError, match="not an accessor"):
        paths.parse(text)


steps = st.lists(st.one_of(st.integers(0, 99), st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)), max_size=4)


@given(st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True), steps)
def test_spelled_paths_parse_back(name: str, rest: list[Any]) -> None:
    path = (name, *rest)
    try:
        assert paths.parse(paths.spell(path)) == path
    except ContractError:
        assert any(step in ("if", "in", "is", "or", "as", "and", "not", "for", "def", "del", "try") for step in path)


@pytest.mark.parametrize(
    ("source", "root", "path", "query", "index"),
    [
        ("L['x']", "argument", ("x",), "value", 0),
        ("L['st']['k'][1]", "argument", ("st", "k", 1), "value", 0),
        ("L['self']._modules['lin']._parameters['weight']", "module", ("lin", "weight"), "value", 0),
        ("L['self'].__dict__['_buffers']['ring']", "module", ("ring",), "value", 0),
        ("L['self']._modules['layers']._modules['0'].hist", "module", ("layers", 0, "hist"), "value", 0),
        ("L['cache'].size()[2]", "argument", ("cache",), "size", 2),
        ("L['self'].hist.stride()[1]", "module", ("hist",), "stride", 1),
        ("G['table']", "other", (), "value", 0),
        ("list(dict.keys(L['d']))[0]", "other", (), "value", 0),
        (None, "other", (), "value", 0),
    ],
)
def test_origin_of_a_graph_input(source: str | None, root: str, path: paths.Path, query: str, index: int) -> None:
    found = paths.origin(source, "self")
    assert (found.root, found.path) == (root, path)
    if root != "other":
        assert (found.query, found.index) == (query, index)


def test_get_and_expand_through_every_container() -> None:
    module = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    root = {"a": [1, (2, Pair(3, 4))], "b": Box(5, [6, 7]), "m": module}
    assert paths.get(root, ("a", 1, 1, "v")) == 4
    assert paths.get(root, ("b", "right", 1)) == 7
    assert paths.get(root, ("m", 1, "weight")) is module[1].weight
    assert paths.expand(root, ("a", 1, 1, "*")) == [("a", 1, 1, 0), ("a", 1, 1, 1)]
    assert paths.expand(root, ("m", "*", "bias")) == [("m", 0, "bias"), ("m", 1, "bias")]
    assert paths.expand(root, ("nothing", "*")) == []
    with pytest.raises(LookupError, match="a"):
        paths.get(root, ("a", 9))


def test_put_copies_containers_and_changes_modules_in_place() -> None:
    root = {"a": [1, (2, Pair(3, 4))], "b": Box(5, 6)}
    changed = paths.put(root, ("a", 1, 1, "v"), "new")
    assert changed["a"][1][1] == Pair(3, "new") and root["a"][1][1] == Pair(3, 4)  # type: ignore[index]
    assert paths.put(root, ("b", "left"), 0)["b"] == Box(0, 6) and root["b"] == Box(5, 6)
    module = torch.nn.Module()
    module.register_buffer("state", torch.zeros(2))
    assert paths.put(module, ("state",), torch.ones(2)) is module
    assert module.state.sum() == 2


@dataclass(frozen=True)
class Frozen:
    inner: Any


def test_put_on_a_module_sets_attributes_of_the_objects_that_it_keeps() -> None:
    box, frozen = Box(1, 2), Frozen(3)
    module: Any = torch.nn.Module()
    box.later = 4  # type: ignore[attr-defined]  # no field, so not for the constructor
    module.box, module.frozen = box, frozen
    paths.put(module, ("box", "left"), "new", attribute=True)
    paths.put(module, ("box", "later"), "set", attribute=True)
    paths.put(module, ("frozen", "inner"), "other", attribute=True)
    assert module.box is box and (box.left, box.later) == ("new", "set")  # type: ignore[attr-defined]
    assert module.frozen == Frozen("other") and frozen == Frozen(3)


@given(steps)
def test_a_star_matches_one_step_and_nothing_else(path: list[Any]) -> None:
    assert paths.matches(tuple(path), tuple(path))
    assert paths.matches((paths.ANY,) * len(path), tuple(path))
    assert not paths.matches((*path, paths.ANY), tuple(path))
