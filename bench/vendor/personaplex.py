"""PersonaPlex around random weights: its codec and its language model, from a checkout of NVIDIA/personaplex.

There is no package of it. The environment variable CADENCE_PERSONAPLEX names the checkout, which is imported as
`personaplex_moshi`, beside PyPI's `moshi`, whose name it shares.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from bench.vendor import mimi, moshi_lm
from bench.vendor.mimi import MIMI, SMALL_MIMI, MimiSizes
from bench.vendor.moshi_lm import MOSHI_7B, SMALL_MOSHI, MoshiSizes
from bench.vendor.packages import PERSONAPLEX, load

CODES = 16  # that the depth transformer makes in a frame: the model's own voice and the user's

PERSONA_MIMI = MIMI
SMALL_PERSONA_MIMI = replace(SMALL_MIMI, levels=9, codebooks=8)
PERSONA_7B = MOSHI_7B
# All codes of the codec: the prompts' constants are among them.
SMALL_PERSONA = replace(SMALL_MOSHI, bins=2048)


def build_mimi(sizes: MimiSizes = PERSONA_MIMI, device: torch.device | str = "cpu", seed: int = 0) -> Any:
    """`MimiModel`, assembled as the vendor's `get_mimi` does, which reads a checkpoint; not streaming yet.

    Raises:
        ModuleNotFoundError: no checkout is configured.
    """
    loaders = load("models.loaders", PERSONAPLEX)
    seanet, quantizer, transformer = mimi.arguments(sizes, loaders)
    torch.manual_seed(seed)
    encoder, decoder = loaders.SEANetEncoder(**seanet), loaders.SEANetDecoder(**seanet)
    model = loaders.MimiModel(
        encoder, decoder, loaders.SplitResidualVectorQuantizer(**quantizer), channels=1,
        sample_rate=loaders.SAMPLE_RATE, frame_rate=loaders.FRAME_RATE,
        encoder_frame_rate=loaders.SAMPLE_RATE / encoder.hop_length, causal=True, resample_method="conv",
        encoder_transformer=loaders.transformer.ProjectedTransformer(**transformer),
        decoder_transformer=loaders.transformer.ProjectedTransformer(**transformer),
    )  # fmt: skip
    model.set_num_codebooks(sizes.codebooks)
    return mimi.draw_weights(model.eval()).to(device)


def build_lm_gen(
    sizes: MoshiSizes = PERSONA_7B, device: torch.device | str = "cpu", seed: int = 0, **options: Any
) -> Any:
    """`LMGen` around an `LMModel` with the vendor's own random weights, not streaming yet.

    Args:
        options: of `LMGen`, such as `use_sampling` or `text_prompt_tokens`.

    Raises:
        ModuleNotFoundError: no checkout is configured.
    """
    loaders, models = load("models.loaders", PERSONAPLEX), load("models.lm", PERSONAPLEX)
    arguments = {**moshi_lm.arguments(sizes, loaders), "dep_q": CODES}
    torch.manual_seed(seed)
    model = models.LMModel(device=device, dtype=sizes.dtype, **arguments).to(device=device, dtype=sizes.dtype)
    rates = {"sample_rate": loaders.SAMPLE_RATE, "frame_rate": loaders.FRAME_RATE}
    return models.LMGen(model.eval(), device=device, **rates, **options)
