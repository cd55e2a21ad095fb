"""A capture that fails leaves everything as it was and refuses one class, wherever it fails."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cadence_fx
from cadence_fx import capture, certify, effects
from cadence_fx.generators import Generators, all_sources, same_state
from cadence_fx.recorder import HostRecording
from cadence_fx.replay import ExactShapeReplay
from cadence_fx.retention import KeepLast
from tests.harness import Pair, assert_same
from tests.streams import BY_NAME, kept, on_argument
from tests.toys import B, C, Toy


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield


class Fault(RuntimeError):
    pass


class Broken(HostRecording):
    """A recording that runs and then fails, as a device does that reports an error late."""

    def launch(self) -> Any:
        super().launch()
        raise Fault("in the certificate")


class Recorder:
    """Runs what it is given as the device's recorder does, twice and once more, and fails where it is told to."""

    def __init__(self, stage: str, error: Exception) -> None:
        self.stage, self.error, self.made = stage, error, list[HostRecording]()

    def __call__(self, run: Callable[[], Any], *rest: Any) -> HostRecording:
        if self.stage == "warm":
            run()
            raise self.error
        for _ in range(2):
            run()
        if self.stage == "begin":
            raise self.error
        if self.stage == "middle":
            with Halfway(self.error):
                run()
        run()
        if self.stage == "end":
            raise self.error
        self.made.append(Broken(run) if self.stage == "certificate" else HostRecording(run))
        return self.made[-1]


class Halfway(torch.utils._python_dispatch.TorchDispatchMode):
    """Fails at the third operator."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._left, self._error = 3, error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left < 0:
            raise self._error
        return func(*args, **(kwargs or {}))


class Everything(nn.Module):
    """Draws, writes its buffer, its argument and a memory of its own."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))
        self.memory = [torch.ones(4)]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x)
        self.memory[0].mul_(1.5)
        x.mul_(2)
        return x + torch.rand(4) + self.seen + self.memory[0]


