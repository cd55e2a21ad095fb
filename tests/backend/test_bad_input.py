"""A wrong declaration is a named error from ``warm_up``; a wrong call is eager, counted, and the stream goes on."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cadence_fx
from cadence_fx.clock import Clock
from cadence_fx.contract import Contract, Input
from cadence_fx.errors import (
    AxisOutOfRange,
    CadenceError,
    ContractError,
    NotCompiled,
    RetentionMismatch,
    StaleState,
    UnexplainedSize,
    UnknownArgument,
    UnusedClock,
    WrongModule,
)
from cadence_fx.retention import KeepLast, PromptPlusLast, Retention
from tests.harness import BACKEND, Pair, assert_same, compile_with
from tests.streams import BY_NAME, Stream, kept, noise, on_argument, on_module, own, visits
from tests.toys import AppendLast, B, C, Toy

FRAMES = Clock("frames", 3)


@pytest.fixture(autouse=True)
def _serving() -> None:
    torch.set_grad_enabled(False)


def refused(module: Any, contract: Any, *args: Any) -> CadenceError:
    """The error that compiling and warming up gives."""
    with pytest.raises(CadenceError) as caught:
        cadence_fx.warm_up(compile_with(module, contract), *args)
    return caught.value


def untyped(value: Any) -> Any:
    """A value that a type checker would refuse where it is used."""
    return value


def append_args(frames: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(B, 3, C), torch.randn(B, frames, C)


# -- declarations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: Clock("frames", -3), "stride"),
        (lambda: Clock("frames", untyped(2.5)), "stride"),
        (lambda: Clock("frames", True), "stride"),
        (lambda: KeepLast(-1), ""),
        (lambda: KeepLast(untyped("8")), ""),
        (lambda: PromptPlusLast(0, 0), ""),
        (lambda: kept("cache", 1, 9, KeepLast(8)), "start"),
        (lambda: kept("cache", 1, 2, untyped(8)), "retention"),
        (lambda: kept("cache", "1", 2, KeepLast(8)), "axis"),
        (lambda: Contract((FRAMES,), untyped({"cache": KeepLast(8)})), "regions"),
        (lambda: Contract((FRAMES,), (kept("cache", 1, 2, KeepLast(8), clock="frame"),)), "clock"),
        (lambda: Contract((Clock("a", 3), Clock("b", of="a", rate=-1)), ()), "rate"),
        (lambda: Contract((FRAMES, FRAMES), (kept("cache", 1, 2, KeepLast(8)),)), "clocks"),
    ],
)
def test_a_number_or_type_that_cannot_be(build: Any, field: str) -> None:
    with pytest.raises(ContractError) as caught:
        build()
    assert caught.value.field and field in caught.value.field


def test_a_clock_no_size_depends_on() -> None:
    with pytest.raises(UnusedClock, match="'idle'"):
        Contract((FRAMES, Clock("idle", 2)), (kept("cache", 1, 2, KeepLast(8)),))


@pytest.mark.parametrize("options", [{}, {"contract": {"clocks": []}}, {"contrat": BY_NAME["AppendLast"].contract}])
def test_options_without_a_contract(options: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match="contract"):
        cadence_fx.warm_up(torch.compile(AppendLast(), backend=BACKEND, options=options), *append_args())


def test_verbs_on_something_else() -> None:
    for verb in (cadence_fx.warm_up, cadence_fx.report):
        with pytest.raises(NotCompiled, match="AppendLast"):
            verb(AppendLast())
    with pytest.raises(NotCompiled, match="AppendLast"), cadence_fx.audit(AppendLast()):
        pass


def test_an_argument_that_does_not_exist() -> None:
    region = kept("cache", 1, 2, KeepLast(9), argument="cahce")
    error = refused(AppendLast(), Contract((FRAMES,), (region,)), *append_args())
    assert isinstance(error, UnknownArgument)
    assert "'cahce'" in str(error) and "did you mean 'cache'" in str(error)


def test_an_input_that_does_not_exist() -> None:
    contract = Contract((FRAMES,), BY_NAME["AppendLast"].contract.regions, inputs=(Input("z", axis=1, clock="frames"),))
    assert isinstance(refused(AppendLast(), contract, *append_args()), UnknownArgument)


@pytest.mark.parametrize("axis", [3, -4])
def test_an_axis_out_of_range(axis: int) -> None:
    error = refused(AppendLast(), Contract((FRAMES,), (kept("cache", axis, 2, KeepLast(9)),)), *append_args())
    assert isinstance(error, AxisOutOfRange)
    assert error.axis == axis and error.shape == (B, 2, C)


def test_a_contract_for_another_module() -> None:
    error = refused(AppendLast(), BY_NAME["LayerAttributes"].contract, *append_args())
    assert isinstance(error, (WrongModule, UnknownArgument))
    assert "layers" in str(error)


def test_a_size_no_clock_explains() -> None:
    def f(x: Tensor, cache: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return x * mask.sum(), torch.cat([cache, x], 1)[:, -9:]

    mask = torch.randn(7)
    torch._dynamo.mark_dynamic(mask, 0)
    error = refused(f, BY_NAME["AppendLast"].contract, *append_args(), mask)
    assert isinstance(error, UnexplainedSize)
    assert error.accessor == "mask" and error.axis == 0


def test_a_start_state_of_another_extent() -> None:
    error = refused(AppendLast(), BY_NAME["AppendLast"].contract, *append_args(frames=4))
    assert isinstance(error, ContractError)
    assert "cache" in str(error) and "4" in str(error)


class Keeps(nn.Module):
    """Appends or prepends and keeps a slice: what the code says, against what is declared."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self.code = code

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        pieces = [x.tanh(), cache] if self.code.startswith("prepend") else [cache, x.tanh()]
        raw = torch.cat(pieces, 1)
        y = x + raw.sum(1, keepdim=True)
        if self.code == "append 6 then zeros":
            return y, F.pad(raw[:, -6:], (0, 0, 2, 0))
        return y, {"prepend": raw[:, :8], "append oldest": raw[:, :8], "append 6": raw[:, -6:]}[self.code]


