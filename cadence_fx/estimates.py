"""How long warm-up takes, and how many sessions fit: arithmetic on a plan's numbers.

The seconds of a callable are a line in the operators that one of its calls runs: following, tracing and rewriting code
costs by the operator, once for the first class and less for each further one, whose like is known by then.

The coefficients are least squares over the four callables of bench/results/warm_up_nvidia_h200.json
(tests/unit/test_estimates.py fits them again). The line is within 1.3 s of these four, on one machine: an estimate,
which orders callables and tells seconds from minutes.
"""

from __future__ import annotations

FIRST = (3.558, 0.000995)  # seconds of a callable's first class: fixed, and for each operator
FURTHER = (0.485, 0.000394)  # of each further class


def capture_seconds(operators: int, classes: int) -> float:
    """Seconds from `torch.compile` to a sealed catalog for one callable, estimated."""
    first, further = (fixed + each * operators for fixed, each in (FIRST, FURTHER))
    return first + further * (classes - 1) if classes else 0.0


def sessions(device: int, shared: int, each: int) -> int | None:
    """Sessions that fit on a device of so many bytes, None when a session costs nothing."""
    if each == 0:
        return None if shared <= device else 0
    return max(0, (device - shared) // each)
