"""Sizes of the decoder, and random prompts and tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Sizes:
    """Constructor values of the decoder. The defaults are the released ones; `SMALL` fits two CPU cores."""

    mel: int = 80
    speaker: int = 192
    vocabulary: int = 6561
    depth: int = 16
    hidden: int = 512
    heads: int = 8
    head_dim: int = 64
    encoder: int = 512
    encoder_heads: int = 8
    encoder_units: int = 2048
    blocks: int = 6
    up_blocks: int = 4
    vocoder: int = 512
    vocoder_kernels: tuple[int, ...] = (3, 7, 11)  # of the residual blocks beside one another
    vocoder_dilations: tuple[int, ...] = (1, 3, 5)  # of the layers in each
    noise_seconds: int = 300  # of the causal vocoder's noise table, which repeats
    prompt_frames: int = 302
    steps: int = 10
    weight_std: float = 0.02


RELEASED = Sizes()
SMALL = Sizes(
    mel=16, speaker=24, vocabulary=6561, depth=2, hidden=32, heads=2, head_dim=16, encoder=32, encoder_heads=2,
    encoder_units=48, blocks=2, up_blocks=1, vocoder=16, noise_seconds=5, prompt_frames=104, steps=3, weight_std=0.3,
)  # fmt: skip
# For what has to be traced: as few layers as there can be.
TINY = replace(SMALL, depth=1, steps=2, blocks=1, vocoder_kernels=(11,), vocoder_dilations=(1,))


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the vendor's `_prepare_prompt` yields: tokens (1, P/2) int32, mel (1, P, channels), speaker (1, width)."""

    tokens: torch.Tensor
    mel: torch.Tensor
    speaker: torch.Tensor

    def as_cache(self) -> tuple[torch.Tensor, ...]:
        """The tuple that the vendor keeps in `Token2wav.cache`."""
        token_length, mel_length = (torch.tensor([x.shape[1]], dtype=torch.int32) for x in (self.tokens, self.mel))
        return self.tokens, token_length, self.speaker, self.mel, mel_length


def build_prompt(sizes: Sizes = RELEASED, device: torch.device | str = "cpu", seed: int = 2) -> Prompt:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, sizes.vocabulary, (1, sizes.prompt_frames // 2), generator=generator, dtype=torch.int32)
    mel = torch.randn(1, sizes.prompt_frames, sizes.mel, generator=generator)
    speaker = torch.randn(1, sizes.speaker, generator=generator)
    return Prompt(tokens.to(device), mel.to(device), speaker.to(device))


def build_tokens(calls: int, count: int, sizes: Sizes = RELEASED, seed: int = 3) -> list[list[int]]:
    """`calls` lists of `count` random speech tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, sizes.vocabulary, (calls, count), generator=generator).tolist()
