"""What a class does on the host before each launch, through `torch.compile`; float64 plays the device."""

from __future__ import annotations

import copy
import timeit
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cadence_fx.graph
from cadence_fx.clock import Clock
from cadence_fx.contract import Contract, Region
from cadence_fx.passes import (
    FoldHostConstants,
    HoistHostReads,
    ReinplaceRetention,
    SplitHost,
    VerifyCapturable,
)
from cadence_fx.residents import COMPARED, Watch
from cadence_fx.retention import KeepLast
from tests.harness import assert_same, compile_with, counts
from tests.toys import C, DoubleAttention

CONTRACT = Contract(
    [Clock("frame", 2)],
    [Region("cache", argument="cache", result=1, axis=1, clock="frame", start=2, retention=KeepLast(6))],
)


@pytest.fixture(autouse=True)
def _serving() -> None:
    torch.set_grad_enabled(False)


@pytest.fixture
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 is the device: what goes there from another dtype goes there from the host."""

    def crosses(source: Tensor, target: Tensor) -> bool:
        return source.dtype != torch.float64 and target.dtype == torch.float64

    passes = [
        HoistHostReads(),
        FoldHostConstants(crosses),
        SplitHost(lambda tensor: tensor.dtype not in (torch.float64, torch.complex128, torch.bool)),
        ReinplaceRetention(),
        # Positions that have been moved to the device are of a dtype that plays the host.
        VerifyCapturable(lambda source, target: source.dtype != torch.int64 and crosses(source, target)),
    ]
    monkeypatch.setattr(cadence_fx.graph, "select_passes", lambda choice: passes)


class Play:
    """A module and its eager copy, fed the same; every output, attribute and buffer is compared after each call."""

    def __init__(self, module: Any, *rest: Tensor) -> None:
        self.module: Any = module
        self.eager: Any = copy.deepcopy(module)
        self.step = compile_with(module, CONTRACT)
        cadence_fx.warm_up(self.step, self.noise(), self.noise(), *rest)
        self.before = counts(self.step)
        self.compare()
        self.cache = self.noise()
        self.twin = self.cache.clone()

    @staticmethod
    def noise() -> Tensor:
        return torch.randn(1, 2, C, dtype=torch.float64)

    def both(self, change: Callable[[Any], object]) -> None:
        change(self.module)
        change(self.eager)

    def call(self, times: int = 1, *rest: Tensor) -> None:
        for _ in range(times):
            x = self.noise()
            got, self.cache, *more = self.step(x.clone(), self.cache, *(t.clone() for t in rest))
            want, self.twin, *others = self.eager(x, self.twin, *rest)
            for a, b in zip((got, self.cache, *more), (want, self.twin, *others), strict=True):
                assert_same(a, b, "a result")
            self.compare()

    def compare(self) -> None:
        mine, theirs = tensors(self.module), tensors(self.eager)
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert_same(mine[name], theirs[name], name)

    def missed(self) -> dict[str, int]:
        return dict(Counter(counts(self.step)["misses"]) - Counter(self.before["misses"]))

    def late(self) -> int:
        return int(counts(self.step)["late_captures"])


def tensors(module: nn.Module) -> dict[str, Tensor]:
    plain = {k: v for k, v in vars(module).items() if isinstance(v, Tensor)}
    return {**dict(module.named_parameters()), **dict(module.named_buffers()), **plain}


class Vocoder(DoubleAttention):
    """A window that is a plain attribute on the host, moved in both transforms of every call."""

    def __init__(self) -> None:
        super().__init__()
        self.window = torch.hann_window(16)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        spec = torch.stft(x.reshape(1, -1), 16, 4, window=self.window.to(x.dtype), return_complex=True)
        y = torch.istft(spec * 2, 16, 4, window=self.window.to(x.dtype))
        return self.attend(y.reshape(x.shape), cache)


@pytest.mark.usefixtures("_device")
def test_window_on_the_host() -> None:
    play = Play(Vocoder())
    play.call(8)
    entry = cadence_fx.report(play.step)["class_table"][0]
    assert any("hoist_host_reads" in note for note in entry["notes"])
    assert any("split_host: 2 values" in note for note in entry["notes"])
    assert "admitted: rewritten in place" in entry["notes"]
    assert play.missed() == {} and play.late() == 0


@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize(
    "write",
    [
        lambda m: m.window.mul_(0.5),
        lambda m: m.window.data.fill_(0.75),  # PyTorch does not count this write
        lambda m: m.window.numpy().__setitem__(slice(3, 5), 0.125),  # nor this one
    ],
    ids=["in_place", "data", "numpy"],
)
def test_window_that_is_written_is_read_anew(write: Callable[[Any], object]) -> None:
    play = Play(Vocoder())
    for _ in range(3):
        play.call(3)
        play.both(write)
    play.call(3)
    assert play.missed() == {}


@pytest.mark.usefixtures("_device")
def test_window_that_is_replaced() -> None:
    play = Play(Vocoder())
    play.call(3)
    play.both(lambda m: setattr(m, "window", torch.hamming_window(16)))
    play.call(6)
    assert play.missed() == {"address": 1}  # the class is captured anew after it


@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_window_that_comes_to_fail_the_check(mode: type) -> None:
    """Eager raises, and so does the call; as soon as the window is good again, it is replayed again."""
    with mode():
        play = Play(Vocoder())
        play.call(4)
        saved = play.module.window.clone()
        play.both(lambda m: m.window.zero_())
        for call, cache in ((play.eager, play.twin), (play.step, play.cache)):
            for _ in range(2):
                with pytest.raises(RuntimeError, match="window overlap add min: 1"):
                    call(play.noise(), cache)
        assert play.missed() == {"host_read": 2}
        play.both(lambda m: m.window.copy_(saved))
        play.call(4)
        assert play.missed() == {"host_read": 2}


class BufferWindow(DoubleAttention):
    """The window is a buffer where the transform runs."""

    def __init__(self) -> None:
        super().__init__()
        self.window: Tensor
        self.register_buffer("window", torch.hann_window(16, dtype=torch.float64))

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        spec = torch.stft(x.reshape(1, -1), 16, 4, window=self.window, return_complex=True)
        return self.attend(torch.istft(spec, 16, 4, window=self.window).reshape(x.shape), cache)


def test_window_in_a_buffer() -> None:
    play = Play(BufferWindow())
    play.call(4)
    play.both(lambda m: m.window.mul_(0.5))
    play.call(4)
    play.both(lambda m: m.window.zero_())
    with pytest.raises(RuntimeError, match="window overlap add min"):
        play.step(play.noise(), play.cache)
    assert play.missed() == {"host_read": 1}


def test_window_that_fails_from_the_start() -> None:
    """Warm-up raises what eager raises."""
    module = BufferWindow()
    module.window.zero_()
    with pytest.raises(Exception, match="window overlap add min"):
        cadence_fx.warm_up(compile_with(module, CONTRACT), Play.noise(), Play.noise())


class Scaled(DoubleAttention):
    """A 0-d tensor on the host: kernels on a device take it by value."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor(0.5)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return self.attend(x * self.scale, cache)


