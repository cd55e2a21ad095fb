"""Other ways to compile and to call, that change nothing in the bytes or in the counts."""

import copy
import gc
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import cadence_fx
import cadence_fx.capture as capture_module
from cadence_fx.errors import UnexplainedSize
from tests.harness import BACKEND, Pair, assert_same, byte_view, compile_with, counts
from tests.streams import BY_NAME, Run


@pytest.fixture(autouse=True)
def _serving() -> None:
    torch.set_grad_enabled(False)


def played(pair: Pair, calls: int = 8) -> None:
    for _ in range(calls):
        pair.call()
    pair.check_kept()
    assert pair.missed() == Counter()
    assert pair.since("late_captures") == 0


def with_step(name: str, step: Any, pair: Pair | None = None) -> Pair:
    """A pair whose compiled callable is ``step(module)``."""
    pair = pair or Pair(BY_NAME[name], warm=False)
    pair.step = pair.live.step = step(pair.live.module)
    pair.warm_up()
    return pair


@pytest.mark.parametrize("options", [{"fullgraph": True}, {"dynamic": False}], ids=str)
@pytest.mark.parametrize("name", ["PromptAppend", "PartialFlush", "LayerAttributes"])
def test_options_of_torch_compile(name: str, options: dict[str, Any]) -> None:
    contract: dict[str, Any] = {"contract": BY_NAME[name].contract}
    played(with_step(name, lambda m: torch.compile(m, backend=BACKEND, options=contract, **options)))


def test_dynamic_true_is_refused_with_the_first_size_it_frees() -> None:
    """It makes every size vary, the batch too, and the contract explains only those that follow a clock."""
    contract: dict[str, Any] = {"contract": BY_NAME["AppendLast"].contract}
    with pytest.raises(UnexplainedSize, match="toys.py:") as refused:
        with_step("AppendLast", lambda m: torch.compile(m, backend=BACKEND, options=contract, dynamic=True))
    assert (refused.value.accessor, refused.value.axis) == ("x", 0)


def test_the_module_compiled_in_place() -> None:
    def in_place(module: Any) -> Any:
        module.compile(backend=BACKEND, options={"contract": BY_NAME["PromptAppend"].contract})
        return module

    played(with_step("PromptAppend", in_place))


def test_a_declared_module_needs_no_options() -> None:
    def declared(module: Any) -> Any:
        return torch.compile(cadence_fx.declare(module, BY_NAME["Rebound"].contract), backend=BACKEND)

    played(with_step("Rebound", declared))


def test_state_by_keyword() -> None:
    stream = BY_NAME["AppendLast"]
    module = stream.build()
    eager, step = copy.deepcopy(module), compile_with(module, stream.contract)
    x, cache = torch.randn(2, 3, 8), torch.randn(2, 2, 8)
    cadence_fx.warm_up(step, cache=cache, x=x)
    before = cadence_fx.report(step).as_dict()["misses"]
    ours = theirs = cache
    for i in range(8):
        y, ours = step(cache=ours, x=x)
        z, theirs = eager(x, theirs)
        assert_same(y, z, f"call {i}")
        assert_same(ours, theirs, f"state {i}")
    assert cadence_fx.report(step).as_dict()["misses"] == before


def test_chunks_cut_from_one_recording() -> None:
    """Slices have the long tensor's strides and start anywhere: each is of its own class, or eager and counted."""
    pair = Pair(BY_NAME["ConvContext"])
    recording = torch.randn(2, 8, 96)
    for i in range(16):
        pair.feed(recording[..., 6 * i : 6 * i + 6])
    pair.check_kept()
    assert pair.missed().total() + pair.since("replays") == 16


def test_chunks_cut_from_one_recording_warmed_up_with_one() -> None:
    """The example call of the warm-up has the layout of the traffic, so that layout is captured."""
    stream = BY_NAME["ConvContext"]
    pair = Pair(stream, warm=False)
    recording = torch.randn(2, 8, 8 * 16)[..., : 6 * 16]  # rows of 512 bytes
    pair.restart(0)
    cadence_fx.warm_up(pair.step, recording[..., :6], *pair.live.state)
    pair.before = counts(pair.step)
    for i in range(0, 16, 2):  # chunks that start at multiples of 48 bytes, as the example does at 0
        pair.feed(recording[..., 6 * i : 6 * i + 6])
    pair.check_kept()
    assert pair.missed() == Counter()
    assert pair.since("replays") == 8


