"""Classes that draw random numbers: the bytes and the final state of every generator are eager's, or the call is."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cadence_fx
from cadence_fx import recorder
from cadence_fx.generators import Generators, all_sources, same_state
from cadence_fx.replay import ExactShapeReplay
from cadence_fx.retention import KeepLast
from tests.harness import Pair, assert_same
from tests.streams import kept, on_argument
from tests.toys import B, C, Toy


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield


def states() -> list[Any]:
    return Generators(all_sources()).read()


def assert_same_generators(found: list[Any], expected: list[Any]) -> None:
    assert all(map(same_state, found, expected)), "a generator is not as eager leaves it"


class Sampler(Toy):
    """A noisy decoder step; the second draw has no effect but on the generator."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        y = self.attend(x + torch.randn_like(x), cache)
        torch.rand(5)
        return F.dropout(y, 0.25, True), torch.cat([cache, self.key(x)], 1)[:, -6:]


def sampler() -> Pair:
    return Pair(on_argument(Sampler, 2, kept("cache", 1, 2, KeepLast(6)), (B, 2, C)))


def test_C31_a_sampler_draws_what_eager_draws() -> None:
    """pytorch#141645: 30 calls in a row, the final state of the generator included."""
    pair = sampler()
    inputs = [pair.eager.inputs(i, {"frames": 2})[0] for i in range(30)]
    runs = []
    for run in (pair.eager, pair.live):
        torch.manual_seed(5)
        runs.append(([run.call(x) for x in inputs], states()))
    for i, (found, expected) in enumerate(zip(runs[1][0], runs[0][0], strict=True)):
        assert_same(found, expected, f"call {i}")
    pair.check_state()
    assert_same_generators(runs[1][1], runs[0][1])
    assert pair.missed() == Counter() and pair.since("replays") == 30


def test_warm_up_leaves_every_generator_alone() -> None:
    pair = sampler()
    example = pair.live.inputs(3, {"frames": 2})
    random.random(), np.random.normal(), torch.rand(1)
    before = states()
    cadence_fx.warm_up(pair.step, *example, *pair.live.state)
    assert_same_generators(states(), before)


def test_the_report_tells_who_draws() -> None:
    pair = sampler()
    report = cadence_fx.report(pair.step)
    count = report["classes"]
    assert report["effects"] == {"pure": 0, "device-random": count, "refused": 0}
    assert {row["effects"] for row in report["class_table"]} == {"device-random"}
    assert {tuple(row["draws"]) for row in report["class_table"]} == {("torch's CPU generator",)}
    assert f"{count} device-random" in str(report) and f'"device-random": {count}' in report.to_json()


def test_C32_a_new_seed_after_capture_counts() -> None:
    """pytorch#84614."""
    pair = sampler()
    for seed in (7, 7, 8):
        x = pair.eager.inputs(seed, {"frames": 2})[0]
        torch.manual_seed(seed)
        expected = pair.eager.call(x)
        torch.manual_seed(seed)
        assert_same(pair.live.call(x), expected, f"seed {seed}")
    assert pair.missed() == Counter()


def test_C33_two_classes_between_eager_draws_and_a_miss() -> None:
    """pytorch#176752: A B e B A m and so on; `m` has a size that no class serves."""
    noisy = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    replay = ExactShapeReplay(noisy, max_classes=2)
    sizes = {"A": 3, "B": 2, "m": 5}
    replay(torch.ones(3, 4)), replay(torch.ones(2, 4))

    def sequence(step: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(11)
        return [torch.rand(2) if s == "e" else step(torch.ones(sizes[s], 4)) for s in "ABeBAmABeeAmB"]

    for i, (found, expected) in enumerate(zip(sequence(replay), sequence(noisy), strict=True)):
        assert_same(found, expected, f"step {i}")
    assert dict(replay.ledger.misses) == {"too_many_classes": 2} and replay.ledger.replays == 10
    assert cadence_fx.report(replay)["effects"] == {"pure": 0, "device-random": 2, "refused": 0}


def test_C35_host_random_in_compiled_code() -> None:
    """pytorch#162228: Dynamo draws the number itself and passes it in; no class may hold one."""

    class Jitter(Toy):
        def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
            return self.attend(x * random.uniform(0, 1), cache), torch.cat([cache, self.key(x)], 1)[:, -6:]

    stream = on_argument(Jitter, 2, kept("cache", 1, 2, KeepLast(6)), (B, 2, C))
    pair = Pair(stream, warm=False)
    with pytest.raises(cadence_fx.NotServed) as refused:
        pair.warm_up()
    assert refused.value.reason == "host_random"
    pair.restart(0)
    pair.before = cadence_fx.report(pair.step).as_dict()
    for i in range(6):
        random.seed(i)
        x = pair.eager.inputs(i, {"frames": 2})[0]
        expected = pair.eager.call(x)
        random.seed(i)
        assert_same(pair.live.call(x), expected, f"call {i}")
    assert pair.missed() == Counter({"host_random": 6})


HOST: dict[str, Callable[[], float]] = {
    "Python's random module": random.random,
    "numpy's global state": np.random.random,
}


@pytest.mark.parametrize("name", HOST)
def test_a_plain_callable_that_draws_on_the_host_is_refused_for_good(name: str) -> None:
    draw = HOST[name]

    def f(x: Tensor) -> Tensor:
        return x * draw()

    replay = ExactShapeReplay(f)
    x = torch.ones(3)
    mark = Generators(all_sources())
    expected = [f(x) for _ in range(4)]
    after = states()
    mark.restore()
    for e in expected:
        assert_same(replay(x), e, "output")
    assert_same_generators(states(), after)
    assert dict(replay.ledger.refusals) == {"host_random": 1} and dict(replay.ledger.misses) == {"host_random": 4}
    (refused,) = cadence_fx.report(replay)["refused_classes"]
    assert refused["effects"] == "refused" and name in refused["detail"]


def test_dice_that_a_module_owns_are_the_hosts_too() -> None:
    class Shuffles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dice, self.numbers = random.Random(4), np.random.default_rng(4)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.dice.random() + float(self.numbers.random())

    eager, module = Shuffles(), Shuffles()
    replay = ExactShapeReplay(module)
    for i in range(3):
        assert_same(replay(torch.ones(2)), eager(torch.ones(2)), f"call {i}")
    assert dict(replay.ledger.refusals) == {"host_random": 1}
    assert "self.dice, self.numbers" in cadence_fx.report(replay)["refused_classes"][0]["detail"]


class FromGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor, g: torch.Generator | None = None) -> Tensor:
        return x + torch.rand(x.shape, generator=self.g) + torch.rand(x.shape, generator=g) + torch.rand(x.shape)


