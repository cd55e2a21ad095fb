"""Every toy stream through ``torch.compile(..., backend="cadence")``: bytes, addresses, catalog, counts."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import cadence_fx
from cadence_fx import ways
from tests.harness import MODES, Pair, check_stream
from tests.streams import BY_NAME, STREAMS, Stream, declared, visits
from tests.toys import BufferShift


@pytest.mark.parametrize("stream", STREAMS, ids=lambda s: s.name)
def test_catalog_is_what_the_eager_module_visits(stream: Stream) -> None:
    points = list(declared(stream.contract))
    assert len(points) == len(set(points))
    assert set(points) == visits(stream)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stream", STREAMS, ids=lambda s: s.name)
def test_stream_equals_eager(stream: Stream, mode: str) -> None:
    with MODES[mode]():
        check_stream(stream)


@pytest.mark.parametrize("name", ["Rebound", "BufferShift", "RingByIndex", "LayerAttributes"])
def test_warm_up_leaves_attributes_as_they_were(name: str) -> None:
    with torch.no_grad():
        pair = Pair(BY_NAME[name], warm=False)
        pair.eager.restart(90)
        pair.warm_up()
        pair.eager.restart(90)
        pair.live.restart(90)
        pair.call()
        pair.check_kept()


@pytest.mark.parametrize("name", ["Rebound", "BufferShift", "RingByIndex", "LayerAttributes"])
def test_buffers_refilled_and_attributes_rebound_in_the_middle(name: str) -> None:
    with torch.no_grad():
        pair = Pair(BY_NAME[name])
        for turn in range(4):
            for _ in range(turn + 1):
                pair.call()
            pair.restart(turn)
        pair.check_kept()
        assert pair.missed() == Counter()


class OutputsBuffer(BufferShift):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return self.hist[:, -2:]


@pytest.mark.parametrize("rewritten", [True, False])
def test_an_output_that_is_a_view_of_a_buffer_stays_one(rewritten: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager hands out a view of memory that later calls write, and so does a replay."""
    if not rewritten:
        monkeypatch.setattr(ways, "_rewritten", lambda *args: None)
    with torch.no_grad():
        pair = Pair(replace(BY_NAME["BufferShift"], module=OutputsBuffer))
        for _ in range(5):
            pair.call()
            pair.check_kept()
        assert len({a.data_ptr() for a, _ in pair.kept}) == 1
        assert pair.missed() == Counter()


def test_every_class_of_a_stream_is_captured_once() -> None:
    with torch.no_grad():
        pair = Pair(BY_NAME["PartialFlush"])
        assert pair.before["captures"] == len(visits(pair.stream))


@pytest.mark.parametrize("name", ["PromptAppend", "BufferShift", "RingByIndex", "SolverWorkspace", "PartialFlush"])
def test_audit_of_a_healthy_stream_reports_nothing(name: str) -> None:
    """The stock computation runs beside every call, turn boundaries included, and changes nothing."""
    with torch.no_grad():
        pair = Pair(BY_NAME[name])
        with cadence_fx.audit(pair.step):
            for turn in range(3):
                pair.restart(turn)
                for _ in range(6):
                    pair.call()
        pair.call()
        pair.check_kept()
        assert pair.missed() == Counter()
