"""Data for certificates: random values of the same range, and extreme ones at random places."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cadence_fx.bytesops import as_integers, bytes_equal
from cadence_fx.extremes import is_varied, large_patterns, plant_extremes, redraw, small_patterns

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]


def numbers(patterns: list[int], dtype: torch.dtype) -> Tensor:
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return torch.tensor(patterns, dtype=width).view(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_small_patterns_are_zeros_denormals_and_the_smallest_normal_of_both_signs(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    found = numbers(small_patterns(dtype), dtype).double()
    smallest = info.smallest_normal * info.eps
    expected = [0.0, smallest, info.smallest_normal - smallest, info.smallest_normal]
    assert found[::2].tolist() == expected and found[1::2].tolist() == [-value for value in expected]
    assert torch.signbit(found).tolist() == [False, True] * 4


@pytest.mark.parametrize("dtype", FLOATS)
def test_large_patterns_are_nans_with_payloads_infinities_and_the_largest_numbers(dtype: torch.dtype) -> None:
    found = numbers(large_patterns(dtype), dtype)
    assert found[:8].isnan().all()
    assert len(set(as_integers(found[:8]).tolist())) == 8  # four payloads, both signs
    assert (as_integers(found[:8]) < 0).tolist() == [False, True] * 4
    most = torch.finfo(dtype).max
    assert found[8:].tolist() == [math.inf, -math.inf, most, -most]


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
@pytest.mark.parametrize("change", [redraw, plant_extremes])
def test_it_is_the_same_each_time_and_takes_nothing_from_the_users_generator(
    change: object, dtype: torch.dtype
) -> None:
    assert callable(change)
    own = torch.randn(40, 50, dtype=dtype)
    state = torch.get_rng_state()
    found = []
    for seed in (1, 1, 2):
        found.append(own.clone())
        change(found[-1], seed)
    assert torch.equal(torch.get_rng_state(), state)
    assert bytes_equal(found[0], found[1])
    assert not bytes_equal(found[0], found[2]) and not bytes_equal(found[0], own)


@pytest.mark.parametrize("dtype", FLOATS)
def test_redrawn_values_stay_in_the_range(dtype: torch.dtype) -> None:
    own = torch.linspace(3, 7, 1000, dtype=dtype)
    redraw(own, 0)
    planted = own.abs() < 1
    assert 4 <= planted.sum() <= 125
    rest = own[~planted]
    assert rest.min() >= 3 and rest.max() <= 7 and len(rest.unique()) > 50


@pytest.mark.parametrize("value", [0.0, 5.0, -2.0])
def test_a_constant_is_redrawn_around_itself(value: float) -> None:
    own = torch.full((1000,), value)
    redraw(own, 0)
    assert own.min() < value - 0.5 and own.max() > value + 0.5
    assert own.isfinite().all()


def test_ranges_that_hold_no_number() -> None:
    """What is not finite does not count, and the whole range of a type is no range to draw from."""
    own = torch.tensor([math.nan, -1.0, math.inf, 1.0] * 50)
    redraw(own, 0)
    assert own.abs().max() <= 1
    whole = torch.tensor([-65504.0, 65504.0] * 50, dtype=torch.float16)
    redraw(whole, 0)
    assert whole.isfinite().all() and len(whole.unique()) > 20


@pytest.mark.parametrize("shape", [(), (1,), (3, 0), (2, 5)])
@pytest.mark.parametrize("change", [redraw, plant_extremes])
def test_shapes_without_room(change: object, shape: tuple[int, ...]) -> None:
    assert callable(change)
    own = torch.ones(shape)
    assert is_varied(own) == (own.numel() > 0)
    if own.numel():
        change(own, 3)
        assert not torch.equal(own, torch.ones(shape))


def test_elements_between_those_of_a_strided_tensor_are_left_alone() -> None:
    memory = torch.ones(20, 8)
    view = memory[:, ::2].t()
    redraw(view, 0)
    plant_extremes(view, 0)
    assert torch.equal(memory[:, 1::2], torch.ones(20, 4))
    assert view.isnan().any() and not torch.equal(view[0], torch.ones(20))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn])
def test_other_types_are_not_varied(dtype: torch.dtype) -> None:
    assert not is_varied(torch.zeros(3, dtype=dtype))
