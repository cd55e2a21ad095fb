"""A computation that does not repeat its own bytes is refused, and the operator that makes it so is named."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cadence_fx
from cadence_fx import Clock, Contract, KeepLast, ways
from cadence_fx.replay import ExactShapeReplay
from tests.harness import Ticks, assert_same, compile_with
from tests.streams import kept
from tests.toys import B, C, Toy

HERE = __file__
count = Ticks()


@torch.library.custom_op("cadence_tests::unsteady", mutates_args=())
def unsteady(x: Tensor) -> Tensor:
    """Like a kernel whose sums depend on the order in which threads arrive: other bytes each time."""
    return x + 1 / (1 + count.next())


@unsteady.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("cadence_tests::unsteady_", mutates_args=("x",))
def unsteady_(x: Tensor) -> None:
    x += 1 / (1 + count.next())


@unsteady_.register_fake
def _(x: Tensor) -> None:
    return None


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield


def line_of(function: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


def refusal(function: Callable[..., Any], *args: Any) -> str:
    replay = ExactShapeReplay(function)
    replay(*args)
    assert replay.ledger.refusals == Counter(not_reproducible=1) and not replay.classes
    (detail,) = replay.ledger.details["not_reproducible"]
    assert "differs between two eager runs on the same input" in detail
    return detail


def through_operator(x: Tensor) -> Tensor:
    y = torch.sin(x)
    y = torch.ops.cadence_tests.unsteady(y)  # at fault
    return (y @ y.T).cumsum(0)


def in_place(x: Tensor) -> Tensor:
    y = torch.empty_like(x).copy_(x)
    torch.ops.cadence_tests.unsteady_(y)  # at fault
    return y * 2


def with_a_counter(x: Tensor) -> Tensor:
    y = torch.cos(x)
    return y * count.next()  # at fault


def by_another_path(x: Tensor) -> Tensor:
    return x.sin() if count.next() % 2 else x.cos()  # at fault


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (through_operator, "cadence_tests.unsteady.default gives different results for the same inputs"),
        (in_place, "cadence_tests.unsteady_.default gives different results for the same inputs"),
        (with_a_counter, "aten.mul.Tensor is given "),
        (by_another_path, "the code calls aten."),
    ],
)
def test_the_operator_and_the_line_are_named(function: Callable[..., Any], says: str) -> None:
    detail = refusal(function, torch.randn(3, 3))
    assert says in detail
    assert f'File "{HERE}", line {line_of(function, "# at fault")}, in {function.__name__}' in detail


class Unsteady(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, self.key(x)], 1)
        shaken = torch.ops.cadence_tests.unsteady(frames)  # at fault
        return self.attend(x, shaken), frames[:, -6:]


def test_in_a_graph_the_line_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "MOST_BREAKS", 0)  # nothing is recorded around what does not repeat
    step = compile_with(Unsteady().eval(), Contract((Clock("frames", 2),), (kept("cache", 1, 2, KeepLast(6)),)))
    cadence_fx.warm_up(step, torch.randn(B, 2, C), torch.randn(B, 2, C))
    report = cadence_fx.report(step)
    assert report["refusals"] == {"not_reproducible": 3} and report["classes"] == 0
    for detail in report["details"]["not_reproducible"]:
        assert "cadence_tests.unsteady.default gives different results" in detail
        assert f'File "{HERE}", line {line_of(Unsteady.forward, "# at fault")}' in detail


def test_what_was_written_while_looking_is_put_back() -> None:
    def f(x: Tensor) -> Tensor:
        x.add_(1)
        return torch.ops.cadence_tests.unsteady(x)

    replay, x = ExactShapeReplay(f), torch.zeros(3)
    replay(x)
    assert replay.ledger.refusals == Counter(not_reproducible=1)
    assert_same(x, torch.ones(3), "the argument after one eager call")


def test_memory_that_is_only_allocated_is_not_at_fault() -> None:
    """What an allocation holds differs each time, and nobody reads it."""
    replay = ExactShapeReplay(lambda x: torch.empty(64).copy_(x))
    for _ in range(3):
        x = torch.randn(64)
        assert_same(replay(x), x, "copy")
    assert not replay.ledger.refusals
