"""Mimi, the codec of `moshi` 0.2.13, around random weights."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch

from bench.vendor.packages import MOSHI, load


@dataclass(frozen=True, slots=True)
class MimiSizes:
    """Constructor values of the codec. The defaults are the released ones; `SMALL_MIMI` fits a CPU core.

    Ratios and kernels are always the released ones: a frame is 1,920 samples, two frames of the transformers.
    """

    width: int = 512
    filters: int = 64
    heads: int = 8
    layers: int = 8
    context: int = 250
    feedforward: int = 2048
    codebook: int = 256
    bins: int = 2048
    codebooks: int = 8  # in use, of `levels`
    levels: int = 32
    layer_scale: float = 0.01


MIMI = MimiSizes()
SMALL_MIMI = MimiSizes(
    width=32, filters=4, heads=2, layers=2, context=20, feedforward=48, codebook=16, bins=64, codebooks=4, levels=6,
    layer_scale=0.5,
)  # fmt: skip


def build_mimi(sizes: MimiSizes = MIMI, device: torch.device | str = "cpu", seed: int = 0) -> Any:
    """`MimiModel` from the vendor's `get_mimi`, not streaming yet, with weights by `draw_weights`."""
    loaders = load("models.loaders", MOSHI)
    seanet, quantizer, transformer = arguments(sizes, loaders)
    config = {**loaders._mimi_config, "seanet": seanet, "quantizer": quantizer, "transformer": transformer}
    torch.manual_seed(seed)
    mimi = loaders.get_mimi(None, config, device="cpu", num_codebooks=sizes.codebooks)
    return draw_weights(mimi).to(device)


def arguments(sizes: MimiSizes, loaders: types.ModuleType) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The vendor's own arguments of the convolutions, the quantizer and the transformers, at these sizes."""
    seanet = {**loaders._seanet_kwargs, "dimension": sizes.width, "n_filters": sizes.filters}
    around = {"input_dimension": sizes.width, "output_dimension": sizes.width}
    quantizer = {**loaders._quantizer_kwargs, **around, "dimension": sizes.codebook, "n_q": sizes.levels,
                 "bins": sizes.bins}  # fmt: skip
    transformer = {
        **loaders._transformer_kwargs, "d_model": sizes.width, "num_heads": sizes.heads, "num_layers": sizes.layers,
        "context": sizes.context, "dim_feedforward": sizes.feedforward, "layer_scale": sizes.layer_scale,
        "input_dimension": sizes.width, "output_dimensions": [sizes.width],
    }  # fmt: skip
    return seanet, quantizer, transformer


def draw_weights(mimi: Any) -> Any:
    """The codec, with weights drawn so that a signal keeps its size on the way, and codebooks that hold points of that
    size: as built they are all zeros, and every frame has the same codes."""
    with torch.no_grad():
        for weight in mimi.parameters():
            if weight.dim() > 1:
                weight.normal_(std=1.4 / weight[0].numel() ** 0.5)
        for name, buffer in mimi.named_buffers():
            if name.endswith("embedding_sum"):
                buffer.normal_()
            elif name.endswith("_initialized"):
                buffer.fill_(1)
    return mimi
