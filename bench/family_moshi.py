"""A frame of Moshi (80 ms): Mimi's encode, a step of the language model, Mimi's decode; each, and all in turn.

| variant        | what it is |
| -------------- | ---------- |
| eager          | the vendor's code with its CUDA graphs off |
| vendor         | with the six CUDA graphs that the vendor captures by hand, around eager's kernels |
| vendor-compiled | as the vendor ships it: those graphs, and norms and rotary positions by Inductor inside them |
| cadence        | both objects bound, the backend's three replays |
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import cadence_fx
from bench import vendor
from bench.family import EAGER, OURS, VENDOR, Family, Subject
from cadence_fx.adapters.moshi import MimiStream
from cadence_fx.adapters.moshi_lm import DialogueStream

COMPILED = "vendor-compiled"
TICKS = 64  # recordings are this long, then begin again


class Moshi(Subject):
    whole = "frame"

    def __init__(self, variant: str, device: torch.device, small: bool) -> None:
        super().__init__()
        if variant == COMPILED:
            os.environ["NO_TORCH_COMPILE"] = ""  # the package looks at it while it is imported
        if variant == EAGER:
            os.environ["NO_CUDA_GRAPH"] = "1"
        self.variant, self.device = variant, device
        self.mimi, self.gen = self.build(device, small)
        draw = torch.Generator().manual_seed(0)
        samples = int(self.mimi.sample_rate / self.mimi.frame_rate)
        self.samples = (0.1 * torch.randn(TICKS, 1, 1, samples, generator=draw)).to(device)
        bins = min(self.mimi.cardinality, self.gen.lm_model.card)
        self.codes = torch.randint(bins, (TICKS, 1, 8, 1), generator=draw).to(device)
        self.parts = {"encode": self._encode, "step": self._step, "decode": self._decode, "frame": self._frame}
        self.bound: tuple[MimiStream, DialogueStream] | None = None

    def build(self, device: torch.device, small: bool) -> tuple[Any, Any]:
        """The vendor's codec and language model."""
        # The small codec has four codebooks of 64 codes in use; the small language model speaks eight of 300.
        alike = dataclasses.replace(vendor.SMALL_MIMI, codebooks=8, levels=8, bins=vendor.SMALL_MOSHI.bins)
        mimi = vendor.build_mimi(alike if small else vendor.MIMI, device)
        return mimi, vendor.build_lm_gen(vendor.SMALL_MOSHI if small else vendor.MOSHI_7B, device)

    def bind(self) -> tuple[MimiStream, DialogueStream]:
        """Both, bound to the backend."""
        backend = cadence_fx.cadence
        return MimiStream(self.mimi, backend=backend), DialogueStream(self.gen, backend=backend)

    def warm_up(self) -> None:
        self.mimi.streaming_forever(1)
        self.gen.streaming_forever(1)
        if self.variant == OURS:
            mimi, dialogue = self.bound = self.bind()
            mimi.warm_up(cadence_fx.warm_up)
            dialogue.warm_up(cadence_fx.warm_up)
            self.steps = (*mimi.steps.values(), *dialogue.steps.values())

    def begin(self, seed: int) -> None:
        for model in (self.mimi, self.gen, self.gen.lm_model):
            model.reset_streaming()
            for state in model.get_streaming_state().values():
                if (ring := getattr(state, "kv_cache", None)) is not None:
                    ring.cache.zero_()  # the vendor leaves what was there, which nobody reads
        torch.manual_seed(seed)

    def _encode(self, number: int) -> tuple[Tensor, ...]:
        return (self.mimi.encode(self.samples[number % TICKS]),)

    def _step(self, number: int) -> tuple[Tensor, ...]:
        return self._said(self.codes[number % TICKS])

    def _decode(self, number: int) -> tuple[Tensor, ...]:
        return (self.mimi.decode(self.codes[number % TICKS]),)

    def _frame(self, number: int) -> tuple[Tensor, ...]:
        codes = self.mimi.encode(self.samples[number % TICKS])
        tokens = self._said(codes)
        return (codes, *tokens, *(self.mimi.decode(each[:, 1:9]) for each in tokens))

    def _said(self, codes: Tensor) -> tuple[Tensor, ...]:
        tokens = self.gen.step(codes)
        return () if tokens is None else (tokens,)

    def state(self) -> Iterable[Tensor]:
        for model in (self.mimi, self.gen, self.gen.lm_model):
            for state in model.get_streaming_state().values():
                ring = getattr(state, "kv_cache", None)
                for owner in (state, ring) if ring is not None else (state,):
                    yield from (value for value in vars(owner).values() if isinstance(value, Tensor))

    def misses(self) -> dict[str, int]:
        self.eager_calls.clear()
        for stream in self.bound or ():
            self.eager_calls.update(stream.eager_calls)
        return super().misses()


FAMILY = Family(Moshi, (EAGER, VENDOR, COMPILED, OURS))
