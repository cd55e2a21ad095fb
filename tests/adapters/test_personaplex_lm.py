"""The adapter of PersonaPlex's language model against the vendor's own, or a small one: every byte, and every draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cadence_fx
from cadence_fx.adapters import contract_for
from cadence_fx.adapters.personaplex_lm import DialogueStep, PersonaDialogueStream
from cadence_fx.errors import ContractError
from tests.adapters.moshi_pair import assert_same_state
from tests.adapters.persona_forms import FORMS, Form
from tests.harness import BACKEND, assert_same


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    found: Form = request.param
    return found


class Pair:
    """The form's model and a bound one, with equal weights and equal draws; each call compares everything."""

    def __init__(self, form: Form, backend: Any = BACKEND, **options: Any) -> None:
        self.form = form
        self.reference, self.bound = (form.build_lm_gen(**options) for _ in range(2))
        self.stream = PersonaDialogueStream(self.bound, backend=backend)
        self.both = self.reference, self.bound
        self.calls = 0

    def codes(self, batch: int = 1, seed: int = 0) -> Tensor:
        draw = torch.Generator().manual_seed(1000 * seed + self.calls)
        return torch.randint(self.form.card, (batch, self.form.codebooks, 1), generator=draw)

    def call(self, call: Callable[[Any], Any]) -> Any:
        self.calls += 1
        said, generators = [], []
        for gen in self.both:
            torch.manual_seed(self.calls)
            said.append(call(gen))
            generators.append(torch.get_rng_state())
        assert torch.equal(*generators), f"call {self.calls}: the generator is elsewhere"
        expected, actual = (each if isinstance(each, tuple) else (each,) for each in said)
        for i, (theirs, ours) in enumerate(zip(expected, actual, strict=True)):
            assert (theirs is None) == (ours is None)
            if theirs is not None:
                assert_same(ours, theirs, f"result {i} of call {self.calls}")
        self.check_state()
        return said[0]

    def frame(self, batch: int = 1) -> Tensor | None:
        codes = self.codes(batch)
        return self.call(lambda gen: gen.step(codes))  # type: ignore[no-any-return]

    def prompt_frame(self, text: Any = 3) -> Any:
        codes, others = self.codes(), self.codes(seed=1)
        return self.call(lambda gen: gen.step(moshi_tokens=others, text_token=text, input_tokens=codes))

    def spoken_frame(self) -> Any:
        """A frame of a voice prompt that is kept as embeddings."""
        width = self.reference.lm_model.dim
        embeddings = torch.randn(3, 1, 1, width, generator=torch.Generator().manual_seed(self.calls))
        return self.call(lambda gen: gen.step_embeddings(embeddings[1]))

    def check_state(self) -> None:
        assert_same_state(self.bound, self.reference, f"after call {self.calls}")
        for gen in self.both:
            assert all(layer._streaming_state is None for layer in gen.lm_model.depformer.layers)

    def each(self, method: str, *arguments: Any) -> None:
        for gen in self.both:
            getattr(gen, method)(*arguments)

    def check_counts(self, replays: int, **eager: int) -> None:
        """So many replays since warm-up, of one class, and nothing else but these eager calls."""
        (step,) = self.stream.steps.values()
        row = cadence_fx.report(step).as_dict()
        assert (row["replays"], row["classes"], row["captures"], row["misses"]) == (replays, 1, 1, {})
        assert row["effects"]["device-random"] == 1
        assert self.stream.eager_calls == {name.replace("_", " "): count for name, count in eager.items()}


def test_prompts_and_a_dialogue_with_resets_have_eagers_tokens(form: Form, tmp_path: Path) -> None:
    pair = Pair(form, text_prompt_tokens=[5, 7, 11])
    pair.each("streaming_forever", 1)
    pair.call(lambda gen: type(gen).step(gen, pair.codes()))
    pair.stream.warm_up(cadence_fx.warm_up)
    pair.check_state()  # an open stream goes on where it was
    pair.each("reset_streaming")
    said: list[Any] = [pair.spoken_frame() for _ in range(7)]
    assert said[0] is None  # the vendor makes the call that computes nothing with the first of them
    kept = torch.randint(30, pair.reference._streaming_state.cache.shape)
    for gen in pair.both:
        gen._streaming_state.cache.copy_(kept)  # of the session that has kept the prompt
    pair.call(lambda gen: gen.step_system_prompts(None))
    for _ in range(20):
        said.append(pair.frame())
    for text in (4, torch.tensor([6]), torch.tensor(8)):
        pair.prompt_frame(text)
    pair.each("reset_streaming")
    for _ in range(5):
        said.append(pair.prompt_frame())
    files = [str(tmp_path / name) for name in ("tensors", "numbers")]
    pair.bound.save_streaming_state(*files)
    for _ in range(2):
        for _ in range(9):
            said.append(pair.frame())
        for gen in pair.both:
            gen.set_streaming_state_inplace(form.streaming().load_streaming_state(*files))
        pair.check_state()
    said += [pair.frame() for _ in range(10)]
    assert sum(tokens is None for tokens in said) == 3
    assert len({tuple(tokens.flatten().tolist()) for tokens in said if tokens is not None}) > 40
    prompts = 5 if form.name == "small" else 2 + 3 + 2
    pair.check_counts(replays=7 + prompts + 20 + 3 + 4 + 18 + 10, first_call=1)
    pair.stream.unbind()  # in the middle of the stream
    for _ in range(4):
        pair.frame()


