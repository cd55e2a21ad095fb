"""The Token2Wav benchmark runs, compares bytes, and writes what its readers expect."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import vendor, vocoder
from bench.token2wav import ratios, short_name, table, without_folders
from bench.token2wav_variants import variant

ROOT = Path(__file__).resolve().parents[2]
ROW = {
    "median_ms", "p95_ms", "iqr_ms", "min_ms", "max_ms", "repeats", "peak_mib", "reserved_mib", "warmup_peak_mib",
    "warmup_s", "bytes_equal", "misses", "host_us",
}  # fmt: skip


@pytest.mark.skipif(
    not (vendor.available() and vendor.available(vendor.VLLM_OMNI)),
    reason="stepaudio2-minicpmo or vllm-omni is not installed",
)
def test_a_small_run_writes_equal_bytes_and_every_figure(tmp_path: Path) -> None:
    options = {
        "device": "cpu",
        "variants": "S,Rc,step-wrapper",
        "chunks": "3",
        "turns": "2",
        "tag": "smoke",
        "out": str(tmp_path),
    }
    command = [sys.executable, "-m", "bench.token2wav", "--small", f"--out={tmp_path}"]
    run = subprocess.run(command + [f"--{k}={v}" for k, v in options.items()], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    report = json.loads((tmp_path / "token2wav_cpu_small_smoke.json").read_text())
    assert {"bench", "device", "driver", "torch", "commit", "protocol", "variants", "ratios"} <= report.keys()
    assert list(report["variants"]) == ["B0", "S", "Rc", "step-wrapper"]
    for row in report["variants"].values():
        assert row.keys() == ROW
        assert (row["bytes_equal"], row["repeats"], row["misses"]) == (True, 6, {})
    assert "equal" in run.stdout


def test_ratios_name_what_was_measured_only() -> None:
    rows: dict[str, dict[str, Any]] = {
        "B0": {"median_ms": 200.0},
        "SRc": {"median_ms": 50.0},
        "reduce-overhead": {"error": "does not compile"},
    }
    assert ratios(rows) == {"eager/cadence": 4.0}
    assert ratios({"B0": {"median_ms": 1.0}}) == {}


def test_a_failed_variant_has_its_error_in_the_table() -> None:
    assert "cudagraphs        RuntimeError: no" in table({"cudagraphs": {"error": "RuntimeError: no"}})


@pytest.mark.skipif(
    not (vendor.available() and vendor.available(vendor.VLLM_OMNI)),
    reason="stepaudio2-minicpmo or vllm-omni is not installed",
)
def test_a_small_run_of_the_vocoder_compares_streams_and_times_both_sides(tmp_path: Path) -> None:
    options = {"device": "cpu", "packages": "hift", "protocols": "stock", "streams": "1", "chunks": "2", "repeats": "2"}
    command = [sys.executable, "-m", "bench.vocoder", "--small", f"--out={tmp_path}"]
    run = subprocess.run(command + [f"--{k}={v}" for k, v in options.items()], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    report = json.loads((tmp_path / "vocoder_cpu_small.json").read_text())
    assert {"bench", "device", "driver", "torch", "commit", "protocol", "variants", "ratios"} <= report.keys()
    assert list(report["variants"]) == [
        f"hift {part} stock {side}" for part in ("vocoder", "segment") for side in ("eager", "cadence")
    ]
    for row in report["variants"].values():
        assert (row["bytes_equal"], row["repeats"], row["misses"]) == (True, 2, {})
    assert report["matched_streams"]["hift stock"]["pcm_hashes_compared"] == 3


def test_streams_count_as_far_as_eager_repeats_itself() -> None:
    first, again, ours = (
        [(["m"], ["a", "b"]), (["n"], ["c", last])] for last in ("d", "x", "y")
    )  # the last call of the second stream: eager does not repeat it
    found = vocoder.compared(first, again, ours, {})
    assert (found["pcm_repeated_by_eager"], found["pcm_equal"], found["pcm_hashes_compared"]) == (1, 2, 3)
    assert found["bytes_equal"] and found["mel_equal"] == 2
    wrong = [(["m"], ["a", "z"])]
    assert not vocoder.compared(first[:1], again[:1], wrong, {})["bytes_equal"]
    all_equal, one_wrong = {"equal": 2, "compared": 2}, {"equal": 1, "compared": 2}
    assert vocoder.compared(first[:1], again[:1], wrong, all_equal)["bytes_equal"]
    assert not vocoder.compared(first[:1], again[:1], wrong, one_wrong)["bytes_equal"]
    assert not vocoder.compared(first[:1], again[:1], [(["x"], ["a", "b"])], all_equal)["bytes_equal"]


def test_ratios_of_the_vocoder_pair_the_two_sides() -> None:
    rows = {"hift vocoder stock eager": {"median_ms": 18.0}, "hift vocoder stock cadence": {"median_ms": 4.0}}
    assert vocoder.ratios(rows) == {"hift vocoder stock: eager/cadence": 4.5}


@pytest.mark.skipif(
    not (vendor.available() and vendor.available(vendor.VLLM_OMNI)),
    reason="stepaudio2-minicpmo or vllm-omni is not installed",
)
def test_a_small_run_of_the_passes_times_the_solver_alone(tmp_path: Path) -> None:
    options = {"device": "cpu", "variants": "SRc/plain", "chunks": "3", "turns": "1", "out": str(tmp_path)}
    command = [sys.executable, "-m", "bench.passes", "--small"] + [f"--{k}={v}" for k, v in options.items()]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    report = json.loads((tmp_path / "passes_cpu_small.json").read_text())
    assert list(report["variants"]) == ["B0", "SRc/plain"]
    for row in report["variants"].values():
        assert (row["bytes_equal"], row["repeats"], row["misses"]) == (True, 3, {})


@pytest.mark.skipif(
    not (vendor.available() and vendor.available(vendor.VLLM_OMNI)),
    reason="stepaudio2-minicpmo or vllm-omni is not installed",
)
def test_a_small_run_of_the_warm_up_tells_where_the_time_goes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.warm_up", "--small", "--device=cpu", f"--out={tmp_path}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    report = json.loads((tmp_path / "warm_up_cpu_small.json").read_text())
    row = report["variants"]["all classes"]
    assert (row["bytes_equal"], row["misses"]) == (True, {})
    steps = report["callables"]
    assert list(steps) == ["token2wav.conformer", "token2wav.flow", "token2wav.vocoder.first", "token2wav.vocoder"]
    assert [step["classes"] for step in steps.values()] == [3, 3, 1, 1]
    for step in steps.values():
        assert 0 < step["one_class_s"] <= step["seconds"] + 0.1
        assert abs(sum(step["phases_s"].values()) - step["seconds"]) < 0.5


@pytest.mark.skipif(
    not (vendor.available() and vendor.available(vendor.VLLM_OMNI)),
    reason="stepaudio2-minicpmo or vllm-omni is not installed",
)
def test_a_small_run_of_the_schedule_compares_both(tmp_path: Path) -> None:
    options = {"device": "cpu", "chunks": "3", "turns": "1", "out": str(tmp_path)}
    command = [sys.executable, "-m", "bench.schedule", "--small"] + [f"--{k}={v}" for k, v in options.items()]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    report = json.loads((tmp_path / "schedule_cpu_small.json").read_text())
    assert list(report["variants"]) == ["one stream", "side stream", "segment alone"]
    for row in report["variants"].values():
        assert (row["bytes_equal"], row["repeats"], row["misses"]) == (True, 3, {})


def test_variants_of_the_backend_are_spelled_by_their_passes() -> None:
    assert variant("SRc/plain").passes == ()  # type: ignore[attr-defined]
    assert variant("SRc/a,b").passes == ("a", "b")  # type: ignore[attr-defined]
    assert variant("SRc/+a,-b").passes == {"a": True, "b": False}  # type: ignore[attr-defined]
    with pytest.raises(KeyError):
        variant("B0/plain")


def test_a_kernel_is_named_without_its_parameters() -> None:
    name = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float)"
    assert short_name(name) == "vectorized_layer_norm_kernel<float, float>"


def test_notes_name_files_without_the_folders_of_a_machine() -> None:
    note = 'copy_ stays (File "/home/somebody/checkout/cadence_fx/adapters/token2wav_steps.py", line 44, in forward)'
    assert without_folders(note) == 'copy_ stays (File "cadence_fx/adapters/token2wav_steps.py", line 44, in forward)'
    assert without_folders('(File "model.py", line 1)') == '(File "model.py", line 1)'
