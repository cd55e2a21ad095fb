"""The ways to run one class, best first: rewritten by every pass, by all but one, by none but the needed ones, and with
the new states copied back.

A way that fails its certificate is dropped, and the next one is made and tried: so one pass that changes a byte costs
what it saves, and nothing else. A pass that raises is left out from the start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import fx

from cadence_fx.branches import on_branches
from cadence_fx.eager_breaks import MOST_BREAKS, Breaks, Tape, describe, mark, put_breaks
from cadence_fx.errors import NotCapturable, PassFailed
from cadence_fx.kept import Keep, KeptValues
from cadence_fx.layout import same_geometry_copy
from cadence_fx.ledger import Ledger, log
from cadence_fx.passes import Edit, ParallelBranches, Pass, PassContext, SplitHost, is_needed, run_passes
from cadence_fx.plan import RegionUse, Split, Way
from cadence_fx.residents import HostSide
from cadence_fx.unsteady import find_unsteady


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """The static graph of one class, and what is known of its arguments.

    Attributes:
        uses: the states.
        staged: indices of the arguments that are copied in on each call.
        names: what the user calls each argument.
        device: where the graph runs.
        context: new facts for the passes of one way.
        keep, restless: see `KeptValues`.
        tape: where nodes of the graph are marked to run eager, of their results.
    """

    aten: fx.GraphModule
    uses: Sequence[RegionUse]
    staged: Sequence[int]
    names: Sequence[str]
    device: torch.device
    context: Callable[[], PassContext]
    keep: Keep
    restless: set[str]
    tape: Tape | None = None

    def breaks(self, gm: fx.GraphModule) -> Breaks | None:
        """Take the marked nodes out of what is recorded of a rewritten graph."""
        return put_breaks(gm, self.aten.graph, self.tape) if self.tape is not None else None

    def _positions(self) -> dict[str, int]:
        return {node.name: i for i, node in enumerate(self.aten.graph.find_nodes(op="placeholder"))}

    def host(self, context: PassContext) -> HostSide | None:
        if context.host is None and not context.premises:
            return None
        return HostSide(context.host, context.premises, self._positions(), self.staged)

    def kept(self, context: PassContext) -> KeptValues | None:
        if context.slow is None:
            return None
        positions = self._positions()
        inputs = [positions[name] for name in context.slow.inputs]
        return KeptValues(context.slow, inputs, [self.names[i] for i in inputs], self.keep, self.restless)


class Forward:
    """What runs a graph. Its code is made by the first call, and most classes never run all of their graphs."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm

    def __call__(self, *args: Any) -> Sequence[Any]:
        return self.gm.forward(*args)  # type: ignore[no-any-return]


def ways(subject: Subject, passes: Sequence[Pass], edits: Sequence[Edit], name: str) -> Iterator[Way]:
    """The ways, each made when it is asked for, the first one at once.

    Args:
        edits: of the captured graph.
        name: of the program, for the log.

    Raises:
        NotCapturable: no way to run the graph can be recorded.
    """
    notes: list[str] = []
    try:
        first = _rewritten(subject, passes, "rewritten in place", name, notes)
    except NotCapturable as error:
        needed = [pass_ for pass_ in passes if is_needed(pass_)]
        if len(needed) == len(passes):
            raise
        log.warning("%s: the passes that can be left out are, since with them: %s", name, error)
        notes.append(f"with the passes that can be left out: {error}")
        first = _rewritten(subject, needed, "rewritten in place without optional passes", name, notes)
    if first is None:
        return iter([_copied_back(subject, passes, notes)])
    way, changing = first
    others = _others(subject, passes, changing, name)
    if not edits:
        return chain([way], others)
    unedited = dataclasses.replace(way, name=f"{way.name} without {', '.join(edit.name for edit in edits)}")
    return chain([dataclasses.replace(way, edits=edits), unedited], others)


def split_around(
    subject: Subject,
    passes: Sequence[Pass],
    stock: fx.GraphModule,
    stock_args: Callable[[], Sequence[Any]],
    args: Sequence[Any],
    restore: Callable[[], None],
    ledger: Ledger,
) -> Split | None:
    """How to run a computation in parts, between which what does not repeat runs eager; None where none is found that
    does not, or where it cannot be left out of a recording. For the arguments see `find_unsteady`."""
    try:
        found = find_unsteady(stock, stock_args, subject.aten, args, restore)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        log.warning("%s: looking for what does not repeat failed", ledger.name, exc_info=True)
        restore()
        return None
    marked = mark(found)
    if not 0 < len(marked) <= MOST_BREAKS:
        return None
    told, tape = [describe(node) for node in marked], Tape(found)
    subject = dataclasses.replace(subject, tape=tape)
    in_one_row = [pass_ for pass_ in passes if pass_.name != ParallelBranches.name]  # parts run one after another
    try:
        with ledger.timed("passes"):
            return Split(ways(subject, in_one_row, [], ledger.name), tape, told)
    except NotCapturable as error:
        log.warning("%s: not recorded in parts: %s", ledger.name, error)
        return None