def test_two_streams_of_a_batch_are_exchanged(form: Form) -> None:
    pair = Pair(form)
    pair.stream.warm_up(cadence_fx.warm_up, 2)
    streams: list[list[Any]] = [[], []]
    for _ in range(2):
        pair.each("streaming_forever", 2)
        for gen, kept in zip(pair.both, streams, strict=True):
            kept.append(gen.get_streaming_state())
    for i in range(54):
        for gen, kept in zip(pair.both, streams, strict=True):
            gen.set_streaming_state(kept[i % 3 % 2])
        if i in (21, 34):
            pair.each("reset_streaming")
        pair.frame(2)
    pair.check_counts(replays=50, first_call=4)


def test_what_is_no_declared_frame_runs_the_vendors_code(form: Form) -> None:
    pair = Pair(form, backend=None)
    pair.each("streaming_forever", 1)
    for _ in range(4):
        pair.frame()
    codes, others = pair.codes(), pair.codes(seed=1)
    tokens, embeddings = pair.call(lambda gen: gen.step(codes, return_embeddings=True))
    assert tokens is not None and embeddings.shape == (1, 1, pair.reference.lm_model.dim)
    pair.call(lambda gen: gen.step(moshi_tokens=others, text_token=3))  # the user's codes are drawn
    for gen in pair.both:
        gen.check = True
    pair.frame()
    for gen in pair.both:
        gen.check = False
        with pytest.raises((AssertionError, ValueError), match="expect"):
            gen.step(codes[:, 1:])
    pair.check_state()
    pair.frame()
    assert pair.stream.eager_calls == {
        "first call": 1, "embeddings": 1, "undeclared size": 2, "host in the middle": 1,
    }  # fmt: skip
    outside = form.build_lm_gen()
    stream = PersonaDialogueStream(outside)
    for call in (outside.step, lambda given: outside.step_embeddings(embeddings)):
        with pytest.raises(RuntimeError, match="streaming"):
            call(codes)
    assert stream.eager_calls == {"not streaming": 2}


def test_a_frame_that_raises_leaves_nothing_behind(form: Form) -> None:
    pair = Pair(form, backend=None)
    pair.each("streaming_forever", 1)
    for _ in range(3):
        pair.frame()
    state, lm = pair.bound._streaming_state, pair.bound.lm_model
    before = dict(vars(state))
    weight, lm.linears[2].weight = lm.linears[2].weight, None
    with pytest.raises(TypeError):
        pair.bound.step(pair.codes())
    lm.linears[2].weight = weight
    assert all(vars(state)[name] is value for name, value in before.items())
    assert all(layer._streaming_state is None for layer in lm.depformer.layers)
    pair.each("streaming_forever", 1)
    for _ in range(4):
        pair.frame()


def test_unbinding_in_the_middle_goes_on_with_the_vendors_tokens(form: Form) -> None:
    pair = Pair(form, backend=None)
    pair.each("streaming_forever", 1)
    state = pair.bound._streaming_state
    graphs = state.graphed_main, state.graphed_embeddings, state.graphed_depth
    for graph in graphs:
        graph.disable = False  # as on a GPU
    for _ in range(5):
        pair.frame()
    assert all(graph.disable for graph in graphs)
    pair.stream.unbind()
    assert not any(graph.disable for graph in graphs) and not {"step", "step_embeddings"} & vars(pair.bound).keys()
    assert (state.graphed_main, state.graphed_embeddings, state.graphed_depth) == graphs
    for graph in graphs:
        graph.disable = True
    for _ in range(5):
        pair.frame()


def test_what_is_not_declared_is_refused(form: Form) -> None:
    gen = form.build_lm_gen()
    stream = PersonaDialogueStream(gen)
    with pytest.raises(ContractError, match="bound already"):
        PersonaDialogueStream(gen)
    stream.unbind()
    with pytest.raises(ContractError, match="expected the LMGen of PersonaPlex"):
        PersonaDialogueStream(gen.lm_model)


def test_the_contract_has_one_class_and_a_ring_of_tokens(form: Form) -> None:
    step = DialogueStep(form.build_lm_gen(), 3)
    contract = step.contract()
    assert contract_for(step) == contract and len(contract.catalog()) == 1
    assert (contract.region("cache").bound, contract.region("provided").bound) == (4, 4)
    assert contract.region("lm_model.transformer.layers.*.self_attn.kv_cache.cache").bound == 12
