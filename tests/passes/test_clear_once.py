"""Memsets of counters become one; each product counts in memory of its own."""

from __future__ import annotations

from typing import Any

import torch

from cadence_fx.passes import CapturedNode, ClearOnce, EditContext
from tests.passes.captured_toy import ToyGraph, kernel, read

PRODUCT, SCALE = "_Z18sgemm_largek_lds64ILb1EEv", "_Z11scal_kernelIffEv"


def scale(words: list[int]) -> None:
    read(words[0], 4).zero_()


def count(words: list[int]) -> None:
    """Adds what it finds in its counters to the result, and leaves them used."""
    found = read(words[15], 1) + read(words[16], 1)
    read(words[0], 4).add_(read(words[1], 4)).add_(found)
    read(words[15], 1).add_(1)
    read(words[16], 1).add_(1)


def product(target: torch.Tensor, source: torch.Tensor, counters: int, second: int | None = None) -> CapturedNode:
    words = [target.data_ptr(), source.data_ptr(), *[0] * 13, counters, counters + 256 if second is None else second]
    return kernel(PRODUCT, *words)


class Products:
    def __init__(self, counters: torch.Tensor, *, count_of: int = 3, between: str = SCALE, **product_options: Any):
        self.tensors = [torch.arange(4.0) + k for k in range(count_of + 1)]
        self.counters = counters
        at, nodes = counters.data_ptr(), []
        for source, target in zip(self.tensors, self.tensors[1:], strict=False):
            nodes += [
                CapturedNode("memset", address=at, nbytes=512),
                kernel(between, target.data_ptr()),
                product(target, source, at, **product_options),
            ]
        self.graph = ToyGraph(nodes, {SCALE: scale, PRODUCT: count, "other": scale})
        self.ctx = EditContext([], torch.device("cpu"))

    def edited(self) -> bool:
        return ClearOnce()(self.graph, self.ctx)

    def result(self) -> list[torch.Tensor]:
        self.graph.launch()
        return [tensor.clone() for tensor in self.tensors]


def test_one_memset_is_left_and_the_bytes_stay() -> None:
    toy = Products(torch.zeros(256))
    expected = toy.result()
    assert toy.edited()
    assert toy.graph.names() == [SCALE, PRODUCT] * 3
    for _ in range(2):  # the counters are cleared for every launch
        assert all(map(torch.equal, toy.result(), expected))
    assert toy.ctx.notes == ["clear_once: 3 memsets are one, of 1536 bytes"]


def test_a_single_one_is_left_alone() -> None:
    assert not Products(torch.zeros(256), count_of=1).edited()


def test_a_kernel_in_between_that_is_not_known() -> None:
    assert not Products(torch.zeros(256), between="other").edited()


def test_counters_that_are_not_where_they_are_known_to_be() -> None:
    assert not Products(torch.zeros(256), second=0).edited()


def test_a_memset_with_another_value_or_a_larger_one() -> None:
    counters = torch.zeros(4096)
    for nbytes, value in ((512, 1), (8192, 0)):
        toy = Products(counters)
        nodes = [
            CapturedNode("memset", address=node.address, nbytes=nbytes, value=value) if node.kind == "memset" else node
            for node in toy.graph.nodes
        ]
        assert not ClearOnce()(ToyGraph(nodes, {}), toy.ctx)
