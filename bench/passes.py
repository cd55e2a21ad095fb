"""What each pass gains on the solver of Token2Wav at its released size: milliseconds, kernels and bytes.

    python -m bench.passes                       # an NVIDIA GPU, released size
    python -m bench.passes --small --device cpu  # the same code on small layers: a smoke test, not a measurement

One run, one process a variant, turn by turn in alternation, as in `bench.token2wav`; timed is the 10-step solver alone,
on a window that fills and then slides. Variants: the vendor's eager code; eager's own kernels replayed, one graph a
chunk, captured by hand (`SRc-hand`); the same with states written in place (`SRc/plain`); the passes added one by one
in the order in which they run; all default ones (`SRc`); those and the optional ones; every default pass left out in
turn (`--without`); graphs at the step clock, without (`R`) and with a copy of all that goes in and comes out
(`step-wrapper`, as in vllm-omni 0.30.0); and `torch.compile(mode="reduce-overhead")` on the estimator.

After the first turn each variant is run once under the profiler: what a call executes, by kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench import vendor
from bench.remote import environment, machine, result_path
from bench.token2wav import Session, Settings, table
from cadence_fx.passes import default_passes, is_needed, optional_passes, select_edits

BASELINES = ("B0", "R", "step-wrapper", "SRc-hand", "reduce-overhead", "SRc/plain")


def ladder() -> list[str]:
    """The default passes and edits, added one by one, without the last rung, which is all of them."""
    names = [pass_.name for pass_ in default_passes() if not is_needed(pass_)]
    names += [edit.name for edit in select_edits()]
    return ["SRc/" + ",".join(names[: end + 1]) for end in range(len(names) - 1)]


def without() -> list[str]:
    """All default passes but one, for each."""
    names = [pass_.name for pass_ in default_passes() if not is_needed(pass_)]
    return [f"SRc/-{name}" for name in [*names, *(edit.name for edit in select_edits())]]


def with_optional() -> list[str]:
    names = [pass_.name for pass_ in optional_passes()]
    return ["SRc/" + ",".join(f"+{name}" for name in names)] if names else []


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Medians over that of all default passes, and over that with the optional ones: above 1 means that these are
    faster."""
    named = {
        "eager": "B0", "plain": "SRc-hand", "inductor": "reduce-overhead", "step graphs": "R",
        "step wrapper": "step-wrapper",
    }  # fmt: skip
    found = {}
    for label, ours in (("cadence", "SRc"), *((f"cadence with {name[4:]}", name) for name in with_optional())):
        for other, name in named.items():
            if "median_ms" in rows.get(name, {}) and "median_ms" in rows.get(ours, {}):
                found[f"{other}/{label}"] = round(rows[name]["median_ms"] / rows[ours]["median_ms"], 3)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small layers: checks the code, measures nothing")
    parser.add_argument("--variants", help="separated by ';', instead of all; B0 is always run")
    parser.add_argument("--without", action="store_true", help="also leave out every default pass in turn")
    parser.add_argument("--chunks", type=int, default=50, help="calls in a turn")
    parser.add_argument("--turns", type=int, default=4, help="timed turns, each begun by a reset")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    names = options.variants.split(";") if options.variants else [*BASELINES, *ladder(), "SRc", *with_optional()]
    names = list(dict.fromkeys(["B0", *names, *(without() if options.without else ())]))
    sizes = vendor.TINY if options.small else vendor.RELEASED
    report: dict[str, Any] = {
        "bench": "passes" + (" (small)" if options.small else ""),
        **environment(options.device),
        "protocol": {
            "prompt_frames": sizes.prompt_frames,
            "steps": sizes.steps,
            "chunks_a_turn": options.chunks,
            "turns": options.turns,
            "timed": "the solver alone, synchronised clock, one process a variant, interleaved turns",
            "kernels": "one call with a full window under the profiler, after the first turn",
        },
    }
    path = result_path(options.out, "passes", report["device"], "small" if options.small else "")

    def write(session: Session) -> None:
        rows = session.rows()
        report.update(variants=rows, ratios=ratios(rows))
        path.write_text(json.dumps(report, indent=2) + "\n")

    session = Session(names, Settings(sizes, options.device, options.chunks, options.turns, part="solver"))
    with machine(alone=False):
        session.warm()
    with machine(alone=True):
        for turn in range(1, options.turns + 1):
            session.turn(turn)
            if turn == 1:
                session.explain()
            write(session)  # whatever stops a long run leaves the turns before it
    session.close()
    print(table(report["variants"]))
    for name, row in report["variants"].items():
        if "kernels" in row:
            found = row["kernels"]
            print(f"{name}: {found['kernels']} kernels, busy {found['busy_ms']} of {found['span_ms']} ms")
    print(f"ratios: {report['ratios']}", f"written: {path}", sep="\n")
    exact = [row.get("bytes_equal", False) for name, row in report["variants"].items() if name.startswith("SRc")]
    return int(not all(exact))


if __name__ == "__main__":
    sys.exit(main())
