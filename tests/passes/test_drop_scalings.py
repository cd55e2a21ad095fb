"""Clearing kernels on memory that is clear leave the captured graph; all others stay."""

from __future__ import annotations

import pytest
import torch

from cadence_fx.passes import CapturedNode, DropScalings, EditContext
from tests.passes.captured_toy import ToyGraph, kernel, read

PRODUCT, SCALE = "_Z18sgemm_largek_lds64ILb1EEv", "_Z11scal_kernelIffEv"


def scale(words: list[int]) -> None:
    read(words[2], 4).copy_(read(words[1], 4) * 0)


def add(words: list[int]) -> None:
    read(words[0], 4).add_(read(words[1], 4))


def clearing(source: torch.Tensor, target: torch.Tensor) -> CapturedNode:
    return kernel(SCALE, b"\0" * 48, source.data_ptr(), target.data_ptr(), 0)


class Toy:
    def __init__(self, *, between: bool = False, apart: bool = False) -> None:
        self.memory, self.other, self.x = torch.zeros(8), torch.zeros(4), torch.arange(4.0)
        nodes = []
        for target in (self.memory[4:], self.other):
            nodes.append(clearing(self.other if apart else target, target))
            if between:
                nodes.append(kernel("between", 0))
            nodes.append(kernel(PRODUCT, target.data_ptr(), self.x.data_ptr()))
        self.graph = ToyGraph(nodes, {SCALE: scale, PRODUCT: add, "between": lambda words: None})
        self.ctx = EditContext([], torch.device("cpu"), [self.memory])


def test_only_what_is_clear_is_not_cleared() -> None:
    toy = Toy()
    assert DropScalings()(toy.graph, toy.ctx)
    assert toy.graph.names() == [PRODUCT, SCALE, PRODUCT]
    for _ in range(2):
        toy.memory.zero_()
        toy.graph.launch()
        assert torch.equal(toy.memory[4:], toy.x) and torch.equal(toy.other, toy.x)
    assert toy.ctx.notes == ["drop_scalings: 1 kernel that would clear a result left out"]


@pytest.mark.parametrize("options", [{"between": True}, {"apart": True}])
def test_what_is_left_alone(options: dict[str, bool]) -> None:
    toy = Toy(**options)
    assert not DropScalings()(toy.graph, toy.ctx)


def test_without_cleared_memory() -> None:
    toy = Toy()
    toy.ctx.cleared = ()
    assert not DropScalings()(toy.graph, toy.ctx)
