"""Where a graph joins old and fresh frames, and what a state that was cut still says of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cadence_fx import KeepLast, PromptPlusLast
from cadence_fx.calls import Live, Place
from cadence_fx.following import Follower
from cadence_fx.growth import SIZE, Growth
from cadence_fx.joined import Frames, Joined, is_cut_beyond
from cadence_fx.retention import Order, Retention


def kept(policy: Retention, old: int, added: int) -> Frames:
    """What a policy keeps, fresh frames without numbers."""
    spans = policy.survivors(old, added)
    assert spans is not None
    return tuple((s.source == "old", i if s.source == "old" else None) for s in spans for i in range(s.start, s.stop))


POLICIES = st.sampled_from([KeepLast(6), KeepLast(6, "prepend"), PromptPlusLast(2, 4), PromptPlusLast(4, 2, "prepend")])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(POLICIES, st.integers(0, 6), st.integers(1, 9))
def test_a_state_that_says_how_much_came_says_it_of_no_other_number(policy: Retention, old: int, added: int) -> None:
    frames = kept(policy, old, added)
    if not is_cut_beyond(frames, old):
        assert all(kept(policy, old, other) != frames for other in range(1, 14) if other != added)


def test_a_window_that_slides_says_how_much_came() -> None:
    assert not is_cut_beyond(kept(KeepLast(6), 6, 2), 6) and not is_cut_beyond(kept(KeepLast(6, "prepend"), 6, 2), 6)
    assert is_cut_beyond(kept(KeepLast(6), 6, 6), 6)


def joined(step: Callable[[Tensor, Tensor], Tensor], fresh: int, axis: int = 1) -> Joined | None:
    """Of a function of (1, n, 2) and a state of (1, 3, 2)."""
    arguments = {"x": torch.randn(1, fresh, 2), "state": torch.randn(1, 3, 2)}
    follower = Follower(Live(step).trace(arguments, []))
    return follower.joined(Place("argument", ("state",)), 0, axis)


@pytest.mark.parametrize(
    "step, added, order, newest",
    [
        (lambda x, state: torch.cat([state, x], 1)[:, -3:], 8, "append", 7),
        (lambda x, state: torch.cat([x, state], 1)[:, :3], 8, "prepend", 2),
        (lambda x, state: torch.cat([state, x[:, ::2]], 1)[:, -3:], 4, "append", 3),
        (lambda x, state: torch.cat([state, x], 1)[:, -5:-2], 8, "append", 5),
        (lambda x, state: torch.cat([state, x], 1)[:, :-2][:, -3:], 6, "append", 5),
        (lambda x, state: torch.cat([state.mT, x.mT], 2)[..., -3:].mT, 8, "append", 7),
    ],
)
def test_joined_before_it_is_cut(
    step: Callable[[Tensor, Tensor], Tensor], added: int, order: Order, newest: int
) -> None:
    found = joined(step, 8)
    assert found is not None and (found.added, found.order) == (added, order)
    assert found.frames[-1] == (False, newest)


@pytest.mark.parametrize(
    "step",
    [
        lambda x, state: x[:, -3:],
        lambda x, state: torch.cat([state, x], 1).tanh()[:, -3:],
        lambda x, state: torch.cat([x[:, :4], state, x[:, 4:]], 1)[:, -3:],
        lambda x, state: torch.cat([state[:, 1:], x], 1)[:, -3:],
        lambda x, state: torch.cat([torch.cat([state, x], 1)[:, -2:], x[:, :1]], 1),
    ],
)
def test_not_joined(step: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert joined(step, 8) is None


def test_growth_as_a_function_of_a_size() -> None:
    axis = Place("argument", ("x",)), 1
    plain, twice, half = Growth(axis, SIZE, None), Growth(axis, 2 * SIZE - 3, None), Growth(axis, SIZE // 2, None)
    assert (plain.added(8), twice.added(8), half.added(9)) == (8, 13, 4)
    assert (plain.is_multiple, twice.is_multiple, half.is_multiple) == (True, False, False)
    assert (str(plain), str(twice)) == ("axis 1 of x", "2 x axis 1 of x - 3")
    assert str(half) == f"{sympy.floor(SIZE / 2)}, n is axis 1 of x"
