"""Builds the released Token2Wav decoders with random weights, for tests and benchmarks.

Two packages publish one: `stepaudio2-minicpmo` 0.1.1 and `minicpmo-utils` 1.0.7, whose streaming vocoder is another.
All code that runs is the vendor's; only constructors that read checkpoint files are stepped around (see `packages`
for how the two are imported side by side).
"""

from bench.vendor.modules import build_causal_vocoder, build_flow, build_vocoder
from bench.vendor.packages import MINICPMO_UTILS, STEPAUDIO2, Package, available, load
from bench.vendor.sizes import RELEASED, SMALL, TINY, Prompt, Sizes, build_prompt, build_tokens
from bench.vendor.token2wav import build_token2wav, start_turn

__all__ = [
    "MINICPMO_UTILS",
    "RELEASED",
    "SMALL",
    "STEPAUDIO2",
    "TINY",
    "Package",
    "Prompt",
    "Sizes",
    "available",
    "build_causal_vocoder",
    "build_flow",
    "build_prompt",
    "build_token2wav",
    "build_tokens",
    "build_vocoder",
    "load",
    "start_turn",
]
