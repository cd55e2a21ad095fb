"""Builds released models with random weights, for tests and benchmarks.

Two packages publish Token2Wav: `stepaudio2-minicpmo` 0.1.1 and `minicpmo-utils` 1.0.7, whose streaming vocoder is
another. `moshi` 0.2.13 publishes Moshi and its codec, Mimi. Lychee-FD (`lychee`), PersonaPlex (`personaplex`) and
Freeze-Omni (`freeze_omni`) are published as repositories alone, of which clones can be configured; without one of
Lychee-FD a variant of the packaged class takes its place, and without one of Freeze-Omni a stand-in of this project's.
All other code that runs is the vendor's; only constructors that read checkpoint files are stepped around (see
`packages` for how they are imported side by side).
"""

from bench.vendor.freeze_omni import SMALL_TICODEC, TICODEC, TicodecSizes, build_generator
from bench.vendor.lychee import build_lychee, interleaved_by_reference
from bench.vendor.mimi import MIMI, SMALL_MIMI, MimiSizes, build_mimi
from bench.vendor.modules import build_causal_vocoder, build_flow, build_vocoder
from bench.vendor.moshi_lm import MOSHI_7B, SMALL_MOSHI, MoshiSizes, build_lm_gen
from bench.vendor.packages import (
    FREEZE_OMNI,
    LYCHEE_FD,
    MINICPMO_UTILS,
    MOSHI,
    PERSONAPLEX,
    STEPAUDIO2,
    VLLM_OMNI,
    Package,
    available,
    load,
)
from bench.vendor.sizes import RELEASED, SMALL, TINY, Prompt, Sizes, build_prompt, build_tokens
from bench.vendor.token2wav import build_token2wav, live_state, start_turn

__all__ = [
    "FREEZE_OMNI",
    "LYCHEE_FD",
    "MIMI",
    "MINICPMO_UTILS",
    "MOSHI",
    "MOSHI_7B",
    "PERSONAPLEX",
    "RELEASED",
    "SMALL",
    "SMALL_MIMI",
    "SMALL_MOSHI",
    "SMALL_TICODEC",
    "STEPAUDIO2",
    "TICODEC",
    "TINY",
    "VLLM_OMNI",
    "MimiSizes",
    "MoshiSizes",
    "Package",
    "Prompt",
    "Sizes",
    "TicodecSizes",
    "available",
    "build_causal_vocoder",
    "build_flow",
    "build_generator",
    "build_lm_gen",
    "build_lychee",
    "build_mimi",
    "build_prompt",
    "build_token2wav",
    "build_tokens",
    "build_vocoder",
    "interleaved_by_reference",
    "live_state",
    "load",
    "start_turn",
]
