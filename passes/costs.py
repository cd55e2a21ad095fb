"""About how long a call keeps a row of a device busy.

Only used to choose between orders that all give the same bytes, so a wrong guess costs time and nothing else. Kernels
of a streaming decoder are so small that the time of most is that of any kernel; the figures were measured on an H200
on such a decoder (64 frames, 512 wide, fp32), each with the gap to the next kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from cadence_fx.passes.dependencies import foreign
from cadence_fx.passes.graphs import OpOverload, tensors_in
from cadence_fx.passes.movement import is_inert_dropout

__all__ = ["CROSSING", "duration"]

CROSSING = 1.75  # us that a kernel starts later because it waits for one of another row, done or not
_KERNEL = 2.2  # us of any kernel: 3,114 pointwise kernels in 6.4 ms
_BYTES = 2.5e6  # bytes a microsecond that a small kernel moves
_FLOPS = 4.0e7  # floating-point operations a microsecond of a small fp32 matrix product

# us of one call without what grows with its size. A product split along its inner axis is four kernels: memset, scale,
# product, epilogue; a convolution converts the layouts of its input, its weight and its output.
_FIXED: dict[str, float] = {
    **dict.fromkeys(("linear", "addmm", "mm", "matmul", "bmm", "baddbmm", "addbmm", "einsum"), 18.0),
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "convolution", "_convolution", "conv_transpose1d", "conv_transpose2d"), 23.0
    ),
    "scaled_dot_product_attention": 50.0,
    **dict.fromkeys(("layer_norm", "native_layer_norm", "group_norm", "rms_norm", "softmax", "_softmax"), 2.9),
    **dict.fromkeys(("stft", "istft", "fft_rfft", "fft_irfft"), 12.0),
    **dict.fromkeys(("lstm", "gru"), 200.0),
}


def duration(node: fx.Node) -> float:
    """Microseconds, for a node that launches something."""
    target: Any = node.target
    if not isinstance(target, OpOverload) or foreign(node) or is_inert_dropout(node):
        return 0.0
    name = target._schema.name.partition("::")[2].rstrip("_")
    results = tensors_in(node.meta.get("val"))
    if results and not any(tensor.numel() for tensor in results):
        return 0.0
    operands = [t for argument in node.all_input_nodes for t in tensors_in(argument.meta.get("val"))]
    moved = sum(tensor.numel() * tensor.element_size() for tensor in (*operands, *results))
    return _FIXED.get(name, _KERNEL) + moved / _BYTES + _products(name, operands, results) / _FLOPS


def _products(name: str, operands: list[torch.Tensor], results: Sequence[torch.Tensor]) -> float:
    """Floating-point operations of the products of a call."""
    if name not in _FIXED or not results or len(operands) < 2:
        return 0.0
    made = results[0].numel()
    if name.startswith(("conv", "_conv")):
        weight = operands[1]
        return 2.0 * made * math.prod(weight.shape[1:])
    if name == "scaled_dot_product_attention":
        return 4.0 * made * operands[1].shape[-2]
    if name in ("layer_norm", "native_layer_norm", "group_norm", "rms_norm", "softmax", "_softmax", "lstm", "gru"):
        return 0.0
    inner = operands[-2 if name in ("addmm", "baddbmm", "addbmm") else 0].shape
    return 2.0 * made * (inner[-1] if inner else 1)