def test_a_function_over_a_module() -> None:
    stream = BY_NAME["AppendLast"]
    pair = Pair(stream, warm=False)
    module = pair.live.module

    def chunk(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return module(x, cache)

    played(with_step("AppendLast", lambda m: compile_with(chunk, stream.contract), pair))


@pytest.mark.parametrize("name", ["AppendLast", "LayerAttributes"])
def test_two_modules_of_one_class(name: str) -> None:
    """Each compile has its own carries and classes, whatever Dynamo shares between them."""
    one, two = Pair(BY_NAME[name]), Pair(BY_NAME[name])
    for i in range(12):
        if i == 5:
            one.restart(i)
        one.call()
        two.call()
    for pair in (one, two):
        pair.check_kept()
        assert pair.missed() == Counter()


def test_compiler_reset_in_the_middle_of_a_stream() -> None:
    """States that are held keep their bytes; the stream goes on, and after another warm-up it replays again."""
    pair = Pair(BY_NAME["AppendLast"])
    for _ in range(3):
        pair.call()
    torch.compiler.reset()
    pair.check_state()
    for _ in range(3):
        pair.call()
    pair.check_kept()
    pair.warm_up()
    played(pair)


def test_warm_up_twice_and_in_the_middle_of_a_stream() -> None:
    pair = Pair(BY_NAME["AppendLast"])
    for _ in range(3):
        pair.call()
    x, cache = pair.eager.inputs(3, {"frames": 3})[0], torch.randn(2, 2, 8)
    cadence_fx.warm_up(pair.step, x, cache)
    pair.check_state()
    played(pair)
    assert pair.since("captures") == 0


def test_calls_from_other_threads() -> None:
    """D36, pytorch#123177: compiled and warmed up here, called there, one stream handed from thread to thread."""
    pair = Pair(BY_NAME["PromptPrepend"])
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with torch.no_grad():
                for _ in range(4):
                    pair.call()
        except BaseException as error:  # noqa: B036 - shown by the assertion below
            errors.append(error)

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert not errors, errors
    pair.check_kept()
    assert pair.missed() == Counter()


def test_two_threads_with_a_stream_each() -> None:
    """Calls of one binding are serialised; which stream's state is in the carry changes at any time. A state is only
    passed on meanwhile (exactness.md): every result depends on all of it."""
    stream = BY_NAME["AppendLast"]
    pair = Pair(stream)
    start = threading.Barrier(2)
    failures: list[tuple[int, int]] = []
    ended: dict[int, tuple[Tensor, Tensor]] = {}

    def work(seed: int) -> None:
        with torch.no_grad():
            eager, live = Run(stream, pair.eager.module), Run(stream, pair.live.module, pair.step)
            eager.restart(seed)
            live.restart(seed)
            kept = []
            start.wait()
            for i in range(60):
                x = eager.inputs(100 * seed + i, stream.calls[0])
                kept.append((live.call(*x), eager.call(*x)))
        failures.extend((seed, i) for i, (y, z) in enumerate(kept) if not byte_view(y).equal(byte_view(z)))
        ended[seed] = live.state[0], eager.state[0]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [byte_view(a).equal(byte_view(e)) for a, e in ended.values()] == [True, True]
    assert pair.since("replays") + pair.missed().total() == 120


def test_a_held_state_of_an_earlier_turn_keeps_its_bytes() -> None:
    """A user may branch: the last state of a turn is kept, another turn is played, then the first one goes on."""
    pair = Pair(BY_NAME["AppendLast"])
    for _ in range(3):
        pair.call()
    held, ours = copy.deepcopy(pair.eager.state), pair.live.state
    pair.restart(5)
    played(pair, 4)
    assert_same(ours[0], held[0], "state held over another turn")
    pair.eager.state, pair.live.state = held, ours
    played(pair, 4)


def test_report_is_complete_and_printable() -> None:
    pair = Pair(BY_NAME["PartialFlush"])
    pair.call()
    report = cadence_fx.report(pair.step)
    facts = report.as_dict()
    assert {"misses", "classes", "captures", "late_captures", "replays", "invalidations"} <= facts.keys()
    assert facts["captures"] == 12 and facts["replays"] >= 1
    assert str(report) and report.to_json().startswith("{")


def test_exact_shape_replay_of_a_plain_callable() -> None:
    """No Dynamo, no contract: exact signatures of a callable, each captured once."""
    module = BY_NAME["ConvContext"].build()
    replay = cadence_fx.ExactShapeReplay(module)
    run = Run(BY_NAME["ConvContext"], module)
    run.restart(0)
    kept = []
    for size in (6, 6, 4, 6, 4, 6):
        (x,) = run.inputs(size, {"frames": size})
        expected = module(x, run.state[0])
        actual = replay(x, run.state[0])
        for a, e in zip(actual, expected, strict=True):
            assert_same(a, e, f"size {size}")
        run.state = (actual[1].clone(),)
        kept.append((actual[0], expected[0]))
    for a, e in kept:
        assert_same(a, e, "at the end")
    assert replay.ledger.captures == 2 and not replay.ledger.misses


def test_warm_up_collects_garbage_less_often_and_tells_where_its_time_went(monkeypatch: pytest.MonkeyPatch) -> None:
    before: tuple[int, ...] = gc.get_threshold()
    seen: list[tuple[int, ...]] = []
    capture = capture_module.capture

    def watched(*args: Any) -> Any:
        seen.append(gc.get_threshold())
        return capture(*args)

    monkeypatch.setattr("cadence_fx.table.capture", watched)
    report = cadence_fx.report(Pair(BY_NAME["PartialFlush"]).step)
    assert gc.get_threshold() == before
    assert seen and all(limit[0] >= 100_000 for limit in seen)
    assert list(report["seconds"]) == ["dynamo", "tracing", "passes", "capture", "eager", "other"]
    assert "compiled in " in str(report)
