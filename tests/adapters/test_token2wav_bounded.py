"""The adapter on the second package: its bounded causal vocoder and its separate trim, against the vendor's stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import cadence_fx
from bench import vendor
from cadence_fx.adapters import contract_for
from cadence_fx.adapters.token2wav import Geometry, Reach, Token2WavStream
from cadence_fx.adapters.token2wav_bounded import BoundedBinding, plain_products
from cadence_fx.bytesops import bytes_equal
from cadence_fx.errors import ContractError
from tests.adapters.pair import Pair

pytestmark = pytest.mark.skipif(
    not vendor.available(vendor.MINICPMO_UTILS), reason="the vendor package minicpmo-utils is not installed"
)

# The same reach as released would be 39 frames; short histories leave the same three inner blocks.
SIZES = replace(vendor.SMALL, vocoder_kernels=(11,), vocoder_dilations=(1, 3))
FLUSH = tuple(range(2, 29))
RELEASED = Reach(block=16, f0_left=8, f0_right=3, history=31, right=5, samples=480, harmonics=9)


def pair_of(sizes: vendor.Sizes = SIZES, **options: Any) -> Pair:
    pair = Pair(sizes, vendor.MINICPMO_UTILS, **options)
    pair.start()
    return pair


def test_a_session_with_turns_and_flushes_has_the_vendors_bytes() -> None:
    pair = pair_of(flush=FLUSH)
    for normal, final in [(5, 0), (3, 9), (6, 28), (1, 2), (0, 20)]:
        for _ in range(normal):
            pair.call()
        pair.call(final, last_chunk=True)
        pair.start()
    # A last call of 2 tokens or of 20 begins or ends nothing that is not declared.
    assert pair.stream.eager_calls == {"priming": 1}


def test_the_released_vocoder_has_the_declared_reach() -> None:
    pair = pair_of(vendor.SMALL)
    assert pair.stream.vocoder.reach == RELEASED
    assert (RELEASED.mel, RELEASED.source) == (39, 36)
    for _ in range(3):
        pair.call()
    pair.call(9, last_chunk=True)


def test_every_last_call_has_the_vendors_bytes() -> None:
    pair = pair_of(flush=FLUSH)
    for count in FLUSH:
        pair.call()
        pair.call(count, last_chunk=True)
        pair.start()
    assert pair.stream.eager_calls == {"priming": 1}


def test_sizes_that_are_not_declared_run_the_vendors_code() -> None:
    pair = pair_of()
    pair.call(5)  # 4 frames, of which no excitation is known yet
    pair.call()  # finds a cache that is neither empty nor full
    pair.call()
    pair.call(12, last_chunk=True)
    assert pair.stream.eager_calls == {"priming": 1, "undeclared size": 2, "undeclared vocoder size": 3}


def test_a_rollback_by_clones_continues_with_the_vendors_bytes() -> None:
    pair = pair_of()
    pair.call()
    pair.call()
    subjects = (pair.reference, pair.stream.token2wav)
    saved = [
        [{k: v.clone() for k, v in cache.items()} for cache in (subject.stream_cache, subject.hift_cache_dict)]
        for subject in subjects
    ]
    pair.call()
    pair.call()
    for subject, (flow, vocoder) in zip(subjects, saved, strict=True):
        subject.stream_cache, subject.hift_cache_dict = flow, vocoder
    pair.check_state()
    pair.call()
    pair.call(0, last_chunk=True)
    assert pair.stream.eager_calls == {"priming": 1}


def test_counters_that_do_not_fit_the_caches_run_the_vendors_code() -> None:
    pair = pair_of()
    pair.call()
    for subject in (pair.reference, pair.stream.token2wav):
        subject.hift_cache_dict["speech_offset"] = subject.hift_cache_dict["speech_offset"] + 480  # a frame too many
    pair.call()
    assert pair.stream.eager_calls == {"priming": 1, "undeclared vocoder size": 1}


def test_the_noise_goes_round_in_its_table() -> None:
    vocoder = pair_of(replace(SIZES, noise_seconds=1)).stream.vocoder
    table = vocoder._bounded.model.m_source.l_sin_gen.sine_waves
    wrapped = vocoder._noise(45, 10)  # frames 45 to 54 of a table of 50
    assert bytes_equal(wrapped, torch.cat([table[:, 45 * 480 :], table[:, : 5 * 480]], dim=1))
    assert wrapped.stride() == vocoder._noise(0, 10).stride()


def test_errors_are_the_vendors() -> None:
    pair = pair_of()
    pair.call()
    pair.call(0, last_chunk=True)
    pair.call(0, last_chunk=True)  # nothing is left, and nothing is wrong
    for subject in (pair.reference, pair.stream.token2wav):
        with pytest.raises(ValueError, match="already finalized"):
            subject.stream(vendor.build_tokens(1, 28)[0])
        with pytest.raises(ValueError, match="Non-final chunk"):
            subject.stream([1, 2, 3])
        subject.bounded_vocoder.reset()
        with pytest.raises(ValueError, match="Require fresh mel"):
            subject.bounded_vocoder.stream(torch.zeros(1, 3, 8))


def test_audio_that_is_not_finite_is_refused_as_by_the_vendor() -> None:
    pair = pair_of()
    for subject in (pair.reference, pair.stream.token2wav):
        with torch.no_grad():
            subject.hift.conv_post.bias.fill_(float("nan"))
        with pytest.raises(RuntimeError, match="non-finite"):
            subject.stream(vendor.build_tokens(1, 28)[0])


def test_the_token_rate_cache_keeps_its_prompt_and_its_newest_tokens() -> None:
    pair = pair_of()
    prompt, seen = SIZES.prompt_frames // 2, []
    for _ in range(5):
        pair.call()
        seen.append(pair.stream.token2wav.stream_cache["conformer_token_cache"].clone())
    assert [state.shape[3] for state in seen] == [77, 102, 102, 102, 102]
    assert bytes_equal(seen[2][:, :, :, :prompt], seen[4][:, :, :, :prompt])
    assert not bytes_equal(seen[3][:, :, :, prompt:], seen[4][:, :, :, prompt:])
    assert bytes_equal(seen[3][:, :, :, prompt + 25 :], seen[4][:, :, :, prompt : prompt + 25])


def test_the_encoder_is_bound_without_the_compiler_around_it() -> None:
    token2wav = vendor.build_token2wav(SIZES, package=vendor.MINICPMO_UTILS)
    encoder, vocoder = token2wav.flow.encoder, token2wav.bounded_vocoder
    assert hasattr(type(encoder).forward_chunk, "_torchdynamo_orig_callable")
    stream = Token2WavStream(token2wav)
    assert not hasattr(encoder.forward_chunk, "_torchdynamo_orig_callable")
    stream.unbind()
    assert "forward_chunk" not in vars(encoder) and "stream" not in vars(vocoder)
    assert "decode" not in vars(vocoder.model)


def test_which_prompt_is_bound_must_be_known() -> None:
    token2wav = vendor.build_token2wav(SIZES, package=vendor.MINICPMO_UTILS)
    token2wav.cache["another.wav"] = next(iter(token2wav.cache.values()))
    stream = Token2WavStream(token2wav)
    with pytest.raises(ContractError, match="which prompt is bound"):
        stream.prime()
    stream.prime("another.wav")


def test_released_numbers_follow_from_the_reach() -> None:
    geometry = Geometry(prompt=302, steps=10, flush=(1, 2, 9, 28), two_rates=True)
    joined, first = (RELEASED.contract(geometry, joined=joined) for joined in (True, False))
    assert {entry.extent_of("mel_cache") for entry in joined.catalog()} == {39}
    assert {entry.extent_of("source") for entry in joined.catalog()} == {36 * 480}
    assert [entry.advance_of("frame") for entry in joined.catalog()] == [50, 2, 4, 18, 56]
    # 2 frames alone make no excitation: the pitch of a frame is known 3 frames later.
    assert [entry.advance_of("frame") for entry in first.catalog()] == [50, 4, 18, 56]
    assert [first.inputs[1].size(frames) for frames in (50, 4)] == [47 * 480, 480]
    held = [entry.advance_of("held") for entry in RELEASED.final_contract(geometry).catalog()]
    assert held == [39, 4, 18]
    conformer = replace(geometry, flush=()).conformer_contract()
    assert [entry.extent_of("token_cache") for entry in conformer.catalog()] == [151, 176, 201]


def test_caches_that_would_begin_at_different_frames_are_refused() -> None:
    with pytest.raises(ContractError, match="history of 7 frames must cover the 8"):
        replace(RELEASED, history=7)


def test_products_are_multiplied_by_python_in_the_shipped_code() -> None:
    model = vendor.build_causal_vocoder(SIZES)
    plain = plain_products(model.decode)
    mel, source = torch.randn(1, SIZES.mel, 20), torch.randn(1, 1, 20 * 480)
    with torch.inference_mode():
        assert bytes_equal(plain(mel, source, finalize=False), model.decode(mel, source, finalize=False))
    assert plain.__code__ is type(model).decode.__code__  # type: ignore[attr-defined]


@pytest.fixture
def bound() -> Iterator[tuple[Any, BoundedBinding]]:
    """A vocoder of two blocks a chunk, compiled, beside one as shipped; 24 frames a chunk."""
    sizes = replace(SIZES, vocoder_dilations=(1,))
    reference, token2wav = (vendor.build_token2wav(sizes, package=vendor.MINICPMO_UTILS) for _ in range(2))
    geometry = Geometry(prompt=104, steps=2, hop=12)

    def compiled(step: torch.nn.Module, contract: cadence_fx.Contract) -> Any:
        assert contract_for(step) == contract
        options: dict[str, Any] = {"contract": contract}
        return torch.compile(step, backend=cadence_fx.cadence, dynamic=False, options=options)

    binding = BoundedBinding(token2wav, geometry, compiled, Counter())
    with torch.inference_mode():
        for step, given in binding.calls():
            cadence_fx.warm_up(step, *given)
        yield reference.bounded_vocoder, binding


def test_compiled_every_declared_call_replays(bound: tuple[Any, BoundedBinding]) -> None:
    reference, binding = bound
    vocoder = binding._bounded
    draw = torch.Generator().manual_seed(0)
    for frames in ([24] * 6 + [0], [24] * 5 + [0], [24, 24, 0]):
        reference.reset()
        vocoder.reset()
        for call, count in enumerate(frames):
            mel = torch.randn(1, SIZES.mel, count, generator=draw)
            last = call == len(frames) - 1
            assert bytes_equal(reference.stream(mel, finalize=last), vocoder.stream(mel, finalize=last))
            assert reference.cache.keys() == vocoder.cache.keys()
            assert all(bytes_equal(value, vocoder.cache[name]) for name, value in reference.cache.items())
    reports = [cadence_fx.report(step) for step in (*binding.steps.values(), binding.final)]
    assert [report["replays"] for report in reports] == [3, 10, 3]
    assert not any(report["misses"] or report["late_captures"] for report in reports)
    assert set(reports[1]["retention"].values()) == {"proved"}
    assert not binding._eager_calls
