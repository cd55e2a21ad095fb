"""What a table would do with a call, told without making it: the clauses of admission in the order of `ReplayTable`.

Nothing is noted, moved, copied into a buffer or captured. What only making the call can tell is not foreseen: that the
code raises, or whether a class that is captured first is admitted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from cadence_fx._torch_aside import GivenUp, Standing
from cadence_fx.capture import ReplayClass, overlap, unstageable
from cadence_fx.errors import StaleState
from cadence_fx.plan import NEEDS_GRAD, Miss, Plan
from cadence_fx.signature import Unkeyable
from cadence_fx.switch import is_off
from cadence_fx.table import ReplayTable, elsewhere

REPLAY, CAPTURE, EAGER, ERROR = "replay", "capture", "eager", "error"


@dataclasses.dataclass(frozen=True, slots=True)
class Foreseen:
    """What a table would do with a call.

    Attributes:
        outcome: REPLAY: its class is launched. CAPTURE: a class is captured first, and launched if it is admitted.
            EAGER: a miss. ERROR: the call raises.
        miss: why, where it is EAGER or ERROR.
        entry: the class of its signature, where there is one.
        moved: index of the argument that is not where the class has it.
    """

    outcome: str
    miss: Miss | None = None
    entry: ReplayClass | None = None
    moved: int | None = None


def foresee(table: ReplayTable, args: Sequence[Any]) -> Foreseen:
    """What a call with these flat arguments would meet."""
    if is_off():
        return Foreseen(EAGER, Miss("disabled"))
    try:
        return _foresee(table, args)
    except Unkeyable as error:
        return Foreseen(EAGER, Miss("unkeyable", str(error)))
    except StaleState as error:
        return Foreseen(ERROR, Miss(error.reason, str(error)))


def _foresee(table: ReplayTable, args: Sequence[Any]) -> Foreseen:
    key = table.key(args)
    entry = table.classes.get(key)
    if entry is None or entry.recording.closed:
        miss = _unclassed(table, key, args)
        return Foreseen(EAGER, miss) if miss is not None else Foreseen(CAPTURE)
    plan = entry.plan
    moved = next((i for i in plan.fixed if args[i].data_ptr() != entry.pointers[i]), None)
    if moved is not None:
        return Foreseen(EAGER, elsewhere(table.names[moved]), entry, moved)
    miss = _unfit(table, entry, args)
    return Foreseen(REPLAY if miss is None else EAGER, miss, entry)


def _unfit(table: ReplayTable, entry: ReplayClass, args: Sequence[Any]) -> Miss | None:
    """Why the class of a call's signature would not be launched."""
    plan, reached = entry.plan, entry.reached
    if reached is not None and (what := reached.changed()) is not None:
        return Miss("rebound", what)
    if entry.written or entry.copy_back:
        shared = overlap(plan, entry.written, args, table.names)
        if shared is not None:
            return shared
    if torch.is_grad_enabled() and (table.needs_grad(args) or (reached is not None and reached.needs_grad())):
        return NEEDS_GRAD
    if (held := blocked(plan, args)) is not None:
        return held
    for work in (plan.kept, plan.host):
        changed = work.foresee(args) if work is not None else None
        if changed is not None:
            return changed
    return None


def barred(dynamos: Standing) -> Miss | None:
    """Why Dynamo does not bring a call before the backend, so that it is in no count; None where it does."""
    if dynamos.limit is not None:
        return Miss("recompile_limit", dynamos.limit)
    if dynamos.off is not None:
        return Miss("dynamo_off", dynamos.off)
    return Miss("dynamo_off", str(GivenUp())) if dynamos.given_up else None


def blocked(plan: Plan, args: Sequence[Any]) -> Miss | None:
    """Why a state of a call could not be let into its carry.

    Raises:
        StaleState: it is of contents that a later call has replaced.
    """
    for use in plan.regions:
        problem = use.carry.blocked(args[use.index], in_place=use.output is None)
        if problem is not None:
            return Miss(*problem)
    return None


def _unclassed(table: ReplayTable, key: tuple[Any, ...], args: Sequence[Any]) -> Miss | None:
    """Why a signature that has no class would not get one, as far as that shows before it is tried."""
    refused = table.refused.get(key)
    if refused is not None:
        return refused
    if torch.is_grad_enabled() and table.needs_grad(args):
        return NEEDS_GRAD
    unknown = table.planner.unknown(args) if table.sealed else None
    miss = unknown or table.restless() or table.planner.foresee(args)
    if miss is not None:
        return miss
    if len(table.classes) >= table.max_classes:
        return table.full()
    return unstageable(table.staged, args, table.names)
