"""Hazards planted in a small module are found with their lines, and nothing is found where there are none."""

from __future__ import annotations

import contextlib
import inspect
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cadence_fx
from cadence_fx import Clock, Contract, KeepLast, Region, environment
from cadence_fx.errors import ContractError
from cadence_fx.hazard import KINDS
from cadence_fx.parking import is_parked, park
from cadence_fx.replay import ExactShapeReplay
from tests.harness import compile_with, counts
from tests.streams import STREAMS, Run, Stream

C = 8
CACHE = Contract(
    [Clock("frame", 2)],
    [Region("cache", argument="cache", result=1, axis=1, clock="frame", start=2, retention=KeepLast(6))],
)
TABLES: dict[Any, Tensor] = {}
LOG: list[int] = []


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield
    assert not TABLES and not LOG  # what a call leaves behind has been taken back


class Base(nn.Module):
    """A projection and a cache; `plant` is where hazards are."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(C, C)
        self.window, self.calls, self.seen = torch.hann_window(C), 0, [0]
        self.work: Tensor
        self.register_buffer("work", torch.zeros(1, 2, C))

    def plant(self, x: Tensor) -> Any:
        return x

    def forward(self, x: Tensor, cache: Tensor) -> Any:
        raw = torch.cat([cache, self.key(x)], 1)
        return raw.sum(1), raw[:, -6:]


class Planted(Base):
    def forward(self, x: Tensor, cache: Tensor) -> Any:
        return *super().forward(x, cache), self.plant(x)


class Item(Planted):
    def plant(self, x: Tensor) -> Any:
        return x * x.sum().item()  # here


class AsList(Planted):
    def plant(self, x: Tensor) -> Any:
        return x * x.flatten().tolist()[0]  # here


class ToHost(Planted):
    def plant(self, x: Tensor) -> Any:
        return x.cpu() * 2  # here


class NamesHost(Planted):
    def plant(self, x: Tensor) -> Any:
        return x.to("cpu") * 2  # here


class Branch(Planted):
    def plant(self, x: Tensor) -> Any:
        if x.sum() > 0:  # here
            return x
        return -x


class Mask(Planted):
    def plant(self, x: Tensor) -> Any:
        return x[x > 0]  # here


class LazyTable(Planted):
    def plant(self, x: Tensor) -> Any:
        if not hasattr(self, "table"):
            self.table = torch.arange(float(C), device=x.device)  # here
        return x * self.table


class LazyBuffer(Planted):
    table: Tensor

    def plant(self, x: Tensor) -> Any:
        if "table" not in self._buffers:
            self.register_buffer("table", torch.ones(C, device=x.device))  # here
        return x * self.table


class Constant(Planted):
    def plant(self, x: Tensor) -> Any:
        steps = torch.arange(float(C))
        return x * torch.exp(-steps).to(x.device)  # here


class Listed(Planted):
    def plant(self, x: Tensor) -> Any:
        return x * torch.tensor([2.0], device=x.device)  # here


class Constructed(Planted):
    def plant(self, x: Tensor) -> Any:
        return x * torch.FloatTensor([2.0]).to(x.device)  # here


class NoBuffer(Planted):
    def plant(self, x: Tensor) -> Any:
        return x * self.window.to(x.device)  # here


class DrawnOnHost(Planted):
    def plant(self, x: Tensor) -> Any:
        noise = torch.randn(C)
        return x + noise.to(x)  # here


class PythonDice(Planted):
    def plant(self, x: Tensor) -> Any:
        return x * random.randint(1, 3)  # here


class NumpyDice(Planted):
    def plant(self, x: Tensor) -> Any:
        gain = np.random.rand()  # here
        return x * gain


class OwnGenerator(Planted):
    def plant(self, x: Tensor) -> Any:
        dice = torch.Generator().manual_seed(1)
        return x + torch.rand(C, generator=dice, device=x.device)  # here


class Counter(Planted):
    def plant(self, x: Tensor) -> Any:
        self.calls += 1  # here
        return x


class Grows(Planted):
    def plant(self, x: Tensor) -> Any:
        self.seen.append(len(self.seen))  # here
        return x


class GlobalTable(Planted):
    def plant(self, x: Tensor) -> Any:
        if C not in TABLES:
            TABLES[C] = torch.ones(C, device=x.device)  # here
        return x * TABLES[C]


class GlobalLog(Planted):
    def plant(self, x: Tensor) -> Any:
        LOG.append(1)  # here
        return x


class DefaultCache(Base):
    def forward(self, x: Tensor, cache: Tensor, known: dict[str, Tensor] = {}) -> tuple[Tensor, Tensor]:  # noqa: B006
        if "gain" not in known:
            known["gain"] = torch.ones(C, device=x.device)  # here
        raw = torch.cat([cache, self.key(x) * known["gain"]], 1)
        return raw.sum(1), raw[:, -6:]


class Rebinds(Planted):
    def plant(self, x: Tensor) -> Any:
        self.last = x * 2  # here
        return self.last + 1


class Kept:
    def __init__(self) -> None:
        self.last = torch.zeros(1, 2, C)


class RebindsInside(Planted):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [{"first": Kept()}]

    def plant(self, x: Tensor) -> Any:
        self.kept[0]["first"].last = x * 2  # here
        return x


class GivesMemory(Planted):
    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor
        self.register_buffer("last", torch.zeros(1, 2, C))

    def plant(self, x: Tensor) -> Any:
        self.last.data = x * 2  # here
        return x + self.last


class WritesArgument(Planted):
    def plant(self, x: Tensor) -> Any:
        return x.mul_(2) + 1  # here


class HandsOut(Planted):
    def plant(self, x: Tensor) -> Any:
        self.work.copy_(x)
        return self.work[:, :1]  # here


@torch.compile
def compiled(x: Tensor) -> Tensor:
    return x * 2


class Compiles(Planted):
    def plant(self, x: Tensor) -> Any:
        return compiled(x)


class Autocast(Planted):
    def plant(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.key(x)  # here


class Captures(Planted):
    def plant(self, x: Tensor) -> Any:
        if x.is_cuda:
            self.graph = torch.cuda.CUDAGraph()  # here
        return x


class Raises(Planted):
    def plant(self, x: Tensor) -> Any:
        raise ValueError("no such speaker")  # here


class Unsteady(Planted):
    def plant(self, x: Tensor) -> Any:
        return torch.ops.cadence_doctor_test.jitter(x)  # here


_library = torch.library.Library("cadence_doctor_test", "DEF")
_library.define("jitter(Tensor x) -> Tensor")
_times = [0]


def _jitter(x: Tensor) -> Tensor:
    _times[0] += 1
    return x + _times[0]


_library.impl("jitter", _jitter, "CPU")

CASES: list[tuple[type[nn.Module], str, bool]] = [
    (Item, "host_read", True),
    (AsList, "host_read", True),
    (ToHost, "host_read", True),
    (NamesHost, "host_read", True),
    (Branch, "host_read", True),
    (Mask, "data_dependent_shape", True),
    (LazyTable, "lazy_table", False),
    (LazyBuffer, "lazy_buffer", False),
    (Constant, "host_constant", False),
    (Listed, "host_constant", False),
    (Constructed, "host_constant", False),
    (NoBuffer, "host_constant", False),
    (DrawnOnHost, "host_random", True),
    (PythonDice, "host_random", True),
    (NumpyDice, "host_random", True),
    (OwnGenerator, "hidden_generator", True),
    (Counter, "counter", False),
    (Grows, "growing_cache", True),
    (GlobalTable, "global_cache", False),
    (GlobalLog, "growing_cache", True),
    (DefaultCache, "global_cache", False),
    (Rebinds, "undeclared_state", True),
    (RebindsInside, "undeclared_state", True),
    (GivesMemory, "moves_memory", True),
    (WritesArgument, "undeclared_write", True),
    (HandsOut, "aliased_state", False),
    (Autocast, "autocast_inside", False),
    (Captures, "own_graph", False),
    (Unsteady, "unsteady", False),
    (Raises, "raises", True),
]


def noise() -> Tensor:
    return torch.randn(1, 2, C)


def line_of(kind: Any) -> str:
    """`file:line` of the line marked in a class."""
    lines, first = inspect.getsourcelines(kind)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if '# here' in line)}"


@pytest.mark.parametrize("kind, expected, stops", CASES, ids=[case[0].__name__ for case in CASES])
def test_a_planted_hazard_is_found_at_its_line(kind: type[nn.Module], expected: str, stops: bool) -> None:
    module, x, cache = kind(), noise(), noise()
    before = {name: value.clone() for name, value in module.state_dict().items()}, set(vars(module)), x.clone()
    dice = torch.get_rng_state(), random.getstate()
    found = cadence_fx.doctor(module, x, cache, contract=CACHE)
    (hazard,) = found.hazards
    assert (hazard.kind, hazard.line, hazard.stops) == (expected, line_of(kind), stops)
    assert hazard.remedy and found.stops is stops and expected in KINDS
    # Looking has changed nothing.
    assert all(torch.equal(value, before[0][name]) for name, value in module.state_dict().items())
    assert set(vars(module)) == before[1] and torch.equal(x, before[2])
    assert torch.equal(torch.get_rng_state(), dice[0]) and random.getstate() == dice[1]


def test_code_that_is_compiled_inside() -> None:
    (hazard,) = cadence_fx.doctor(Compiles(), noise(), noise(), contract=CACHE).hazards
    line = compiled._torchdynamo_orig_callable.__code__.co_firstlineno  # type: ignore[attr-defined]
    assert (hazard.kind, hazard.line) == ("compiled_inside", f"{__file__}:{line}")


def test_states_that_share_memory() -> None:
    module = Base()
    (hazard,) = cadence_fx.doctor(module, noise(), module.work, contract=CACHE).hazards
    assert (hazard.kind, hazard.what) == ("aliased_state", "an argument shares memory with self.work")

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hist: Tensor
            self.register_buffer("hist", torch.zeros(2, 6, C)[:1])

        def forward(self, x: Tensor) -> Tensor:
            self.hist.copy_(torch.cat([self.hist, x], 1)[:, -6:])
            return self.hist.sum(1)

    hist = Region("hist", attribute="hist", axis=1, clock="frame", start=6, retention=KeepLast(6))
    (hazard,) = cadence_fx.doctor(Held(), noise(), contract=Contract([Clock("frame", 2)], [hist])).hazards
    assert (hazard.kind, hazard.stops) == ("shared_state", True)


def test_a_check_of_constants_inside_an_operator_stops_nothing() -> None:
    class Spectral(Planted):
        def plant(self, x: Tensor) -> Any:
            spec = torch.stft(x.flatten(), 8, 4, window=self.key.bias.abs() + 1, return_complex=True)
            return torch.istft(spec, 8, 4, window=self.key.bias.abs() + 1)

    found = cadence_fx.doctor(Spectral(), noise(), noise(), contract=CACHE)
    assert {hazard.kind for hazard in found.hazards} <= {"host_read"} and not found.stops


@pytest.mark.parametrize("stream", [s for s in STREAMS if s.name != "SolverWorkspace"], ids=lambda s: s.name)
def test_a_clean_module_has_none(stream: Stream) -> None:
    run = Run(stream, stream.build())
    run.restart(0)
    found = cadence_fx.doctor(run.module, *run.inputs(1, stream.calls[0]), *run.state, contract=stream.contract)
    assert not found.hazards and not found.stops


@pytest.mark.parametrize(
    "kind, reason", [(PythonDice, "host_random"), (WritesArgument, "undeclared_write"), (GivesMemory, "moves_memory")]
)
def test_what_is_said_to_stop_capture_does(kind: type[nn.Module], reason: str) -> None:
    assert cadence_fx.doctor(kind(), noise(), noise(), contract=CACHE).stops
    step = compile_with(kind(), CACHE)
    with contextlib.suppress(cadence_fx.NotServed):
        cadence_fx.warm_up(step, noise(), noise())
    step(noise(), noise())
    assert set(counts(step)["misses"]) == {reason} and not counts(step)["classes"]


def test_a_parked_workspace_has_memory_meanwhile() -> None:
    class Works(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.work: Tensor
            self.register_buffer("work", torch.zeros(1, 8, C))

        def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
            raw = cache.size(1) + x.size(1)
            self.work[:, :raw] = torch.cat([cache, x], 1)
            return self.work[:, :raw].sum(1), self.work[:, :raw][:, -6:].clone()

    work = Region("work", attribute="work", axis=1, clock="frame", retention=KeepLast(6), lifetime="unit")
    module = Works()
    park([module.work])
    contract = Contract(CACHE.clocks, [*CACHE.regions, work])
    assert not cadence_fx.doctor(module, noise(), noise(), contract=contract).hazards and is_parked(module.work)


def test_what_can_be_examined() -> None:
    step = compile_with(Item(), CACHE)
    assert [h.kind for h in cadence_fx.doctor(step, noise(), noise()).hazards] == ["host_read"]
    replay = ExactShapeReplay(lambda x: x * float(x.sum()))
    assert [h.kind for h in cadence_fx.doctor(replay, noise()).hazards] == ["host_read"] and not replay.ledger.misses
    with pytest.raises(ContractError, match="does not fit"):
        cadence_fx.doctor(Base(), noise())
    with pytest.raises(ContractError, match="takes a callable"):
        cadence_fx.doctor(3)


# -- the process ------------------------------------------------------------------------------------------------------


def test_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = cadence_fx.doctor().as_dict()
    assert facts["versions"]["torch"] == torch.__version__ and facts["device"]["type"] in ("cpu", "cuda")
    assert facts["dynamo"]["suppress_errors"] is False and not facts["stops"] and not facts["problems"]
    with torch._dynamo.config.patch(suppress_errors=True, recompile_limit=2), cadence_fx.disabled():
        found = cadence_fx.doctor()
    assert [p.stops for p in found.environment.problems] == [True, False, False] and found.stops
    assert [word in str(found) for word in ("suppress_errors is True", "recompile_limit is 2")] == [True, True]
    monkeypatch.setitem(environment.SUPPORTED, "torch", ((9, 0), (9, 1)))
    assert [p.what for p in cadence_fx.doctor().environment.problems] == [f"torch {torch.__version__} is not tested"]


def test_the_forms_of_a_diagnosis() -> None:
    found = cadence_fx.doctor(Item(), noise(), noise(), contract=CACHE)
    assert json.loads(found.to_json())["hazards"][0]["kind"] == "host_read"
    assert str(found).split("dynamo: ")[1].splitlines()[1:] == [
        "Item: 1 hazard, of which 1 in the way of capture",
        "  stops host_read: the host takes a number (item)",
        f"    at {line_of(Item)}",
        "    remedy: compute on the device (torch.where with three arguments), or move it outside",
    ]
