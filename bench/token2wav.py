"""Token2Wav at its released size: latency, peak memory and bytes of every way to run it (paper Table 4 and Table 7).

    python -m bench.token2wav                       # an NVIDIA GPU, released size, all variants
    python -m bench.token2wav --small --device cpu  # the same code in a minute: a smoke test, not a measurement

Each variant (see `bench.token2wav_variants`) lives in a process of its own for the whole run, so that its peak is its
own and a failed capture spoils nobody else. The processes take turns: one turn of the conversation each, round after
round. Timed: one call of `Token2wav.stream` up to the vocoder (host tokens in, mel frames out, retention included),
by a clock that is synchronised before and after; the vocoder runs eager in all of them and is timed once, apart. Before
anything is timed, and again over all timed turns, mel frames and states are compared with B0 by SHA-256.
Weights, prompt and tokens are random, from fixed seeds. The primed state waits on the host in all variants.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import re
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench import vendor
from bench.token2wav_variants import VARIANTS, Subject, chunks
from cadence_fx.bytesops import as_integers

MIB = 2**20
CHECK_CHUNKS = 8  # of the turn that is compared before timing starts: the window fills, then slides


@dataclass(frozen=True, slots=True)
class Settings:
    sizes: vendor.Sizes
    device: str
    turn_chunks: int
    turns: int


class Worker:
    """Runs one variant; lives in its own process."""

    def __init__(self, variant: str, settings: Settings) -> None:
        self.settings, self.device = settings, torch.device(settings.device)
        if self.device.type == "cpu":
            torch.set_num_threads(1)
        self.subject: Subject = VARIANTS[variant](settings.sizes, self.device)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _peak_mib(self) -> float:
        return torch.cuda.max_memory_allocated() / MIB if self.device.type == "cuda" else 0.0

    def warm(self) -> dict[str, Any]:
        """Primes, installs, and runs the turn that is compared; ends with the peak counter at zero."""
        start = time.perf_counter()
        self.subject.prime()
        self.subject.install()
        self._synchronize()
        seconds = time.perf_counter() - start
        checked = self.turn(0, CHECK_CHUNKS)
        self.subject.seal()
        peak = self._peak_mib()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return {"warmup_s": seconds, "warmup_peak_mib": peak, "mel": checked["mel"], "state": checked["state"]}

    def turn(self, turn: int, count: int | None = None) -> dict[str, Any]:
        """One turn with the vocoder left out: milliseconds of each call, and hashes of mel frames and final state."""
        subject, times = self.subject, []
        subject.token2wav.hift, subject.probe.mel = subject.probe, []
        subject.reset()
        for tokens in chunks(self.settings.sizes, count or self.settings.turn_chunks, turn):
            self._synchronize()
            start = time.perf_counter()
            subject(tokens)
            self._synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        sha = hashlib.sha256()
        for mel in subject.probe.mel:
            sha.update(as_integers(mel).cpu().numpy().tobytes())
        return {"ms": times, "mel": sha.hexdigest(), "state": subject.state_digest()}

    def vocoder(self) -> float:
        """Median milliseconds of the eager vocoder on a steady chunk."""
        subject, times = self.subject, []
        channels = self.settings.sizes.mel
        mel = torch.zeros(1, channels, 58, device=self.device)
        source = torch.zeros(1, 1, 8 * 480, device=self.device)
        for _ in range(12):
            self._synchronize()
            start = time.perf_counter()
            subject.vocoder(mel, source)
            self._synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times[2:])

    def finish(self) -> dict[str, Any]:
        return {"peak_mib": self._peak_mib(), "misses": self.subject.misses(), "host_us": self.subject.host_us()}


def _serve(connection: Connection, variant: str, settings: Settings) -> None:
    """Answers (method, arguments) with (ok, result) until None comes."""
    warnings.filterwarnings("ignore", message=".*Disabling autocast")  # the vendor asks for a float32 autocast
    worker: Worker | None = None
    while (request := connection.recv()) is not None:
        method, arguments = request
        try:
            worker = worker or Worker(variant, settings)
            with contextlib.redirect_stdout(sys.stderr):
                connection.send((True, getattr(worker, method)(*arguments)))
        except Exception as error:
            traceback.print_exc()
            connection.send((False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"))


class Remote:
    """The parent's end of a variant's process."""

    def __init__(self, variant: str, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, variant, settings), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, method: str, *arguments: Any) -> None:
        self._connection.send((method, arguments))

    def answer(self) -> Any:
        """Raises RuntimeError with the worker's own message, also when its process has died."""
        try:
            ok, result = self._connection.recv()
        except EOFError:
            self._process.join()
            ok, result = False, f"the process ended with code {self._process.exitcode}"
        if not ok:
            raise RuntimeError(result)
        return result

    def call(self, method: str, *arguments: Any) -> Any:
        self.ask(method, *arguments)
        return self.answer()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(timeout=30)