@pytest.mark.parametrize(
    ("code", "declared", "shown"),
    [
        ("prepend", KeepLast(8), "append"),
        ("append oldest", KeepLast(8), "last 8"),
        ("append 6", KeepLast(8), "last 8"),
        ("append 6 then zeros", KeepLast(8), "last 8"),
        ("append oldest", PromptPlusLast(4, 4), "4"),
        ("prepend", PromptPlusLast(4, 4, "prepend"), "4"),
    ],
)
def test_a_retention_the_code_contradicts(code: str, declared: Retention, shown: str) -> None:
    error = refused(Keeps(code), Contract((FRAMES,), (kept("cache", 1, 5, declared),)), *append_args(frames=5))
    assert isinstance(error, RetentionMismatch)
    assert error.region == "cache"
    assert shown in str(error.declared) and str(error.found) and str(error.found) in str(error)
    assert str(error.declared) != str(error.found)


# -- calls ------------------------------------------------------------------------------------------------------------


def settle(pair: Pair, misses: int, calls: int = 6) -> None:
    """Exactly ``misses`` calls ran eager so far; the stream goes on, replays again, and old outputs are intact."""
    assert pair.missed().total() == misses
    assert pair.since("late_captures") == 0
    for _ in range(calls):
        pair.call()
    assert pair.missed().total() == misses, pair.missed()
    pair.check_kept()


class Primed(Toy):
    def forward(self, x: Tensor, cache: Tensor | None = None) -> tuple[Tensor, Tensor]:
        raw = self.key(x) if cache is None else torch.cat([cache, self.key(x)], 1)
        return self.attend(x, raw), raw[:, -9:]


def test_a_call_before_priming() -> None:
    pair = Pair(on_argument(Primed, 3, kept("cache", 1, 3, KeepLast(9)), (B, 3, C)))
    for run in (pair.eager, pair.live):
        run.state = (None,)
    pair.call()
    settle(pair, misses=1)


def test_a_reset_of_one_region_of_two() -> None:
    pair = Pair(BY_NAME["Duplex"])
    pair.call()
    pair.call()
    fresh = noise(torch.Generator().manual_seed(5), B, 2, C)
    for run in (pair.eager, pair.live):
        run.state = (fresh.clone(), run.state[1])
    for _ in range(2):  # (2, 5) and (5, 5) are no points of the declared stream
        pair.call()
    assert pair.missed() == Counter(undeclared_extents=2)
    settle(pair, misses=2)


@pytest.mark.parametrize("name", ["PartialFlush", "AppendLast", "Rebound"])
@pytest.mark.parametrize("size", [1, 5, 11])
@pytest.mark.parametrize("after", [1, 4])
def test_a_chunk_of_an_undeclared_size(name: str, size: int, after: int) -> None:
    """The chunk, and any later call that meets an extent off the declared grid, is eager; then classes serve again."""
    pair = Pair(BY_NAME[name])
    points, misses = visits(pair.stream), 0
    for advance in [*pair.stream.calls * after, {"frames": size}, *pair.stream.calls * 4]:
        misses += (frozenset(pair.eager.extents().items()), frozenset(advance.items())) not in points
        pair.call(advance)
    settle(pair, misses)


