"""What users of other graph-capturing tools ran into, one test for each report; the links are in the docstrings."""

import contextlib
import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import cadence_fx
from cadence_fx.clock import Clock
from cadence_fx.contract import Contract, Input, Region
from cadence_fx.errors import CatalogTooWide, UnexplainedSize
from cadence_fx.retention import KeepLast, PromptPlusLast
from tests.harness import Pair, assert_same, byte_view, compile_with, counts
from tests.streams import BY_NAME, Run, Stream, declared, frames, kept, noise, on_argument, visits
from tests.toys import B, C, Toy

HERE = __file__.rsplit("/", 1)[-1]


@pytest.fixture(autouse=True)
def _serving(request: pytest.FixtureRequest) -> None:
    """Serving code runs without gradients; the one test about modes chooses its own."""
    torch.set_grad_enabled("D48" in request.node.name)


@pytest.mark.parametrize("marked", [False, True], ids=["plain", "mark_step_begin"])
def test_A1_state_fed_back_without_clones(marked: bool) -> None:
    """pytorch#175557: a cache that is passed back must not raise, and needs no clone."""
    pair = Pair(BY_NAME["AppendLast"])
    for _ in range(40):
        if marked:
            torch.compiler.cudagraph_mark_step_begin()
        pair.call()
    pair.check_kept()
    assert pair.missed() == Counter()


def test_A2_an_output_kept_through_a_conversion_that_does_nothing() -> None:
    """pytorch#148439: `.to()` of the same dtype is the same memory, and the next replay must not write it."""
    pair = Pair(BY_NAME["AppendLast"])
    held = [(y.to(y.dtype), y.detach().clone()) for y in (pair.call() for _ in range(8))]
    for i, (found, expected) in enumerate(held):
        assert_same(found, expected, f"output {i}, read at the end")
    assert pair.missed() == Counter()


