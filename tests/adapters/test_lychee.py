"""Lychee-FD: the decoder whose conformer is never trimmed, and whose server keeps streams by reference.

In two forms: the packaged classes of Step-Audio 2 with the trim taken out, and, when CADENCE_LYCHEE_FD names one, a
checkout of the repository.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import cadence_fx
from bench import vendor
from bench.vendor.token2wav import PROMPT
from cadence_fx import adapters
from cadence_fx.adapters.token2wav import Geometry
from cadence_fx.bytesops import bytes_equal
from cadence_fx.errors import CatalogTooWide

pytestmark = [
    pytest.mark.skipif(not vendor.available(), reason="the vendor package stepaudio2-minicpmo is not installed"),
    pytest.mark.filterwarnings("ignore:.*Disabling autocast"),
    pytest.mark.filterwarnings("ignore:.*autocast"),
]

SIZES = replace(vendor.SMALL, depth=1, blocks=1, vocoder_kernels=(11,), vocoder_dilations=(1,), vocoder=8)
FORMS = pytest.mark.parametrize(
    "form",
    [
        pytest.param(vendor.STEPAUDIO2, id="packaged classes without the trim"),
        pytest.param(
            vendor.LYCHEE_FD,
            id="checkout",
            marks=pytest.mark.skipif(
                not vendor.available(vendor.LYCHEE_FD), reason="CADENCE_LYCHEE_FD names no checkout of Lychee-FD"
            ),
        ),
    ],
)
OTHER = "other.wav"  # a prompt of another length
NAMES = [PROMPT, OTHER, PROMPT]


@pytest.fixture(autouse=True)
def _few_steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 solver steps in our form of the vendor's code, which has 10 of them as a literal."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if parameters.get("form") != vendor.LYCHEE_FD:
        monkeypatch.setattr("bench.vendor.lychee.STEPS", 2)
        monkeypatch.setattr("cadence_fx.adapters.token2wav.STEPS", 2)


def built(form: vendor.Package) -> Any:
    token2wav = vendor.build_lychee(SIZES, package=form)
    token2wav.cache[OTHER] = vendor.build_prompt(replace(SIZES, prompt_frames=110), seed=9).as_cache()
    return token2wav


def plan(calls: int) -> list[tuple[int, list[int]]]:
    """Three streams in turn, with calls of one after another now and then."""
    tokens = vendor.build_tokens(calls, 28)
    return [((i * i + i // 5) % 3, tokens[i]) for i in range(calls)]


def alone(form: vendor.Package, calls: list[tuple[int, list[int]]], names: list[str]) -> list[list[bytes]]:
    """What the vendor's code says for each stream when it has an object of its own."""
    return [
        vendor.interleaved_by_reference(built(form), [(0, tokens) for who, tokens in calls if who == number], [name])[0]
        for number, name in enumerate(names)
    ]


@FORMS
def test_a_long_response_with_flushes_has_the_vendors_bytes(form: vendor.Package) -> None:
    reference, bound = built(form), adapters.bind(built(form), backend=None)
    assert (bound.family, bound.release) == ("lychee-fd", "HITsz-TMG/Lychee-FD@7bb1068")
    for turn, (normal, last) in enumerate([(30, 5), (3, 28), (1, 1), (12, 17)]):
        for each in (reference, bound):
            each.set_stream_cache(PROMPT if turn % 2 else OTHER)
        for call in range(normal + 1):
            said = []
            for each in (reference, bound):
                torch.manual_seed(call)
                tokens = vendor.build_tokens(1, 28 if call < normal else last, seed=call)[0]
                said.append(each.stream(tokens, PROMPT if turn % 2 else OTHER, last_chunk=call == normal))
            assert said[0] == said[1], f"call {call} of turn {turn}"
        kept, packed = bound.stream_cache, reference.stream_cache["conformer_att_cache"]
        assert packed.shape[3] > 100 + 50 * normal and bytes_equal(kept["conformer_att_cache"], packed)
    assert bound.report().eager_calls == {
        "priming": 4, "unbounded conformer": 50, "undeclared size": 4, "undeclared vocoder size": 4
    }  # fmt: skip


