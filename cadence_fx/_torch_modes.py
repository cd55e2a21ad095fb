"""The process-wide and thread-wide switches of PyTorch, as one thing that can be read, compared and put back.

`_torch_switches.ambient_state` has those that decide which kernels a call runs, and is read in every call. This is for
code of others that runs once in a while and may leave any of them changed behind it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._device
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from cadence_fx._torch import WithoutFunctionModes
from cadence_fx._torch_switches import Determinism, flushes_denormals

_c: Any = torch._C


@dataclasses.dataclass(frozen=True, slots=True)
class _Switch:
    """What a switch is called, and how it is read and set."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


@contextlib.contextmanager
def modes_kept() -> Iterator[None]:
    """Whatever the code inside does to the switches is undone on exit.

    Raises:
        RuntimeError: on exit, with the names of the switches that were left changed; not where the code itself raises.
    """
    before = [switch.read() for switch in _SWITCHES]
    with _autograd_kept():
        try:
            yield
        except BaseException:
            _put_back(before)
            raise
        changed = _put_back(before)
    stuck = _changed(before)
    if changed:
        lasting = f", and {_names(stuck)} cannot be put back" if stuck else ""
        raise RuntimeError(f"it leaves {_names(changed)} changed{lasting}")


def _changed(before: list[Any]) -> list[tuple[_Switch, Any]]:
    return [(switch, value) for switch, value in zip(_SWITCHES, before, strict=True) if switch.read() != value]


def _put_back(before: list[Any]) -> list[tuple[_Switch, Any]]:
    """Set the switches that are not as before; returns them."""
    with WithoutFunctionModes():  # what is set here is nobody's to see
        changed = _changed(before)
        for switch, value in changed:
            switch.write(value)
    return changed


def _names(switches: list[tuple[_Switch, Any]]) -> str:
    return ", ".join(switch.name for switch, _ in switches)


@contextlib.contextmanager
def _autograd_kept() -> Iterator[None]:
    """Inference mode can be entered and left and not set, so what was left behind is undone by leaving a mode around
    it. Entering one sets grad mode too."""
    grad = torch.is_grad_enabled()
    with torch.inference_mode(torch.is_inference_mode_enabled()):
        with WithoutFunctionModes():
            torch.set_grad_enabled(grad)
        yield


def _read_autocast() -> tuple[Any, ...]:
    of_devices = [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in ("cpu", "cuda")]
    return (*of_devices, torch.is_autocast_cache_enabled(), _autocast_depth())


def _write_autocast(value: tuple[Any, ...]) -> None:
    *of_devices, cache, depth = value
    for device_type, enabled, dtype in of_devices:
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(cache)
    while _autocast_depth() < depth:
        torch.autocast_increment_nesting()
    while _autocast_depth() > depth:
        # As where a context ends: what has been cast of weights goes with the outermost one.
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def _autocast_depth() -> int:
    """How many autocast contexts are open in this thread."""
    depth: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


# Those that hold for what is under them come first.
_PRECISIONS = [("generic", "all"), ("mkldnn", "all"), ("cuda", "all")]
_PRECISIONS += [(backend, op) for backend in ("mkldnn", "cuda") for op in ("matmul", "conv", "rnn")]


def _read_precision() -> tuple[str | None, ...]:
    older = None
    with contextlib.suppress(RuntimeError):  # it cannot be read while it disagrees with the newer ones
        older = torch.get_float32_matmul_precision()
    return (older, *(_c._get_fp32_precision_getter(*each) for each in _PRECISIONS))


def _write_precision(value: tuple[str | None, ...]) -> None:
    older, *newer = value
    if older is not None:
        torch.set_float32_matmul_precision(older)
    for each, precision in zip(_PRECISIONS, newer, strict=True):
        if _c._get_fp32_precision_getter(*each) != precision:
            _c._set_fp32_precision_setter(*each, precision)


def _write_function_modes(modes: list[Any]) -> None:
    for _ in range(_c._len_torch_function_stack()):
        _c._pop_torch_function_stack()
    for mode in modes:
        _c._push_on_torch_function_stack(mode)


