"""The Mimi adapter against the vendor's own codec, on small random weights: every byte of results and of states."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cadence_fx
from bench import vendor
from cadence_fx.adapters import contract_for
from cadence_fx.adapters.moshi import DecodeStep, EncodeStep, MimiStream
from cadence_fx.errors import ContractError
from tests.adapters.moshi_pair import assert_same_state, exchange_two_streams
from tests.harness import BACKEND, assert_same

pytestmark = pytest.mark.skipif(not vendor.available(vendor.MOSHI), reason="the vendor package moshi is not installed")

SIZES = replace(vendor.SMALL_MIMI, layers=1)  # a context of 20: the rings go round every 10 frames
SAMPLES = 1920


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield


class Pair:
    """The vendor's codec and a bound one, with equal weights; each frame compares codes, samples and states."""

    def __init__(self, sizes: vendor.MimiSizes = SIZES, backend: Any = BACKEND, batch: int | None = None) -> None:
        self.reference, self.bound = vendor.build_mimi(sizes), vendor.build_mimi(sizes)
        self.stream = MimiStream(self.bound, backend=backend)
        self.both = self.reference, self.bound
        self.frames = 0
        if batch is not None:
            self.stream.warm_up(cadence_fx.warm_up, batch)

    def samples(self, batch: int = 1, frames: int = 1) -> Tensor:
        self.frames += 1
        return torch.randn(batch, 1, SAMPLES * frames, generator=torch.Generator().manual_seed(self.frames))

    def frame(self, batch: int = 1, frames: int = 1) -> Tensor:
        x = self.samples(batch, frames)
        codes = [mimi.encode(x) for mimi in self.both]
        assert_same(codes[1], codes[0], f"codes of frame {self.frames}")
        spoken = [mimi.decode(codes[0]) for mimi in self.both]
        assert_same(spoken[1], spoken[0], f"samples of frame {self.frames}")
        assert [each[1].stride() for each in (codes, spoken)] == [each[0].stride() for each in (codes, spoken)]
        if self.reference.is_streaming:
            self.check_state()
        return codes[0]

    def check_state(self) -> None:
        assert_same_state(self.bound, self.reference, f"after frame {self.frames}")

    def each(self, method: str, *arguments: Any) -> None:
        for mimi in self.both:
            getattr(mimi, method)(*arguments)

    def begin(self, batch: int = 1) -> None:
        if self.reference.is_streaming:
            self.each("_stop_streaming")
        self.each("streaming_forever", batch)

    def counts(self) -> list[dict[str, Any]]:
        return [cadence_fx.report(step).as_dict() for step in self.stream.steps.values()]

    def check_counts(self, before: list[dict[str, Any]], replays: int) -> None:
        """So many replays of each step since then, and nothing else."""
        for old, new in zip(before, self.counts(), strict=True):
            assert new["replays"] - old["replays"] == replays
            assert (new["misses"], new["late_captures"]) == (old["misses"], old["late_captures"])


@pytest.fixture
def pair() -> Pair:
    """One stream, warmed up, at its start."""
    pair = Pair(batch=1)
    pair.begin()
    return pair


def test_a_session_of_sixty_frames_with_resets_has_the_vendors_bytes(pair: Pair) -> None:
    before, codes = pair.counts(), []
    for i in range(60):
        if i in (7, 8, 31, 45):
            pair.each("reset_streaming")
            pair.check_state()
        codes.append(pair.frame())
    assert len({tuple(each.flatten().tolist()) for each in codes}) > 30  # the weights let the signal through
    pair.check_counts(before, replays=60)
    assert not pair.stream.eager_calls


def test_streams_of_a_batch_advance_and_begin_anew_by_masks() -> None:
    pair, draw = Pair(batch=3), torch.Generator().manual_seed(0)
    pair.begin(3)
    before = pair.counts()
    for i in range(50):
        pair.each("set_exec_mask", torch.rand(3, generator=draw) > 0.3)
        if i % 6 == 5:
            pair.each("reset_streaming", torch.rand(3, generator=draw) > 0.5)
        pair.check_state()
        pair.frame(3)
    pair.check_counts(before, replays=50)


@torch.inference_mode()
def test_two_streams_are_exchanged_on_one_object_in_inference_mode() -> None:
    with torch.inference_mode(False):  # weights are made before, as they are loaded
        pair = Pair()
    pair.stream.warm_up(cadence_fx.warm_up)
    before = pair.counts()
    exchange_two_streams(pair)
    pair.check_counts(before, replays=50)


