"""Code that stops a recorder on a device: tensors on the host, host reads, counters, lazily built tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cadence_fx
from cadence_fx.recorder import DevicePool
from tests.backend.test_hazards import ABSORBED
from tests.backend.test_host_side import CONTRACT, Play, Position, Scaled, Vocoder
from tests.harness import compile_with

pytestmark = pytest.mark.gpu

C = 8
MODES = [torch.no_grad, torch.inference_mode]


class OnDevice(Play):
    """Inputs, states and weights are on the device; what a module keeps as a plain attribute stays on the host."""

    @staticmethod
    def noise() -> Tensor:
        return torch.randn(1, 2, C, dtype=torch.float64, device="cuda")


def moved(module: nn.Module) -> nn.Module:
    return module.eval().cuda()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_window_on_the_host(mode: type) -> None:
    with mode():
        module = moved(OnHost())
        assert module.window.device.type == "cpu"
        play = OnDevice(module)
        play.call(4)
        play.both(lambda m: m.window.data.mul_(0.5))  # a write that PyTorch does not count
        play.call(4)
        assert play.missed() == {} and play.late() == 0
        saved = play.module.window.clone()
        play.both(lambda m: m.window.zero_())
        with pytest.raises(RuntimeError, match="window overlap add min"):
            play.step(play.noise(), play.cache)
        assert play.missed() == {"host_read": 1}
        play.both(lambda m: m.window.copy_(saved))
        play.call(4)
        assert play.missed() == {"host_read": 1}


class OnHost(Vocoder):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        wave = x.reshape(1, -1).float()
        spec = torch.stft(wave, 16, 4, window=self.window.to(x.device), return_complex=True)
        y = torch.istft(spec * 2, 16, 4, window=self.window.to(x.device))
        return self.attend(y.reshape(x.shape).to(x.dtype), cache)


class BufferWindow(OnHost):
    """The window is on the device; PyTorch's count of writes tells when its check is due."""

    def __init__(self) -> None:
        super().__init__()
        window = self.window
        del self.window
        self.register_buffer("window", window)


def test_window_on_the_device() -> None:
    torch.set_grad_enabled(False)
    play = OnDevice(moved(BufferWindow()))
    play.call(4)
    play.both(lambda m: m.window.mul_(0.5))
    play.call(4)
    assert play.missed() == {}
    play.both(lambda m: m.window.zero_())
    with pytest.raises(RuntimeError, match="window overlap add min"):
        play.step(play.noise(), play.cache)
    assert play.missed() == {"host_read": 1}


@pytest.mark.parametrize(
    "options", [{}, {"normalized": True}, {"length": 90}, {"center": False, "length": 50}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_istft_opened_has_the_bytes_of_the_original(options: dict[str, Any], dtype: torch.dtype) -> None:
    from tests.passes.test_hoist_host_reads import hoist, operators

    window = torch.hamming_window(16, device="cuda", dtype=dtype)
    wave = torch.randn(3, 400, device="cuda", dtype=dtype)

    def back(spec: Tensor, window: Tensor) -> tuple[Tensor, ...]:
        return (torch.istft(spec, 16, 4, window=window, **options),)

    for scale in (1.0, 0.0, float("inf")):
        spec = torch.stft(wave, 16, 4, window=window, return_complex=True) * scale
        gm, _ = hoist(back, spec, window)
        assert "aten.istft.default" not in operators(gm)
        got, want = gm(spec, window)[0], back(spec, window)[0]
        assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def test_number_on_the_host_that_kernels_take_by_value() -> None:
    """A recording has the number in its launch parameters: another one must not be answered by it."""
    torch.set_grad_enabled(False)
    play = OnDevice(moved(Scaled()))
    play.call(4)
    assert play.missed() == {}
    play.both(lambda m: m.scale.fill_(0.25))
    play.call(3)
    assert play.missed() == {"host_value": 3}


def test_counter_on_the_host() -> None:
    torch.set_grad_enabled(False)
    play = OnDevice(moved(Position()))
    play.call(30)
    assert play.missed() == {} and play.late() == 0
    assert int(play.module.at) == 60


class Tokens(Position):
    def forward(self, x: Tensor, cache: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.attend(x + tokens.to(x.device, x.dtype), cache)


def test_argument_on_the_host() -> None:
    torch.set_grad_enabled(False)
    play = OnDevice(moved(Tokens()), torch.arange(C))
    for i in range(6):
        play.call(1, torch.arange(C) * i)
    assert play.missed() == {}


@pytest.mark.parametrize("module", ABSORBED, ids=lambda module: module.__name__)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.filterwarnings("ignore:dropout")
def test_D39_absorbed_or_refused_by_name(module: type[nn.Module], mode: type) -> None:
    """vllm-omni#5107, sglang-omni#729: tables built late and scalars copied inside a capture abort it.

    Two of the modules have numbers on the host that kernels take by value; one changes its number in every call.
    """
    with mode():
        play = OnDevice(moved(module()))
        play.call(12)
        assert play.late() == 0
        assert set(play.missed()) <= {"host_value", "host_copy", "host_read", "scalar", "sealed"}
        if module.__name__ not in {"Rebinds", "NumpyValues", "Orthogonal"}:
            assert play.missed() == {}


def test_B16_B28_sweeps_capture_nothing_and_hold_no_memory() -> None:
    """pytorch#128424, pytorch#120309: sweep all declared shapes; memory and captures are as after the first sweep."""
    torch.set_grad_enabled(False)
    play = OnDevice(moved(OnHost()))
    pool = DevicePool.of(torch.device("cuda", torch.cuda.current_device()))
    captured = cadence_fx.report(play.step)["captures"]
    assert captured == 3
    held = []
    for _ in range(3):
        play.cache = play.noise()
        play.twin = play.cache.clone()
        play.call(20)
        torch.cuda.synchronize()
        held.append((torch.cuda.memory_allocated(), pool.reserved_bytes()))
    assert held[1] == held[2]
    assert cadence_fx.report(play.step)["captures"] == captured and play.missed() == {} and play.late() == 0


def test_window_that_fails_from_the_start() -> None:
    torch.set_grad_enabled(False)
    module: Any = moved(OnHost())
    module.window.zero_()
    with pytest.raises(Exception, match="window overlap add min"):
        cadence_fx.warm_up(compile_with(module, CONTRACT), OnDevice.noise(), OnDevice.noise())
