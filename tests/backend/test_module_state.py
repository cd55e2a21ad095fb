"""What code rebinds while it is tried: a first call that builds something, a call that always changes something."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cadence_fx
from cadence_fx import untouched
from cadence_fx.clock import Clock
from cadence_fx.contract import Contract, Region
from cadence_fx.errors import NotServed, WeightsWritten
from cadence_fx.replay import ExactShapeReplay
from cadence_fx.retention import KeepLast, Pinned
from tests.harness import Pair, assert_same, compile_with
from tests.streams import kept, on_argument
from tests.toys import B, C, Toy


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield


class Lazy(nn.Module):
    """Builds a table in its first call; `built` counts how often it did."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.built: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(4.0) * 2
            self.built.append(len(self.built))
        return x + self.table


class LazyBuffer(nn.Module):
    """Registers a buffer that it also counts in, and draws its contents."""

    noise: Tensor
    calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "noise"):
            self.register_buffer("noise", torch.rand(4))
            self.register_buffer("calls", torch.zeros(()))
        self.calls.add_(1)
        return x + self.noise * self.calls + torch.rand(4)


def attributes(module: nn.Module) -> dict[str, Any]:
    plain = {k: v for k, v in vars(module).items() if not k.startswith("_") and not isinstance(v, Tensor)}
    tensors = dict(module.named_buffers()) | {k: v for k, v in vars(module).items() if isinstance(v, Tensor)}
    return {**plain, **{k: v.tolist() for k, v in tensors.items()}}


@pytest.mark.parametrize("kind", [Lazy, LazyBuffer])
def test_a_first_call_that_builds_is_made_once(kind: Callable[[], nn.Module]) -> None:
    eager, module = kind(), kind()
    replay = ExactShapeReplay(module)
    for i in range(5):
        torch.manual_seed(i)
        expected, after = eager(torch.ones(4)), torch.get_rng_state()
        torch.manual_seed(i)
        assert_same(replay(torch.ones(4)), expected, f"call {i}")
        assert torch.equal(torch.get_rng_state(), after)
        assert attributes(module) == attributes(eager)
    assert dict(replay.ledger.misses) == {"initialises": 1} and replay.ledger.replays == 4
    assert len(replay.classes) == 1 and not replay.ledger.refusals


def test_a_table_that_grows_with_the_size() -> None:
    """The class that was captured with the smaller table still has its memory."""

    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.zeros(0)

        def forward(self, x: Tensor) -> Tensor:
            if self.table.numel() < x.numel():
                self.table = torch.arange(float(x.numel()))
            return x * self.table[: x.numel()]

    eager, module = Growing(), Growing()
    replay = ExactShapeReplay(module)
    for size in (3, 3, 5, 3, 5, 5, 3):
        x = torch.ones(size)
        assert_same(replay(x), eager(x), f"size {size}")
        assert module.table.numel() == eager.table.numel()
    # The class of the smaller size has the earlier table: another object, whatever is in it.
    assert dict(replay.ledger.misses) == {"initialises": 2, "rebound": 1} and len(replay.classes) == 2


def test_lazy_parameters_get_their_shape_from_an_eager_call() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.LazyLinear(3), nn.ReLU())

    eager, module = make(), make()
    replay = ExactShapeReplay(module)
    for i in range(3):
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(i))
        torch.manual_seed(i)
        expected = eager(x)
        torch.manual_seed(i)
        assert_same(replay(x), expected, f"call {i}")
    assert type(module[0]) is nn.Linear
    assert dict(replay.ledger.misses) == {"initialises": 1} and len(replay.classes) == 1


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(self.calls)
        return x * self.calls


def test_a_counter_is_refused_by_name_and_counts_each_call_once() -> None:
    module = Counts()
    replay = ExactShapeReplay(module)
    for i in range(1, 5):
        assert_same(replay(torch.ones(2)), torch.full((2,), float(i)), f"call {i}")
    assert module.calls == 4 and module.log == [1, 2, 3, 4]
    assert dict(replay.ledger.refusals) == {"mutates_state": 1}
    assert dict(replay.ledger.misses) == {"initialises": 1, "mutates_state": 3}
    (refused,) = cadence_fx.report(replay)["refused_classes"]
    assert "self.calls, self.log[0]" in refused["detail"] or "self.calls, self.log[1]" in refused["detail"]


