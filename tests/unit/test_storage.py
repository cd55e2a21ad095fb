"""Carries: one address, and whose bytes are in it."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cadence_fx.errors import StaleState
from cadence_fx.ledger import Ledger
from cadence_fx.storage import Carry


def carry_of(shape: tuple[int, ...] = (2, 0, 3), axis: int | None = 1, capacity: int = 6) -> tuple[Carry, Ledger]:
    ledger = Ledger("test")
    return Carry("cache", shape, axis, capacity, torch.zeros(1), ledger), ledger


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.integers(0, 2))
def test_views_are_contiguous_and_start_at_one_address(a: int, b: int, capacity: int, axis: int) -> None:
    shape = [a, b]
    shape.insert(axis, 0)
    carry, _ = carry_of(tuple(shape), axis, capacity)
    for extent in range(1, capacity + 1):
        view = carry.view(extent)
        assert view.is_contiguous() and view.data_ptr() == carry.pointer and view.shape[axis] == extent
    assert carry.nbytes == a * b * capacity * 4


def test_a_foreign_state_is_copied_in_and_its_own_is_recognised() -> None:
    carry, ledger = carry_of()
    state = torch.randn(2, 4, 3)
    carry.enter(state, 4)
    assert torch.equal(carry.view(4), state) and ledger.adoptions == 1
    handed = carry.hand_out(4)
    carry.enter(handed, 4)
    carry.enter(handed.detach(), 4)  # another tensor on the same current contents
    assert ledger.adoptions == 1


def test_a_consumed_state_is_refused_and_the_current_one_is_not() -> None:
    carry, _ = carry_of()
    carry.enter(torch.randn(2, 4, 3), 4)
    first = carry.hand_out(4)
    carry.enter(first, 4)
    second = carry.hand_out(6)
    with pytest.raises(StaleState, match="cache"):
        carry.enter(first, 4)
    carry.enter(second, 6)
    with pytest.raises(StaleState):
        carry.enter(second[:, :4], 4)  # a part of the current state is not the state


def test_two_streams_keep_their_bytes() -> None:
    carry, ledger = carry_of()
    one, other = torch.randn(2, 4, 3), torch.randn(2, 6, 3)
    carry.enter(one, 4)
    held = carry.hand_out(4)
    expected = held.clone()
    carry.enter(other, 6)  # another stream takes the carry: the state that is still held moves out
    assert ledger.evacuations == 1
    assert not carry.owns(held) and torch.equal(held, expected)
    assert torch.equal(carry.view(6), other)
    carry.enter(held, 4)
    assert torch.equal(carry.view(4), one) and ledger.adoptions == 3


def test_a_state_nobody_holds_is_not_copied() -> None:
    carry, ledger = carry_of()
    carry.enter(torch.randn(2, 4, 3), 4)
    carry.hand_out(4)
    gc.collect()
    carry.enter(torch.randn(2, 4, 3), 4)
    assert ledger.evacuations == 0


def test_a_state_written_in_place_is_moved_into_the_carry() -> None:
    carry, _ = carry_of()
    buffer = torch.randn(2, 6, 3)
    expected = buffer.clone()
    assert carry.may_point_here(buffer)
    carry.enter(buffer, 6, in_place=True)
    assert buffer.data_ptr() == carry.pointer and torch.equal(buffer, expected)
    carry.view(6).mul_(2)
    assert torch.equal(buffer, expected * 2)
    shared = torch.randn(4, 6, 3)
    assert not carry.may_point_here(shared[:2])


def test_a_shared_state_is_handed_out_as_a_copy_and_a_returned_one_keeps_its_bytes() -> None:
    carry, _ = carry_of()
    carry.enter(torch.randn(2, 4, 3), 4)
    copy = carry.hand_out(4, shared=True)
    assert not carry.owns(copy) and torch.equal(copy, carry.view(4))
    handed = carry.hand_out(4)
    expected = handed.clone()
    carry.enter(handed, 4)
    carry.release(handed)
    carry.flat.zero_()
    assert torch.equal(handed, expected)


def test_an_eager_result_is_received_even_from_the_carrys_own_memory() -> None:
    carry, _ = carry_of()
    carry.enter(torch.randn(2, 6, 3), 6)
    state = carry.hand_out(6)
    kept = state[:, 2:].clone()
    received = carry.receive(state[:, 2:], 4, state)
    assert carry.owns(received) and torch.equal(received, kept)


@pytest.mark.parametrize(
    ("tensor", "fits"),
    [
        (torch.zeros(2, 4, 3), True),
        (torch.zeros(2, 7, 3), False),
        (torch.zeros(2, 4, 4), False),
        (torch.zeros(2, 4), False),
        (torch.zeros(2, 4, 3, dtype=torch.float64), False),
        (torch.zeros(2, 4, 3, device="meta"), False),
    ],
)
def test_what_fits(tensor: torch.Tensor, fits: bool) -> None:
    carry, _ = carry_of()
    assert carry.fits(tensor) is fits


def test_load_takes_a_state_from_anywhere() -> None:
    carry, _ = carry_of()
    state = torch.randn(2, 5, 3).transpose(0, 0)
    loaded = carry.load(state)
    assert carry.owns(loaded) and torch.equal(loaded, state)
    carry.enter(loaded, 5)
