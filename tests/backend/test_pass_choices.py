"""Every choice of passes gives eager's bytes: each alone, each left out, pairs, and all with the optional ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cadence_fx
from cadence_fx.passes import default_passes, is_needed, optional_passes
from tests.harness import Pair
from tests.streams import STREAMS, Stream

OPTIONAL = [pass_.name for pass_ in optional_passes()]
NAMES = [pass_.name for pass_ in default_passes() if not is_needed(pass_)] + OPTIONAL
CHOICES: list[Any] = [
    [],
    *([name] for name in NAMES),
    *({name: False} for name in NAMES if name not in OPTIONAL),
    *map(list, combinations(NAMES, 2)),
    dict.fromkeys(OPTIONAL, True),
]


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield


def check(stream: Stream, choice: Any) -> None:
    pair = Pair(stream, passes=choice)
    for turn in range(2):
        pair.restart(turn)
        for _ in range(5):
            pair.call()
    assert pair.missed() == Counter()
    rows = cadence_fx.report(pair.step)["class_table"]
    assert rows and not [note for row in rows for note in row["notes"] if " dropped: " in note]


@pytest.mark.parametrize("number", range(len(CHOICES)), ids=lambda n: "+".join(map(str, CHOICES[n])) or "none")
def test_each_choice_on_some_streams(number: int) -> None:
    """Streams take turns, so that each meets choices of every kind."""
    check(STREAMS[number % len(STREAMS)], CHOICES[number])
    torch._dynamo.reset()


@pytest.mark.parametrize("stream", STREAMS, ids=lambda s: s.name)
def test_all_passes_on_each_stream(stream: Stream) -> None:
    check(stream, dict.fromkeys(OPTIONAL, True))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(STREAMS), st.sets(st.sampled_from(NAMES)))
def test_any_subset(stream: Stream, names: set[str]) -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        check(stream, sorted(names))
