"""Whatever Python code rebinds is named, and put back without changing what is what."""

import dataclasses
import functools
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cadence_fx.python_state import PythonState, held

CALLS = 0


class Settings:
    made = 0

    def grow(self) -> None:
        self.steps += 1

    def __init__(self) -> None:
        self.steps = 4
        self.seen: list[Any] = []


@dataclasses.dataclass(slots=True, frozen=True)
class Slots:
    n: int = 0
    seen: list[int] = dataclasses.field(default_factory=list)


class Host(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.ones(3))
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.count = 0
        self.scale = float("nan")
        self.log: list[Any] = [1, [2, 3]]
        self.tables: dict[Any, Any] = {"a": {"b": [1]}}
        self.names = {"x"}
        self.recent = deque([1, 2], maxlen=2)
        self.settings = Settings()
        self.space = SimpleNamespace(depth=1)
        self.slots = Slots()
        self.table = np.zeros((2, 3)).T
        self.act = Settings().grow
        self.raw = bytearray(b"ab")


def bump(module: Any) -> None:
    module.count += 1


CHANGES: dict[str, Callable[[Any], object]] = {
    "self.count": bump,
    "self.fresh": lambda m: setattr(m, "fresh", torch.ones(1)),
    "self.log[2]": lambda m: m.log.append(4),
    "self.log[1][0]": lambda m: m.log[1].__setitem__(0, 9),
    "self.tables['a']['b'][1]": lambda m: m.tables["a"]["b"].append(2),
    "self.tables['c']": lambda m: m.tables.update(c=1),
    "self.names[...]": lambda m: m.names.add("y"),
    "self.recent[0]": lambda m: m.recent.append(3),
    "self.settings.steps": lambda m: setattr(m.settings, "steps", 5),
    "self.settings.seen[0]": lambda m: m.settings.seen.append(1),
    "self.space.depth": lambda m: setattr(m.space, "depth", 2),
    "self.window": lambda m: setattr(m, "window", torch.zeros(3)),
    "self.pad": lambda m: m.register_buffer("pad", torch.zeros(3)),
    "self.layers.1.bias": lambda m: m.layers[1].register_parameter("bias", None),
    "self.layers.0.seen": lambda m: setattr(m.layers[0], "seen", 1),
    "self.slots.n": lambda m: object.__setattr__(m.slots, "n", 1),
    "self.slots.seen[0]": lambda m: m.slots.seen.append(1),
    "the contents of self.table": lambda m: m.table.__setitem__((0, 1), 1.0),
    "self.act.steps": lambda m: m.act(),
    "self.raw[1]": lambda m: m.raw.__setitem__(1, 0),
    "Settings.made": lambda m: setattr(Settings, "made", 1),
    "the memory of self.layers.1.bias": lambda m: setattr(m.layers[1].bias, "data", torch.zeros(2)),
    "self.extra": lambda m: m.add_module("extra", nn.ReLU()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_and_put_back(name: str) -> None:
    module = Host()
    state = PythonState(module)
    assert state.changes() == []
    log, settings, keys = module.log, module.settings, list(vars(module))
    CHANGES[name](module)
    assert name in state.changes()
    state.put_back()
    assert state.changes() == []
    assert module.log is log and module.settings is settings and list(vars(module)) == keys
    assert not hasattr(module, "fresh") and module.log == [1, [2, 3]] and module.recent == deque([1, 2])


def test_the_order_of_a_dictionary_is_put_back() -> None:
    module: Any = Host()
    module.order = OrderedDict(a=1, b=2)
    state = PythonState(module)
    del module.order["a"]
    state.put_back()
    assert list(module.order) == ["a", "b"]


def test_the_class_of_a_module() -> None:
    module = Host()
    state = PythonState(module)
    module.layers[0].__class__ = nn.Identity
    assert state.changes() == ["the class of self.layers.0"]
    state.put_back()
    assert type(module.layers[0]) is nn.Linear


def counter() -> Callable[[], int]:
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return count

    return step


def test_a_variable_of_an_enclosing_function() -> None:
    step = counter()
    state = PythonState(step)
    assert step() == 1
    assert state.changes() == ["count"]
    state.put_back()
    assert step() == 1


def counts_globally() -> None:
    global CALLS
    CALLS += 1


def test_a_global_that_the_function_names() -> None:
    state = PythonState(counts_globally)
    counts_globally()
    assert state.changes() == ["CALLS"]
    state.put_back()
    assert CALLS == 0 and state.changes() == []


def remembers(x: int, seen: list[int] = []) -> None:  # noqa: B006 - this is what is tested
    seen.append(x)


@pytest.mark.parametrize("function", [remembers, functools.partial(remembers)], ids=["function", "partial"])
def test_a_default_that_is_a_list(function: Callable[[int], None]) -> None:
    state = PythonState(function)
    function(1)
    assert state.changes() == ["self's defaults[0][0][0]"]
    state.put_back()
    assert remembers.__defaults__ == ([],)


def test_the_object_that_a_method_is_bound_to() -> None:
    class Bound:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def call(self) -> None:
            self.seen.append(1)

    bound = Bound()
    state = PythonState(bound.call)
    bound.call()
    assert state.changes() == ["self.seen[0]"]
    state.put_back()
    assert bound.seen == []


def test_what_is_found_on_the_way() -> None:
    module: Any = Host()
    module.g = torch.Generator()
    module.dice = random.Random(1)
    module.settings.seen.append(torch.Generator())
    state = PythonState(module)
    assert {type(m) for m in state.modules} == {Host, nn.ModuleList, nn.Linear}
    assert any(tensor is module.window for tensor in state.tensors)
    assert [place[2] for place in state.generators] == ["self.settings.seen[0]", "self.g"]
    assert [held(place) for place in state.generators] == [module.settings.seen[0], module.g]
    assert [source.name for source in state.dice()] == ["self.settings.seen[0]", "self.g", "self.dice"]
    del module.g
    assert held(state.generators[1]) is None


def test_cycles_and_foreign_objects_end_the_walk() -> None:
    module: Any = Host()
    object.__setattr__(module, "parent", module)
    module.tables["self"] = module.tables
    module.thread = random
    module.kind = Settings
    assert PythonState(module).changes() == []


def test_a_hook_that_counts_and_a_numpy_bit_generator() -> None:
    module: Any = Host()
    hook = counter()
    module.layers[0].register_forward_hook(lambda *_: hook() * torch.ones(2))
    module.bits = np.random.PCG64(1)
    state = PythonState(module)
    module.layers[0](torch.ones(2))
    assert state.changes() == ["count"]
    assert [source.name for source in state.dice()] == ["self.bits"]
    state.put_back()
    assert hook() == 1


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    module: Any = Host()
    module.numbers = itertools.count()
    module.settings.seen.append(x for x in "ab")
    with open(tmp_path / "log", "w") as file:
        module.log.append(file)
        found = PythonState(module).opaque
    assert sorted(found) == [
        "self.log[2] (TextIOWrapper)",
        "self.numbers (count)",
        "self.settings.seen[0] (generator)",
    ]


class Named:
    CALLS = 7

    def __call__(self) -> int:
        return self.CALLS


def test_an_attribute_is_no_global_of_the_same_name() -> None:
    state = PythonState(Named())
    counts_globally()
    assert state.changes() == []
    globals().update(CALLS=0)


@torch.no_grad()
def counts_without_grad() -> None:
    counts_globally()


def test_a_global_behind_a_decorator_and_another_function() -> None:
    state = PythonState(counts_without_grad)
    counts_without_grad()
    assert state.changes() == ["CALLS"]
    state.put_back()
    assert CALLS == 0
