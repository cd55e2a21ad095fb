"""The Token2Wav adapter against the vendor's own stream, on small random weights: every byte, over whole sessions."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

import cadence_fx
from bench import vendor
from cadence_fx.adapters import contract_for
from cadence_fx.adapters.token2wav import FLUSH_TOKENS, ConformerStep, FlowStep, Geometry, Token2WavStream
from cadence_fx.bytesops import bytes_equal, digest
from cadence_fx.errors import ContractError
from cadence_fx.parking import is_parked
from cadence_fx.passes import PassContext, run_passes
from cadence_fx.passes.graphs import erase_dead_code
from tests.adapters.pair import Pair
from tests.passes.test_placement import kernels, peak

pytestmark = [
    pytest.mark.skipif(not vendor.available(), reason="the vendor package stepaudio2-minicpmo is not installed"),
    pytest.mark.filterwarnings("ignore:.*Disabling autocast"),
]

SIZES, TINY = vendor.SMALL, vendor.TINY
RELEASED = Geometry(prompt=302, steps=10)


@pytest.fixture
def pair() -> Pair:
    pair = Pair()
    pair.start()
    return pair


def test_a_session_of_sixty_calls_with_turns_and_flushes_has_the_vendors_bytes(pair: Pair) -> None:
    turns = [(4, 1), (7, 28), (1, 3), (12, 25), (2, 17), (9, 7), (5, 26), (14, 2)]
    for normal, final in turns:
        for _ in range(normal):
            pair.call()
        pair.call(final, last_chunk=True)
        pair.start()
    assert pair.calls == 62
    # A last call of 25 tokens brings the vocoder as many frames as a normal one.
    assert pair.stream.eager_calls == {"priming": 1, "undeclared size": 8, "undeclared vocoder size": 7}


@pytest.mark.parametrize("before", [1, 2, 4], ids=["growing", "full at the flush", "full"])
def test_every_last_call_of_2_to_56_frames_has_the_vendors_bytes(pair: Pair, before: int) -> None:
    for count in FLUSH_TOKENS:
        for _ in range(before):
            pair.call()
        pair.call(count, last_chunk=True)
        pair.start()


def test_every_partial_flush_of_10_to_48_frames_has_the_vendors_bytes(pair: Pair) -> None:
    for count in range(8, 28):
        pair.call()
        pair.call(count)
        pair.call()  # an emission after the flush finds an extent that is no multiple of the stride
        pair.call(4, last_chunk=True)
        pair.start()


@pytest.mark.parametrize("prompt", [100, 104, 130], ids="P={}".format)
def test_the_token_rate_cache_keeps_its_first_frames_once_trimmed(prompt: int) -> None:
    pair = Pair(replace(SIZES, prompt_frames=prompt))
    pair.start()
    frozen = []
    for _ in range(5):
        pair.call()
        frozen.append(digest(pair.stream.token2wav.stream_cache["conformer_token_cache"]))
    assert frozen[0] != frozen[2]
    assert len(set(frozen[2:])) == 1


def test_a_turn_may_be_reset_as_the_application_does_it() -> None:
    # MiniCPM-o keeps clones of the two primed dictionaries and clones them back at each turn.
    pair = Pair()
    bound = pair.stream.token2wav
    vendor.start_turn(bound)
    base = {name: value.clone() for name, value in bound.stream_cache.items()}
    vocoder = {name: value.clone() for name, value in bound.hift_cache_dict.items()}
    for _ in range(2):
        vendor.start_turn(pair.reference)
        bound.stream_cache = {name: value.clone() for name, value in base.items()}
        bound.hift_cache_dict = {name: value.clone() for name, value in vocoder.items()}
        pair.check_state()
        for _ in range(4):
            pair.call()


def test_states_alias_neither_the_workspaces_nor_each_other(pair: Pair) -> None:
    pair.call()
    decoder = pair.stream.token2wav.flow.decoder
    owned = {
        decoder.att_cache_buffer.untyped_storage().data_ptr(),
        decoder.cnn_cache_buffer.untyped_storage().data_ptr(),
    }
    states = [value.untyped_storage().data_ptr() for value in pair.stream.token2wav.stream_cache.values()]
    assert owned.isdisjoint(states)
    assert len(set(states)) == len(states)
    assert all(value.is_contiguous() for value in pair.stream.token2wav.stream_cache.values())


def test_the_plain_steps_keep_what_the_contracts_say(pair: Pair) -> None:
    geometry, bound = pair.stream.geometry, pair.stream.token2wav
    regions = [("estimator_att_cache", geometry.flow_contract().region("att_cache"), 4, geometry.rate)]
    conformer = geometry.conformer_contract()
    regions.append(("conformer_token_cache", conformer.region("token_cache"), 3, 1))
    regions.append(("conformer_att_cache", conformer.region("mel_cache"), 3, geometry.rate))
    for count, last in [(28, False)] * 4 + [(9, True)]:
        before = {name: bound.stream_cache[name].clone() for name, *_ in regions}
        pair.call(count, last)
        for name, region, axis, rate in regions:
            old, new = before[name], bound.stream_cache[name]
            advance = geometry.fresh(count, last) * rate
            assert new.shape[axis] == region.next_extent(old.shape[axis], advance)
            position = 0
            for span in region.retention.survivors(old.shape[axis], advance) or ():
                if span.source == "old":
                    kept = new.narrow(axis, position, len(span))
                    assert bytes_equal(kept, old.narrow(axis, span.start, len(span))), f"{name} {span}"
                position += len(span)


def buffers(token2wav: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in token2wav.flow.decoder.named_buffers() if name.endswith("cache_buffer")}


def test_workspaces_are_sized_to_the_contract_and_given_back_bit_for_bit() -> None:
    token2wav = vendor.build_token2wav(SIZES)
    vendor.start_turn(token2wav)  # leaves bytes in the workspaces
    shipped = {name: value.clone() for name, value in buffers(token2wav).items()}
    stream = Token2WavStream(token2wav)
    sized = {name: tuple(value.shape) for name, value in buffers(token2wav).items()}
    assert sized == {
        "att_cache_buffer": (3, 2, 2, 2, 260, 32),
        "cnn_cache_buffer": (3, 2, 2, 64, 2),
        "estimator.att_cache_buffer": (2, 2, 2, 260, 32),
        "estimator.cnn_cache_buffer": (2, 2, 64, 2),
    }
    stream.prime()
    stream.stream(vendor.build_tokens(1, 28)[0])
    stream.unbind()
    restored = buffers(token2wav)
    assert restored.keys() == shipped.keys()
    assert all(bytes_equal(shipped[name], restored[name]) for name in shipped)
    assert not {"setup_cache", "inference_chunk"} & vars(token2wav.flow).keys()
    assert "forward_chunk" not in vars(token2wav.flow.encoder) and "forward" not in vars(token2wav.hift)
    assert {type(block.conv.block) for block in token2wav.flow.decoder.estimator.blocks} == {torch.nn.Sequential}


def test_slices_of_a_bound_sequence_compute_what_the_shipped_one_does() -> None:
    token2wav = vendor.build_token2wav(SIZES)
    sequence = token2wav.flow.decoder.estimator.blocks[0].conv.block
    x = torch.randn(2, 5, SIZES.hidden)
    shipped = sequence[2:6](x.transpose(1, 2)), sequence[-1], sequence[0]
    Token2WavStream(token2wav)
    assert type(sequence[2:6]) is not torch.nn.Sequential
    assert bytes_equal(sequence[2:6](x.transpose(1, 2)), shipped[0])
    assert sequence[-1] is shipped[1] and sequence[0] is shipped[2] and len(sequence) == 8


def test_after_unbind_the_vendors_stream_runs_as_before() -> None:
    reference, token2wav = vendor.build_token2wav(SIZES), vendor.build_token2wav(SIZES)
    stream = Token2WavStream(token2wav)
    stream.prime()
    stream.unbind()
    outputs = []
    for subject in (reference, token2wav):
        vendor.start_turn(subject)
        torch.manual_seed(0)
        outputs.append([subject.stream(tokens, None) for tokens in vendor.build_tokens(4, 28)])
    assert outputs[0] == outputs[1]


def test_released_numbers_follow_from_the_declaration() -> None:
    flow, conformer = RELEASED.flow_contract(), RELEASED.conformer_contract()
    assert [entry.extent_of("att_cache") for entry in flow.catalog()] == [302, 352, 402]
    assert [entry.extent_of("mel_cache") for entry in conformer.catalog()] == [302, 352, 402]
    assert [entry.extent_of("token_cache") for entry in conformer.catalog()] == [151, 176, 201]
    assert flow.envelope("workspace") == flow.envelope("step_workspace") == 458
    assert RELEASED.window == 402


def test_flush_sizes_add_their_classes() -> None:
    flushing = replace(RELEASED, flush=FLUSH_TOKENS)
    frames = {entry.advance_of("frame") for entry in flushing.flow_contract().catalog()}
    assert frames == set(range(2, 57, 2))
    assert len(flushing.flow_contract().catalog()) == len(flushing.conformer_contract(True).catalog()) == 3 * 28
    assert flushing.flow_contract().envelope("workspace") == 458
    assert flushing.declares(28, False) and flushing.declares(28, True) and flushing.declares(1, True)
    assert RELEASED.declares(28, False)
    assert not RELEASED.declares(25, True) and not RELEASED.declares(27, False)


@pytest.mark.parametrize("prompt", [103, 846, -2])
def test_a_prompt_that_the_vendor_has_no_room_for_is_refused(prompt: int) -> None:
    with pytest.raises(ContractError, match=f"a prompt of {prompt} frames cannot be declared.*so 844 at most"):
        Geometry(prompt=prompt, steps=10)
    Geometry(prompt=844, steps=10)


def test_float16_is_refused() -> None:
    token2wav = vendor.build_token2wav(SIZES)
    token2wav.float16 = True
    with pytest.raises(ContractError, match="float16"):
        Token2WavStream(token2wav)


def test_one_decoder_is_bound_once(pair: Pair) -> None:
    with pytest.raises(ContractError, match="bound already"):
        Token2WavStream(pair.stream.token2wav)


def test_a_failing_call_leaves_the_state_as_it_was(pair: Pair) -> None:
    pair.call()
    with pytest.raises(IndexError):
        pair.stream.stream([SIZES.vocabulary] * 28)
    pair.check_state()
    pair.call()


def test_contracts_are_found_by_class(pair: Pair) -> None:
    stream = pair.stream
    assert contract_for(stream.plain_flow) == stream.geometry.flow_contract()
    assert contract_for(stream.plain_conformer[True]) == stream.geometry.conformer_contract(True)
    assert contract_for(stream.token2wav.flow) is None


def test_the_steps_trace_to_one_graph_each_with_the_vendors_bytes() -> None:
    graphs = []

    def counting(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        graphs.append(gm)
        return gm.forward

    pair = Pair(TINY)
    stream = pair.stream
    stream.flow = torch.compile(
        FlowStep(stream.token2wav.flow.decoder, stream.geometry), backend=counting, fullgraph=True
    )
    stream.conformer[False] = torch.compile(
        ConformerStep(stream.token2wav.flow, stream.geometry), backend=counting, fullgraph=True
    )
    pair.start()
    for _ in range(5):
        pair.call()
    assert graphs


def steps_of(stream: Token2WavStream) -> list[Any]:
    return [stream.conformer[False], stream.flow, *stream.vocoder.steps.values()]


def test_compiled_every_declared_call_replays_and_has_the_vendors_bytes() -> None:
    pair = Pair(TINY, backend=cadence_fx.cadence)
    pair.start()
    before = {name: value.clone() for name, value in pair.stream.token2wav.stream_cache.items()}
    reports = pair.stream.warm_up(cadence_fx.warm_up, cadence_fx.restore)
    assert [report["classes"] for report in reports] == [3, 3, 1, 1]
    after = pair.stream.token2wav.stream_cache
    assert all(bytes_equal(value, after[name]) for name, value in before.items())
    for normal, final in [(2, 5), (5, 28), (1, 1), (4, 3)]:
        for _ in range(normal):
            pair.call()
        pair.call(final, last_chunk=True)
        pair.start()
    for step in steps_of(pair.stream)[:2]:
        report = cadence_fx.report(step)
        assert (report["replays"], report["late_captures"]) == (12, 0)
        assert set(report["retention"].values()) == {"proved"}
    assert [cadence_fx.report(step)["replays"] for step in pair.stream.vocoder.steps.values()] == [4, 8]
    assert not any(cadence_fx.report(step)["misses"] for step in steps_of(pair.stream))
    assert pair.stream.eager_calls == {"priming": 1, "undeclared size": 4, "undeclared vocoder size": 4}
    assert all(map(is_parked, buffers(pair.stream.token2wav).values()))  # no class uses them


def test_the_solver_writes_its_states_without_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, values and conv frames go from where they are made into the carries, and are freed behind it."""
    graphs: list[tuple[fx.GraphModule, fx.GraphModule, PassContext]] = []

    def run_and_keep(gm: fx.GraphModule, ctx: PassContext, *rest: Any) -> fx.GraphModule:
        after = run_passes(gm, ctx, *rest)
        if any(slot.destination for slot in ctx.regions):
            graphs.append((run_passes(gm, PassContext(), []), after, ctx))
        return after

    chosen = ["forward_stores", "elide_copies"]
    stream = Token2WavStream(vendor.build_token2wav(TINY), backend=cadence_fx.cadence, passes=chosen)
    stream.prime()
    monkeypatch.setattr("cadence_fx.ways.run_passes", run_and_keep)
    stream.warm_up(lambda step, *given: cadence_fx.warm_up(step, *given) if step is stream.flow else None)
    assert len(graphs) == 3
    cells = TINY.steps * TINY.depth
    for before, after, ctx in graphs:
        assert len(ctx.scratch_inputs) == 4
        assert not any(
            node.users for node in after.graph.find_nodes(op="placeholder") if node.name in ctx.scratch_inputs
        )
        # Gone for each cell: two cats of pairs and two copies. For each step: two copies, and two of the three cats
        # that pack its input. At the end: a cat and a clone. In their place: keys, values and frames of two convs.
        gone = 4 * cells + 4 * TINY.steps + 2
        erase_dead_code(before.graph)  # what the last step prepares for one more
        assert kernels(before) - kernels(after) == gone - 4 * cells
        assert peak(after) <= peak(before)
    full_before, full_after, _ = graphs[-1]  # where the window grows, rows move up, and some wait for others to be read
    assert peak(full_after) < 0.6 * peak(full_before)