@FORMS
def test_streams_by_reference_corrupt_each_other_in_the_vendors_code_and_not_in_ours(form: vendor.Package) -> None:
    calls = plan(21)
    expected = alone(form, calls, NAMES)
    assert vendor.interleaved_by_reference(built(form), calls, NAMES) != expected
    bound = adapters.bind(built(form), backend=None)
    assert vendor.interleaved_by_reference(bound, calls, NAMES) == expected


def test_compiled_the_solver_and_the_vocoder_replay_and_no_stream_corrupts_another() -> None:
    calls, names = [(who % 2, tokens) for who, tokens in plan(14)], [PROMPT, PROMPT]
    bound = adapters.bind(built(vendor.STEPAUDIO2))
    reports = bound.warm_up(prompts=[PROMPT])
    assert [report["classes"] for report in reports] == [3, 1, 1]
    assert vendor.interleaved_by_reference(bound, calls, names) == alone(vendor.STEPAUDIO2, calls, names)
    found = bound.report()
    assert found.eager_calls == {"priming": 3, "unbounded conformer": 14}
    for name, report in found.steps.items():
        assert (report["misses"], report["late_captures"]) == ({}, 0), name
    assert sum(report["replays"] for report in found.steps.values()) == 28
    assert list(found.refused) == ["token2wav.conformer[prompt=104, steps=2]"]
    assert "97 classes, and max_classes allows 64" in str(found)
    bound.unbind()
    assert "inference_chunk" not in vars(bound.flow)


def test_the_planner_refuses_the_conformer_with_the_arithmetic() -> None:
    geometry = Geometry(prompt=302, steps=10, trimmed=False)
    with pytest.raises(CatalogTooWide, match="93 classes"):
        geometry.conformer_contract().catalog()
    assert geometry.refusal is not None
    reason, detail = geometry.refusal
    assert reason == "unbounded conformer"
    assert detail == (
        "its caches are never trimmed: from 302 frames on they grow by 50 in each call, until the table of 5,000 "
        "positions ends. the contract reaches 93 classes, and max_classes allows 64: token_cache: "
        "ceil((2,451 - 151) / 25) + 1 = 93. Use a stride closer to the window, declare fewer flush lengths, or raise "
        "max_classes."
    )
    assert [entry.extent_of("att_cache") for entry in geometry.flow_contract().catalog()] == [302, 352, 402]
    assert Geometry(prompt=302, steps=10).refusal is None


def test_the_last_call_is_where_the_arithmetic_says() -> None:
    """With a table of 260 positions a prompt of 104 frames has three calls before it ends."""
    geometry = Geometry(prompt=104, steps=10, trimmed=False, positions=260)
    assert geometry.conformer_contract().width().classes == 3
    assert geometry.refusal is not None and "ceil((102 - 52) / 25) + 1 = 3" in geometry.refusal.detail
    subjects = built(vendor.STEPAUDIO2), built(vendor.STEPAUDIO2)
    for token2wav in subjects:
        for embed in (token2wav.flow.encoder.embed, token2wav.flow.encoder.up_embed):
            middle = embed.pos_enc.pe.shape[1] // 2
            embed.pos_enc.pe = embed.pos_enc.pe[:, middle - 259 : middle + 260]
    bound = adapters.bind(subjects[1], backend=None)
    for each in (subjects[0], bound):
        each.set_stream_cache(PROMPT)
        for tokens in vendor.build_tokens(3, 28):
            each.stream(tokens, PROMPT)
        with pytest.raises(RuntimeError, match="must match"):
            each.stream(vendor.build_tokens(1, 28)[0], PROMPT)
    assert geometry.refusal.detail in bound.report().refused.values()


def test_released_sizes_say_what_is_refused() -> None:
    (family,) = [family for family in adapters.families() if family.name == "lychee-fd"]
    refused = []
    for name, contract in family.contracts().items():
        try:
            contract.catalog()
        except cadence_fx.CatalogTooWide:
            refused.append(name)
    assert refused == ["token2wav.conformer"]
