"""The paper's optional schedule rule, measured: the segment on a stream of its own beside the language model's steps.

    python -m bench.schedule                       # an NVIDIA GPU, released size
    python -m bench.schedule --small --device cpu  # the same code on small layers: a smoke test, not a measurement

In each period of one second of audio a duplex model runs the synthesis of one chunk and the next steps of its language
model. The latter is stood in for by what it costs a device: the products of 25 decoding steps through as many random
bfloat16 weights as 36 layers of width 4,096 have, one captured graph a step. Timed is a period, by a synchronised
clock: with both on one stream, and with the segment on a side stream (`cadence_fx.SideStream`), turn by turn in
alternation in one process. Before anything is timed, and again over all timed turns, mel frames and states are compared
with the vendor's eager code by SHA-256.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import vendor
from bench.remote import environment, machine, result_path, verdict
from bench.token2wav_variants import Cadence, Subject, chunks
from cadence_fx import SideStream
from cadence_fx.bytesops import digest

STEPS = 25  # decoding steps in a period: one a speech token


class Decoding:
    """The products of one decoding step: for each layer, those of attention and of the gated feed-forward block."""

    def __init__(self, device: torch.device, layers: int = 36, width: int = 4096, inner: int = 12288) -> None:
        draw = torch.Generator(device).manual_seed(5)
        shapes = [*[(width, width)] * 4, (width, inner), (width, inner), (inner, width)]
        self._weights = [
            [torch.randn(shape, generator=draw, device=device, dtype=torch.bfloat16) * 0.01 for shape in shapes]
            for _ in range(layers)
        ]
        self._x = torch.randn(1, width, generator=draw, device=device, dtype=torch.bfloat16)
        self._graph = torch.cuda.CUDAGraph() if device.type == "cuda" else None
        if self._graph is not None:
            self._step()
            with torch.cuda.graph(self._graph):
                self._step()

    def _step(self) -> Tensor:
        x = self._x
        for *attention, gate, up, down in self._weights:
            for weight in attention:
                x = torch.tanh(x @ weight)
            x = torch.tanh((x @ gate * (x @ up)) @ down)
        return x

    def __call__(self) -> None:
        for _ in range(STEPS):
            if self._graph is not None:
                self._graph.replay()
            else:
                self._step()


class Segment:
    """Conditioning and solver of one variant, chunk by chunk; keeps the mel frames."""

    def __init__(self, subject: Subject, device: torch.device) -> None:
        self.subject, self._device = subject, device
        self.mel: list[Tensor] = []

    @torch.inference_mode()
    def __call__(self, tokens: list[int]) -> Tensor:
        token2wav = self.subject.token2wav
        token = torch.tensor([tokens], dtype=torch.int32, device=self._device)
        with torch.amp.autocast(self._device.type, dtype=torch.float32):  # as the vendor's `stream` has it
            mel, token2wav.stream_cache = token2wav.flow.inference_chunk(
                token=token, spk=token2wav.cache[2], cache=token2wav.stream_cache, last_chunk=False,
                n_timesteps=token2wav.n_timesteps,
            )  # fmt: skip
        return mel  # type: ignore[no-any-return]

    def begin(self) -> None:
        self.subject.reset()
        self.mel.clear()

    def digest(self) -> str:
        return digest(*self.mel) + self.subject.state_digest()


def eager_digests(sizes: vendor.Sizes, device: torch.device, turns: int, count: int) -> list[str]:
    """Of every turn, from the vendor's code in state sized to the contract."""
    subject = _primed(Subject, sizes, device)
    plain = Segment(subject, device)
    found = []
    for turn in range(turns + 1):
        plain.begin()
        for tokens in chunks(sizes, count, turn):
            plain.mel.append(plain(tokens))
        found.append(plain.digest())
    return found


def _primed(kind: type[Subject], sizes: vendor.Sizes, device: torch.device) -> Subject:
    sized = type("Sized", (kind,), {"sized": True})
    subject: Subject = sized(sizes, device)
    subject.prime()
    subject.install()
    subject.seal()
    return subject


def period(segment: Segment, other: Decoding, tokens: list[int]) -> None:
    """Both on the caller's stream."""
    mel = segment(tokens)
    other()
    segment.mel.append(mel)


def beside(side: SideStream, segment: Segment, other: Decoding, tokens: list[int]) -> None:
    """The segment on the side stream."""
    pending = side(tokens)
    other()
    segment.mel.append(pending.result())


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    low, high = (ordered[int(q * (len(ordered) - 1))] for q in (0.05, 0.95))
    return {"median": round(statistics.median(values), 3), "p5": round(low, 3), "p95": round(high, 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small layers: checks the code, measures nothing")
    parser.add_argument("--chunks", type=int, default=20, help="calls in a turn")
    parser.add_argument("--turns", type=int, default=4, help="timed turns of each variant")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    device, sizes = torch.device(options.device), vendor.TINY if options.small else vendor.RELEASED
    warnings.filterwarnings("ignore", message=".*autocast", category=UserWarning)  # a CPU has none to float32
    synchronize: Callable[[], Any] = torch.cuda.synchronize if device.type == "cuda" else contextlib.nullcontext

    with machine(alone=False):
        expected = eager_digests(sizes, device, options.turns, options.chunks)
        segment = Segment(_primed(Cadence, sizes, device), device)
        other = Decoding(device, *((2, 64, 128) if options.small else ()))
    side = SideStream(segment, device)
    variants: dict[str, Callable[[list[int]], None]] = {
        "one stream": lambda tokens: period(segment, other, tokens),
        "side stream": lambda tokens: beside(side, segment, other, tokens),
        "segment alone": lambda tokens: segment.mel.append(segment(tokens)),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    equal = dict.fromkeys(variants, True)
    with machine(alone=True):
        for turn in range(options.turns + 1):  # the first one warms up
            for name, run in variants.items():
                segment.begin()
                for tokens in chunks(sizes, options.chunks, turn):
                    synchronize()
                    start = time.perf_counter()
                    run(tokens)
                    synchronize()
                    if turn:
                        times[name].append((time.perf_counter() - start) * 1e3)
                equal[name] &= segment.digest() == expected[turn]
                print(f"turn {turn} {name}: done", file=sys.stderr, flush=True)
    misses = segment.subject.misses()
    medians = {name: round(statistics.median(ms), 3) for name, ms in times.items()}
    rows = {
        name: {
            "median_ms": medians[name],
            "p95_ms": spread(ms)["p95"],
            "repeats": len(ms),
            "bytes_equal": equal[name],
            "misses": misses,
        }
        for name, ms in times.items()
    }
    pairs = zip(times["one stream"], times["side stream"], strict=True)  # the same chunk of the same turn
    report = {
        "bench": "schedule" + (" (small)" if options.small else ""),
        **environment(options.device),
        "protocol": {
            "timed": "one period: the segment up to the vocoder, and 25 decoding steps; synchronised clock",
            "chunks_a_turn": options.chunks,
            "turns": options.turns,
        },
        "variants": rows,
        "side minus one stream, ms": spread([aside - alone for alone, aside in pairs]),
        "ratios": {"one stream/side stream": round(medians["one stream"] / medians["side stream"], 3)},
    }
    for name, row in rows.items():
        print(f"{name:<14}{row['median_ms']:>10.2f} ms{row['p95_ms']:>10.2f} ms p95{verdict(row)}")
    path = result_path(options.out, "schedule", str(report["device"]), "small" if options.small else "")
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"side minus one stream: {report['side minus one stream, ms']}", f"written: {path}", sep="\n")
    return int(not all(equal.values()))


if __name__ == "__main__":
    sys.exit(main())
