"""What `bench.families` asks of one way to run a model family."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

import cadence_fx

EAGER, VENDOR, OURS = "eager", "vendor", "cadence"


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """One family in `bench.families`.

    Attributes:
        subject: a variant, by name, on a device, at a small size or the released one.
        variants: names of all.
        deterministic: whether the pinned protocol asks for `cadence_fx.deterministic`, too.
    """

    subject: Callable[[str, torch.device, bool], Subject]
    variants: tuple[str, ...]
    deterministic: bool = True


class Subject:
    """One variant, around a vendor's object of its own.

    Attributes:
        parts: what is timed, by name: each takes the number of a tick, runs it in the stream that is open and returns
            its results, which the next tick may overwrite.
        whole: the part that is all of a tick; its bytes are compared.
        steps: the compiled callables, none unless the variant is the backend.
        eager_calls: calls that an adapter ran eager, by reason.
    """

    parts: Mapping[str, Callable[[int], Iterable[Tensor]]]
    whole: str
    steps: Iterable[Callable[..., Any]] = ()
    eager_calls: Counter[str]

    def __init__(self) -> None:
        self.eager_calls = Counter()

    def serving(self) -> AbstractContextManager[Any]:
        """The modes that the family is served in."""
        return torch.no_grad()

    def warm_up(self) -> None:
        """Whatever happens before traffic."""

    def begin(self, seed: int) -> None:
        """A stream at its start, with the random generators at `seed`."""
        raise NotImplementedError

    def state(self) -> Iterable[Tensor]:
        """Every tensor that the stream is in."""
        raise NotImplementedError

    def misses(self) -> dict[str, int]:
        """Calls that did not replay, by reason."""
        found = Counter(self.eager_calls)
        for step in self.steps:
            report = cadence_fx.report(step)
            found.update(report["misses"])
            found["late capture"] += report["late_captures"]
        return dict(+found)

    def facts(self) -> dict[str, Any]:
        """Of the backend's classes: how many, and the seconds that their captures took."""
        reports = [cadence_fx.report(step) for step in self.steps]
        if not reports:
            return {}
        return {
            "classes": sum(report["classes"] for report in reports),
            "capture_s": round(sum(report["capture_seconds"] for report in reports), 1),
        }
