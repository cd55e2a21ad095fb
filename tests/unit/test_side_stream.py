"""Calls on a stream of their own; without one (a CPU) they are made as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cadence_fx
from cadence_fx import SideStream


def test_without_streams_a_call_is_made_as_it_is() -> None:
    seen: list[Any] = []

    def call(x: Tensor, *, scale: int) -> dict[str, Tensor]:
        seen.append(scale)
        return {"y": x * scale}

    pending = SideStream(call, "cpu")(torch.ones(3), scale=2)
    assert seen == [2]
    assert pending.result()["y"].tolist() == [2, 2, 2]
    assert pending.result() is pending.result()


def test_what_the_call_raises_is_raised_where_it_is_begun() -> None:
    def call() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        SideStream(call, "cpu")()


def test_it_is_public() -> None:
    assert "SideStream" in cadence_fx.__all__
