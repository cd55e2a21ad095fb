"""Recordings in parts on a device: kernels that do not repeat run eager between CUDA graphs that share a pool."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cadence_fx
from bench import vendor
from cadence_fx import Clock, Contract, KeepLast, parts
from cadence_fx.adapters.token2wav import Geometry
from cadence_fx.adapters.token2wav_vocoder import PlainNumbers, VocoderStep
from cadence_fx.lookup import program_of
from cadence_fx.recorder import DevicePool
from tests.backend.test_eager_breaks import OPERATORS, Between, Shifted, Twice, op, raises_and_goes_on, stream, warmed
from tests.harness import assert_same, compile_with
from tests.streams import kept
from tests.toys import Toy

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.fixture(autouse=True, params=[torch.no_grad, torch.inference_mode])
def _serving(request: pytest.FixtureRequest) -> Iterator[None]:
    with request.param():
        yield


def assert_eagers(module: torch.nn.Module, step: Any, calls: int) -> None:
    for i, (mine, right) in enumerate(zip(stream(step, calls, DEVICE), stream(module, calls, DEVICE), strict=True)):
        assert_same(mine, right, f"result {i}")


@pytest.mark.parametrize("kind", OPERATORS, ids=lambda kind: kind.__name__)
def test_every_call_replays_and_every_byte_is_eagers(kind: type[Toy]) -> None:
    torch.manual_seed(0)
    module = kind().eval().to(DEVICE)
    step = warmed(copy.deepcopy(module), DEVICE)
    assert_eagers(module, step, 12)
    report = cadence_fx.report(step)
    assert (report["replays"], report["misses"], report["refusals"]) == (12, {}, {})
    assert report["eager_operators"] == {"not_reproducible": 12 * OPERATORS[kind]}


class Draws(Toy):
    """Draws in both parts, which the generator gives in eager's order."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, self.key(x)], 1)
        shaken = op.weathered(frames + torch.rand_like(frames))
        return self.attend(x, shaken + torch.randn_like(shaken)), frames[:, -6:]


def test_both_parts_draw_what_eager_draws() -> None:
    module = Draws().eval().to(DEVICE)
    step = warmed(copy.deepcopy(module), DEVICE)
    states, found = [], []
    for each in (step, module):
        torch.cuda.manual_seed(5)
        found.append(stream(each, 9, DEVICE))
        states.append(torch.cuda.get_rng_state())
    for i, (mine, right) in enumerate(zip(*found, strict=True)):
        assert_same(mine, right, f"result {i}")
    assert torch.equal(*states)


class Histogram(Toy):
    """Additions of many threads to a few cells, which come in any order."""

    def forward(self, x: Tensor, index: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, torch.tanh(x)], 1)
        cells = torch.zeros(4, device=x.device).index_add_(0, index, frames[0, -1].sin() * 1e3)
        return cells * torch.softmax(cells, 0), frames[:, -3:]


def test_atomic_additions() -> None:
    cells = 1 << 20
    contract = Contract((Clock("frames", 1),), (kept("cache", 1, 1, KeepLast(3)),))
    step = compile_with(Histogram().eval().to(DEVICE), contract)

    def given() -> list[Tensor]:
        return [torch.randn(1, 1, cells, device=DEVICE), torch.randint(4, (cells,), device=DEVICE)]

    cadence_fx.warm_up(step, *given(), torch.randn(1, 1, cells, device=DEVICE))
    state = torch.randn(1, 1, cells, device=DEVICE)
    with cadence_fx.audit(step) as ledger:
        for _ in range(6):
            _, state = step(*given(), state)
    assert ledger.calls == 6
    report = cadence_fx.report(step)
    assert (report["replays"], report["misses"], report["eager_operators"]) == (6, {}, {"not_reproducible": 6})
    assert [row["compared_inputs"] for row in report["class_table"]] == [3] * 3
    assert all("index_add" in row["eager_operators"][0] for row in report["class_table"])


def test_a_part_that_fails_leaves_everything_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = parts.Parts._begin

    def fails(self: parts.Parts) -> None:
        begin(self)
        if len(self.graphs) == 2:
            raise RuntimeError("injected")

    monkeypatch.setattr(parts.Parts, "_begin", fails)
    module = Between().eval().to(DEVICE)
    step = warmed(copy.deepcopy(module), DEVICE)
    report = cadence_fx.report(step)
    assert report["classes"] == 0 and report["refusals"] == {"capture_failed": 3}
    assert_eagers(module, step, 4)
    monkeypatch.undo()
    torch.rand(3, device=DEVICE)  # the generator is not taken to be capturing
    other = warmed(copy.deepcopy(module), DEVICE)
    assert_eagers(module, other, 8)
    assert cadence_fx.report(other)["replays"] == 8


@pytest.mark.parametrize("kind", [Between, Twice, Shifted], ids=lambda kind: kind.__name__)
def test_one_that_raises_leaves_the_state_as_it_was(kind: type[Toy], monkeypatch: pytest.MonkeyPatch) -> None:
    raises_and_goes_on(kind, DEVICE, monkeypatch)


def test_what_a_class_held_is_let_go() -> None:
    pool = DevicePool.of(torch.device(DEVICE, torch.cuda.current_device()))
    live = len(pool.live)
    step = warmed(Between().eval().to(DEVICE), DEVICE)
    assert len(pool.live) == live + 3
    program_of(step, "test").close()
    assert len(pool.live) == live


@pytest.mark.skipif(not vendor.available(), reason="the vendor package stepaudio2-minicpmo is not installed")
def test_the_released_vocoder_under_stock_flags() -> None:
    if not torch.is_inference_mode_enabled():
        pytest.skip("the vendor serves in inference mode")
    geometry = Geometry(prompt=302, steps=10)
    vocoder = vendor.build_vocoder(vendor.RELEASED, torch.device(DEVICE))
    numbers = PlainNumbers(vocoder)
    options: dict[str, Any] = {"contract": geometry.vocoder_contract(8)}
    plain = VocoderStep(vocoder, geometry, overlap=8)
    step = torch.compile(plain, backend=cadence_fx.cadence, dynamic=False, options=options)

    def given() -> list[Tensor]:
        return [torch.randn(1, 80, 58, device=DEVICE), torch.randn(1, 1, 8 * 480, device=DEVICE)]

    cadence_fx.warm_up(step, *given())
    with cadence_fx.audit(step) as ledger:
        for _ in range(4):
            step(*given())
    numbers.release()
    assert ledger.calls == 4
    report = cadence_fx.report(step)
    assert (report["replays"], report["misses"], report["refusals"]) == (4, {}, {})
    assert sum(report["eager_operators"].values()) in (0, 8), "two transposed convolutions, or a device that repeats"