def _write_dispatch_modes(modes: list[Any]) -> None:
    """Those that were left entered are left properly: PyTorch keeps a flag beside the stack, which Dynamo goes by."""
    now = _get_current_dispatch_mode_stack()
    for mode in reversed(now):
        if mode not in modes:
            mode.__exit__(None, None, None)
    for mode in modes:
        if mode not in now:
            _c._push_on_torch_dispatch_stack(mode)


def _read_default_device() -> tuple[Any, Any]:
    return torch.utils._device.CURRENT_DEVICE, getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def _write_default_device(value: tuple[Any, Any]) -> None:
    """The function mode that it also is goes with the others."""
    torch.utils._device.CURRENT_DEVICE, torch._GLOBAL_DEVICE_CONTEXT.device_context = value


def _spread(write: Callable[..., object]) -> Callable[[Any], object]:
    """Some setters take the parts of what their getters return."""
    return lambda value: write(*value) if isinstance(value, tuple) else write(value)


# name -> of the getter and of the setter; those that a release of PyTorch lacks are left out.
_PAIRS = {
    "oneDNN": ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    "NNPACK": ("_get_nnpack_enabled", "_set_nnpack_enabled"),
    "fp16 reduced precision on a CPU": (
        "_get_cpu_allow_fp16_reduced_precision_reduction",
        "_set_cpu_allow_fp16_reduced_precision_reduction",
    ),
    "quantized engine": ("_get_qengine", "_set_qengine"),
    "cuDNN": ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    "cuDNN benchmark limit": ("_cuda_get_cudnn_benchmark_limit", "_cuda_set_cudnn_benchmark_limit"),
    "cuDNN depthwise kernel": ("_get_cudnn_depthwise_kernel", "_set_cudnn_depthwise_kernel"),
    "fp16 reduced precision": (
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_set_cublas_allow_fp16_reduced_precision_reduction",
    ),
    "bf16 reduced precision": (
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_set_cublas_allow_bf16_reduced_precision_reduction",
    ),
    "fp16 accumulation": ("_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"),
    "grouped GEMM": ("_get_cublaslt_prefer_grouped_gemm", "_set_cublaslt_prefer_grouped_gemm"),
    "SM carveout": ("_get_sm_carveout_experimental", "_set_sm_carveout_experimental"),
    "BLAS library": ("_get_blas_preferred_backend", "_set_blas_preferred_backend"),
    "linalg library": ("_get_linalg_preferred_backend", "_set_linalg_preferred_backend"),
    "flash SDPA": ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    "FlashAttention 3": ("_get_fa3_sdp_enabled", "_set_sdp_use_fa3"),
    "memory-efficient SDPA": ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    "math SDPA": ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    "math SDPA reduced precision": (
        "_get_math_sdp_allow_fp16_bf16_reduction",
        "_set_math_sdp_allow_fp16_bf16_reduction",
    ),
    "cuDNN SDPA": ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    "SDPA priority": ("_get_sdp_priority_order", "_set_sdp_priority_order"),
}

_SWITCHES = [
    # Modes come first: under one of them, setting the others may do something else.
    _Switch("dispatch modes", _get_current_dispatch_mode_stack, _write_dispatch_modes),
    _Switch("function modes", _get_current_function_mode_stack, _write_function_modes),
    _Switch("default device", _read_default_device, _write_default_device),
    _Switch("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    _Switch("inference mode", torch.is_inference_mode_enabled, lambda value: None),  # see `_autograd_kept`
    _Switch("autocast", _read_autocast, _write_autocast),
    _Switch("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Switch("determinism", Determinism.now, Determinism.apply),
    _Switch("fp32 precision", _read_precision, _write_precision),
    _Switch("attention fast path", torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    _Switch("threads", torch.get_num_threads, torch.set_num_threads),
    _Switch("flushing of denormals", flushes_denormals, torch.set_flush_denormal),
    *(
        _Switch(name, getattr(_c, read), _spread(getattr(_c, write)))
        for name, (read, write) in _PAIRS.items()
        if hasattr(_c, read) and hasattr(_c, write)
    ),
]
