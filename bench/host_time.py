"""Host time of one replayed call, beyond the launch: the engine alone, and the whole call with Dynamo's guards.

`trusted` is the whole call under `torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)`: only the guards
that tell compiled graphs apart are evaluated.

    python -m bench.host_time                # on a GPU
    python -m bench.host_time --device cpu   # the same bookkeeping; pointer checks are slower without CUDA

One process, one small model with as many weights as a large decoder, so that the device is idle and nothing but the
host is measured. Bytes are compared with eager before anything is timed. Weights and inputs are random, from fixed
seeds.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cadence_fx
from bench.remote import environment, machine, result_path, verdict
from cadence_fx.bytesops import bytes_equal
from cadence_fx.lookup import program_of

FRAMES, WIDTH = 50, 64
CONTRACT = cadence_fx.Contract(
    [cadence_fx.Clock("frame", FRAMES)],
    [
        cadence_fx.Region("cache", argument="cache", result=1, axis=1, clock="frame", start=2 * FRAMES,
                          retention=cadence_fx.KeepLast(2 * FRAMES)),
        cadence_fx.Region("tail", argument="tail", result=2, axis=1, clock="frame", retention=cadence_fx.Pinned(2)),
    ],
)  # fmt: skip


class Model(nn.Module):
    """Three inputs, two states, two weights a layer: what a call of a decoder hands over, and little work."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor, speaker: Tensor, cond: Tensor, cache: Tensor, tail: Tensor) -> tuple[Tensor, ...]:
        frames = torch.cat([cache, x], 1)
        y = frames.mean(1, keepdim=True) + x + speaker + cond
        for layer in self.layers:
            y = y + layer.bias * layer.weight[0]
        return y, frames[:, -2 * FRAMES :].contiguous(), torch.cat([tail, y], 1)[:, -2:].contiguous()


def median_us(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Median host microseconds of `call`, each begun with an idle device."""
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return round(statistics.median(times), 1)


def measure(layers: int, repeats: int, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model(layers).to(device)
    eager = copy.deepcopy(model)
    options: dict[str, Any] = {"contract": CONTRACT}
    step = torch.compile(model, backend=cadence_fx.cadence, options=options)

    def given() -> list[Tensor]:
        sizes = (1, FRAMES, WIDTH), (1, 1, WIDTH), (1, FRAMES, WIDTH)
        return [torch.randn(size, device=device) for size in sizes]

    with torch.inference_mode():
        state = [torch.randn(1, n, WIDTH, device=device) for n in (2 * FRAMES, 2)]
        cadence_fx.warm_up(step, *given(), *state)
        ours = theirs = state
        equal = True
        for _ in range(20):
            inputs = given()
            mine, right = step(*inputs, *ours), eager(*inputs, *theirs)
            equal &= all(bytes_equal(a, b) for a, b in zip(mine, right, strict=True))
            ours, theirs = list(mine[1:]), list(right[1:])

        program = program_of(step, "bench")
        launches: list[float] = []
        recordings = {id(e.recording): e.recording for _, table in program.graphs for e in table.classes.values()}

        def timed(launch: Callable[[], Any]) -> Callable[[], Any]:
            def call() -> Any:
                start = time.perf_counter_ns()
                raw = launch()
                launches.append((time.perf_counter_ns() - start) / 1e3)
                return raw

            return call

        for recording in recordings.values():
            recording.launch = timed(recording.launch)  # type: ignore[method-assign]
        inputs, held = given(), list(ours)
        program.ledger.latencies_us.clear()

        def replay() -> None:
            held[:] = step(*inputs, *held)[1:]

        whole = median_us(replay, repeats, device)
        with torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
            median_us(replay, 10, device)
            trusted = median_us(replay, repeats, device)
        engine = statistics.median(program.ledger.latencies_us)
        launch = statistics.median(launches)
        operator = median_us(lambda: inputs[0] + inputs[2], repeats, device)
        plain = median_us(lambda: eager(*inputs, *theirs), min(repeats, 50), device)
    row = {
        "median_us": round(engine - launch, 1),
        "whole_call_us": round(whole - launch, 1),
        "whole_call_guards_trusted_us": round(trusted - launch, 1),
        "launch_us": round(launch, 1),
        "one_eager_operator_us": operator,
        "eager_call_us": plain,
        "repeats": repeats,
        "bytes_equal": equal,
        "misses": dict(program.ledger.misses),
    }
    return {f"{2 * layers} weights": row}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    device = torch.device(options.device)
    rows: dict[str, Any] = {}
    with machine(alone=True):
        for layers in (2, 200):
            rows |= measure(layers, options.repeats, device)
    protocol = "host clock, device idle before each call; engine = call without Dynamo, both without the launch"
    report = {"bench": "host_time", **environment(options.device), "protocol": protocol, "variants": rows}
    heads = ("engine us", "whole us", "trusted us", "launch us", "one op us", "eager us")
    print(f"{'':<14}{''.join(f'{head:>11}' for head in heads)}  bytes   misses")
    for name, row in rows.items():
        keys = (
            "median_us", "whole_call_us", "whole_call_guards_trusted_us", "launch_us", "one_eager_operator_us",
            "eager_call_us",
        )  # fmt: skip
        figures = "".join(f"{row[key]:>11.1f}" for key in keys)
        print(f"{name:<14}{figures}{verdict(row)}")
    path = result_path(options.out, "host_time", str(report["device"]))
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
