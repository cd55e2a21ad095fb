"""Values that are computed once, through `torch.compile`: what they save, who shares them, and what may happen to the
weights that they come from."""

from __future__ import annotations

import copy
import gc
import timeit
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import cadence_fx
from cadence_fx import kept, residents
from cadence_fx.clock import Clock
from cadence_fx.contract import Contract, Region
from cadence_fx.errors import NotCompiled
from cadence_fx.kept import Keep, KeptValues
from cadence_fx.lookup import program_of
from cadence_fx.passes import hoist_slow
from cadence_fx.passes.base import SlowPart
from cadence_fx.retention import KeepLast
from tests.backend import test_host_side as host_side
from tests.harness import assert_same, compile_with, counts

C, STEPS = 16, 3
CONTRACT = Contract(
    [Clock("frame", 2)],
    [Region("cache", argument="cache", result=1, axis=1, clock="frame", start=2, retention=KeepLast(6))],
)


@pytest.fixture(autouse=True)
def _serving() -> None:
    torch.set_grad_enabled(False)


class Solver(nn.Module):
    """As flow decoders do it: fixed times, embedded, modulate each step; a convolution has a weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.time = nn.Linear(C, C), nn.Linear(C, C)
        self.modulation = nn.Linear(C, 2 * C)
        self.out = weight_norm(nn.Conv1d(C, C, 3, padding=1))
        self.times: Tensor
        self.register_buffer("times", torch.linspace(0, 1, STEPS))

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, self.key(x)], 1)
        for i in range(STEPS):
            angles = self.times[i] * torch.arange(C // 2, device=x.device)  # 2 operators
            embedded = F.silu(self.time(torch.cat([angles.cos(), angles.sin()])))  # 5
            shift, scale = self.modulation(F.silu(embedded)).chunk(2)  # 2, and a view
            h = F.layer_norm(x, (C,)) * (1 + scale) + shift  # 1
            x = x + torch.softmax(h @ frames.transpose(1, 2), -1) @ frames
        return self.out(x.transpose(1, 2)), frames[:, -6:]  # 1 for the weight


# The numbers are those of the comments. The view stays, for the shift.
IN_A_STEP, VALUES_OF_A_STEP = 2 + 5 + 2 + 1, 2
KEPT_BYTES = 4 * (STEPS * (2 * C + C) + C * C * 3)


def noise() -> Tensor:
    return torch.randn(1, 2, C)


class Play:
    """A module and its eager copy, fed the same, compared after each call."""

    def __init__(self, module: nn.Module, contract: Contract = CONTRACT, passes: Any = None) -> None:
        self.module: Any = module
        self.eager: Any = copy.deepcopy(module)
        self.step = compile_with(module, contract, passes)
        cadence_fx.warm_up(self.step, noise(), noise())
        self.before = counts(self.step)
        self.restart()

    def restart(self) -> None:
        self.cache = noise()
        self.twin = self.cache.clone()

    def both(self, change: Callable[[Any], object]) -> None:
        seed = int(torch.randint(2**31, ()))
        for module in (self.module, self.eager):
            torch.manual_seed(seed)  # the generator of a device, too
            change(module)

    def call(self, times: int = 1) -> None:
        for _ in range(times):
            x = noise()
            got, self.cache = self.step(x.clone(), self.cache)
            want, self.twin = self.eager(x, self.twin)
            assert_same(got, want, "the result")
            assert_same(self.cache, self.twin, "the state")

    def missed(self) -> dict[str, int]:
        return dict(Counter(counts(self.step)["misses"]) - Counter(self.before["misses"]))

    def since(self, what: str) -> int:
        return int(counts(self.step)[what] - self.before[what])

    def notes(self) -> list[str]:
        return [n for row in counts(self.step)["class_table"] for n in row["notes"] if n.startswith("hoist_slow")]


@pytest.fixture
def play() -> Play:
    return Play(Solver())


class Computed:
    """How often kept values are computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        plain = KeptValues._compute

        def counting(values: KeptValues) -> None:
            self.times += 1
            plain(values)

        monkeypatch.setattr(KeptValues, "_compute", counting)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Computed:
    return Computed(monkeypatch)


