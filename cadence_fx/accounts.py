"""Predicted beside measured: what a warm-up should have come to, and what its classes and storage are."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
        classes: each once, in the order of their capture. A state that they only read is in a buffer of each: one of
            them counts as its carry, since nothing declared tells that it is none, and the others count as further
            staging.
        workspaces: measured bytes, by what the user calls them.

    States that no graph reads (``unread``) have no storage.
    """
    first: dict[str, ReplayClass] = {}
    for entry in classes:
        first.setdefault(entry.plan.label, entry)
    carries = [carry for key, carry in program.carries.items() if key[-1] == prediction.inference]
    buffers = {id(entry): staged(entry) for entry in classes}
    once: dict[str, int] = {}
    for entry in first.values():
        once |= buffers[id(entry)].states
    pairs = {
        "classes": (len(prediction.staging), len(first)),
        "staging": (sum(prediction.staging.values()), sum(buffers[id(entry)].arguments for entry in first.values())),
        "carries": (
            sum(prediction.carries.values()),
            sum(c.flat.untyped_storage().nbytes() for c in carries) + sum(once.values()),
        ),
        "workspaces": (sum(prediction.workspaces.values()), sum(workspaces.values())),
    }
    met = {instance.region.name for planner, _ in program.graphs for instance in planner.binding.instances}
    found: dict[str, Any] = {name: {"predicted": a, "measured": b} for name, (a, b) in pairs.items()}
    exact = pairs["classes"][0] == pairs["classes"][1]
    near = all(abs(a - b) <= TOLERANCE * b for name, (a, b) in pairs.items() if name != "classes")
    return found | {
        "held": exact and near,
        "unread": [name for name in prediction.carries if name not in met],
        "further_classes": len(classes) - len(first),
        "further_staging": sum(each.nbytes for each in buffers.values()) - pairs["staging"][1] - sum(once.values()),
        "order": _order(prediction, first),
    }


class Staged(NamedTuple):
    """Bytes of a class's static buffers: of a call's arguments, and of states that the class only reads, by name."""

    arguments: int
    states: dict[str, int]

    @property
    def nbytes(self) -> int:
        """All of them."""
        return self.arguments + sum(self.states.values())


def staged(entry: ReplayClass) -> Staged:
    """Bytes that a class stages."""
    sizes = {i: b.untyped_storage().nbytes() for i, b in zip(entry.plan.staged, entry.buffers, strict=True)}
    states = {name: sizes.pop(i) for i, name in entry.plan.only_read.items()}
    return Staged(sum(sizes.values()), states)


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
