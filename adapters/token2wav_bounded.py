"""The bounded causal vocoder of `minicpmo-utils` 1.0.7 as steps, and its binding to the vendor's object.

The vendor's `BoundedVocoder` works in blocks of 16 frames. Between them it reads counters off host tensors, which
decide where every slice begins, and gathers its noise from a table in host memory. Both follow from how many frames
have come: once the caches are full, every chunk of a length is the same computation on other bytes. So the counters
stay on the host, in the vendor's dictionary and with the vendor's values; the rows of noise that a chunk needs are put
on the device before it; and what is left, all blocks of a chunk, is one callable of tensors.
"""

from __future__ import annotations

import functools
import math
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cadence_fx.adapters.base import Compile, Replaced, call
from cadence_fx.adapters.token2wav_geometry import Geometry, Reach
from cadence_fx.adapters.token2wav_vocoder import UNDECLARED, Call, PlainNumbers, canonical, inference
from cadence_fx.contract import Contract

State = tuple[Tensor, Tensor, Tensor]
COUNTERS = ("mel_offset", "source_offset", "source_end", "speech_offset")
KEPT = ("mel", "source", "phase")


def reach_of(bounded: Any) -> Reach:
    """What the vendor's object says of its sizes."""
    return Reach(
        bounded.block_frames, bounded.f0_left, bounded.f0_right, bounded.history, bounded.decoder_right, bounded.hop,
        bounded.model.nb_harmonics + 1,
    )  # fmt: skip


def _product(values: Sequence[int]) -> int:
    result = 1
    for value in values:
        result *= value
    return result


def plain_products(method: Any) -> Callable[..., Any]:
    """A bound method that multiplies integers with Python where it says `np.prod`.

    Dynamo makes a tensor of a product by numpy, and an int of a tensor is a host read. The code is the same, in a scope
    of its own; without a name, since Dynamo would look for the globals of a named one in its module.
    """
    shipped = method.__func__
    scope = {**shipped.__globals__, "np": types.SimpleNamespace(prod=_product)}
    del scope["__name__"]
    plain = types.FunctionType(shipped.__code__, scope, shipped.__name__, shipped.__defaults__, shipped.__closure__)
    return types.MethodType(plain, method.__self__)


