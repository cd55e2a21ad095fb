"""The enclosed recording, and what a curve over it looks like: chunks in, spans of speech and a line of bars out."""

from __future__ import annotations

import wave
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.models.silero import CHUNK, SAMPLE_RATE

SPEECH = Path(__file__).parent / "data/speech.wav"


def read_chunks(path: Path, device: str = "cpu") -> list[Tensor]:
    """The recording (16 kHz, mono, 16 bit) as (1, 512) chunks in [-1, 1], the last one filled up with silence."""
    with wave.open(str(path)) as file:
        found = (file.getframerate(), file.getnchannels(), 8 * file.getsampwidth())
        if found != (SAMPLE_RATE, 1, 16):
            raise ValueError(f"{path}: {found} (rate, channels, bits); the model takes {(SAMPLE_RATE, 1, 16)}")
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2").astype(np.float32) / 32768
    samples = np.pad(samples, (0, -len(samples) % CHUNK))
    return list(torch.from_numpy(samples).to(device).view(-1, 1, CHUNK))


def speech_spans(probabilities: Sequence[float], threshold: float, gap: int) -> list[tuple[float, float]]:
    """(start, end) in seconds where the probability is at least `threshold`, bridging pauses of up to `gap` chunks."""
    spans: list[list[int]] = []
    speech = (index for index, probability in enumerate(probabilities) if probability >= threshold)
    for index in speech:
        if spans and index - spans[-1][1] <= gap:
            spans[-1][1] = index + 1
        else:
            spans.append([index, index + 1])
    seconds = CHUNK / SAMPLE_RATE
    return [(start * seconds, end * seconds) for start, end in spans]


def sparkline(values: Sequence[float], width: int) -> str:
    """Values in [0, 1] as one line of bars, neighbours folded to their maximum where there are more than `width`."""
    columns = min(width, len(values))
    by_column = groupby(enumerate(values), key=lambda item: item[0] * columns // len(values))
    folded = [max(value for _, value in column) for _, column in by_column]
    return "".join(" ▁▂▃▄▅▆▇█"[round(8 * value)] for value in folded)
