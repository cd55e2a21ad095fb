"""Our streaming module of the voice-activity model against the model that its authors release in the same wheel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bench.models import silero
from bench.speech import SPEECH, read_chunks, speech_spans

pytestmark = pytest.mark.skipif(
    silero.wheel_file("silero_vad.jit") is None, reason="the silero-vad wheel is not installed (make setup)"
)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(torch.int32).flatten().tolist()


def test_released_weights_load_strictly() -> None:
    model = silero.load()
    assert sum(parameter.numel() for parameter in model.parameters()) == 309_633
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())


def test_every_chunk_equals_the_released_script_in_bytes() -> None:
    """Same weights, same recording: probability and cell state, chunk by chunk."""
    script, model = silero.load_script()
    context, state = model.initial_state()
    for chunk in read_chunks(SPEECH):
        probability, context, state = model(chunk, context, state)
        assert bits(probability) == bits(script(chunk, silero.SAMPLE_RATE))
        assert bits(state) == bits(script._state)
        assert bits(context) == bits(script._context)


def test_the_wheel_holds_two_trainings() -> None:
    """The safetensors weights are not those of the script: only the fixed transform is shared. Hence `load_script`."""
    loaded, scripted = silero.load().state_dict(), silero.load_script()[1].state_dict()
    assert [name for name in loaded if torch.equal(loaded[name], scripted[name])] == ["stft_conv.weight"]


def test_speech_is_found_and_silence_is_not() -> None:
    """The recording has three sentences with 0.8 s and 0.6 s between them, and silence at both ends."""
    model = silero.load()
    context, state = model.initial_state()
    probabilities = []
    for chunk in read_chunks(SPEECH):
        probability, context, state = model(chunk, context, state)
        probabilities.append(probability.item())
    assert len(speech_spans(probabilities, 0.5, gap=8)) == 3
    assert max(probabilities[:10]) < 0.1 and max(probabilities[-5:]) < 0.1


def test_state_carries_the_stream() -> None:
    """Dropping either piece of state changes the answer: both are real state, not padding."""
    model = silero.load()
    chunks = read_chunks(SPEECH)[:40]
    fresh_context, fresh_state = context, state = model.initial_state()
    for chunk in chunks:
        last_context, last_state = context, state
        probability, context, state = model(chunk, context, state)
    assert bits(model(chunks[-1], last_context, last_state)[0]) == bits(probability)
    assert bits(model(chunks[-1], fresh_context, last_state)[0]) != bits(probability)
    assert bits(model(chunks[-1], last_context, fresh_state)[0]) != bits(probability)
