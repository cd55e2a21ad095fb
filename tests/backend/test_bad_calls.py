"""A call that was not declared is eager and counted, gives eager's bytes, and the stream goes on."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadence_fx.errors import StaleState
from cadence_fx.retention import KeepLast
from tests.harness import Pair, assert_same
from tests.streams import BY_NAME, Stream, kept, noise, on_argument, on_module, own, visits
from tests.toys import B, C, Toy


@pytest.fixture(autouse=True)
def _serving() -> None:
    torch.set_grad_enabled(False)


def settle(pair: Pair, misses: int, calls: int = 6, recaptures: int = 0) -> None:
    """Exactly ``misses`` calls ran eager so far; the stream goes on, replays again, and old outputs are intact."""
    assert pair.missed().total() == misses
    assert pair.since("late_captures") <= recaptures
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
    # Dynamo may send every later call to the graph it made for the odd size; its classes are captured anew, once.
    settle(pair, misses, recaptures=len(pair.stream.contract.catalog()))
    pair.restart(1)
    settle(pair, misses, recaptures=len(pair.stream.contract.catalog()))


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


class LooksUpThenWrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lookup = LooksUp()
        self.hist: Tensor
        self.register_buffer("hist", torch.ones(B, 6, C))

    def forward(self, ids: Tensor) -> Tensor:
        y, new = self.lookup(ids, self.hist)
        self.hist.copy_(new[:, -6:])
        return y


def ids(g: torch.Generator, advance: Any) -> tuple[Tensor, ...]:
    return (torch.randint(0, 4, (B, advance["frames"]), generator=g),)


def on_attribute(module: type[nn.Module], start: int, bound: int) -> Stream:
    stream = on_module(
        module,
        3,
        (own("hist", 1, start, KeepLast(bound)),),
        lambda g: {"hist": noise(g, B, start, C)},
        lambda m: {"hist": [m.hist]},
    )
    return replace(stream, inputs=ids)


LOOKUPS = (
    on_argument(LooksUp, 3, kept("cache", 1, 2, KeepLast(9)), (B, 2, C), inputs=ids),
    on_attribute(LooksUpOnModule, 2, 9),
    on_attribute(LooksUpThenWrites, 6, 6),
)


@pytest.mark.parametrize("stream", LOOKUPS, ids=lambda s: s.name)
@pytest.mark.parametrize("calls", [0, 1, 5])
def test_an_exception_in_the_middle_of_a_call(stream: Stream, calls: int) -> None:
    pair = Pair(stream)
    for _ in range(calls):
        pair.call()
    for run in (pair.eager, pair.live):
        with pytest.raises(IndexError):
            run.call(torch.full((B, 3), 4))
    pair.check_state()
    settle(pair, misses=1)
