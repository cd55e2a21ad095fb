"""The vocoders of Token2Wav, and the whole segment with them: eager against the backend, stock and pinned.

    python -m bench.vocoder                       # an NVIDIA GPU, released size, both packages, both protocols
    python -m bench.vocoder --small --device cpu  # the same code on small layers: a smoke test, not a measurement

Each variant is a process of its own: a vendor package, a protocol (`stock`: PyTorch's own flags; `pinned`:
`cadence_fx.deterministic`) and a side (`eager`: the vendor's code untouched; `cadence`: bound and compiled).

Bytes: `--streams` matched streams, each a turn of `--chunks` calls from a seed of its own, played twice by eager and
once by the backend; each call's mel frames and PCM are hashed, and at the end of a stream the generator. Mel frames are
compared in every call. PCM and generator count as far as eager repeats itself, which under the pinned protocol is the
whole of a stream; under stock flags two runs of eager can also agree by chance, and a vocoder whose eager code was seen
not to repeat is not replayed, so there PCM is reported and not judged. Nothing is timed meanwhile.

Times: one process after the other; the vocoder alone on a chunk in the middle of a turn, and the whole of
`Token2wav.stream`, host tokens in and samples on the host out, by a clock that is synchronised before and after.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import cadence_fx
from bench import vendor
from bench.remote import Remote, environment, machine, result_path, verdict
from cadence_fx.adapters.token2wav import Token2WavStream
from cadence_fx.bytesops import digest

MIB = 2**20
PACKAGES = {"hift": vendor.STEPAUDIO2, "bounded": vendor.MINICPMO_UTILS}
PROTOCOLS = ("stock", "pinned")
SIDES = ("eager", "cadence")
TOKENS = 28
# A stream: the hashes of each call's mel frames; and those of each call's PCM, then that of the generator.
Played = list[tuple[list[str], list[str]]]


@dataclass(frozen=True, slots=True)
class Variant:
    package: str
    protocol: str
    side: str

    def __str__(self) -> str:
        return f"{self.package}/{self.protocol}/{self.side}"


class Worker:
    """Runs one variant; lives in its own process."""

    def __init__(self, variant: Variant, sizes: vendor.Sizes, device: str) -> None:
        self.sizes, self.device, self.stream = sizes, torch.device(device), None
        self._protocol = contextlib.ExitStack()
        if variant.protocol == "pinned":  # before CUDA is initialised, as it must be
            self._protocol.enter_context(cadence_fx.deterministic(warn_only=True))
        if self.device.type == "cpu":
            torch.set_num_threads(1)
        self.token2wav = vendor.build_token2wav(sizes, self.device, package=PACKAGES[variant.package])
        if variant.side == "cadence":
            self.stream = Token2WavStream(self.token2wav, backend=cadence_fx.cadence)
        self._mel: list[torch.Tensor] = []
        self._solve, self.token2wav.flow.inference_chunk = self.token2wav.flow.inference_chunk, self._kept

    def _kept(self, *args: Any, **kwargs: Any) -> Any:
        """The vendor's call, its mel frames kept until they are hashed."""
        mel, cache = self._solve(*args, **kwargs)
        self._mel = [mel]
        return mel, cache

    def warm(self) -> dict[str, Any]:
        """Primes and warms up; ends with the peak counter at zero."""
        start, reports = time.perf_counter(), []
        if self.stream is None:
            vendor.start_turn(self.token2wav)
            caches = self.token2wav.stream_cache, self.token2wav.hift_cache_dict
            self._primed = tuple({k: v.to("cpu", copy=True) for k, v in cache.items()} for cache in caches)
        else:
            self.stream.prime()
            reports = self.stream.warm_up(cadence_fx.warm_up, cadence_fx.restore)
        for chunk in range(3):  # libraries choose and build what they need
            self._call(chunk)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        classes = sum(report["classes"] for report in reports)
        captures = sum(report["capture_seconds"] for report in reports)  # probes and certificates among them
        return {
            "warmup_s": round(time.perf_counter() - start, 1), "capture_s": round(captures, 1), "classes": classes,
        }  # fmt: skip

    def streams(self, first: int, count: int, chunks: int) -> list[Played]:
        """`count` streams of `chunks` calls, played twice by eager; stream n has tokens and draws from seed n."""
        return [self._played(first, count, chunks) for _ in range(2 if self.stream is None else 1)]

    def _played(self, first: int, count: int, chunks: int) -> Played:
        played: Played = []
        for number in range(first, first + count):
            self._reset()
            torch.manual_seed(number)
            mels, heard = [], []
            for chunk in range(chunks):
                heard.append(hashlib.sha256(self._call(chunks * number + chunk)).hexdigest())
                mels.append(digest(*self._mel))
            cuda = self.device.type == "cuda"
            generator = torch.cuda.get_rng_state(self.device) if cuda else torch.get_rng_state()
            heard.append(hashlib.sha256(generator.numpy().tobytes()).hexdigest())
            played.append((mels, heard))
        return played

    def audited(self, first: int, count: int, chunks: int) -> dict[str, int]:
        """The same streams with every call of the vocoder compared with eager, given what its operators that do not
        repeat have made; nothing where it has none such. How many calls were equal, and how many were compared."""
        if self.stream is None or not self._eager_operators():
            return {}
        equal = 0
        with contextlib.ExitStack() as stack:
            ledgers = [stack.enter_context(cadence_fx.audit(step)) for step in self.stream.vocoder.steps.values()]
            for number in range(first, first + count):
                self._reset()
                for chunk in range(chunks):
                    before = sum(ledger.calls for ledger in ledgers)
                    try:
                        self._call(chunks * number + chunk)
                        equal += sum(ledger.calls for ledger in ledgers) - before
                    except cadence_fx.AuditMismatch as error:
                        print(error, file=sys.stderr, flush=True)
            compared = sum(ledger.calls for ledger in ledgers)
        return {"equal": equal, "compared": compared}

    def _eager_operators(self) -> int:
        """Operator calls that have run eager inside replays of the vocoder."""
        steps = self.stream.vocoder.steps.values() if self.stream is not None else ()
        return sum(sum(cadence_fx.report(step)["eager_operators"].values()) for step in steps)

    def times(self, repeats: int) -> dict[str, list[float]]:
        """Milliseconds of the vocoder alone and of the whole call, each on chunks in the middle of a turn."""
        self._reset()
        for chunk in range(4):
            self._call(chunk)
        mel = torch.randn(1, self.sizes.mel, 2 * (TOKENS - 3), device=self.device)
        vocode = self._vocoder(mel)
        return {
            "vocoder": [self._timed(vocode) for _ in range(repeats)],
            "segment": [self._timed(lambda n=n: self._call(n)) for n in range(repeats)],  # type: ignore[misc]
        }

    def counters(self) -> dict[str, Any]:
        """Peak memory since the warm-up, and calls that did not replay, by reason."""
        misses: Counter[str] = Counter()
        if self.stream is not None:
            misses.update(self.stream.eager_calls)
            del misses["priming"]
            for step in (self.stream.conformer[False], self.stream.flow, *self.stream.vocoder.steps.values()):
                report = cadence_fx.report(step)
                misses.update(report["misses"])
                misses["late capture"] += report["late_captures"]
        peak = torch.cuda.max_memory_allocated() / MIB if self.device.type == "cuda" else 0.0
        return {"peak_mib": round(peak, 1), "misses": dict(+misses), "eager_operators": self._eager_operators()}

    def _reset(self) -> None:
        if self.stream is not None:
            self.stream.reset()
            return
        for owner, cache in zip(("stream_cache", "hift_cache_dict"), self._primed, strict=True):
            counters = {k for k, v in cache.items() if v.dtype == torch.int64}  # those stay on the host
            placed = {k: v.to("cpu" if k in counters else self.device, copy=True) for k, v in cache.items()}
            setattr(self.token2wav, owner, placed)

    def _call(self, number: int) -> bytes:
        tokens = vendor.build_tokens(1, TOKENS, self.sizes, seed=number)[0]
        heard: bytes = self.token2wav.stream(tokens, None)
        return heard

    def _vocoder(self, mel: torch.Tensor) -> Callable[[], Any]:
        """The vendor's own entry to the vocoder on one chunk; what it keeps of it stays as it is."""
        if hasattr(self.token2wav, "bounded_vocoder"):
            bounded = self.token2wav.bounded_vocoder
            bounded.cache = self.token2wav.hift_cache_dict
            return lambda: bounded.stream(mel)
        kept = self.token2wav.hift_cache_dict
        joined, source = torch.cat([kept["mel"], mel], dim=2), kept["source"]
        return lambda: self.token2wav.hift(joined, source)

    def _timed(self, call: Callable[[], Any]) -> float:
        synchronize = torch.cuda.synchronize if self.device.type == "cuda" else (lambda: None)
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        return (time.perf_counter() - start) * 1e3


