"""A chunk of Lychee-FD's decoder (28 tokens, 1 s): `stream`, from tokens to samples on the host.

The vendor's graphs never fire for chunks of this size, so there is no path of its own beside eager. Responses are as
long as `TURN` chunks; a new one is primed anew by the vendor's code, in the tick that begins it. The conformer is not
captured: its cache is never trimmed (docs/adapters.md).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

import cadence_fx
from bench import vendor
from bench.family import EAGER, OURS, Subject
from bench.vendor.token2wav import PROMPT
from cadence_fx import adapters

VARIANTS = (EAGER, OURS)
DETERMINISTIC = True
TURN = 50


class Lychee(Subject):
    whole = "chunk"

    def __init__(self, variant: str, device: torch.device, small: bool) -> None:
        super().__init__()
        sizes = vendor.SMALL if small else vendor.RELEASED
        self.token2wav = vendor.build_lychee(sizes, device)
        self.bound: adapters.Bound | None = None
        self.tokens = vendor.build_tokens(TURN, 28, sizes)
        self.variant, self.parts, self._chunks = variant, {"chunk": self._chunk}, 0

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*autocast", category=UserWarning)
            yield

    def warm_up(self) -> None:
        if self.variant == OURS:
            self.bound = adapters.bind(self.token2wav, backend=cadence_fx.cadence)
            self.bound.warm_up(prompts=[PROMPT])
            self.steps = list(self.bound.binding.compiled().values())

    def begin(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._chunks = 0

    def _chunk(self, number: int) -> tuple[Tensor, ...]:
        if self._chunks % TURN == 0:
            self.token2wav.set_stream_cache(PROMPT)
        tokens, self._chunks = self.tokens[self._chunks % TURN], self._chunks + 1
        heard = self.token2wav.stream(tokens, PROMPT)
        return (torch.from_numpy(np.frombuffer(heard, dtype=np.int16).copy()),)

    def state(self) -> Iterable[Tensor]:
        caches = self.token2wav.stream_cache, self.token2wav.hift_cache_dict
        named = {name: value for cache in caches for name, value in cache.items()}
        return [named[name] for name in ("conformer_att_cache", "conformer_cnn_cache", "mel", "source", "speech")]

    def misses(self) -> dict[str, int]:
        self.eager_calls.clear()
        if self.bound is not None:
            self.eager_calls.update(self.bound.binding.eager_calls)
        return super().misses()


def subject(variant: str, device: torch.device, small: bool) -> Subject:
    """The variant of that name."""
    return Lychee(variant, device, small)
