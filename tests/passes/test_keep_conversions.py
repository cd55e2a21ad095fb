"""Layout conversions of constants leave the captured graph; anything that is not surely one stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cadence_fx.passes import CapturedNode, EditContext, KeepConversions
from tests.passes.captured_toy import ToyGraph, kernel, read

CONVERT = "_ZN5cudnn16nchwToNhwcKernelIfffLb0EEEv"
N = 6


def convert(words: list[int]) -> None:
    """Reverses, as a stand-in for a layout."""
    read(words[2], N).copy_(read(words[1], N).flip(0))


def product(words: list[int]) -> None:
    read(words[2], N).copy_(read(words[0], N) * read(words[1], N))


class Convolutions:
    """Two convolutions with one weight, one after the other, in one workspace."""

    def __init__(self, *, convert: Any = convert, edges: Any = None, **attributes: Any) -> None:
        self.x, self.weight, self.y, self.z = (torch.arange(1.0, N + 1) * k for k in (1, 2, 0, 0))
        self.workspace = torch.zeros(4 * N)
        one, two = self.workspace.data_ptr(), self.workspace.data_ptr() + 4 * N
        nodes: list[CapturedNode] = []
        for source, target in ((self.x, self.y), (self.y, self.z)):
            nodes += [
                kernel(CONVERT, b"\0" * 8, source.data_ptr(), one),
                kernel(CONVERT, b"\0" * 8, self.weight.data_ptr(), two),
                kernel("gemm", one, two, target.data_ptr()),
            ]
        self.graph = ToyGraph(nodes, {CONVERT: convert, "gemm": product}, edges)
        self.ctx = EditContext([self.weight], torch.device("cpu"))

    def edited(self) -> bool:
        return KeepConversions()(self.graph, self.ctx)

    def result(self) -> torch.Tensor:
        self.workspace.fill_(float("nan"))
        self.graph.launch()
        return self.z.clone()


def test_the_weight_is_converted_once_and_the_bytes_stay() -> None:
    toy = Convolutions()
    expected = toy.result()
    assert toy.edited()
    assert toy.graph.names() == [CONVERT, "gemm", CONVERT, "gemm"]
    assert torch.equal(toy.result().view(torch.int32), expected.view(torch.int32))
    assert len(toy.ctx.kept) == 1  # both read the same memory
    assert toy.ctx.notes == ["keep_conversions: 2 of 2 conversions of constants run once, 0.0 MiB"]


def test_classes_share_what_is_converted_and_each_knows_when_to_do_it_again() -> None:
    one = Convolutions()
    one.edited()
    other = EditContext([one.weight], torch.device("cpu"))
    again = ToyGraph(one.graph.nodes, {CONVERT: convert, "gemm": product})
    assert KeepConversions()(again, other)
    assert other.kept[0] is one.ctx.kept[0] and len(other.refreshes) == 1
    assert one.ctx.added == one.ctx.kept[0].nbytes and other.added == 0


def test_a_weight_that_is_written_is_converted_again() -> None:
    toy, other = Convolutions(), Convolutions()
    toy.edited()
    for each in (toy, other):
        each.weight.mul_(3)
    ((tensors, refresh),) = toy.ctx.refreshes
    assert tensors == [toy.weight]
    refresh()
    assert torch.equal(toy.result(), other.result())


def test_what_comes_with_the_call_is_no_constant() -> None:
    toy = Convolutions()
    toy.ctx.constants = []
    assert not toy.edited() and len(toy.graph.names()) == 6


def test_a_part_of_a_tensor_is_left_alone() -> None:
    toy = Convolutions()
    toy.ctx.constants = [torch.zeros(4), toy.weight[1:]]
    assert not toy.edited()


def test_a_kernel_that_writes_more_than_its_source_has() -> None:
    def padded(words: list[int]) -> None:
        read(words[2], N + 1).copy_(torch.cat([read(words[1], N), torch.ones(1)]))

    toy = Convolutions(convert=padded)
    assert not toy.edited() and len(toy.graph.names()) == 6
    assert any("writes more" in note for note in toy.ctx.notes)


def test_a_reader_on_another_branch_is_not_looked_for() -> None:
    toy = Convolutions(edges=[(0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5)])
    toy.edited()
    assert toy.graph.names().count(CONVERT) == 3  # the second convolution's weight went, the first one's stayed


def test_a_weight_made_in_inference_mode() -> None:
    toy = Convolutions()
    with torch.inference_mode():
        weight = torch.ones(N)
    toy.ctx.constants = [weight]
    toy.graph.nodes[1] = kernel(CONVERT, b"\0" * 8, weight.data_ptr(), toy.workspace.data_ptr() + 4 * N)
    graph = ToyGraph(toy.graph.nodes[:3], {CONVERT: convert, "gemm": product})
    assert not KeepConversions()(graph, toy.ctx)
    assert any("inference mode" in note for note in toy.ctx.notes)


@pytest.mark.parametrize("name", ["_ZN16nchwToNhwcKernelI6__halfffEv", "other"])
def test_other_kernels_are_not_touched(name: str) -> None:
    toy = Convolutions()
    nodes = [kernel(name, *node.params) if node.name == CONVERT else node for node in toy.graph.nodes]
    assert not KeepConversions()(ToyGraph(nodes, {}), toy.ctx)
