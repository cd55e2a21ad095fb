"""The ledger: counts by reason, one log line for each distinct explanation, bounded."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from cadence_fx.ledger import Ledger


def test_counts_by_reason_and_logs_each_explanation_once(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger("decoder")
    with caplog.at_level(logging.WARNING, "cadence_fx"):
        for detail in ("axis 1 of x has 5", "axis 1 of x has 5", "axis 1 of x has 7"):
            ledger.miss("undeclared_size", detail)
        ledger.refuse("draws_random")
        ledger.invalidate("address", "weight moved")
    assert ledger.misses == {"undeclared_size": 3}
    assert ledger.refusals == {"draws_random": 1} and ledger.invalidations == {"address": 1}
    assert ledger.details["undeclared_size"] == {"axis 1 of x has 5": 2, "axis 1 of x has 7": 1}
    assert [record.getMessage() for record in caplog.records] == [
        "decoder: eager: undeclared_size: axis 1 of x has 5",
        "decoder: eager: undeclared_size: axis 1 of x has 7",
        "decoder: refused: draws_random",
        "decoder: invalidated: address: weight moved",
    ]


def test_a_stream_of_odd_sizes_fills_neither_memory_nor_log(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger("decoder")
    with caplog.at_level(logging.WARNING, "cadence_fx"):
        for size in range(1000):
            ledger.miss("undeclared_size", f"axis 1 of x has {size}")
    assert ledger.misses["undeclared_size"] == 1000
    assert len(ledger.details["undeclared_size"]) == 65 and len(caplog.records) == 65
    assert ledger.details["undeclared_size"]["and others"] == 936


def test_silent_unless_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    Ledger("decoder").miss("mode", "autocast")
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == ""


def test_traffic_begins_with_empty_counts_and_keeps_what_was_captured() -> None:
    ledger = Ledger("decoder")
    ledger.captures, ledger.replays, ledger.adoptions = 3, 5, 2
    ledger.miss("undeclared_size", "in warm-up")
    ledger.refuse("certificate", "one class")
    ledger.latencies_us.extend([1.0, 2.0])
    ledger.begin_traffic()
    assert (ledger.captures, ledger.replays, ledger.adoptions) == (3, 0, 0)
    assert not ledger.misses and ledger.refusals == {"certificate": 1}
    assert "undeclared_size" not in ledger.details and "certificate" in ledger.details
    assert ledger.quantiles_us() == {}


def test_quantiles_of_recent_calls() -> None:
    ledger = Ledger("decoder")
    ledger.latencies_us.extend(float(n) for n in range(1, 102))
    assert ledger.quantiles_us() == {"p50": 51.0, "p95": 96.0, "p99": 100.0}


def test_warm_up_is_forgotten_and_why_classes_were_refused_is_not() -> None:
    ledger = Ledger("test")
    ledger.refuse("host_read", "model.py:3")
    ledger.miss("host_read", "model.py:3")
    ledger.miss("stride", "x")
    ledger.begin_traffic()
    assert not ledger.misses and ledger.refusals == Counter(host_read=1)
    assert set(ledger.details) == {"host_read"} and "model.py:3" in ledger.details["host_read"]


def test_a_phase_does_not_count_those_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 100, 10))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    ledger = Ledger("x")
    with ledger.timed("dynamo"), ledger.timed("tracing"), ledger.timed("dynamo"):
        pass
    assert ledger.seconds == {"dynamo": 30, "tracing": 20}
