"""What the tests of Moshi, PersonaPlex and their codecs share: states compared, streams exchanged, replays counted."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

import cadence_fx
from tests.harness import assert_same


def state_of(module: Any) -> dict[str, Any]:
    """Every tensor and number in the vendor's state objects, by module and field."""
    found: dict[str, Any] = {}
    for name, state in module.get_streaming_state().items():
        fields = dict(vars(state))
        ring = vars(fields.pop("kv_cache", None) or SimpleNamespace())
        fields |= {f"kv_cache.{field}": value for field, value in ring.items()}
        found |= {f"{name}.{field}": value for field, value in fields.items() if isinstance(value, (Tensor, int))}
    return found


def assert_same_state(actual: Any, expected: Any, when: str) -> None:
    """Two streams are equally far, in every byte."""
    theirs, ours = state_of(expected), state_of(actual)
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        if isinstance(value, Tensor):
            assert_same(ours[name], value, f"{name} {when}")
        else:
            assert ours[name] == value, f"{name} {when}"


def exchange_two_streams(pair: Any, calls: int = 50) -> None:
    """Two streams on one pair of codecs, whose states are put in by turns; the one that waits is left as it was."""
    streams: list[list[Any]] = [[], []]
    for _ in range(2):
        pair.begin()
        for mimi, kept in zip(pair.both, streams, strict=True):
            kept.append(mimi.get_streaming_state())
    for i in range(calls):
        now = i % 5 % 2
        for mimi, kept in zip(pair.both, streams, strict=True):
            mimi.set_streaming_state(kept[now])
        if i in (20, 33):
            pair.each("reset_streaming")
        pair.frame()
        for mimi, kept in zip(pair.both, streams, strict=True):
            mimi.set_streaming_state(kept[1 - now])
        pair.check_state()


def check_replays(steps: Iterable[Any], replays: int) -> None:
    """So many replays of each step, and nothing else."""
    for step in steps:
        report = cadence_fx.report(step)
        assert (report["replays"], report["misses"], report["late_captures"]) == (replays, {}, 0), str(report)
