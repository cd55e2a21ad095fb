"""Explain: what one call would meet, told without making it (paper section 3.3).

The call's flat arguments are found as Dynamo would find them, and the clauses of admission are gone through in order.
Nothing is run but guards, tables that a call reads by number, and what a class checks on the host; no count, generator,
state or cache of Dynamo's is another afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Sequence
from typing import Any

from cadence_fx._torch import compile_site
from cadence_fx._torch_aside import GivenUp, Told, answer_of, standing, trace_aside
from cadence_fx.errors import CadenceError, ContractError, StaleState
from cadence_fx.foresee import CAPTURE, EAGER, ERROR, REPLAY, Foreseen, barred, blocked, foresee
from cadence_fx.generators import Generators, all_sources
from cadence_fx.graph import GraphPlanner
from cadence_fx.lookup import program_of
from cadence_fx.nearest import Difference, Signature, nearest
from cadence_fx.plan import Miss
from cadence_fx.program import Program
from cadence_fx.remedies import clause_of, remedy_for
from cadence_fx.replay import ExactShapeReplay
from cadence_fx.switch import is_off
from cadence_fx.table import ReplayTable

UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """What one call would meet. `str()` is for people, `as_dict()` and `to_json()` for programs.

    Attributes:
        callable: the name of the compiled callable.
        outcome: "replay"; "capture": no class has this signature, and one would be captured first; "eager"; "error":
            the call would raise; "unknown": only making the call can tell.
        reason: the counted reason, where it is eager; that of the error, where it raises.
        clause: of admission that is missed: "signature match", "address stability" or "effect class".
        detail: argument, axis, expected, found and the user's line, in words.
        remedy: what to do about it.
        replays: the class that would be launched.
        nearest: the class that is most like the call.
        differences: in what the call differs from it.
    """

    callable: str
    outcome: str
    reason: str | None = None
    clause: str | None = None
    detail: str = ""
    remedy: str | None = None
    replays: str | None = None
    nearest: str | None = None
    differences: tuple[Difference, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """All fields, as plain containers."""
        return dataclasses.asdict(self)

    def to_json(self, *, indent: int | None = 2) -> str:
        """All fields as JSON."""
        return json.dumps(self.as_dict(), indent=indent, default=str)

    def __str__(self) -> str:
        lines = [f"{self.callable}: {self._what()}"]
        lines += [f"  {name}: {value}" for name, value in (("why", self.detail), ("remedy", self.remedy)) if value]
        if self.nearest is not None and self.outcome != REPLAY:
            lines.append(f"  nearest class: {self.nearest}")
            lines += [f"    {difference}" for difference in self.differences]
        return "\n".join(lines)

    def _what(self) -> str:
        if self.outcome == REPLAY:
            return f"replays class {self.replays}"
        if self.outcome == CAPTURE:
            return "a class would be captured for this call"
        if self.outcome == UNKNOWN:
            return "cannot be told without making the call"
        verb = "runs eager" if self.outcome == EAGER else "raises"
        return f"{verb}: {self.reason}" + (f" ({self.clause})" if self.clause else "")


def explain(compiled: Any, *args: Any, **kwargs: Any) -> Explanation:
    """What a call with these arguments would do now: which class it would replay, or why it would not.

    Call it in the context the call would be made in (grad and inference mode, autocast). Of a callable that Dynamo has
    cut into several graphs, the first is explained.

    Args:
        compiled: what `torch.compile(..., backend="cadence")` returned, or an `ExactShapeReplay`.
        *args, **kwargs: of the call. They are not changed.

    Raises:
        NotCompiled: anything else.
        ContractError: the arguments do not fit the callable's signature.
    """
    generators = Generators(all_sources())
    try:
        if isinstance(compiled, ExactShapeReplay):
            return _explain_plain(compiled, args, kwargs)
        return _explain_program(program_of(compiled, "explain"), compiled, args, kwargs)
    finally:
        if generators.moved():
            generators.restore()


# What a call goes to, and its flat arguments.
Place = tuple[GraphPlanner, ReplayTable, Sequence[Any]]


def _explain_plain(replay: ExactShapeReplay, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
    table, leaves = replay.table_for(*args, **kwargs)
    with table.alone():
        found = foresee(table, leaves)
        known = [(entry.plan.label, _named(table, key)) for key, entry in table.classes.items()]
        mine = _named(table, table.key(leaves)) if known and found.entry is None and _is_keyed(found) else {}
    return _told(replay.name, found, known, mine, table.names, leaves)


def _is_keyed(found: Foreseen) -> bool:
    return found.miss is None or found.miss.reason != "unkeyable"


def _named(table: ReplayTable, key: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """A table's key by the names of its arguments, the ambient state under the empty one."""
    indices = [*table.regions, *table.staged, *table.scalars]
    return {"": key[0]} | {table.names[i]: part for i, part in zip(indices, key[1:], strict=False)}