class OutputsAreViewsOfState(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        new = torch.cat([cache, self.attend(x, cache)], 1)[:, -9:]
        return (new[:, -3:], cache[:, :2], new.transpose(1, 2), x[:, 1:]), new


def test_A4_outputs_are_kept_and_read_at_the_end() -> None:
    """NVIDIA-NeMo/Speech#15863: per-chunk outputs in a list, here views of the very states that are overwritten."""
    pair = Pair(on_argument(OutputsAreViewsOfState, 3, kept("cache", 1, 2, KeepLast(9)), (B, 2, C)))
    for _ in range(20):
        pair.call()
    pair.check_kept()
    assert pair.missed() == Counter()


def test_A6_rebound_state_keeps_one_address() -> None:
    """sglang-omni#801: a cache rebound by cat at every step; 200 calls, one address, eager's values."""
    pair = Pair(BY_NAME["Rebound"])
    for _ in range(200):
        pair.call()
    assert [len(seen) for seen in pair.addresses.values()] == [1]
    assert pair.missed() == Counter()


def test_A7_state_at_another_address_is_read_there() -> None:
    """vllm#53915: an input whose address drifted; its bytes count, not those at the old address."""
    pair = Pair(BY_NAME["AppendLast"])
    for i in range(24):
        if i % 3 == 1:  # a fresh copy, with other values
            pair.live.state = (pair.live.state[0].clone() * 2,)
            pair.eager.state = (pair.eager.state[0].clone() * 2,)
        if i % 3 == 2:  # the same tensor, edited by the user
            pair.live.state[0].add_(1)
            pair.eager.state[0].add_(1)
        pair.call()
    pair.check_kept()


def test_A7_weights_edited_and_replaced() -> None:
    """An edit in place costs nothing; a replaced parameter is counted, and never read from its old address."""
    pair = Pair(BY_NAME["AppendLast"])
    pair.call()
    for run in (pair.eager, pair.live):
        run.module.key.weight.mul_(1.5)
    for _ in range(3):
        pair.call()
    assert pair.missed() == Counter()
    old = pair.live.module.key.weight  # stays alive: a stale read would be silent
    for run in (pair.eager, pair.live):
        run.module.key.weight = nn.Parameter(run.module.key.weight * -0.5)
    for _ in range(3):
        pair.call()
    assert not torch.equal(old, pair.live.module.key.weight)
    counted = pair.missed().total() + sum(counts(pair.step)["invalidations"].values()) + pair.since("late_captures")
    assert counted > 0


def two_inputs() -> Contract:
    return Contract((Clock("n", 4),), inputs=(Input("x", axis=0, clock="n"), Input("y", axis=0, clock="n")))


def test_A8_inputs_that_come_to_overlap() -> None:
    """pytorch#139789: the inputs start apart and overlap later, while one of them is mutated."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return x + y

    step = compile_with(f, two_inputs())
    assert_same(step(torch.arange(4.0), torch.ones(4)), torch.arange(4.0) * 2 + 1, "apart")
    ours, theirs = torch.arange(8.0) + 1, torch.arange(8.0) + 1
    for _ in range(3):
        assert_same(step(ours[:4], ours[2:6]), f(theirs[:4], theirs[2:6]), "overlapping")
        assert_same(ours, theirs, "the memory they share")


class ReadsBesideState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hist: Tensor
        self.register_buffer("hist", torch.ones(B, 6, C))

    def forward(self, x: Tensor) -> Tensor:
        self.hist.copy_(torch.cat([self.hist, torch.tanh(x)], 1)[:, x.size(1) :])
        return x.sin() + self.hist[:, -x.size(1) :]


def test_A8_an_input_that_comes_to_overlap_the_state() -> None:
    module = ReadsBesideState()
    eager = copy.deepcopy(module)
    region = Region("hist", attribute="hist", axis=1, clock="frames", start=6, retention=KeepLast(6))
    step = compile_with(module, Contract((Clock("frames", 2),), (region,)))
    x = torch.randn(B, 2, C)
    cadence_fx.warm_up(step, x)
    for name in ("hist", "x", "hist", "hist", "x"):
        ours, theirs = (module.hist[:, 1:3], eager.hist[:, 1:3]) if name == "hist" else (x, x)
        assert_same(step(ours), eager(theirs), f"output, input from {name}")
        assert_same(module.hist, eager.hist, f"state, input from {name}")


def test_A9_output_is_a_view_of_an_aliased_input() -> None:
    """pytorch#198095: the view must show the memory that the mutation wrote."""

    def f(t0: Tensor, ta: Tensor) -> Tensor:
        t0.add_(100)
        return ta[0]

    contract = Contract(
        (Clock("n", 4),), inputs=(Input("t0", axis=0, clock="n"), Input("ta", axis=0, clock="n", offset=-1))
    )
    step = compile_with(f, contract)
    assert_same(step(torch.zeros(4, 2), torch.ones(3, 2)), torch.ones(2), "apart")
    for _ in range(3):
        base = torch.arange(8.0).reshape(4, 2)
        expected = base[1] + 100
        assert_same(step(base, base[1:]), expected, "aliased")
        assert_same(base, torch.arange(8.0).reshape(4, 2) + 100, "base")


def test_B19_the_sizes_are_known_before_any_call() -> None:
    """pytorch#150484: state the sizes; print them with nothing run; a call outside them is eager and counted."""
    stream = BY_NAME["PartialFlush"]
    table = str(stream.contract.catalog().table())
    assert all(str(extent) in table for extent in (2, 6, 10))
    pair = Pair(stream)
    pair.call()
    pair.call({"frames": 5})
    assert pair.missed().total() == 1
    assert pair.since("late_captures") == 0


class CountsCalls(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.hist, self.calls = torch.ones(B, 2, C), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.hist = torch.cat([self.hist, self.key(x)], 1)[:, -8:]
        return self.attend(x, self.hist)


def test_B20_an_int_attribute_that_counts_calls() -> None:
    """transformers#44609: a Python counter beside the cache; no compile at each step."""
    region = Region("hist", attribute="hist", axis=1, clock="frames", start=2, retention=KeepLast(8))
    contract = Contract((Clock("frames", 3),), (region,))
    module = CountsCalls()
    eager = copy.deepcopy(module)
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        counters.clear()
        step = compile_with(module, contract)
        cadence_fx.warm_up(step, torch.randn(B, 3, C))
        module.hist, module.calls = torch.ones(B, 2, C), 0
        for i in range(40):
            x = torch.randn(B, 3, C)
            assert_same(step(x), eager(x), f"call {i}")
        assert module.calls == 40
        assert counters["stats"]["unique_graphs"] <= len(contract.catalog()) + 1


def prompted(prompt: int, max_classes: int = 64) -> Stream:
    class Prompted(Toy):
        def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
            cache = torch.cat([cache, self.key(x)], 1)
            y = self.attend(x, cache)
            if cache.size(1) > prompt + 7:
                cache = torch.cat([cache[:, :prompt], cache[:, -7:]], 1)
            return y, cache

    return Stream(
        Prompted,
        Contract(
            (Clock("frames", 3, flush=(1, 2)),),
            (kept("cache", 1, prompt, PromptPlusLast(prompt, 7)),),
            inputs=(Input("x", axis=1, clock="frames"),),
            max_classes=max_classes,
        ),
        fresh=lambda g: (noise(g, B, prompt, C),),
        inputs=frames,
        where=lambda m, s: {"cache": [s[0]]},
        axes={"cache": 1},
        calls=({"frames": 3},),
        flushes=({"frames": 1}, {"frames": 2}),
    )


@pytest.mark.parametrize("prompt", [5, 6, 11])
def test_B23_cost_is_known_and_refused_before_capture(prompt: int) -> None:
    """parler-tts#93: every prompt length costs captures; the number is known, and a budget refuses with its sum."""
    stream = prompted(prompt, max_classes=6)
    width = stream.contract.width()
    assert width.classes >= len(visits(stream)) == 12
    assert width.arithmetic
    with pytest.raises(CatalogTooWide, match="12") as refused:
        Pair(stream)
    assert refused.value.limit == 6 and refused.value.width >= 12


@pytest.mark.parametrize("prompt", [5, 6, 11])
def test_B24_prompts_times_ramp_times_flush(prompt: int) -> None:
    """vllm-omni#7416: prompt length, ramp and last chunk multiply; the set is the simulated one, and is served."""
    stream = prompted(prompt)
    assert set(declared(stream.contract)) == visits(stream)
    pair = Pair(stream)
    assert pair.before["captures"] == len(visits(stream))
    for turn in range(8):
        pair.restart(turn)
        for _ in range(turn % 4 + 1):
            pair.call()
        pair.call(stream.flushes[turn % 2])
    assert pair.missed() == Counter()


def test_B26_a_recorded_trace_is_covered() -> None:
    """sglang-omni#886: a hand-picked set served 39% of steps; ours serves all but the named exceptions."""
    pair = Pair(BY_NAME["PartialFlush"])
    trace = [[4] * 9 + [1], [4] * 2 + [3], [2], [4, 4, 7, 4, 4, 4], [4] * 12 + [3], [4, 6]]
    for turn, chunks in enumerate(trace):
        pair.restart(turn)
        for size in chunks:
            pair.call({"frames": size})
    # 7 and 6 are undeclared; 2+4+4=10 is the bound, so the stream is back on declared extents after either.
    assert pair.missed().total() == 2
    assert pair.since("replays") == sum(map(len, trace)) - 2
    pair.check_kept()


def test_B27_no_recompile_limit() -> None:
    """csm-streaming#32: the limit of 8 recompiles, with failure instead of a silent fallback."""
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
        pair = Pair(BY_NAME["PartialFlush"])
        for turn in range(4):
            pair.restart(turn)
            for _ in range(15):
                pair.call()
            pair.call(pair.stream.flushes[turn % 3])
    assert pair.missed() == Counter()


def test_D43_a_refusal_names_the_argument_and_the_line() -> None:
    """pytorch#117281: a message that names no input and no line helps nobody."""

    def scaled(x: Tensor, cache: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        return x * tail.exp().sum(), torch.cat([cache, x], 1)[:, -6:]

    step = compile_with(scaled, Contract((Clock("frames", 2),), (kept("cache", 1, 2, KeepLast(6)),)))
    tail = torch.randn(5)
    torch._dynamo.mark_dynamic(tail, 0)
    with pytest.raises(UnexplainedSize) as refused:
        cadence_fx.warm_up(step, torch.randn(B, 2, C), torch.randn(B, 2, C), tail)
    assert "'tail'" in str(refused.value) and "axis 0" in str(refused.value)
    assert f"{HERE}:{scaled.__code__.co_firstlineno + 1}" in str(refused.value)


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def test_D48_four_modes_in_one_process() -> None:
    """pytorch#135892: the same callable under inference mode, no_grad, grad and autocast, and back again."""
    stream = BY_NAME["AppendLast"]
    pair = Pair(stream, warm=False)
    for turn, (name, mode) in enumerate([*MODES.items(), *MODES.items()]):
        with mode(), torch.no_grad() if name == "autocast" else contextlib.nullcontext():
            if turn < len(MODES) and name != "grad":
                pair.warm_up()
            pair.eager, pair.live = (Run(stream, run.module, run.step) for run in (pair.eager, pair.live))
            pair.restart(turn)
            for _ in range(6):
                y = pair.call()
                assert y.requires_grad == (name == "grad")
                assert y.is_inference() == (name == "inference")
    assert all(byte_view(y).equal(byte_view(e)) for y, e in pair.kept)
