"""What can go wrong around captured graphs: threads, streams, library workspaces, forks, garbage, other captures."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cadence_fx
from cadence_fx.lookup import program_of
from cadence_fx.recorder import DevicePool
from cadence_fx.replay import ExactShapeReplay
from tests.harness import Pair, assert_same, counts
from tests.streams import BY_NAME

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield


def in_threads(*works: Callable[[], None]) -> None:
    """Run each in a thread of its own, without gradients; raises what the first of them raised."""
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_D36_compiled_here_and_called_in_three_threads() -> None:
    """pytorch#123177: a stream handed from thread to thread, each with a CUDA stream of its own."""
    pair = Pair(BY_NAME["AppendLast"], DEVICE)

    def work() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(4):
                pair.call()
        stream.synchronize()

    for _ in range(3):
        in_threads(work)
    pair.check_kept()
    assert pair.missed() == Counter()


def test_two_programs_in_two_threads() -> None:
    """Their graphs share a pool: the outputs of one are taken out before the other is launched."""
    pairs = [Pair(BY_NAME[name], DEVICE) for name in ("AppendLast", "SolverStack")]

    def work(pair: Pair) -> Callable[[], None]:
        def run() -> None:
            for turn in range(4):
                pair.restart(turn)
                for _ in range(8):
                    pair.call()

        return run

    in_threads(*(work(pair) for pair in pairs))
    for pair in pairs:
        pair.check_kept()
        assert pair.missed() == Counter()


def test_calls_from_two_streams_that_nobody_orders() -> None:
    """Independent calls, as eager allows: the second must not overtake the first in the memory they share."""
    weight = torch.randn(512, 512, device=DEVICE)
    replay = ExactShapeReplay(lambda x: torch.tanh(x @ weight) @ weight)
    xs = [torch.randn(512, 512, device=DEVICE) for _ in range(8)]
    expected = [torch.tanh(x @ weight) @ weight for x in xs]
    replay(xs[0])
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    outputs = []
    for i, x in enumerate(xs):
        with torch.cuda.stream(streams[i % 2]):
            if i % 2 == 0:
                torch.cuda._sleep(5_000_000)  # its copies and its launch are late
            outputs.append(replay(x))
    torch.cuda.synchronize()
    for i, (y, e) in enumerate(zip(outputs, expected, strict=True)):
        assert_same(y, e, f"call {i}")
    assert len(replay.classes) == 1 and replay.ledger.replays == 9


def test_A5_a_late_consumer_elsewhere_and_the_next_replay_on_a_third_stream() -> None:
    pair = Pair(BY_NAME["AppendLast"], DEVICE)
    reader, caller = torch.cuda.Stream(), torch.cuda.Stream()
    found: list[tuple[Tensor, Tensor]] = []
    for _ in range(6):
        y = pair.call()
        reader.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(reader):
            torch.cuda._sleep(2_000_000)
            found.append((y * 1.0, pair.kept[-1][1]))
        y.record_stream(reader)
        caller.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(caller):
            pair.call()
        torch.cuda.current_stream().wait_stream(caller)
    torch.cuda.synchronize()
    for i, (copy, expected) in enumerate(found):
        assert_same(copy, expected, f"output {i}")
    pair.check_kept()


def matmuls() -> ExactShapeReplay:
    weight = torch.randn(256, 256, device=DEVICE, dtype=torch.bfloat16)
    return ExactShapeReplay(lambda x: ((x @ weight).relu() @ weight) @ weight)


def garbage() -> list[Tensor]:
    return [torch.full((1 << 22,), float("nan"), device=DEVICE) for _ in range(16)]


@pytest.mark.parametrize("cleared", [False, True], ids=["dropped", "workspaces cleared"])
def test_D38_one_class_dropped_while_others_live(cleared: bool) -> None:
    """vllm-omni#6587: no library workspace belongs to one class, and none of a live class has another owner."""
    replay = matmuls()
    sizes = (1, 7, 64, 300)
    xs = [torch.randn(size, 256, device=DEVICE, dtype=torch.bfloat16) for size in sizes]
    expected = [replay.fn(x) for x in xs]
    for x in xs:
        replay(x)
    (table,) = replay._tables.values()
    table.drop(next(iter(table.classes)))
    if cleared:
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    held = garbage()
    replay.seal()
    for _ in range(3):
        for i in (1, 2, 3):
            assert_same(replay(xs[i]), expected[i], f"{sizes[i]} rows")
    assert all(bool(tensor.isnan().all()) for tensor in held)  # and no launch has written into anybody's memory
    assert replay.ledger.late_captures == 0


