"""The owner of captures repairs what a failed one leaves behind; PyTorch's part is played by stand-ins."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cadence_fx.recorder import DevicePool, HostRecording, record

CPU = torch.device("cpu")


class Device:
    """What a device keeps: its current stream, which generators are marked as capturing, and users of pools."""

    def __init__(self) -> None:
        self.current: Any = "main"
        self.marked: set[int] = set()
        self.users: dict[int, int] = {}
        self.open: list[int] = []
        self.capturing = False
        self.handles = 0
        self.fail: dict[str, bool] = {}

    def handle(self) -> tuple[int, int]:
        self.handles += 1
        return (0, self.handles)

    def stop(self, what: str) -> None:
        if self.fail.pop(what, False):
            raise RuntimeError(what)


class Graph:
    """As PyTorch before 2.13: a capture that does not end well leaves generators marked and its pool open."""

    def __init__(self, device: Device) -> None:
        self.device, self.generators, self.pool, self.ended = device, list[Any](), 0, False

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.device.stop("register")
        self.generators.append(generator)

    def begin(self, pool: int) -> None:
        self.device.stop("before begin")
        if pool in self.device.users:
            assert self.device.users[pool] > 0, "a pool without users may not be used again"
        self.device.marked |= {id(generator) for generator in self.generators}
        self.pool = pool
        self.device.users[pool] = self.device.users.get(pool, 0) + 1
        self.device.open.append(pool)
        self.device.capturing = True
        self.device.stop("after begin")

    def capture_end(self) -> None:
        self.device.capturing = False
        self.device.stop("invalidated")
        self.device.open.remove(self.pool)
        self.device.marked -= {id(generator) for generator in self.generators}
        self.ended = True

    def replay(self) -> None:
        assert not self.device.marked & {id(generator) for generator in self.generators}, "still marked as capturing"

    def reset(self) -> None:
        if self.ended:
            self.device.users[self.pool] -= 1
            self.ended = False


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()

    class Capture:  # leaves its stream current when it fails, as PyTorch's does
        def __init__(self, graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "") -> None:
            assert capture_error_mode == "thread_local"
            self.graph, self.stream, self.pool = graph, stream, pool or found.handle()

        def __enter__(self) -> None:
            self.before, found.current = found.current, self.stream
            self.graph.begin(self.pool[1])

        def __exit__(self, *exc: object) -> None:
            self.graph.capture_end()
            found.current = self.before

    def stream_context(which: Any) -> Any:
        class Context:
            def __enter__(self) -> None:
                self.before, found.current = found.current, which

            def __exit__(self, *exc: object) -> None:
                found.current = self.before

        return Context()

    def abandon(_: torch.device, handle: tuple[int, int]) -> bool:
        if handle[1] not in found.open:
            return False
        found.open.remove(handle[1])
        found.users[handle[1]] -= 1
        return True

    waiting = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "Stream": lambda device: waiting,
        "current_stream": lambda device: SimpleNamespace(wait_stream=lambda other: None, name=found.current),
        "stream": stream_context,
        "device": lambda device: contextlib.nullcontext(),
        "graph_pool_handle": found.handle,
        "memory_snapshot": list,
        "synchronize": lambda device: None,
        "CUDAGraph": lambda: Graph(found),
        "graph": Capture,
        "is_current_stream_capturing": lambda: found.capturing,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr("cadence_fx.recorder.abandon_pool", abandon)
    monkeypatch.setattr("cadence_fx.recorder.own_workspaces", contextlib.nullcontext)
    return found


def pool() -> DevicePool:
    return DevicePool(CPU)


def draw() -> list[torch.Tensor]:
    return [torch.rand(2)]


STAGES = ("register", "before begin", "after begin", "invalidated", "run")


@pytest.mark.parametrize("stage", STAGES)
def test_a_failed_capture_is_repaired(stage: str, device: Device) -> None:
    shared, mine = pool(), torch.Generator()
    healthy = shared.record(draw, [mine])
    calls = [0]

    def run() -> list[torch.Tensor]:
        calls[0] += 1
        if stage == "run" and calls[0] == 3:
            raise RuntimeError("run")
        return draw()

    torch.manual_seed(4)
    device.fail = {stage: True}
    with pytest.raises(RuntimeError, match=stage):
        shared.record(run, [mine])
    assert not device.capturing and not device.marked and not device.open
    assert sum(device.users.values()) == 1, "only the healthy class uses a pool"
    assert not healthy.closed
    healthy.launch()
    after = shared.record(draw, [mine])
    assert len(shared.live) == 2
    after.launch()
    healthy.close()
    after.close()
    assert sum(device.users.values()) == 0 and not shared.live


def test_a_generator_keeps_its_state_over_a_failed_capture(device: Device) -> None:
    """`run` draws on the way; what it drew while it was captured is given back."""
    shared = pool()
    torch.manual_seed(4)
    drawn = [torch.rand(2) for _ in range(3)]
    torch.manual_seed(4)
    device.fail = {"invalidated": True}
    with pytest.raises(RuntimeError):
        shared.record(draw, [])
    assert torch.equal(torch.rand(2), drawn[2])  # the two runs before the capture are the caller's to undo


def test_where_not_even_an_empty_capture_works_the_classes_go(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = pool()
    healthy = shared.record(draw, [])
    exchanged: list[Any] = []

    class State:
        def __init__(self, generator: Any = None) -> None:
            self.clone_state = lambda: State()
            self.get_state = lambda: b""
            self.set_state = exchanged.append
            self.graphsafe_set_state = exchanged.append

    monkeypatch.setattr("cadence_fx.recorder.default_generator", lambda device: State())
    monkeypatch.setattr(DevicePool, "_capture_nothing", lambda *args: (_ for _ in ()).throw(RuntimeError("no")))
    device.fail = {"invalidated": True}
    with pytest.raises(RuntimeError, match="invalidated"):
        shared.record(draw, [])
    assert healthy.closed and not shared.live and len(exchanged) == 2


def test_a_pool_without_users_is_not_used_again(device: Device) -> None:
    shared = pool()
    for _ in range(3):
        shared.record(draw, []).close()
    first, second = shared.record(draw, []), shared.record(draw, [])
    assert device.users[shared.handle[1]] == 2
    first.close()
    assert shared.record(draw, []) and device.users[shared.handle[1]] == 2
    second.close()


def test_a_pool_that_a_capture_left_open_is_not_used_again(device: Device) -> None:
    """The allocator of pinned memory cannot be told to close it. Classes that are in it live on."""
    shared = pool()
    healthy, handle = shared.record(draw, []), shared.handle
    device.fail = {"invalidated": True}
    with pytest.raises(RuntimeError, match="invalidated"):
        shared.record(draw, [])
    device.fail = {}
    later = shared.record(draw, [])
    assert shared.handle != handle and device.users[handle[1]] == device.users[shared.handle[1]] == 1
    assert not healthy.closed and not later.closed


def test_the_stream_is_the_callers_again(device: Device) -> None:
    shared = pool()
    device.fail = {"invalidated": True}
    with pytest.raises(RuntimeError):
        shared.record(draw, [])
    assert getattr(device.current, "name", device.current) == "main"


def test_on_a_host_a_recording_is_the_call_itself() -> None:
    calls: list[Callable[[], Any]] = []
    recording = record(lambda: calls.append(draw) or [len(calls)], CPU)  # type: ignore[func-returns-value]
    assert isinstance(recording, HostRecording) and not calls
    assert recording.launch() == [1] and recording.launch() == [2]
    recording.close()
    assert recording.closed and not recording.launch()