def measure(names: list[str], settings: Settings) -> dict[str, dict[str, Any]]:
    """All variants, interleaved turn by turn; a variant that fails has an "error" and nothing else."""
    remotes = {name: Remote(name, settings) for name in names}
    results: dict[str, dict[str, Any]] = {}
    for remote in remotes.values():  # warm-ups run side by side: nothing is timed yet
        remote.ask("warm")
    for name, remote in remotes.items():
        try:
            results[name] = {**remote.answer(), "ms": [], "bytes_equal": True}
        except RuntimeError as error:
            results[name] = {"error": str(error)}
        print(f"{name}: {results[name].get('error') or 'warm'}", file=sys.stderr, flush=True)
    reference = {0: results["B0"]}
    for turn in range(1, settings.turns + 1):
        for name in [name for name in names if "error" not in results[name]]:
            try:
                played = remotes[name].call("turn", turn)
            except RuntimeError as error:
                results[name] = {"error": str(error)}
                continue
            results[name]["ms"] += played["ms"]
            reference.setdefault(turn, played)
            for compared, theirs in ((results[name], reference[0]), (played, reference[turn])):
                results[name]["bytes_equal"] &= all(compared[key] == theirs[key] for key in ("mel", "state"))
    for name, result in results.items():
        if "error" not in result:
            result.update(remotes[name].call("finish"))  # launches graphs out of order: after the last comparison
    if "error" not in results["B0"]:
        results["B0"]["vocoder_ms"] = remotes["B0"].call("vocoder")
    for remote in remotes.values():
        remote.close()
    return results


def summary(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for name, result in results.items():
        if "error" in result:
            rows[name] = {"error": result["error"]}
            continue
        times = sorted(result["ms"])
        quartiles = statistics.quantiles(times, n=4)
        rows[name] = {
            "median_ms": round(statistics.median(times), 3),
            "p95_ms": round(times[int(0.95 * (len(times) - 1))], 3),
            "iqr_ms": round(quartiles[2] - quartiles[0], 3),
            "repeats": len(times),
            "peak_mib": round(result["peak_mib"], 1),
            "warmup_peak_mib": round(result["warmup_peak_mib"], 1),
            "warmup_s": round(result["warmup_s"], 1),
            "bytes_equal": result["bytes_equal"],
            "misses": result["misses"],
            "host_us": {key: round(value, 1) for key, value in result["host_us"].items()},
        }
    return rows


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Medians over the backend's: above 1 means that the backend is faster."""
    named = {"eager/cadence": "B0", "plain/cadence": "SRc-hand", "inductor/cadence": "reduce-overhead"}
    ours = rows.get("SRc", {}).get("median_ms")
    if ours is None:
        return {}
    return {
        label: round(rows[name]["median_ms"] / ours, 3)
        for label, name in named.items()
        if "median_ms" in rows.get(name, {})
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        f"{'variant':<16}{'median ms':>10}{'p95 ms':>10}{'peak MiB':>10}{'warm MiB':>10}{'warm s':>8}  bytes  misses"
    ]
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"{name:<16}  {row['error'][:90]}")
            continue
        lines.append(
            f"{name:<16}{row['median_ms']:>10.2f}{row['p95_ms']:>10.2f}{row['peak_mib']:>10.0f}"
            f"{row['warmup_peak_mib']:>10.0f}{row['warmup_s']:>8.1f}  {'equal' if row['bytes_equal'] else 'DIFFER':<6} "
            f" {row['misses'] or 'none'}"
        )
    return "\n".join(lines)


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def environment(device: str) -> dict[str, str]:
    on_gpu = device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else "none",
        "torch": torch.__version__,
        "commit": _output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny layers: checks the code, measures nothing")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated; B0 is always run")
    parser.add_argument("--chunks", type=int, default=50, help="calls in a turn")
    parser.add_argument("--turns", type=int, default=4, help="timed turns, each begun by a reset")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    names = list(dict.fromkeys(["B0", *options.variants.split(",")]))
    if unknown := set(names) - VARIANTS.keys():
        parser.error(f"unknown variants {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
    sizes = vendor.SMALL if options.small else vendor.RELEASED
    settings = Settings(sizes, options.device, options.chunks, options.turns)

    results = measure(names, settings)
    rows = summary(results)
    report = {
        "bench": "token2wav" + (" (small)" if options.small else ""),
        **environment(options.device),
        "protocol": {
            "prompt_frames": sizes.prompt_frames,
            "steps": sizes.steps,
            "chunks_a_turn": options.chunks,
            "turns": options.turns,
            "timed": "Token2wav.stream up to the vocoder, synchronised clock, one process a variant, interleaved turns",
            "primed_state": "on the host in every variant",
        },
        "vocoder_ms": results["B0"].get("vocoder_ms"),
        "variants": rows,
        "ratios": ratios(rows),
    }
    print(table(rows), f"ratios: {report['ratios']}", sep="\n")
    options.out.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "_", f"{report['device']}{'_small' if options.small else ''}".lower())
    path = options.out / f"token2wav_{name}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
