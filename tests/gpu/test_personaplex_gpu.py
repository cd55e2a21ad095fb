"""PersonaPlex and its codec on a device, small: replayed frames have eager's bytes, states and draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cadence_fx
from cadence_fx.adapters.personaplex import PersonaMimiStream
from cadence_fx.adapters.personaplex_lm import PersonaDialogueStream
from tests.adapters.moshi_pair import assert_same_state, check_replays
from tests.adapters.persona_forms import FORMS, Form
from tests.harness import assert_same

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
FRAMES = 200


@pytest.fixture(autouse=True)
def _eager_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_CUDA_GRAPH", "1")  # the reference is the vendor's eager code


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_two_hundred_frames_of_the_codec(form: Form) -> None:
    reference, bound = (form.build_mimi().to(DEVICE) for _ in range(2))
    stream = PersonaMimiStream(bound, backend=cadence_fx.cadence)
    stream.warm_up(cadence_fx.warm_up)
    for mimi in (reference, bound):
        mimi.streaming_forever(1)
    draw = torch.Generator().manual_seed(0)
    for frame in range(FRAMES):
        if frame % 60 in (1, 30):
            for mimi in (reference, bound):
                mimi.reset_streaming()
        samples = torch.randn(1, 1, form.samples, generator=draw).to(DEVICE)
        codes = [mimi.encode(samples) for mimi in (reference, bound)]
        assert_same(codes[1], codes[0], f"codes of frame {frame}")
        spoken = [mimi.decode(codes[0]) for mimi in (reference, bound)]
        assert_same(spoken[1], spoken[0], f"samples of frame {frame}")
        assert_same_state(bound, reference, f"after frame {frame}")
    assert not stream.eager_calls
    check_replays(stream.steps.values(), FRAMES)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_two_hundred_frames_of_prompts_and_a_dialogue(form: Form) -> None:
    reference, bound = (form.build_lm_gen(DEVICE) for _ in range(2))
    stream = PersonaDialogueStream(bound, backend=cadence_fx.cadence)
    stream.warm_up(cadence_fx.warm_up)
    for gen in (reference, bound):
        gen.streaming_forever(1)
    draw = torch.Generator().manual_seed(0)
    for frame in range(FRAMES):
        if frame == 90:
            for gen in (reference, bound):
                gen.reset_streaming()
        codes, others = (torch.randint(form.card, (1, form.codebooks, 1), generator=draw).to(DEVICE) for _ in range(2))
        embeddings = torch.randn(1, 1, reference.lm_model.dim, generator=draw).to(DEVICE)
        said: list[tuple[Any, torch.Tensor]] = []
        for gen in (reference, bound):
            torch.manual_seed(frame)
            if frame % 90 < 10:
                tokens = gen.step_embeddings(embeddings)
            elif frame % 90 < 20:
                tokens = gen.step(moshi_tokens=others, text_token=frame % 30, input_tokens=codes)
            else:
                tokens = gen.step(codes)
            said.append((tokens, torch.cuda.get_rng_state(DEVICE)))
        (expected, after), (actual, ours) = said
        assert (expected is None) == (actual is None)
        if expected is not None:
            assert_same(actual, expected, f"tokens of frame {frame}")
        assert torch.equal(after, ours), f"draws of frame {frame}"
        assert_same_state(bound, reference, f"after frame {frame}")
    assert not stream.eager_calls
    check_replays(stream.steps.values(), FRAMES)
