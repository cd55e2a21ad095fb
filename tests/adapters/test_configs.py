"""Plans from released configurations: the numbers of the paper's tables 2 and 3, and those of the vendors' modules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import vendor
from cadence_fx import plan_example
from cadence_fx.adapters.moshi import MimiStream
from cadence_fx.adapters.moshi_lm import DialogueStream
from cadence_fx.adapters.readers import READERS, deployment
from cadence_fx.adapters.token2wav import Token2WavStream
from cadence_fx.backend import declared_contract
from cadence_fx.deployment import Deployment
from cadence_fx.errors import ContractError
from cadence_fx.plan_example import from_example
from cadence_fx.plan_report import PlanReport
from cadence_fx.planned import read_table
from cadence_fx.planner import plan

FLOW_YAML = """\
flow: !new:cosyvoice2.flow.flow.CausalMaskedDiffWithXvec
  input_size: 512
  output_size: 80
  spk_embed_dim: 192
  output_type: mel
  vocab_size: 6561
  encoder: !new:cosyvoice2.transformer.upsample_encoder_v2.UpsampleConformerEncoderV2
    input_size: 512
    output_size: 512
    input_layer: linear
    pre_lookahead_len: 3
    num_blocks: 6
    num_up_blocks: 4
    up_stride: 2
    up_scale_factor: 2
    attention_heads: 8
    pos_enc_layer_type: rel_pos_espnet
    key_bias: true
    linear_units: 2048
    dropout_rate: 0.1
  decoder: !new:cosyvoice2.flow.flow_matching.CausalConditionalCFM
    inference_cfg_rate: 0.7
    estimator: !new:cosyvoice2.flow.decoder_dit.DiT
      in_channels: 320
      out_channels: 80
      mlp_ratio: 4.0
      depth: 16
      num_heads: 8
      head_dim: 64
      hidden_size: 512
