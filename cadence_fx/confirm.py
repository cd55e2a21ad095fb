"""An inferred contract against the module: every call of its catalog, made with other data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from cadence_fx.bytesops import bytes_equal
from cadence_fx.calls import Arguments, Live, Slot
from cadence_fx.catalog import Catalog
from cadence_fx.contract import Contract, Region
from cadence_fx.deduce import Deduced
from cadence_fx.errors import CatalogTooWide, ExampleFailed
from cadence_fx.walk import Visit, Walker


def confirm(
    contract: Contract,
    members: Mapping[str, Sequence[Deduced]],
    live: Live,
    first: Arguments,
    later: Arguments,
    flush: Arguments | None,
    repeats: int,
) -> str | None:
    """None where the module does what the contract says; else the first thing that it does otherwise.

    Extents of all calls are compared with the contract's, the calls met with its catalog, and in the bytes of each
    state what the declared retention keeps of the one before. ``repeats``: as of `Walker`.
    """
    problems: list[str] = []
    of = {state.slot: contract.region(name) for name, states in members.items() for state in states}
    slots = list(of)

    def witness(slot: Slot, old: torch.Tensor, new: torch.Tensor, ends_turn: bool) -> None:
        problem = _difference(contract, of[slot], old, new, ends_turn)
        if problem is not None:
            problems.append(f"{slot.place}: {problem}")

    try:
        walk = Walker(live, slots, (), first, later, flush, repeats, witness).walk()
    except ExampleFailed as error:
        return str(error)
    if problems:
        return problems[0]
    if not walk.settled:
        return "with other data, the extents do not settle"
    try:
        catalog = contract.catalog()
    except CatalogTooWide:
        return None  # every call that was made agreed; there are too many to make them all
    return None if walk.jumped else _unlike(catalog, contract, of, walk.visits)


def _ticks(contract: Contract, clock: str, ends_turn: bool) -> int:
    advances = contract.advances_of(clock)
    return advances[-1] if ends_turn else advances[0]


def _difference(
    contract: Contract, region: Region, old: torch.Tensor, new: torch.Tensor, ends_turn: bool
) -> str | None:
    assert region.frame_axis is not None and region.frame_clock is not None
    axis = region.frame_axis
    advance = _ticks(contract, region.frame_clock, ends_turn)
    expected = [*old.shape]
    expected[axis] = region.next_extent(old.shape[axis], advance)
    if list(new.shape) != expected:
        return f"from {tuple(old.shape)} a call leaves {tuple(new.shape)}, the contract has {tuple(expected)}"
    policy = region.retention
    spans = None if policy.fixed else policy.survivors(old.shape[axis], region.added(advance))
    at = 0
    for span in spans or ():
        if span.source == "old" and not bytes_equal(
            old.narrow(axis, span.start, len(span)), new.narrow(axis, at, len(span))
        ):
            return f"{span} is not kept at frame {at} of the next state, as {policy.describe()} has it"
        at += len(span)
    return None


def _unlike(catalog: Catalog, contract: Contract, of: Mapping[Slot, Region], visits: Sequence[Visit]) -> str | None:
    """How the calls that were made differ from those of the catalog."""
    made = {
        (visit.flush, frozenset((of[s].name, old[of[s].axes[0]]) for s, (old, _) in visit.shapes.items()))
        for visit in visits
    }
    known = {(entry.flush, frozenset(entry.extents)) for entry in catalog}
    for flush, extents in sorted(made ^ known, key=repr):
        where = "the catalog only" if (flush, extents) in known else "the stream only"
        told = ", ".join(f"{name} {extent}" for name, extent in sorted(extents)) or "no state"
        return f"a {'flush' if flush else 'normal'} call at {told} is in {where}"
    return None
