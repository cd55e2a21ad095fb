"""The order of calls on a device, and what happens to its recordings in a forked child, with streams that only note."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cadence_fx import recorder, turns
from cadence_fx._torch import uncached_casts

DEVICE = torch.device("cuda", 0)


class Stream:
    def __init__(self, raw: int) -> None:
        self.raw, self.waits = raw, []  # type: ignore[var-annotated]

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other.raw)


class Streams:
    """Stands in for the CUDA runtime: which stream is current, and whether it is being captured."""

    def __init__(self) -> None:
        self.all = [Stream(raw) for raw in range(3)]
        self.current, self.capturing = 0, False


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(turns, "current_raw_stream", lambda device: lambda: streams.current)
    monkeypatch.setattr(turns, "_turns", {})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams.all[streams.current])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: streams.capturing)
    return streams


def call(streams: Streams, raw: int) -> None:
    streams.current = raw
    with turns.turn_on(DEVICE, None):
        pass


def test_a_call_waits_for_the_stream_of_the_call_before(streams: Streams) -> None:
    for raw in (0, 0, 1, 1, 2, 0, 0):
        call(streams, raw)
    assert [s.waits for s in streams.all] == [[2], [0], [1]]


def test_a_capture_of_somebody_else_waits_for_nothing(streams: Streams) -> None:
    call(streams, 0)
    streams.capturing = True
    call(streams, 1)
    streams.capturing = False
    call(streams, 2)
    assert [s.waits for s in streams.all] == [[], [], [0]]


def test_one_call_at_a_time_whatever_it_calls_itself(streams: Streams) -> None:
    inside, most = [0], [0]

    def work() -> None:
        turn = turns.turn_on(DEVICE, None)
        for _ in range(20):
            with turn, turn:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0.0005)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_on_the_host_a_call_takes_only_its_own_lock() -> None:
    lock = threading.RLock()
    assert turns.turn_on(torch.device("cpu"), lock) is lock


def test_a_forked_child_launches_nothing_and_destroys_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[str] = []
    graph: Any = SimpleNamespace(replay=lambda: touched.append("replay"), reset=lambda: touched.append("reset"))
    pool: Any = SimpleNamespace(live=set())
    parts: Any = SimpleNamespace(graphs=[graph], launcher=lambda: graph.replay)
    recording = recorder.CudaRecording(parts, (1, 2), 0, pool)
    pool.live.add(recording)
    monkeypatch.setattr(recorder.DevicePool, "_pools", {DEVICE: pool})
    monkeypatch.setattr(recorder, "_abandoned", [])
    recorder._forget_in_child()
    assert recording.closed and not recorder.DevicePool._pools
    recording.close()
    assert touched == [] and recorder._abandoned


def test_no_cast_of_a_weight_is_handed_across_a_capture() -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    x = torch.ones(1, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):

        def product() -> float:
            return float(torch.nn.functional.linear(x, weight)[0, 0])

        assert product() == 4
        weight.mul_(2)
        assert product() == 4  # eager's own: the cast of before the edit
        with uncached_casts():
            assert product() == 8
            weight.mul_(2)
            assert product() == 16
        weight.mul_(2)
        assert product() == 32
        assert torch.is_autocast_cache_enabled()
