"""A trained streaming model on recorded speech: eager against `torch.compile(backend="cadence")`, byte for byte.

    python -m bench.demo_vad [--audio FILE.wav] [--device cuda] [--out out]

Runs the Silero voice-activity model twice over the recording, compares every probability and every state as bytes, and
draws the probability curve. Exits with 1 when any byte differs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import cadence_fx as cadence
from bench.models import silero
from bench.speech import SPEECH, read_chunks, sparkline, speech_spans

Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]

# The context is what retention leaves of the samples heard so far: the newest 64 of 64 + 512. The cell state has one
# size and is replaced whole. Both extents are the same on every call, so the stream has one signature.
CONTRACT = cadence.Contract(
    name="silero-vad",
    clocks=[cadence.Clock("sample", stride=silero.CHUNK)],
    inputs=[cadence.Input("audio", axis=1, clock="sample")],
    regions=[
        cadence.Region(
            "context",
            argument="context",
            result=1,
            axis=1,
            clock="sample",
            start=silero.CONTEXT,
            retention=cadence.KeepLast(silero.CONTEXT),
        ),
        cadence.Region(
            "state", argument="state", result=2, axis=2, clock="sample", retention=cadence.Pinned(silero.STATE)
        ),
    ],
)


@dataclass(frozen=True, slots=True)
class Run:
    """What one pass over the recording gave, chunk by chunk: (probability, context, state), and the seconds it took."""

    outputs: list[tuple[Tensor, Tensor, Tensor]]
    seconds: list[float]

    @property
    def probabilities(self) -> list[float]:
        return [probability.item() for probability, *_ in self.outputs]


def stream(step: Step, chunks: Sequence[Tensor], start: tuple[Tensor, Tensor]) -> Run:
    """Runs `step` over the chunks, handing each state back to the next call as it came."""
    outputs, seconds = [], []
    context, state = start
    for chunk in chunks:
        began = time.perf_counter()
        probability, context, state = step(chunk, context, state)
        if chunk.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        outputs.append((probability.clone(), context.clone(), state.clone()))
    return Run(outputs, seconds)


def differing_tensors(one: Run, other: Run) -> int:
    """How many output tensors differ in shape or in any byte."""
    chunks = zip(one.outputs, other.outputs, strict=True)
    pairs = (pair for left, right in chunks for pair in zip(left, right, strict=True))
    return sum(a.shape != b.shape or not torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)


def draw(chunks: Sequence[Tensor], eager: Run, compiled: Run, path: Path) -> None:
    """Waveform above, both probability curves below (they lie on each other), as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    wave_form = torch.cat(list(chunks), dim=1).flatten().cpu().numpy()
    times = np.arange(len(chunks)) * silero.CHUNK / silero.SAMPLE_RATE
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(10, 4), layout="constrained")
    above.plot(np.arange(len(wave_form)) / silero.SAMPLE_RATE, wave_form, linewidth=0.4, color="0.4")
    above.set_ylabel("sample")
    below.plot(times, eager.probabilities, linewidth=3, alpha=0.4, label="eager")
    below.plot(times, compiled.probabilities, linewidth=1, label="cadence")
    below.set(xlabel="seconds", ylabel="probability of speech", ylim=(-0.05, 1.05))
    figure.legend(loc="outside upper right", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def check_against_script(chunks: Sequence[Tensor]) -> str:
    """Compares our module with the authors' TorchScript model on the CPU; both with the script's weights."""
    script, model = silero.load_script()
    context, state = model.initial_state()
    equal, largest = 0, 0.0
    for chunk in (chunk.cpu() for chunk in chunks):
        theirs = script(chunk, silero.SAMPLE_RATE)
        ours, context, state = model(chunk, context, state)
        equal += torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
        largest = max(largest, (ours - theirs).abs().max().item())
    verdict = "equal in every byte" if equal == len(chunks) else f"largest difference {largest:.3g}"
    return f"module against the released TorchScript model, same weights: {equal} of {len(chunks)} chunks {verdict}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--audio", type=Path, default=SPEECH, help="16 kHz mono 16-bit WAV (default: the one enclosed)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for vad.png (default: out)")
    chosen = parser.parse_args(arguments)

    torch.set_num_threads(1)
    chunks = read_chunks(chosen.audio, chosen.device)
    model = silero.load().to(chosen.device)
    print(CONTRACT, CONTRACT.catalog().table(), sep="\n\n", end="\n\n")

    with torch.no_grad():
        print(check_against_script(chunks))
        eager = stream(model, chunks, model.initial_state())
        options: Any = {"contract": CONTRACT}  # torch declares numbers, text and callables alone
        compiled = torch.compile(model, backend="cadence", options=options)
        cadence.warm_up(compiled, chunks[0], *model.initial_state())
        replayed = stream(compiled, chunks, model.initial_state())
        print(cadence.report(compiled))

    width = min(100, shutil.get_terminal_size().columns - 2)
    print(f"\n|{sparkline(replayed.probabilities, width)}|")
    spans = speech_spans(replayed.probabilities, threshold=0.5, gap=8)
    print("speech: " + ", ".join(f"{start:.2f}-{end:.2f} s" for start, end in spans))
    draw(chunks, eager, replayed, chosen.out / "vad.png")
    print(f"drawn: {chosen.out / 'vad.png'}")

    differing = differing_tensors(eager, replayed)
    total = sum(len(outputs) for outputs in eager.outputs)
    for name, run in (("eager", eager), ("cadence", replayed)):
        print(f"{name:>8}: median {1e6 * float(np.median(run.seconds)):.0f} us a chunk")
    print(f"{total - differing} of {total} tensors (probability, context, state a chunk) equal in every byte")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
