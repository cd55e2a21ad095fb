"""The adapter of PersonaPlex's codec against the vendor's own, or a small one of the same habits: every byte."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cadence_fx
from bench import vendor
from cadence_fx.adapters import contract_for
from cadence_fx.adapters.personaplex import DecodeStep, EncodeStep, PersonaMimiStream
from cadence_fx.errors import ContractError
from tests.adapters.moshi_pair import assert_same_state, exchange_two_streams, state_of
from tests.adapters.persona_forms import FORMS, Form
from tests.harness import BACKEND, assert_same


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield


class Pair:
    """The form's codec and a bound one, with equal weights; each frame compares codes, samples and states."""

    def __init__(self, form: Form, backend: Any = BACKEND) -> None:
        self.form = form
        self.reference, self.bound = form.build_mimi(), form.build_mimi()
        self.stream = PersonaMimiStream(self.bound, backend=backend)
        self.both = self.reference, self.bound
        self.frames = 0

    def samples(self, batch: int = 1, frames: float = 1) -> Tensor:
        self.frames += 1
        draw = torch.Generator().manual_seed(self.frames)
        return torch.randn(batch, 1, int(self.form.samples * frames), generator=draw)

    def encode(self, batch: int = 1, frames: float = 1) -> Tensor:
        x = self.samples(batch, frames)
        codes = [mimi.encode(x) for mimi in self.both]
        assert_same(codes[1], codes[0], f"codes of frame {self.frames}")
        self.check_state()
        return codes[0]

    def frame(self, batch: int = 1, frames: float = 1) -> Tensor:
        codes = self.encode(batch, frames)
        spoken = [mimi.decode(codes) for mimi in self.both]
        assert_same(spoken[1], spoken[0], f"samples of frame {self.frames}")
        assert spoken[1].stride() == spoken[0].stride()
        self.check_state()
        return codes

    def check_state(self) -> None:
        assert_same_state(self.bound, self.reference, f"after frame {self.frames}")

    def each(self, method: str, *arguments: Any) -> None:
        for mimi in self.both:
            getattr(mimi, method)(*arguments)

    def begin(self, batch: int = 1) -> None:
        self.each("streaming_forever", batch)

    def warm_up(self) -> None:
        """In the middle of a stream, which goes on where it was."""
        self.begin()
        for mimi in self.both:
            type(mimi).encode(mimi, torch.ones(1, 1, self.form.samples))
        objects = self.bound.get_streaming_state()
        self.stream.warm_up(cadence_fx.warm_up)
        assert all(self.bound.get_streaming_state()[name] is state for name, state in objects.items())
        self.check_state()

    def check_counts(self, replays: int) -> None:
        """So many replays of each step since warm-up, of two classes, and nothing else."""
        rows = [cadence_fx.report(step).as_dict() for step in self.stream.steps.values()]
        found = [(row["replays"], row["classes"], row["captures"], row["misses"]) for row in rows]
        assert found == [(replays, 2, 2, {})] * 2
        assert not self.stream.eager_calls


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    found: Form = request.param
    return found


def test_a_session_of_sixty_frames_with_resets_and_restored_states_has_eagers_bytes(form: Form, tmp_path: Path) -> None:
    pair, codes = Pair(form), []
    pair.warm_up()
    for i in range(40):
        if i in (1, 7, 8, 22):
            pair.each("reset_streaming")
            pair.check_state()
        codes.append(pair.frame())
    assert len({tuple(each.flatten().tolist()) for each in codes}) > 20  # the weights let the signal through
    files = [str(tmp_path / name) for name in ("tensors", "numbers")]
    load = form.streaming().load_streaming_state
    pair.bound.save_streaming_state(*files)
    expected = {name: value for name, value in state_of(pair.reference).items() if isinstance(value, Tensor)}
    saved = {name: value for name, value in load(*files).items() if isinstance(value, Tensor)}
    assert saved.keys() == expected.keys()
    for name, value in expected.items():
        assert_same(saved[name], value, f"saved {name}")
    for begin in (False, True):
        for _ in range(4):
            pair.frame()
        if begin:
            pair.begin()
        for mimi in pair.both:
            mimi.set_streaming_state_inplace(load(*files))
        pair.check_state()
    for _ in range(12):
        pair.frame()
    pair.check_counts(replays=60)
    pair.stream.unbind()  # in the middle of the stream
    for _ in range(4):
        pair.frame()


@torch.inference_mode()
def test_two_streams_are_exchanged_on_one_object_in_inference_mode(form: Form) -> None:
    with torch.inference_mode(False):  # weights are made before, as they are loaded
        pair = Pair(form)
    pair.warm_up()
    exchange_two_streams(pair)
    pair.check_counts(replays=50)


