"""Random modules that mix draws, writes, host reads, views and state of Python: eager's bytes, or a counted refusal."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import cadence_fx
from cadence_fx.generators import Generators, all_sources, explicit, same_state
from cadence_fx.replay import ExactShapeReplay
from tests.harness import assert_same

Step = tuple[str, int, int]

PURE = ("add", "scale", "slice", "turn", "cat", "clone", "view")
DRAWS = ("rand", "dead_draw", "dropout", "bernoulli", "uniform_")
WRITES = ("write_argument", "write_buffer", "write_value", "write_memory")
PYTHON = ("lazy_table", "lazy_buffer", "count", "log")
HOST = ("read", "branch", "python_random")
GENERATORS = ("own_generator", "given_generator")


class Module(nn.Module):
    """Runs a list of steps on its argument; every step adds a value, and the last ones are returned."""

    buffer: Tensor

    def __init__(self, steps: tuple[Step, ...], returned: int) -> None:
        super().__init__()
        self.steps, self.returned = steps, returned
        self.register_buffer("buffer", torch.zeros(4))
        self.memory = [torch.ones(4)]
        self.table: Tensor | None = None
        self.count = 0
        self.log: list[int] = []
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor, given: torch.Generator | None = None) -> tuple[Tensor, ...]:
        values = [x]
        for name, i, j in self.steps:
            values.append(self.step(name, values[i % len(values)], values[j % len(values)], x, given))
        return tuple(values[-self.returned :])

    def step(self, name: str, v: Tensor, w: Tensor, x: Tensor, given: torch.Generator | None) -> Tensor:
        step: dict[str, Callable[[], Tensor]] = {
            "add": lambda: v + w.sum(),
            "scale": lambda: v * 0.5,
            "slice": lambda: v[1:] if v.shape[0] > 1 else v,
            "turn": lambda: v.transpose(0, 1).contiguous().transpose(0, 1),
            "cat": lambda: torch.cat([v, w])[: x.shape[0]],
            "clone": lambda: v.clone(),
            "view": lambda: v.unsqueeze(0).squeeze(0),
            "rand": lambda: v + torch.rand_like(v),
            "dead_draw": lambda: (torch.rand(3), v)[1],
            "dropout": lambda: F.dropout(v, 0.5, True),
            "bernoulli": lambda: v * torch.bernoulli(torch.full_like(v, 0.5)),
            "uniform_": lambda: v + torch.empty_like(v).uniform_(),
            "write_argument": lambda: x.mul_(1.25),
            "write_buffer": lambda: v + self.buffer.add_(v.sum(0)),
            "write_value": lambda: v.clone().add_(w.mean()),
            "write_memory": lambda: v + self.memory[0].mul_(1.5),
            "lazy_table": lambda: v + self.lazily(),
            "lazy_buffer": lambda: v + self.registered(),
            "count": lambda: v * self.counted(),
            "log": lambda: self.logged(v),
            "read": lambda: v * float(w.sum()),
            "branch": lambda: v + 1 if bool(w.sum() > 0) else v - 1,
            "python_random": lambda: v * random.random(),
            "own_generator": lambda: v + torch.rand(v.shape, generator=self.own),
            "given_generator": lambda: v + torch.rand(v.shape, generator=given),
        }
        return step[name]()

    def lazily(self) -> Tensor:
        if self.table is None:
            self.table = torch.rand(4)
        return self.table

    def registered(self) -> Tensor:
        if "built" not in self._buffers:
            self.register_buffer("built", torch.arange(4.0))
        return self._buffers["built"]  # type: ignore[return-value]

    def logged(self, v: Tensor) -> Tensor:
        self.log.append(1)
        return v

    def counted(self) -> int:
        self.count += 1
        return self.count


@dataclass(frozen=True)
class Case:
    steps: tuple[Step, ...]
    returned: int
    sizes: tuple[int, ...]

    def module(self) -> Module:
        return Module(self.steps, self.returned)


def cases(*kinds: tuple[str, ...]) -> st.SearchStrategy[Case]:
    names = st.sampled_from([name for kind in kinds for name in kind])
    numbers = st.integers(0, 7)
    return st.builds(
        Case,
        st.lists(st.tuples(names, numbers, numbers), min_size=1, max_size=7).map(tuple),
        st.integers(1, 3),
        st.lists(st.integers(1, 3), min_size=4, max_size=7).map(tuple),
    )


def contents(module: Module) -> dict[str, Any]:
    tensors = {**dict(module.named_buffers()), "memory": module.memory[0], "table": module.table}
    found = {name: None if t is None else t.view(torch.int32).tolist() for name, t in tensors.items()}
    return found | {"count": module.count, "log": list(module.log)}


def compare(case: Case, step: Callable[..., Any], live: Module, eager: Module, given: bool) -> None:
    """Feed both the same calls from the same state of every generator; look at everything after each."""
    mine, theirs = torch.Generator().manual_seed(9), torch.Generator().manual_seed(9)
    shared = Generators(all_sources())
    for number, size in enumerate(case.sizes):
        x = torch.randn(size, 4, generator=torch.Generator().manual_seed(number))
        twin = x.clone()
        shared = Generators(all_sources())
        expected = eager(twin, theirs) if given else eager(twin)
        after = shared.read()
        shared.restore()
        found = step(x, mine) if given else step(x)
        for i, (a, e) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, e, f"call {number}, output {i}")
        assert_same(x, twin, f"call {number}, the argument")
        assert all(map(same_state, shared.read(), after)), f"call {number}: a generator is not as eager leaves it"
        assert contents(live) == contents(eager), f"call {number}"
        own = Generators(explicit([live.own, eager.own, mine, theirs])).read()
        assert same_state(own[0], own[1]) and same_state(own[2], own[3])


FEW = settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@FEW
@given(case=cases(PURE, DRAWS, WRITES, PYTHON, HOST, GENERATORS))
def test_plain_callables(case: Case) -> None:
    live, eager = case.module(), case.module()
    replay = ExactShapeReplay(live)
    with torch.no_grad():
        compare(case, replay, live, eager, given=True)
    report = cadence_fx.report(replay)
    assert report["replays"] + sum(report["misses"].values()) == len(case.sizes)
    names = {name for name, _, _ in case.steps}
    assert "python_random" not in names or not report["classes"]
    assert not names & {"count", "log"} or not report["classes"]
    assert names - {*PURE, *DRAWS, *GENERATORS, "write_value"} or not report["misses"]


@settings(FEW, max_examples=12)
@given(case=cases(PURE, DRAWS, ("write_value", "write_buffer")))
def test_compiled_callables(case: Case) -> None:
    """Under a contract that declares the size of the argument and no state; undeclared writes are refused."""
    torch.compiler.reset()
    live, eager = case.module(), case.module()
    contract = cadence_fx.Contract(
        [cadence_fx.Clock("rows", 1, flush=(2, 3))], inputs=[cadence_fx.Input("x", axis=0, clock="rows")]
    )
    options: dict[str, Any] = {"contract": contract}
    step = torch.compile(live, backend="cadence", options=options)
    with torch.no_grad():
        compare(case, step, live, eager, given=False)
    report = cadence_fx.report(step)
    assert report["replays"] + sum(report["misses"].values()) == len(case.sizes)
    assert copy.copy(report["effects"])["pure"] == 0 or not {name for name, _, _ in case.steps} & set(DRAWS)
