"""The toy streams as CUDA graphs: the same checks as on the host, and those that only a device can fail."""

import gc
import threading
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import cadence_fx
from cadence_fx.recorder import DevicePool
from cadence_fx.storage import Carry
from tests.harness import MODES, Pair, assert_same, check_stream
from tests.streams import BY_NAME, STREAMS, Stream

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stream", STREAMS, ids=lambda s: s.name)
def test_stream_equals_eager(stream: Stream, mode: str) -> None:
    with MODES[mode]():
        check_stream(stream, DEVICE)


@pytest.mark.parametrize("name", ["PromptAppend", "BufferShift", "RingByIndex", "SolverWorkspace"])
def test_audit_of_a_stream_reports_nothing(name: str) -> None:
    with torch.inference_mode():
        pair = Pair(BY_NAME[name], DEVICE)
        with cadence_fx.audit(pair.step) as ledger:
            for turn in range(2):
                pair.restart(turn)
                for _ in range(5):
                    pair.call()
        assert ledger.calls == 10
        assert pair.missed() == Counter()


def _settled() -> int:
    """Bytes allocated once everything that can be given back is; cuBLAS keeps a workspace per stream it has seen."""
    torch.compiler.reset()
    torch.cuda.synchronize()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def test_reset_gives_the_memory_back() -> None:
    """After `torch.compiler.reset()` nothing of classes, pools or carries is left on the device."""
    _settled()
    before = _settled()
    with torch.no_grad():
        pair = Pair(BY_NAME["SolverStack"], DEVICE)
        for _ in range(4):
            pair.call()
        del pair
    after = _settled()
    assert not DevicePool._pools
    assert after == before


def test_sweeping_the_catalog_again_takes_no_more_memory() -> None:
    """B16, pytorch#128424: the second and third sweep over all shapes reserve nothing and capture nothing."""
    with torch.no_grad():
        pair = Pair(BY_NAME["PartialFlush"], DEVICE)
        reserved = []
        for turn in range(3):
            for flush in pair.stream.flushes:
                pair.restart(turn)
                pair.call()
                pair.call(flush)
            pair.kept.clear()
            torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved())
        assert reserved[1] == reserved[2]
        assert pair.since("captures") == 0


def test_a_consumer_on_another_stream_reads_what_it_was_given() -> None:
    """An output is private memory: a slow reader elsewhere is not overtaken by the next replay."""
    with torch.no_grad():
        pair = Pair(BY_NAME["AppendLast"], DEVICE)
        side = torch.cuda.Stream()
        copies: list[tuple[Tensor, Tensor]] = []
        for _ in range(6):
            y = pair.call()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(2_000_000)
                copies.append((y * 1.0, pair.kept[-1][1]))
        side.synchronize()
        for i, (found, expected) in enumerate(copies):
            assert_same(found, expected, f"output {i}")


def test_an_output_kept_through_a_conversion_that_does_nothing() -> None:
    """A2: `.to()` of the same dtype is the same memory, and the next replay must not write it."""
    replay = cadence_fx.ExactShapeReplay(lambda x: x * 2)
    inputs = [torch.randn(8, device=DEVICE) for _ in range(4)]
    held = [(y := replay(x)).to(y.dtype) for x in inputs]
    for x, found in zip(inputs, held, strict=True):
        assert_same(found, x * 2, "kept output")
    assert replay.ledger.replays == 4


def test_warm_up_beside_another_threads_cuda_work() -> None:
    """D37: copies and pinned memory in another thread do not invalidate a capture."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not stop.is_set():
                torch.randn(1000).pin_memory().to(DEVICE, non_blocking=True)
                torch.ones(64, device=DEVICE).sum().item()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        with torch.no_grad():
            pair = Pair(BY_NAME["PromptAppend"], DEVICE)
            for _ in range(5):
                pair.call()
    finally:
        stop.set()
        thread.join()
    assert not failures
    assert pair.missed() == Counter()


def test_dropping_one_class_leaves_the_others_right() -> None:
    """D38: no library workspace lives in the memory of the class that was captured first."""
    with torch.no_grad():
        pair = Pair(BY_NAME["PartialFlush"], DEVICE)
        program = cadence_fx.lookup.program_of(pair.step, "test")
        for _, table in program.graphs:
            for key in list(table.classes)[:1]:
                table.drop(key)
        torch.cuda.empty_cache()
        garbage = [torch.full((1 << 20,), float("nan"), device=DEVICE) for _ in range(16)]
        for turn in range(3):
            pair.restart(turn)
            for _ in range(6):
                pair.call()
        pair.check_kept()
        del garbage


class HostRead(nn.Module):
    """A value read on the host decides what is computed: no capture may survive it."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.abs().max().item()
        return x / scale, torch.cat([cache, x], 1)[:, -9:]


def test_a_capture_that_cannot_work_leaves_the_process_usable() -> None:
    replay = cadence_fx.ExactShapeReplay(lambda x: x * x.sum().item())
    x = torch.randn(8, device=DEVICE)
    assert_same(replay(x), x * x.sum().item(), "eager answer")
    assert replay.ledger.refusals and not replay.classes
    torch.randn(3, device=DEVICE).sum().item()
    with torch.no_grad():
        pair = Pair(BY_NAME["AppendLast"], DEVICE)
        for _ in range(4):
            pair.call()
        assert pair.missed() == Counter()


def test_the_address_of_a_carry_survives_every_extent() -> None:
    carry = Carry("cache", (1, 0, 4), 1, 9, torch.zeros(1, device=DEVICE), cadence_fx.ledger.Ledger("test"))
    addresses = {carry.view(extent).data_ptr() for extent in range(1, 10)}
    assert addresses == {carry.pointer}
