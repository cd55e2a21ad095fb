"""Box algebra: a value as disjoint boxes, each a view of a source.

A piece says: the box ``start .. start + size`` of a value holds what ``source`` holds at an affine place. For every
dimension of the source, ``index`` gives ``(value dimension, first)``: it advances with that dimension of the value
from ``first`` on, or, with ``None``, stays at ``first``. A dimension of the value that no source dimension follows is
broadcast. Slices, selects, permutations, concatenations and fills map boxes to boxes, so a chain of them stays a short
list; strided and flattening views do not, and end the chain. All functions are pure; coordinates are elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch.fx as fx

__all__ = [
    "Fill",
    "Index",
    "Piece",
    "Source",
    "Stale",
    "aligned",
    "crop",
    "drop_dim",
    "expand",
    "insert_dim",
    "merge",
    "overwrite",
    "permute",
    "shift",
    "whole",
]

Index = tuple[tuple[int | None, int], ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A view of a node's value."""

    node: fx.Node
    index: Index


@dataclass(frozen=True, slots=True)
class Fill:
    """One number everywhere."""

    value: float | int | bool | complex


@dataclass(frozen=True, slots=True)
class Stale:
    """Memory whose bytes are no longer, or were never, those of any value at hand."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a value and where its bytes are. ``instead``: another place that holds the same bytes, if any."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    source: Source | Fill | Stale
    instead: Source | None = None

    @property
    def numel(self) -> int:
        return prod(self.size)

    def _mapped(self, start: Sequence[int], size: Sequence[int], change: _IndexChange) -> Piece:
        source = change(self.source) if isinstance(self.source, Source) else self.source
        return Piece(tuple(start), tuple(size), source, change(self.instead) if self.instead else None)


@dataclass(frozen=True, slots=True)
class _IndexChange:
    """A renaming of value dimensions (``None``: the dimension is gone) with an advance of each."""

    dims: tuple[int | None, ...]
    by: tuple[int, ...]

    def __call__(self, source: Source) -> Source:
        index = tuple((d, s) if d is None else (self.dims[d], s + self.by[d]) for d, s in source.index)
        return Source(source.node, index)


def whole(node: fx.Node, shape: Sequence[int]) -> list[Piece]:
    """``node`` itself as one piece (none if it is empty)."""
    if prod(shape) == 0:
        return []
    index = tuple((dim, 0) for dim in range(len(shape)))
    return [Piece((0,) * len(shape), tuple(shape), Source(node, index))]


def crop(pieces: Sequence[Piece], dim: int, low: int, high: int) -> list[Piece]:
    """``value.narrow(dim, low, high - low)``."""
    kept = []
    for piece in pieces:
        first = max(piece.start[dim], low)
        last = min(piece.start[dim] + piece.size[dim], high)
        if first < last:
            by = [0] * len(piece.start)
            by[dim] = first - piece.start[dim]
            start, size = list(piece.start), list(piece.size)
            start[dim], size[dim] = first - low, last - first
            kept.append(piece._mapped(start, size, _IndexChange(tuple(range(len(by))), tuple(by))))
    return kept


def shift(pieces: Sequence[Piece], dim: int, by: int) -> list[Piece]:
    """The same pieces ``by`` further along ``dim``."""
    return [
        Piece((*p.start[:dim], p.start[dim] + by, *p.start[dim + 1 :]), p.size, p.source, p.instead) for p in pieces
    ]


def drop_dim(pieces: Sequence[Piece], dim: int) -> list[Piece]:
    """``value.squeeze(dim)`` for a dimension of size one."""
    rank = len(pieces[0].start) if pieces else 0
    dims = tuple(None if d == dim else d - (d > dim) for d in range(rank))
    change = _IndexChange(dims, (0,) * rank)
    return [p._mapped(p.start[:dim] + p.start[dim + 1 :], p.size[:dim] + p.size[dim + 1 :], change) for p in pieces]


def insert_dim(pieces: Sequence[Piece], dim: int, size: int = 1) -> list[Piece]:
    """``value.unsqueeze(dim)``, broadcast to ``size``."""
    rank = len(pieces[0].start) if pieces else 0
    change = _IndexChange(tuple(d + (d >= dim) for d in range(rank)), (0,) * rank)
    return [
        p._mapped((*p.start[:dim], 0, *p.start[dim:]), (*p.size[:dim], size, *p.size[dim:]), change) for p in pieces
    ]


def permute(pieces: Sequence[Piece], dims: Sequence[int]) -> list[Piece]:
    """``value.permute(dims)`` with ``dims`` all non-negative."""
    change = _IndexChange(tuple(dims.index(d) for d in range(len(dims))), (0,) * len(dims))
    return [p._mapped([p.start[d] for d in dims], [p.size[d] for d in dims], change) for p in pieces]


def expand(pieces: Sequence[Piece], shape: Sequence[int], to: Sequence[int]) -> list[Piece]:
    """``value.expand(to)`` of a value of ``shape``; ``to`` holds no ``-1``."""
    if prod(to) == 0:
        return []
    for _ in range(len(to) - len(shape)):
        pieces = insert_dim(pieces, 0)
    shape = (1,) * (len(to) - len(shape)) + tuple(shape)
    for dim, (have, want) in enumerate(zip(shape, to, strict=True)):
        if have != want:
            pieces = insert_dim(drop_dim(pieces, dim), dim, want)
    return list(pieces)


def overwrite(pieces: Sequence[Piece], written: Sequence[Piece]) -> list[Piece]:
    """``pieces`` with ``written`` on top."""
    kept = list(pieces)
    for top in _outline(written):
        kept = [part for piece in kept for part in _outside(piece, top)]
    return [*kept, *written]


def _outline(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """The box that disjoint pieces fill, or the pieces themselves where they leave gaps."""
    if len(pieces) < 2:
        return pieces
    start = tuple(map(min, zip(*(p.start for p in pieces), strict=True)))
    ends = (tuple(a + n for a, n in zip(p.start, p.size, strict=True)) for p in pieces)
    size = tuple(max(end) - first for end, first in zip(zip(*ends, strict=True), start, strict=True))
    whole_box = Piece(start, size, Stale())
    return [whole_box] if sum(p.numel for p in pieces) == whole_box.numel else pieces


def _outside(piece: Piece, box: Piece) -> list[Piece]:
    """The parts of ``piece`` that lie outside the box of ``box``."""
    sides = zip(piece.start, piece.size, box.start, box.size, strict=True)
    if any(max(a, b) >= min(a + n, b + m) for a, n, b, m in sides):
        return [piece]
    parts = []
    rest = piece
    for dim in range(len(piece.start)):
        first, last = rest.start[dim], rest.start[dim] + rest.size[dim]
        low, high = max(box.start[dim], first), min(box.start[dim] + box.size[dim], last)
        if first < low:
            parts += shift(crop([rest], dim, first, low), dim, first)
        if high < last:
            parts += shift(crop([rest], dim, high, last), dim, high)
        rest = shift(crop([rest], dim, low, high), dim, low)[0]
    return parts


def merge(pieces: Sequence[Piece]) -> list[Piece]:
    """The same value in fewer pieces: neighbours that continue each other become one. Sorted by place."""
    merged = list(pieces)
    rank = len(merged[0].start) if merged else 0
    for dim in reversed(range(rank)):
        merged.sort(key=lambda p: (p.start[:dim] + p.start[dim + 1 :], p.start[dim]))
        out: list[Piece] = []
        for piece in merged:
            joined = _join(out[-1], piece, dim) if out else None
            if joined is None:
                out.append(piece)
            else:
                out[-1] = joined
        merged = out
    return sorted(merged, key=lambda p: p.start)


def aligned(piece: Piece) -> Piece:
    """The same piece, with dimensions of size one followed rather than fixed where that makes the source a plain box.

    Squeezing and unsqueezing leave such dimensions behind.
    """

    def align(source: Source) -> Source:
        index = tuple(
            (e, s) if d is None and e < len(piece.size) and piece.size[e] == 1 else (d, s)
            for e, (d, s) in enumerate(source.index)
        )
        plain = len(index) == len(piece.size) and all(d == e for e, (d, _) in enumerate(index))
        return Source(source.node, index) if plain else source

    source = align(piece.source) if isinstance(piece.source, Source) else piece.source
    return replace(piece, source=source, instead=align(piece.instead) if piece.instead else None)


def _join(left: Piece, right: Piece, dim: int) -> Piece | None:
    if left.start[dim] + left.size[dim] != right.start[dim]:
        return None
    for d in range(len(left.start)):
        if d != dim and (left.start[d], left.size[d]) != (right.start[d], right.size[d]):
            return None
    size = list(left.size)
    size[dim] += right.size[dim]
    source: Source | Fill | Stale
    if isinstance(left.source, Source) and isinstance(right.source, Source):
        found = _join_sources(left, left.source, right, right.source, dim)
        if found is None:
            return None
        source = found
    elif repr(left.source) == repr(right.source):  # not ==, which holds for 0.0 and -0.0
        source = left.source
    else:
        return None
    if left.instead is None or right.instead is None:
        return Piece(left.start, tuple(size), source) if left.instead is right.instead else None
    instead = _join_sources(left, left.instead, right, right.instead, dim)
    if instead is None:
        return None  # the one place would be known, and the other forgotten
    return Piece(left.start, tuple(size), source, instead)


def _join_sources(left: Piece, a: Source, right: Piece, b: Source, dim: int) -> Source | None:
    if a.node is not b.node:
        return None
    index: list[tuple[int | None, int]] = []
    advancing = 0
    for (da, sa), (db, sb) in zip(a.index, b.index, strict=True):
        # A dimension of size one may be followed or fixed: both name the same element.
        follows_a = da == dim or (da is None and left.size[dim] == 1)
        follows_b = db == dim or (db is None and right.size[dim] == 1)
        if follows_a and follows_b and sb == sa + left.size[dim]:
            index.append((dim, sa))
            advancing += 1
        elif da == db and sa == sb and da != dim:
            index.append((da, sa))
        else:
            return None
    return Source(a.node, tuple(index)) if advancing <= 1 else None