def compared(eager: Played, again: Played, cadence: Played, audited: dict[str, int]) -> dict[str, Any]:
    """How many streams eager repeats, and how many of all are equal as far as it does.

    Args:
        audited: of the vocoder's calls, where operators of it do not repeat: the verdict rests on these and on mel
            frames, since PCM of two runs that agrees does so by chance.
    """
    mels = [first[0] == second[0] == ours[0] for first, second, ours in zip(eager, again, cadence, strict=True)]
    repeated = equal = calls = 0
    for (_, first), (_, second), (_, ours) in zip(eager, again, cadence, strict=True):
        until = next((i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))
        repeated += until == len(first)
        equal += first[:until] == ours[:until]
        calls += until
    return {
        "streams": len(eager),
        "mel_equal": sum(mels),
        "pcm_repeated_by_eager": repeated,
        "pcm_equal": equal,
        "pcm_hashes_compared": calls,
        "of": sum(len(heard) for _, heard in eager),
        "vocoder_calls_audited": audited,
        "judged": "mel, and vocoder given what its operators that do not repeat made" if audited else "mel and PCM",
        "bytes_equal": all(mels) and (audited["equal"] == audited["compared"] if audited else equal == len(eager)),
    }


def rows_of(package: str, protocol: str, answers: dict[str, Any], compared: dict[str, Any]) -> dict[str, Any]:
    """One row for each timed part and side."""
    rows = {}
    for part in ("vocoder", "segment"):
        for side in SIDES:
            times, found = sorted(answers[side]["times"][part]), answers[side]
            rows[f"{package} {part} {protocol} {side}"] = {
                "median_ms": round(statistics.median(times), 3),
                "p95_ms": round(times[int(0.95 * (len(times) - 1))], 3),
                "min_ms": round(times[0], 3),
                "repeats": len(times),
                **{
                    name: found[name]
                    for name in ("peak_mib", "misses", "eager_operators", "warmup_s", "capture_s", "classes")
                },
                "bytes_equal": compared["bytes_equal"],
            }
    return rows