def test_several_generators_and_one_that_is_an_argument() -> None:
    """An argument, an attribute and the default one; each argument by identity has a class of its own."""
    eager, module = FromGenerator(), FromGenerator()
    replay = ExactShapeReplay(module)
    mine, theirs = [[torch.Generator().manual_seed(s) for s in (2, 3)] for _ in range(2)]
    x = torch.zeros(3)
    for i in (0, 1, 0, 1, 1, None, 0):
        torch.manual_seed(20)
        expected = eager(x, theirs[i]) if i is not None else eager(x)
        after = states()
        torch.manual_seed(20)
        assert_same(replay(x, mine[i]) if i is not None else replay(x), expected, f"generator {i}")
        assert_same_generators(states(), after)
    for a, b in zip([*mine, module.g], [*theirs, eager.g], strict=True):
        assert torch.equal(a.get_state(), b.get_state())
    assert len(replay.classes) == 3 and not replay.ledger.misses
    assert all(len(c.effects.draws) == (3 if c.plan.generators else 2) for c in replay.classes)


def test_an_attribute_that_becomes_another_generator() -> None:
    module = FromGenerator()
    replay = ExactShapeReplay(module)
    x = torch.zeros(3)
    replay(x)
    for seed in (5, 6):
        module.g, twin = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
        torch.manual_seed(1)
        expected = x + torch.rand(3, generator=twin) + torch.rand(3) + torch.rand(3)
        torch.manual_seed(1)
        assert_same(replay(x), expected, f"seed {seed}")
        assert torch.equal(module.g.get_state(), twin.get_state())
    assert len(replay.classes) == 3


def test_a_generator_that_nobody_can_find_is_refused() -> None:
    """Made in the call: on a device it could not even be made while a class is captured."""

    def f(x: Tensor) -> Tensor:
        return x + torch.rand(3, generator=torch.Generator().manual_seed(int(x[0])))

    replay = ExactShapeReplay(f)
    for value in (3.0, 3.0, 4.0):
        x = torch.full((3,), value)
        assert_same(replay(x), f(x), f"seed {value}")
    assert dict(replay.ledger.refusals) == {"hidden_generator": 1}


def test_a_callable_that_seeds_itself() -> None:
    def f(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return x + torch.rand(3)

    replay = ExactShapeReplay(f)
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected, after = f(torch.zeros(3)), states()
        torch.manual_seed(seed)
        assert_same(replay(torch.zeros(3)), expected, "output")
        assert_same_generators(states(), after)


def test_a_graph_that_draws_nothing_leaves_generators_to_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another thread draws while a class is captured must not be undone."""
    record = recorder.record

    def beside(*args: Any) -> Any:
        torch.rand(1)  # as if from another thread
        return record(*args)

    replayed = Pair(on_argument(Quiet, 2, kept("cache", 1, 2, KeepLast(6)), (B, 2, C)), warm=False)
    monkeypatch.setattr("cadence_fx.capture.record", beside)
    torch.manual_seed(3)
    replayed.live.restart(0)
    replayed.live.call(replayed.live.inputs(1, {"frames": 2})[0])
    drawn = torch.get_rng_state()
    torch.manual_seed(3)
    replayed.live.restart(0)
    assert not torch.equal(drawn, torch.get_rng_state())


class Quiet(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return self.attend(x, cache), torch.cat([cache, self.key(x)], 1)[:, -6:]