@pytest.fixture
def _on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bytes are compared, as is so on a device."""
    monkeypatch.setattr(residents, "COMPARED", -1)


def per_launch(step: Any) -> set[int]:
    """Operators that a launch of each class runs, views and results of several apart."""
    views = {"slice", "transpose", "chunk", "unsqueeze", "select", "view", "expand", "getitem", "t"}
    found = set()
    for _, table in program_of(step, "report").graphs:
        for entry in table.classes.values():
            graph = entry.recording._run.func.gm.graph  # type: ignore[attr-defined]
            names = [getattr(n.target, "_opname", n.target.__name__) for n in graph.nodes if n.op == "call_function"]
            found.add(len([name for name in names if name not in views]))
    return found


def test_operators_and_bytes_by_hand() -> None:
    play = Play(Solver(), passes=["hoist_slow"])
    play.call(12)
    assert play.missed() == {} and play.since("late_captures") == 0
    values, gone = STEPS * VALUES_OF_A_STEP + 1, STEPS * IN_A_STEP + 1
    assert len(play.notes()) == 3
    for note in play.notes():
        # Selecting a time is a view that goes too.
        what = f"{gone + STEPS} operators are run once, {values} values of 7 inputs are kept in {KEPT_BYTES} bytes"
        assert note == f"hoist_slow: {what}"
    with_it = per_launch(play.step)
    torch._dynamo.reset()
    without = Play(Solver(), passes=[])
    assert {n + gone for n in with_it} == per_launch(without.step)


def test_classes_share_what_they_keep(play: Play) -> None:
    report = cadence_fx.report(play.step)
    assert [row["kept_bytes"] for row in report["class_table"]] == [KEPT_BYTES] * 3
    assert report["bytes"]["predicted_kept"] == report["bytes"]["measured_kept"] == KEPT_BYTES
    assert "measured kept" in str(report)


def test_nothing_is_computed_while_nothing_is_written(play: Play, computed: Computed) -> None:
    play.call(9)
    assert computed.times == 0
    play.both(lambda m: m.time.weight.mul_(1.5))
    play.call(9)
    assert computed.times == 1  # the saturated class; the others have not been called since
    play.restart()
    play.call(3)
    assert computed.times == 3


def load(module: Any) -> None:
    module.load_state_dict({name: torch.randn_like(value) for name, value in module.state_dict().items()})


def assign(module: Any) -> None:
    weights = {name: torch.randn_like(value) for name, value in module.state_dict().items()}
    module.load_state_dict(weights, assign=True)


def train(module: Any) -> None:
    with torch.enable_grad():
        optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
        module(torch.randn(1, 2, C), torch.randn(1, 2, C))[0].square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()


def in_inference_mode(module: Any) -> None:
    with torch.inference_mode():
        module.modulation.bias.copy_(torch.randn(2 * C))


def replace(module: Any) -> None:
    module.time.weight = nn.Parameter(torch.randn(C, C))


def same_memory(module: Any) -> None:
    """Another parameter over the same memory, which counts writes for itself."""
    module.time.weight = nn.Parameter(module.time.weight.data)
    module.time.weight.mul_(0.75)


COUNTED: dict[str, Callable[[Any], object]] = {
    "load": load,
    "assign": assign,
    "train": train,
    "inference": in_inference_mode,
    "replace": replace,
    "same_memory": same_memory,
    "scale": lambda m: m.out.parametrizations.weight.original0.mul_(1.25),
    "view": lambda m: m.modulation.weight.view(-1)[5:9].zero_(),
    "detached": lambda m: m.time.bias.detach().add_(1),
    "buffer": lambda m: m.times.copy_(torch.rand(STEPS)),
    "init": lambda m: nn.init.normal_(m.modulation.weight),
    "foreach": lambda m: torch._foreach_mul_(list(m.parameters()), 0.9),
    "moved": lambda m: m.double().float(),
}
UNCOUNTED: dict[str, Callable[[Any], object]] = {
    "data": lambda m: m.time.weight.data.mul_(2),
    "data of all": lambda m: [p.data.normal_() for p in m.parameters()],
    "numpy": lambda m: m.modulation.weight.detach().numpy().fill(0.5),
    "storage": lambda m: m.out.parametrizations.weight.original1.untyped_storage().fill_(0),
    "data put back": lambda m: setattr(m.time.weight, "data", m.time.weight.data.mul_(2)),
}


@pytest.mark.usefixtures("_on_a_device")
@pytest.mark.parametrize("write", COUNTED.values(), ids=COUNTED.keys())
def test_writes_that_pytorch_counts(play: Play, write: Callable[[Any], object]) -> None:
    play.call(4)
    for _ in range(2):
        play.both(write)
        play.call(3)
        play.restart()
        play.call(4)
    assert play.missed().keys() <= {"address"}


@pytest.mark.parametrize("write", UNCOUNTED.values(), ids=UNCOUNTED.keys())
def test_other_writes_on_small_weights_on_the_host(play: Play, write: Callable[[Any], object]) -> None:
    play.call(4)
    play.both(write)
    play.call(4)
    assert play.missed() == {}


@pytest.mark.usefixtures("_on_a_device")
@pytest.mark.parametrize("write", UNCOUNTED.values(), ids=UNCOUNTED.keys())
def test_other_writes_are_not_seen_before_refresh(play: Play, write: Callable[[Any], object]) -> None:
    play.call(4)
    play.both(write)
    with pytest.raises(AssertionError, match="differ from eager"):
        play.call()
    play.restart()
    cadence_fx.refresh(play.step)
    play.call(4)
    play.restart()
    play.call(4)
    assert play.missed() == {}


@pytest.mark.usefixtures("_on_a_device")
def test_an_audit_finds_a_write_that_nobody_counted(play: Play) -> None:
    play.call(4)
    play.both(lambda m: m.time.weight.data.mul_(2))
    with pytest.raises(cadence_fx.AuditMismatch), cadence_fx.audit(play.step):
        play.call()


@pytest.mark.usefixtures("_on_a_device")
def test_refresh_makes_checks_anew() -> None:
    """Of a window that `istft` would raise for."""
    both = host_side.Play(host_side.BufferWindow())
    both.call(4)
    both.both(lambda m: m.window.data.zero_())
    cadence_fx.refresh(both.step)
    with pytest.raises(RuntimeError, match="window overlap add min"):
        both.step(both.noise(), both.cache)
    assert both.missed() == {"host_read": 1}


def test_arguments_that_a_launch_writes_are_known() -> None:
    """Under whatever name. PyTorch does not count a launch, so whoever makes it counts."""
    step = compile_with(Running(), CONTRACT)
    cadence_fx.warm_up(step, noise(), noise())
    for planner, table in program_of(step, "report").graphs:
        for entry in table.classes.values():
            assert [planner.names[i] for i in entry.touched] == ["self.scale", "self.count"]


def test_refresh_of_something_else() -> None:
    with pytest.raises(NotCompiled, match=r"refresh\(\)"):
        cadence_fx.refresh(Solver())


@settings(max_examples=8, deadline=None)
@given(st.lists(st.sampled_from([*COUNTED, "restart", "call", "call", "refresh"]), max_size=12))
def test_any_sequence_of_writes(steps: list[str]) -> None:
    torch.set_grad_enabled(False)
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residents, "COMPARED", -1)
        play = Play(Solver())
        for name in steps:
            if name == "restart":
                play.restart()
            elif name == "refresh":
                cadence_fx.refresh(play.step)
            elif name != "call":
                play.both(COUNTED[name])
            play.call()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes(mode: type) -> None:
    module = Solver()
    with mode():
        play = Play(module)
        play.call(5)
        play.both(load)
        play.call(5)
        assert play.missed() == {} and len(play.notes()) == 3


def test_two_modes_keep_values_of_their_own(play: Play) -> None:
    play.call(4)
    with torch.inference_mode():
        cadence_fx.warm_up(play.step, noise(), noise())
        play.restart()
        play.call(6)
    assert counts(play.step)["bytes"]["measured_kept"] == 2 * KEPT_BYTES
    play.both(load)
    with torch.inference_mode():
        play.restart()
        play.call(4)
    play.restart()
    play.call(4)


def test_autocast(computed: Computed) -> None:
    """Values are kept in the precision of the mode; edits are seen although autocast keeps casts of weights."""
    with torch.autocast("cpu", torch.bfloat16):
        play = Play(Solver())
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            play.call(4)
        play.both(lambda m: m.time.weight.mul_(1.5))
    assert play.missed() == {}


def test_weights_of_inference_mode_are_not_kept_from() -> None:
    """Nobody counts writes on them."""
    with torch.inference_mode():
        play = Play(Solver().requires_grad_(False))
        assert play.module.time.weight.is_inference()
        play.call(4)
        play.both(lambda m: m.time.weight.mul_(2))
        play.call(4)
        assert any("made in inference mode, where nobody counts writes" in note for note in play.notes())


class Running(nn.Module):
    """A scale that the call itself writes, in the memory of another buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(C, C)
        self.scale: Tensor
        self.count: Tensor
        memory = torch.ones(C)
        self.register_buffer("scale", memory[:8])
        self.register_buffer("count", memory[4:])

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, self.key(x)], 1)
        y = frames.sum(1) * self.scale.exp().sum()
        self.count.add_(1)
        return y, frames[:, -6:]


