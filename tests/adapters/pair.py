"""The vendor's stream and the adapter's side by side, on equal weights and equal draws."""

from __future__ import annotations

import types
from typing import Any

import torch

from bench import vendor
from cadence_fx.adapters.token2wav import Geometry, Token2WavStream
from cadence_fx.bytesops import bytes_equal


def vendor_state(token2wav: Any, geometry: Geometry) -> dict[str, torch.Tensor]:
    """What the vendor's next call reads of its caches, under the adapter's names; a copy."""
    cache, blocks = token2wav.stream_cache, len(token2wav.flow.encoder.encoders)
    packed = cache["conformer_att_cache"]
    live = (
        cache["conformer_cnn_cache"],
        packed[:blocks, :, :, : packed.shape[3] // 2],
        packed[blocks:],
        cache["estimator_cnn_cache"][: geometry.steps],
        cache["estimator_att_cache"][: geometry.steps],
    )
    return dict(zip(Token2WavStream.STATE, (value.clone() for value in live), strict=True))


def uncompiled(token2wav: Any) -> Any:
    """The object with the encoder's method out of the `torch.compile` that the second package ships it in.

    Its backend is eager: the bytes are the same, and every test would pay for the tracing.
    """
    encoder = token2wav.flow.encoder
    encode = type(encoder).forward_chunk
    encoder.forward_chunk = types.MethodType(getattr(encode, "_torchdynamo_orig_callable", encode), encoder)
    return token2wav


class Pair:
    """Two streams that get the same calls; each call compares samples, states and the generator."""

    def __init__(
        self, sizes: vendor.Sizes = vendor.SMALL, package: vendor.Package = vendor.STEPAUDIO2, **options: Any
    ) -> None:
        self.sizes = sizes
        self.reference = uncompiled(vendor.build_token2wav(sizes, package=package))
        self.stream = Token2WavStream(vendor.build_token2wav(sizes, package=package), **options)
        self.calls = 0

    def start(self) -> None:
        vendor.start_turn(self.reference)
        if self.calls == 0:
            self.stream.prime()
        else:
            self.stream.reset()
        self.check_state()

    def call(self, count: int = 28, last_chunk: bool = False) -> None:
        tokens = vendor.build_tokens(1, count, self.sizes, seed=self.calls)[0]
        outputs, generators = [], []
        for stream in (self.reference.stream, self.stream.token2wav.stream):
            torch.manual_seed(self.calls)
            outputs.append(stream(tokens, None, last_chunk=last_chunk, return_waveform=True))
            generators.append(torch.get_rng_state())
        assert outputs[0].shape == outputs[1].shape
        assert outputs[0].tobytes() == outputs[1].tobytes(), f"call {self.calls}: samples differ"
        assert torch.equal(*generators), f"call {self.calls}: the generator is elsewhere"
        self.calls += 1
        self.check_state()

    def check_state(self) -> None:
        expected, actual = vendor_state(self.reference, self.stream.geometry), self.stream.token2wav.stream_cache
        for name, value in expected.items():
            assert bytes_equal(value, actual[name]), f"after {self.calls} calls: {name} differs"
        vocoder = self.stream.token2wav.hift_cache_dict
        assert vocoder.keys() == self.reference.hift_cache_dict.keys()
        for name, value in self.reference.hift_cache_dict.items():
            assert bytes_equal(value, vocoder[name]), f"after {self.calls} calls: {name}"
