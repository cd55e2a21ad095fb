"""The prompts of a vendor's Token2Wav: where each package keeps them, and which one is spoken with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cadence_fx.errors import ContractError

SILENCE_TOKEN = 4218  # what the first package pads a prompt's look-ahead with; others repeat the prompt's start


class NoPrompt(ContractError):
    """No prompt is known, or which one is not."""


class Prompts:
    """What the vendor's `_prepare_prompt` makes: tokens, their number, speaker, mel frames (1, P, channels), theirs.

    The first package keeps one, others keep them by name, and one of these knows which is spoken with. `prompt` is the
    one that was chosen last.
    """

    def __init__(self, token2wav: Any) -> None:
        self._token2wav = token2wav
        self.name: Any = None
        self.prompt: tuple[Tensor, ...] | None = None

    def choose(self, name: Any = None) -> None:
        """The prompt of a name, as the vendor's `set_stream_cache` takes it; without one, that which the object has.

        Raises:
            NoPrompt: it has none, or several.
        """
        cache, prepare = self._token2wav.cache, self._token2wav._prepare_prompt
        if isinstance(cache, dict):
            if name is None:
                spoken = getattr(self._token2wav, "_stream_prompt", None)
                name = next(iter(cache)) if spoken is None and len(cache) == 1 else spoken
            if name is not None and name not in cache:
                cache[name] = prepare(name)
            prompt = None if name is None else cache[name]
        else:
            prompt = cache if name is None else prepare(name)
        if prompt is None:
            raise NoPrompt(
                "which prompt is bound? Call set_stream_cache(prompt) first, or warm_up(prompts=[prompt])",
                field="prompts",
            )
        self.name, self.prompt = name, prompt

    def speak(self) -> None:
        """Makes the chosen prompt the one that the vendor's next `stream` speaks with."""
        if hasattr(self._token2wav, "_stream_prompt"):
            self._token2wav._stream_prompt = self.name
        elif not isinstance(self._token2wav.cache, dict):
            self._token2wav.cache = self.prompt

    def frames_of(self, speaker: Tensor) -> int | None:
        """Frames of the prompt whose speaker a call brings, by identity; the vendor's `stream` trims by that prompt."""
        cache = self._token2wav.cache
        for prompt in cache.values() if isinstance(cache, dict) else (cache,):
            if prompt is not None and prompt[2] is speaker:
                return int(prompt[3].shape[1])
        return None

    def primer(self, lookahead: int) -> Tensor:
        """The chosen prompt's tokens and the look-ahead that the vendor puts behind them."""
        tokens = self._chosen[0]
        padding = tokens[:, :lookahead]
        if not isinstance(self._token2wav.cache, dict):
            padding = torch.full_like(padding, SILENCE_TOKEN)
        return torch.cat([tokens, padding], dim=1)

    @property
    def _chosen(self) -> tuple[Tensor, ...]:
        assert self.prompt is not None  # `choose` comes first
        return self.prompt

    @property
    def mel(self) -> Tensor:
        return self._chosen[3]

    @property
    def speaker(self) -> Tensor:
        return self._chosen[2]

    @property
    def frames(self) -> int:
        return int(self.mel.shape[1])
