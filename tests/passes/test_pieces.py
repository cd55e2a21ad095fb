"""Box algebra against PyTorch itself, and the order of overlapping moves against a parallel assignment."""

from __future__ import annotations

import torch
import torch.fx as fx
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cadence_fx.passes.moves import Geometry, Move, schedule
from cadence_fx.passes.pieces import (
    Fill,
    Piece,
    Source,
    crop,
    drop_dim,
    expand,
    insert_dim,
    merge,
    overwrite,
    permute,
    shift,
    whole,
)

NODE = fx.Graph().placeholder("source")


def render(pieces: list[Piece], source: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The value that the pieces describe; every element must be described once."""
    value, times = torch.full(shape, -1), torch.zeros(shape, dtype=torch.int64)
    for piece in pieces:
        box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))
        times[box] += 1
        value[box] = piece.source.value if isinstance(piece.source, Fill) else view(piece, source)  # type: ignore[assignment]
    assert bool((times == 1).all())
    return value


def view(piece: Piece, source: Tensor) -> Tensor:
    assert isinstance(piece.source, Source)
    index = piece.source.index
    part = source[tuple(s if d is None else slice(s, s + piece.size[d]) for d, s in index)]
    followed = [d for d, _ in index if d is not None]
    part = part.permute([followed.index(d) for d in sorted(followed)])
    for d in range(len(piece.size)):
        part = part if d in followed else part.unsqueeze(d)
    return part


@settings(deadline=None, derandomize=True)
@given(data=st.data())
def test_chains_of_views(data: st.DataObject) -> None:
    source = torch.arange(4 * 3 * 5).view(4, 3, 5)
    value, pieces = source, whole(NODE, source.shape)
    for _ in range(data.draw(st.integers(1, 8))):
        kind = data.draw(st.sampled_from(["crop", "select", "insert", "permute", "expand", "roll", "fill", "merge"]))
        dim = data.draw(st.integers(0, max(value.dim() - 1, 0)))
        assume(value.dim() > 0)
        size = value.shape[dim]
        low = data.draw(st.integers(0, size - 1))
        if kind == "crop":
            high = data.draw(st.integers(low + 1, size))
            value, pieces = value.narrow(dim, low, high - low), crop(pieces, dim, low, high)
        elif kind == "select" and value.dim() > 1:
            value, pieces = value.select(dim, low), drop_dim(crop(pieces, dim, low, low + 1), dim)
        elif kind == "insert" and value.dim() < 5:
            value, pieces = value.unsqueeze(dim), insert_dim(pieces, dim)
        elif kind == "permute":
            order = data.draw(st.permutations(range(value.dim())))
            value, pieces = value.permute(order), permute(pieces, order)
        elif kind == "expand" and value.dim() < 5:
            shape = (2, *(3 if n == 1 else n for n in value.shape))
            value, pieces = value.expand(shape), expand(pieces, value.shape, shape)
        elif kind == "roll":
            value = torch.roll(value, -low, dim)
            pieces = crop(pieces, dim, low, size) + shift(crop(pieces, dim, 0, low), dim, size - low)
        elif kind == "fill":
            value = value.clone()
            value.narrow(dim, low, 1).fill_(-7)
            box = tuple(low if d == dim else 0 for d in range(value.dim()))
            extent = tuple(1 if d == dim else n for d, n in enumerate(value.shape))
            pieces = overwrite(pieces, [Piece(box, extent, Fill(-7))])
        elif kind == "merge":
            assert len(merge(pieces)) <= len(pieces)
            pieces = merge(pieces)
    assert torch.equal(render(pieces, source, tuple(value.shape)), value)


def test_zeros_of_both_signs_stay_apart() -> None:
    """They compare equal and have different bytes."""
    parts = [Piece((0,), (1,), Fill(0.0)), Piece((1,), (1,), Fill(-0.0)), Piece((2,), (1,), Fill(-0.0))]
    assert [piece.size for piece in merge(parts)] == [(1,), (2,)]


def test_frames_taken_one_by_one_become_one_piece() -> None:
    frames = [shift(insert_dim(drop_dim(crop(whole(NODE, (4, 2)), 0, i, i + 1), 0), 0), 0, i) for i in range(4)]
    assert merge([piece for frame in frames for piece in frame]) == whole(NODE, (4, 2))


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    size=st.integers(1, 12),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    rows=st.integers(1, 2),
    data=st.data(),
)
def test_moves_are_one_parallel_assignment(size: int, cuts: list[int], rows: int, data: st.DataObject) -> None:
    edges = sorted({0, size, *(cut for cut in cuts if cut < size)})
    old_size = data.draw(st.integers(size if rows == 2 else 1, 14) if rows == 1 else st.just(size))
    geometry = Geometry(1, (rows, old_size), (rows, size))
    moves = []
    for low, high in zip(edges, edges[1:], strict=False):
        assume(high - low <= old_size)
        first = data.draw(st.integers(0, old_size - (high - low)))
        piece = Piece((0, low), (rows, high - low), Source(NODE, ((0, 0), (1, first))))
        moves.append(Move(0, piece, reads=0, direct=True))
    old = torch.arange(rows * old_size).view(rows, old_size)
    want = torch.cat([view(move.piece, old) for move in moves], 1)
    carry = torch.full((rows * max(size, old_size),), -1)
    before = carry[: rows * old_size].view(rows, old_size).copy_(old)
    after = carry[: rows * size].view(rows, size)
    ordered = schedule(moves, [geometry])
    scratch = {index: view(move.piece, before).clone() for index, move in enumerate(ordered) if move.scratch}
    for index, move in enumerate(ordered):
        box = tuple(slice(a, a + n) for a, n in zip(move.piece.start, move.piece.size, strict=True))
        target, source = after[box], scratch.get(index, view(move.piece, before))
        for position in torch.randperm(source.shape[1]).tolist():  # no copy kernel promises an order
            target[:, position] = source[:, position]
    assert torch.equal(after, want)
    assert len(ordered) <= 8 * len(moves)
