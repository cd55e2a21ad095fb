"""Draws inside CUDA graphs, and captures that fail: generators, streams, memory and earlier classes as in eager."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cadence_fx
from cadence_fx.generators import Generators, all_sources, same_state
from cadence_fx.recorder import CudaRecording, DevicePool
from cadence_fx.replay import ExactShapeReplay
from cadence_fx.retention import KeepLast
from tests.harness import Pair, assert_same
from tests.streams import kept, on_argument
from tests.toys import B, C, Toy

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield


def states() -> list[Any]:
    return Generators(all_sources(torch.device(DEVICE, 0))).read()


def same_states(found: list[Any], expected: list[Any]) -> bool:
    return all(map(same_state, found, expected))


class Sampler(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        y = self.attend(x + torch.randn_like(x), cache)
        torch.rand(5, device=x.device)
        return F.dropout(y, 0.25, True), torch.cat([cache, self.key(x)], 1)[:, -6:]


def sampler() -> Pair:
    return Pair(on_argument(Sampler, 2, kept("cache", 1, 2, KeepLast(6)), (B, 2, C)), DEVICE)


def test_C31_a_sampler_draws_what_eager_draws() -> None:
    pair = sampler()
    inputs = [pair.eager.inputs(i, {"frames": 2})[0] for i in range(30)]
    runs = []
    for run in (pair.eager, pair.live):
        torch.manual_seed(5)
        runs.append(([run.call(x) for x in inputs], states()))
    for i, (found, expected) in enumerate(zip(runs[1][0], runs[0][0], strict=True)):
        assert_same(found, expected, f"call {i}")
    pair.check_state()
    assert same_states(runs[1][1], runs[0][1])
    assert pair.missed() == Counter() and pair.since("replays") == 30
    assert cadence_fx.report(pair.step)["effects"]["device-random"] > 0


def test_C32_a_new_seed_after_capture_counts() -> None:
    pair = sampler()
    for seed in (7, 7, 8):
        x = pair.eager.inputs(seed, {"frames": 2})[0]
        torch.manual_seed(seed)
        expected = pair.eager.call(x)
        torch.manual_seed(seed)
        assert_same(pair.live.call(x), expected, f"seed {seed}")
    assert pair.missed() == Counter()


def test_warm_up_moves_no_generator() -> None:
    pair = sampler()
    pair.live.restart(3)
    example = pair.live.inputs(3, {"frames": 2})
    torch.rand(3, device=DEVICE), torch.rand(3), random.random()
    before = states()
    cadence_fx.warm_up(pair.step, *example, *pair.live.state)
    assert same_states(states(), before)


def test_C33_two_classes_between_eager_draws_and_a_miss() -> None:
    noisy = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train().to(DEVICE)
    replay = ExactShapeReplay(noisy, max_classes=2)
    sizes = {"A": 3, "B": 2, "m": 5}
    replay(torch.ones(3, 4, device=DEVICE)), replay(torch.ones(2, 4, device=DEVICE))

    def sequence(step: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[Any]]:
        torch.manual_seed(11)
        found = []
        for s in "ABeBAmABeeAmB":
            found.append(
                torch.rand(2, device=DEVICE) if s == "e" else step(torch.ones(sizes[s], 4, device=DEVICE)).clone()
            )
        return found, states()

    (found, after), (expected, right) = sequence(replay), sequence(noisy)
    for i, (a, e) in enumerate(zip(found, expected, strict=True)):
        assert_same(a, e, f"step {i}")
    assert same_states(after, right)
    assert dict(replay.ledger.misses) == {"too_many_classes": 2} and replay.ledger.replays == 10


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": torch.rand_like,
    "randn": lambda x: torch.randn(x.shape, device=x.device),
    "randint": lambda x: torch.randint(0, 9, x.shape, device=x.device),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x.softmax(1), 2),
    "dropout": lambda x: F.dropout(x, 0.3, True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.2),
    "none": lambda x: x + 1,
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_increment_of_every_kind_of_draw(name: str) -> None:
    """Seed and Philox offset after a replay are those after eager, and so are the bytes; or the class is refused."""
    draw = DRAWS[name]
    replay = ExactShapeReplay(draw, name=name)
    x = torch.randn(33, 64, device=DEVICE)
    for seed in (1, 2, 2):
        torch.manual_seed(seed)
        expected, after = [draw(x) for _ in range(3)], states()
        torch.manual_seed(seed)
        for e in expected:
            assert_same(replay(x), e, name)
        assert same_states(states(), after)
    assert len(replay.classes) == 1 or replay.ledger.refusals, "neither replayed nor counted"


def test_several_generators_and_generator_arguments() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g = torch.Generator(DEVICE).manual_seed(1)

        def forward(self, x: Tensor, g: torch.Generator) -> Tensor:
            own, given = (torch.rand(x.shape, device=DEVICE, generator=each) for each in (self.g, g))
            return x + own + given + torch.rand_like(x)

    eager, module = Draws(), Draws()
    replay = ExactShapeReplay(module)
    mine, theirs = [[torch.Generator(DEVICE).manual_seed(s) for s in (2, 3)] for _ in range(2)]
    x = torch.zeros(300, device=DEVICE)
    for call, i in enumerate((0, 1, 0, 1, 1, 0)):
        if call == 3:  # another seed for one that is captured
            mine[0].manual_seed(77), theirs[0].manual_seed(77)
        torch.manual_seed(20)
        expected, after = eager(x, theirs[i]), states()
        torch.manual_seed(20)
        assert_same(replay(x, mine[i]), expected, f"call {call}")
        assert same_states(states(), after)
        for a, b in zip([*mine, module.g], [*theirs, eager.g], strict=True):
            assert torch.equal(a.get_state(), b.get_state())
    assert len(replay.classes) == 2 and not replay.ledger.misses


@pytest.mark.parametrize("where", ["torch", "python"])
def test_a_draw_on_the_host_is_refused(where: str) -> None:
    def f(x: Tensor) -> Tensor:
        return x + torch.rand(3).to(DEVICE) if where == "torch" else x * random.random()

    replay = ExactShapeReplay(f)
    for seed in (1, 2):
        torch.manual_seed(seed), random.seed(seed)
        expected, after = f(torch.zeros(3, device=DEVICE)), states()
        torch.manual_seed(seed), random.seed(seed)
        assert_same(replay(torch.zeros(3, device=DEVICE)), expected, where)
        assert same_states(states(), after)
    assert dict(replay.ledger.refusals) == {"host_random": 1}


def test_a_draw_on_the_host_in_a_graph_of_the_device() -> None:
    class HostNoise(Toy):
        def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
            return self.attend(x + torch.rand(C).to(x.device), cache), torch.cat([cache, self.key(x)], 1)[:, -6:]

    pair = Pair(on_argument(HostNoise, 2, kept("cache", 1, 2, KeepLast(6)), (B, 2, C)), DEVICE)
    for i in range(4):
        x = pair.eager.inputs(i, {"frames": 2})[0]
        torch.manual_seed(i)
        expected = pair.eager.call(x)
        torch.manual_seed(i)
        assert_same(pair.live.call(x), expected, f"call {i}")
    assert pair.missed() == Counter({"host_random": 4})


def test_a_value_read_on_the_host_is_seen_before_anything_is_captured() -> None:
    def f(x: Tensor) -> Tensor:
        return x * x.sum().item()

    replay = ExactShapeReplay(f)
    x = torch.randn(8, device=DEVICE)
    assert_same(replay(x), f(x), "output")
    assert dict(replay.ledger.refusals) == {"host_read": 1}


def test_a_first_call_that_builds_a_table() -> None:
    class Lazy(nn.Module):
        table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.rand(4, device=DEVICE)
            return x + self.table + torch.rand_like(x)

    eager, module = Lazy(), Lazy()
    replay = ExactShapeReplay(module)
    x = torch.ones(4, device=DEVICE)
    for i in range(4):
        torch.manual_seed(i)
        expected, after = eager(x), states()
        torch.manual_seed(i)
        assert_same(replay(x), expected, f"call {i}")
        assert same_states(states(), after)
    assert dict(replay.ledger.misses) == {"initialises": 1} and replay.ledger.replays == 3


# -- captures that fail ------------------------------------------------------------------------------------------------


class Fault(RuntimeError):
    pass


def raising(*args: Any, **kwargs: Any) -> Any:
    raise Fault("injected")


def once(name: str, *, late: bool) -> Callable[[pytest.MonkeyPatch], None]:
    """The next call of that method of a graph fails, before or after it has done its work; later ones do not."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        original, left = getattr(torch.cuda.CUDAGraph, name), [1]

        def run(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                return original(*args, **kwargs)
            if late:
                original(*args, **kwargs)
            raise Fault("injected")

        monkeypatch.setattr(torch.cuda.CUDAGraph, name, run)

    return patch


def only_while_capturing(failure: Callable[[], object]) -> Callable[[Tensor], Tensor]:
    """Draws, and fails in the middle of the capture and nowhere else."""

    def f(x: Tensor) -> Tensor:
        y = x + torch.rand_like(x)
        if torch.cuda.is_current_stream_capturing():
            failure()
        return y * torch.rand_like(x)

    return f


def draws(x: Tensor) -> Tensor:
    return (x + torch.rand_like(x)) * torch.rand_like(x)


INSIDE: dict[str, Callable[[], object]] = {
    "python": raising,
    "synchronize": torch.cuda.synchronize,
    "host read": lambda: torch.ones(1, device=DEVICE).item(),
    "memory": lambda: torch.empty(1 << 46, dtype=torch.uint8, device=DEVICE),
}
AROUND: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "before begin": once("capture_begin", late=False),
    "after begin": once("capture_begin", late=True),
    "before end": once("capture_end", late=False),
    "after end": once("capture_end", late=True),
    "launch": lambda monkeypatch: monkeypatch.setattr(CudaRecording, "launch", raising),
}


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("stage", [*INSIDE, *AROUND])
def test_C34_a_capture_that_fails_hurts_nothing(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a class that draws and was captured before: it goes on, and so do eager draws, as if nothing was tried."""
    healthy, later = ExactShapeReplay(draws, name="healthy"), ExactShapeReplay(draws, name="later")
    x = torch.ones(64, device=DEVICE)
    healthy(x), healthy(x)
    f = only_while_capturing(INSIDE[stage]) if stage in INSIDE else draws
    failing = ExactShapeReplay(f, name="failing")
    stream, before = torch.cuda.current_stream(), allocated()

    def sequence(one: Callable[[Tensor], Tensor], two: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[Any]]:
        torch.manual_seed(3)
        return [one(x), two(x), torch.rand(9, device=DEVICE), two(x), one(x), torch.rand(9, device=DEVICE)], states()

    with monkeypatch.context() as patch:
        if stage in AROUND:
            AROUND[stage](patch)
        torch.manual_seed(3)
        first = failing(x)
    torch.manual_seed(3)
    assert_same(first, draws(x), "the call that was tried")
    assert torch.cuda.current_stream() == stream and not torch.cuda.is_current_stream_capturing()
    right, left = sequence(draws, draws)
    found, mine = sequence(failing, healthy)
    for i, (a, e) in enumerate(zip(found, right, strict=True)):
        assert_same(a, e, f"step {i}")
    assert same_states(mine, left)
    assert dict(failing.ledger.refusals) == {"out_of_memory" if stage == "memory" else "capture_failed": 1}
    assert len(healthy.classes) == 1 and not healthy.ledger.misses
    later(x), later(x)
    assert len(later.classes) == 1 and later.ledger.replays == 2
    later.close()
    del first, found, right
    assert allocated() <= before + (1 << 20)


def test_a_pool_whose_last_class_has_gone_is_not_used_again() -> None:
    """The allocator forgets a pool without users, and would stop at its handle."""
    torch.compiler.reset()
    gc.collect()  # what a failed test has left
    x = torch.ones(64, device=DEVICE)
    held = []
    for number in range(3):
        replay = ExactShapeReplay(draws, name=f"{number}")
        held.append(replay(x))
        assert len(replay.classes) == 1
        replay.close()
    pool = DevicePool.of(x.device)
    assert not pool.live


def test_draws_on_a_stream_of_ones_own() -> None:
    replay = ExactShapeReplay(draws)
    x = torch.ones(64, device=DEVICE)
    replay(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.manual_seed(2)
        expected = [draws(x) for _ in range(5)]
        torch.manual_seed(2)
        found = [replay(x) for _ in range(5)]
    side.synchronize()
    for i, (a, e) in enumerate(zip(found, expected, strict=True)):
        assert_same(a, e, f"call {i}")
