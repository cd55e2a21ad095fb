"""Host constants move to the device once. A change of dtype stands in for the device where there is none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from cadence_fx.passes import FoldHostConstants, PassContext, run_passes
from tests.passes.toolbox import assert_same_bytes, flat_outputs, listing, trace


def crosses(source: Tensor, target: Tensor) -> bool:
    """``float64`` plays the device, everything else the host."""
    return source.dtype != torch.float64 and target.dtype == torch.float64


def fold(function: Callable[..., object], *examples: Tensor) -> torch.fx.GraphModule:
    gm = trace(function, *examples)
    folded = run_passes(gm, PassContext(), [FoldHostConstants(crosses)])
    for _ in range(2):
        assert_same_bytes(flat_outputs(folded(*examples)), flat_outputs(function(*examples)))
    return folded


X = torch.randn(4, dtype=torch.float64)


def test_constant_is_computed_once() -> None:
    gm = fold(lambda x: (x + (torch.arange(4) * 2 + 1).to(torch.float64),), X)
    assert_expected_inline(
        listing(gm),
        """\
def forward(self, x_1):
    _folded_0 = self._folded_0
    add_1 = aten.add.Tensor(x_1, _folded_0)
    return (add_1,)""",
    )
    assert gm.get_buffer("_folded_0").tolist() == [1, 3, 5, 7]


def test_tensor_literal_and_several_users() -> None:
    def literal(x: Tensor) -> tuple[Tensor, ...]:
        table = torch.tensor([1.5, -0.0, 2.0, 3.0]).to(torch.float64)
        return x + table, x * table

    gm = fold(literal, X)
    assert [node.op for node in gm.graph.nodes].count("get_attr") == 1


def test_graph_on_one_device_is_left_alone() -> None:
    gm = trace(lambda x: (x + torch.arange(4),), X)
    assert not FoldHostConstants()(gm, PassContext()).modified


def test_value_from_an_input_stays() -> None:
    gm = fold(lambda x, i: (x + (i + torch.arange(4)).to(torch.float64),), X, torch.arange(4))
    assert "aten.to.dtype" in listing(gm)


def test_random_value_stays() -> None:
    """Every call must draw anew, and the generator must move."""

    def noise(x: Tensor) -> tuple[Tensor, ...]:
        return (x + torch.rand(4).to(torch.float64),)

    gm = run_passes(trace(noise, X), PassContext(), [FoldHostConstants(crosses)])
    assert "rand" in listing(gm)


def test_uninitialised_memory_stays() -> None:
    gm = trace(lambda x: (x + torch.empty(4).to(torch.float64) * 0,), X)
    assert not FoldHostConstants(crosses)(gm, PassContext()).modified


def test_copy_that_is_written_stays() -> None:
    """A constant that the first replay changed would be wrong in the second."""

    def count(x: Tensor) -> tuple[Tensor, ...]:
        buffer = torch.arange(4).to(torch.float64)
        buffer.add_(x)
        return (buffer * 2,)

    assert "aten.to.dtype" in listing(fold(count, X))


def test_copy_that_is_returned_stays() -> None:
    """The caller may write what it was given."""
    assert "aten.to.dtype" in listing(fold(lambda x: (x + 1, torch.arange(4).to(torch.float64).view(2, 2)), X))


def test_constant_written_in_the_graph_is_none() -> None:
    def written(x: Tensor) -> tuple[Tensor, ...]:
        steps = torch.arange(4)
        steps[1:] = 7
        return (x + steps.to(torch.float64),)

    assert "aten.to.dtype" in listing(fold(written, X))


def test_host_index_of_a_device_tensor() -> None:
    """Indexing copies a host index to the device by itself, in every call."""
    gm = fold(lambda x: (x[torch.arange(4).flip(0)],), X)
    assert_expected_inline(
        listing(gm),
        """\
def forward(self, x_1):
    _folded_0 = self._folded_0
    index = aten.index.Tensor(x_1, [_folded_0])
    return (index,)""",
    )


def test_converting_copy_stays() -> None:
    """Which side converts is the copy's own affair."""

    def convert(x: Tensor) -> tuple[Tensor, ...]:
        return (torch.zeros_like(x).copy_(torch.arange(4)) + x,)

    assert "aten.arange" in listing(fold(convert, X))
