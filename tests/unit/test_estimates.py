"""The estimate of capture times is the line that fits the measured ones, and sessions are counted to the byte."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cadence_fx.adapters.readers import deployment
from cadence_fx.estimates import FIRST, FURTHER, WITHIN, capture_seconds, order_of, sessions

MEASURED = Path(__file__).resolve().parents[2] / "bench/results/warm_up_nvidia_h200.json"


def test_the_coefficients_fit_the_measured_callables() -> None:
    callables = json.loads(MEASURED.read_text())["callables"]
    operators = {each.name: each.operators for each in deployment("token2wav").callables}
    assert operators.keys() == callables.keys()

    def line(points: list[tuple[int, float]]) -> tuple[float, ...]:
        counts, seconds = zip(*points, strict=True)
        fitted = np.linalg.lstsq(np.array([[1, count] for count in counts]), np.array(seconds), rcond=None)[0]
        return tuple(float(coefficient) for coefficient in fitted)

    first = [(operators[name] or 0, row["one_class_s"]) for name, row in callables.items()]
    further = [
        (operators[name] or 0, (row["seconds"] - row["one_class_s"]) / (row["classes"] - 1))
        for name, row in callables.items()
        if row["classes"] > 1
    ]
    assert line(first) == pytest.approx(FIRST, rel=2e-3)
    assert line(further) == pytest.approx(FURTHER, rel=2e-3)
    for name, row in callables.items():
        assert abs(capture_seconds(operators[name] or 0, row["classes"]) - row["seconds"]) < WITHIN


def test_no_class_takes_no_time_and_more_classes_take_more() -> None:
    assert capture_seconds(1000, 0) == 0
    times = [capture_seconds(1000, classes) for classes in range(1, 5)]
    assert times == sorted(times) and times[0] == pytest.approx(FIRST[0] + 1000 * FIRST[1])


def test_only_what_is_far_enough_apart_is_ordered() -> None:
    seconds = {"a": 5.0, "b": 5.0 + 2 * WITHIN, "c": 40.0}
    assert order_of(seconds) == [("c", "a"), ("c", "b")]
    assert order_of(seconds | {"b": 5.1 + 2 * WITHIN}) == [("b", "a"), ("c", "a"), ("c", "b")]


@pytest.mark.parametrize(
    "device, shared, each, expected",
    [(100, 10, 30, 3), (99, 10, 30, 2), (9, 10, 30, 0), (100, 10, 0, None), (9, 10, 0, 0)],
)
def test_sessions(device: int, shared: int, each: int, expected: int | None) -> None:
    assert sessions(device, shared, each) == expected
