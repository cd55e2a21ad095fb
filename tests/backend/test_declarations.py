"""The less usual things a contract says: look-ahead, growth, scratch, read-only state, rates and offsets of inputs."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from cadence_fx.clock import Clock
from cadence_fx.contract import Contract, Input, Region
from cadence_fx.retention import KeepLast, Pinned
from tests.harness import Pair
from tests.streams import BY_NAME, Stream, declared, kept, noise, visits
from tests.toys import B, C, T, Toy


@pytest.fixture(autouse=True)
def _serving() -> None:
    torch.set_grad_enabled(False)


def played(stream: Stream, carried: tuple[str, ...] = ()) -> Pair:
    """Three turns, all replayed; the regions ``carried`` (all, if none are named) stay at one address."""
    assert set(declared(stream.contract)) == visits(stream)
    pair = Pair(stream)
    for turn in range(3):
        pair.restart(turn, everything=False)
        for _ in range(7):
            pair.call()
        if stream.flushes:
            pair.call(stream.flushes[turn % len(stream.flushes)])
    pair.check_kept()
    assert pair.missed() == Counter()
    assert pair.since("late_captures") == 0
    assert all(len(pair.addresses[name]) == 1 for name in carried or pair.addresses)
    return pair


def one_cache(module: type[Toy], contract: Contract, start: int, inputs: Any, flushes: tuple[int, ...] = ()) -> Stream:
    (clock,) = (c for c in contract.clocks if c.stride is not None)
    return Stream(
        module,
        contract,
        fresh=lambda g: (noise(g, B, start, C),),
        inputs=inputs,
        where=lambda m, s: {"cache": [s[0]]},
        axes={"cache": 1},
        calls=({"frames": clock.stride or 0},),
        flushes=tuple({"frames": n} for n in flushes),
    )


class LooksAhead(Toy):
    """Two frames more than the call advances are presented, attended and dropped; a flush brings them as its own."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        fresh = x.size(1) - 2
        raw = torch.cat([cache, self.key(x)], 1)
        return self.attend(x[:, :fresh], raw), raw[:, : cache.size(1) + fresh][:, -9:]


def test_look_ahead() -> None:
    contract = Contract(
        (Clock("frames", 3, lookahead=2, flush=(1, 2)),),
        (kept("cache", 1, 2, KeepLast(9)),),
        inputs=(Input("x", axis=1, clock="frames", offset=2),),
    )
    assert contract.envelope("cache") == 9 + 3 + 2
    played(one_cache(LooksAhead, contract, 2, lambda g, a: (noise(g, B, a["frames"] + 2, C),), flushes=(1, 2)))


class Upsamples(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        raw = torch.cat([cache, torch.repeat_interleave(self.key(x), 2, 1)], 1)
        return self.attend(x, raw), raw[:, -15:]


class Pools(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        raw = torch.cat([cache, self.key(x).unflatten(1, (-1, 2)).mean(2)], 1)
        return self.attend(x, raw), raw[:, -7:]


@pytest.mark.parametrize(
    ("module", "growth", "bound", "stride"), [(Upsamples, 2, 15, 3), (Pools, Fraction(1, 2), 7, 4)]
)
def test_growth(module: type[Toy], growth: int | Fraction, bound: int, stride: int) -> None:
    region = kept("cache", 1, 1, KeepLast(bound), growth=growth)
    contract = Contract((Clock("frames", stride),), (region,))
    played(one_cache(module, contract, 1, lambda g, a: (noise(g, B, a["frames"], C),)))


class SamplesIn(Toy):
    """Four samples a frame come in, with one of overlap."""

    def forward(self, samples: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        x = samples.unfold(1, 5, 4).mean(-1, keepdim=True).expand(-1, -1, C)
        raw = torch.cat([cache, self.key(x)], 1)
        return self.attend(x, raw), raw[:, -6:]


def test_an_input_with_a_rate_and_an_offset() -> None:
    contract = Contract(
        (Clock("frames", 3, flush=(1,)),),
        (kept("cache", 1, 0, KeepLast(6)),),
        inputs=(Input("samples", axis=1, clock="frames", rate=4, offset=1),),
    )
    played(one_cache(SamplesIn, contract, 0, lambda g, a: (noise(g, B, 4 * a["frames"] + 1),), flushes=(1,)))


def test_declared_scratch() -> None:
    """The solver's over-sized buffer is declared to hold nothing between calls."""
    stream = BY_NAME["SolverWorkspace"]
    work = Region(
        "work",
        attribute="work",
        axis=(0, 2),
        clock=("steps", "frames"),
        retention=Pinned(20),
        lifetime="operator",
    )
    contract = replace(stream.contract, regions=(*stream.contract.regions, work))
    pair = played(replace(stream, contract=contract))
    assert pair.live.module.work.shape[0] == T


class Prompted(Toy):
    def forward(self, x: Tensor, cache: Tensor, prompt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raw = torch.cat([cache, self.key(x)], 1)
        return self.attend(x, prompt) + self.attend(x, raw), raw[:, -6:], prompt


def test_a_read_only_region_that_changes_with_the_turn() -> None:
    """A prompt: read by every call, written by none, another one in the next turn."""
    prompt = Region("prompt", argument="prompt", axis=1, clock="frames", retention=Pinned(5), mutability="read_only")
    played(
        Stream(
            Prompted,
            Contract((Clock("frames", 3),), (kept("cache", 1, 2, KeepLast(6)), prompt)),
            fresh=lambda g: (noise(g, B, 2, C), noise(g, B, 5, C)),
            inputs=lambda g, a: (noise(g, B, a["frames"], C),),
            where=lambda m, s: {"cache": [s[0]], "prompt": [s[1]]},
            axes={"cache": 1, "prompt": 1},
            calls=({"frames": 3},),
        ),
        carried=("cache[0]",),
    )