def _explain_program(program: Program, compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
    if is_off():
        return _told(program.name, Foreseen(EAGER, Miss("disabled")))
    missed = None
    try:
        dynamos = standing(compiled, args, kwargs)
        if (miss := barred(dynamos)) is not None:
            missed = Foreseen(ERROR if dynamos.raises else EAGER, miss)
            if dynamos.off is not None:
                return _told(program.name, missed)
        find = _intercepted if dynamos.served else _traced
        planner, table, flat = find(program, compiled, args, kwargs)
    except TypeError as error:
        raise ContractError(f"the call does not fit the compiled callable: {error}", field="args") from error
    except (LookupError, CadenceError) as error:
        if missed is not None and not (dynamos.given_up and isinstance(error, LookupError)):
            return _told(program.name, missed)
        return _unplaced(program.name, error)  # a code that breaks is given up, too, and what it calls is not
    with table.alone():
        found = missed or foresee(table, flat)
        if found.outcome == CAPTURE and program.sealed:
            found = _planned(program, planner.for_trial(), flat)
        known = [(str(point), each) for point, signatures in program.signatures.items() for each in signatures]
        mine = planner.signature(flat) if _is_keyed(found) else {}
    return _told(program.name, found, known, mine, table.names, flat)


def _unplaced(name: str, error: LookupError | CadenceError) -> Explanation:
    """Of a call whose graph cannot be told."""
    if isinstance(error, GivenUp):
        return _told(name, Foreseen(EAGER, Miss("dynamo_off", str(error))))
    if isinstance(error, CadenceError):  # the declaration does not fit the code
        return _told(name, Foreseen(ERROR, Miss(error.reason, str(error))))
    return Explanation(name, UNKNOWN, detail=str(error))


def _intercepted(program: Program, compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Place:
    """Where Dynamo's compiled code takes a call: it is ended there."""
    asking, before = threading.get_ident(), program.auditor

    def asked(planner: GraphPlanner, table: ReplayTable, flat: Sequence[Any]) -> Any:
        if threading.get_ident() == asking:
            raise Told((planner, table, flat))
        return before(planner, table, flat) if before is not None else planner.finish(table(flat), flat)

    program.auditor = asked
    try:
        return answer_of(compiled, args, kwargs)  # type: ignore[no-any-return]
    finally:
        program.auditor = before


def _traced(program: Program, compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Place:
    """Where a call would go for which Dynamo has to compile a graph first."""

    def receive(gm: Any, flat: Any) -> Place:
        planner, table, complete = program.prepare(gm, compile_site())
        return planner, table, complete(flat)

    return trace_aside(compiled, args, kwargs, receive)  # type: ignore[no-any-return]


def _planned(program: Program, planner: GraphPlanner, flat: Sequence[Any]) -> Foreseen:
    """What becomes of a call that warm-up has met through another graph: its class is shared, if this graph computes
    the same."""
    with program.as_it_was():
        plan = planner.plan(flat)
        if isinstance(plan, Miss):
            return Foreseen(EAGER, plan)
        twin = planner.twin(plan, flat)
        try:
            miss = blocked(plan, flat)
        except StaleState as error:
            return Foreseen(ERROR, Miss(error.reason, str(error)))
    if miss is not None:
        return Foreseen(EAGER, miss, twin)
    return Foreseen(REPLAY, entry=twin) if twin is not None else Foreseen(CAPTURE)


def _told(
    name: str,
    found: Foreseen,
    known: Sequence[tuple[str, Signature]] = (),
    mine: Signature | None = None,
    names: Sequence[str] = (),
    args: Sequence[Any] = (),
) -> Explanation:
    """In words: what was found, and how the call differs from the class that is most like it."""
    entry, miss = found.entry, found.miss
    if found.outcome == REPLAY and entry is not None:
        return Explanation(name, REPLAY, replays=entry.plan.label)
    near: tuple[str, list[Difference]] | None = (entry.plan.label, []) if entry is not None else None
    if entry is not None and found.moved is not None:
        here, there = entry.pointers[found.moved], args[found.moved].data_ptr()
        near = entry.plan.label, [Difference(names[found.moved], "address", hex(here or 0), hex(there))]
    elif entry is None and mine:
        near = nearest(known, mine)
    reason = miss.reason if miss is not None else None
    return Explanation(
        name,
        found.outcome,
        reason=reason,
        clause=clause_of(reason) if reason is not None else None,
        detail=miss.detail if miss is not None else "",
        remedy=remedy_for(reason) if reason is not None else None,
        nearest=near[0] if near is not None else None,
        differences=tuple(near[1]) if near is not None else (),
    )
