"""What the adapter declares of the first package's vocoder, and what it changes on it while bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bench import vendor
from cadence_fx.adapters import contract_for
from cadence_fx.adapters.token2wav import Geometry, Token2WavStream
from cadence_fx.adapters.token2wav_vocoder import PlainNumbers, canonical, inference
from cadence_fx.bytesops import bytes_equal
from tests.adapters.pair import Pair

pytestmark = [
    pytest.mark.skipif(not vendor.available(), reason="the vendor package stepaudio2-minicpmo is not installed"),
    pytest.mark.filterwarnings("ignore:.*Disabling autocast"),
]


def test_a_turns_first_call_and_all_others_have_a_class_each() -> None:
    geometry = Geometry(prompt=302, steps=10, flush=(9, 28))
    sizes = [
        [entry.advance_of("frame") + overlap for entry in geometry.vocoder_contract(overlap).catalog()]
        for overlap in (0, 8)
    ]
    assert sizes == [[50, 18, 56], [58, 26, 64]]
    assert geometry.vocoder_contract(8).inputs[0].size(50) == 58


class Strided(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = np.int64(3)
        self.stride: Any = (np.int64(2), 1)
        self.kept = ("same", 4)


def test_numpy_scalars_are_plain_numbers_until_released() -> None:
    module = Strided()
    shipped = {name: value for name, value in vars(module).items() if name in ("scale", "stride", "kept")}
    numbers = PlainNumbers(module)
    assert (module.scale, module.stride) == (3, (2, 1))
    assert type(module.scale) is int and {type(item) for item in module.stride} == {int}
    assert module.kept is shipped["kept"]
    numbers.release()
    assert all(getattr(module, name) is value for name, value in shipped.items())


def test_excitation_has_strides_of_its_own() -> None:
    cut = torch.randn(1, 1, 20)[:, :, 4:].clone()
    assert canonical(cut).stride() == torch.empty(1, 1, 16).stride() != cut.stride()
    assert bytes_equal(canonical(cut), cut)
    assert canonical(torch.empty(1, 1, 0)).shape == (1, 1, 0)


@torch.inference_mode()
def test_only_tensors_from_outside_inference_mode_are_copied() -> None:
    inside = torch.zeros(2)
    with torch.inference_mode(False):
        outside = torch.ones(2)
    assert inference(inside) is inside
    assert inference(outside).is_inference() and bytes_equal(inference(outside), outside)


def test_unbinding_gives_the_vocoder_its_method_and_numbers_back() -> None:
    token2wav = vendor.build_token2wav(vendor.SMALL)
    scale = token2wav.hift.m_source.l_sin_gen.upsample_scale
    stream = Token2WavStream(token2wav)
    assert type(token2wav.hift.m_source.l_sin_gen.upsample_scale) is int
    assert contract_for(stream.vocoder.plain[8]) == stream.geometry.vocoder_contract(8)
    stream.unbind()
    assert token2wav.hift.m_source.l_sin_gen.upsample_scale is scale
    assert "forward" not in vars(token2wav.hift)


def test_a_whole_utterance_still_runs_the_vendors_code() -> None:
    pair = Pair(replace(vendor.SMALL, vocoder=8))
    mel, spoken = torch.randn(1, vendor.SMALL.mel, 31), []
    for vocoder in (pair.reference.hift, pair.stream.token2wav.hift):
        torch.manual_seed(0)
        spoken.append(vocoder(speech_feat=mel))
    assert all(bytes_equal(*outs) for outs in zip(*spoken, strict=True))
    assert pair.stream.eager_calls == {"undeclared vocoder size": 1}
