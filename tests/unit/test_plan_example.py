"""Plans from an example call: the tensors' own bytes, and what is left when the call cannot be traced."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadence_fx.clock import Clock
from cadence_fx.contract import Contract, Input, Region
from cadence_fx.errors import ContractError
from cadence_fx.plan_example import from_example
from cadence_fx.planner import plan
from cadence_fx.retention import KeepLast, Ring
from cadence_fx.warmup import warm_up
from tests.harness import BACKEND

CONTRACT = Contract(
    [Clock("frame", 2)],
    [
        Region("cache", argument="caches[*]['k']", result="1[*]['k']", axis=1, clock="frame", retention=KeepLast(6)),
        Region("ring", attribute="layers.*.ring", axis=0, clock="frame", retention=Ring(4)),
    ],
    inputs=[Input("x", axis=1, clock="frame")],
)


class Layer(nn.Module):
    ring: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.register_buffer("ring", torch.zeros(4, 3))


class Decoder(nn.Module):
    def __init__(self, *, reads: bool = False) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList([Layer(), Layer()])
        self.reads = reads

    def forward(self, x: Tensor, caches: list[dict[str, Tensor]], *, scale: Tensor | None = None) -> Any:
        if self.reads and float(x.sum()) > 0:
            x = -x
        kept = [{"k": torch.cat([cache["k"], x], 1)[:, -6:]} for cache in caches]
        return sum(layer.linear(x) for layer in self.layers) * (1 if scale is None else scale), kept


def call(frames: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[dict[str, Tensor]]]:
    return torch.ones(1, frames, 8), [{"k": torch.zeros(1, 0, 8, dtype=dtype)} for _ in range(3)]


def test_bytes_are_those_of_the_tensors() -> None:
    scale = torch.ones((), dtype=torch.float64)
    deployment = from_example(Decoder(), call(), {"scale": scale}, contract=CONTRACT)
    report = plan(deployment)
    assert report.region("Decoder", "cache").bytes == 3 * 6 * 8 * 4
    assert report.region("Decoder", "ring").bytes == 2 * 4 * 3 * 4
    assert report.weights == 2 * 8 * 8 * 4 and not report.notes
    assert {entry.name: entry.bytes for entry in report.callables[0].inputs} == {"x": 2 * 8 * 4, "scale": 8}
    assert report.staging_bytes == 4 * (2 * 8 * 4 + 8)
    # 3 cat and 3 slices of them, 2 transposed weights and products, their sum from 0 and a product
    assert report.callables[0].operators in range(12, 20) and report.capture_seconds is not None


class Stateful(nn.Module):
    """Writes a buffer in place, rebinds an attribute and fills a container."""

    counter: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counter", torch.zeros(1))
        self.past: Any = torch.zeros(1, 0, 8)
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor, notes: list[Any] | None = None) -> Tensor:
        self.counter += 1
        self.past = torch.cat([self.past, x], 1)[:, -6:]
        self.seen["x"] = x
        if notes is not None:
            notes.append(x)
        return self.past * 2


def test_the_module_and_the_arguments_are_left_as_they_are() -> None:
    past = Region("past", attribute="past", axis=1, clock="frame", retention=KeepLast(6))
    contract = Contract([Clock("frame", 2)], [past], inputs=[Input("x", axis=1, clock="frame")])
    module, x, notes = Stateful(), torch.ones(1, 2, 8), list[Any]()
    before = module.past, module.counter
    report = plan(from_example(module, (x,), {"notes": notes}, contract=contract))
    assert report.callables[0].operators == 4 and report.region("Stateful", "past").bytes == 6 * 8 * 4
    assert all(new is old for new, old in zip((module.past, module.counter), before, strict=True))
    assert not module.counter.any() and not module.seen and not notes


def test_a_call_that_cannot_be_traced_is_planned_but_for_its_operators() -> None:
    report = plan(from_example(Decoder(reads=True), call(), contract=CONTRACT))
    assert report.region("Decoder", "cache").bytes == 3 * 6 * 8 * 4 and report.classes == 4
    assert report.capture_seconds is None and report.callables[0].operators is None
    (note,) = report.notes
    assert "test_plan_example.py:" in note and "cannot be traced" in note and note in str(report)


@pytest.mark.parametrize(
    "module, args, contract, told",
    [
        (3, call(), CONTRACT, "expected a torch.nn.Module, found int"),
        (Decoder(), call()[:1], CONTRACT, "does not fit the module: missing a required argument: 'caches'"),
        (Decoder(), call(), None, "no contract is declared for a Decoder"),
        (nn.Linear(8, 8), call()[:1], CONTRACT, "argument \"caches[*]['k']\""),
        (Decoder(), (call()[0], [{"k": torch.zeros(3)}]), CONTRACT, "axis 1 is declared, and the example has 1"),
        (Decoder(), (call()[0], call()[1] + call(dtype=torch.float64)[1]), CONTRACT, "differ in dtype or rank"),
    ],
)
def test_examples_that_contradict_are_refused(module: Any, args: Any, contract: Any, told: str) -> None:
    with pytest.raises(ContractError) as error:
        from_example(module, args, contract=contract)
    assert told in str(error.value)


class Windowed(nn.Module):
    """A cache at the rate of frames, and one at half of it; a scale that each call stages."""

    def forward(self, x: Tensor, cache: Tensor, halves: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        frames = torch.cat([cache, x], 1)
        kept = torch.cat([halves, x[:, ::2]], 1)[:, -3:]
        return (frames * scale).sum(1) + kept.sum(1), frames[:, -8:], kept


def test_a_plan_is_what_warm_up_captures() -> None:
    """Classes and bytes, the buffers of the engine counted by their storages."""
    contract = Contract(
        [Clock("frame", 2), Clock("half", of="frame", rate=Fraction(1, 2))],
        [
            Region("cache", argument="cache", result=1, axis=1, clock="frame", start=2, retention=KeepLast(8)),
            Region("halves", argument="halves", result=2, axis=1, clock="half", retention=KeepLast(3)),
        ],
        inputs=[Input("x", axis=1, clock="frame")],
    )
    args = torch.randn(1, 2, 8), torch.randn(1, 2, 8), torch.randn(1, 0, 8), torch.randn(8)
    options: dict[str, Any] = {"contract": contract}
    step = torch.compile(Windowed(), backend=BACKEND, options=options)
    with torch.no_grad():
        measured = warm_up(step, *args)
    report = plan(from_example(Windowed(), args, contract=contract))
    assert report.classes == measured["classes"] == 4
    assert report.session_bytes == measured["bytes"]["measured_carries"] == (8 + 3) * 8 * 4
    assert report.staging_bytes == measured["bytes"]["predicted_staging"] == 4 * (2 * 8 + 8) * 4
