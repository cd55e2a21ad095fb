"""How a class is recorded and launched: CUDA graphs on a GPU, a plain call on the host.

One small interface, so that keys, storage, admission, staging and certificates are the same code on both, and tested
on a machine without a GPU. `DevicePool` is the only owner of a capture stream and a private memory pool: one of each
per device.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from cadence_fx._torch import abandon_pool, own_workspaces, uncached_casts
from cadence_fx.captured_graph import DriverGraph, Unavailable
from cadence_fx.eager_breaks import Breaks
from cadence_fx.generators import default_generator
from cadence_fx.ledger import log
from cadence_fx.locks import new_lock
from cadence_fx.parts import Parts
from cadence_fx.passes import Edit, EditContext

Run = Callable[[], Sequence[Any]]


class EditFailed(RuntimeError):
    """An edit of the captured graph raised; the graph was given up."""


class Recording(Protocol):
    """A recorded execution."""

    static_outputs: bool  # launch() returns the same memory every time, so outputs must be copied out
    nbytes: int  # device memory the recording added to its pool
    closed: bool

    def launch(self) -> Sequence[Any]:
        """Execute once on the current stream; returns the flat outputs."""

    def forget(self) -> None:
        """Take all that was made of constants in advance to be wrong."""

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

    def forget(self) -> None:
        pass  # nothing was made in advance

    def close(self) -> None:
        self.closed = True
        self._run = tuple  # lets go of the graph and its tensors


class CudaRecording:
    """A captured CUDA graph, or several with what runs between them.

    A launch reads the state of the generators the graphs were captured with and moves it on, as eager would.

    Args:
        kept: memory outside the pool that the graphs read.
    """

    static_outputs = True

    def __init__(
        self,
        parts: Parts,
        outputs: Sequence[Any],
        nbytes: int,
        pool: DevicePool,
        kept: Sequence[torch.Tensor] = (),
    ) -> None:
        self._graphs = parts.graphs
        self._outputs = outputs
        self._pool = pool
        self._kept = kept
        self.nbytes = nbytes
        self._replay = parts.launcher()
        self.closed = False

    def launch(self) -> Sequence[Any]:
        self._replay()
        return self._outputs

    def forget(self) -> None:
        pass  # nothing was made in advance

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._outputs = self._kept = ()
            self._replay = _nothing  # lets go of what runs between the graphs
            for graph in self._graphs:
                graph.reset()
            self._pool.live.discard(self)

    def abandon(self) -> None:
        """Never launch again, and leave alone what belongs to a CUDA context that this process does not have."""
        self.closed = True
        self._outputs = ()
        _abandoned.append((self._graphs, self._replay))


def _nothing() -> None:
    pass


_abandoned: list[Any] = []


class DevicePool:
    """Capture stream, private memory pool and lock of one CUDA device; all classes on the device share them.

    So do they the side streams of graphs that run on several branches: memory that was made on one can only be used
    again on it.

    Attributes:
        live: recordings whose memory is in the pool. The allocator keeps a pool for as long as it has a user; the
            handle of one without may not be used again.
    """

    _pools: dict[torch.device, DevicePool] = {}
    _broken: list[torch.cuda.CUDAGraph] = []  # they may not be freed: see `abandon_pool`
    _guard = new_lock()

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream(device)
            self.handle = torch.cuda.graph_pool_handle()
        self._sides: list[torch.cuda.Stream] = []
        self.lock = new_lock()
        self.live: weakref.WeakSet[CudaRecording] = weakref.WeakSet()

    def reserved_bytes(self) -> int:
        """Device memory this pool holds, over all classes that share it."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(self.handle))

    def side(self, index: int) -> torch.cuda.Stream:
        """A stream to fork to, the same one for an index every time."""
        while len(self._sides) <= index:
            self._sides.append(torch.cuda.Stream(self.device))
        return self._sides[index]

    @classmethod
    def of(cls, device: torch.device) -> DevicePool:
        """The pool of a device, made on first use."""
        with cls._guard:
            if device not in cls._pools:
                cls._pools[device] = cls(device)
            return cls._pools[device]

    @classmethod
    def teardown(cls) -> None:
        """Forget every pool; memory goes back once the graphs that used it are gone."""
        with cls._guard:
            cls._pools.clear()

    # -- capturing ----------------------------------------------------------------------------------------------------

    def record(
        self,
        run: Run,
        generators: Sequence[torch.Generator],
        edits: Sequence[Edit] = (),
        context: EditContext | None = None,
        breaks: Breaks | None = None,
    ) -> CudaRecording:
        """See `record`."""
        current = torch.cuda.current_stream(self.device)
        # The outer context puts the stream back where a capture that fails leaves its own current.
        with self.lock, torch.cuda.device(self.device), torch.cuda.stream(current):
            with uncached_casts():
                self._warm(run, current)
            if not self.live:
                self.handle = torch.cuda.graph_pool_handle()
            before = self.reserved_bytes()
            states = [(generator, generator.clone_state()) for generator in self._registered(generators)]
            new = functools.partial(torch.cuda.CUDAGraph, keep_graph=True) if edits else torch.cuda.CUDAGraph
            parts = Parts(new, functools.partial(self._capturing, generators))
            try:
                with uncached_casts(), _no_collection():
                    outputs = parts.record(run, breaks)
                torch.cuda.synchronize(self.device)
                if edits and context is not None:
                    _edit(parts.graphs[0], edits, context)
                kept = context.kept if context is not None else ()
                added = self.reserved_bytes() - before + (context.added if context is not None else 0)
                added += sum(step.nbytes for step in parts.steps)
                recording = CudaRecording(parts, outputs, added, self, kept)
            except BaseException:
                self._repair(parts.graphs, states)
                raise
            self.live.add(recording)
            return recording

    def _warm(self, run: Run, current: torch.cuda.Stream) -> None:
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                for _ in range(2):
                    run()
        finally:
            current.wait_stream(self.stream)
        torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def _capturing(self, generators: Sequence[torch.Generator], graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        for generator in self._registered(generators):
            graph.register_generator_state(generator)
        capture = torch.cuda.graph(graph, pool=self.handle, stream=self.stream, capture_error_mode="thread_local")
        with own_workspaces(), capture:
            yield

    def _registered(self, generators: Sequence[torch.Generator]) -> list[torch.Generator]:
        """The generators a graph of this device is captured with: the default one always is."""
        default = default_generator(self.device)
        return [default, *(generator for generator in generators if generator is not default)]

    def _repair(
        self, graphs: Sequence[torch.cuda.CUDAGraph], states: Sequence[tuple[torch.Generator, torch.Generator]]
    ) -> None:
        """After a capture that failed at whatever point: nothing captures, and generators and pool are usable.

        Generators stay marked as capturing, and every later draw would raise. A capture that succeeds takes the mark
        off the very state object that the classes captured so far are bound to. Where not even that works, generators
        get state objects that were never captured, and the classes, which have the old ones, are dropped.
        """
        with torch.cuda.stream(self.stream):
            if torch.cuda.is_current_stream_capturing():
                with contextlib.suppress(RuntimeError):
                    graphs[-1].capture_end()
        if abandon_pool(self.device, self.handle):
            self._broken += graphs[-1:]
            self.handle = torch.cuda.graph_pool_handle()
        for graph in graphs:
            with contextlib.suppress(RuntimeError):
                graph.reset()
        try:
            self._capture_nothing([generator for generator, _ in states])
        except RuntimeError:
            log.exception("the generators of %s could not be repaired; its classes are dropped", self.device)
            for generator, state in states:
                generator.graphsafe_set_state(state)
            for recording in list(self.live):
                recording.close()
        for generator, state in states:
            generator.set_state(state.get_state())

    def _capture_nothing(self, generators: Sequence[torch.Generator]) -> None:
        cell = torch.zeros(1, device=self.device)
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            cell.zero_()
        graph.reset()


def _edit(graph: torch.cuda.CUDAGraph, edits: Sequence[Edit], context: EditContext) -> None:
    """Edit a captured graph and instantiate it. Where the graph cannot be read it stays as it is."""
    try:
        opened = DriverGraph(graph)
    except Unavailable as error:
        context.notes.append(f"{', '.join(edit.name for edit in edits)}: skipped: {error}")
    else:
        for edit in edits:
            try:
                edit(opened, context)
            except Exception as error:
                raise EditFailed(f"{edit.name} failed: {type(error).__name__}: {error}") from error
    graph.instantiate()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without automatic garbage collection: what it finalises may call CUDA, which a capture does not survive."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def record(
    run: Run,
    device: torch.device,
    generators: Sequence[torch.Generator] = (),
    edits: Sequence[Edit] = (),
    context: EditContext | None = None,
    breaks: Breaks | None = None,
) -> Recording:
    """Record one execution of `run`, which reads and writes static tensors only.

    On a GPU `run` executes twice before it is captured, on the capture stream (library handles and plans must exist
    before), so the caller restores whatever it mutates. The capture is in thread-local
    error mode: another thread's CUDA work does not invalidate it.

    Args:
        generators: those `run` may draw from besides the default one of the device.
        edits: what is done to a CUDA graph before it is instantiated, with the facts in `context`.
        breaks: where `run` is not recorded; then there are no edits.

    Raises:
        EditFailed: an edit raised.
        Whatever `run` and the capture raise; generators, streams, allocator and the classes recorded before are then
        as usable as they were.
    """
    if device.type != "cuda":
        return HostRecording(run)
    return DevicePool.of(device).record(run, generators, edits, context, breaks)


def give_back(device: torch.device) -> None:
    """After a capture that failed: what its tensors held can be used by everybody. Called once they are gone."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _forget_in_child() -> None:
    """A forked child has no CUDA context: its calls are not launches, and eager says what is wrong with them."""
    for pool in DevicePool._pools.values():
        for recording in list(pool.live):
            recording.abandon()
    DevicePool._pools.clear()


os.register_at_fork(after_in_child=_forget_in_child)
