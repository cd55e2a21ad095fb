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
import json
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import vendor
from bench.remote import Remote, environment, machine, result_path, spread, verdict
from bench.token2wav_variants import VARIANTS, Cadence, Subject, Timed, chunks, variant
from cadence_fx.bytesops import digest

MIB = 2**20
CHECK_CHUNKS = 8  # of the turn that is compared before timing starts: the window fills, then slides


@dataclass(frozen=True, slots=True)
class Settings:
    sizes: vendor.Sizes
    device: str
    turn_chunks: int
    turns: int
    part: str = "segment"  # what is timed: all of it up to the vocoder, or the "solver" alone


class Worker:
    """Runs one variant; lives in its own process."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.settings, self.device = settings, torch.device(settings.device)
        if self.device.type == "cpu":
            torch.set_num_threads(1)
        self.subject: Subject = variant(name)(settings.sizes, self.device)
        self._timed: Timed | None = None

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _peaks(self) -> dict[str, float]:
        """Peaks of the allocator; memory that graphs hold for their own use counts as reserved only."""
        if self.device.type != "cuda":
            return {"peak_mib": 0.0, "reserved_mib": 0.0}
        return {
            "peak_mib": torch.cuda.max_memory_allocated() / MIB,
            "reserved_mib": torch.cuda.max_memory_reserved() / MIB,
        }

    def warm(self) -> dict[str, Any]:
        """Primes, installs, and runs the turn that is compared; ends with the peak counter at zero."""
        start = time.perf_counter()
        self.subject.prime()
        self.subject.install()
        if self.settings.part == "solver":
            self._timed = self.subject.time_solver()
        self._synchronize()
        seconds = time.perf_counter() - start
        checked = self.turn(0, CHECK_CHUNKS)
        self.subject.seal()
        peak = self._peaks()["peak_mib"]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return {"warmup_s": seconds, "warmup_peak_mib": peak, "mel": checked["mel"], "state": checked["state"]}

    def turn(self, turn: int, count: int | None = None) -> dict[str, Any]:
        """One turn with the vocoder left out: milliseconds of each call, and hashes of mel frames and final state."""
        subject, times = self.subject, []
        subject.token2wav.hift, subject.probe.mel = subject.probe, []
        subject.reset()
        if self._timed is not None:
            self._timed.ms.clear()
        for tokens in chunks(self.settings.sizes, count or self.settings.turn_chunks, turn):
            self._synchronize()
            start = time.perf_counter()
            subject(tokens)
            self._synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        if self._timed is not None:
            times = list(self._timed.ms)
        return {"ms": times, "mel": digest(*subject.probe.mel), "state": subject.state_digest()}

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

    def kernels(self) -> dict[str, Any]:
        """What one call of the solver with a full window executes on the device, by kernel (or copy or fill)."""
        if self._timed is None or self.device.type != "cuda":
            return {}
        subject, profile = self.subject, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        subject.reset()
        for number, tokens in enumerate(chunks(self.settings.sizes, CHECK_CHUNKS + 1, 99)):
            if number == CHECK_CHUNKS:
                self._timed.wrapped = lambda: profile
            subject(tokens)
        self._timed.wrapped = contextlib.nullcontext
        found: dict[str, list[float]] = {}
        events = [e for e in profile.events() if e.device_type.name == "CUDA"]
        for event in events:
            found.setdefault(short_name(event.name), []).append(event.time_range.elapsed_us())
        table = [
            {"kernel": name, "count": len(us), "ms": round(sum(us) / 1e3, 3)}
            for name, us in sorted(found.items(), key=lambda item: -sum(item[1]))
        ]
        span = max(e.time_range.end for e in events) - min(e.time_range.start for e in events)
        busy = sum(row["ms"] for row in table)  # type: ignore[misc]
        return {"kernels": len(events), "span_ms": round(span / 1e3, 3), "busy_ms": round(busy, 3), "table": table[:24]}

    def notes(self) -> list[str]:
        """What the passes did to the class of a full window, in their own words."""
        return [without_folders(note) for note in self.subject.notes()]

    def counters(self) -> dict[str, Any]:
        return {**self._peaks(), "misses": self.subject.misses()}

    def host_us(self) -> dict[str, dict[str, float]]:
        """Of the turns so far; and of one more in which Dynamo evaluates only the guards that tell graphs apart."""
        found = self.subject.host_us()
        if isinstance(self.subject, Cadence):
            self.subject.forget_times()
            with torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
                self.turn(self.settings.turns, self.settings.turn_chunks)
            for name, trusted in self.subject.host_us().items() if found else ():
                found[name]["call_beyond_launch_guards_trusted"] = trusted["call_beyond_launch"]
        return found


def without_folders(note: str) -> str:
    """A note whose files are named by their last three parts, wherever they are on this machine."""
    return re.sub(r'File "[^"]*?([^/"]+(?:/[^/"]+){0,2})"', r'File "\1"', note)


def short_name(name: str) -> str:
    """A kernel's name without its parameters and namespaces; what is left of a template's arguments is cut."""
    head = re.sub(r"^void |\(anonymous namespace\)::|at::native::|cudnn::[a-z_]*::", "", name)
    return head.split("(")[0][:90]


class Session:
    """All variants, interleaved turn by turn. A variant that fails has an "error" from then on, and nothing else."""

    def __init__(self, names: list[str], settings: Settings) -> None:
        self.settings = settings
        self.remotes = {name: Remote(Worker, name, settings) for name in names}
        self.results: dict[str, dict[str, Any]] = {name: {} for name in names}

    def _each(self, method: str, *arguments: Any, together: bool = False) -> dict[str, Any]:
        """One request to every variant that still runs: one after the other, unless nothing is timed."""
        running = [name for name, result in self.results.items() if "error" not in result]
        answers = {}
        if together:
            for name in running:
                self.remotes[name].ask(method, *arguments)
        for name in running:
            try:
                answers[name] = self.remotes[name].answer() if together else self.remotes[name].call(method, *arguments)
            except (RuntimeError, OSError) as error:
                self.results[name] = {"error": str(error)}
            if method != "counters":
                print(f"{method} {name}: {self.results[name].get('error', 'done')}", file=sys.stderr, flush=True)
        return answers

    def _compare(self, played: dict[str, Any]) -> None:
        if (reference := played.get("B0")) is None:
            raise SystemExit("B0 failed, and every other variant is compared with it")
        for name, answer in played.items():
            self.results[name]["bytes_equal"] &= all(answer[key] == reference[key] for key in ("mel", "state"))

    def warm(self) -> None:
        played = self._each("warm", together=True)
        for name, answer in played.items():
            self.results[name] = {
                "ms": [],
                "bytes_equal": True,
                "warmup_s": round(answer["warmup_s"], 1),
                "warmup_peak_mib": round(answer["warmup_peak_mib"], 1),
            }
        self._compare(played)

    def turn(self, turn: int) -> None:
        played = self._each("turn", turn)
        for name, answer in played.items():
            self.results[name]["ms"] += answer["ms"]
        self._compare(played)
        for name, answer in self._each("counters", together=True).items():
            self.results[name].update(answer)

    def explain(self) -> None:
        """Into the results: what the passes did, and attribution by kernel, where a variant has them."""
        for what in ("notes", "kernels"):
            for name, answer in self._each(what).items():
                if answer:
                    self.results[name][what] = answer

    def finish(self) -> float:
        """Host times into the results; returns the vocoder's milliseconds."""
        for name, answer in self._each("host_us").items():
            self.results[name]["host_us"] = answer
        vocoder: float = self.remotes["B0"].call("vocoder")
        self.close()
        return vocoder

    def close(self) -> None:
        for remote in self.remotes.values():
            remote.close()

    def rows(self) -> dict[str, dict[str, Any]]:
        return {name: _row(result) for name, result in self.results.items()}


