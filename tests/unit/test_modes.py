"""The switches of PyTorch: each is noticed when it is left changed, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

from cadence_fx._torch_modes import modes_kept
from cadence_fx._torch_switches import ambient_names, ambient_state

HELD: list[Any] = []  # a mode that is let go of is left


def enter(mode: Any) -> None:
    mode.__enter__()
    HELD.append(mode)


def set_on(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


CHANGES: dict[str, Callable[[], object]] = {
    "grad mode": lambda: torch.set_grad_enabled(not torch.is_grad_enabled()),
    "inference mode": lambda: enter(torch.inference_mode(not torch.is_inference_mode_enabled())),
    "autocast": lambda: enter(torch.autocast("cpu", dtype=torch.bfloat16)),
    "autocast of a device": lambda: torch.set_autocast_dtype("cuda", torch.bfloat16),
    "autocast cache": lambda: torch.set_autocast_cache_enabled(False),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "determinism": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "determinism of cuDNN": lambda: set_on(torch.backends.cudnn, "deterministic", True),
    "fp32 precision, older": lambda: torch.set_float32_matmul_precision("high"),
    "fp32 precision, TF32": lambda: set_on(torch.backends.cuda.matmul, "allow_tf32", True),
    "fp32 precision, of all": lambda: set_on(torch.backends, "fp32_precision", "tf32"),
    "fp32 precision, of one": lambda: set_on(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "default device": lambda: torch.set_default_device("meta"),
    "function modes": lambda: enter(torch.device("meta")),
    "function modes of others": lambda: enter(TorchFunctionMode()),
    "dispatch modes": lambda: enter(TorchDispatchMode()),
    "dispatch modes, fake": lambda: enter(FakeTensorMode()),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "flushing of denormals": lambda: torch.set_flush_denormal(True),
    "attention fast path": lambda: torch.backends.mha.set_fastpath_enabled(False),
    "flash SDPA": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "cuDNN": lambda: set_on(torch.backends.cudnn, "enabled", False),
    "oneDNN": lambda: torch.backends.mkldnn.set_flags(False),
    "bf16 reduced precision": lambda: set_on(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
    ),
}


def seen() -> tuple[Any, ...]:
    """What calls go by, and what is hidden from them."""
    hidden = torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled(), torch.get_default_device()
    return ambient_state("cpu"), ambient_state(""), torch.get_float32_matmul_precision(), hidden


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES)
def test_a_switch_that_is_left_changed_is_named_and_put_back(change: str, around: Any) -> None:
    with around():
        before = seen()
        with (
            pytest.raises(
                RuntimeError, match=f"it leaves .*{change.split(' of ')[0].split(',')[0].split(' cache')[0]}"
            ),
            modes_kept(),
        ):
            CHANGES[change]()
        assert seen() == before and not is_in_torch_dispatch_mode()
        made = torch.ones(2) + 1
        assert type(made) is torch.Tensor and made.dtype == torch.float32 and made.device.type == "cpu"
        assert made.is_inference() == torch.is_inference_mode_enabled()


def test_a_mode_that_was_left_is_entered_again() -> None:
    with TorchFunctionMode(), TorchDispatchMode():
        with pytest.raises(RuntimeError, match="it leaves dispatch modes, function modes changed$"), modes_kept():
            torch._C._pop_torch_dispatch_stack(None)
            torch._C._pop_torch_function_stack()
        state = ambient_state("cpu")
        names = ambient_names(state)
        assert [state[names.index(name)] for name in ("function modes", "dispatch modes")] == [1, 1]


def test_code_that_raises_has_its_own_error_and_changes_nothing() -> None:
    before = seen()
    with pytest.raises(KeyError), modes_kept():
        torch.set_default_dtype(torch.float64)
        raise KeyError
    with modes_kept(), torch.no_grad():
        pass
    assert seen() == before


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_every_switch_that_is_part_of_a_signature_is_among_them(device_type: str) -> None:
    """One that a release adds to the signature is to be put back too."""
    from cadence_fx import _torch_modes, _torch_switches

    kept = {switch.name for switch in _torch_modes._SWITCHES}
    together = (
        "fp32 precision of",
        "deterministic",
        "filling of",
        "cuDNN deterministic",
        "cuDNN benchmark",
        "oneDNN d",
    )
    single = [name for name in _torch_switches._AMBIENT[device_type] if not name.startswith(together)]
    assert not [name for name in single if name not in kept and name not in ("stream capture", "cuDNN benchmark limit")]
