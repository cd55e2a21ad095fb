"""The order of writes on memory that some of them also read.

The writes on new states are meant as one parallel assignment: every source is what it was before the first write.
Those whose sources lie in the states themselves stand together at the end of the graph (see ``placement``). Old and new
state of a slot start at one address, so a write can destroy what another has yet to read. A read goes before the write
that would destroy it; a move onto itself is cut into steps no longer than the distance it goes; where neither works the
source is copied to scratch memory before the first write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from cadence_fx.passes.pieces import Piece, Source, crop, shift

__all__ = ["Geometry", "Move", "boxes_meet", "schedule"]

_MOST_STEPS = 8  # more launches than this cost more than one scratch copy


@dataclass(frozen=True, slots=True)
class Geometry:
    """How old and new state of a slot lie over each other."""

    axis: int
    old: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def same_coordinates(self) -> bool:
        """Whether equal coordinates in old and new state are one address (both contiguous, from one address).

        They are if the shapes agree, or if they differ on the axis alone and every dimension before it has size one.
        """
        if self.old == self.new:
            return True
        rest = self.old[: self.axis] + self.old[self.axis + 1 :] == self.new[: self.axis] + self.new[self.axis + 1 :]
        return rest and prod(self.old[: self.axis]) == 1

    @staticmethod
    def span(shape: Sequence[int], start: Sequence[int], size: Sequence[int]) -> tuple[int, int]:
        """The first and the last element of a box of a contiguous tensor, counted from its address."""
        first = last = 0
        for extent, begin, length in zip(shape, start, size, strict=True):
            first = first * extent + begin
            last = last * extent + begin + length - 1
        return first, last

    def meet(
        self, start: Sequence[int], size: Sequence[int], old_start: Sequence[int], old_size: Sequence[int]
    ) -> bool:
        """Whether a box of the new state may lie over one of the old state."""
        if self.same_coordinates:
            return boxes_meet(start, size, old_start, old_size)
        low, high = self.span(self.new, start, size)
        old_low, old_high = self.span(self.old, old_start, old_size)
        return low <= old_high and old_low <= high


@dataclass(frozen=True, slots=True)
class Move:
    """Write ``piece`` into the new state of slot ``into``.

    ``reads``: the slot whose memory the source lies in, if any. ``direct``: the source is that slot's old state
    itself, so that its coordinates are known. ``scratch``: the source is copied away before the first write.
    """

    into: int
    piece: Piece
    reads: int | None = None
    direct: bool = False
    scratch: bool = False

    def source_box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Start and size of what a direct move reads, in coordinates of the old state."""
        assert isinstance(self.piece.source, Source)
        index = self.piece.source.index
        return tuple(s for _, s in index), tuple(1 if d is None else self.piece.size[d] for d, _ in index)

    def stays(self, geometry: Geometry) -> bool:
        """Whether the bytes already are where the move would put them."""
        if not (self.direct and self.reads == self.into and geometry.same_coordinates):
            return False
        assert isinstance(self.piece.source, Source)
        return self.source_box() == (self.piece.start, self.piece.size) and all(
            d == e or self.piece.size[e] == 1 for e, (d, _) in enumerate(self.piece.source.index)
        )


def schedule(moves: Sequence[Move], geometries: Sequence[Geometry]) -> list[Move]:
    """``moves`` in an order that keeps every source intact until it is read, some cut up or marked ``scratch``.

    Moves that do nothing are left out. Scratch copies are to be taken before the first write, in any order.
    """
    work = [step for move in moves if not move.stays(geometries[move.into]) for step in _steps(move, geometries)]
    ordered: list[Move] = []
    while work:
        # A move may go when no other that still waits reads what it destroys.
        ready = next(
            (m for m in work if not any(_destroys(m, other, geometries) for other in work if other is not m)), None
        )
        if ready is None:
            # A cycle. The smallest source that stands in somebody's way is copied out of it.
            blocked = [m for m in work if any(_destroys(other, m, geometries) for other in work if other is not m)]
            smallest = min(blocked, key=lambda m: m.piece.numel)
            work[work.index(smallest)] = replace(smallest, scratch=True)
            continue
        work.remove(ready)
        ordered.append(ready)
    return ordered


def _destroys(writer: Move, reader: Move, geometries: Sequence[Geometry]) -> bool:
    """Whether ``writer`` may change what ``reader`` has yet to read."""
    if reader.scratch or reader.reads != writer.into:
        return False
    if not (reader.direct and geometries[writer.into].same_coordinates):
        return True
    return boxes_meet(writer.piece.start, writer.piece.size, *reader.source_box())


def boxes_meet(start: Sequence[int], size: Sequence[int], other: Sequence[int], extent: Sequence[int]) -> bool:
    """Whether two boxes, each given by start and size, have a point in common."""
    return all(a < b + m and b < a + n for a, n, b, m in zip(start, size, other, extent, strict=True))


def _steps(move: Move, geometries: Sequence[Geometry]) -> list[Move]:
    """``move`` as moves that do not destroy their own source."""
    if not _destroys(move, move, geometries):
        return [move]
    distance = _shift_along_one_dim(move) if geometries[move.into].same_coordinates else None
    if distance is not None:
        dim, by = distance
        length = move.piece.size[dim]
        if -(-length // by) <= _MOST_STEPS:
            first = move.piece.start[dim]
            return [
                replace(move, piece=shift(crop([move.piece], dim, at, min(at + by, first + length)), dim, at)[0])
                for at in range(first, first + length, by)
            ]
    return [replace(move, scratch=True)]


def _shift_along_one_dim(move: Move) -> tuple[int, int] | None:
    """``(dim, distance)`` if the move shifts old state along one dimension and does nothing else."""
    if not move.direct:
        return None
    assert isinstance(move.piece.source, Source)
    index = move.piece.source.index
    if any(d != e for e, (d, _) in enumerate(index)) or len(index) != len(move.piece.start):
        return None
    offsets = [(e, abs(s - at)) for e, ((_, s), at) in enumerate(zip(index, move.piece.start, strict=True)) if s != at]
    return offsets[0] if len(offsets) == 1 else None
