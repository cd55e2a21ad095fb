"""From `torch.compile` to a sealed catalog: all classes of Token2Wav's segment and vocoder, where the time goes, and
what one class of each callable takes.

    python -m bench.warm_up                       # an NVIDIA GPU, released size
    python -m bench.warm_up --small --device cpu  # the same code on small layers: a smoke test, not a measurement

One process that does nothing else, on a machine with nothing else on it. Timed is `Token2WavStream.warm_up`: Dynamo,
tracing to aten, proofs and passes, capture with every certificate, the eager runs that show which output is which
state, and putting everything back; the prompt is primed before. "One class" is what had been spent when the first
class of each callable was admitted. Afterwards mel frames and states of a turn are compared with the vendor's eager
code by SHA-256.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import cadence_fx
from bench import vendor
from bench.remote import Remote, environment, machine, result_path, verdict
from bench.token2wav import CHECK_CHUNKS, Settings, Worker
from cadence_fx.ledger import PHASES


class Primed(Worker):
    """A variant of the backend whose warm-up is looked at, callable by callable."""

    def each(self, warm_up: Callable[..., cadence_fx.Report]) -> float:
        """Primes, and warms up by `warm_up` in the place of `cadence_fx.warm_up`; seconds without the priming."""
        stream = self.subject.stream
        assert stream is not None
        stream.prime()
        self._synchronize()
        start = time.perf_counter()
        stream.warm_up(warm_up, cadence_fx.restore)
        self._synchronize()
        return time.perf_counter() - start


class Warmed(Primed):
    """A variant that reports on its warm-up."""

    def compile(self) -> dict[str, Any]:
        """Seconds in all, and what each callable's report says of them."""
        found: dict[str, Any] = {}

        def warm_up(step: Any, *given: Any) -> cadence_fx.Report:
            start = time.perf_counter()
            report = cadence_fx.warm_up(step, *given)
            ready = [row["ready_seconds"] for row in report["class_table"]]
            found[report["name"]] = {
                "seconds": round(time.perf_counter() - start, 1),
                "one_class_s": round(min(ready), 1) if ready else None,
                "classes": report["classes"],
                "refusals": report["refusals"],
                "phases_s": {phase: round(seconds, 1) for phase, seconds in report["seconds"].items()},
            }
            return report

        return {"seconds": self.each(warm_up), "callables": found, **self._peaks()}

    def check(self) -> dict[str, Any]:
        """A turn after the seal: hashes of its mel frames and final state, and what it missed."""
        stream = self.subject.stream
        assert stream is not None
        self.subject.reset = stream.reset  # type: ignore[method-assign]
        found = self.turn(0, CHECK_CHUNKS)
        misses = {step: cadence_fx.report(call)["misses"] for step, call in self._steps().items()}
        return {"mel": found["mel"], "state": found["state"], "misses": {k: v for k, v in misses.items() if v}}

    def _steps(self) -> dict[str, Any]:
        stream = self.subject.stream
        assert stream is not None
        return {"conformer": stream.conformer[False], "flow": stream.flow}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small layers: checks the code, measures nothing")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*autocast", category=UserWarning)
    settings = Settings(vendor.TINY if options.small else vendor.RELEASED, options.device, CHECK_CHUNKS, 1)
    eager = Remote(Worker, "B0", settings)
    with machine(alone=False):
        expected = eager.call("warm")
    eager.close()
    worker = Warmed("SRc", settings)
    with machine(alone=True):
        compiled = worker.compile()
    checked = worker.check()
    callables = compiled["callables"]
    one = sum(row["one_class_s"] or row["seconds"] for row in callables.values())
    equal = all(checked[what] == expected[what] for what in ("mel", "state"))
    row = {
        "median_ms": round(compiled["seconds"] * 1e3, 1),
        "repeats": 1,
        "peak_mib": round(compiled["peak_mib"], 1),
        "bytes_equal": equal,
        "misses": checked["misses"],
    }
    report = {
        "bench": "warm_up" + (" (small)" if options.small else ""),
        **environment(options.device),
        "protocol": {"timed": "Token2WavStream.warm_up, wall clock", "threads": torch.get_num_threads()},
        "variants": {"all classes": row, "one class of each callable": {"median_ms": round(one * 1e3, 1)}},
        "callables": callables,
        "ratios": {"all classes/one class": round(compiled["seconds"] / one, 3)},
    }
    heads = ("seconds", "one class", "classes", *PHASES)
    print(f"{'':<24}" + "".join(f"{head:>11}" for head in heads))
    for name, each in callables.items():
        phases = [each["phases_s"].get(phase, 0.0) for phase in PHASES]
        figures = [each["seconds"], each["one_class_s"] or float("nan"), each["classes"], *phases]
        print(f"{name:<24}" + "".join(f"{figure:>11}" for figure in figures) + f"  {each['refusals'] or ''}")
    print(f"all classes: {compiled['seconds']:.1f} s, one class of each: {one:.1f} s{verdict(row)}")
    path = result_path(options.out, "warm_up", str(report["device"]), "small" if options.small else "")
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written: {path}")
    return int(not equal)


if __name__ == "__main__":
    sys.exit(main())
