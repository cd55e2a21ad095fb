"""The adapter of Moshi's language model against the vendor's own: tokens, states and the generator, every byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cadence_fx
from bench import vendor
from cadence_fx.adapters import contract_for
from cadence_fx.adapters.moshi_lm import DialogueStep, DialogueStream
from cadence_fx.errors import ContractError
from tests.adapters.moshi_pair import assert_same_state
from tests.harness import BACKEND, assert_same

pytestmark = pytest.mark.skipif(not vendor.available(vendor.MOSHI), reason="the vendor package moshi is not installed")

SIZES = vendor.SMALL_MOSHI  # a context of 12 frames


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield


class Pair:
    """The vendor's model and a bound one, with equal weights and equal draws; each frame compares everything."""

    def __init__(self, backend: Any = BACKEND, **options: Any) -> None:
        self.reference, self.bound = (vendor.build_lm_gen(SIZES, **options) for _ in range(2))
        self.stream = DialogueStream(self.bound, backend=backend)
        self.both = self.reference, self.bound
        self.frames = 0

    def begin(self, batch: int = 1) -> None:
        for gen in self.both:
            if gen.is_streaming:
                gen._streaming_state.__exit__(None, None, None)
                gen._stop_streaming()
                gen.lm_model._stop_streaming()
            gen.streaming_forever(batch)

    def frame(self, batch: int = 1, codebooks: int = 8, **given: Any) -> Tensor | None:
        self.frames += 1
        draw = torch.Generator().manual_seed(self.frames)
        codes = torch.randint(SIZES.bins, (batch, codebooks, 1), generator=draw)
        said, generators = [], []
        for gen in self.both:
            torch.manual_seed(self.frames)
            said.append(gen.step(codes, **given))
            generators.append(torch.get_rng_state())
        assert torch.equal(*generators), f"frame {self.frames}: the generator is elsewhere"
        assert (said[0] is None) == (said[1] is None)
        if said[0] is not None:
            assert_same(said[1], said[0], f"tokens of frame {self.frames}")
        self.check_state()
        return said[0]

    def check_state(self) -> None:
        when = f"after frame {self.frames}"
        assert_same_state(self.bound, self.reference, when)
        assert_same_state(self.bound.lm_model, self.reference.lm_model, when)
        assert not any(gen.lm_model.depformer.is_streaming for gen in self.both)

    def each(self, method: str, *arguments: Any) -> None:
        for gen in self.both:
            getattr(gen, method)(*arguments)

    def counts(self) -> dict[str, Any]:
        (step,) = self.stream.steps.values()
        return cadence_fx.report(step).as_dict()


def test_a_dialogue_of_sixty_frames_with_resets_has_the_vendors_tokens() -> None:
    pair = Pair()
    pair.stream.warm_up(cadence_fx.warm_up)
    pair.begin()
    said = []
    for i in range(60):
        if i in (5, 6, 33):
            pair.each("reset_streaming")
        tokens = pair.frame()
        said.append(None if tokens is None else tuple(tokens.flatten().tolist()))
    assert said.count(None) == 4 and len(set(said)) > 50  # each beginning has a frame with nothing to say
    row = pair.counts()
    assert (row["replays"], row["captures"], row["late_captures"], row["misses"]) == (60, 1, 0, {})
    assert row["effects"]["device-random"] == 1 and not pair.stream.eager_calls


def test_dialogues_of_a_batch_are_masked_and_two_streams_exchanged() -> None:
    pair, draw = Pair(support_out_of_sync=True), torch.Generator().manual_seed(0)
    pair.stream.warm_up(cadence_fx.warm_up, 2)
    streams: list[list[Any]] = [[], []]
    for _ in range(2):
        pair.begin(2)
        for gen, kept in zip(pair.both, streams, strict=True):
            kept.append((gen.get_streaming_state(), gen.lm_model.get_streaming_state()))
    for i in range(50):
        for gen, kept in zip(pair.both, streams, strict=True):
            gen.set_streaming_state(kept[i % 3 % 2][0])
            gen.lm_model.set_streaming_state(kept[i % 3 % 2][1])
        if i % 2:
            pair.each("set_exec_mask", torch.rand(2, generator=draw) > 0.3)
        if i % 7 == 6:
            pair.each("reset_streaming", torch.rand(2, generator=draw) > 0.5)
        pair.frame(2)
    row = pair.counts()
    assert (row["replays"], row["captures"], row["late_captures"], row["misses"]) == (50, 1, 0, {})


