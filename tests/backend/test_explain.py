"""Explain says what a call will meet, and the call then meets it; explaining changes nothing."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import pgo
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

import cadence_fx
from cadence_fx import Clock, Contract, ExactShapeReplay, Input, KeepLast, Region
from cadence_fx.errors import ContractError, NotCompiled
from cadence_fx.lookup import program_of
from tests.harness import compile_with, counts

C = 8
Args = tuple[Any, ...]


def declared(region: Region, *inputs: Input) -> Contract:
    return Contract([Clock("frame", 2)], [region], inputs=inputs)


CACHE = declared(
    Region("cache", argument="cache", result=1, axis=1, clock="frame", start=2, retention=KeepLast(6)),
    Input("x", axis=1, clock="frame"),
)
HIST = declared(Region("hist", attribute="hist", axis=1, clock="frame", start=6, retention=KeepLast(6)))


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield


def noise(frames: int = 2, batch: int = 1) -> Tensor:
    return torch.randn(batch, frames, C)


class Decoder(nn.Module):
    """Attention over a cache, with a value of weights that is computed once, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(C, C)
        self.position: Tensor
        self.register_buffer("position", torch.zeros(1))
        self.times = 1

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        raw = torch.cat([cache, self.key(x) * self.times], 1)
        table = self.position.cos() * self.key.weight[0].exp()
        return torch.softmax(x @ raw.transpose(1, 2), -1) @ raw + table, raw[:, -6:]


class Windowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.window: Tensor
        self.register_buffer("window", torch.hann_window(16))

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        spec = torch.stft(x.reshape(1, -1), 16, 4, window=self.window, return_complex=True)
        raw = torch.cat([cache, torch.istft(spec, 16, 4, window=self.window).reshape(x.shape)], 1)
        return raw.sum(1), raw[:, -6:]


