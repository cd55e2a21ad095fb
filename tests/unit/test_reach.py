"""Whose values decide more than values: an index, a branch, a probability."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cadence_fx.reach import Reach

TABLE = torch.arange(10.0)


@torch.library.custom_op("cadence_tests::of_someone", mutates_args=())
def of_someone(x: Tensor) -> Tensor:
    return x * 2


def decisive(function: Callable[[Tensor], Any]) -> bool:
    x = torch.rand(4, 4)
    with torch.no_grad(), Reach([x]) as reach:
        function(x)
    return reach.decides(0)


def through_a_part(x: Tensor) -> Tensor:
    room = torch.zeros(8)
    room[2:6] = x[0]
    return TABLE[room.long()]


def through_an_array_made_before(x: Tensor) -> Tensor:
    room = torch.zeros(4, 4)
    array = room.numpy()
    room.copy_(x)
    return x + float(array.max())


def overwritten_memory(x: Tensor) -> Tensor:
    """What was computed from `x` is freed; what is put there next has nothing to do with it."""
    for _ in range(20):
        y = x * 2
        del y
        index = torch.arange(16).view(4, 4)
        TABLE[index[0, :2]]
    return x


DECIDES: dict[str, Callable[[Tensor], Any]] = {
    "an index": lambda x: TABLE[(x * 3).long()],
    "an index of a choice": lambda x: TABLE[x.argmax(1)],
    "an index through a comparison": lambda x: TABLE[(x > 0.5).long().cumsum(0)],
    "an index through memory": through_a_part,
    "a lookup": lambda x: F.embedding((x * 3).int(), torch.randn(10, 2)),
    "a number": lambda x: x * float(x.sum()),
    "a branch": lambda x: x if x.max() > 0 else -x,
    "a size": lambda x: x[x > 0.5],
    "a probability": torch.bernoulli,
    "a probability in place": lambda x: torch.empty(4, 4).bernoulli_(x),
    "a rate": torch.poisson,
    "a factorisation that checks itself": lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(4)),
    "an operator of someone else's": of_someone,
    "an array": lambda x: x * float((x + 1).numpy().max()),
    "an array of a view": lambda x: x * float(np.asarray(x[0]).max()),
    "an array made before": through_an_array_made_before,
    "a list": lambda x: x * (x * 2).tolist()[0][0],
    "an exchanged tensor": lambda x: np.from_dlpack(x * 2),
    "an address": lambda x: (x * 2).data_ptr(),
    "a storage": lambda x: x.untyped_storage()[0],
    "a sparse tensor": lambda x: x.to_sparse(),
}
COMPUTES: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda x: F.layer_norm(x @ x.t(), (4,)).softmax(-1),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "convolution": lambda x: F.conv1d(x[None], torch.ones(2, 4, 3)),
    "a mask": lambda x: torch.where(x > 0.5, x, -x),
    "an index that nobody uses": lambda x: x.max(1),
    "an index that is only returned": lambda x: x.argmax(1),
    "indices of constants": lambda x: x[torch.arange(2)] + TABLE[torch.tensor([1, 2])][:, None],
    "noise of the same shape": lambda x: x + torch.randn_like(x) + torch.empty_like(x).uniform_(),
    "noise in its place": lambda x: x.clone().normal_(),
    "dropout": lambda x: F.dropout(x, 0.5),
    "a spectrum": lambda x: torch.fft.irfft(torch.fft.rfft(x)),
    "memory that was in use before": overwritten_memory,
}


@pytest.mark.parametrize("name", DECIDES)
def test_values_that_decide(name: str) -> None:
    assert decisive(DECIDES[name])


@pytest.mark.parametrize("name", COMPUTES)
def test_values_that_become_values(name: str) -> None:
    assert not decisive(COMPUTES[name])


def test_an_assertion_is_a_decision() -> None:
    assert decisive(lambda x: torch._assert_async((x < 2).all()))


def test_only_the_inputs_at_fault_are_named() -> None:
    x, index, scale = torch.rand(4), torch.rand(4), torch.rand(4)
    with Reach([x, index, scale]) as reach:
        TABLE[(index * 4).long()] * x + scale
    assert [reach.decides(i) for i in range(3)] == [False, True, False]