def ratios(variants: dict[str, Any]) -> dict[str, float]:
    """Eager's median over the backend's: above 1 means that the backend is faster."""
    found = {}
    for name, row in variants.items():
        if name.endswith(" eager"):
            other = variants[name.removesuffix("eager") + "cadence"]
            found[name.removesuffix(" eager") + ": eager/cadence"] = round(row["median_ms"] / other["median_ms"], 3)
    return found


def run(package: str, options: argparse.Namespace, sizes: vendor.Sizes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rows of one package, and what was compared, by protocol."""
    began = time.perf_counter()
    variants = [Variant(package, protocol, side) for protocol in options.protocols for side in SIDES]
    remotes = {variant: Remote(Worker, variant, sizes, options.device) for variant in variants}

    def every(method: str, *arguments: Any, together: bool = True) -> dict[Variant, Any]:
        answers = {}
        for variant in variants if together else ():
            remotes[variant].ask(method, *arguments)
        for variant in variants:
            answers[variant] = remotes[variant].answer() if together else remotes[variant].call(method, *arguments)
            print(f"{time.perf_counter() - began:6.0f} s  {method} {variant}: done", file=sys.stderr, flush=True)
        return answers

    with machine(alone=False):
        warmed = every("warm")
        played = every("streams", 1, options.streams, options.chunks)
    with machine(alone=True):
        timed = every("times", options.repeats, together=False)
    counted = every("counters")
    with machine(alone=False):
        audited = every("audited", 1, options.streams, options.chunks)
    for remote in remotes.values():
        remote.close()
    rows: dict[str, Any] = {}
    matched = {}
    for eager in (variant for variant in variants if variant.side == "eager"):
        ours = Variant(eager.package, eager.protocol, "cadence")
        (first, second), (mine,) = played[eager], played[ours]
        found = compared(first, second, mine, audited[ours])
        matched[f"{eager.package} {eager.protocol}"] = found
        answers = {v.side: {"times": timed[v], **counted[v], **warmed[v]} for v in (eager, ours)}
        rows.update(rows_of(eager.package, eager.protocol, answers, found))
    return rows, matched


def table(rows: dict[str, Any]) -> str:
    lines = [f"{'variant':<34}{'median ms':>11}{'p95 ms':>11}{'peak MiB':>11}  bytes   misses"]
    for name, row in rows.items():
        figures = f"{row['median_ms']:>11.2f}{row['p95_ms']:>11.2f}{row['peak_mib']:>11.1f}"
        lines.append(f"{name:<34}{figures}{verdict(row)}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny layers: checks the code, measures nothing")
    parser.add_argument("--packages", type=lambda text: text.split(","), default=list(PACKAGES))
    parser.add_argument("--protocols", type=lambda text: text.split(","), default=list(PROTOCOLS))
    parser.add_argument("--streams", type=int, default=40, help="matched streams")
    parser.add_argument("--chunks", type=int, default=4, help="calls of a stream: the window fills, then slides")
    parser.add_argument("--repeats", type=int, default=50, help="timed calls of each part")
    parser.add_argument("--tag", default="", help="ending of the result's file name, for runs of some packages only")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if unknown := {*options.packages} - {*PACKAGES} | {*options.protocols} - {*PROTOCOLS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if missing := [name for name in options.packages if not vendor.available(PACKAGES[name])]:
        parser.error(f"not installed: {', '.join(PACKAGES[name].distribution for name in missing)}")
    sizes = vendor.TINY if options.small else vendor.RELEASED
    report: dict[str, Any] = {
        "bench": "vocoder" + (" (small)" if options.small else ""),
        **environment(options.device),
        "protocol": {
            "prompt_frames": sizes.prompt_frames,
            "steps": sizes.steps,
            "streams": options.streams,
            "chunks_a_stream": options.chunks,
            "timed": "vocoder alone and Token2wav.stream, synchronised clock, one process a variant, one at a time",
            "pinned": "cadence_fx.deterministic(warn_only=True)",
            "packages": {name: f"{PACKAGES[name].distribution} {PACKAGES[name].version}" for name in options.packages},
        },
        "matched_streams": {},
        "variants": {},
    }
    path = result_path(options.out, "vocoder", report["device"], "small" if options.small else "", options.tag)
    for package in options.packages:  # what one has shown is written before the next begins
        rows, matched = run(package, options, sizes)
        report["variants"].update(rows)
        report["matched_streams"].update(matched)
        report["ratios"] = ratios(report["variants"])
        path.write_text(json.dumps(report, indent=2) + "\n")
    matched = report["matched_streams"]
    print(table(report["variants"]), json.dumps(matched, indent=2), f"ratios: {report['ratios']}", f"written: {path}",
          sep="\n")  # fmt: skip
    return int(not all(found["bytes_equal"] for found in matched.values()))


if __name__ == "__main__":
    sys.exit(main())