def test_D37_copies_in_another_thread_during_captures() -> None:
    stop = threading.Event()

    def copies() -> None:
        side = torch.cuda.Stream()
        while not stop.is_set():
            with torch.cuda.stream(side):
                torch.randn(1000).pin_memory().to(DEVICE, non_blocking=True).sum().item()
            torch.empty(1 << 20, device=DEVICE)

    def captures() -> None:
        try:
            for name in ("ConvContext", "NestedDict"):
                pair = Pair(BY_NAME[name], DEVICE)
                for _ in range(4):
                    pair.call()
                assert pair.missed() == Counter() and not counts(pair.step)["refusals"]
        finally:
            stop.set()

    in_threads(captures, copies)


def test_the_cache_of_the_allocator_is_emptied_between_calls() -> None:
    pair = Pair(BY_NAME["SolverStack"], DEVICE)
    for _ in range(5):
        pair.call()
        torch.cuda.empty_cache()
        held = garbage()
        del held
    pair.check_kept()
    assert pair.missed() == Counter()


def test_garbage_with_device_memory_is_collected_during_captures() -> None:
    thresholds = gc.get_threshold()

    class Ring:
        def __init__(self) -> None:
            self.memory, self.me = torch.zeros(1 << 20, device=DEVICE), self

        def __del__(self) -> None:
            torch.cuda.synchronize()  # what a capture does not survive

    gc.set_threshold(1)
    try:
        for _ in range(20):
            Ring()
        pair = Pair(BY_NAME["LayerList"], DEVICE)
        for _ in range(4):
            Ring()
            pair.call()
    finally:
        gc.set_threshold(*thresholds)
    assert pair.missed() == Counter() and not counts(pair.step)["refusals"]


