"""Lychee-FD's `Token2wav` around random weights: from a checkout, or made from `stepaudio2-minicpmo`.

Lychee-FD publishes no package. Its decoder is that of Step-Audio 2, class for class, and differs from the packaged one
in its `Token2wav`: prompts are kept by name, their look-ahead is their own beginning, both dictionaries are assigned,
there are always 10 solver steps, and the conformer's cache is never trimmed. `UntrimmedToken2wav` is those differences,
written for this purpose, on the packaged class.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import torch

from bench.vendor.modules import TorchOn, build_flow, build_vocoder
from bench.vendor.packages import LYCHEE_FD, STEPAUDIO2, Package, load
from bench.vendor.sizes import RELEASED, Sizes, build_prompt
from bench.vendor.token2wav import HOP, PROMPT

STEPS = 10


@functools.cache
def _untrimmed() -> type:
    vendor = load("token2wav", STEPAUDIO2)

    class UntrimmedToken2wav(vendor.Token2wav):  # type: ignore[misc, name-defined]
        """The packaged class with Lychee-FD's `set_stream_cache` and `stream`."""

        def _remembered(self, prompt_wav: str) -> tuple[torch.Tensor, ...]:
            if prompt_wav not in self.cache:
                self.cache[prompt_wav] = self._prepare_prompt(prompt_wav)
            return self.cache[prompt_wav]  # type: ignore[no-any-return]

        def set_stream_cache(self, prompt_wav: str) -> None:
            tokens, _, speaker, mel, _ = self._remembered(prompt_wav)
            primer = torch.cat([tokens, tokens[:, : self.stream_lookahead_len]], dim=1)
            self.stream_cache = self.flow.setup_cache(primer, mel, speaker, n_timesteps=STEPS)
            self.hift_cache_dict = {
                "mel": mel.new_zeros(1, mel.shape[2], 0),
                "source": mel.new_zeros(1, 1, 0),
                "speech": mel.new_zeros(1, 0),
            }

        def stream(self, generated_speech_tokens: list[int], prompt_wav: str, last_chunk: bool = False) -> bytes:
            _, _, speaker, mel, _ = self._remembered(prompt_wav)
            token = torch.tensor([generated_speech_tokens], dtype=torch.int32, device=mel.device)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*autocast", category=UserWarning)
                autocast = torch.amp.autocast(mel.device.type, dtype=torch.float32)
            with autocast:
                frames, state = self.flow.inference_chunk(
                    token=token, spk=speaker, cache=self.stream_cache, last_chunk=last_chunk, n_timesteps=STEPS
                )
            prompt, attention = mel.shape[1], state["estimator_att_cache"]
            if attention.shape[4] > prompt + 100:
                state["estimator_att_cache"] = torch.cat([attention[..., :prompt, :], attention[..., -100:, :]], dim=4)
            self.stream_cache, before = state, self.hift_cache_dict
            joined = torch.cat([before["mel"], frames], dim=2)
            speech, source = self.hift(joined, before["source"])
            if before["speech"].shape[1]:
                speech = vendor.fade_in_out(speech, before["speech"], self.speech_window)
            self.hift_cache_dict = {
                "mel": joined[..., -self.mel_cache_len :].clone(),
                "source": source[..., -self.source_cache_len :].clone(),
                "speech": speech[:, -self.source_cache_len :].clone(),
            }
            said = speech if last_chunk else speech[:, : -self.source_cache_len]
            return (np.clip(said.cpu().numpy(), -1.0, 1.0) * 32767.0).astype("<i2").tobytes()

    return UntrimmedToken2wav


def build_lychee(
    sizes: Sizes = RELEASED, device: torch.device | str = "cpu", seed: int = 0, package: Package = STEPAUDIO2
) -> Any:
    """Lychee-FD's `Token2wav` from a checkout (`LYCHEE_FD`), or made from the packaged class (`STEPAUDIO2`).

    Its methods are the vendor's, or those above; only the constructor, which reads files, is not run. Prompts other
    than `PROMPT` are to be put into its `cache`.
    """
    device = torch.device(device)
    kind = load("token2wav", LYCHEE_FD).Token2wav if package == LYCHEE_FD else _untrimmed()
    token2wav = object.__new__(kind)
    if package == LYCHEE_FD and device.type != "cuda":  # it asks for tensors on "cuda" by name
        load("token2wav", package).torch = TorchOn(device)  # type: ignore[attr-defined]
    token2wav.float16 = False
    token2wav.flow = build_flow(sizes, device, seed, package)
    token2wav.hift = build_vocoder(sizes, device, seed + 1, package)
    token2wav.cache, token2wav.hift_cache_dict = {PROMPT: build_prompt(sizes, device, seed + 2).as_cache()}, {}
    token2wav.mel_cache_len, token2wav.source_cache_len = 8, 8 * HOP
    token2wav.speech_window = torch.from_numpy(np.hamming(2 * 8 * HOP)).to(device)
    token2wav.stream_lookahead_len = token2wav.flow.pre_lookahead_len
    return token2wav


def interleaved_by_reference(token2wav: Any, plan: list[tuple[int, list[int]]], names: list[str]) -> list[list[bytes]]:
    """Samples of several streams on one object, whose dictionaries are kept by reference, as Lychee-FD's server does.

    Args:
        plan: which stream speaks, and its tokens, call by call.
        names: the prompt of each stream.
    """
    kept: list[tuple[Any, Any]] = []
    for name in names:
        token2wav.set_stream_cache(name)
        kept.append((token2wav.stream_cache, token2wav.hift_cache_dict))
    heard: list[list[bytes]] = [[] for _ in names]
    for number, tokens in plan:
        token2wav.stream_cache, token2wav.hift_cache_dict = kept[number]
        torch.manual_seed(len(heard[number]))  # each stream has draws of its own
        heard[number].append(token2wav.stream(tokens, names[number]))
        kept[number] = token2wav.stream_cache, token2wav.hift_cache_dict
    return heard
