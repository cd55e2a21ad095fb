"""Random ways in which code keeps a bounded state, right and wrong, as functions of ``(x, state)``.

A retention is written as the list of frames that survive, numbered over old then new, so it can be spelled in many
ways: what the list says is right by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from cadence_fx.retention import KeepLast, Order, PromptPlusLast, Retention


@dataclass(frozen=True)
class Case:
    retention: Retention
    shape: tuple[int, ...]  # of the old state
    axis: int
    advance: int
    spelling: str
    shared: bool  # whether the raw extent is read by something else too
    view: bool  # whether a view of the old state is returned as well

    @property
    def extent(self) -> int:
        return self.shape[self.axis]

    def examples(self) -> tuple[Tensor, Tensor]:
        fresh = list(self.shape)
        fresh[self.axis] = self.advance
        return torch.randn(fresh), torch.randn(self.shape)

    def frames(self) -> list[int]:
        """The surviving frames in memory order; old ones are ``0 … extent-1``, new ones follow."""
        spans = self.retention.survivors(self.extent, self.advance)
        assert spans is not None
        base = {"old": 0, "new": self.extent}
        return [base[span.source] + i for span in spans for i in range(span.start, span.stop)]


@st.composite
def cases(draw: st.DrawFn, spelling: str | None = None) -> Case:
    advance = draw(st.integers(1, 4))
    order: Order = draw(st.sampled_from(["append", "prepend"]))
    if draw(st.booleans()):
        retention: Retention = KeepLast(draw(st.integers(1, 9)), order=order)
    else:
        prompt = draw(st.integers(0, 4))
        retention = PromptPlusLast(prompt, draw(st.integers(0 if prompt else 1, 6)), order=order)
    extent = draw(st.integers(0, retention.bound))
    axis = draw(st.integers(0, 2))
    shape = [draw(st.integers(1, 3)) for _ in range(3)]
    if draw(st.booleans()):
        shape[:axis] = [1] * axis
    shape[axis] = extent
    return Case(
        retention,
        tuple(shape),
        axis,
        advance,
        spelling or draw(st.sampled_from(sorted(SPELLINGS))),
        draw(st.booleans()),
        draw(st.booleans()),
    )


def runs(frames: Sequence[int], extent: int) -> list[tuple[int, int]]:
    """``frames`` as ``(first, last + 1)`` of consecutive ones, cut between old and new."""
    out: list[tuple[int, int]] = []
    for frame in frames:
        if out and out[-1][1] == frame and frame != extent:
            out[-1] = (out[-1][0], frame + 1)
        else:
            out.append((frame, frame + 1))
    return out


def program(case: Case, frames: Sequence[int]) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """``f(x, state)`` that keeps ``frames`` in the case's spelling, and returns something computed first."""

    def run(x: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(x) + 1
        if case.shared:
            y = y + torch.cat([state, x], case.axis).sum(case.axis, keepdim=True)
        kept = SPELLINGS[case.spelling](case, frames, x, state)
        return (y, kept, *([state.narrow(case.axis, 0, case.extent // 2)] if case.view else []))

    return run


def _raw(case: Case, x: Tensor, state: Tensor) -> Tensor:
    return torch.cat([state, x], case.axis)


def _cat_of_slices(case: Case, frames: Sequence[int], x: Tensor, state: Tensor) -> Tensor:
    raw = _raw(case, x, state)
    return torch.cat([raw.narrow(case.axis, a, b - a) for a, b in runs(frames, case.extent)], case.axis)


def _cat_of_parts(case: Case, frames: Sequence[int], x: Tensor, state: Tensor) -> Tensor:
    parts = []
    for a, b in runs(frames, case.extent):
        source, base = (state, 0) if a < case.extent else (x, case.extent)
        index = [slice(None)] * 3
        index[case.axis] = slice(a - base, b - base)
        parts.append(source[tuple(index)])
    return torch.cat(parts, case.axis).contiguous()


def _split(case: Case, frames: Sequence[int], x: Tensor, state: Tensor) -> Tensor:
    raw = _raw(case, x, state)
    cuts = sorted({0, raw.shape[case.axis], *(edge for run in runs(frames, case.extent) for edge in run)})
    parts = dict(zip(cuts, raw.split([b - a for a, b in zip(cuts, cuts[1:], strict=False)], case.axis), strict=False))
    picked = []
    for a, b in runs(frames, case.extent):
        picked += [parts[cut] for cut in cuts if a <= cut < b]
    return torch.cat(picked, case.axis)


def _chunk(case: Case, frames: Sequence[int], x: Tensor, state: Tensor) -> Tensor:
    raw = _raw(case, x, state)
    parts = raw.chunk(raw.shape[case.axis], case.axis)
    return torch.cat([parts[f] for f in frames], case.axis)


def _stack(case: Case, frames: Sequence[int], x: Tensor, state: Tensor) -> Tensor:
    parts = _raw(case, x, state).unbind(case.axis)
    return torch.stack([parts[f] for f in frames], case.axis)


def _select(case: Case, frames: Sequence[int], x: Tensor, state: Tensor) -> Tensor:
    raw = _raw(case, x, state)
    return torch.stack([raw.select(case.axis, f) for f in frames]).movedim(0, case.axis)


def _buffer(case: Case, frames: Sequence[int], x: Tensor, state: Tensor) -> Tensor:
    raw = _raw(case, x, state)
    size = list(raw.shape)
    size[case.axis] = len(frames)
    kept = torch.zeros(size)
    at = 0
    for a, b in runs(frames, case.extent):
        kept.narrow(case.axis, at, b - a).copy_(raw.narrow(case.axis, a, b - a))
        at += b - a
    return kept


def _setitem(case: Case, frames: Sequence[int], x: Tensor, state: Tensor) -> Tensor:
    size = list(state.shape)
    size[case.axis] = len(frames)
    kept = state.new_empty(size)
    for at, f in enumerate(frames):
        source, base = (state, 0) if f < case.extent else (x, case.extent)
        to: list[slice | int] = [slice(None)] * 3
        to[case.axis] = at
        kept[tuple(to)] = source.select(case.axis, f - base)
    return kept


def _roll(case: Case, frames: Sequence[int], x: Tensor, state: Tensor) -> Tensor:
    raw = _raw(case, x, state)
    parts = []
    for a, b in runs(frames, case.extent):
        parts.append(torch.roll(raw, -a, case.axis).narrow(case.axis, 0, b - a))
    return torch.cat(parts, case.axis)


def _pad(case: Case, frames: Sequence[int], x: Tensor, state: Tensor) -> Tensor:
    """One padded copy a run, each written over the zeros of the one before."""
    raw = _raw(case, x, state)
    kept = None
    at = 0
    for a, b in runs(frames, case.extent):
        before = [0, 0] * (2 - case.axis)
        part = torch.nn.functional.pad(raw, [*before, -a, b - raw.shape[case.axis]])
        part = torch.nn.functional.pad(part, [*before, at, len(frames) - at - (b - a)])
        if kept is None:
            kept = part
        else:
            kept = torch.slice_scatter(kept, part.narrow(case.axis, at, b - a), case.axis, at, at + b - a)
        at += b - a
    assert kept is not None
    return kept


def _index_copy(case: Case, frames: Sequence[int], x: Tensor, state: Tensor) -> Tensor:
    raw = _raw(case, x, state)
    size = list(raw.shape)
    size[case.axis] = len(frames)
    kept = raw.new_zeros(size)
    at = 0
    for a, b in runs(frames, case.extent):
        kept = kept.index_copy(case.axis, torch.arange(at, at + b - a), raw.narrow(case.axis, a, b - a))
        at += b - a
    return kept


def _index_select(case: Case, frames: Sequence[int], x: Tensor, state: Tensor) -> Tensor:
    return _raw(case, x, state).index_select(case.axis, torch.tensor(list(frames)))


def _transposed(case: Case, frames: Sequence[int], x: Tensor, state: Tensor) -> Tensor:
    raw = torch.cat([state.transpose(0, case.axis), x.transpose(0, case.axis)], 0)
    return torch.cat([raw[a:b] for a, b in runs(frames, case.extent)], 0).transpose(0, case.axis)


def _in_place(case: Case, frames: Sequence[int], x: Tensor, state: Tensor) -> Tensor:
    """A copy of the raw extent, shifted over itself frame by frame."""
    kept = _raw(case, x, state).clone()
    moved = kept.clone()
    for at, f in enumerate(frames):
        kept.select(case.axis, at).copy_(moved.select(case.axis, f))
    return kept.narrow(case.axis, 0, len(frames))


SPELLINGS: dict[str, Callable[[Case, Sequence[int], Tensor, Tensor], Tensor]] = {
    "buffer": _buffer,
    "cat_of_parts": _cat_of_parts,
    "cat_of_slices": _cat_of_slices,
    "chunk": _chunk,
    "in_place": _in_place,
    "index_copy": _index_copy,
    "index_select": _index_select,
    "pad": _pad,
    "roll": _roll,
    "select": _select,
    "setitem": _setitem,
    "split": _split,
    "stack": _stack,
    "transposed": _transposed,
}
