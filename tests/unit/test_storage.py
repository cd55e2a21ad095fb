"""Carries: one address, and whose bytes are in it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cadence_fx.errors import StaleState
from cadence_fx.layout import in_layout
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


def enter(carry: Carry, tensor: torch.Tensor, extent: int, *, in_place: bool = False) -> tuple[str, str] | None:
    problem = carry.make_room(tensor, in_place=in_place)
    if problem is None:
        carry.enter(tensor, extent, in_place=in_place)
    return problem


def test_a_foreign_state_is_copied_in_and_its_own_is_recognised() -> None:
    carry, ledger = carry_of()
    state = torch.randn(2, 4, 3)
    enter(carry, state, 4)
    assert torch.equal(carry.view(4), state) and ledger.adoptions == 1
    handed = carry.hand_out(4)
    enter(carry, handed, 4)
    enter(carry, handed.detach(), 4)  # another tensor on the same current contents
    enter(carry, handed.view(8, 3).view(2, 4, 3), 4)
    assert ledger.adoptions == 1


def test_a_consumed_state_is_refused_through_any_view_of_it() -> None:
    carry, _ = carry_of()
    enter(carry, torch.randn(2, 4, 3), 4)
    first = carry.hand_out(4)
    view = first.view(2, 4, 3)
    enter(carry, first, 4)
    second = carry.hand_out(4)
    for stale in (first, view, first.detach(), first[:, :2]):
        with pytest.raises(StaleState, match="cache"):
            carry.make_room(stale)
    assert carry.is_current(second) and carry.is_current(second.detach())


def test_a_consumed_state_that_nobody_holds_is_forgotten() -> None:
    carry, _ = carry_of()
    enter(carry, torch.randn(2, 4, 3), 4)
    for _ in range(5):
        enter(carry, carry.hand_out(4), 4)
    assert carry._earlier == [] and len(carry._idle) <= 2


def test_two_streams_keep_their_bytes() -> None:
    carry, ledger = carry_of()
    one, other = torch.randn(2, 4, 3), torch.randn(2, 6, 3)
    enter(carry, one, 4)
    held = carry.hand_out(4)
    expected = held.clone()
    enter(carry, other, 6)  # another stream takes the carry: the state that is still held moves out
    assert ledger.evacuations == 1
    assert not carry.owns(held) and torch.equal(held, expected)
    assert torch.equal(carry.view(6), other)
    enter(carry, held, 4)
    assert torch.equal(carry.view(4), one) and ledger.adoptions == 3


def test_a_state_that_is_held_through_a_view_keeps_the_carry() -> None:
    carry, ledger = carry_of()
    enter(carry, torch.randn(2, 4, 3), 4)
    view = carry.hand_out(4)[:, 1:]
    expected = view.clone()
    assert (enter(carry, torch.randn(2, 4, 3), 4) or ("",))[0] == "held_state"
    assert carry.load(torch.randn(2, 4, 3)) is None
    assert torch.equal(view, expected) and ledger.evacuations == 0
    del view
    assert enter(carry, torch.randn(2, 4, 3), 4) is None


def test_a_part_of_the_current_state_is_adopted_like_any_other_tensor() -> None:
    carry, _ = carry_of()
    state = torch.randn(2, 6, 3)
    enter(carry, state, 6)
    part = carry.hand_out(6)[:, 2:]
    assert not carry.is_current(part)
    received = carry.receive(part * 1, 4, part)
    assert torch.equal(received, state[:, 2:])


def test_a_state_nobody_holds_is_not_copied() -> None:
    carry, ledger = carry_of()
    enter(carry, torch.randn(2, 4, 3), 4)
    carry.hand_out(4)
    gc.collect()
    enter(carry, torch.randn(2, 4, 3), 4)
    assert ledger.evacuations == 0


def test_a_state_written_in_place_is_moved_into_the_carry() -> None:
    carry, _ = carry_of()
    buffer = torch.randn(2, 6, 3)
    expected = buffer.clone()
    enter(carry, buffer, 6, in_place=True)
    assert buffer.data_ptr() == carry.pointer and torch.equal(buffer, expected)
    carry.view(6).mul_(2)
    assert torch.equal(buffer, expected * 2)
    view = buffer[:, 1:]  # made after the move: follows it
    carry.view(6).mul_(2)
    assert torch.equal(view, expected[:, 1:] * 4)


@pytest.mark.parametrize("other", [lambda t: t[:2], lambda t: t.view(4, 18), lambda t: t])
def test_a_state_written_in_place_that_shares_memory_stays_where_it_is(other: Callable[[torch.Tensor], object]) -> None:
    carry, _ = carry_of()
    owner = torch.randn(4, 6, 3)
    kept = other(owner)
    slot = owner[2:]
    assert (enter(carry, slot, 6, in_place=True) or ("",))[0] == "shared_state"
    assert not carry.owns(slot) and kept is not None


def test_a_shared_state_is_handed_out_as_a_copy_and_a_returned_one_keeps_its_bytes() -> None:
    carry, _ = carry_of()
    enter(carry, torch.randn(2, 4, 3), 4)
    copy = carry.hand_out(4, shared=True)
    assert not carry.owns(copy) and torch.equal(copy, carry.view(4))
    handed = carry.hand_out(4)
    expected = handed.clone()
    enter(carry, handed, 4)
    carry.release(handed)
    carry.flat.zero_()
    assert torch.equal(handed, expected)


def test_the_layout_of_the_contents_is_remembered() -> None:
    carry, _ = carry_of()
    strided = torch.randn(2, 9, 3)[:, 5:]
    enter(carry, strided, 4)
    assert carry.layout == ((27, 3, 1), strided.data_ptr() % 16)
    assert carry.view(4).is_contiguous()
    handed = carry.hand_out(4, layout=((12, 1, 4), 0))
    assert carry.layout_of(handed) == ((12, 1, 4), 0) and handed.is_contiguous()
    assert carry.layout_of(torch.zeros(2, 4, 3)) is None


@given(st.permutations([0, 1, 2]), st.integers(0, 3))
def test_a_copy_in_a_layout_has_its_strides_and_its_bytes(order: list[int], pad: int) -> None:
    tensor = torch.randn(2, 3, 4)
    base = torch.zeros(3 * 4 * 5 * 3 + pad)[pad:].view(3, 4, 5, 3)[..., 0].permute(order)
    layout = (tuple(base.stride()), base.data_ptr() % 16)
    copy = in_layout(tensor, layout)
    assert copy.stride() == base.stride() and copy.data_ptr() % 16 == layout[1] and torch.equal(copy, tensor)


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
    assert loaded is not None and carry.owns(loaded) and torch.equal(loaded, state)
    assert carry.is_current(loaded) and carry.load(loaded) is loaded
