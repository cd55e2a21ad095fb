"""What a result is besides its bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cadence_fx.forms import Form, forms, odd_value
from cadence_fx.layout import same_geometry_copy


def described(
    *outputs: Any, args: tuple[Any, ...] = (), copied: tuple[int, ...] = (), carried: tuple[int, ...] = ()
) -> list[str | None]:
    return [form.memory if form is not None else None for form in forms(outputs, args, copied, carried)]


def test_whose_memory_a_result_is() -> None:
    x, state, y = torch.ones(2, 3), torch.ones(4), torch.ones(5)
    assert described(y, args=(x, 3, state)) == ["its own"]
    assert described(x.t(), y[:2], y[1:], args=(x,)) == ["argument 0's", *["that of outputs 1, 2"] * 2]
    assert described(state[:2], state[2:], args=(x, state), copied=(1,)) == ["its own"] * 2
    assert described(state[:2], args=(x, state)) == ["argument 1's"]
    assert described(y, y[1:], 3, carried=(0,)) == [None, "its own", None]
    assert described(torch.ones(0), torch.ones(0), args=(torch.ones(0),)) == ["its own"] * 2
    assert described(torch.ones(2).to_sparse()) == [None]


def test_how_two_forms_differ() -> None:
    y = torch.ones(2, 3, dtype=torch.complex64)
    here = forms([y], [], [], [])[0]
    there = forms([y.t().contiguous().t().conj()], [], [], [])[0]
    assert isinstance(here, Form) and isinstance(there, Form)
    assert here.against(there) == "strides (3, 1), not (1, 2)"
    assert forms([y.conj()], [], [], [])[0] != here
    memory = torch.ones(9)
    early, late = (forms([memory[i:5], memory[i + 1 :]], [], [], [])[0] for i in (0, 1))
    assert early is not None and late is not None and early.against(late) == "offset 0, not 1"


@pytest.mark.parametrize(
    ("mine", "theirs", "odd"),
    [
        (torch.ones(1), torch.zeros(1), None),
        (3, 3, None),
        (float("nan"), float("nan"), None),
        (None, torch.ones(1), "NoneType, not Tensor"),
        (1, True, "1, not True"),
        (0.0, -0.0, "0.0, not -0.0"),
        (torch.Size([1]), [1], "Size, not list"),
    ],
)
def test_outputs_that_are_no_tensors(mine: Any, theirs: Any, odd: str | None) -> None:
    assert odd_value(mine, theirs) == odd


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(12.0).view(3, 4)[:, ::2],
        torch.arange(3.0)[:, None].expand(3, 4),
        torch.ones(2, 0),
        torch.empty_strided((2, 0, 3), (7, 1, 0)),
        torch.ones(()),
    ],
    ids=["holes", "expanded", "empty", "empty with strides of its own", "number"],
)
def test_a_copy_with_the_same_strides(view: torch.Tensor) -> None:
    copy = same_geometry_copy(view)
    assert copy.stride() == view.stride() and copy.equal(view)
    assert not view.numel() or copy.data_ptr() != view.data_ptr()
