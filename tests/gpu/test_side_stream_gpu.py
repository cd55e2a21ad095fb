"""A compiled stream on a side stream, with the caller's stream busy beside it: bytes, and who waits for whom."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import cadence_fx
from tests.harness import Pair, assert_same
from tests.streams import BY_NAME

pytestmark = pytest.mark.gpu

LONG = 200_000_000  # cycles, about 0.1 s


@pytest.mark.parametrize("name", ["PromptAppend", "RingByIndex", "SolverWorkspace"])
def test_a_stream_beside_other_work_equals_eager(name: str) -> None:
    with torch.inference_mode():
        pair = Pair(BY_NAME[name], "cuda")
        side = cadence_fx.SideStream(pair.step)

        def begun(*given: Any) -> Any:
            pending = side(*given)
            del given
            torch.cuda._sleep(1_000_000)
            torch.randn(1 << 16, device="cuda").mul_(2)
            return pending.result()

        pair.live.step = begun
        for turn in range(2):
            pair.restart(turn)
            for _ in range(8):
                pair.call()
        pair.check_kept()
        assert pair.missed() == Counter()


def test_the_callers_stream_goes_on_and_waits_for_the_result_alone() -> None:
    side = cadence_fx.SideStream(_slow)
    x = torch.full((1 << 20,), 3.0, device="cuda")
    torch.cuda.synchronize()
    pending = side(x)
    del x
    other = torch.full((1 << 20,), 5.0, device="cuda")  # not in the memory that the side stream still reads
    done = torch.cuda.current_stream().record_event()
    done.synchronize()
    assert pending._done is not None and not pending._done.query()  # the side stream is at it still
    y = pending.result()
    assert_same(y, torch.full((1 << 20,), 6.0, device="cuda"), "output")
    assert other.eq(5).all()


def _slow(x: Tensor) -> Tensor:
    torch.cuda._sleep(LONG)
    return x * 2
