"""What `plan` returns: regions, callables and totals, as objects, as data for JSON, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from cadence_fx.estimates import sessions
from cadence_fx.verdicts import Verdict


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """One region. Extents and strides are frames of its frame axis; bytes are None where no shape is known.

    Attributes:
        mode: how its extent moves: grows (and stays at the bound), grows and drops, no bound, pinned, ring, scratch,
            read only, constant.
        start, attended: the extents that its calls meet first and at last; ``attended`` is None without a bound.
        envelope: the most frames in flight within one call.
        classes: K, the extents that its calls meet; ``arithmetic`` says how.
        bytes: of its storage, by the bound, or by the envelope for scratch; ``stock_bytes``: as shipped.
        shared: there is one for all sessions.
    """

    name: str
    place: str
    clock: str
    mode: str
    stride: int
    start: int
    attended: int | None
    envelope: int | None
    classes: int | None
    arithmetic: str
    bytes: int | None
    stock_bytes: int | None
    shared: bool
    verdict: Verdict

    @property
    def window(self) -> int | None:
        """W, the frames between the first extent and the bound."""
        return None if self.attended is None else self.attended - self.start

    @property
    def over_reservation(self) -> float | None:
        """What is allocated as shipped, over what is declared (paper equation 2)."""
        return self.stock_bytes / self.bytes if self.bytes and self.stock_bytes is not None else None

    def extent(self, call: int) -> int:
        """The extent that call number ``call`` of a turn meets, from 0."""
        raw = self.start + call * self.stride
        if self.attended is None or raw <= self.attended:
            return raw
        if self.mode != "grows, drops":
            return self.attended
        return self.start + (call % self.classes) * self.stride if self.classes else self.start

    def as_dict(self) -> dict[str, Any]:
        ratio = self.over_reservation
        return {
            "name": self.name, "place": self.place, "clock": self.clock, "mode": self.mode, "stride": self.stride,
            "window": self.window, "start": self.start, "attended": self.attended, "envelope": self.envelope,
            "classes": self.classes, "arithmetic": self.arithmetic, "bytes": self.bytes,
            "stock_bytes": self.stock_bytes, "over_reservation": None if ratio is None else round(ratio, 3),
            "shared": self.shared, **_verdict(self.verdict),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class InputPlan:
    """One staged argument: its bytes in a normal call, at most, and in the buffers of all classes together; None where
    no shape is known."""

    name: str
    bytes: int | None
    most_bytes: int | None
    staging_bytes: int | None


@dataclass(frozen=True, slots=True)
class CallablePlan:
    """One callable. ``classes`` is None without a bound, and an upper bound where it is not ``exact``."""

    name: str
    clocks: tuple[str, ...]
    advances: int
    classes: int | None
    exact: bool
    arithmetic: str
    limit: int
    regions: tuple[RegionPlan, ...]
    inputs: tuple[InputPlan, ...]
    operators: int | None
    capture_seconds: float | None
    verdict: Verdict

    @property
    def staging_bytes(self) -> int | None:
        """Of the buffers of all classes; None where it has no number of classes, or nothing is known of bytes."""
        staged = [entry.staging_bytes for entry in self.inputs]
        if not staged and self.regions and all(region.bytes is None for region in self.regions):
            return None
        return None if self.classes is None or None in staged else sum(filter(None, staged))

    @property
    def frozen_bytes(self) -> int | None:
        """Of the regions that its graphs hold by address; None where the bytes of one are not known."""
        held = [region.bytes for region in self.regions if region.mode != "constant"]
        return None if None in held else sum(filter(None, held))

    def as_dict(self) -> dict[str, Any]:
        seconds = self.capture_seconds
        return {
            "name": self.name, **_verdict(self.verdict), "clocks": list(self.clocks), "classes": self.classes,
            "exact": self.exact, "arithmetic": self.arithmetic, "max_classes": self.limit,
            "staging_bytes": self.staging_bytes, "frozen_bytes": self.frozen_bytes, "operators": self.operators,
            "capture_seconds": None if seconds is None else round(seconds, 1),
            "regions": [region.as_dict() for region in self.regions],
            "inputs": [{"name": i.name, "bytes": i.bytes, "most_bytes": i.most_bytes,
                        "staging_bytes": i.staging_bytes} for i in self.inputs],
        }  # fmt: skip


def _known(amounts: Sequence[int | None]) -> int | None:
    """The sum of those amounts that are known; None where there are some and none is known."""
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if known or not amounts else None


def _verdict(verdict: Verdict) -> dict[str, str]:
    return {"verdict": verdict.word, "reason": verdict.reason, "remedy": verdict.remedy}


@dataclass(frozen=True)
class PlanReport:
    """A plan: its callables, and what they add up to. ``str`` of it is a table, ``as_dict`` is for JSON.

    Totals are of the callables that can be captured; others run eager, as shipped, and their regions count as shipped
    where that is known. Activations are in no configuration, so ``peak_bytes`` is what is resident between calls.
    """

    name: str
    callables: tuple[CallablePlan, ...]
    weights: int | None
    device_memory: int | None
    notes: tuple[str, ...]

    @property
    def capturable(self) -> bool:
        """Whether every callable can be captured."""
        return all(each.verdict.capturable for each in self.callables)

    @cached_property
    def classes(self) -> int:
        return sum(each.classes or 0 for each in self.callables if each.verdict.capturable)

    def _staging(self) -> list[int | None]:
        """Bytes that each callable stages which is captured."""
        return [each.staging_bytes for each in self.callables if each.verdict.capturable]

    @cached_property
    def staging_bytes(self) -> int | None:
        """None where it is not known of any callable that is captured, as are the sums below of which nothing is."""
        return _known(self._staging())

    def _regions(self, shared: bool) -> list[tuple[int | None, int | None]]:
        """Bytes as declared and as shipped of each region."""
        found = []
        for each in self.callables:
            for region in each.regions:
                if region.shared == shared:
                    stock = region.stock_bytes if region.stock_bytes is not None else region.bytes
                    sized = each.verdict.capturable and region.mode != "constant"  # else it is left as shipped
                    found.append((region.bytes if region.bytes is not None and sized else stock, stock))
        return found

    @cached_property
    def shared_bytes(self) -> int | None:
        """Weights, staging and workspaces: there once, however many sessions take turns."""
        return _known([self.weights, self.staging_bytes, *(declared for declared, _ in self._regions(True))])

    @cached_property
    def session_bytes(self) -> int | None:
        """The state of one session."""
        return _known([declared for declared, _ in self._regions(False)])

    @cached_property
    def stock_shared_bytes(self) -> int | None:
        return _known([self.weights, *(stock for _, stock in self._regions(True))])

    @cached_property
    def stock_session_bytes(self) -> int | None:
        return _known([stock for _, stock in self._regions(False)])

    @property
    def peak_bytes(self) -> int | None:
        """Resident with one session; None where its state is not known."""
        return None if self.session_bytes is None else (self.shared_bytes or 0) + self.session_bytes

    @property
    def stock_peak_bytes(self) -> int | None:
        return None if self.stock_session_bytes is None else (self.stock_shared_bytes or 0) + self.stock_session_bytes

    @cached_property
    def partial(self) -> frozenset[str]:
        """Which of "staging", "session" and "shared" leave out something whose bytes are not known."""
        amounts = {
            "staging": self._staging(),
            "session": [declared for declared, _ in self._regions(False)],
            "shared": [declared for declared, _ in self._regions(True)],
        }
        return frozenset(name for name, each in amounts.items() if None in each)

    @cached_property
    def capture_seconds(self) -> float | None:
        """Estimated; None where the operators of a callable that can be captured are not known."""
        known = [each.capture_seconds for each in self.callables if each.verdict.capturable]
        return None if None in known or not known else sum(seconds for seconds in known if seconds is not None)

    @property
    def sessions(self) -> int | None:
        """How many fit on the device; None without one, or where a session has no bytes or they are not known."""
        return self._fitting(self.shared_bytes, self.session_bytes)

    @property
    def stock_sessions(self) -> int | None:
        return self._fitting(self.stock_shared_bytes, self.stock_session_bytes)

    def _fitting(self, shared: int | None, each: int | None) -> int | None:
        if self.device_memory is None or each is None:
            return None
        return sessions(self.device_memory, shared or 0, each)

    def callable(self, name: str) -> CallablePlan:
        """The callable of that name; KeyError when there is none."""
        return {each.name: each for each in self.callables}[name]

    def region(self, callable: str, name: str) -> RegionPlan:
        """A region of a callable; KeyError when there is none."""
        return {region.name: region for region in self.callable(callable).regions}[name]

    @property
    def unweighed(self) -> list[str]:
        """Regions and inputs whose shapes are not known."""
        amounts = [(f"{c.name}.{r.name}", r.bytes) for c in self.callables for r in c.regions]
        amounts += [(f"{c.name}.{i.name}", i.bytes) for c in self.callables for i in c.inputs]
        return [name for name, count in amounts if count is None]

    def as_dict(self) -> dict[str, Any]:
        """Numbers and text that JSON holds."""
        seconds = self.capture_seconds
        return {
            "name": self.name,
            "capturable": self.capturable,
            "callables": [each.as_dict() for each in self.callables],
            "totals": {
                "classes": self.classes, "staging_bytes": self.staging_bytes, "weights_bytes": self.weights,
                "shared_bytes": self.shared_bytes, "session_bytes": self.session_bytes,
                "peak_bytes": self.peak_bytes, "stock_peak_bytes": self.stock_peak_bytes,
                "capture_seconds": None if seconds is None else round(seconds, 1),
                "device_bytes": self.device_memory, "sessions": self.sessions, "stock_sessions": self.stock_sessions,
            },
            "unweighed": self.unweighed,
            "notes": list(self.notes),
        }  # fmt: skip

    def __str__(self) -> str:
        from cadence_fx.plan_text import plan_text  # the text is made from reports, not the reverse

        return plan_text(self)

    def picture(self, path: str | Path) -> None:
        """Draws it into a .png or .svg file; see `plan_picture`."""
        from cadence_fx.plan_picture import draw

        draw(self, path)


def sample(region: RegionPlan, most: int = 4) -> str:
    """The first extents and the last: ``302, 352, 402``; ``6,000, 6,001, ... 8,000``."""
    if region.classes is None:
        return ", ".join(f"{region.extent(call):,}" for call in range(most - 1)) + ", ..."
    calls = list(takewhile(lambda call: call < (region.classes or 0), range(most)))
    if region.classes > most:
        return ", ".join(f"{region.extent(call):,}" for call in calls[:2]) + f", ... {region.attended or 0:,}"
    return ", ".join(f"{region.extent(call):,}" for call in calls)
