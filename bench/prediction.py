"""What contracts and example calls predict of Token2Wav's warm-up, beside what it comes to: classes, bytes, order.

    python -m bench.prediction                       # an NVIDIA GPU, released size
    python -m bench.prediction --small --device cpu  # the same code on small layers

Predicted before anything is compiled, from each callable's contract and the shapes of its example call: classes, bytes
that they stage, bytes of states and workspaces (paper equation 6). Measured: classes that were captured, and what their
buffers, carries and workspaces hold. Classes must be equal and bytes within 5 %.

Seconds of a callable's warm-up are estimated from the operators of one eager call and the classes, as `cadence plan`
does. The order of callables whose estimates are further apart than their error is checked where the device is a GPU,
whose estimate it is; the order of a callable's classes, by the bytes in flight, is a figure.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import cadence_fx
from bench import vendor
from bench.remote import environment, machine, result_path
from bench.token2wav import CHECK_CHUNKS, Settings
from bench.warm_up import Primed
from cadence_fx._torch import original_of, tree_map_only
from cadence_fx.estimates import capture_seconds, order_of
from cadence_fx.parking import awake
from cadence_fx.unsteady import Calls


class Accounted(Primed):
    """A variant that tells what was predicted of its warm-up."""

    def compile(self) -> dict[str, Any]:
        """Of each callable: predicted and measured, operators of one eager call, seconds of its warm-up."""
        found: dict[str, Any] = {}

        def warm_up(step: Any, *given: Any) -> cadence_fx.Report:
            operators = _operators(original_of(step), given)
            start = time.perf_counter()
            report = cadence_fx.warm_up(step, *given)
            self._synchronize()
            found[report["name"]] = {
                **report["prediction"],
                "operators": operators,
                "estimated_s": round(capture_seconds(operators, report["prediction"]["classes"]["predicted"]), 2),
                "seconds": round(time.perf_counter() - start, 2),
            }
            return report

        self.each(warm_up)
        return found


def _operators(step: Any, given: tuple[Any, ...]) -> int:
    """Operator calls of one eager call, on copies of its arguments."""
    copies = tree_map_only(torch.Tensor, torch.clone, given)
    with awake(list(step.buffers())), Calls() as calls:
        step(*copies)
    return len(calls.keys)


def _order(callables: dict[str, Any]) -> dict[str, int]:
    """Pairs of callables whose order is predicted, and how many took their time in that order."""
    pairs = order_of({name: row["estimated_s"] for name, row in callables.items()})
    right = sum(callables[more]["seconds"] > callables[less]["seconds"] for more, less in pairs)
    return {"pairs": len(pairs), "as_predicted": right}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small layers")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*autocast", category=UserWarning)
    settings = Settings(vendor.TINY if options.small else vendor.RELEASED, options.device, CHECK_CHUNKS, 1)
    with machine(alone=False):
        callables = Accounted("SRc", settings).compile()
    order = _order(callables)
    held = all(row["held"] for row in callables.values())
    report = {
        "bench": "prediction" + (" (small)" if options.small else ""),
        **environment(options.device),
        "protocol": {"tolerance": 0.05, "threads": torch.get_num_threads()},
        "callables": callables,
        "order": order,
        "held": held,
    }
    heads = ("classes", "staging", "carries", "workspaces")
    print(f"{'predicted and measured':<24}" + "".join(f"{head:>28}" for head in (*heads, "seconds")))
    for name, row in callables.items():
        pairs = [f"{row[head]['predicted']:,} {row[head]['measured']:,}" for head in heads]
        pairs.append(f"{row['estimated_s']:.1f} {row['seconds']:.1f}")
        print(f"{name:<24}" + "".join(f"{pair:>28}" for pair in pairs) + ("" if row["held"] else "  NOT HELD"))
    print(f"order of warm-ups: {order['as_predicted']} of {order['pairs']} pairs as predicted")
    path = result_path(options.out, "prediction", str(report["device"]), "small" if options.small else "")
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written: {path}")
    return int(not held or (options.device != "cpu" and order["as_predicted"] < order["pairs"]))


if __name__ == "__main__":
    sys.exit(main())
