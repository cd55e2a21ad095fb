"""Tensors that are more than numbers in memory: lazy views, holes, quantized and sparse ones, exported memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import cadence_fx
from cadence_fx import Clock, Contract, KeepLast, Region
from cadence_fx.bytesops import bytes_equal
from cadence_fx.replay import ExactShapeReplay
from tests.harness import assert_same, compile_with, counts

CONTRACT = Contract(
    [Clock("frame", 2)],
    [Region("cache", argument="cache", result=1, axis=1, clock="frame", start=2, retention=KeepLast(6))],
)

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch warns of quantized, CSR and nested tensors


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


UNUSUAL: dict[str, Callable[[Tensor], Tensor]] = {
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "quantized by channel": lambda x: torch.quantize_per_channel(x, x.new_ones(3), torch.zeros(3), 0, torch.qint8),
    "sparse": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "mkldnn": lambda x: x.to_mkldnn(),
    "meta": lambda x: x.to("meta"),
    "nested": lambda x: torch.nested.nested_tensor([x, x[:1]]),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_an_unusual_result(kind: str) -> None:
    make = UNUSUAL[kind]
    replay = ExactShapeReplay(lambda x: make(x))
    for _ in range(2):
        assert bytes_equal(replay(torch.eye(3)), make(torch.eye(3)))
    assert counts(replay)["replays"] == 0 and sum(counts(replay)["misses"].values()) == 2


@pytest.mark.parametrize("aliased", [False, True])
@pytest.mark.parametrize("kind", UNUSUAL)
def test_an_unusual_argument(kind: str, aliased: bool) -> None:
    given = UNUSUAL[kind](torch.eye(3))
    replay = ExactShapeReplay(lambda x, y: y * 2, aliased=[given] if aliased else [])
    for _ in range(2):
        assert_same(replay(given, torch.ones(2)), torch.full((2,), 2.0), "the result")
    assert counts(replay)["replays"] == 0 and sum(counts(replay)["misses"].values()) == 2


@pytest.mark.parametrize("kind", UNUSUAL)
def test_an_unusual_tensor_within(kind: str) -> None:
    make = UNUSUAL[kind]

    def f(x: Tensor) -> Tensor:
        make(x)
        return x * 2

    replay = ExactShapeReplay(f)
    for _ in range(2):
        assert_same(replay(torch.eye(3)), torch.eye(3) * 2, "the result")


LOOKS_AROUND: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "holes": (lambda x: x[::2], lambda x: x.as_strided((7,), (1,)).clone()),
    "holes of a view": (lambda x: x[::2], lambda x: x[1:].as_strided((5,), (1,)) * 1),
    "an offset": (lambda x: x[8:], lambda x: x.as_strided((4,), (1,), 0) * 1),
    "a storage": (lambda x: x[8:], lambda x: x.new_empty(0).set_(x.untyped_storage(), 0, (4,), (1,)) * 1),
}


@pytest.mark.parametrize("case", LOOKS_AROUND)
def test_memory_around_the_elements_of_an_argument(case: str) -> None:
    cut, f = LOOKS_AROUND[case]
    replay = ExactShapeReplay(f)
    for _ in range(2):
        x = cut(torch.randn(16))
        assert_same(replay(x), f(x), "the result")
    assert counts(replay)["misses"] == {"layout": 2}


def test_elements_of_an_argument_seen_in_other_strides() -> None:
    def f(x: Tensor) -> Tensor:
        return x[2:].as_strided((3, 4), (2, 1)) * 1

    replay = ExactShapeReplay(f)
    for _ in range(2):
        x = torch.randn(10)
        assert_same(replay(x), f(x), "the result")
    assert counts(replay)["replays"] == 2


class Gap(nn.Module):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, x], 1)
        return x.as_strided((16,), (1,)).clone(), frames[:, -6:]


def test_memory_around_the_elements_of_an_argument_of_a_graph() -> None:
    step = compile_with(Gap(), CONTRACT)
    cadence_fx.warm_up(step, torch.randn(1, 2, 16)[:, :, ::2], torch.randn(1, 2, 8))
    x, cache = torch.randn(1, 2, 16)[:, :, ::2], torch.randn(1, 2, 8)
    assert_same(step(x, cache)[0], Gap()(x, cache)[0], "the result")
    assert counts(step)["misses"] == {"layout": 1}


def test_a_branch_on_an_array_is_not_tried_with_other_data() -> None:
    seen = []

    def f(x: Tensor) -> Tensor:
        seen.append(float(x.numpy().max()))
        return x + 1

    ExactShapeReplay(f, frozen=True)(torch.ones(64))
    assert set(seen) == {1.0}


class Sums(nn.Module):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, x], 1)
        return frames.sum(1), frames[:, -6:]


def test_one_tensor_that_is_both_the_input_and_the_state() -> None:
    step, eager = compile_with(Sums(), CONTRACT), Sums()
    cadence_fx.warm_up(step, torch.randn(1, 2, 8), torch.randn(1, 2, 8))
    both, x = torch.randn(1, 2, 8), torch.randn(1, 2, 8)
    for _ in range(2):
        (mine, state), (right, expected) = step(both, both), eager(both, both)
        assert_same(mine, right, "the result")
        assert_same(state, expected, "the state")
        for actual, wanted in zip(step(x, state), eager(x, expected), strict=True):
            assert_same(actual, wanted, "what follows")
    assert counts(step)["misses"] == {"retention": 2} and counts(step)["replays"] == 2