def test_what_is_no_declared_frame_runs_the_vendors_code(form: Form) -> None:
    pair = Pair(form, backend=None)
    pair.begin()
    pair.frame()
    pair.frame(frames=3)
    pair.frame()
    x = pair.samples()
    expected, actual = (mimi.encode_to_latent(x) for mimi in pair.both)
    assert_same(actual, expected, "latent")
    pair.frame()
    assert pair.encode(frames=0.5).shape[-1] == 0  # half of a frame is held back
    pair.encode()
    pair.encode(frames=0.5)
    pair.frame()
    # Encoding and decoding are a call each.
    assert pair.stream.eager_calls == {"undeclared size": 4, "latent": 1, "undeclared state": 1}


def test_layers_that_are_detached_from_the_stream_run_the_vendors_code(form: Form) -> None:
    pair = Pair(form, backend=None)
    for mimi in pair.both:
        mimi.downsample.conv.set_streaming_propagate(False)
    pair.begin()
    for _ in range(3):
        pair.frame()
    assert pair.stream.eager_calls == {"detached layers": 3}  # decoding has all of its state


def test_a_first_frame_that_raises_leaves_none_of_the_steps_tensors_behind(form: Form) -> None:
    pair = Pair(form, backend=None)
    pair.begin()
    (layer,) = [layer for name, layer in pair.bound.named_modules() if name == "encoder.model.0.conv.conv"]
    with pytest.raises(RuntimeError, match="type"):
        pair.bound.encode(pair.samples().double())
    pair.each("reset_streaming")
    assert layer._streaming_state.previous is None
    pair.frame()


def test_streams_of_a_batch_and_other_numbers_of_codebooks_get_steps_of_their_own(form: Form) -> None:
    pair = Pair(form, backend=None)
    for batch in (2, 1):
        pair.begin(batch)
        for _ in range(4):
            pair.frame(batch)
    assert len(pair.stream.plain) == 4 and not pair.stream.eager_calls


def test_unbinding_gives_the_object_back_as_shipped(form: Form) -> None:
    pair = Pair(form, backend=None)
    pair.stream.unbind()
    pair.begin()
    graphs = pair.bound._streaming_state.graphed_tr_enc, pair.bound._streaming_state.graphed_tr_dec
    for graph in graphs:
        graph.disable = False  # as on a GPU
    attributes, names = dict(vars(pair.bound)), [name for name, _ in pair.bound.named_buffers()]
    stream = PersonaMimiStream(pair.bound)
    for _ in range(6):
        pair.frame()
    assert all(graph.disable for graph in graphs) and len(list(pair.bound.named_buffers())) > len(names)
    stream.unbind()
    made = [name for name, _ in pair.reference.named_buffers()]  # tables of codebooks, which its code has made, too
    assert vars(pair.bound) == attributes and [name for name, _ in pair.bound.named_buffers()] == made
    assert not any(graph.disable for graph in graphs)
    for graph in graphs:
        graph.disable = True
    for _ in range(6):
        pair.frame()
    for name, weight in pair.reference.state_dict().items():
        assert_same(pair.bound.state_dict()[name], weight, name)


def test_what_is_another_codec_is_refused(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    mimi = form.build_mimi()
    stream = PersonaMimiStream(mimi)
    with pytest.raises(ContractError, match="bound already"):
        PersonaMimiStream(mimi)
    stream.unbind()
    if vendor.available(vendor.MOSHI):
        with pytest.raises(ContractError, match=r"MimiModel of PersonaPlex 0\.1\.0, found a MimiModel of moshi 0\.2"):
            PersonaMimiStream(vendor.build_mimi(vendor.SMALL_MIMI))
    package = type(mimi).__module__.rsplit(".", 2)[0]
    monkeypatch.setattr(sys.modules[package], "__version__", "0.2.0")
    with pytest.raises(ContractError, match=r"0\.1\.0, found a MimiModel of .* 0\.2\.0"):
        PersonaMimiStream(mimi)


def test_the_contract_has_rings_of_the_context_and_what_convolutions_keep(form: Form) -> None:
    mimi = form.build_mimi()
    encode, decode = EncodeStep(mimi, 1, 8), DecodeStep(mimi, 1, 8)
    for step in (encode, decode):
        assert contract_for(step) == step.contract()
        assert len(step.contract().catalog()) == 1  # met in two ways: with and without what came before
    ring = encode.contract().region("encoder_transformer.transformer.layers.*.self_attn.kv_cache.cache")
    assert (ring.bound, ring.growth) == (20, 2)
    assert encode.contract().region("encoder.model.0.conv.conv.previous").bound == 6
    assert encode.contract().region("downsample.conv.conv.conv.previous").bound == 2
    assert decode.contract().region("upsample.convtr.convtr.convtr.partial").bound == 2
