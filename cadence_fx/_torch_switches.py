"""PyTorch's switches as they are: those that decide which kernels a call runs, and those for repeatable results.

Like `_torch`, this module touches private PyTorch API, of torch 2.11 to 2.14.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config


def _precision(backend: str, op: str) -> str:
    """How 32-bit floats are computed with; saying nothing and saying IEEE are one thing to every kernel.

    The older switches (`allow_tf32`, `set_float32_matmul_precision`) set these too, and cannot be read while the two
    kinds disagree.
    """
    found: str = torch._C._get_fp32_precision_getter(backend, op)
    return "ieee" if found == "none" else found


def _autocast(device_type: str) -> tuple[Any, ...] | None:
    if not torch._C._is_any_autocast_enabled():
        return None
    return tuple(torch.get_autocast_dtype(t) if torch.is_autocast_enabled(t) else None for t in {"cpu", device_type})


_SMALLEST_NORMAL = sys.float_info.min


def flushes_denormals() -> bool:
    """Whether this thread's processor turns denormals into zeros; PyTorch can set it and not read it."""
    return _SMALLEST_NORMAL * 0.5 == 0.0


def _readers(device_type: str) -> dict[str, Callable[[], Any]]:
    """What each switch is called in reports, and how it is read. Those that a release of PyTorch lacks are left out."""
    c: Any = torch._C
    found: dict[str, Any] = {
        "grad mode": torch.is_grad_enabled,
        "inference mode": torch.is_inference_mode_enabled,
        "autocast": functools.partial(_autocast, device_type),
        "default dtype": torch.get_default_dtype,
        "deterministic algorithms": c._get_deterministic_algorithms,
        "deterministic warn-only": c._get_deterministic_algorithms_warn_only,
        "filling of uninitialized memory": c._get_deterministic_fill_uninitialized_memory,
        "function modes": c._len_torch_function_stack,
        "dispatch modes": c._len_torch_dispatch_stack,
        "attention fast path": functools.partial(vars(torch.backends.mha).__getitem__, "_is_fastpath_enabled"),
        "flash SDPA": c._get_flash_sdp_enabled,  # a CPU has a kernel of this kind, too
        "FlashAttention 3": getattr(c, "_get_fa3_sdp_enabled", None),
        "memory-efficient SDPA": c._get_mem_efficient_sdp_enabled,
        "math SDPA": c._get_math_sdp_enabled,
        "math SDPA reduced precision": getattr(c, "_get_math_sdp_allow_fp16_bf16_reduction", None),
        "cuDNN SDPA": c._get_cudnn_sdp_enabled,
        "SDPA priority": lambda: tuple(c._get_sdp_priority_order()),
    }
    for backend in {"cpu": ("mkldnn",), "cuda": ("cuda",)}.get(device_type, ("mkldnn", "cuda")):
        for op in ("matmul", "conv", "rnn"):
            found[f"fp32 precision of {backend} {op}"] = functools.partial(_precision, backend, op)
    if device_type == "cpu":
        found |= {
            "threads": torch.get_num_threads,
            "oneDNN": c._get_mkldnn_enabled,
            "oneDNN deterministic": getattr(c, "_get_mkldnn_deterministic", None),
            "NNPACK": getattr(c, "_get_nnpack_enabled", None),
            "fp16 reduced precision": getattr(c, "_get_cpu_allow_fp16_reduced_precision_reduction", None),
            "quantized engine": c._get_qengine,
            "flushing of denormals": flushes_denormals,
        }
    if device_type == "cuda":
        found |= {
            "stream capture": torch.cuda.is_current_stream_capturing if torch.backends.cuda.is_built() else None,
            "cuDNN": c._get_cudnn_enabled,
            "cuDNN benchmark": c._get_cudnn_benchmark,
            "cuDNN benchmark limit": getattr(c, "_cuda_get_cudnn_benchmark_limit", None),
            "cuDNN deterministic": c._get_cudnn_deterministic,
            "cuDNN depthwise kernel": getattr(c, "_get_cudnn_depthwise_kernel", None),
            "fp16 reduced precision": c._get_cublas_allow_fp16_reduced_precision_reduction,
            "bf16 reduced precision": c._get_cublas_allow_bf16_reduced_precision_reduction,
            "fp16 accumulation": getattr(c, "_get_cublas_allow_fp16_accumulation", None),
            "grouped GEMM": getattr(c, "_get_cublaslt_prefer_grouped_gemm", None),
            "SM carveout": getattr(c, "_get_sm_carveout_experimental", None),
            "BLAS library": lambda: int(c._get_blas_preferred_backend()),
            "linalg library": lambda: int(c._get_linalg_preferred_backend()),
        }
    return {name: read for name, read in found.items() if read is not None}


_AMBIENT = {device_type: _readers(device_type) for device_type in ("cpu", "cuda", "")}
_READ = {device_type: tuple(readers.values()) for device_type, readers in _AMBIENT.items()}


def ambient_state(device_type: str) -> tuple[Any, ...]:
    """Every process-wide or thread-wide switch that decides which kernels run; part of the signature.

    The first entry is the kind of device, the others are in the order of `ambient_names`.
    """
    kind = device_type if device_type in _READ else ""
    return (kind, *[read() for read in _READ[kind]])


def ambient_names(state: tuple[Any, ...]) -> list[str]:
    """What the entries of an `ambient_state` are called."""
    return ["device", *_AMBIENT[state[0]]]


@dataclasses.dataclass(frozen=True, slots=True)
class Determinism:
    """PyTorch's switches for repeatable results, process-wide.

    Attributes:
        algorithms, warn_only, fill: of `torch.use_deterministic_algorithms`.
        cudnn, benchmark: cuDNN takes deterministic algorithms only, and measures which one is fastest.
        onednn: the same for oneDNN on a CPU; None where PyTorch has no such switch.
    """

    algorithms: bool
    warn_only: bool
    fill: bool
    cudnn: bool
    benchmark: bool
    onednn: bool | None

    @classmethod
    def now(cls) -> Determinism:
        """The switches as they are."""
        c = torch._C
        return cls(
            c._get_deterministic_algorithms(),
            c._get_deterministic_algorithms_warn_only(),
            c._get_deterministic_fill_uninitialized_memory(),
            c._get_cudnn_deterministic(),
            c._get_cudnn_benchmark(),
            c._get_mkldnn_deterministic() if hasattr(c, "_get_mkldnn_deterministic") else None,
        )

    def apply(self) -> None:
        """Set the switches."""
        c = torch._C
        c._set_deterministic_algorithms(self.algorithms, warn_only=self.warn_only)
        c._set_deterministic_fill_uninitialized_memory(self.fill)
        c._set_cudnn_deterministic(self.cudnn)
        c._set_cudnn_benchmark(self.benchmark)
        if self.onednn is not None:
            c._set_mkldnn_deterministic(self.onednn)


def inductor_deterministic() -> contextlib.AbstractContextManager[None]:
    """What `torch.use_deterministic_algorithms(True)` tells Inductor, in this thread."""
    config: Any = torch._inductor.config
    return config.patch(deterministic=True) if hasattr(config, "deterministic") else contextlib.nullcontext()
