"""How long warm-up takes, and how many sessions fit: arithmetic on a plan's numbers.

The seconds of a callable are a line in the operators that one of its calls runs: following, tracing and rewriting code
costs by the operator, once for the first class and less for each further one, whose like is known by then.

The coefficients are least squares over the four callables of bench/results/warm_up_nvidia_h200.json
(tests/unit/test_estimates.py fits them again). The line is within `WITHIN` of these four, on one machine: an estimate,
which tells seconds from minutes, and orders callables that are further apart than that of both.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

FIRST = (3.907, 0.001150)  # seconds of a callable's first class: fixed, and for each operator
FURTHER = (0.369, 0.000456)  # of each further class
WITHIN = 1.3  # seconds


def capture_seconds(operators: int, classes: int) -> float:
    """Seconds from `torch.compile` to a sealed catalog for one callable, estimated."""
    first, further = (fixed + each * operators for fixed, each in (FIRST, FURTHER))
    return first + further * (classes - 1) if classes else 0.0


def order_of(seconds: Mapping[str, float]) -> list[tuple[str, str]]:
    """Pairs of callables of which the first takes longer, where their estimates are too far apart to mislead."""
    pairs = itertools.permutations(seconds, 2)
    return [(more, less) for more, less in pairs if seconds[more] - seconds[less] > 2 * WITHIN]


def sessions(device: int, shared: int, each: int) -> int | None:
    """Sessions that fit on a device of so many bytes, None when a session costs nothing."""
    if each == 0:
        return None if shared <= device else 0
    return max(0, (device - shared) // each)