def test_two_objects_take_turns(pair: Pair) -> None:
    other = Pair(batch=1)
    other.begin()
    before = [each.counts() for each in (pair, other)]
    for i in range(50):
        (pair, other)[i % 2].frame()
    for each, old in zip((pair, other), before, strict=True):
        each.check_counts(old, replays=25)


def test_warm_up_leaves_an_open_stream_as_it_was() -> None:
    pair = Pair()
    pair.begin()
    pair.frame()
    objects = pair.bound.get_streaming_state()
    pair.stream.warm_up(cadence_fx.warm_up)
    assert all(pair.bound.get_streaming_state()[name] is state for name, state in objects.items())
    pair.check_state()
    before = pair.counts()
    for _ in range(12):
        pair.frame()
    pair.check_counts(before, replays=12)


def test_what_is_no_frame_of_a_stream_runs_the_vendors_code(pair: Pair) -> None:
    before = pair.counts()
    pair.frame()
    pair.frame(frames=3)
    pair.frame()
    x = pair.samples()
    expected, actual = (mimi.encode_to_latent(x) for mimi in pair.both)
    assert_same(actual, expected, "latent")
    pair.check_state()
    pair.frame()
    for mimi in pair.both:
        with pytest.raises(RuntimeError, match="positive multiple of the frame size"):
            mimi.encode(x[..., :100])
    pair.each("_stop_streaming")
    pair.frame(frames=4)
    pair.begin()
    pair.frame()
    pair.check_counts(before, replays=4)
    # Encoding and decoding are a call each; the one that raises is counted, too.
    assert pair.stream.eager_calls == {"undeclared size": 3, "latent": 1, "not streaming": 2}


def test_a_frame_may_lie_anywhere_in_a_recording(pair: Pair) -> None:
    before = pair.counts()
    recording = torch.randn(1, 1, 9 * SAMPLES + 5, generator=torch.Generator().manual_seed(1))
    tokens = torch.randint(SIZES.bins, (1, SIZES.codebooks + 1, 8), generator=torch.Generator().manual_seed(2))
    for start in (0, SAMPLES, 3, SAMPLES + 1):
        codes = [mimi.encode(recording[..., start : start + SAMPLES]) for mimi in pair.both]
        assert_same(codes[1], codes[0], f"codes of samples {start}")
    for i in range(8):
        spoken = [mimi.decode(tokens[:, 1:, i : i + 1]) for mimi in pair.both]
        assert_same(spoken[1], spoken[0], f"samples of column {i}")
    pair.check_state()
    assert [new["replays"] - old["replays"] for old, new in zip(before, pair.counts(), strict=True)] == [4, 8]
    assert not any(row["misses"] for row in pair.counts())


def test_other_numbers_of_codebooks_and_streams_get_steps_of_their_own() -> None:
    pair = Pair(backend=None)
    for codebooks in (4, 1, 6):
        pair.each("set_num_codebooks", codebooks)
        for batch in (1, 2):
            pair.begin(batch)
            for _ in range(3):
                pair.frame(batch)
    assert len(pair.stream.plain) == 12 and not pair.stream.eager_calls


def test_weights_that_are_loaded_after_the_warm_up_are_in_the_tables_of_codebooks(pair: Pair) -> None:
    """The vendor makes these tables in the first call, and never again."""
    before = pair.counts()
    for frame in range(6):
        if frame in (0, 3):
            for mimi in pair.both:
                weights = mimi.state_dict()
                draw = torch.Generator().manual_seed(frame)
                mimi.load_state_dict(
                    {
                        name: value + torch.rand(value.shape, generator=draw) if "embedding_sum" in name else value
                        for name, value in weights.items()
                    }
                )
        pair.frame()
    pair.check_counts(before, replays=6)


def test_arguments_that_the_vendor_refuses_cost_later_frames_nothing(pair: Pair) -> None:
    before = pair.counts()
    for mimi in pair.both:
        with pytest.raises(RuntimeError, match="should be the same"):
            mimi.encode(torch.zeros(1, 1, SAMPLES, dtype=torch.float64))
        with pytest.raises(AssertionError, match="should be integers"):
            mimi.decode(torch.zeros(1, SIZES.codebooks, 1))
    assert pair.stream.eager_calls == {"undeclared dtype": 2}
    for _ in range(3):
        pair.frame()
    pair.check_counts(before, replays=3)


def test_code_that_cannot_be_followed_is_counted_and_costs_later_frames_nothing(pair: Pair) -> None:
    before = pair.counts()
    pair.frame()
    for mimi in pair.both:  # the vendor's code raises before it has written any state
        first: Any = next(module for module in mimi.encoder.modules() if isinstance(module, torch.nn.Conv1d))
        weight, first.weight = first.weight, None
        with pytest.raises(TypeError, match="weight"):
            mimi.encode(torch.zeros(1, 1, SAMPLES))
        first.weight = weight
    assert pair.stream.eager_calls == {"not traceable": 1}
    pair.frame()
    pair.check_counts(before, replays=2)