class Shift(nn.Module):
    """A state that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.hist: Tensor
        self.register_buffer("hist", torch.zeros(1, 6, C))

    def forward(self, x: Tensor) -> Tensor:
        raw = torch.cat([self.hist, x], 1)
        self.hist.copy_(raw[:, -6:])
        return raw.sum(1)


class Unprimed(nn.Module):
    def forward(self, x: Tensor, cache: Tensor | None) -> tuple[Tensor, Tensor]:
        raw = x if cache is None else torch.cat([cache, x], 1)
        return raw.sum(1), raw[:, -6:]


class Dice(nn.Module):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        raw = torch.cat([cache, x * random.randint(1, 3)], 1)
        return raw.sum(1), raw[:, -6:]


class Reads(nn.Module):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, int]:
        raw = torch.cat([cache, x], 1)
        return raw.sum(1), raw[:, -6:], int(x.sum().item())


class Subject:
    """A compiled module in the middle of its stream."""

    def __init__(self, module: nn.Module, contract: Contract = CACHE) -> None:
        self.module: Any = module
        self.step: Any = compile_with(module, contract)
        self.cache = noise()
        self.kept: list[Any] = []
        given = (noise(), noise()) if contract is CACHE else (noise(),)
        with contextlib.suppress(cadence_fx.NotServed):
            cadence_fx.warm_up(self.step, *given)
        if contract is CACHE:
            self.go(2)

    def go(self, calls: int) -> None:
        for _ in range(calls):
            _, self.cache, *_ = self.step(noise(), self.cache)


def check(step: Any, args: Args, reason: str | None) -> cadence_fx.Explanation:
    """Explain a call, make it, and compare: nothing else is counted, and explaining has counted nothing."""
    before = counts(step)
    told = cadence_fx.explain(step, *args)
    assert counts(step) == before
    with contextlib.suppress(RuntimeError):  # what eager raises is no matter
        step(*args)
    after = counts(step)
    missed = Counter(after["misses"]) - Counter(before["misses"])
    assert told.reason == reason and missed == ({reason: 1} if reason else {}), (told, missed)
    # Behind an odd size Dynamo may compile declared calls anew: their classes are shared, or captured once more.
    assert told.outcome == "eager" if reason else told.outcome in ("replay", "capture")
    assert after["replays"] == before["replays"] + (reason is None)
    if reason is not None:
        assert told.clause and told.remedy and reason in str(told)
    return told


# -- signature match --------------------------------------------------------------------------------------------------

ODD: list[tuple[str, Callable[[Tensor], Args], tuple[str, str]]] = [
    ("undeclared_size", lambda cache: (noise(3), cache), ("x", "axis 1")),
    ("undeclared_size", lambda cache: (noise(2, 3), noise(4, 3)), ("cache", "axis 0")),
    ("undeclared_extents", lambda cache: (noise(), noise(5)), ("cache", "axis 1")),
    ("stride", lambda cache: (torch.randn(1, C, 2).mT, cache), ("x", "stride")),
    ("dtype", lambda cache: (noise(), cache.double()), ("cache", "dtype")),
    ("alignment", lambda cache: (torch.randn(2 * C + 1)[1:].view(1, 2, C), cache), ("x", "alignment")),
]


def test_calls_with_another_signature() -> None:
    """One stream, so that each of them also comes after all others; in between, its calls replay."""
    subject = Subject(Unprimed())
    for reason, make, field in ODD:
        told = check(subject.step, make(subject.cache), reason)
        assert field in [(d.argument, d.field) for d in told.differences], (reason, told)
        assert told.clause == "signature match"
        subject.cache = noise()
        subject.go(1)
    check(subject.step, (noise(), None), "unprimed")


def test_a_state_that_is_the_chunk_too() -> None:
    """Dynamo has a graph of its own for it, and that one keeps other frames."""
    subject, state = Subject(Unprimed()), noise()
    check(subject.step, (state, state), "retention")


def test_a_graph_that_computes_what_another_one_does() -> None:
    """Once the chunk is a symbol, Dynamo compiles declared calls anew; they replay the classes that there are."""
    subject = Subject(Unprimed())
    subject.step(noise(3), noise())
    captured = counts(subject.step)["captures"]
    told = check(subject.step, (noise(), noise()), None)
    assert (told.outcome == "replay") is (counts(subject.step)["captures"] == captured)


def test_calls_in_another_mode() -> None:
    subject = Subject(Decoder())
    with torch.enable_grad():
        check(subject.step, (noise(), subject.cache), "requires_grad")
    with torch.inference_mode():
        told = check(subject.step, (noise(), noise(6)), "mode")
        assert [(d.field, d.expected, d.found) for d in told.differences] == [("inference mode", False, True)]
    with cadence_fx.disabled():
        check(subject.step, (noise(), noise(6)), "disabled")


def test_a_number_that_was_not_captured() -> None:
    class Counts(Decoder):
        def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
            self.times += 2
            return super().forward(x, cache)

    subject = Subject(Counts())
    before = subject.module.times
    subject.module.times = 99
    told = check(subject.step, (noise(), noise(6)), "scalar")
    assert [(d.argument, d.field, d.found) for d in told.differences] == [("self.times", "value", 99)]
    assert before == 5 and subject.module.times == 101


def test_calls_without_a_contract() -> None:
    step = torch.compile(Decoder(), backend=cadence_fx.cadence)
    check(step, (noise(), noise()), "no_contract")


@pytest.mark.parametrize("module, reason", [(Dice, "host_random"), (Reads, "data_dependent")])
def test_a_graph_that_is_never_captured(module: type[nn.Module], reason: str) -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        subject = Subject(module())
        check(subject.step, (noise(), subject.cache), reason)
        random.seed(5)
        cadence_fx.explain(subject.step, noise(), subject.cache)
        after = random.random()
        random.seed(5)
        assert after == random.random()


# -- address stability ------------------------------------------------------------------------------------------------


def replace_buffer(subject: Subject, times: int = 1) -> None:
    for i in range(times):
        subject.module.position = torch.zeros(1)
        subject.kept.append(subject.module.position)  # its address is taken
        if i < times - 1:
            subject.go(2)


def replace_buffer_again_and_again(subject: Subject) -> None:
    replace_buffer(subject, 3)
    subject.go(1)


def write_before_each(subject: Subject) -> None:
    for _ in range(3):
        subject.module.position.add_(1)
        subject.go(1)
    subject.module.position.add_(1)


def hold_a_view(subject: Subject) -> None:
    subject.kept.append(subject.cache[:, :1])
    subject.cache = noise(6)


@pytest.mark.parametrize(
    "change, reason",
    [
        (replace_buffer, "address"),
        (replace_buffer_again_and_again, "unstable_address"),
        (write_before_each, "restless_value"),
        (hold_a_view, "held_state"),
    ],
)
def test_memory_that_is_not_where_the_class_needs_it(change: Callable[[Subject], None], reason: str) -> None:
    subject = Subject(Decoder())
    change(subject)
    told = check(subject.step, (noise(), subject.cache), reason)
    assert told.clause == "address stability"
    if reason == "address":
        (difference,) = told.differences
        assert (difference.argument, difference.found) == ("self.position", hex(subject.module.position.data_ptr()))
    if reason != "unstable_address":
        subject.kept = subject.kept[:-1] if reason == "held_state" else subject.kept
        subject.cache = noise()
        subject.go(2)
        check(subject.step, (noise(), subject.cache), None)


def test_a_view_of_the_state_which_another_graph_meets() -> None:
    subject = Subject(Decoder())
    for _ in range(2):  # before Dynamo has that graph, and when it has
        check(subject.step, (noise(), subject.cache[:, -2:]), "held_state")


def test_a_state_written_in_place_that_shares_its_memory() -> None:
    subject = Subject(Shift(), HIST)
    memory = torch.zeros(2, 6, C)
    subject.module.hist = memory[:1]
    check(subject.step, (noise(),), "shared_state")


def test_a_premise_that_no_longer_holds() -> None:
    subject = Subject(Windowed())
    check(subject.step, (noise(), subject.cache), None)
    subject.module.window.zero_()
    check(subject.step, (noise(), noise(6)), "host_read")


def test_a_consumed_state() -> None:
    subject = Subject(Decoder())
    old = subject.cache
    subject.go(1)
    told = cadence_fx.explain(subject.step, noise(), old)
    assert (told.outcome, told.reason) == ("error", "stale_state") and "raises: stale_state" in str(told)
    with pytest.raises(cadence_fx.StaleState):
        subject.step(noise(), old)


# -- plain callables --------------------------------------------------------------------------------------------------

seen: list[int] = []


def counts_calls(x: Tensor) -> Tensor:
    seen.append(len(seen))
    return x * 2


def draws_elsewhere(x: Tensor) -> Tensor:
    return x + torch.rand(2, generator=torch.Generator().manual_seed(1)).sum()


def iterates(kept: Iterator[int]) -> Callable[[Tensor], Tensor]:
    return lambda x: x * next(kept)


PLAIN: list[tuple[str, Callable[..., Any], Callable[[], Args]]] = [
    ("unkeyable", lambda x, y: x, lambda: (noise(), object())),
    ("opaque_state", iterates(itertools.count()), lambda: (noise(),)),
    ("mutates_state", counts_calls, lambda: (noise(),)),
    ("host_read", lambda x: x * float(x.sum()), lambda: (noise(),)),
    ("host_random", lambda x: x * np.random.rand(), lambda: (noise(),)),
    ("hidden_generator", draws_elsewhere, lambda: (noise(),)),
    ("opaque_output", lambda x: {1, 2}, lambda: (noise(),)),
    ("aliased_output", lambda x: torch.conj(x), lambda: (torch.randn(3, dtype=torch.complex64),)),
    ("mutates_argument", lambda x, given: given.append(1) or x * 2, lambda: (noise(), [])),
    ("alignment", lambda x: x * 2, lambda: (torch.randn(3)[1:],)),
    ("layout", lambda x: x * 2, lambda: (torch.randn(1).expand(3),)),
]


@pytest.mark.parametrize("reason, function, make", PLAIN, ids=[case[0] for case in PLAIN])
def test_plain_callables_that_are_refused(reason: str, function: Callable[..., Any], make: Callable[[], Args]) -> None:
    """What only trying tells is told from the second call on."""
    replay = ExactShapeReplay(function)
    first = cadence_fx.explain(replay, *make())
    assert (first.outcome, first.reason) in {("capture", None), ("eager", reason)} and not replay._tables
    replay(*make())
    check(replay, make(), reason)


def test_a_plain_callable_that_is_called_otherwise() -> None:
    scale, weight = nn.Linear(C, C), torch.ones(2 * C)

    def function(x: Tensor, held: Tensor) -> Tensor:
        held.add_(1)
        return scale(x) * held[:C]

    replay = ExactShapeReplay(function, aliased=[weight], max_classes=1)
    replay(noise(), weight)
    check(replay, (noise(), weight), None)
    told = check(replay, (noise(5), weight), "too_many_classes")
    assert [(d.argument, d.field, d.expected, d.found) for d in told.differences] == [("leaf 0", "axis 1", 2, 5)]
    check(replay, (weight.view(1, 2, C), weight), "overlap")
    with torch.enable_grad():
        check(replay, (noise(5), weight), "requires_grad")
    replay.seal()
    check(replay, (noise(5), weight), "sealed")


def test_a_plain_callable_whose_objects_are_rebound() -> None:
    module: Any = nn.Linear(C, C)
    module.gain = 1.0
    replay = ExactShapeReplay(lambda x: module(x) * module.gain)
    x = noise()
    replay(x)
    for i in range(3):
        module.gain = i + 2.0
        check(replay, (x,), "rebound")
        if i < 2:
            replay(x)
            check(replay, (x,), None)
    check(replay, (x,), "unstable_state")


# -- calls that Dynamo does not bring before the backend --------------------------------------------------------------


class Counting(Unprimed):
    """Counts how often its code is run as it is, which tracing does not."""

    runs = 0

    def forward(self, x: Tensor, cache: Tensor | None) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():
            Counting.runs += 1
        return super().forward(x, cache)


def unseen(subject: Subject, args: Args, reason: str) -> cadence_fx.Explanation:
    """Explain a call and make it: explaining runs none of its code, and Dynamo runs it as it is, uncounted."""
    before, runs, entries = counts(subject.step), Counting.runs, entries_of(subject)
    told = cadence_fx.explain(subject.step, *args)
    assert (told.outcome, told.reason, told.clause) == ("eager", reason, "before any clause"), told
    assert told.remedy and told.detail and (Counting.runs, entries_of(subject)) == (runs, entries)
    subject.step(*args)
    assert counts(subject.step) == before and (Counting.runs, entries_of(subject)) == (runs + 1, entries)
    return told


def entries_of(subject: Subject) -> int:
    return len(_debug_get_cache_entry_list(type(subject.module).forward.__code__))


@pytest.fixture
def counting() -> Iterator[Subject]:
    """A subject whose code nothing is known of, before and after."""
    torch._dynamo.reset()
    yield Subject(Counting())
    torch._dynamo.reset()


@pytest.mark.parametrize("limit", ["recompile_limit", "accumulated_recompile_limit"])
def test_a_limit_of_dynamos(limit: str, counting: Subject) -> None:
    odd, most = (noise().double(), noise(4).double()), entries_of(counting)
    with torch._dynamo.config.patch({limit: most + 10}):
        assert cadence_fx.explain(counting.step, *odd).reason == "dtype"
    with torch._dynamo.config.patch({limit: most}):
        check(counting.step, (noise(), counting.cache), None)  # what is compiled is served at the limit, too
        told = unseen(counting, odd, "recompile_limit")
        assert f"{limit} is {most}" in told.detail and {d.field for d in told.differences} == {"dtype"}
    unseen(counting, odd, "dynamo_off")  # from then on Dynamo compiles nothing more of this code
    check(counting.step, (noise(), noise(4)), None)


def test_a_limit_raises_where_one_graph_is_asked_for() -> None:
    torch._dynamo.reset()
    options: Any = {"contract": CACHE}
    step = torch.compile(Decoder(), backend=cadence_fx.cadence, options=options, fullgraph=True)
    cadence_fx.warm_up(step, noise(), noise())
    with torch._dynamo.config.patch(recompile_limit=1):
        told = cadence_fx.explain(step, noise().double(), noise(4).double())
        assert (told.outcome, told.reason) == ("error", "recompile_limit")
        with pytest.raises(Exception, match="fullgraph=True"):
            step(noise().double(), noise(4).double())


@pytest.mark.skipif("recompile_limit" not in inspect.signature(torch.compile).parameters, reason="since torch 2.13")
def test_limits_of_one_compile_call() -> None:
    torch._dynamo.reset()
    odd = (noise().double(), noise(4).double())
    compiling: Any = torch.compile
    given = {"backend": cadence_fx.cadence, "options": {"contract": CACHE}}
    strict = compiling(Decoder(), recompile_limit=2, **given)
    alone = compiling(Decoder(), isolate_recompiles=True, **given)
    for step in (strict, alone):
        cadence_fx.warm_up(step, noise(), noise())
    assert cadence_fx.explain(strict, *odd).reason == "recompile_limit"
    with torch._dynamo.config.patch(recompile_limit=len(_debug_get_cache_entry_list(Decoder.forward.__code__))):
        assert cadence_fx.explain(alone, *odd).reason == "dtype"  # it counts what it has compiled itself


@pytest.mark.parametrize("stance, served", [("force_eager", False), ("eager_on_recompile", True)])
def test_stances_of_dynamos(stance: str, served: bool, counting: Subject) -> None:
    with torch.compiler.set_stance(stance):
        unseen(counting, (noise().double(), noise(4).double()), "dynamo_off")
        if served:
            check(counting.step, (noise(), counting.cache), None)
        else:
            unseen(counting, (noise(), counting.cache), "dynamo_off")
    with torch.compiler.set_stance("fail_on_recompile"):
        told = cadence_fx.explain(counting.step, noise().double(), noise(4).double())
        assert (told.outcome, told.reason) == ("error", "dynamo_off")


def test_a_code_that_dynamo_has_given_up(counting: Subject) -> None:
    """Once it has met such a call, Dynamo skips the code, whatever it has compiled of it."""
    with torch._dynamo.config.patch(disable=True):
        unseen(counting, (noise().double(), noise(4).double()), "dynamo_off")
    unseen(counting, (noise(), counting.cache), "dynamo_off")
    unseen(counting, (noise().double(), noise(4).double()), "dynamo_off")


# -- nothing is changed -----------------------------------------------------------------------------------------------


def snapshot(subject: Subject) -> Any:
    program, function = program_of(subject.step, "test"), type(subject.module).forward
    carries = [
        (c.flat.clone().tolist(), c.extent, c._generation, len(c._earlier), len(c._idle))
        for c in program.carries.values()
    ]
    return (
        counts(subject.step),
        carries,
        len(program.graphs),
        [
            (entry.replays, [b.clone().tolist() for b in entry.buffers])
            for _, t in program.graphs
            for entry in t.classes.values()
        ],
        len(_debug_get_cache_entry_list(function.__code__)),
        copy.deepcopy(dict(pgo.get_code_state())),
        torch.get_rng_state().tolist(),
        random.getstate(),
        {name: value.tolist() for name, value in subject.module.state_dict().items()},
    )


def test_explaining_changes_nothing() -> None:
    subject = Subject(Decoder())
    calls = [(noise(), subject.cache), *(make(subject.cache) for _, make, _ in ODD)]
    calls.append((calls[0][0], calls[0][0]))
    before = snapshot(subject)
    for args in calls:
        cadence_fx.explain(subject.step, *args)
        assert snapshot(subject) == before
    with torch.inference_mode():
        cadence_fx.explain(subject.step, *calls[0])
    assert snapshot(subject) == before
    check(subject.step, calls[0], None)


def test_before_warm_up_nothing_is_compiled() -> None:
    step = compile_with(Decoder(), CACHE)
    told = cadence_fx.explain(step, noise(), noise())
    assert told.outcome == "capture" and not program_of(step, "test").graphs
    assert cadence_fx.explain(step, noise(3), noise()).reason == "undeclared_size"


def closed_over() -> Any:
    gain = torch.ones(C)

    def step(x: Tensor, cache: Tensor, *, loud: bool = False) -> tuple[Tensor, Tensor]:
        raw = torch.cat([cache, x * gain * (2 if loud else 1)], 1)
        return raw.sum(1), raw[:, -6:]

    return compile_with(step, CACHE)


def in_place() -> Any:
    module = Unprimed()
    module.compile(backend=cadence_fx.cadence, options={"contract": CACHE})
    return module


@pytest.mark.parametrize("make", [closed_over, in_place, lambda: compile_with(Unprimed().forward, CACHE)])
def test_functions_methods_and_modules_compiled_in_place(make: Callable[[], Any]) -> None:
    step = make()
    cadence_fx.warm_up(step, noise(), noise())
    check(step, (noise(), noise(4)), None)
    check(step, (noise(3), noise(4)), "undeclared_size")
    assert cadence_fx.explain(step, cache=noise(6), x=noise()).replays == "frame +2: cache 6 -> 6"


class Breaks(nn.Module):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        torch._dynamo.graph_break()
        raw = torch.cat([cache, x], 1)
        return raw.sum(1), raw[:, -6:]


def test_what_cannot_be_told_is_said_with_its_line() -> None:
    step = compile_with(Breaks(), CACHE)
    told = cadence_fx.explain(step, noise(), noise())
    line = Breaks.forward.__code__.co_firstlineno + 1
    assert told.outcome == "unknown" and f"{__file__}:{line}" in told.detail


def test_the_forms_of_an_explanation() -> None:
    step = compile_with(Decoder(), CACHE)
    told = cadence_fx.explain(step, noise(3), noise())
    assert json.loads(told.to_json()) == json.loads(json.dumps(told.as_dict()))
    where = f"{__file__}:{Decoder.forward.__code__.co_firstlineno + 1}"
    assert str(told).splitlines() == [
        "Decoder: runs eager: undeclared_size (signature match)",
        f"  why: axis 1 of x has 3; the contract allows [2] (used at {where})",
        "  remedy: declare the size: an Input, a flush length; or cut chunks to the stride",
    ]
    with pytest.raises(ContractError, match="does not fit"):
        cadence_fx.explain(step, noise(3))
    with pytest.raises(NotCompiled):
        cadence_fx.explain(nn.Linear(2, 2), noise())
