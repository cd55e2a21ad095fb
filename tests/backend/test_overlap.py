"""Arguments that share memory with each other, with weights or with the state; and where they start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from cadence_fx.replay import ExactShapeReplay
from tests.harness import Pair, assert_same
from tests.streams import BY_NAME


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_inputs_that_overlap_and_are_only_read() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2 + y, y.cumsum(0)

    replay = ExactShapeReplay(f)
    replay(torch.randn(8), torch.randn(8))
    for shift in (0, 4, 8):
        memory = torch.randn(16)
        x, y = memory[:8], memory[shift : shift + 8]
        for a, e in zip(replay(x, y), f(x, y), strict=True):
            assert_same(a, e, f"shift {shift}")
    assert replay.ledger.replays == 4 and not replay.ledger.misses


def test_an_input_that_overlaps_what_is_bound_by_pointer() -> None:
    def f(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    weight = torch.randn(16)
    replay = ExactShapeReplay(f, aliased=[weight])
    replay(torch.randn(16), weight)
    assert_same(replay(weight, weight), weight * weight, "the weight as input")


@pytest.mark.parametrize("written", ["x", "weight"])
def test_an_input_that_overlaps_what_is_written(written: str) -> None:
    def f(x: Tensor, weight: Tensor) -> Tensor:
        (x if written == "x" else weight).add_(1)
        return x * weight

    ours, theirs = (torch.arange(32.0) for _ in range(2))
    weight, twin = ours[:16], theirs[:16]
    replay = ExactShapeReplay(f, aliased=[weight])
    apart = torch.randn(16)
    assert_same(replay(apart.clone(), weight), f(apart.clone(), twin), "apart")
    for start in (0, 8, 16, 8):
        x, y = ours[start : start + 16], theirs[start : start + 16]
        assert_same(replay(x, weight), f(y, twin), f"from {start}")
        assert_same(ours, theirs, f"the memory they share, from {start}")


class Accumulates(nn.Module):
    """Writes a buffer that it also reads, or the argument; which of them it says at the start."""

    def __init__(self, written: str) -> None:
        super().__init__()
        self.register_buffer("total", torch.arange(16.0))
        self.written = written

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.total, Tensor)
        (self.total[4:] if self.written == "buffer" else x).add_(1)
        return x * 2 + self.total.sum()


@pytest.mark.parametrize("first", [False, True], ids=["after the capture", "first"])
@pytest.mark.parametrize("written", ["buffer", "argument"])
def test_an_input_that_overlaps_what_the_callable_has_by_itself(written: str, first: bool) -> None:
    ours, theirs = Accumulates(written), Accumulates(written)
    assert isinstance(ours.total, Tensor) and isinstance(theirs.total, Tensor)
    replay = ExactShapeReplay(ours)
    for i, shared in enumerate([first, not first, False, True]):
        x = torch.randn(4)
        x, y = (ours.total[8:12], theirs.total[8:12]) if shared else (x, x.clone())
        assert_same(replay(x), theirs(y), f"output {i}")
        assert_same(x, y, f"argument {i}")
        assert_same(ours.total, theirs.total, f"buffer {i}")
    assert replay.ledger.replays == 2 and replay.ledger.misses == {"overlap": 2}


def test_an_input_that_is_a_part_of_the_state() -> None:
    """Its bytes are taken before the state moves on."""
    pair = Pair(BY_NAME["AppendLast"])
    for _ in range(4):
        pair.call()
    for _ in range(4):
        ours, theirs = pair.live.state[0][:, 2:5], pair.eager.state[0][:, 2:5]
        expected = pair.eager.call(theirs.clone().contiguous())
        assert_same(pair.live.call(ours.contiguous()), expected, "output")
        pair.check_state()
    assert set(pair.missed()) <= {"stride"}
    for _ in range(3):
        ours, theirs = pair.live.state[0][:, 2:5], pair.eager.state[0][:, 2:5]
        assert_same(pair.live.call(ours), pair.eager.call(theirs), "output, without a copy")
        pair.check_state()


@pytest.mark.parametrize("offset", range(5))
def test_where_a_staged_input_starts(offset: int) -> None:
    """Kernels may take another path, with other bytes, for memory that starts elsewhere, so such a call is eager."""
    pair = Pair(BY_NAME["AppendLast"])
    for _ in range(4):
        pair.call()
    (x,) = pair.eager.inputs(5, pair.stream.calls[0])
    cut, also_cut = (torch.empty(x.numel() + offset)[offset:].view_as(x).copy_(x) for _ in range(2))
    expected = pair.eager.call(also_cut)
    assert_same(pair.live.call(cut), expected, f"offset of {4 * offset} bytes")
    pair.check_state()
    assert pair.missed() == (Counter() if offset % 4 == 0 else Counter(alignment=1))