class Plain(nn.Module):
    """No parameters, so that inputs of any dtype are legal."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        raw = torch.cat([cache, x.tanh()], 1)
        return x + torch.softmax(raw, 1).sum(1, keepdim=True), raw[:, -9:]


def test_another_dtype_and_back() -> None:
    pair = Pair(on_argument(Plain, 3, kept("cache", 1, 2, KeepLast(9)), (B, 2, C)))
    pair.call()
    single = [run.state for run in (pair.eager, pair.live)]
    for run in (pair.eager, pair.live):
        run.state = (run.state[0].double(),)
    for _ in range(2):
        pair.feed(torch.randn(B, 3, C, dtype=torch.float64))
    assert pair.missed().total() == 2
    pair.eager.state, pair.live.state = single
    settle(pair, misses=2)


def test_another_stride_and_back() -> None:
    pair = Pair(BY_NAME["AppendLast"])
    pair.call()
    pair.feed(torch.randn(B, C, 3).transpose(1, 2))
    settle(pair, misses=1)


def test_an_input_that_requires_grad() -> None:
    pair = Pair(BY_NAME["AppendLast"])
    pair.call()
    gradients = []
    with torch.enable_grad():
        for run in (pair.eager, pair.live):
            torch.manual_seed(3)
            x = torch.randn(B, 3, C, requires_grad=True)
            y = run.call(x)
            (y.square().sum() + run.state[0].sum()).backward()
            gradients.append((y, x.grad, run.module.key.weight.grad))
    for actual, expected, what in zip(gradients[1], gradients[0], ("y", "x.grad", "weight.grad"), strict=True):
        assert_same(actual, expected, what)
    for run in (pair.eager, pair.live):
        run.state = (run.state[0].detach(),)
    settle(pair, misses=1)


def test_two_streams_on_one_step() -> None:
    """The state of each stream is passed while the other's holds the carry; both stay exact, held states included."""
    pair = Pair(BY_NAME["AppendLast"])
    other = Pair(BY_NAME["AppendLast"], warm=False)
    other.live.step, other.calls = pair.step, 500
    other.restart(7)
    for i in range(24):
        (pair, other)[i % 3 == 1].call()
        pair.check_state()
        other.check_state()
    pair.check_kept()
    other.check_kept()


@pytest.mark.parametrize("age", [1, 4])
def test_a_stale_cache(age: int) -> None:
    pair = Pair(BY_NAME["AppendLast"])
    pair.call()
    (old,) = pair.live.state
    for _ in range(age):
        pair.call()
    with pytest.raises(StaleState, match="cache"):
        pair.step(torch.randn(B, 3, C), old)
    pair.check_state()
    settle(pair, misses=0)


class LooksUp(Toy):
    """The lookup raises for an index out of range, in the middle of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, C)

    def forward(self, ids: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        raw = torch.cat([cache, self.key(self.table(ids))], 1)
        return self.attend(self.table(ids + 1), raw), raw[:, -9:]


class LooksUpOnModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lookup, self.hist = LooksUp(), torch.ones(B, 2, C)

    def forward(self, ids: Tensor) -> Tensor:
        y, self.hist = self.lookup(ids, self.hist)
        return y


def ids(g: torch.Generator, advance: Any) -> tuple[Tensor, ...]:
    return (torch.randint(0, 4, (B, advance["frames"]), generator=g),)


def lookups() -> Iterator[Stream]:
    yield on_argument(LooksUp, 3, kept("cache", 1, 2, KeepLast(9)), (B, 2, C), inputs=ids)
    stream = on_module(
        LooksUpOnModule,
        3,
        (own("hist", 1, 2, KeepLast(9)),),
        lambda g: {"hist": noise(g, B, 2, C)},
        lambda m: {"hist": [m.hist]},
    )
    yield Stream(**{f: getattr(stream, f) for f in stream.__dataclass_fields__} | {"inputs": ids})


@pytest.mark.parametrize("stream", list(lookups()), ids=lambda s: s.name)
@pytest.mark.parametrize("calls", [0, 1, 5])
def test_an_exception_in_the_middle_of_a_call(stream: Stream, calls: int) -> None:
    pair = Pair(stream)
    for _ in range(calls):
        pair.call()
    for run in (pair.eager, pair.live):
        with pytest.raises(IndexError):
            run.call(torch.full((B, 3), 4))
    pair.check_state()
    settle(pair, misses=0)
