"""Tensors that are more than numbers in memory: lazy views, holes, quantized and sparse ones, exported memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import cadence_fx
from cadence_fx import Clock, Contract, KeepLast, Region
from cadence_fx.replay import ExactShapeReplay
from tests.harness import assert_same, compile_with, counts

CONTRACT = Contract(
    [Clock("frame", 2)],
    [Region("cache", argument="cache", result=1, axis=1, clock="frame", start=2, retention=KeepLast(6))],
)


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield


class Phases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.z = torch.complex(torch.arange(8.0), torch.arange(8.0) + 1)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, x], 1)
        return frames.sum(1) + torch.view_as_real(self.z.resolve_conj()).sum(-1), frames[:, -6:]


def test_an_attribute_that_became_a_conjugate_at_its_place() -> None:
    module = Phases()
    eager = copy.deepcopy(module)
    step = compile_with(module, CONTRACT)
    cadence_fx.warm_up(step, torch.randn(1, 2, 8), torch.randn(1, 2, 8))
    x, cache = torch.randn(1, 2, 8), torch.randn(1, 2, 8)
    for turn in range(4):  # there and back
        assert_same(step(x, cache)[0], eager(x, cache)[0], f"turn {turn}")
        module.z, eager.z = module.z.conj(), eager.z.conj()


def parts(z: Tensor) -> Tensor:
    return torch.view_as_real(z.resolve_conj().resolve_neg()) * 1


def test_a_conjugate_of_an_aliased_argument() -> None:
    z = torch.randn(4, dtype=torch.complex64)
    replay = ExactShapeReplay(parts, aliased=[z])
    for given in (z, z.conj(), z, -z.conj().imag + 0j * z):
        assert_same(replay(given), parts(given), "the result")


@pytest.mark.parametrize("lazy", [lambda z: z.conj(), lambda z: torch._neg_view(z)])
def test_a_lazy_view_of_a_staged_argument(lazy: Callable[[Tensor], Tensor]) -> None:
    replay = ExactShapeReplay(parts)
    z = torch.randn(4, dtype=torch.complex64)
    replay(z)
    assert_same(replay(lazy(z)), parts(lazy(z)), "the result")
    assert counts(replay)["misses"] == {"layout": 1}


class Waves(nn.Module):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, x], 1)
        return torch.view_as_real(frames).sum(1), frames[:, -6:]


def test_a_state_that_is_a_lazy_view() -> None:
    module = Waves()
    step = compile_with(module, CONTRACT)
    x, start = (torch.randn(1, 2, 8, dtype=torch.complex64) for _ in range(2))
    cadence_fx.warm_up(step, x, start)
    _, mine = step(x, start)
    _, right = module(x, start)
    assert_same(step(x, mine.conj())[0], module(x, right.conj())[0], "the result")
    assert counts(step)["misses"] == {"layout": 1}