"""
WINDOW = {"text_window_high_tokens": 8000, "text_window_low_tokens": 6000}
DUPLEX = {"sliding_window_mode": "basic", "basic_window_high_tokens": 4000, "basic_window_low_tokens": 3500}
MIMI = {
    "sample_rate": 24000, "frame_rate": 12.5, "seanet": {"ratios": [8, 6, 5, 4], "n_filters": 64, "dimension": 512},
    "transformer": {"d_model": 512, "num_heads": 8, "num_layers": 8, "context": 250},
}  # fmt: skip
LM = {"dim": 4096, "num_heads": 32, "num_layers": 32, "context": 3000, "n_q": 16, "delays": [0, 0, *[1] * 7] * 2}
SERVER = {"decoder_first_chunk_size": 20, "decoder_chunk_size": 40, "decoder_chunk_overlap_size": 10, "decoder_N": 2401}

# Fields that the published files have beside those that are read; none of them is a misspelling.
BACKBONE = {
    "architectures": ["MiniCPMO"], "attention_bias": False, "head_dim": 128, "hidden_size": 4096,
    "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36, "num_attention_heads": 32,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "sliding_window": None, "use_sliding_window": False,
    "torch_dtype": "bfloat16", "vocab_size": 151748, "vision_config": {"hidden_size": 1152},
    "tts_config": {
        "attention_type": "sliding_recompute", "audio_tokenizer_type": "s3tokenizer", "hidden_size": 768,
        "num_attention_heads": 12, "num_hidden_layers": 20, "num_key_value_heads": 12, "recomputed_chunks": 1,
        "s3_stream_chunk_size": 25, "s3_stream_prelook_size": 3, "streaming_audio_chunk_size": 50,
        "streaming_sliding_window": False, "streaming_sliding_window_audio_window_size": 300,
        "streaming_text_chunk_max": 7, "streaming_text_chunk_min": 3, "streaming_text_reserved_len": 300,
        "window_size": 2,
    },
}  # fmt: skip

FAMILY_FILES: dict[str, dict[str, Any]] = {
    "token2wav": {},
    "lychee-fd": {},
    "minicpm-o": {**BACKBONE, **WINDOW},
    "moshi": {**MIMI, **LM, "dep_q": 8},
    "personaplex": {**MIMI, **LM, "dep_q": 16},
    "freeze-omni": {**SERVER, "upsample_rates": [8, 5, 5, 3], "upsample_initial_channel": 512},
}


@pytest.fixture(scope="module")
def flow_yaml(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("config") / "flow.yaml"
    path.write_text(FLOW_YAML)
    return read_table(path)


def planned(flow_yaml: dict[str, Any], name: str, more: dict[str, Any], **options: str) -> PlanReport:
    return plan(deployment(name, {**flow_yaml, **FAMILY_FILES[name], **more}, options))


# family, more of its configuration, options, callable, region; stride, start, bound, K, stock over live, verdict.
# Table 3 of the paper evaluates K = ceil(W / s) + 1 on released configurations, table 2 what is allocated over what is
# live: 16 x 1000 rows over 10 x 458 is 3.49, over 5 x 458 it is 6.99 (section 2.2.2 and 3.1: 3.5 and 7.0).
ROWS: list[tuple[Any, ...]] = [
    ("token2wav", {}, {}, "token2wav.flow", "att_cache", 50, 302, 402, 3, 1.6, "captured"),
    ("token2wav", {}, {"steps": "5"}, "token2wav.flow", "att_cache", 50, 302, 402, 3, 3.2, "captured"),
    ("token2wav", {}, {"hop": "10"}, "token2wav.flow", "att_cache", 20, 302, 402, 6, 1.6, "captured"),
    ("token2wav", {}, {}, "token2wav.flow", "workspace", 50, 402, 402, 1, 3.493, "pinned"),
    ("token2wav", {}, {"steps": "5"}, "token2wav.flow", "workspace", 50, 402, 402, 1, 6.987, "pinned"),
    ("token2wav", {}, {}, "token2wav.flow", "step_workspace", 50, 402, 402, 1, 2.183, "pinned"),
    ("token2wav", {}, {}, "token2wav.flow", "cnn_cache", 50, 2, 2, 1, 1.6, "pinned"),
    ("token2wav", {}, {"steps": "5"}, "token2wav.flow", "cnn_cache", 50, 2, 2, 1, 3.2, "pinned"),
    ("token2wav", {}, {}, "token2wav.flow", "cnn_step_workspace", 50, 2, 2, 1, 1.0, "pinned"),
    ("token2wav", {}, {}, "token2wav.flow", "noise", 0, 458, 458, 1, 65.502, "pinned"),
    ("token2wav", {}, {}, "token2wav.conformer", "positions", 0, 915, 915, 1, 10.928, "pinned"),
    ("token2wav", {}, {}, "token2wav.conformer", "token_cache", 25, 151, 201, 3, 2.0, "captured"),
    ("token2wav", {}, {}, "token2wav.conformer", "mel_cache", 50, 302, 402, 3, 1.0, "captured"),
    ("token2wav", {}, {"package": "minicpmo-utils"}, "token2wav.conformer", "token_cache", 25, 151, 201, 3, 2.0,
     "captured"),
    ("token2wav", {}, {"package": "minicpmo-utils"}, "token2wav.bounded", "source", 24000, 17280, 17280, 1, 1.0,
     "pinned"),
    ("token2wav", {}, {}, "token2wav.conformer", "cnn_cache", 25, 6, 6, 1, 1.0, "pinned"),
    ("token2wav", {}, {}, "token2wav.vocoder", "mel", 50, 0, 8, 2, 1.0, "captured"),
    ("token2wav", {}, {}, "token2wav.vocoder", "source", 24000, 0, 3840, 2, 1.0, "captured"),
    ("token2wav", {}, {}, "token2wav.vocoder", "speech", 24000, 0, 3840, 2, 1.0, "captured"),
    ("lychee-fd", {}, {}, "token2wav.conformer", "mel_cache", 50, 302, None, None, None, "unbounded"),
    ("lychee-fd", {}, {}, "token2wav.flow", "att_cache", 50, 302, 402, 3, 1.6, "captured"),
    ("minicpm-o", {}, {}, "backbone", "kv_cache", 1, 6000, 8000, 2001, None, "too wide"),
    ("minicpm-o", DUPLEX, {}, "backbone", "kv_cache", 1, 3500, 4000, 501, None, "too wide"),
    ("minicpm-o", {"sliding_window_mode": "context"}, {}, "backbone", "kv_cache", 1, 0, None, None, None,
     "traffic-dependent"),
    ("minicpm-o", {}, {}, "speech_token_decoder", "kv_cache", 1, 2, 2, 1, None, "traffic-dependent"),
    ("moshi", {}, {}, "mimi.encode", "ring", 2, 250, 250, 1, 1.0, "pinned"),
    ("moshi", {}, {}, "mimi.decode", "up.0", 16, 8, 8, 1, 1.0, "pinned"),
    ("moshi", {}, {}, "lm.step", "ring", 1, 3000, 3000, 1, 1.0, "pinned"),
    ("moshi", {}, {}, "lm.step", "cache", 1, 3, 3, 1, 1.0, "pinned"),
    ("moshi", {}, {}, "lm.step", "depth_ring", 0, 8, 8, 1, 1.0, "pinned"),
    ("personaplex", {}, {}, "mimi.decode", "ring", 2, 250, 250, 1, 1.0, "pinned"),
    ("personaplex", {}, {}, "mimi.decode", "conv_in", 6, 0, 6, 2, 1.0, "captured"),
    ("personaplex", {}, {}, "lm.step", "cache", 1, 4, 4, 1, 1.0, "pinned"),
    ("personaplex", {}, {}, "lm.step", "depth_ring", 0, 16, 16, 1, 1.0, "pinned"),
    ("freeze-omni", {}, {}, "generator", "window", 40, 50, 60, 2, 1.0, "captured"),
    ("freeze-omni", {}, {}, "generator.first_sentence", "window", 20, 30, 40, 2, 1.0, "captured"),
    ("freeze-omni", {}, {}, "generator.tail", "window", 1, 59, 59, 1, None, "traffic-dependent"),
    ("freeze-omni", {}, {}, "audio_encoder", "kv_cache", 4, 0, 64, 17, 1.0, "captured"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, (row[0], row[3], row[4], *row[2].values()))))
def test_regions_of_tables_2_and_3(row: tuple[Any, ...], flow_yaml: dict[str, Any]) -> None:
    family, more, options, callable_, name, *expected = row
    region = planned(flow_yaml, family, more, **options).region(callable_, name)
    ratio = region.over_reservation
    found = [region.stride, region.start, region.attended, region.classes, None if ratio is None else round(ratio, 3)]
    assert [*found, region.verdict.word] == expected


def test_the_numbers_in_the_text_of_the_paper(flow_yaml: dict[str, Any]) -> None:
    """Sections 2.2.2 and 3.1 to 3.5."""
    report = planned(flow_yaml, "minicpm-o", {})
    workspace = report.region("token2wav.flow", "workspace")
    assert workspace.stock_bytes == 2_097_152_000  # "2.1 GB of fp32 memory"
    assert workspace.envelope == 458 and report.region("token2wav.flow", "att_cache").attended == 402
    assert [report.region("token2wav.flow", "att_cache").extent(call) for call in range(4)] == [302, 352, 402, 402]
    halved = planned(flow_yaml, "minicpm-o", {}, steps="5").region("token2wav.flow", "workspace")
    assert round((workspace.stock_bytes or 0) / (halved.bytes or 1)) == 7  # "only one-seventh of that allocation"
    assert report.callable("token2wav.flow").classes == report.callable("token2wav.conformer").classes == 3
    assert report.callable("backbone").classes == 2001 and not report.capturable
    assert "3 to 7 text tokens" in report.callable("speech_token_decoder").verdict.reason
    moshi = planned(flow_yaml, "moshi", {})
    assert moshi.region("lm.step", "ring").bytes == 1500 << 20 and moshi.capturable


def test_flush_lengths_are_classes_more(flow_yaml: dict[str, Any]) -> None:
    report = planned(flow_yaml, "token2wav", {}, flush="1-24,28")
    assert report.callable("token2wav.flow").classes == 3 * 26
    assert report.callable("token2wav.flow").verdict.word == "captured"


@pytest.mark.parametrize("name", READERS)
def test_no_file_stands_for_the_released_values(name: str, flow_yaml: dict[str, Any]) -> None:
    assert plan(deployment(name)) == planned(flow_yaml, name, {})


@pytest.mark.skipif(not vendor.available(vendor.MOSHI), reason="the vendor package moshi is not installed")
def test_the_released_values_are_those_of_the_vendors_loaders() -> None:
    loaders = vendor.load("models.loaders", vendor.MOSHI)
    assert plan(deployment("moshi", {**loaders._mimi_config, **loaders._lm_kwargs})) == plan(deployment("moshi"))


@pytest.mark.parametrize(
    "attention, classes, word",
    [("full_attention", None, "unbounded"), ("sliding_window", 301, "too wide"),
     ("sliding_recompute", 1, "traffic-dependent")],
)  # fmt: skip
def test_attention_of_the_speech_token_decoder(attention: str, classes: int | None, word: str) -> None:
    report = plan(deployment("minicpm-o", {"tts_config": {"attention_type": attention}}))
    region = report.region("speech_token_decoder", "kv_cache")
    assert region.classes == classes and region.verdict.word == word


# -- bad configurations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, config, options, told",
    [
        ("tokne2wav", {}, {}, "did you mean 'token2wav'?"),
        ("token2wav", {}, {"stpes": "5"}, "did you mean 'steps'?"),
        ("token2wav", {}, {"steps": "-5"}, "expected a whole number, found '-5'"),
        ("token2wav", {}, {"steps": "0"}, "expected at least 1, found 0"),
        ("token2wav", {}, {"hop": "2.5"}, "expected a whole number, found '2.5'"),
        ("token2wav", {}, {"steps": "9" * 5000}, "expected a whole number"),
        ("token2wav", {}, {"flush": "1-999999999"}, "a range of at most 4,096 numbers"),
        ("token2wav", {}, {"prompt": "301"}, "must be whole tokens of 2 frames"),
        ("token2wav", {}, {"prompt": "50"}, "at least the 100 frames"),
        ("token2wav", {}, {"package": "stepaudio"}, "did you mean 'stepaudio2'?"),
        ("token2wav", {"flow": 3}, {}, "field 'flow': expected a table, found int"),
        ("token2wav", {"flow": {"decoder": {"estimator": {"dpeth": 16}}}}, {}, "did you mean 'depth'?"),
        ("token2wav", {"flow": {"decoder": {"estimator": {"depth": 0}}}}, {}, "expected at least 1, found 0"),
        ("token2wav", {"flow": {"decoder": {"estimator": {"depth": True}}}}, {}, "expected a whole number, found True"),
        ("token2wav", {"flow": {"decoder": {"estimator": {"depth": 16.5}}}}, {}, "expected a whole number, found 16.5"),
        ("token2wav", {"flow": {"encoder": {"up_stride": 1 << 60}}}, {}, "expected at most 1,099,511,627,776"),
        ("token2wav", {"flow": {"encoder": {"attention_heads": 7}}}, {}, "7 do not divide flow.encoder.output_size"),
        ("minicpm-o", {"text_window_low_tokens": 9000}, {}, "the low watermark 9000 is above the high one, 8000"),
        ("minicpm-o", {"tts_config": {"attention_type": "sliding"}}, {}, "did you mean 'sliding_window'?"),
        ("moshi", {"frame_rate": 0}, {}, "field 'frame_rate': expected a number above 0"),
        ("moshi", {"frame_rate": float("nan")}, {}, "field 'frame_rate': expected a number above 0"),
        ("moshi", {"frame_rate": 7}, {}, "7 does not divide sample_rate = 24000"),
        ("moshi", {"seanet": {"ratios": [7, 6, 5, 4]}}, {}, "is no multiple of 840"),
        ("moshi", {"seanet": {"ratios": []}}, {}, "expected 1 to 16 whole numbers"),
        ("moshi", {"seanet": {"ratios": [8, -6]}}, {}, "expected whole numbers from 1 on, found -6"),
        ("moshi", {"delays": "0, 1"}, {}, "field 'delays': expected 1 to 256 whole numbers"),
        ("freeze-omni", {"decoder_chunk_size": None}, {}, "field 'decoder_chunk_size': expected a whole number"),
    ],
)
def test_nonsense_is_refused_by_field(family: str, config: Any, options: dict[str, str], told: str) -> None:
    with pytest.raises(ContractError) as error:
        deployment(family, config, options)
    assert told in str(error.value)


# -- against the vendors' modules -------------------------------------------------------------------------------------


def compared(read: Deployment, measured: list[Deployment]) -> None:
    """Each callable has the bytes, the classes and the operators that the module's own tensors and graph have."""
    ours, theirs = plan(read), plan(*measured)
    assert [each.name for each in ours.callables] == [each.name for each in theirs.callables]
    for each in theirs.callables:
        found = ours.callable(each.name)
        for region in each.regions:
            assert found_region(found, region.name) == found_region(each, region.name), region.name
        assert (found.classes, found.staging_bytes) == (each.classes, each.staging_bytes), each.name
        assert found.operators == pytest.approx(each.operators or found.operators, abs=2)


