"""One clock tick of each model family: the vendor's eager code, the vendor's own best path, and the backend.

    python -m bench.families                       # an NVIDIA GPU, released sizes, all families that are installed
    python -m bench.families --small --device cpu  # the same code on small layers: a smoke test, not a measurement

Each variant is a process of its own (see `bench.family` for what one has to offer) and takes its turns after the
others'. Bytes: `--ticks` ticks of one stream from one seed; the results of every tick, and the state and the random
generator at its end, are compared with eager's by SHA-256, before anything is timed. Under stock flags eager may not
repeat itself: it plays the stream twice, and where the two differ, the verdict is that of the pinned protocol, under
which eager and the backend play it once more in processes of their own: attention without cuDNN's kernels, one of which
does not repeat for a single query, and for a family with convolutions that do not repeat `cadence_fx.deterministic`.
Times: stock flags, every part of a tick, in a stream that goes on, by a clock that is synchronised before and after;
variants in alternation, `--rounds` times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pkgutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

import cadence_fx
from bench.family import EAGER, OURS, Family
from bench.remote import Remote, environment, machine, result_path, spread, verdict
from cadence_fx.bytesops import digest

MIB = 2**20
FAMILIES = {
    "minicpm_o": "bench.family_token2wav:PACKED",
    "minicpm_o_5_steps": "bench.family_token2wav:FIVE_STEPS",
    "minicpm_o_causal": "bench.family_token2wav:CAUSAL",
    "lychee_fd": "bench.family_token2wav:LYCHEE",
    "moshi": "bench.family_moshi:FAMILY",
    "personaplex": "bench.family_personaplex:FAMILY",
    "freeze_omni": "bench.family_freeze_omni:FAMILY",
}


class Worker:
    """Runs one variant of one family; lives in its own process."""

    def __init__(self, family: str, variant: str, device: str, small: bool, pinned: bool = False) -> None:
        self.device = torch.device(device)
        self._protocol = contextlib.ExitStack()
        known: Family = pkgutil.resolve_name(FAMILIES[family])
        if pinned:
            torch.backends.cuda.enable_cudnn_sdp(False)
            if known.deterministic:  # before CUDA is initialised, as it must be
                self._protocol.enter_context(cadence_fx.deterministic(warn_only=True))
        if self.device.type == "cpu":
            torch.set_num_threads(1)
        self.subject = known.subject(variant, self.device, small)

    def warm(self) -> dict[str, Any]:
        """Warms up and plays some ticks; ends with the peak counter at zero."""
        start = time.perf_counter()
        with self.subject.serving():
            self.subject.warm_up()
            self.subject.begin(1)
            for number in range(8):  # graphs captured by hand and libraries settle
                for part in self.subject.parts.values():
                    part(number)
        self._synchronize()
        seconds = time.perf_counter() - start
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return {"warmup_s": round(seconds, 1), **self.subject.facts()}

    def play(self, ticks: int) -> dict[str, Any]:
        """Hashes of each tick's results, and of state and generator at the end."""
        heard, subject = [], self.subject
        with subject.serving():
            subject.begin(2)
            for number in range(ticks):
                heard.append(digest(*subject.parts[subject.whole](number)))
            cuda = self.device.type == "cuda"
            drawn = torch.cuda.get_rng_state(self.device) if cuda else torch.get_rng_state()
            return {"ticks": heard, "end": digest(*subject.state(), drawn)}

    def times(self, ticks: int) -> dict[str, list[float]]:
        """Milliseconds of each part, tick after tick."""
        found: dict[str, list[float]] = {}
        with self.subject.serving():
            for name, part in self.subject.parts.items():
                found[name] = []
                for number in range(ticks):
                    self._synchronize()
                    start = time.perf_counter()
                    part(number)
                    self._synchronize()
                    found[name].append((time.perf_counter() - start) * 1e3)
        return found

    def counters(self) -> dict[str, Any]:
        """Peak memory since the warm-up, and calls that did not replay, by reason."""
        peaks = {"peak_mib": 0.0, "reserved_mib": 0.0}
        if self.device.type == "cuda":
            peaks["peak_mib"] = round(torch.cuda.max_memory_allocated() / MIB, 1)
            peaks["reserved_mib"] = round(torch.cuda.max_memory_reserved() / MIB, 1)
        return {**peaks, "misses": self.subject.misses()}

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def run(family: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The rows of one family: one for each variant and part of a tick."""
    variants = pkgutil.resolve_name(FAMILIES[family]).variants
    remotes = {name: Remote(Worker, family, name, options.device, options.small) for name in variants}
    for name in (EAGER, OURS):
        remotes[f"{name} pinned"] = Remote(Worker, family, name, options.device, options.small, True)
    failed: dict[str, dict[str, Any]] = {}
    began = time.perf_counter()

    def every(method: str, *arguments: Any, together: bool = True) -> dict[str, Any]:
        answers, running = {}, [name for name in remotes if name not in failed]
        for name in running if together else ():
            remotes[name].ask(method, *arguments)
        for name in running:
            try:
                answers[name] = remotes[name].answer() if together else remotes[name].call(method, *arguments)
                done = "done"
            except (RuntimeError, OSError) as error:
                failed[name] = {"error": str(error)}
                done = str(error)
            print(
                f"{time.perf_counter() - began:6.0f} s  {method} {family} {name}: {done}", file=sys.stderr, flush=True
            )
        return answers

    times: dict[str, dict[str, list[float]]] = {name: {} for name in variants}
    with machine(alone=False):
        warmed, played = every("warm"), every("play", options.ticks)
        again = remotes[EAGER].call("play", options.ticks) if EAGER not in failed else {}
        for name in (EAGER, OURS):
            remotes.pop(f"{name} pinned").close()
    with machine(alone=True):
        for _ in range(options.rounds):
            for name, found in every("times", options.repeats, together=False).items():
                for part, each in found.items():
                    times[name].setdefault(part, []).extend(each)
    counted = every("counters")
    for remote in remotes.values():
        remote.close()
    if EAGER in failed:
        return {f"{family} {name}": row for name, row in failed.items()}
    rows: dict[str, dict[str, Any]] = {f"{family} {name}": row for name, row in failed.items()}
    repeated = equal_ticks(again, played[EAGER])
    for name in (name for name in remotes if name not in failed):
        equal = equal_ticks(played[name], played[EAGER])
        facts = {
            **counted[name],
            **warmed[name],
            "ticks": options.ticks,
            "ticks_equal": min(equal, options.ticks),
            "ticks_repeated_by_eager": min(repeated, options.ticks),
            "bytes_equal": equal == options.ticks + 1 if repeated == options.ticks + 1 else None,
        }
        if name == OURS and {f"{OURS} pinned", f"{EAGER} pinned"} <= played.keys():
            pinned = equal_ticks(played[f"{OURS} pinned"], played[f"{EAGER} pinned"])
            facts["ticks_equal_pinned"] = min(pinned, options.ticks)
            if facts["bytes_equal"] is None:
                facts["bytes_equal"] = pinned == options.ticks + 1
        for part, each in times[name].items():
            rows[f"{family} {part} {name}"] = {**spread(each), **facts}
    return rows


def equal_ticks(one: dict[str, Any], other: dict[str, Any]) -> int:
    """How many ticks are equal before the first that is not; one more when the end of the stream is, too."""
    pairs = zip([*one["ticks"], one["end"]], [*other["ticks"], other["end"]], strict=True)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), len(one["ticks"]) + 1)


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Each variant's median over the backend's, part by part: above 1 means that the backend is faster."""
    found = {}
    for name, row in rows.items():
        head, _, variant = name.rpartition(" ")
        ours = rows.get(f"{head} {OURS}", {})
        if variant != OURS and "median_ms" in row and "median_ms" in ours:
            found[f"{head}: {variant}/{OURS}"] = round(row["median_ms"] / ours["median_ms"], 3)
    return found


def table(rows: dict[str, dict[str, Any]]) -> str:
    columns = ("median_ms", "iqr_ms", "p95_ms", "peak_mib", "reserved_mib", "warmup_s")
    width = max(len(name) for name in rows) + 1
    lines = [" " * width + "".join(f"{column:>14}" for column in columns) + "  equal until   bytes   misses"]
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"{name:<{width}}  {row['error'][:110]}")
            continue
        figures = "".join(f"{row[column]:>14.2f}" for column in columns)
        until = f"{row['ticks_equal']} of {row['ticks']}"
        lines.append(f"{name:<{width}}{figures}  {until:>11} {verdict(row)}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small layers: checks the code, measures nothing")
    parser.add_argument("--families", default=",".join(FAMILIES), help="comma-separated")
    parser.add_argument("--ticks", type=int, default=200, help="whose bytes are compared")
    parser.add_argument("--repeats", type=int, default=30, help="ticks in a timed round, for each part of one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tag", default="", help="ending of the result's file name, for runs of some families only")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    families = options.families.split(",")
    if unknown := set(families) - FAMILIES.keys():
        parser.error(f"unknown families {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
    rows: dict[str, dict[str, Any]] = {}
    report: dict[str, Any] = {
        "bench": "families" + (" (small)" if options.small else ""),
        **environment(options.device),
        "protocol": {
            "ticks_compared": options.ticks,
            "timed": "each part of a tick, synchronised clock, one process a variant, in alternation",
            "rounds": options.rounds,
            "ticks_a_round": options.repeats,
        },
    }
    path = result_path(options.out, "families", report["device"], "small" if options.small else "", options.tag)
    for family in families:
        rows.update(run(family, options))
        report.update(variants=rows, ratios=ratios(rows))
        path.write_text(json.dumps(report, indent=2) + "\n")
    print(table(rows), *(f"{name}: {value}" for name, value in report["ratios"].items()), f"written: {path}", sep="\n")
    return int(not all(row.get("bytes_equal") for name, row in rows.items() if name.endswith(f" {OURS}")))


if __name__ == "__main__":
    sys.exit(main())