@pytest.mark.usefixtures("_device")
def test_number_by_value() -> None:
    play = Play(Scaled())
    play.call(4)
    assert play.missed() == {}
    play.both(lambda m: m.scale.fill_(0.25))
    play.call(3)
    assert play.missed() == {"host_value": 3}
    play.both(lambda m: m.scale.fill_(0.5))
    play.call(3)
    assert play.missed() == {"host_value": 3}


class Counting(DoubleAttention):
    """A counter on the host that only counts, and leaves with the results."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.steps.add_(1)
        return *self.attend(x, cache), self.steps * 2


@pytest.mark.usefixtures("_device")
def test_counter_on_the_host_counts() -> None:
    play = Play(Counting())
    play.call(7)
    assert int(play.module.steps) == 7 and play.missed() == {} and play.late() == 0


class Position(DoubleAttention):
    """A counter on the host that says where a table is read; the table is on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.at = torch.zeros(1, dtype=torch.int64)
        self.table: Tensor
        self.register_buffer("table", torch.randn(40, C, dtype=torch.float64))

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.table[(self.at + torch.arange(2)) % 40]
        self.at.add_(2)
        return self.attend(x + rows, cache)


@pytest.mark.usefixtures("_device")
def test_counter_on_the_host_reads_a_table() -> None:
    play = Play(Position())
    play.call(30)
    assert play.missed() == {} and play.late() == 0


class Argument(DoubleAttention):
    """An argument that the caller keeps on the host."""

    def forward(self, x: Tensor, cache: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.attend(x + tokens.to(x.dtype), cache)


@pytest.mark.usefixtures("_device")
def test_argument_on_the_host() -> None:
    play = Play(Argument(), torch.arange(C))
    for i in range(6):
        play.call(1, torch.arange(C) * i)
    assert play.missed() == {}


class Big(DoubleAttention):
    """More than is compared in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(COMPARED // 4 // C + 1, C)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return self.attend(x + self.table.to(x.dtype).sum(0), cache)


@pytest.mark.usefixtures("_device")
def test_large_attribute_is_copied_in_every_call() -> None:
    play = Play(Big())
    play.call(4)
    play.both(lambda m: m.table.data.mul_(2))
    play.call(4)
    assert play.missed() == {}


def test_looking_at_a_window_takes_about_a_microsecond() -> None:
    window, most = Watch([torch.hann_window(16)]), Watch([torch.zeros(COMPARED // 4)])
    assert not most.blind
    seconds = [min(timeit.repeat(watch.changed, number=1000, repeat=20)) / 1000 for watch in (window, most)]
    assert max(seconds) < 5e-6, seconds  # 0.3 and 0.9 us; a busy machine may need a little more


def test_watch() -> None:
    small, large = torch.zeros(4), torch.zeros(COMPARED)
    watch = Watch([small])
    assert not watch.blind and not watch.changed()
    small.data[2] = -0.0
    assert watch.changed() and not watch.changed()
    watch.forget()
    assert watch.changed() and not watch.changed()
    assert Watch([small, large]).changed() and Watch([small, large]).blind
    counted = Watch([small, large], by_version=True)
    assert not counted.changed()
    large.add_(1)
    assert counted.changed() and not counted.changed()
    with torch.inference_mode():
        assert Watch([torch.zeros(COMPARED)], by_version=True).blind  # its writes are not counted
        assert not Watch([torch.zeros(4)], by_version=True).blind
    assert not Watch([torch.zeros(0)]).changed()


def test_small_tensors_with_holes_are_compared_by_their_bytes() -> None:
    window = torch.hann_window(16)[::2]
    watch = Watch([window], by_version=True)
    assert not watch.changed()
    window.data.zero_()
    assert watch.changed() and not watch.changed()
