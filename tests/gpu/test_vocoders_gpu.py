"""The released vocoders on a device, small: replayed chunks have eager's bytes, draws and caches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import cadence_fx
from bench import vendor
from cadence_fx.adapters.token2wav import Geometry
from cadence_fx.adapters.token2wav_bounded import BoundedBinding
from cadence_fx.adapters.token2wav_vocoder import VocoderBinding
from cadence_fx.bytesops import bytes_equal

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
CUBLAS = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"  # other tests may have initialised CUDA without it


def compiled(step: torch.nn.Module, contract: cadence_fx.Contract) -> Any:
    options: dict[str, Any] = {"contract": contract}
    return torch.compile(step, backend=cadence_fx.cadence, dynamic=False, options=options)


def repeats(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(bytes_equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.skipif(not vendor.available(), reason="the vendor package stepaudio2-minicpmo is not installed")
def test_the_drawing_vocoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*CUBLAS)
    reference = vendor.build_token2wav(vendor.TINY, DEVICE).hift
    token2wav = vendor.build_token2wav(vendor.TINY, DEVICE)
    mel = torch.randn(8, 1, vendor.TINY.mel, 58, device=DEVICE)
    source = torch.randn(1, 1, 8 * 480, device=DEVICE)

    def played(vocoder: Any) -> list[tuple[torch.Tensor, ...]]:
        torch.cuda.manual_seed(3)
        return [tuple(vocoder(chunk, source)) for chunk in mel]

    with cadence_fx.deterministic(warn_only=True):
        first, second = played(reference), played(reference)
        if not all(map(repeats, first, second)):
            pytest.skip("eager does not repeat itself on this device")
        after = torch.cuda.get_rng_state(DEVICE)
        binding = VocoderBinding(token2wav, Geometry(prompt=104, steps=2), compiled, Counter())
        with torch.inference_mode():
            for step, given in binding.calls():
                cadence_fx.warm_up(step, *given)
        replayed = played(token2wav.hift)
    assert all(map(repeats, first, replayed))
    assert torch.equal(after, torch.cuda.get_rng_state(DEVICE))
    report = cadence_fx.report(binding.steps[8])
    assert (report["replays"], report["misses"], report["late_captures"]) == (8, {}, 0)


@pytest.mark.skipif(not vendor.available(vendor.MINICPMO_UTILS), reason="minicpmo-utils is not installed")
def test_the_bounded_vocoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*CUBLAS)
    reference, token2wav = (
        vendor.build_token2wav(vendor.TINY, DEVICE, package=vendor.MINICPMO_UTILS) for _ in range(2)
    )
    with cadence_fx.deterministic(warn_only=True):
        binding = BoundedBinding(token2wav, Geometry(prompt=104, steps=2, hop=12), compiled, Counter())
        with torch.inference_mode():
            for step, given in binding.calls():
                cadence_fx.warm_up(step, *given)
        for _ in range(2):
            for bounded in (reference.bounded_vocoder, token2wav.bounded_vocoder):
                bounded.reset()
            for frames in (24, 24, 24, 24, 0):
                mel = torch.randn(1, vendor.TINY.mel, frames, device=DEVICE)
                expected = reference.bounded_vocoder.stream(mel, finalize=not frames)
                assert bytes_equal(expected, token2wav.bounded_vocoder.stream(mel, finalize=not frames))
                for name, value in reference.bounded_vocoder.cache.items():
                    assert bytes_equal(value, token2wav.bounded_vocoder.cache[name]), name
    reports = [cadence_fx.report(step) for step in (*binding.steps.values(), binding.final)]
    assert [report["replays"] for report in reports] == [2, 6, 2]
    assert not any(report["misses"] or report["late_captures"] for report in reports)
