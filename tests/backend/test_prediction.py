"""What the contract and the example call predict of a warm-up, beside what it comes to.

That all streams of the suite come to exactly what is predicted is checked where they are played (`check_stream`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cadence_fx
from cadence_fx import Clock, Contract, Input, KeepLast, Pinned, Region
from cadence_fx.accounts import TOLERANCE, _order
from cadence_fx.prediction import Prediction, predict
from tests.harness import check_prediction, compile_with, counts
from tests.streams import STREAMS, Run

C = 8
FRAME = Clock("frame", 2, lookahead=1, flush=[1])
CACHE = Region("cache", argument="cache", result=1, axis=1, clock="frame", start=2, retention=KeepLast(6))
WORK = Region("work", attribute="work", axis=1, clock="frame", retention=KeepLast(6), lifetime="unit")


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield


class Worked(nn.Module):
    """A workspace of so many frames, a chunk that a call brings, and a table that it brings beside."""

    def __init__(self, frames: int) -> None:
        super().__init__()
        self.work: Tensor
        self.register_buffer("work", torch.zeros(1, frames, C), persistent=False)

    def forward(self, x: Tensor, cache: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        raw = cache.size(1) + x.size(1)
        self.work[:, :raw] = torch.cat([cache, x], 1)
        frames = self.work[:, :raw]
        return frames.sum(1) + table.sum(), frames[:, -6:].clone()


CONTRACT = Contract([FRAME], [CACHE, WORK], inputs=[Input("x", axis=1, clock="frame")])
EXAMPLE = torch.zeros(1, 2, C), torch.zeros(1, 2, C), torch.zeros(100, dtype=torch.float64)


def warmed(frames: int = 9, passes: Any = None) -> Any:
    step = compile_with(Worked(frames), CONTRACT, passes)
    cadence_fx.warm_up(step, *EXAMPLE)
    return step


def test_bytes_are_those_of_equation_6() -> None:
    module = Worked(9)
    found = predict(CONTRACT, dict(zip(("x", "cache", "table"), EXAMPLE, strict=True)), module)
    frame, table = C * 4, 100 * 8
    assert sum(found.staging.values()) == 3 * (2 * frame + table) + 3 * (1 * frame + table)
    assert found.carries == {"cache": 6 * frame}
    assert found.workspaces == {"work": 9 * frame}  # the bound, the stride and the look-ahead
    assert found.flight["frame +2: cache 4 -> 6"] == (2 + table // frame + 4 + 2) * frame


def test_a_warm_up_comes_to_what_was_predicted() -> None:
    step = warmed()
    report = counts(step)
    check_prediction(report)
    staging, carries = report["prediction"]["staging"]["measured"], report["prediction"]["carries"]["measured"]
    assert staging > TOLERANCE * (staging + carries)  # without staging the prediction would be wrong
    assert "predicted and measured: classes 6 and 6, staging 5.0 KiB and 5.0 KiB, carries 192 B and 192 B" in str(
        cadence_fx.report(step)
    )


def test_a_workspace_that_is_larger_than_the_envelope_is_told() -> None:
    report = counts(warmed(frames=40))
    assert report["prediction"]["workspaces"] == {"predicted": 9 * C * 4, "measured": 40 * C * 4}
    assert not report["prediction"]["held"]


def test_a_refused_class_is_told() -> None:
    class Reads(Worked):
        def forward(self, x: Tensor, cache: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
            y, state = super().forward(x.mul_(2), cache, table)
            return y, state

    step = compile_with(Reads(9), CONTRACT)
    cadence_fx.warm_up(step, *EXAMPLE)
    report = counts(step)
    assert report["prediction"]["classes"] == {"predicted": 6, "measured": 0} and not report["prediction"]["held"]
    assert "NOT HELD" in str(cadence_fx.report(step))


def test_a_second_mode_has_further_classes() -> None:
    step = warmed()
    before = counts(step)["prediction"]
    with torch.inference_mode():
        cadence_fx.warm_up(step, *(t.clone() for t in EXAMPLE))
    after = counts(step)["prediction"]
    assert (after["further_classes"], after["held"]) == (6, True)
    assert after["further_staging"] == before["staging"]["measured"] == after["staging"]["measured"]


def test_a_state_that_calls_only_read_is_a_carry_whose_bytes_are_proved() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, cache: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            frames = torch.cat([cache, x], 1)
            return frames.sum(1) * mask.sum(), frames[:, -6:].clone()

    mask = Region("mask", argument="mask", axis=0, clock="frame", retention=Pinned(4))
    step = compile_with(Masked(), Contract([FRAME], [CACHE, mask], inputs=[Input("x", axis=1, clock="frame")]))
    cadence_fx.warm_up(step, *EXAMPLE[:2], torch.ones(4))
    report = counts(step)
    found = report["prediction"]
    assert found["held"] and found["carries"] == {"predicted": 6 * C * 4 + 16, "measured": 6 * C * 4 + 16}
    assert found["further_staging"] == 5 * 16  # it is in a buffer of each of the six classes
    assert found["staging"]["predicted"] == found["staging"]["measured"]
    proof = next(each for each in report["proof"] if each["region"] == "mask")
    assert (proof["proved"], proof["shows"], proof["held_by"]) == (2, "unchanged", "proof and certificate")


def test_before_warm_up_nothing_is_predicted() -> None:
    assert "prediction" not in counts(compile_with(Worked(9), CONTRACT))


@pytest.mark.parametrize("stream", STREAMS, ids=lambda s: s.name)
def test_a_prediction_changes_nothing_and_needs_no_run(stream: Any) -> None:
    run = Run(stream, stream.build())
    run.restart(0)
    names = stream.module.forward.__code__.co_varnames[1:]
    arguments = dict(zip(names, (*run.inputs(1, stream.calls[0]), *run.state), strict=False))
    before = {name: [t.clone() for t in tensors] for name, tensors in run.tensors().items()}
    found = predict(stream.contract, arguments, run.module)
    assert len(found.staging) == len(stream.contract.catalog()) and all(found.carries.values())
    assert all(torch.equal(a, b) for name, ts in run.tensors().items() for a, b in zip(before[name], ts, strict=True))


@pytest.mark.parametrize("seconds, as_predicted", [((1.0, 2.0, 3.0), 3), ((3.0, 2.0, 1.0), 0), ((1.0, 3.0, 2.0), 2)])
def test_the_order_of_capture_times(seconds: tuple[float, ...], as_predicted: int) -> None:
    @dataclasses.dataclass
    class Captured:
        capture_seconds: float

    flight = {"a": 10, "b": 20, "c": 30}
    classes: dict[str, Any] = dict(zip(flight, map(Captured, seconds), strict=True))
    assert _order(Prediction({}, flight, {}, {}, False), classes) == {"pairs": 3, "as_predicted": as_predicted}


def test_a_state_that_nothing_reads_is_named_where_its_bytes_are_missing() -> None:
    class Fresh(nn.Module):
        def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
            return x + 1, x.repeat(1, 3, 1)[:, :6]

    frame = Clock("frame", 2)
    kept = dataclasses.replace(CACHE, start=6, retention=Pinned(6))
    step = compile_with(Fresh(), Contract([frame], [kept], inputs=[Input("x", axis=1, clock="frame")]))
    cadence_fx.warm_up(step, torch.ones(1, 2, C), torch.zeros(1, 6, C))
    assert counts(step)["prediction"]["unread"] == [kept.name]
    assert f"NOT HELD (no graph reads {kept.name})" in str(cadence_fx.report(step))
