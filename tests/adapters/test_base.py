"""What all bindings share: steps whose graphs do not use up each other's, and calls that Dynamo cannot follow."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cadence_fx
from cadence_fx.adapters import base
from cadence_fx.clock import Clock
from cadence_fx.contract import Contract, Input
from tests.harness import BACKEND, assert_same


class Scaled(nn.Module):
    """A number on the module is a constant of its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        if self.scale < 0:
            raise ValueError("a negative scale")
        return torch.sin(x * self.scale)


def bound(scaled: Scaled) -> Any:
    return base.compiler(BACKEND, None, dynamic=False)(
        scaled, Contract([Clock("frame", 4)], inputs=[Input("x", axis=0, clock="frame")])
    )


@torch.no_grad()
def test_what_is_compiled_too_often_is_counted_and_takes_nothing_from_others() -> None:
    first, second = Scaled(), Scaled()
    counts: Counter[str] = Counter()
    x = torch.randn(4)
    steps = bound(first), bound(second)
    with torch._dynamo.config.patch(recompile_limit=3):
        for number in range(6):
            first.scale = 1.0 + number
            assert_same(
                base.call(steps[0], (x,), lambda: Scaled.forward(first, x), counts), torch.sin(x * first.scale), ""
            )
        assert counts == {base.UNTRACED: 3}
        first.scale = 2.0  # a graph that there is
        base.call(steps[0], (x,), lambda: Scaled.forward(first, x), counts)
        assert_same(base.call(steps[1], (x,), lambda: Scaled.forward(second, x), counts), torch.sin(x), "the second")
    assert counts == {base.UNTRACED: 3}
    assert [cadence_fx.report(step)["replays"] for step in steps] == [4, 1]


@torch.no_grad()
def test_an_exception_is_that_of_the_code_and_the_next_call_replays() -> None:
    scaled, counts, x = Scaled(), Counter[str](), torch.randn(4)
    step = bound(scaled)

    def shipped() -> Tensor:
        return Scaled.forward(scaled, x)

    for scale in (1.0, -1.0, 1.0):
        scaled.scale = scale
        if scale < 0:
            with pytest.raises(ValueError, match="a negative scale") as caught:
                base.call(step, (x,), shipped, counts)
            assert caught.value.__context__ is None
        else:
            assert_same(base.call(step, (x,), shipped, counts), torch.sin(x), "")
    assert counts == {base.UNTRACED: 1} and cadence_fx.report(step)["replays"] == 2