def test_frames_that_need_the_host_run_the_vendors_code() -> None:
    pair = Pair(backend=None)
    pair.begin()
    for _ in range(3):
        pair.frame()
    pair.frame(codebooks=9)  # what is too much is left out
    pair.frame(depformer_replace_tokens=torch.zeros(1, 8, 1, dtype=torch.int64))
    heard: list[Tensor] = []
    for gen in pair.both:
        gen.on_text_hook = heard.append
    pair.frame()
    assert len(heard) == 2 and torch.equal(*heard)
    for gen in pair.both:
        gen.on_text_hook, gen.check = None, True
    pair.frame()
    for gen in pair.both:
        gen.check = False
        with pytest.raises(AssertionError, match="We expect 8 tokens"):
            gen.step(torch.zeros(1, 7, 1, dtype=torch.int64))
    pair.frame()
    assert pair.stream.eager_calls == {"host in the middle": 3, "undeclared size": 1}
    outside = vendor.build_lm_gen(SIZES)
    DialogueStream(outside)
    with pytest.raises(RuntimeError, match="streaming"):
        outside.step(torch.zeros(1, 8, 1, dtype=torch.int64))


def test_what_the_vendor_has_inductor_compile_is_the_eager_code_in_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    modules = vendor.load("modules.transformer", vendor.MOSHI)
    lazily = vendor.load("utils.compile", vendor.MOSHI).torch_compile_lazy(modules._rms_norm)
    assert lazily is not modules._rms_norm
    plain = modules._rms_norm
    pair.begin()
    for _ in range(4):
        pair.frames += 1
        codes, said = torch.zeros(1, 8, 1, dtype=torch.int64), []
        for gen, norm in zip(pair.both, (plain, lazily), strict=True):
            monkeypatch.setattr(modules, "_rms_norm", norm)
            torch.manual_seed(pair.frames)
            said.append(gen.step(codes))
        if said[0] is not None:
            assert_same(said[1], said[0], f"tokens of frame {pair.frames}")
        pair.check_state()
    pair.bound.check = True  # and in what runs the vendor's code
    pair.bound.step(torch.zeros(1, 8, 1, dtype=torch.int64))
    compiled = lazily.__closure__[[*lazily.__code__.co_freevars].index("fun_compiled")].cell_contents
    assert compiled is None and pair.counts()["misses"] == {}


def test_a_frame_that_raises_leaves_nothing_behind() -> None:
    gen = vendor.build_lm_gen(SIZES)
    DialogueStream(gen)
    gen.streaming_forever(1)
    depth = gen._streaming_state.graphed_depth
    weight = gen.lm_model.linears[3].weight
    gen.lm_model.linears[3].weight = None
    with pytest.raises(TypeError):
        gen.step(torch.zeros(1, 8, 1, dtype=torch.int64))
    gen.lm_model.linears[3].weight = weight
    assert gen._streaming_state.graphed_depth is depth and not gen.lm_model.depformer.is_streaming
    gen.step(torch.zeros(1, 8, 1, dtype=torch.int64))


def test_unbinding_in_the_middle_goes_on_with_the_vendors_tokens() -> None:
    pair = Pair()
    pair.begin()
    state = pair.bound._streaming_state
    graphs = state.graphed_main, state.graphed_depth
    for graph in graphs:
        graph.disable = False  # as on a GPU
    for _ in range(14):  # captured in traffic
        pair.frame()
    assert all(graph.disable for graph in graphs) and pair.counts()["replays"] == 14
    pair.stream.unbind()
    assert not any(graph.disable for graph in graphs) and "_step" not in vars(pair.bound)
    assert (state.graphed_main, state.graphed_depth) == graphs
    for graph in graphs:
        graph.disable = True
    for _ in range(4):
        pair.frame()


def test_what_is_not_declared_is_refused() -> None:
    gen = vendor.build_lm_gen(SIZES)
    stream = DialogueStream(gen)
    with pytest.raises(ContractError, match="bound already"):
        DialogueStream(gen)
    stream.unbind()
    gen.cfg_coef = 2.0
    with pytest.raises(ContractError, match="guidance"):
        DialogueStream(gen)
    with pytest.raises(ContractError, match="expected the LMGen"):
        DialogueStream(gen.lm_model)


def test_the_contract_has_one_class() -> None:
    step = DialogueStep(vendor.build_lm_gen(SIZES), 3)
    contract = step.contract()
    assert contract_for(step) == contract and len(contract.catalog()) == 1
    assert contract.region("cache").bound == 3
    assert contract.region("lm_model.transformer.layers.*.self_attn.kv_cache.cache").bound == SIZES.context
