"""Predicted beside measured: what a warm-up should have come to, and what its classes and storage are."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from cadence_fx.capture import ReplayClass
from cadence_fx.prediction import Prediction
from cadence_fx.program import Program

# How far bytes may be off, of the measured ones.
TOLERANCE = 0.05


def compare(
    prediction: Prediction, program: Program, classes: Sequence[ReplayClass], workspaces: Mapping[str, int]
) -> dict[str, Any]:
    """Predicted beside measured, and whether it held: classes equal, bytes within `TOLERANCE`.

    Args:
        classes: each once, in the order of their capture.
        workspaces: measured bytes, by what the user calls them.
    """
    first: dict[str, ReplayClass] = {}
    for entry in classes:
        first.setdefault(entry.plan.label, entry)
    carries = [carry for key, carry in program.carries.items() if key[-1] == prediction.inference]
    pairs = {
        "classes": (len(prediction.staging), len(first)),
        "staging": (sum(prediction.staging.values()), sum(map(_held, first.values()))),
        "carries": (sum(prediction.carries.values()), sum(c.flat.untyped_storage().nbytes() for c in carries)),
        "workspaces": (sum(prediction.workspaces.values()), sum(workspaces.values())),
    }
    found: dict[str, Any] = {name: {"predicted": a, "measured": b} for name, (a, b) in pairs.items()}
    exact = pairs["classes"][0] == pairs["classes"][1]
    near = all(abs(a - b) <= TOLERANCE * b for name, (a, b) in pairs.items() if name != "classes")
    return found | {
        "held": exact and near,
        "further_classes": len(classes) - len(first),
        "further_staging": sum(map(_held, classes)) - pairs["staging"][1],
        "order": _order(prediction, first),
    }


def _held(entry: ReplayClass) -> int:
    return sum(buffer.untyped_storage().nbytes() for buffer in entry.buffers)


def _order(prediction: Prediction, classes: Mapping[str, ReplayClass]) -> dict[str, int]:
    """Pairs of classes of which one has more bytes in flight, and how many of them were captured in that order of
    seconds."""
    pairs = [
        (a, b) if prediction.flight[a] > prediction.flight[b] else (b, a)
        for a, b in itertools.combinations([label for label in classes if label in prediction.flight], 2)
        if prediction.flight[a] != prediction.flight[b]
    ]
    right = sum(classes[more].capture_seconds >= classes[less].capture_seconds for more, less in pairs)
    return {"pairs": len(pairs), "as_predicted": right}
