"""However a retention is spelled: the right ones are proved, wrong ones never, and the rewrite keeps every byte."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cadence_fx.passes import Proved, prove_retention, run_passes
from tests.passes.spellings import SPELLINGS, Case, cases, program
from tests.passes.toolbox import assert_same_bytes, context, run_on_carries, slot, trace

SETTINGS = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def check_bytes(case: Case, frames: list[int]) -> None:
    function = program(case, frames)
    gm = trace(function, *case.examples())
    ctx = context(gm, slot(gm, "state_1", 1, case.axis, retention=case.retention, advance=case.advance))
    rewritten = run_passes(gm, ctx)
    x, state = case.examples()
    want = function(x, state.clone())
    assert_same_bytes(run_on_carries(rewritten, ctx, [x, state]), want)


@pytest.mark.parametrize("spelling", sorted(SPELLINGS))
@SETTINGS
@given(data=st.data())
def test_right_is_proved_and_keeps_its_bytes(spelling: str, data: st.DataObject) -> None:
    case = data.draw(cases(spelling))
    function = program(case, case.frames())
    gm = trace(function, *case.examples())
    verdict = prove_retention(gm, slot(gm, "state_1", 1, case.axis, retention=case.retention, advance=case.advance))
    assert isinstance(verdict, Proved), verdict
    assert verdict.spans == case.retention.survivors(case.extent, case.advance)
    check_bytes(case, case.frames())


@SETTINGS
@given(case=cases(), data=st.data())
def test_wrong_is_never_proved_and_still_keeps_its_bytes(case: Case, data: st.DataObject) -> None:
    right = case.frames()
    size = len(right) if data.draw(st.booleans()) else data.draw(st.integers(1, len(right) + 1))
    assume(size <= case.extent + case.advance)
    wrong = data.draw(st.lists(st.integers(0, case.extent + case.advance - 1), min_size=size, max_size=size))
    assume(wrong != right)
    gm = trace(program(case, wrong), *case.examples())
    verdict = prove_retention(gm, slot(gm, "state_1", 1, case.axis, retention=case.retention, advance=case.advance))
    assert not isinstance(verdict, Proved), verdict
    check_bytes(case, wrong)
