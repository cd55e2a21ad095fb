"""What happens around the calls: a fork, garbage collection, the end of the process, a bound on memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cadence_fx
from cadence_fx.replay import ExactShapeReplay
from tests.harness import Pair, assert_same
from tests.streams import BY_NAME

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield


def in_child(work: Callable[[], None]) -> None:
    """Run in a forked child, which must end by itself within ten seconds."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    for _ in range(200):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")


def test_a_forked_child_serves_the_stream_on_and_so_does_its_parent() -> None:
    pair = Pair(BY_NAME["PromptAppend"])
    for _ in range(3):
        pair.call()

    def work() -> None:
        for _ in range(5):
            pair.call()
        pair.check_kept()
        assert pair.missed() == Counter()

    in_child(work)
    work()


def test_a_fork_while_another_thread_is_in_a_call() -> None:
    """The child has no such thread, and must not wait for it."""
    entered, leave = threading.Event(), threading.Event()

    def slow(x: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            leave.wait(20)
        return x * 2

    replay = ExactShapeReplay(slow)
    x = torch.randn(3)
    thread = threading.Thread(target=lambda: replay(x))
    thread.start()
    assert entered.wait(10)
    try:
        in_child(lambda: assert_same(replay(x), x * 2, "in the child"))
    finally:
        leave.set()
        thread.join()
    assert_same(replay(x), x * 2, "in the parent")


def test_garbage_is_collected_at_every_turn() -> None:
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        pair = Pair(BY_NAME["LayerList"])
        for _ in range(6):
            pair.call()
            ring: list[Any] = [torch.zeros(3)]
            ring.append(ring)
    finally:
        gc.set_threshold(*thresholds)
    pair.check_kept()
    assert pair.missed() == Counter()


ALIVE = """
import sys
import threading
import torch
import cadence_fx
from tests.harness import Pair
from tests.streams import BY_NAME

torch.set_grad_enabled(False)
device = sys.argv[1]
pair = Pair(BY_NAME["AppendLast"], device)
replay = cadence_fx.ExactShapeReplay(lambda x: x * 2)
for _ in range(3):
    kept = pair.call(), replay(torch.ones(3, device=device))
ring = [pair, replay, kept]
ring.append(ring)
if sys.argv[2] == "raises":
    raise SystemExit(7)
if sys.argv[2] == "thread":
    threading.Thread(target=lambda: [pair.call() for _ in range(3)]).start()
"""


def run_to_the_end(how: str, device: str = "cpu") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", ALIVE, device, how], capture_output=True, text=True, timeout=300, env=environment
    )


@pytest.mark.parametrize(("how", "code"), [("ends", 0), ("raises", 7), ("thread", 0)])
def test_the_process_ends_with_classes_alive(how: str, code: int) -> None:
    done = run_to_the_end(how)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize("name", ["LayerList", "ViewState", "SolverWorkspace", "PartialFlush"])
def test_D45_what_is_predicted_is_what_is_used(name: str) -> None:
    """lightning-thunder#1792: memory of captured classes that nobody can see. Within 5 % of what is allocated."""
    pair = Pair(BY_NAME[name])
    sizes = cadence_fx.report(pair.step)["bytes"]
    for what in ("staging", "carries"):
        predicted, measured = sizes[f"predicted_{what}"], sizes[f"measured_{what}"]
        assert abs(predicted - measured) <= 0.05 * measured, what
        assert measured > 0


def attend(x: Tensor, frames: Tensor, room: int | None = None) -> Tensor:
    """Attention over `frames`; with `room`, as a bucket of that size does it: zeros behind them, and a mask."""
    length = frames.size(1)
    if room is not None:
        frames = torch.nn.functional.pad(frames, (0, 0, 0, room - length))
    weights = x @ frames.transpose(1, 2) / frames.size(2) ** 0.5
    if room is not None:
        weights = weights.masked_fill(torch.arange(room) >= length, -torch.inf)
    return torch.softmax(weights, -1) @ frames


def test_D47_padding_is_not_exact() -> None:
    """sglang-omni#1209: why nothing here is ever padded to a bucket. Nearly equal is what it gives, and no more."""
    different = 0
    for length in (302, 335, 352, 388):
        x, frames = torch.randn(2, 4, 32), torch.randn(2, length, 32)
        exact, bucket = attend(x, frames), attend(x, frames, 402)
        torch.testing.assert_close(bucket, exact)
        different += not torch.equal(bucket, exact)
        replay = ExactShapeReplay(attend)
        for _ in range(2):
            assert_same(replay(x, frames), exact, f"{length} frames")
    assert different > 0


def test_warm_ups_of_several_threads_take_turns() -> None:
    """And leave the collector's thresholds as they were."""
    before, names = gc.get_threshold(), ["AppendLast", "PromptAppend", "SolverStack"]
    pairs: dict[str, Pair] = {}

    def warm(name: str) -> None:
        with torch.no_grad():
            pairs[name] = Pair(BY_NAME[name])

    threads = [threading.Thread(target=warm, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gc.get_threshold() == before
    with torch.no_grad():
        for name in names:
            for _ in range(4):
                pairs[name].call()
            assert pairs[name].missed() == Counter()