def test_a_call_inside_somebody_elses_capture_is_eager() -> None:
    replay = ExactShapeReplay(lambda x: torch.sin(x) * 2)
    x = torch.randn(64, device=DEVICE)
    replay(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        replay(x)
    torch.cuda.current_stream().wait_stream(side)
    for sealed in (False, True):
        if sealed:
            replay.seal()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = replay(x)
        x.normal_()
        graph.replay()
        assert_same(y, torch.sin(x) * 2, "the user's own graph")
    assert replay.ledger.replays == 2 and len(replay.classes) == 1
    assert_same(replay(x), torch.sin(x) * 2, "a replay afterwards")


def test_casts_under_autocast_belong_to_no_context() -> None:
    pair = Pair(BY_NAME["AppendLast"], DEVICE, warm=False)
    with torch.autocast("cuda", torch.bfloat16):
        for run in (pair.eager, pair.live):
            run.restart(90)
            run.call(*run.inputs(91, pair.stream.calls[0]))  # casts of both modules' weights are cached now
        pair.warm_up()
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            held = garbage()
            for _ in range(3):
                pair.call()
            del held
        for run in (pair.eager, pair.live):
            run.module.key.weight.mul_(1.5)
    pair.check_kept()
    assert pair.missed() == Counter()


SWITCHES: dict[str, tuple[Callable[[Any], None], Any, Any]] = {
    "fp32 precision of cuda matmul": (torch.set_float32_matmul_precision, "high", "highest"),
    "cuDNN benchmark": (lambda v: setattr(torch.backends.cudnn, "benchmark", v), True, False),
    "cuDNN": (lambda v: setattr(torch.backends.cudnn, "enabled", v), False, True),
    "flash SDPA": (torch.backends.cuda.enable_flash_sdp, False, True),
    "math SDPA": (torch.backends.cuda.enable_math_sdp, False, True),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_that_is_not_as_it_was(name: str) -> None:
    write, value, before = SWITCHES[name]
    pair = Pair(BY_NAME["AppendLast"], DEVICE)  # whose attention needs no kernel that can be switched off
    for _ in range(4):
        pair.call()
    write(value)
    try:
        pair.call()
    finally:
        write(before)
    details = counts(pair.step)["details"]
    assert pair.missed() == Counter(mode=1) and any(name in detail for detail in details["mode"])
    replays = pair.since("replays")
    for _ in range(3):
        pair.call()
    assert pair.since("replays") == replays + 3


def test_D45_the_pool_is_as_large_as_its_classes_say() -> None:
    pair = Pair(BY_NAME["SolverStack"], DEVICE)
    sizes = cadence_fx.report(pair.step)["bytes"]
    reserved = DevicePool.of(program_of(pair.step, "test").graphs[0][0].device).reserved_bytes()
    assert abs(sizes["pool"] - reserved) <= 0.05 * reserved
    for what in ("staging", "carries"):
        assert abs(sizes[f"predicted_{what}"] - sizes[f"measured_{what}"]) <= 0.05 * sizes[f"measured_{what}"]


@pytest.mark.parametrize("name", ["AppendLast", "PrependLast", "ConvContext", "NestedDict", "BufferShift"])
def test_certificates_compare_three_inputs(name: str) -> None:
    report = cadence_fx.report(Pair(BY_NAME[name], DEVICE).step)
    assert {row["compared_inputs"] for row in report["class_table"]} == {3}, report["class_table"][0]["notes"]


def test_an_operator_that_does_not_repeat_is_named() -> None:
    """Additions of many threads to a few cells come in any order."""
    index = torch.randint(4, (1 << 20,), device=DEVICE)
    replay = ExactShapeReplay(lambda x, i: torch.zeros(4, device=DEVICE).index_add_(0, i, x))
    replay(torch.randn(1 << 20, device=DEVICE) * 1e3, index)
    assert replay.ledger.refusals == Counter(not_reproducible=1)
    (detail,) = replay.ledger.details["not_reproducible"]
    assert "index_add" in detail and "test_faults_gpu.py" in detail


FORK = """
import os, sys
import torch, cadence_fx
torch.set_grad_enabled(False)
weight = torch.randn(64, 64, device="cuda")
replay = cadence_fx.ExactShapeReplay(lambda w: w @ w, aliased=[weight])
expected = weight @ weight
for _ in range(3):
    assert torch.equal(replay(weight), expected)
torch.cuda.synchronize()
before = replay.ledger.replays
child = os.fork()
if child == 0:
    try:
        replay(weight)
    except BaseException:
        pass
    else:
        os._exit(3)
    os._exit(0 if replay.ledger.replays == before else 4)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(replay(weight), expected) and replay.ledger.replays == before + 1
"""

ALIVE = """
import torch, cadence_fx
from tests.harness import Pair
from tests.streams import BY_NAME
torch.set_grad_enabled(False)
pair = Pair(BY_NAME["AppendLast"], "cuda")
replay = cadence_fx.ExactShapeReplay(lambda x: x * 2)
for _ in range(3):
    kept = pair.call(), replay(torch.ones(3, device="cuda"))
ring = [pair, replay, kept]
ring.append(ring)
"""

PINNED = """
import torch, cadence_fx
index = torch.randint(4, (1 << 20,))
values = torch.randn(1 << 20) * 1e3
def run():
    x = torch.zeros(4, device="cuda").index_add_(0, index.cuda(), values.cuda())
    return x, torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
for _ in range(2):
    with cadence_fx.deterministic():
        (a, _), (b, _) = run(), run()
    assert torch.equal(a, b)
assert not torch.are_deterministic_algorithms_enabled()
"""

LATE = """
import torch, cadence_fx
torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
try:
    with cadence_fx.deterministic():
        raise SystemExit(5)
except cadence_fx.SetTooLate as error:
    assert error.found is None
"""


@pytest.mark.parametrize("code", [FORK, ALIVE, PINNED, LATE], ids=["fork", "end", "pinned", "too late"])
def test_in_a_process_of_its_own(code: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore:.*fork:DeprecationWarning", "-c", code],
        capture_output=True,
        text=True,
        timeout=180,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, "")