def found_region(report: Any, name: str) -> tuple[Any, ...]:
    region = {region.name: region for region in report.regions}[name]
    return region.start, region.attended, region.envelope, region.classes, region.bytes


@pytest.mark.parametrize(
    "name, package", [("stepaudio2", vendor.STEPAUDIO2), ("minicpmo-utils", vendor.MINICPMO_UTILS)]
)
def test_token2wav_weighs_what_its_modules_do(name: str, package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not vendor.available(package):
        pytest.skip("the vendor package is not installed")
    if package == vendor.MINICPMO_UTILS:  # its vocoder takes long to trace
        monkeypatch.setattr(plan_example, "count_operators", lambda *_: (None, None))
    sizes = replace(vendor.SMALL, depth=2, steps=2, blocks=3, up_blocks=1)
    config = {"flow": {
        "output_size": sizes.mel,
        "encoder": {"num_blocks": 3, "num_up_blocks": 1, "attention_heads": sizes.encoder_heads,
                    "output_size": sizes.encoder},
        "decoder": {"estimator": {"depth": 2, "num_heads": sizes.heads, "head_dim": sizes.head_dim,
                                  "hidden_size": sizes.hidden}},
    }}  # fmt: skip
    options = {"prompt": str(sizes.prompt_frames), "steps": "2", "package": name}
    read = deployment("token2wav", config, options)
    token2wav = vendor.build_token2wav(sizes, package=package)
    shipped = {name: buffer.nbytes for name, buffer in token2wav.flow.named_buffers()}
    stream = Token2WavStream(token2wav, backend=None)
    stream.prime()
    measured = stream.warm_up(lambda step, *args: from_example(step, args, contract=declared_contract(step)))
    compared(read, measured)
    stock = {region.name: region.stock_bytes for region in plan(read).callable("token2wav.flow").regions}
    for region, buffer in (("workspace", "att_cache_buffer"), ("step_workspace", "estimator.att_cache_buffer"),
                         ("cnn_workspace", "cnn_cache_buffer")):  # fmt: skip
        assert stock[region] == shipped[f"decoder.{buffer}"]
    assert stock["noise"] == token2wav.flow.decoder.rand_noise.nbytes


@pytest.mark.skipif(not vendor.available(vendor.MOSHI), reason="the vendor package moshi is not installed")
def test_moshi_weighs_what_its_modules_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_example, "count_operators", lambda *_: (None, None))
    codec, lm = vendor.SMALL_MIMI, vendor.SMALL_MOSHI
    config = {
        "seanet": {"n_filters": codec.filters, "dimension": codec.width},
        "transformer": {"d_model": codec.width, "num_heads": codec.heads, "num_layers": codec.layers,
                        "context": codec.context},
        "dim": lm.width, "num_heads": lm.heads, "num_layers": lm.layers, "context": lm.context,
        "depformer_dim": lm.depth_width, "depformer_num_heads": lm.depth_heads, "depformer_num_layers": lm.depth_layers,
    }  # fmt: skip
    report = plan(deployment("moshi", config))
    weighed: dict[str, dict[str, int]] = {}

    def measure(step: Any, *args: Any) -> None:
        found = plan(from_example(step, args, contract=step.contract()))
        states = {region.name: region.bytes or 0 for region in found.callables[0].regions}
        flags = sum(n for name, n in states.items() if name.endswith(("mask", "first", "offset", "offsets", "initial")))
        assert found.session_bytes is not None
        weighed[type(step).__name__] = {"state": found.session_bytes - flags, "ring": _ring(states)}

    with torch.no_grad():
        MimiStream(vendor.build_mimi(codec), backend=None).warm_up(measure)
        DialogueStream(vendor.build_lm_gen(lm), backend=None).warm_up(measure)
    for step, name in (("EncodeStep", "mimi.encode"), ("DecodeStep", "mimi.decode"), ("DialogueStep", "lm.step")):
        regions = {r.name: r.bytes or 0 for r in report.callable(name).regions if not r.shared}
        width = 2 if name == "lm.step" else 4  # the released model is in bfloat16, the small one in float32
        scale = 4 // width
        assert weighed[step]["ring"] == regions["ring"] * scale
        assert weighed[step]["state"] == sum(regions.values()) + regions["ring"] * (scale - 1)


def _ring(states: dict[str, int]) -> int:
    return sum(count for name, count in states.items() if name.endswith("kv_cache.cache"))


def test_a_configuration_in_json_is_read_alike(tmp_path: Path) -> None:
    (tmp_path / "server.json").write_text(json.dumps(SERVER))
    assert read_table(tmp_path / "server.json") == SERVER
