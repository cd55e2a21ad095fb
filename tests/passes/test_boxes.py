"""Boxes against the sets of bytes that they stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cadence_fx.passes.boxes import Box, box_of, covers, disjoint


def bytes_of(tensor: Tensor) -> set[int]:
    width = tensor.element_size()
    total = tensor.untyped_storage().nbytes() // width
    places = torch.arange(total).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return {place * width + byte for place in places.reshape(-1).tolist() for byte in range(width)}


def box(tensor: Tensor) -> Box:
    found = box_of(tensor)
    assert found is not None
    return found


MOVES = st.tuples(
    st.sampled_from(["slice", "step", "select", "transpose", "view", "expand", "half"]), *[st.integers(0, 7)] * 3
)


def moved(tensor: Tensor, move: tuple[str, int, int, int]) -> Tensor:
    kind, dim, low, length = move
    if not tensor.dim():
        return tensor
    dim %= tensor.dim()
    size = tensor.shape[dim]
    if kind == "slice":
        return tensor.narrow(dim, low % (size + 1), length % (size - low % (size + 1) + 1))
    if kind == "step":
        return tensor[(slice(None),) * dim + (slice(low % (size + 1), None, 1 + length % 3),)]
    if kind == "select":
        return tensor.select(dim, low % size) if size else tensor
    if kind == "transpose":
        return tensor.transpose(dim, low % tensor.dim())
    if kind == "view":
        return tensor.flatten() if tensor.is_contiguous() else tensor
    if kind == "expand":
        return tensor.unsqueeze(dim).expand(*tensor.shape[:dim], 2, *tensor.shape[dim:]) if tensor.dim() < 5 else tensor
    return tensor.view(torch.int16) if tensor.dtype == torch.int32 and tensor.stride(-1) == 1 else tensor


@settings(max_examples=300, deadline=None)
@given(st.lists(MOVES, max_size=4), st.lists(MOVES, max_size=4))
def test_views_of_one_memory(left: list[tuple[str, int, int, int]], right: list[tuple[str, int, int, int]]) -> None:
    base = torch.zeros(3, 4, 5, 2, dtype=torch.int32)
    a, b = base, base
    for move in left:
        a = moved(a, move)
    for move in right:
        b = moved(b, move)
    if disjoint(box(a), box(b)):
        assert bytes_of(a).isdisjoint(bytes_of(b))
    if covers(box(a), box(b)):
        assert bytes_of(b) <= bytes_of(a)
    assert covers(box(a), box(a)) and disjoint(box(a), box(b)) == disjoint(box(b), box(a))


def test_what_a_cache_is_cut_into_is_apart() -> None:
    cache = torch.zeros(3, 2, 8, 12, 10)  # step, layer, head, frame, keys and values
    layer = cache[1, 0]
    keys, values = layer.chunk(2, -1)
    pairs = [
        (cache[0], cache[1]),
        (cache[:, 0], cache[:, 1]),
        (layer[:, :5], layer[:, 5:]),
        (keys, values),
        (keys.transpose(0, 1)[:4], keys.transpose(0, 1)[4:]),
        (keys[:, 2:5].transpose(0, 1), values),
        (cache[:, 0, :, 3:6], cache[:, 0, :, 6:]),
        (cache[2, 1, ..., 0], cache[2, 1, ..., 1]),
    ]
    for a, b in pairs:
        assert bytes_of(a).isdisjoint(bytes_of(b)) and disjoint(box(a), box(b))
    assert not disjoint(box(layer[:, :6]), box(layer[:, 5:])) and covers(box(layer), box(keys[:, 2:4]))


@pytest.mark.parametrize(
    "a, b",
    [
        (lambda x: x.as_strided((3, 3), (3, 2)), lambda x: x[3:4]),  # rows that run into one another
        (lambda x: x.as_strided((2, 2), (1, 1)), lambda x: x[1:3]),
        (lambda x: x[::2], lambda x: x[1::3]),  # they meet at 4 and 10
    ],
)
def test_whatever_does_not_fit_overlaps(a: object, b: object) -> None:
    x = torch.zeros(12)
    left, right = a(x), b(x)  # type: ignore[operator]
    assert not bytes_of(left).isdisjoint(bytes_of(right)) and not disjoint(box(left), box(right))


def test_no_box_for_what_has_no_strides() -> None:
    assert box_of(torch.zeros(3, 3).to_sparse()) is None


def test_the_base_is_where_memory_begins() -> None:
    tensor = torch.zeros(10)[2:6]
    assert (box(tensor).first, box_of(tensor, 8).first) == (8, 0)  # type: ignore[union-attr]
