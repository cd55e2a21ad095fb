"""Switches outside the arguments that decide which kernels run: each is part of the signature, by name."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cadence_fx
from cadence_fx._torch_switches import ambient_names, ambient_state
from tests.harness import Pair
from tests.streams import BY_NAME

Switch = contextlib.AbstractContextManager[Any]


@contextlib.contextmanager
def setting(write: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write(value)
        try:
            yield
        finally:
            write(before)


def attribute(owner: Any, name: str, value: Any) -> Switch:
    return setting(lambda v: setattr(owner, name, v), value, getattr(owner, name))


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


backends: Any = torch.backends
COMMON: dict[str, Callable[[], Switch]] = {
    "grad mode": torch.enable_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic algorithms": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "deterministic warn-only": lambda: setting(
        lambda only: torch._C._set_deterministic_algorithms(False, warn_only=only), True, False
    ),
    "filling of uninitialized memory": lambda: attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "function modes": lambda: torch.device("cpu"),
    "attention fast path": lambda: setting(backends.mha.set_fastpath_enabled, False, True),
    "flash SDPA": lambda: setting(backends.cuda.enable_flash_sdp, False, True),
    "memory-efficient SDPA": lambda: setting(backends.cuda.enable_mem_efficient_sdp, False, True),
    "math SDPA": lambda: setting(backends.cuda.enable_math_sdp, False, True),
    "math SDPA reduced precision": lambda: setting(backends.cuda.allow_fp16_bf16_reduction_math_sdp, True, False),
    "cuDNN SDPA": lambda: setting(backends.cuda.enable_cudnn_sdp, False, True),
    "SDPA priority": lambda: setting(
        torch._C._set_sdp_priority_order, [0, 1, 2, 3, 4], torch._C._get_sdp_priority_order()
    ),
}
CPU: dict[str, Callable[[], Switch]] = {
    "fp32 precision of mkldnn matmul": lambda: setting(torch.set_float32_matmul_precision, "medium", "highest"),
    "fp32 precision of mkldnn conv": lambda: attribute(backends.mkldnn.conv, "fp32_precision", "bf16"),
    "fp32 precision of mkldnn rnn": lambda: attribute(backends.mkldnn.rnn, "fp32_precision", "bf16"),
    "threads": lambda: setting(torch.set_num_threads, 2, 1),
    "oneDNN": lambda: attribute(backends.mkldnn, "enabled", False),
    "oneDNN deterministic": lambda: attribute(backends.mkldnn, "deterministic", True),
    "NNPACK": lambda: setting(backends.nnpack.set_flags, False, True),
    "quantized engine": lambda: attribute(backends.quantized, "engine", "qnnpack"),
    "flushing of denormals": lambda: setting(torch.set_flush_denormal, True, False),
}
CUDA: dict[str, Callable[[], Switch]] = {
    "fp32 precision of cuda matmul": lambda: attribute(backends.cuda.matmul, "fp32_precision", "tf32"),
    "fp32 precision of cuda conv": lambda: attribute(backends.cudnn.conv, "fp32_precision", "ieee"),
    "fp32 precision of cuda rnn": lambda: attribute(backends.cudnn.rnn, "fp32_precision", "ieee"),
    "cuDNN": lambda: attribute(backends.cudnn, "enabled", False),
    "cuDNN benchmark": lambda: attribute(backends.cudnn, "benchmark", True),
    "cuDNN deterministic": lambda: attribute(backends.cudnn, "deterministic", True),
    "fp16 reduced precision": lambda: attribute(backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    "bf16 reduced precision": lambda: attribute(backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "fp16 accumulation": lambda: attribute(backends.cuda.matmul, "allow_fp16_accumulation", True),
    "SM carveout": lambda: setting(torch._C._set_sm_carveout_experimental, 8, None),
}
# They have no second value on every machine: a library that is not built in, arithmetic that a processor lacks.
ELSEWHERE = {"cuDNN benchmark limit", "cuDNN depthwise kernel", "BLAS library", "linalg library", "FlashAttention 3"}
ELSEWHERE |= {"grouped GEMM", "dispatch modes", "stream capture", "device"}
OF_MACHINES = {"cpu": ELSEWHERE | {"fp16 reduced precision"}, "cuda": ELSEWHERE}


@pytest.fixture(autouse=True)
def _serving() -> None:
    torch.set_grad_enabled(False)


def changed(before: tuple[Any, ...], after: tuple[Any, ...]) -> set[str]:
    return {name for name, a, b in zip(ambient_names(before), before, after, strict=True) if a != b}


@pytest.mark.parametrize(
    ("device_type", "name"), [(d, n) for d, table in (("cpu", CPU), ("cuda", CUDA)) for n in [*COMMON, *table]]
)
def test_a_switch_is_seen_by_its_name_and_seen_to_be_back(device_type: str, name: str) -> None:
    before = ambient_state(device_type)
    with (COMMON | (CPU if device_type == "cpu" else CUDA))[name]():
        seen = changed(before, ambient_state(device_type))
    assert name in seen
    assert ambient_state(device_type) == before


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_every_switch_has_a_test(device_type: str) -> None:
    table = COMMON | (CPU if device_type == "cpu" else CUDA)
    assert set(ambient_names(ambient_state(device_type))) - OF_MACHINES[device_type] == set(table)


def test_dispatch_modes_are_seen() -> None:
    before = ambient_state("cpu")
    with Watching():
        assert changed(before, ambient_state("cpu")) == {"dispatch modes"}


def test_an_unknown_device_has_the_common_switches() -> None:
    names = set(ambient_names(ambient_state("mps")))
    assert names - ELSEWHERE == set(COMMON) | {n for n in (*CPU, *CUDA) if n.startswith("fp32 precision")}


@pytest.mark.parametrize("name", [*COMMON, *CPU])
def test_a_call_with_a_switch_changed_is_eager_and_says_which(name: str) -> None:
    """Bytes are eager's under the same switch (the harness compares them); with the switch back, replays go on."""
    pair = Pair(BY_NAME["ConvContext" if "conv" in name or name == "NNPACK" else "AppendLast"])
    for _ in range(4):
        pair.call()
    assert pair.missed() == Counter()
    inputs = pair.eager.inputs(7, pair.stream.calls[0])
    with (COMMON | CPU)[name]():
        pair.feed(*inputs)
    details = cadence_fx.report(pair.step)["details"]
    if name == "grad mode":  # the weights require grad, which is the more useful thing to say
        assert pair.missed() == Counter({"requires_grad": 1})
    else:
        assert pair.missed() == Counter({"mode": 1})
        assert any(name in detail for detail in details["mode"]), details
    pair.live.state = tuple(s.detach().clone() for s in pair.live.state)
    pair.eager.state = tuple(s.detach().clone() for s in pair.eager.state)
    before = pair.since("replays")
    for _ in range(3):
        pair.call()
    assert pair.since("replays") == before + 3
    assert pair.missed().total() == 1 and pair.since("late_captures") == 0


def test_the_older_and_the_newer_precision_switches_may_be_mixed() -> None:
    """PyTorch refuses to read the older one then; the call must not fail where eager does not."""
    pair = Pair(BY_NAME["AppendLast"])
    with attribute(backends.mkldnn.matmul, "fp32_precision", "bf16"):
        with pytest.raises(RuntimeError, match="mix"):
            torch.get_float32_matmul_precision()
        pair.call()
    assert pair.missed() == Counter({"mode": 1})
