"""Workspaces without memory on a device: replays do without it, eager calls and captures get it for a while."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import cadence_fx
from cadence_fx.lookup import program_of
from cadence_fx.parking import is_parked, park
from tests.backend.test_parking import Passes, Reads, contract, stream
from tests.harness import compile_with
from tests.toys import B, C

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize(("kind", "parked"), [(Passes, True), (Reads, False)])
def test_stream_on_a_device(kind: type[Passes], parked: bool) -> None:
    with torch.device("cuda"):
        module = kind().cuda()
        step = compile_with(module, contract())
        park([module.work])
        cadence_fx.warm_up(step, torch.randn(B, 2, C), torch.randn(B, 2, C))
        assert is_parked(module.work) == parked
        stream(module, step, 6)
        with cadence_fx.disabled():
            stream(module, step, 2)
        stream(module, step, 4)
    ledger = program_of(step, "test").ledger
    assert ledger.replays == 10 and not ledger.late_captures
    assert is_parked(module.work) == parked


def test_memory_goes_back_to_the_allocator() -> None:
    work = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated()
    park([work])
    assert before - torch.cuda.memory_allocated() >= 64 << 20
