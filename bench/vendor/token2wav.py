"""The vendor's `Token2wav` objects around random weights and a random prompt, without their checkpoint files."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import torch

from bench.vendor.modules import SAMPLE_RATE, TorchOn, build_causal_vocoder, build_flow, build_vocoder
from bench.vendor.packages import MINICPMO_UTILS, STEPAUDIO2, Package, load
from bench.vendor.sizes import RELEASED, Sizes, build_prompt

HOP = 480  # samples a mel frame
PROMPT = "prompt.wav"  # what the second package keeps the prompt under; no such file is read


def build_token2wav(
    sizes: Sizes = RELEASED, device: torch.device | str = "cpu", seed: int = 0, package: Package = STEPAUDIO2
) -> Any:
    """A vendor's `Token2wav`. Its methods are the vendor's own; only the constructor, which reads files, is not run.

    The stream has not been started: call `start_turn`.
    """
    device = torch.device(device)
    token2wav = object.__new__(load("token2wav", package).Token2wav)
    token2wav.float16, token2wav.n_timesteps = False, sizes.steps
    token2wav.flow = build_flow(sizes, device, seed, package)
    token2wav.stream_cache, token2wav.hift_cache_dict = None, {}
    prompt = build_prompt(sizes, device, seed + 2).as_cache()
    if package == MINICPMO_UTILS:
        _complete_bounded(token2wav, prompt, sizes, device, seed + 1)
    else:
        _complete(token2wav, prompt, sizes, device, seed + 1)
    return token2wav


def _complete(token2wav: Any, prompt: tuple[torch.Tensor, ...], sizes: Sizes, device: torch.device, seed: int) -> None:
    if device.type != "cuda":  # it asks for tensors on "cuda" by name
        load("token2wav").torch = TorchOn(device)  # type: ignore[attr-defined]
    token2wav.hift = build_vocoder(sizes, device, seed)
    token2wav.cache = prompt
    token2wav._prepare_prompt = lambda prompt_wav: prompt
    token2wav.mel_cache_len = 8
    token2wav.source_cache_len = 8 * HOP
    token2wav.speech_window = torch.from_numpy(np.hamming(2 * 8 * HOP)).to(device)


def _complete_bounded(
    token2wav: Any, prompt: tuple[torch.Tensor, ...], sizes: Sizes, device: torch.device, seed: int
) -> None:
    token2wav.device = device
    token2wav.hift = build_causal_vocoder(sizes, device, seed)
    token2wav.bounded_vocoder = load("causal_vocoder.bounded_vocoder", MINICPMO_UTILS).BoundedVocoder(token2wav.hift)
    token2wav.sample_rate, token2wav.hop_samples = SAMPLE_RATE, HOP
    token2wav.vocoder_delay_frames = (
        token2wav.hift.f0_predictor.condnet[0].causal_padding + token2wav.hift.conv_pre_look_right + 1
    )
    token2wav.vocoder_delay_samples = token2wav.vocoder_delay_frames * HOP
    token2wav.source_cache_len = token2wav.vocoder_delay_samples
    token2wav.original_hift = None
    token2wav.cache = {PROMPT: prompt}
    token2wav._stream_prompt = None


def start_turn(token2wav: Any) -> None:
    """Primes a vendor's stream through its own `set_stream_cache`, and assigns the result as its callers do."""
    with contextlib.redirect_stdout(io.StringIO()):  # the first package prints the prompt's lengths
        token2wav.stream_cache, token2wav.hift_cache_dict = token2wav.set_stream_cache(PROMPT)


def live_state(token2wav: Any, steps: int) -> list[torch.Tensor]:
    """What the next call reads of a stream's solver and conformer, bound or not: of packed caches, the rows and halves
    that are live.

    Args:
        steps: of the solver; the vendor's caches may have rows for more.
    """
    cache = token2wav.stream_cache
    packed, blocks = cache["conformer_att_cache"], len(token2wav.flow.encoder.encoders)
    if "conformer_token_cache" in cache:
        conformer = [cache["conformer_token_cache"], packed]
    else:
        conformer = [packed[:blocks, :, :, : packed.shape[3] // 2], packed[blocks:]]
    solver = [cache[name][:steps] for name in ("estimator_cnn_cache", "estimator_att_cache")]
    return [cache["conformer_cnn_cache"], *conformer, *solver]