def test_memory_that_the_call_writes_under_another_name() -> None:
    play = Play(Running())
    play.call(6)
    assert not any("operators are run once" in note for note in play.notes())


class Written(nn.Module):
    """A buffer that something outside of the call writes, before each call."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(C, C)
        self.position: Tensor
        self.register_buffer("position", torch.zeros(1))

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, self.key(x + self.position.cos() * self.key.weight[0].exp())], 1)
        return x + frames.sum(1, keepdim=True), frames[:, -6:]


def test_a_buffer_written_before_every_call_is_no_longer_kept_from(computed: Computed) -> None:
    play = Play(Written())
    play.call(4)
    before = computed.times
    for _ in range(12):
        play.both(lambda m: m.position.add_(1))
        play.call()
    report = counts(play.step)
    assert play.missed() == {"restless_value": 1} and report["invalidations"] == {"restless_value": 1}
    assert "position" in next(iter(report["details"]["restless_value"]))
    assert computed.times == before + 3 + 1  # of the fourth the class is dropped; the next one keeps what is left
    assert any("written before each of several calls" in note for note in play.notes())


def test_a_write_now_and_then_is_no_reason_to_stop() -> None:
    play = Play(Written())
    for _ in range(12):
        play.both(lambda m: m.position.add_(1))
        play.call(2)
    assert play.missed() == {}


def test_values_that_cannot_be_computed_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(resident: Tensor, value: Tensor) -> None:
        raise ValueError("strides (1, 2) of a value that was traced with (2, 1)")

    monkeypatch.setattr(hoist_slow, "_fill", broken)
    play = Play(Solver())
    play.call(6)
    assert play.missed() == {} and counts(play.step)["bytes"]["measured_kept"] == 0
    for row in counts(play.step)["class_table"]:
        assert "admitted: rewritten in place without hoist_slow" in row["notes"] and row["kept_bytes"] == 0


def test_a_wrong_value_is_found_by_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(resident: Tensor, value: Tensor) -> None:
        resident.copy_(value).view(torch.int32).bitwise_xor_(1)

    monkeypatch.setattr(hoist_slow, "_fill", wrong)
    play = Play(Solver())
    play.call(6)
    for row in counts(play.step)["class_table"]:
        assert any("rewritten in place dropped: output 0 differs from eager" in note for note in row["notes"])
        assert row["kept_bytes"] == 0
    assert play.missed() == {}


def test_values_that_fail_later_make_the_call_eager(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    play.call(4)
    play.both(load)

    def failing() -> None:
        raise RuntimeError("no memory for this")

    with monkeypatch.context() as patch:
        patch.setattr(kept, "uncached_casts", failing)
        play.call(2)
    assert play.missed() == {"kept_value": 2}
    play.call(4)
    assert play.missed() == {"kept_value": 2}


def test_memory_goes_with_the_classes(play: Play) -> None:
    play.call(4)
    program = program_of(play.step, "report")
    assert len(program.keep._tensors) == STEPS * VALUES_OF_A_STEP + 1
    program.close()
    gc.collect()
    assert len(program.keep._tensors) == 0


def test_replaced_weights_are_let_go(play: Play) -> None:
    """Their memory is held until the classes that were captured with it are dropped."""
    play.call(4)
    old = StorageWeakRef(play.module.time.weight.untyped_storage())
    play.both(assign)
    play.call(4)
    play.restart()
    play.call(4)
    gc.collect()
    assert old.expired()


# -- without torch.compile ---------------------------------------------------------------------------------------------


def values(weight: Tensor, keep: Keep, name: str = "exp") -> tuple[KeptValues, Tensor]:
    """A class that keeps the exponential of a weight."""
    graph = torch.fx.Graph()
    memory = keep.in_mode("")(name, weight)
    given = graph.placeholder("weight")
    graph.call_function(hoist_slow._fill, (graph.get_attr("memory"), graph.call_method("exp", (given,))))
    graph.output(())
    module = torch.fx.GraphModule({"memory": memory}, graph)
    return KeptValues(SlowPart(module, ("weight",), (memory,)), [0], ["weight"], keep, set()), memory


def test_two_classes_that_see_different_writes() -> None:
    """A weight that nobody counts the writes of comes and goes, and only one of two sharers is called meanwhile."""
    weight, keep = torch.randn(4), Keep()
    first, memory = values(weight, keep)
    second, also = values(weight, keep)
    assert memory.data_ptr() == also.data_ptr()
    before = weight.clone()
    assert first.bind([weight]) is None and second.bind([weight]) is None
    weight.data.mul_(2)
    assert second.enter([weight]) is None and torch.equal(memory, weight.exp())
    weight.data.copy_(before)
    assert first.enter([weight]) is None and torch.equal(memory, weight.exp())
    weight.data.mul_(2)
    assert second.enter([weight]) is None and torch.equal(memory, weight.exp())


def test_an_address_is_nobody_elses_while_a_class_has_it() -> None:
    weight = nn.Parameter(torch.randn(5000))
    mine, memory = values(weight, Keep())
    assert mine.bind([weight]) is None
    address = weight.data_ptr()
    for _ in range(20):
        weight.data = weight.data * 2
        assert weight.data_ptr() != address
    del memory


def test_arguments_in_another_order() -> None:
    weight, keep = torch.randn(4), Keep()
    mine, memory = values(weight, keep)
    assert mine.bind([weight]) is None
    other = mine.moved({0: 2})
    weight.mul_(2)
    assert other.enter([None, None, weight]) is None and torch.equal(memory, weight.exp())
    assert other in keep.users


def test_looking_at_hundreds_of_weights_takes_microseconds() -> None:
    weights = [nn.Parameter(torch.randn(2)) for _ in range(250)]
    graph = torch.fx.Graph()
    for i in range(250):
        graph.placeholder(f"w{i}")
    graph.output(())
    part = SlowPart(torch.fx.GraphModule({}, graph), tuple(f"w{i}" for i in range(250)), ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residents, "COMPARED", -1)
        mine = KeptValues(part, range(250), [""] * 250, Keep(), set())
        assert mine.bind(weights) is None
    seconds = min(timeit.repeat(lambda: mine.enter(weights), number=100, repeat=20)) / 100
    assert seconds < 200e-6, seconds  # 15 to 40 us