def in_reference(number: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stock run of that number finishes, and then fails."""
    original, left = certify.run_reference, [number]

    def failing(*args: Any) -> Any:
        result = original(*args)
        left[0] -= 1
        if left[0] == 0:
            raise error
        return result

    monkeypatch.setattr(certify, "run_reference", failing)
    monkeypatch.setattr(effects, "run_reference", failing)


STAGES = ("reference 1", "reference 2", "reference 3", "warm", "begin", "middle", "end", "certificate")


def inject(stage: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder(stage, error)
    if stage.startswith("reference"):
        in_reference(int(stage[-1]), error, monkeypatch)
    monkeypatch.setattr(capture, "record", recorder)
    return recorder


def states() -> list[Any]:
    return Generators(all_sources()).read()


@pytest.mark.parametrize("stage", STAGES)
def test_a_plain_class_that_fails_at_a_stage(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the trial touched shows: each call is the eager one, with its own draws and writes, once."""
    recorder = inject(stage, Fault("injected"), monkeypatch)
    eager, module = Everything(), Everything()
    replay = ExactShapeReplay(module)
    for i in range(4):
        random.seed(i), np.random.seed(i), torch.manual_seed(i)
        x, twin = torch.full((4,), float(i)), torch.full((4,), float(i))
        expected, after = eager(twin), states()
        random.seed(i), np.random.seed(i), torch.manual_seed(i)
        assert_same(replay(x), expected, f"call {i}")
        assert_same(x, twin, "the argument")
        assert_same(module.seen, eager.seen, "the buffer")
        assert_same(module.memory[0], eager.memory[0], "memory beside")
        assert all(map(same_state, states(), after))
    reason = "raised" if stage == "reference 1" else "capture_failed"
    assert all(recording.closed for recording in recorder.made if isinstance(recording, Broken))
    if stage == "reference 1":  # only the first run of the injected kind fails; the next call is tried again
        assert replay.ledger.misses[reason] == 1 and len(replay.classes) == 1
    else:
        assert dict(replay.ledger.refusals) == {reason: 1} and dict(replay.ledger.misses) == {reason: 4}
        assert not replay.classes


@pytest.mark.parametrize("stage", STAGES)
def test_one_class_of_a_stream_that_fails_at_a_stage(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others replay, before and after it; the state walks through all of them."""
    pair = Pair(BY_NAME["AppendLast"], warm=False)
    done = [0]
    original = capture.capture

    def only_the_second(*args: Any) -> Any:
        done[0] += 1
        if done[0] != 2:
            return original(*args)
        with pytest.MonkeyPatch.context() as patch:
            inject(stage, Fault("injected"), patch)
            return original(*args)

    monkeypatch.setattr("cadence_fx.table.capture", only_the_second)
    pair.live.restart(90)
    example = pair.live.inputs(91, pair.stream.calls[0])
    mark = states()
    cadence_fx.warm_up(pair.step, *example, *pair.live.state)
    assert all(map(same_state, states(), mark))
    pair.restart(0)
    pair.before = cadence_fx.report(pair.step).as_dict()
    for _ in range(12):
        pair.call()
    pair.check_kept()
    missed = pair.missed()
    assert set(missed) <= {"capture_failed", "sealed"} and pair.since("replays") >= 6
    assert pair.since("replays") + sum(missed.values()) == 12


class Sampler(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return self.attend(x + torch.rand_like(x), cache), torch.cat([cache, self.key(x)], 1)[:, -6:]


@pytest.mark.parametrize("stage", ["warm", "middle", "certificate"])
def test_C34_a_failure_inside_a_class_that_draws(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang-omni#1061: the next draw works, and is the one of a run that was never tried."""
    inject(stage, Fault("injected"), monkeypatch)
    pair = Pair(on_argument(Sampler, 2, kept("cache", 1, 2, KeepLast(6)), (B, 2, C)))
    for i in range(6):
        x = pair.eager.inputs(i, {"frames": 2})[0]
        torch.manual_seed(i)
        expected, drawn = pair.eager.call(x), torch.rand(3)
        torch.manual_seed(i)
        assert_same(pair.live.call(x), expected, f"call {i}")
        assert_same(torch.rand(3), drawn, "the next draw")
    assert pair.missed() == Counter({"capture_failed": 6})


@pytest.mark.parametrize("stage", ["reference 1", "reference 2", "warm", "middle", "end", "certificate"])
def test_want_of_memory_has_a_reason_of_its_own(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused until somebody warms up again: calls do not each try, and fail, and empty the caches of the device."""
    error = torch.OutOfMemoryError("tried to allocate 2.00 GiB\nand more lines")
    with monkeypatch.context() as patch:
        recorder = inject(stage, error, patch)
        if stage == "certificate":
            patch.setattr(Broken, "launch", lambda self: (_ for _ in ()).throw(error))
        pair = Pair(BY_NAME["AppendLast"])
        refused = cadence_fx.report(pair.step)["refusals"]
        assert set(refused) == {"out_of_memory"}
        assert "tried to allocate 2.00 GiB" in str(cadence_fx.report(pair.step)) and recorder.stage == stage
        for _ in range(4):
            pair.call()
        pair.check_kept()
    some = pair.since("replays")
    assert pair.missed() == Counter({"out_of_memory": 4 - some})
    pair.warm_up()
    for _ in range(6):
        pair.call()
    assert pair.missed() == Counter() and pair.since("replays") == 6


def test_memory_that_ran_out_under_another_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending a capture that has failed raises an error of its own over the cause."""
    error = Fault("capture was invalidated")
    error.__context__ = torch.OutOfMemoryError("none left")
    inject("end", error, monkeypatch)
    replay = ExactShapeReplay(lambda x: x * 2)
    replay(torch.ones(2))
    assert dict(replay.ledger.refusals) == {"out_of_memory": 1} and "none left" in str(cadence_fx.report(replay))


def test_an_interrupt_goes_through_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(run: Callable[[], Any], *rest: Any) -> Any:
        run()
        raise KeyboardInterrupt

    module = Everything()
    replay = ExactShapeReplay(module)
    torch.manual_seed(1)
    mark = torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setattr(capture, "record", interrupted)
        with pytest.raises(KeyboardInterrupt):
            replay(torch.ones(4))
    assert module.seen.tolist() == [0] * 4 and module.memory[0].tolist() == [1] * 4
    assert torch.equal(torch.get_rng_state(), mark)
    replay(torch.ones(4))
    assert len(replay.classes) == 1


def test_D40_nothing_could_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang-omni#798: with no class captured the callable is a direct call, says so, and does not keep trying."""
    recorder = inject("begin", Fault("injected"), monkeypatch)
    tried: list[str] = []

    def counted(*args: Any) -> Any:
        tried.append("once")
        return recorder(*args)

    monkeypatch.setattr(capture, "record", counted)
    pair = Pair(BY_NAME["AppendLast"])
    attempts = len(tried)
    for _ in range(12):
        pair.call()
    report = cadence_fx.report(pair.step)
    assert report["captures"] == report["classes"] == 0 and report["effects"]["refused"] == attempts > 0
    assert pair.missed() == Counter({"capture_failed": 12}) and len(tried) == attempts
    assert "every call runs eager" in str(report)


def test_a_collective_is_stopped_before_it_is_sent() -> None:
    """The other processes would wait for calls that never come, or take those of a trial for real ones."""
    pytest.importorskip("torch.distributed._functional_collectives")
    sent: list[int] = []

    def f(x: Tensor) -> Tensor:
        if not torch._C._len_torch_dispatch_stack():
            sent.append(1)
            return x * 2
        return torch.ops._c10d_functional.all_reduce(x, "sum", "0")

    replay = ExactShapeReplay(f)
    for _ in range(3):
        assert_same(replay(torch.ones(2)), torch.full((2,), 2.0), "output")
    assert len(sent) == 3 and dict(replay.ledger.refusals) == {"collective": 1}