def _row(result: dict[str, Any]) -> dict[str, Any]:
    if "error" in result:
        return {"error": result["error"]}
    return {
        **spread(result["ms"]),
        **{name: round(result[name], 1) for name in ("peak_mib", "reserved_mib", "warmup_peak_mib", "warmup_s")},
        **{name: result[name] for name in ("bytes_equal", "misses", "host_us", "notes", "kernels") if name in result},
    }


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Medians over the backend's: above 1 means that the backend is faster."""
    named = {"eager/cadence": "B0", "plain/cadence": "SRc-hand", "inductor/cadence": "reduce-overhead"}
    ours = rows.get("SRc", {}).get("median_ms")
    if ours is None:
        return {}
    timed = {label: rows[name] for label, name in named.items() if "median_ms" in rows.get(name, {})}
    return {label: round(row["median_ms"] / ours, 3) for label, row in timed.items()}


COLUMNS = ("median_ms", "p95_ms", "iqr_ms", "peak_mib", "reserved_mib", "warmup_peak_mib", "warmup_s")


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = ["variant         " + "".join(f"{name:>17}" for name in COLUMNS) + "  bytes   misses"]
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"{name:<16}  {row['error'][:110]}")
            continue
        figures = "".join(f"{row[column]:>17.2f}" for column in COLUMNS)
        lines.append(f"{name:<16}{figures}{verdict(row)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny layers: checks the code, measures nothing")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated; B0 is always run")
    parser.add_argument("--chunks", type=int, default=50, help="calls in a turn")
    parser.add_argument("--turns", type=int, default=4, help="timed turns, each begun by a reset")
    parser.add_argument("--tag", default="", help="ending of the result's file name, for runs of some variants only")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    names = list(dict.fromkeys(["B0", *options.variants.split(",")]))
    if unknown := {name for name in names if name.partition("/")[0] not in VARIANTS}:
        parser.error(f"unknown variants {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
    sizes = vendor.SMALL if options.small else vendor.RELEASED
    settings = Settings(sizes, options.device, options.chunks, options.turns)

    report: dict[str, Any] = {
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
    }
    path = result_path(options.out, "token2wav", report["device"], "small" if options.small else "", options.tag)

    def write(session: Session) -> None:
        rows = session.rows()
        report.update(variants=rows, ratios=ratios(rows))
        path.write_text(json.dumps(report, indent=2) + "\n")

    session = Session(names, settings)
    with machine(alone=False):
        session.warm()
    with machine(alone=True):
        for turn in range(1, settings.turns + 1):
            session.turn(turn)
            write(session)  # whatever stops a long run leaves the turns before it
        report["vocoder_ms"] = round(session.finish(), 3)
    write(session)
    print(table(report["variants"]), f"ratios: {report['ratios']}", f"written: {path}", sep="\n")


if __name__ == "__main__":
    main()
