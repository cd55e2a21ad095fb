"""Moshi's language model, of `moshi` 0.2.13, around random weights."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch

from bench.vendor.packages import MOSHI, load


@dataclass(frozen=True, slots=True)
class MoshiSizes:
    """Constructor values of the model. The defaults are the released ones; `SMALL_MOSHI` fits a CPU core.

    Codebooks and delays are always the released ones: 8 codes in, 8 out and a text token.
    """

    width: int = 4096
    heads: int = 32
    layers: int = 32
    context: int = 3000
    scale: float = 4.125  # of the hidden layers
    depth_width: int = 1024
    depth_heads: int = 16
    depth_layers: int = 6
    text: int = 32_000  # text tokens
    bins: int = 2048
    dtype: torch.dtype = torch.bfloat16


MOSHI_7B = MoshiSizes()
SMALL_MOSHI = MoshiSizes(
    width=32, heads=2, layers=1, context=12, scale=2.0, depth_width=16, depth_heads=2, depth_layers=1, text=50,
    bins=300, dtype=torch.float32,
)  # fmt: skip


def build_lm_gen(
    sizes: MoshiSizes = MOSHI_7B, device: torch.device | str = "cpu", seed: int = 0, **options: Any
) -> Any:
    """`LMGen` around an `LMModel` with the vendor's own random weights, not streaming yet.

    Args:
        options: of `LMGen`, such as `use_sampling`.
    """
    loaders, models = load("models.loaders", MOSHI), load("models.lm", MOSHI)
    torch.manual_seed(seed)
    model = models.LMModel(device=device, dtype=sizes.dtype, **arguments(sizes, loaders))
    return models.LMGen(model.eval(), **options)


def arguments(sizes: MoshiSizes, loaders: types.ModuleType) -> dict[str, Any]:
    """The vendor's own arguments of the model, at these sizes."""
    return {
        **loaders._lm_kwargs, "dim": sizes.width, "num_heads": sizes.heads, "num_layers": sizes.layers,
        "context": sizes.context, "hidden_scale": sizes.scale, "text_card": sizes.text, "card": sizes.bins,
        "depformer_dim": sizes.depth_width, "depformer_num_heads": sizes.depth_heads,
        "depformer_num_layers": sizes.depth_layers, "depformer_dim_feedforward": int(sizes.scale * sizes.depth_width),
    }  # fmt: skip
