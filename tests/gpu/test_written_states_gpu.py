"""States that are written in place and handed on, from CUDA graphs."""

from __future__ import annotations

import pytest

from tests.backend.test_written_states import KINDS, Bound, play

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_in_place_is_the_users_own(kind: type[Bound]) -> None:
    report = play(kind, "cuda", warm=True)
    assert report["replays"] == 6 and report["misses"] == {"disabled": 2}
