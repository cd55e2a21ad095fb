"""A window of Freeze-Omni's TiCodec generator in the middle of a sentence: 60 tokens, of which 40 (1 s) are new.

The code is the vendor's where CADENCE_FREEZE_OMNI names a checkout, and a stand-in of the same architecture otherwise.
The vendor has no graphs of its own. All of a session runs under one autocast, as the vendor's does.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

import cadence_fx
from bench import vendor
from bench.family import EAGER, OURS, Family, Subject
from bench.vendor import freeze_omni
from cadence_fx.adapters.freeze_omni import FreezeOmniStream

SENTENCES = (75, 470, 230)  # tokens; the first one is cut into chunks of 20


class FreezeOmni(Subject):
    """`window` plays a session's windows, tails included; `steady` is the same long window again and again."""

    whole = "session"

    def __init__(self, variant: str, device: torch.device, small: bool) -> None:
        super().__init__()
        self.device = device
        sizes = vendor.SMALL_TICODEC if small else vendor.TICODEC
        self.vqvae = vendor.build_generator(sizes, device)
        self.windows = list(freeze_omni.session(SENTENCES, sizes, device))
        self.steady = [w for w in self.windows if w.codes.shape[1] == freeze_omni.CHUNK + 2 * freeze_omni.PADDING]
        self.parts = {"window": self._window, "session": self._session}
        self.stream = FreezeOmniStream(self.vqvae, backend=cadence_fx.cadence) if variant == OURS else None

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16):
            yield

    def warm_up(self) -> None:
        if self.stream is not None:
            self.stream.warm_up(cadence_fx.warm_up)
            self.steps = [self.stream.step]

    def begin(self, seed: int) -> None:
        torch.manual_seed(seed)

    def _window(self, number: int) -> tuple[Tensor, ...]:
        return (self.steady[number % len(self.steady)].decode(self.vqvae),)

    def _session(self, number: int) -> tuple[Tensor, ...]:
        return (self.windows[number % len(self.windows)].decode(self.vqvae),)

    def state(self) -> Iterable[Tensor]:
        return itertools.chain()  # the generator is stateless

    def misses(self) -> dict[str, int]:
        self.eager_calls.clear()
        if self.stream is not None:
            self.eager_calls.update({f"{reason} (tails)": n for reason, n in self.stream.eager_calls.items()})
        return super().misses()


FAMILY = Family(FreezeOmni, (EAGER, OURS))
