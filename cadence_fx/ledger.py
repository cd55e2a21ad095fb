"""Counts of everything that happened, by reason, and one log line for each distinct reason.

The ledger is the single record of captures, replays, misses, refusals and invalidations; `report` prints it. Logging
follows PyTorch's own convention: silent unless asked for (`TORCH_LOGS="+cadence_fx"`, or the `logging` module).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Iterator

log = logging.getLogger("cadence_fx")
log.addHandler(logging.NullHandler())

# Distinct explanations kept and logged for one reason: a stream of odd sizes must not fill the memory or the log.
_MOST_DETAILS = 64
# Latencies of the most recent calls kept for quantiles.
_WINDOW = 8192

# Of compiling: Dynamo; from its graph to a static one; passes and proofs; recording and certificate; eager runs of
# warm-up; the rest of warm-up.
PHASES = ("dynamo", "tracing", "passes", "capture", "eager", "other")


class Ledger:
    """Counters of one `torch.compile` call or one `ExactShapeReplay`.

    Attributes:
        replays: calls answered by a captured class.
        misses: calls that ran eager, by reason.
        refusals: classes that were not admitted, by reason.
        invalidations: classes dropped because what they were bound to changed, by reason.
        eager_operators: operator calls that ran eager in the middle of a replay, by reason.
        captures: classes captured; `late_captures` of them after the seal.
        adoptions: states copied into a carry because they did not live there.
        evacuations: states moved out of a carry because somebody still held them.
        layouts: whether any state has had another layout in eager than a contiguous one.
        latencies_us: host microseconds of the most recent calls.
        seconds: where the time of compiling went, by phase; a phase does not count those inside it.
        details: reason → distinct explanations (argument, axis, the user's file and line).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.replays = 0
        self.captures = 0
        self.late_captures = 0
        self.adoptions = 0
        self.evacuations = 0
        self.capture_seconds = 0.0
        self.layouts = False
        self.misses: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.invalidations: Counter[str] = Counter()
        self.eager_operators: Counter[str] = Counter()
        self.details: dict[str, dict[str, int]] = {}
        self.latencies_us: deque[float] = deque(maxlen=_WINDOW)
        self.seconds: dict[str, float] = {}
        self._phases: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the time inside as this phase's, except what phases inside it count."""
        self._pass_time()
        self._phases.append(phase)
        try:
            yield
        finally:
            self._pass_time()
            self._phases.pop()

    def spent(self) -> float:
        """Seconds of all phases so far."""
        self._pass_time()
        return sum(self.seconds.values())

    def _pass_time(self) -> None:
        now = time.perf_counter()
        if self._phases:
            phase = self._phases[-1]
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now

    def begin_traffic(self) -> None:
        """Forget what warm-up itself did (its calls are not traffic); captures, refusals and their reasons stay."""
        self.replays = self.adoptions = self.evacuations = 0
        for reason in self.misses.keys() - self.refusals.keys():
            self.details.pop(reason, None)
        self.misses.clear()
        self.eager_operators.clear()
        self.latencies_us.clear()

    def miss(self, reason: str, detail: str = "") -> None:
        """Count a call that runs eager."""
        self.misses[reason] += 1
        self._note("eager", reason, detail)

    def refuse(self, reason: str, detail: str = "") -> None:
        """Count a class that is not admitted."""
        self.refusals[reason] += 1
        self._note("refused", reason, detail)

    def run_inside(self, reason: str, detail: str) -> None:
        """Tell of an operator that runs eager in the middle of a class."""
        self._note("eager inside a class", reason, detail)

    def invalidate(self, reason: str, detail: str = "") -> None:
        """Count a captured class that is dropped."""
        self.invalidations[reason] += 1
        self._note("invalidated", reason, detail)

    def _note(self, verb: str, reason: str, detail: str) -> None:
        seen = self.details.setdefault(reason, {})
        if detail not in seen and len(seen) >= _MOST_DETAILS:
            detail = "and others"
        if detail not in seen:
            log.warning("%s: %s: %s%s", self.name, verb, reason, f": {detail}" if detail else "")
        seen[detail] = seen.get(detail, 0) + 1

    def quantiles_us(self) -> dict[str, float]:
        """p50, p95 and p99 of the host time of recent calls, in microseconds; empty before the first call."""
        if not self.latencies_us:
            return {}
        ordered = sorted(self.latencies_us)
        last = len(ordered) - 1
        return {f"p{q}": round(ordered[round(q / 100 * last)], 2) for q in (50, 95, 99)}
