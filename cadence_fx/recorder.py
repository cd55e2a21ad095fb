"""How a class is recorded and launched: CUDA graphs on a GPU, a plain call on the host.

One small interface, so that keys, storage, admission, staging and certificates are the same code on both, and tested
on a machine without a GPU. `DevicePool` is the only owner of a capture stream and a private memory pool: one of each
per device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Run = Callable[[], Sequence[Any]]


class Recording(Protocol):
    """A recorded execution."""

    static_outputs: bool  # launch() returns the same memory every time, so outputs must be copied out
    nbytes: int  # device memory the recording added to its pool
    closed: bool

    def launch(self) -> Sequence[Any]:
        """Execute once on the current stream; returns the flat outputs."""

    def close(self) -> None:
        """Give up everything the recording holds."""


class HostRecording:
    """A recorded call on the host: executes the graph's kernels one by one on the same static arguments."""

    static_outputs = False
    nbytes = 0

    def __init__(self, run: Run) -> None:
        self._run = run
        self.closed = False

    def launch(self) -> Sequence[Any]:
        return self._run()

    def close(self) -> None:
        self.closed = True
        self._run = tuple  # lets go of the graph and its tensors


class CudaRecording:
    """A captured CUDA graph."""

    static_outputs = True

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Sequence[Any], nbytes: int) -> None:
        self._graph = graph
        self._outputs = outputs
        self.nbytes = nbytes
        self._replay = graph.replay
        self.closed = False

    def launch(self) -> Sequence[Any]:
        self._replay()
        return self._outputs

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._outputs = ()
            self._graph.reset()


class DevicePool:
    """Capture stream, private memory pool and lock of one CUDA device; all classes on the device share them."""

    _pools: dict[torch.device, DevicePool] = {}
    _guard = threading.Lock()

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream(device)
            self.handle = torch.cuda.graph_pool_handle()
        self.lock = threading.RLock()

    def reserved_bytes(self) -> int:
        """Device memory this pool holds, over all classes that share it."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(self.handle))

    @classmethod
    def of(cls, device: torch.device) -> DevicePool:
        """The pool of a device, made on first use."""
        with cls._guard:
            if device not in cls._pools:
                cls._pools[device] = cls(device)
            return cls._pools[device]

    @classmethod
    def discard(cls, device: torch.device) -> None:
        """Forget one device's pool; classes captured in it live on, later ones get a new pool."""
        with cls._guard:
            cls._pools.pop(device, None)

    @classmethod
    def teardown(cls) -> None:
        """Forget every pool; memory goes back once the graphs that used it are gone."""
        with cls._guard:
            cls._pools.clear()


def record(run: Run, device: torch.device) -> Recording:
    """Record one execution of `run`, which reads and writes static tensors only.

    On a GPU `run` executes twice before it is captured, on the capture stream (library handles, workspaces and plans
    must exist before, outside the pool), so the caller restores whatever it mutates. The capture is in thread-local
    error mode: another thread's CUDA work does not invalidate it.
    """
    if device.type != "cuda":
        return HostRecording(run)
    pool = DevicePool.of(device)
    generator = torch.cuda.default_generators[device.index or 0]
    with pool.lock, torch.cuda.device(device):
        pool.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(pool.stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream(device).wait_stream(pool.stream)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        before = pool.reserved_bytes()
        state = generator.clone_state()
        try:
            with torch.cuda.graph(graph, pool=pool.handle, stream=pool.stream, capture_error_mode="thread_local"):
                outputs = run()
        except BaseException:
            # A capture that fails leaves the generator registered as capturing (every later draw would raise) and its
            # pool open: the generator gets a state object that was never captured, the next class a pool of its own.
            generator.graphsafe_set_state(state)
            DevicePool.discard(device)
            raise
        torch.cuda.synchronize(device)
        return CudaRecording(graph, outputs, pool.reserved_bytes() - before)