def test_a_counter_around_a_bound_method_and_in_a_closure() -> None:
    module, count = Counts(), 0

    def step(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * count

    for fn in (module.forward, step):
        replay = ExactShapeReplay(fn)
        for i in range(1, 4):
            assert_same(replay(torch.ones(2)), torch.full((2,), float(i)), f"call {i}")
        assert dict(replay.ledger.refusals) == {"mutates_state": 1}
    assert module.calls == count == 3


def test_a_call_that_raises_halfway_while_it_is_tried() -> None:
    """It is eager's to raise; what the trial did before is undone, in Python and in memory."""

    class Halfway(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(1)
            self.calls += 1
            raise ValueError("no")

    module = Halfway()
    replay = ExactShapeReplay(module)
    for i in range(1, 3):
        with pytest.raises(ValueError, match="no"):
            replay(torch.ones(2))
        assert module.calls == i and module.seen.tolist() == [i, i]
    assert dict(replay.ledger.misses) == {"raised": 2}


# -- the same under torch.compile, where Dynamo has a graph for the first call and one for the rest --------------------


class LazyStep(Toy):
    """Dynamo burns `table is None` into its guards."""

    table: Tensor | None = None

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        if self.table is None:
            self.table = torch.arange(float(C)) / C
        return self.attend(x + self.table, cache), torch.cat([cache, self.key(x)], 1)[:, -6:]


class LazyBufferStep(Toy):
    table: Tensor

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        if "table" not in self._buffers:
            self.register_buffer("table", torch.arange(float(C)) / C)
        return self.attend(x + self.table, cache), torch.cat([cache, self.key(x)], 1)[:, -6:]


@pytest.mark.parametrize("kind", [LazyStep, LazyBufferStep])
def test_warm_up_does_not_make_the_first_call(kind: type[Toy]) -> None:
    """The table is there after the first real call, not before, and the bytes are eager's on both sides of it."""
    pair = Pair(on_argument(kind, 2, kept("cache", 1, 2, KeepLast(6)), (B, 2, C)))
    live = pair.live.module
    assert live.__dict__.get("table") is None and "table" not in live._buffers
    for _ in range(8):
        pair.call()
        assert isinstance(live.table, Tensor)
        assert_same(live.table, pair.eager.module.table, "table")
    pair.check_kept()
    # What the code itself puts there is staged: warm-up's own table is gone with warm-up, and no class is bound to it.
    assert pair.missed() == Counter() and pair.since("replays") == 8


def test_warm_up_undoes_what_is_nested() -> None:
    class Nested(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.notes: dict[str, list[int]] = {"sizes": []}

        def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
            self.notes["sizes"].append(1)
            return self.attend(x, cache), torch.cat([cache, self.key(x)], 1)[:, -6:]

    pair = Pair(on_argument(Nested, 2, kept("cache", 1, 2, KeepLast(6)), (B, 2, C)), warm=False)
    module = pair.live.module
    notes = module.notes
    pair.warm_up()
    assert module.notes is notes and notes == {"sizes": []}
    for _ in range(3):
        pair.call()
    assert notes == copy.deepcopy(pair.eager.module.notes) == {"sizes": [1, 1, 1]}


COUNT = torch.zeros(C)
DICE = torch.Generator().manual_seed(3)


class Writes(Toy):
    """Holds each kind of thing that a call can write without rebinding it, and writes one of them."""

    def __init__(self, write: Callable[[Any], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(C))
        self.held = [{"t": (torch.zeros(C), np.zeros(2, dtype=np.float32))}]
        self.slots = Slotted()
        self.wide = torch.zeros(1).expand(C)
        self.write = write

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        self.write(self)
        return self.attend(x * self.weight, cache), torch.cat([cache, self.key(x)], 1)[:, -6:]


def rebind_data(module: Any) -> None:
    module.weight.data = module.weight.data * 0.5


WRITES: dict[str, Callable[[Any], Any]] = {
    "parameter": lambda m: m.weight.mul_(0.5),
    "parameter past the count of writes": lambda m: m.weight.data.mul_(0.5),
    "data": rebind_data,
    "in containers": lambda m: m.held[0]["t"][0].add_(1),
    "array": lambda m: np.add(m.held[0]["t"][1], 1, out=m.held[0]["t"][1]),
    "slot": lambda m: m.slots.n.add_(1),
    "global": lambda m: COUNT.add_(1),
    "generator": lambda m: torch.rand(C, generator=DICE),
}


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = torch.zeros(C)


class Engine:
    """Its method is compiled, and it is no module."""

    def __init__(self) -> None:
        self.n = torch.zeros(C)
        self.steps = 0

    def step(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        self.n.add_(1)
        self.steps += 1
        return x.sum(1) + self.n, torch.cat([cache, x], 1)[:, -6:]


def state_of(module: Writes) -> list[Any]:
    tensor, numbers = module.held[0]["t"]
    tensors = (*module.parameters(), tensor, module.slots.n, COUNT, DICE.get_state())
    return [*(t.clone() for t in tensors), torch.from_numpy(numbers.copy())]


CONTRACT = Contract((Clock("frames", 2),), (kept("cache", 1, 2, KeepLast(6)),))


@pytest.mark.parametrize("name", WRITES)
def test_warm_up_leaves_the_bytes_of_everything_it_reaches(name: str) -> None:
    module = Writes(WRITES[name])
    before, memory = state_of(module), [p.data_ptr() for p in module.parameters()]
    with contextlib.suppress(NotServed):  # refused or not
        cadence_fx.warm_up(compile_with(module, CONTRACT), torch.randn(B, 2, C), torch.randn(B, 2, C))
    for i, (now, then) in enumerate(zip(state_of(module), before, strict=True)):
        assert_same(now, then, f"tensor {i}")
    assert [p.data_ptr() for p in module.parameters()] == memory
    module(torch.randn(B, 2, C), torch.randn(B, 2, C))
    changed = [not torch.equal(now, then) for now, then in zip(state_of(module), before, strict=True)]
    assert any(changed)  # the call does write what is looked at


def test_warm_up_of_a_plain_objects_method_and_of_a_closure() -> None:
    engine, count = Engine(), torch.zeros(C)
    seen = []

    def closure(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        count.add_(1)
        seen.append(1)
        return x.sum(1) + count, torch.cat([cache, x], 1)[:, -6:]

    for target in (engine.step, closure):
        cadence_fx.warm_up(compile_with(target, CONTRACT), torch.randn(B, 2, C), torch.randn(B, 2, C))
    assert engine.steps == 0 and seen == [] and not engine.n.any() and not count.any()


@pytest.mark.parametrize("inference", [False, True])
def test_a_parameter_too_large_to_be_put_back(inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Past(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(C, 1024))

        def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
            self.scale.data.mul_(0.5)
            return self.attend(x, cache), torch.cat([cache, self.key(x)], 1)[:, -6:]

    monkeypatch.setattr(untouched, "KEPT", 4096)
    with torch.inference_mode() if inference else torch.no_grad(), pytest.raises(WeightsWritten, match="'scale'"):
        cadence_fx.warm_up(compile_with(Past(), CONTRACT), torch.randn(B, 2, C), torch.randn(B, 2, C))
    with torch.inference_mode() if inference else torch.no_grad():  # what is not written is no error
        cadence_fx.warm_up(compile_with(Keeping(), CONTRACT), torch.randn(B, 2, C), torch.randn(B, 2, C))


class Keeping(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return self.attend(x, cache), torch.cat([cache, self.key(x)], 1)[:, -6:]


@dataclass
class Kept:
    """What a streaming layer keeps in an object of its own: some of it is not for the constructor."""

    window: Tensor

    def __post_init__(self) -> None:
        self.last = torch.zeros(1, 1, C)
        self.calls = torch.zeros(1, dtype=torch.int64)


class WithKept(nn.Module):
    """Writes two tensors of its object in place and rebinds the third."""

    kept: Kept

    def begin(self) -> None:
        self.kept = Kept(torch.zeros(1, 4, C))

    def forward(self, x: Tensor) -> Tensor:
        frames = torch.cat([self.kept.window, x], 1)
        y = frames.sum(1, keepdim=True) + self.kept.last + self.kept.calls
        self.kept.window[:] = frames[:, -4:]
        self.kept.last = torch.where(x[:, -1:] > 0, x[:, -1:], self.kept.last)
        self.kept.calls.add_(1)
        return y


def test_states_in_an_object_that_the_module_keeps() -> None:
    """Warm-up sets the attributes of that very object, and objects may be exchanged between calls."""
    frame, here = Clock("frame", 2), "kept."
    regions = [
        Region("window", attribute=here + "window", axis=1, clock="frame", retention=Pinned(4)),
        Region("last", attribute=here + "last", axis=1, clock="frame", retention=Pinned(1)),
        Region("calls", attribute=here + "calls", axis=0, clock="frame", retention=Pinned(1)),
    ]
    eager, module = WithKept(), WithKept()
    for each in (eager, module):
        each.begin()
    step = compile_with(module, Contract([frame], regions))
    before = module.kept
    cadence_fx.warm_up(step, torch.randn(1, 2, C))
    assert module.kept is before and not any(value.any() for value in vars(before).values())
    streams = [[each.kept] for each in (eager, module)]
    for each, kept_by in zip((eager, module), streams, strict=True):
        each.begin()
        kept_by.append(each.kept)
    for i in range(24):
        x = torch.randn(1, 2, C)
        for each, kept_by in zip((eager, module), streams, strict=True):
            each.kept = kept_by[i // 3 % 2]
        assert_same(step(x), eager(x), f"call {i}")
        for theirs, ours in zip(*streams, strict=True):
            for name, value in vars(theirs).items():
                assert_same(vars(ours)[name], value, f"{name} after call {i}")
    assert not cadence_fx.report(step)["misses"] and cadence_fx.report(step)["replays"] == 24
