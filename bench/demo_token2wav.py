"""The speech decoder of MiniCPM-o on random weights: the vendor's eager stream against this project's backend.

    python -m bench.demo_token2wav [--device cuda] [--released] [--out out]

Speaks two turns of random tokens through both, compares every sample and the final state as bytes, and writes what the
backend's stream said. Random weights make noise, not speech; the layers are cut down to fit two CPU cores unless
`--released` is given. Exits with 1 when any byte differs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import statistics
import sys
import time
import warnings
import wave
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cadence_fx as cadence
from bench import vendor
from cadence_fx.adapters.token2wav import Token2WavStream

SAMPLE_RATE = 24_000
SIZES = vendor.Sizes(
    depth=2, hidden=128, heads=4, head_dim=32, encoder=128, encoder_heads=4, encoder_units=256, blocks=2, up_blocks=2,
    vocoder=32, steps=5, weight_std=0.1,
)  # fmt: skip
# Tokens presented in each call of each turn: 28 with look-ahead; the last call of a turn brings what is left.
TURNS = ((28, 28, 28, 28, 28, 11), (28, 28, 28, 28, 28, 28, 6))


def speak(token2wav: Any, start: Callable[[], None], sizes: vendor.Sizes) -> tuple[np.ndarray, list[float]]:
    """All samples of all turns, and the milliseconds of each normal call."""
    samples, times = [], []
    torch.manual_seed(0)  # the vocoder draws its excitation noise
    for turn, counts in enumerate(TURNS):
        start()
        for call, count in enumerate(counts):
            tokens = vendor.build_tokens(1, count, sizes, seed=100 * turn + call)[0]
            began = time.perf_counter()
            last = call == len(counts) - 1
            samples.append(token2wav.stream(tokens, None, last_chunk=last, return_waveform=True)[0])
            if not last:
                times.append((time.perf_counter() - began) * 1e3)
    return np.concatenate(samples), times


def write_wave(path: Path, samples: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--released", action="store_true", help="layers of the released size")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for token2wav.wav (default: out)")
    options = parser.parse_args(arguments)
    if not vendor.available():
        print("the vendor package is not installed: pip install --no-deps stepaudio2-minicpmo==0.1.1", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore", message=".*Disabling autocast")  # the vendor asks for a float32 autocast
    if options.device == "cpu":
        torch.set_num_threads(1)  # kernels this small lose more than they gain by a second thread
    sizes = vendor.RELEASED if options.released else SIZES
    # On a GPU the vocoder does not repeat from run to run under stock flags.
    pinned = cadence.deterministic(warn_only=True) if options.device != "cpu" else contextlib.nullcontext()
    with pinned:
        return compare(sizes, options)


def compare(sizes: vendor.Sizes, options: argparse.Namespace) -> int:
    """Both streams, one after the other; returns the exit status."""
    eager = vendor.build_token2wav(sizes, options.device)
    samples, eager_ms = speak(eager, lambda: vendor.start_turn(eager), sizes)

    stream = Token2WavStream(vendor.build_token2wav(sizes, options.device), backend=cadence.cadence)
    print(stream.geometry.flow_contract(), stream.geometry.flow_contract().catalog().table(), sep="\n\n", end="\n\n")
    began = time.perf_counter()
    stream.prime()
    reports = stream.warm_up(cadence.warm_up)
    print(f"warm-up: {time.perf_counter() - began:.0f} s, {sum(r['classes'] for r in reports)} classes captured\n")
    replayed, cadence_ms = speak(stream.token2wav, stream.reset, sizes)
    for step in (stream.conformer[False], stream.flow):
        print(cadence.report(step), end="\n\n")
    plain = ", ".join(f"{count} x {why}" for why, count in stream.eager_calls.items())
    print(f"run eager by the adapter: {plain or 'nothing'}")

    hashes = [hashlib.sha256(heard.tobytes()).hexdigest() for heard in (samples, replayed)]
    for name, digest, times in (("eager", hashes[0], eager_ms), ("cadence", hashes[1], cadence_ms)):
        print(f"{name:>8}: sha256 {digest}, median {statistics.median(times):.0f} ms a second of audio")
    write_wave(options.out / "token2wav.wav", replayed)
    path, seconds = options.out / "token2wav.wav", len(replayed) / SAMPLE_RATE
    print(f"written: {path} ({seconds:.1f} s; it sounds like noise, since the weights are random)")
    if hashes[0] != hashes[1]:
        print("samples differ", file=sys.stderr)
        return 1
    print("every sample has the bytes of eager. On a CPU the engine is checked and not faster: the gain is on a GPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())