def _others(subject: Subject, passes: Sequence[Pass], changing: Sequence[str], name: str) -> Iterator[Way]:
    left_out: list[tuple[str, tuple[str, ...]]] = [(each, (each,)) for each in reversed(changing)]
    if len(changing) > 1:
        left_out.append((", ".join(changing), tuple(changing)))
    for text, names in left_out:
        kept = [pass_ for pass_ in passes if pass_.name not in names]
        try:
            other = _rewritten(subject, kept, f"rewritten in place without {text}", name, [])
        except NotCapturable:
            continue
        if other is not None:
            yield other[0]
    yield _copied_back(subject, passes, [])


def _rewritten(
    subject: Subject, passes: Sequence[Pass], text: str, name: str, notes: list[str]
) -> tuple[Way, list[str]] | None:
    """The graph rewritten by these passes, and which of those that can be left out have changed it. A pass that can be
    left out and raises is; None when another one raises. `notes` tells which have."""
    passes = list(passes)
    while True:
        context = subject.context()
        try:
            gm = run_passes(subject.aten, context, passes)
        except PassFailed as error:
            log.warning("%s: %s", name, error)
            notes.append(str(error))
            failed = next(pass_ for pass_ in passes if pass_.name == error.name)
            if is_needed(failed):
                return None
            passes.remove(failed)
            continue
        optional = {pass_.name for pass_ in passes if not is_needed(pass_)}
        told = [*notes, *context.notes]
        branched = on_branches(gm, context.branches, subject.device, told.append)
        way = Way(
            text,
            branched or Forward(gm),
            subject.host(context),
            told,
            kept=subject.kept(context),
            cleared=tuple(context.cleared),
            idle=_idle(gm.graph, subject.aten.graph, context),
            breaks=subject.breaks(gm),
        )
        changing = [*context.modified, *([ParallelBranches.name] if branched is not None else [])]
        return way, [each for each in changing if each in optional]


def _copied_back(subject: Subject, passes: Sequence[Pass], notes: list[str]) -> Way:
    """The graph as it is, and the new states copied into their carries: right for any spelling, one copy slower. What
    leaves the graph for the host has to leave it here too."""
    needed = [pass_ for pass_ in passes if is_needed(pass_)]
    split = [pass_.name for pass_ in needed].index(SplitHost.name) + 1
    context = subject.context()
    try:
        gm = run_passes(subject.aten, context, needed[:split])
    except PassFailed:
        context, gm = subject.context(), subject.aten
    run = written_back(Forward(gm), subject.uses)
    idle = _idle(gm.graph, subject.aten.graph, context)
    return Way(
        "state copied back",
        run,
        subject.host(context),
        [*notes, *context.notes],
        idle=idle,
        breaks=subject.breaks(gm),
    )


def _idle(graph: fx.Graph, traced: fx.Graph, context: PassContext) -> frozenset[int]:
    """Indices of inputs at fixed addresses that a class does not depend on.

    What the traced graph uses and a rewritten one does not may have gone into a constant of it, unless its contents
    mean nothing.
    """
    elsewhere = {name for premise in context.premises for name in premise.inputs}
    elsewhere |= set(context.host.inputs) if context.host is not None else set()
    now, before = graph.find_nodes(op="placeholder"), traced.find_nodes(op="placeholder")
    return frozenset(
        i
        for i, (node, known) in enumerate(zip(now, before, strict=False))  # destinations come behind
        if known.name in context.frozen_inputs - elsewhere
        and not node.users
        and (known.name in context.scratch_inputs or not known.users)
    )


def written_back(forward: Callable[..., Sequence[Any]], uses: Sequence[RegionUse]) -> Callable[..., list[Any]]:
    """A run of the unrewritten graph with each new state copied into its carry at the end."""
    receiving = [use.output for use in uses if use.output is not None]
    overwritten = [use.carry for use in uses if use.output is not None]

    def run(*everything: Any) -> list[Any]:
        split = len(everything) - len(receiving)
        args, homes = everything[:split], everything[split:]
        outputs = list(forward(*args))
        for i, out in enumerate(outputs):
            if isinstance(out, torch.Tensor) and any(carry.owns(out) for carry in overwritten):
                outputs[i] = same_geometry_copy(out)
        for output, home in zip(receiving, homes, strict=True):
            home.copy_(outputs[output])
            outputs[output] = home
        return outputs

    return run