def test_a_codec_is_moved_to_another_dtype_and_back() -> None:
    pair = Pair(batch=1)
    for dtype in (torch.float64, torch.float32):
        for mimi in pair.both:
            mimi.to(dtype)
        pair.begin()
        for number in range(3):
            x = pair.samples().to(dtype)
            codes = [mimi.encode(x) for mimi in pair.both]
            assert_same(codes[1], codes[0], f"codes of frame {number} in {dtype}")
            pair.check_state()
    assert not pair.stream.eager_calls and all(not row["misses"] for row in pair.counts())


def test_layers_that_are_detached_from_the_stream_run_the_vendors_code() -> None:
    pair = Pair(backend=None)
    for mimi in pair.both:
        mimi.encoder_transformer.set_streaming_detached(True)
    pair.begin()
    for _ in range(3):
        pair.frame()
    assert pair.stream.eager_calls == {"detached layers": 3}  # decoding has all of its state


def test_unbinding_gives_the_object_back_as_shipped() -> None:
    reference, mimi = vendor.build_mimi(SIZES), vendor.build_mimi(SIZES)
    for each in (reference, mimi):
        each.streaming_forever(1)
    graph = mimi._streaming_state.graphed_encoder
    graph.disable = False  # as on a GPU
    attributes, names = dict(vars(mimi)), [name for name, _ in mimi.named_buffers()]
    stream = MimiStream(mimi, backend=BACKEND)  # without a warm-up: the first frames are captured in traffic
    x = torch.randn(12, 1, 1, SAMPLES)
    for i in range(12):
        if i == 6:
            assert graph.disable and "encode" in vars(mimi) and len(list(mimi.named_buffers())) > len(names)
            rows = [cadence_fx.report(step).as_dict() for step in stream.steps.values()]
            assert [(row["replays"], row["captures"], row["misses"]) for row in rows] == [(6, 1, {})] * 2
            stream.unbind()
            made = [name for name, _ in reference.named_buffers()]  # tables of codebooks, which its code has made, too
            assert vars(mimi) == attributes and [name for name, _ in mimi.named_buffers()] == made
            assert graph.disable is False
            graph.disable = True
        codes = [each.encode(x[i]) for each in (reference, mimi)]
        assert_same(codes[1], codes[0], f"codes of frame {i}")
        assert_same(mimi.decode(codes[0]), reference.decode(codes[0]), f"samples of frame {i}")
    assert_same_state(mimi, reference, "after unbinding")
    for name, weight in reference.state_dict().items():
        assert_same(mimi.state_dict()[name], weight, name)


def test_what_is_not_the_released_codec_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mimi = vendor.build_mimi(SIZES)
    stream = MimiStream(mimi)
    with pytest.raises(ContractError, match="bound already"):
        MimiStream(mimi)
    stream.unbind()
    with pytest.raises(ContractError, match=r"MimiModel of moshi 0\.2\.13, found a Linear of torch"):
        MimiStream(torch.nn.Linear(2, 2))
    mimi.encoder_transformer.transformer.layers[0].self_attn.context = None
    with pytest.raises(ContractError, match="context"):
        MimiStream(mimi)
    monkeypatch.setattr(sys.modules["moshi"], "__version__", "0.1.0")
    with pytest.raises(ContractError, match=r"0\.2\.13, found a MimiModel of moshi 0\.1\.0"):
        MimiStream(mimi)


def test_the_contract_has_one_class_and_rings_of_the_context() -> None:
    mimi = vendor.build_mimi(SIZES)
    encode, decode = EncodeStep(mimi, 2, 4), DecodeStep(mimi, 2, 4)
    for step in (encode, decode):
        assert contract_for(step) == step.contract()
        assert len(step.contract().catalog()) == 1
    ring = encode.contract().region("encoder_transformer.transformer.layers.*.self_attn.kv_cache.cache")
    assert (ring.bound, ring.growth) == (SIZES.context, 2)
    assert encode.contract().region("encoder.model.0.previous").bound == 6
    assert decode.contract().region("upsample.convtr.partial").bound == 2


def test_neither_the_adapter_nor_the_vendor_leaves_traces() -> None:
    assert os.environ.get("NO_TORCH_COMPILE") is None
    code = "import sys, cadence_fx.adapters.moshi; assert 'moshi' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = (
        "import sys; from bench import vendor; vendor.build_mimi(vendor.SMALL_MIMI);"
        "assert not {'huggingface_hub', 'sentencepiece', 'sphn'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