class _Pass(nn.Module):
    """One pass of the vendor's `_process`, with frames counted from the start of the mel cache.

    `held` frames of mel have been seen when it begins, so `held - f0_right` of excitation have been made and
    `held - f0_right - right` of speech have been said; below zero there are none.
    """

    model: Any

    def __init__(self, model: nn.Module, reach: Reach, geometry: Geometry) -> None:
        super().__init__()
        self.model, self.reach, self.geometry = model, reach, geometry

    def excitation(self, f0: Tensor, phase: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The vendor's `_source`: excitation (1, 1, samples) of pitch (1, frames), and the phase after it.

        noise (1, samples, harmonics): the rows of the vendor's table for these frames.
        """
        model, samples = self.model, self.reach.samples
        oscillator = model.m_source.l_sin_gen
        harmonics = torch.arange(1, self.reach.harmonics + 1, device=f0.device, dtype=f0.dtype)
        increments = (f0[:, :, None] * harmonics / model.sampling_rate).remainder(1)
        cycles = increments.double().cumsum(dim=1) * samples + phase
        phase = cycles[:, -1:].remainder(1).clone()
        sine = (cycles.remainder(1) * (2 * math.pi)).sin().to(f0).repeat_interleave(samples, dim=1)
        voiced = (f0[:, :, None] > oscillator.voiced_threshold).to(f0).repeat_interleave(samples, dim=1)
        amplitude = voiced * oscillator.noise_std + (1 - voiced) * oscillator.sine_amp / 3
        mixed = sine * oscillator.sine_amp * voiced + amplitude * noise
        return model.m_source.l_tanh(model.m_source.l_linear(mixed)).transpose(1, 2), phase

    def run(self, mel: Tensor, source: Tensor, phase: Tensor, noise: Tensor, held: int, final: bool) -> tuple[Any, ...]:
        """(speech or None, mel, source, phase): what a pass says, if anything, and the caches that it leaves."""
        reach, model, samples = self.reach, self.model, self.reach.samples
        made = max(0, held - reach.f0_right)
        said = max(0, made - reach.right)
        seen = mel.shape[2] if final else mel.shape[2] - reach.f0_right
        if seen > made:
            start = max(0, made - reach.f0_left)
            features = mel[:, :, start:]
            f0 = model.f0_predictor(features.double(), finalize=final).to(features)[:, made - start :]
            parts = [source]
            for part in f0.split(reach.block, dim=1):
                rows, noise = noise[:, : part.shape[1] * samples], noise[:, part.shape[1] * samples :]
                excitation, phase = self.excitation(part, phase, rows)
                parts.append(excitation)
            source, made = torch.cat(parts, dim=2), seen
        speech, sayable = None, made if final else made - reach.right
        if sayable > said:
            start = max(0, said - reach.history)
            speech = model.decode(mel[:, :, start:made], source[:, :, start * samples :], finalize=final)
            speech, said = speech[:, (said - start) * samples :], sayable
        kept = max(0, said - reach.history)
        return speech, mel[:, :, kept:].clone(), source[:, :, kept * samples :].clone(), phase


class BoundedStep(_Pass):
    """All blocks of one chunk: (speech, mel_cache, source, phase).

    mel (1, channels, f); mel_cache (1, channels, 39) and source (1, 1, 36 * 480), or both empty at the start of a
    stream; phase (1, 1, harmonics) float64; noise (1, n, harmonics): the rows for the excitation that becomes known,
    480 for each of f frames, or of f - 3 at the start; speech (1, m).
    """

    def __init__(self, model: nn.Module, reach: Reach, geometry: Geometry, *, joined: bool) -> None:
        super().__init__(model, reach, geometry)
        self.joined = joined

    def forward(
        self, mel: Tensor, mel_cache: Tensor, source: Tensor, phase: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        reach, spoken = self.reach, []
        for part in mel.split(reach.block, dim=2):
            held = mel_cache.shape[2]
            new = max(0, held + part.shape[2] - reach.f0_right) - max(0, held - reach.f0_right)
            rows, noise = noise[:, : new * reach.samples], noise[:, new * reach.samples :]
            frames = torch.cat([mel_cache, part.float()], dim=2)
            speech, mel_cache, source, phase = self.run(frames, source, phase, rows, held, False)
            spoken.append(mel.new_zeros(1, 0) if speech is None else speech)
        return torch.cat(spoken, dim=1), mel_cache, source, phase


class FinalStep(_Pass):
    """What is still held when a stream ends: (speech, mel_cache, source, phase), the caches as the vendor leaves them.

    noise (1, 3 * 480, harmonics): the rows of the frames that the pitch predictor has held back; others as above.
    """

    def forward(
        self, mel_cache: Tensor, source: Tensor, phase: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        speech, mel, source, phase = self.run(mel_cache, source, phase, noise, mel_cache.shape[2], True)
        return speech, mel, source, phase


class BoundedBinding:
    """While bound, the vendor's `BoundedVocoder.stream` runs as compiled steps.

    One step for the first chunk of a stream, one for all later ones, one for what is left at the end. The dictionary
    `hift_cache_dict` is the vendor's in every key, counters included: an application may clone it and put it back. A
    chunk of an undeclared size, or a dictionary with counters of its own, runs the vendor's code.
    """

    def __init__(self, token2wav: Any, geometry: Geometry, compiled: Compile, eager_calls: Counter[str]) -> None:
        self._token2wav, self._geometry, self._eager_calls = token2wav, geometry, eager_calls
        self._bounded = token2wav.bounded_vocoder
        model = self._bounded.model
        self.reach = reach_of(self._bounded)
        self._shipped, self._replaced = self._bounded.stream, Replaced()
        self._replaced.put(self._bounded, stream=self._stream)
        self._replaced.put(model, decode=plain_products(model.decode))
        self._numbers = PlainNumbers(model)
        self.plain = {joined: BoundedStep(model, self.reach, geometry, joined=joined) for joined in (False, True)}
        self.plain_final = FinalStep(model, self.reach, geometry)
        self.steps = {
            joined: compiled(step, self.reach.contract(geometry, joined=joined)) for joined, step in self.plain.items()
        }
        self.final = compiled(self.plain_final, self.reach.final_contract(geometry))

    def start_turn(self) -> None:
        """Puts the dictionary of a new stream into the vendor's object, as its `set_stream_cache` does."""
        self._bounded.reset()
        self._token2wav.hift_cache_dict = self._bounded.cache
        self._token2wav.hift_cache_dict["first_chunk"] = torch.ones(1, dtype=torch.long)

    def declared(self) -> list[tuple[Contract, Callable[..., Any]]]:
        """Contract and compiled step of each callable."""
        found = [(self.reach.contract(self._geometry, joined=joined), step) for joined, step in self.steps.items()]
        return [*found, (self.reach.final_contract(self._geometry), self.final)]

    @torch.inference_mode()
    def calls(self) -> Iterator[Call]:
        """Each compiled step with arguments of a normal call; the mel frames are random."""
        reach, like = self.reach, self._bounded.model.conv_pre.weight
        channels, frames = self._bounded.model.conv_pre.in_channels, self._geometry.chunk_frames[0]
        draw = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(like)

        phase = torch.zeros(1, 1, reach.harmonics, dtype=torch.float64, device=like.device)
        for joined, step in self.steps.items():
            held = reach.mel if joined else 0
            made = max(0, held - reach.f0_right)
            new = held + frames - reach.f0_right - made
            yield step, (
                random(1, channels, frames), random(1, channels, held), random(1, 1, made * reach.samples), phase,
                self._noise(made, new),
            )  # fmt: skip
        given = random(1, channels, reach.mel), random(1, 1, reach.source * reach.samples), phase
        yield self.final, (*given, self._noise(reach.source, reach.f0_right))

    def _noise(self, frame: int, frames: int) -> Tensor:
        """(1, 480 * frames, harmonics) on the device: the vendor's rows from `frame` on, of a table that goes round."""
        table: Tensor = self._bounded.model.m_source.l_sin_gen.sine_waves[0]
        samples, rows = self.reach.samples, table.shape[0]
        start, count = frame * samples % rows, frames * samples
        if start + count <= rows:
            part = table[start : start + count]
        else:
            part = table[torch.arange(start, start + count, device=table.device).remainder(rows)]
        # The new axis has the stride of a tensor of its own; as a slice of the table it would have the table's.
        return inference(part[None].to(self._bounded.model.conv_pre.weight))

    @torch.inference_mode()
    def _stream(self, mel: Tensor, finalize: bool = False) -> Tensor:
        """In place of `BoundedVocoder.stream`: speech (1, samples) of fresh mel frames (1, channels, f)."""
        cache = self._bounded.cache
        if mel.ndim != 3 or mel.shape[:2] != cache["mel"].shape[:2] or bool(cache["finalized"].item()):
            return self._shipped(mel, finalize)  # type: ignore[no-any-return]  # it says what is wrong
        spoken = []
        with torch.amp.autocast(mel.device.type, enabled=False):
            if mel.shape[2]:
                spoken.append(self._chunk(mel))
            if finalize:
                spoken.append(self._end(mel))
        return torch.cat(spoken, dim=1) if spoken else mel.new_zeros(1, 0)

    def _chunk(self, mel: Tensor) -> Tensor:
        reach, cache = self.reach, self._bounded.cache
        held, frames = cache["mel"].shape[2], mel.shape[2]
        if frames not in self._geometry.chunk_frames or not reach.declares(held, frames) or not self._counts(held):
            self._eager_calls[UNDECLARED] += 1
            return self._shipped(mel, False)  # type: ignore[no-any-return]
        made = int(cache["source_end"].item())
        new = held + frames - reach.f0_right - max(0, held - reach.f0_right)
        step = self.steps[held > 0]

        def replayed() -> Tensor:
            speech, *kept = step(inference(mel), *self._kept(), self._noise(made, new))
            self._advance(kept, made + new, reach.right)
            return speech  # type: ignore[no-any-return]

        return call(replayed, (), lambda: self._shipped(mel, False), self._eager_calls)  # type: ignore[no-any-return]

    def _end(self, mel: Tensor) -> Tensor:
        reach, cache = self.reach, self._bounded.cache
        held = cache["mel"].shape[2]
        if held not in self.final_extents() or not self._counts(held):
            self._eager_calls[UNDECLARED] += 1
            return self._shipped(mel[:, :, :0], True)  # type: ignore[no-any-return]
        made = int(cache["source_end"].item())

        def replayed() -> Tensor:
            speech, *kept = self.final(*self._kept(), self._noise(made, reach.f0_right))
            self._advance(kept, made + reach.f0_right, 0)
            cache["finalized"].fill_(1)
            return speech  # type: ignore[no-any-return]

        shipped = functools.partial(self._shipped, mel[:, :, :0], True)
        return call(replayed, (), shipped, self._eager_calls)  # type: ignore[no-any-return]

    def final_extents(self) -> tuple[int, ...]:
        """Frames of mel that `FinalStep` is declared for."""
        return self.reach.final_contract(self._geometry).advances_of("held")

    def _kept(self) -> State:
        mel, source, phase = (inference(self._bounded.cache[name]) for name in KEPT)
        return mel, canonical(source), phase

    def _counts(self, held: int) -> bool:
        """Whether the counters are those of a stream that has `held` frames of mel in its cache."""
        cache, reach = self._bounded.cache, self.reach
        offset, source_offset, made, said = (int(cache[name].item()) for name in COUNTERS)
        made_here = max(0, held - reach.f0_right)
        said_here = max(0, made_here - reach.right)
        return (
            source_offset == offset
            and made == offset + made_here
            and said == (offset + said_here) * reach.samples
            and cache["source"].shape[2] == made_here * reach.samples
            and (offset == 0 or held == reach.mel)
        )

    def _advance(self, kept: list[Tensor], made: int, behind: int) -> None:
        """Caches and counters after a pass that has made excitation up to frame `made`."""
        cache, reach = self._bounded.cache, self.reach
        said = max(0, made - behind)
        offset = max(0, said - reach.history)
        cache.update(zip(KEPT, kept, strict=True))
        for name, value in zip(COUNTERS, (offset, offset, made, said * reach.samples), strict=True):
            cache[name].fill_(value)

    def unbind(self) -> None:
        """Gives the vocoder its own method and attributes back."""
        self._replaced.release()
        self._numbers.release()