def test_compiled_declared_flushes_replay_too() -> None:
    pair = Pair(TINY, backend=cadence_fx.cadence, flush=(9,))
    pair.start()
    reports = pair.stream.warm_up(cadence_fx.warm_up, cadence_fx.restore)
    assert [report["classes"] for report in reports] == [6, 6, 6, 2, 2]  # three extents, 25 or 9 fresh tokens
    for normal in (1, 2, 4):
        for _ in range(normal):
            pair.call()
        pair.call(9, last_chunk=True)
        pair.start()
        pair.call(12)
        pair.start()
    assert pair.stream.eager_calls == {"priming": 1}
    late = [cadence_fx.report(step)["late_captures"] for step in (*steps_of(pair.stream), pair.stream.conformer[True])]
    assert late == [0] * 5


def test_compiled_streams_pass_the_audit() -> None:
    pair = Pair(TINY, backend=cadence_fx.cadence)
    pair.start()
    pair.stream.warm_up(cadence_fx.warm_up, cadence_fx.restore)
    conformer, flow, _, vocoder = steps_of(pair.stream)
    with cadence_fx.audit(conformer) as encoded, cadence_fx.audit(flow) as solved, cadence_fx.audit(vocoder) as said:
        for _ in range(2):
            for _ in range(4):
                pair.call()
            pair.start()
    assert encoded.calls == solved.calls == 8
    assert said.calls == 6


def test_a_turn_reset_by_clones_is_adopted() -> None:
    """MiniCPM-o's way: clones made outside inference mode, which the backend has not seen before."""
    pair = Pair(TINY, backend=cadence_fx.cadence)
    pair.start()
    pair.stream.warm_up(cadence_fx.warm_up, cadence_fx.restore)
    bound = pair.stream.token2wav
    base = [{k: v.clone() for k, v in cache.items()} for cache in (bound.stream_cache, bound.hift_cache_dict)]
    for _ in range(2):
        bound.stream_cache, bound.hift_cache_dict = ({k: v.clone() for k, v in cache.items()} for cache in base)
        vendor.start_turn(pair.reference)
        for _ in range(4):
            pair.call()
    assert [cadence_fx.report(step)["late_captures"] for step in steps_of(pair.stream)] == [0] * 4


def test_importing_the_adapter_does_not_import_the_vendor() -> None:
    code = "import sys, cadence_fx.adapters.token2wav; assert not any(m.startswith('stepaudio2') for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
