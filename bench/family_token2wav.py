"""A chunk of Token2Wav (28 tokens, 1 s): the vendor's `stream`, from tokens to samples on the host.

| family            | whose object |
| ----------------- | ------------ |
| minicpm_o         | `stepaudio2-minicpmo`, 10 solver steps |
| minicpm_o_5_steps | the same with 5 |
| minicpm_o_causal  | `minicpmo-utils`, whose vocoder is causal; 10 steps |
| lychee_fd         | Lychee-FD's, 10 steps; its conformer, never trimmed, is not captured (docs/adapters.md) |

The vendors' graphs never fire for chunks of this size, so there is no path of their own beside eager. Responses are as
long as `TURN` chunks; a new one is primed anew by the vendor's code, in the tick that begins it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

import cadence_fx
from bench import vendor
from bench.family import EAGER, OURS, Family, Subject
from bench.vendor.lychee import STEPS
from bench.vendor.token2wav import PROMPT
from cadence_fx import adapters

TURN = 50


class Decoder(Subject):
    """One vendor's object; `steps` of the solver where the object says how many, else the vendor's own."""

    whole = "chunk"

    def __init__(
        self, build: Callable[..., Any], steps: int | None, variant: str, device: torch.device, small: bool
    ) -> None:
        super().__init__()
        sizes = vendor.SMALL if small else vendor.RELEASED
        self.token2wav = build(sizes if steps is None else dataclasses.replace(sizes, steps=steps), device)
        self.solver_steps = getattr(self.token2wav, "n_timesteps", STEPS)
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
            self.prime()
        tokens, self._chunks = self.tokens[self._chunks % TURN], self._chunks + 1
        heard = self.token2wav.stream(tokens, PROMPT)
        return (torch.from_numpy(np.frombuffer(heard, dtype=np.int16).copy()),)

    def prime(self) -> None:
        """A new response."""
        vendor.start_turn(self.token2wav)

    def state(self) -> Iterable[Tensor]:
        yield from vendor.live_state(self.token2wav, self.solver_steps)
        said = self.token2wav.hift_cache_dict
        yield from (said[name] for name in sorted(said) if isinstance(said[name], Tensor))

    def misses(self) -> dict[str, int]:
        self.eager_calls.clear()
        if self.bound is not None:
            self.eager_calls.update(self.bound.binding.eager_calls)
        return super().misses()


class Lychee(Decoder):
    """Its `set_stream_cache` assigns what it makes."""

    def prime(self) -> None:
        self.token2wav.set_stream_cache(PROMPT)


def _family(kind: type[Decoder], build: Callable[..., Any], steps: int | None = None) -> Family:
    return Family(functools.partial(kind, build, steps), (EAGER, OURS))


PACKED = _family(Decoder, vendor.build_token2wav)
FIVE_STEPS = _family(Decoder, vendor.build_token2wav, 5)
CAUSAL = _family(Decoder, functools.partial(vendor.build_token2wav, package=vendor.MINICPMO_UTILS))
LYCHEE = _family(Lychee, vendor.build_lychee)
