"""Moshi and its codec on a device, small: replayed frames have eager's codes, tokens, samples, states and draws."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import cadence_fx
from bench import vendor
from cadence_fx.adapters.moshi import MimiStream
from cadence_fx.adapters.moshi_lm import DialogueStream
from tests.adapters.moshi_pair import assert_same_state, check_replays
from tests.harness import assert_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not vendor.available(vendor.MOSHI), reason="the vendor package moshi is not installed"),
]
DEVICE = torch.device("cuda", 0)
FRAMES = 200


@pytest.fixture(autouse=True)
def _eager_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_CUDA_GRAPH", "1")  # the reference is the vendor's eager code


@torch.no_grad()
def test_two_hundred_frames_of_the_codec() -> None:
    sizes = dataclasses.replace(vendor.SMALL_MIMI, layers=1)
    reference, bound = (vendor.build_mimi(sizes, DEVICE) for _ in range(2))
    stream = MimiStream(bound, backend=cadence_fx.cadence)
    for mimi in (reference, bound):
        mimi.streaming_forever(2)
    stream.warm_up(cadence_fx.warm_up)
    draw = torch.Generator().manual_seed(0)
    for frame in range(FRAMES):
        if frame % 60 == 59:
            finished = torch.tensor([frame % 120 > 60, True], device=DEVICE)
            for mimi in (reference, bound):
                mimi.reset_streaming(finished)
        if frame % 7 == 3:
            going_on = torch.tensor([True, frame % 2 > 0], device=DEVICE)
            for mimi in (reference, bound):
                mimi.set_exec_mask(going_on)
        samples = torch.randn(2, 1, 1920, generator=draw).to(DEVICE)
        codes = [mimi.encode(samples) for mimi in (reference, bound)]
        assert_same(codes[1], codes[0], f"codes of frame {frame}")
        spoken = [mimi.decode(codes[0]) for mimi in (reference, bound)]
        assert_same(spoken[1], spoken[0], f"samples of frame {frame}")
    assert_same_state(bound, reference, "at the end")
    assert not stream.eager_calls
    check_replays(stream.steps.values(), FRAMES)


@torch.no_grad()
def test_two_hundred_frames_of_a_dialogue() -> None:
    reference, bound = (vendor.build_lm_gen(vendor.SMALL_MOSHI, DEVICE) for _ in range(2))
    stream = DialogueStream(bound, backend=cadence_fx.cadence)
    for gen in (reference, bound):
        gen.streaming_forever(1)
    stream.warm_up(cadence_fx.warm_up)
    draw = torch.Generator().manual_seed(0)
    for frame in range(FRAMES):
        if frame == 90:
            for gen in (reference, bound):
                gen.reset_streaming()
                gen.lm_model.reset_streaming()
        codes = torch.randint(vendor.SMALL_MOSHI.bins, (1, 8, 1), generator=draw).to(DEVICE)
        said = []
        for gen in (reference, bound):
            torch.manual_seed(frame)
            said.append((gen.step(codes), torch.cuda.get_rng_state(DEVICE)))
        (expected, after), (actual, ours) = said
        assert (expected is None) == (actual is None)
        if expected is not None:
            assert_same(actual, expected, f"tokens of frame {frame}")
        assert torch.equal(after, ours), f"draws of frame {frame}"
    assert_same_state(bound, reference, "at the end")
    assert_same_state(bound.lm_model, reference.lm_model, "at the end")
    assert not stream.eager_calls
    check_replays(stream.steps.values(), FRAMES)
