"""The vocoder of `stepaudio2-minicpmo` 0.1.1 as a step, and its binding to the vendor's object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cadence_fx.adapters.base import Compile, Replaced, call
from cadence_fx.adapters.token2wav_geometry import Geometry
from cadence_fx.contract import Contract

Call = tuple[Callable[..., Any], tuple[Tensor, ...]]
UNDECLARED = "undeclared vocoder size"


class PlainNumbers:
    """The numpy scalars in a module's attributes, as Python numbers of the same value until `release`.

    Strides and scales that the vendor computes with numpy; Dynamo would make a tensor of each of them in each call,
    and refuses the shapes that come of it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._shipped: list[tuple[dict[str, Any], str, Any]] = []
        for part in module.modules():
            attributes = vars(part)
            for name, value in attributes.items():
                if (plain := _plain(value)) is not value:
                    self._shipped.append((attributes, name, value))
                    attributes[name] = plain  # an existing key: the dictionary keeps its size

    def release(self) -> None:
        while self._shipped:
            attributes, name, value = self._shipped.pop()
            attributes[name] = value


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (tuple, list) and any(isinstance(item, np.generic) for item in value):
        return type(value)(_plain(item) for item in value)
    return value


class VocoderStep(nn.Module):
    """The vendor's `HiFTGenerator.forward` as shipped: (speech, excitation) of one call.

    mel (1, channels, overlap + f): the frames that the last chunk left, and the new ones; cache_source (1, 1,
    480 * overlap): the excitation of the former, which replaces what is computed for them; speech (1, 480 * frames),
    excitation (1, 1, 480 * frames). It draws three times from the device's generator.
    """

    def __init__(self, vocoder: nn.Module, geometry: Geometry, *, overlap: int = 0) -> None:
        super().__init__()
        self.vocoder, self.geometry, self.overlap = vocoder, geometry, overlap

    def forward(self, mel: Tensor, cache_source: Tensor) -> tuple[Tensor, Tensor]:
        speech, source = type(self.vocoder).forward(self.vocoder, mel, cache_source)
        return speech, source


class VocoderBinding:
    """While bound, the vendor's vocoder runs as a compiled step: one for a turn's first call, one for all others.

    The vendor's `stream` cuts the overlap from the results and joins it to the next chunk; so its dictionary of three
    tensors is as shipped, and may be kept, cloned and put back as with the vendor's own code.
    """

    def __init__(self, token2wav: Any, geometry: Geometry, compiled: Compile, eager_calls: Counter[str]) -> None:
        self._token2wav, self._geometry, self._eager_calls = token2wav, geometry, eager_calls
        self._vocoder = token2wav.hift
        self._samples = token2wav.source_cache_len // token2wav.mel_cache_len
        self._replaced = Replaced()
        self._replaced.put(self._vocoder, forward=self._forward)
        self._numbers = PlainNumbers(self._vocoder)
        self.overlap: int = token2wav.mel_cache_len
        self.plain = {overlap: VocoderStep(self._vocoder, geometry, overlap=overlap) for overlap in (0, self.overlap)}
        self.steps = {n: compiled(step, geometry.vocoder_contract(n)) for n, step in self.plain.items()}

    def start_turn(self) -> None:
        """Puts a dictionary with nothing to join on to into the vendor's object."""
        like = next(self._vocoder.parameters())
        self._token2wav.hift_cache_dict = {
            "mel": like.new_zeros(1, self._vocoder.conv_pre.in_channels, 0),
            "source": like.new_zeros(1, 1, 0),
            "speech": like.new_zeros(1, 0),
        }

    def declared(self) -> list[tuple[Contract, Callable[..., Any]]]:
        """Contract and compiled step of each callable."""
        return [(self._geometry.vocoder_contract(overlap), step) for overlap, step in self.steps.items()]

    @torch.inference_mode()
    def calls(self) -> Iterator[Call]:
        """Each compiled step with arguments of a normal call; the mel frames are random."""
        like, frames = next(self._vocoder.parameters()), self._geometry.chunk_frames[0]
        for overlap, step in self.steps.items():
            draw = torch.Generator().manual_seed(overlap)
            channels = self._vocoder.conv_pre.in_channels
            given = torch.randn(1, channels, overlap + frames, generator=draw).to(like.device)
            source = torch.randn(1, 1, overlap * self._samples, generator=draw).to(like.device)
            yield step, (given, source)

    @torch.inference_mode()
    def _forward(self, speech_feat: Tensor, cache_source: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """In place of the vocoder's `forward`."""
        source = speech_feat.new_zeros(1, 1, 0) if cache_source is None else cache_source
        overlap = source.shape[2] // self._samples
        if overlap not in self.steps or speech_feat.shape[2] - overlap not in self._geometry.chunk_frames:
            self._eager_calls[UNDECLARED] += 1
            return self._shipped(speech_feat, source)
        given = inference(speech_feat), canonical(inference(source))
        speech, made = call(self.steps[overlap], given, lambda: self._shipped(speech_feat, source), self._eager_calls)
        return speech, made

    def _shipped(self, mel: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        return type(self._vocoder).forward(self._vocoder, mel, source)  # type: ignore[no-any-return]

    def unbind(self) -> None:
        """Gives the vocoder its own method and attributes back."""
        self._replaced.release()
        self._numbers.release()


def canonical(source: Tensor) -> Tensor:
    """Excitation (1, 1, n) with the strides of a tensor of its own: a copy of a slice keeps those of what it was cut
    from, which say nothing and differ from call to call."""
    return source.view(-1)[None, None] if source.numel() else source


def inference(given: Tensor) -> Tensor:
    """In inference mode: Dynamo tells its tensors from others, and would compile again for one made outside it."""
    return given if given.is_inference() else given.clone()
