"""Every choice of passes on the classes of both released decoders, each certified like the default one.

Compiling a step for every choice would take an hour: each class is captured once more for its share of the choices.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest

import cadence_fx
from bench import vendor
from bench.vendor import TINY
from cadence_fx.adapters.token2wav import Token2WavStream
from cadence_fx.capture import ReplayClass, capture
from cadence_fx.passes import default_passes, is_needed, optional_passes, select_passes
from cadence_fx.plan import Plan
from cadence_fx.ways import Subject, ways

OPTIONAL = [pass_.name for pass_ in optional_passes()]
NAMES = [pass_.name for pass_ in default_passes() if not is_needed(pass_)] + OPTIONAL
CHOICES: list[Any] = [
    dict.fromkeys(OPTIONAL, True),
    [],
    *([name] for name in NAMES),
    *({name: False} for name in NAMES if name not in OPTIONAL),
    *map(list, combinations(NAMES, 2)),
]
SHARES = 8  # classes take turns


@pytest.mark.parametrize("package", [vendor.STEPAUDIO2, vendor.MINICPMO_UTILS], ids=lambda package: package.name)
def test_every_choice_of_passes_is_certified(package: vendor.Package, monkeypatch: pytest.MonkeyPatch) -> None:
    if not vendor.available(package):
        pytest.skip("the vendor package is not installed")
    subjects: list[tuple[Subject, str]] = []
    tried: Counter[str] = Counter()

    def seen(subject: Subject, passes: Any, edits: Any, name: str) -> Any:
        subjects.append((subject, name))
        return ways(subject, passes, edits, name)

    def capture_all(plan: Plan, args: Sequence[Any], *rest: Any) -> Any:
        subject, name = subjects[-1]
        number = len(subjects)
        for choice in [CHOICES[0], *CHOICES[1 + number % SHARES :: SHARES]]:  # the whole of them in every class
            fresh = ways(subject, select_passes(choice), [], name)
            lists: dict[str, Any] = {name: list(getattr(plan, name)) for name in ("fixed", "written", "mutated")}
            again = dataclasses.replace(plan, ways=fresh, notes=[], **lists)  # a capture changes them
            entry = capture(again, args, *rest)
            assert isinstance(entry, ReplayClass), (choice, entry)
            assert again.compared == 3
            assert not [note for note in again.notes if " dropped: " in note], (choice, again.notes)
            entry.recording.close()
            tried[str(choice)] += 1
        return capture(plan, args, *rest)

    monkeypatch.setattr("cadence_fx.graph.ways", seen)
    monkeypatch.setattr("cadence_fx.table.capture", capture_all)
    stream = Token2WavStream(vendor.build_token2wav(TINY, package=package), backend=cadence_fx.cadence)
    stream.prime()
    reports = stream.warm_up(cadence_fx.warm_up, cadence_fx.restore)
    assert sum(report["classes"] for report in reports) == len(subjects) >= SHARES
    assert len(tried) == len(CHOICES)
