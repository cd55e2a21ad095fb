"""Capture: from a plan and one call's arguments to a class, or the reason why there is none.

A class is recorded on static arguments: fixed ones themselves, staged ones as copies, states as their carries. It is
admitted only if its effects can be those of a launch (`effects`) and its bytes are those of the stock computation
(`certify`). Everything that was touched on the way is put back, whether the class is admitted, refused or fails at any
point, so that a call which captures a class is answered like any other.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import torch

from cadence_fx import certify
from cadence_fx.culprit import find_culprit
from cadence_fx.effects import Effects, Probed, hands_over, probe
from cadence_fx.layout import is_expanded, same_geometry_copy
from cadence_fx.ledger import Ledger, log
from cadence_fx.outputs import OutputRule
from cadence_fx.passes import EditContext
from cadence_fx.plan import Miss, Plan, RegionUse, Split, Way, destinations
from cadence_fx.reached import Reached
from cadence_fx.recorder import EditFailed, Recording, Run, record
from cadence_fx.residents import HostedRecording, RefreshedRecording
from cadence_fx.signature import ALIGNMENT, is_lazy, is_plain
from cadence_fx.trials import Trials


@dataclasses.dataclass(slots=True)
class ReplayClass:
    """One signature with its recording.

    Attributes:
        buffers: static tensors of the staged arguments, in the order of `plan.staged`.
        pointers: addresses of the fixed arguments, by argument index; None for the others.
        copy_back: staged arguments that the code writes: their buffers are copied back after a launch.
        effects: the verdict under which it was admitted.
        returned: the states that leave the call as they came.
        reached: what a plain callable found in Python objects; None for a graph.
        ready_seconds: what its program had taken to compile when it was admitted.
        touched: arguments that a launch writes where they are; workspaces too, since a backward may need what one held.
        beside: what else it writes, as the tensors that a plain callable has.
        written: storage addresses of what the code writes in place and no call may bring under another name.
    """

    plan: Plan
    recording: Recording
    rules: list[OutputRule]
    buffers: list[torch.Tensor]
    pointers: list[int | None]
    capture_seconds: float
    staging_bytes: int
    copy_back: list[tuple[int, torch.Tensor]]
    written: frozenset[int]
    effects: Effects
    returned: list[RegionUse]
    reached: Reached | None
    beside: list[torch.Tensor]
    replays: int = 0
    ready_seconds: float = 0.0
    touched: list[int] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        in_place = [use.index for use in self.plan.regions if use.output is None]
        self.touched = [*sorted(set(self.plan.written) & set(self.plan.fixed)), *in_place]


def unfit(plan: Plan, args: Sequence[Any], names: Sequence[str], device: torch.device) -> Miss | None:
    """Why these arguments cannot be bound or staged, if they cannot."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return Miss("mode", "stream capture not as it was when classes were captured: a capture is going on already")
    problem = unstageable(plan.staged, args, names)
    if problem is not None:
        return problem
    for use in plan.regions:
        if is_lazy(args[use.index]):
            return Miss("layout", f"{names[use.index]} is conjugated or negated lazily")
        full = use.carry.make_room(args[use.index], in_place=use.output is None)
        if full is not None:
            return Miss(*full)
    return overlap(plan, _written_homes(plan, args), args, names)


def unstageable(staged: Sequence[int], args: Sequence[Any], names: Sequence[str]) -> Miss | None:
    """Why one of the arguments that are copied in cannot be, if it cannot."""
    for i in staged:
        if args[i].data_ptr() % ALIGNMENT:
            return Miss("alignment", f"{names[i]} does not start at a multiple of {ALIGNMENT} bytes")
        if _is_unusual(args[i]):
            return Miss("layout", f"{names[i]} is not a plain strided tensor")
    return None


def overlap(plan: Plan, written: frozenset[int], args: Sequence[Any], names: Sequence[str]) -> Miss | None:
    """Copying an argument severs what it shares with another, which is seen when one of the two is written.

    Args:
        written: storage addresses of what the code writes in place.
    """
    mutated = set(plan.mutated)
    if not written and not mutated & set(plan.staged):
        return None
    seen: dict[int, int] = {}
    for i in (*plan.staged, *(use.index for use in plan.regions if use.output is not None)):
        if args[i].numel():
            home = args[i].untyped_storage().data_ptr()
            if (
                home in written
                or (i in mutated and home in plan.reached)
                or (home in seen and {i, seen[home]} & mutated)
            ):
                other = names[seen[home]] if home in seen else "something the code reads or writes by itself"
                return Miss("overlap", f"{names[i]} shares memory with {other}")
            seen[home] = i
    return None


def _written_homes(plan: Plan, args: Sequence[Any]) -> frozenset[int]:
    """What is written in place where it is, arguments or not; a staged argument is written in its copy."""
    indices = {*plan.written, *(use.index for use in plan.regions if use.output is None)} - set(plan.staged)
    return _homes([*(args[i] for i in indices), *plan.beside])


def _homes(tensors: Sequence[torch.Tensor]) -> frozenset[int]:
    return frozenset(t.untyped_storage().data_ptr() for t in tensors if t.layout is torch.strided and t.numel())


def capture(
    plan: Plan, args: Sequence[Any], names: Sequence[str], device: torch.device, ledger: Ledger
) -> ReplayClass | Miss:
    """Record and certify one class."""
    start = time.perf_counter()
    static_args = _bind(plan, args)
    snapshot = certify.Snapshot(plan, args, static_args, device)
    try:
        probed = probe(plan, static_args, args, snapshot, device)
        if isinstance(probed, Miss):
            return probed
        reference = _baseline(plan, static_args, args, names, snapshot, probed)
        if isinstance(reference, Miss):
            return reference
        trials = Trials(plan, static_args, names, snapshot)
        if trials.strays is not None:
            what = f"it looks at memory around the elements of {trials.strays} (as_strided), which a copy does not have"
            return Miss("layout", f"{plan.label}: {what}", lasting=True)
        recording = _record_certified(plan, static_args, reference, trials, snapshot, device, ledger)
        if isinstance(recording, Split):  # what did not repeat has shown only now
            reference, unstable = _follow(plan, recording, static_args, snapshot)
            if unstable is not None:
                return _not_reproducible(plan, unstable, static_args, snapshot)
            trials = Trials(plan, static_args, names, snapshot)
            recording = _record_certified(plan, static_args, reference, trials, snapshot, device, ledger)
            assert not isinstance(recording, Split), "a computation is split once"
        plan.notes += trials.notes
        if isinstance(recording, Miss):
            return recording
    finally:
        if plan.tape is not None:
            plan.tape.stop()
        snapshot.restore()
    if recording is None:
        return Miss("certificate", "; ".join(plan.notes) or plan.label, lasting=True)
    staged, beside = set(plan.staged), _homes(plan.beside)
    return ReplayClass(
        plan=plan,
        recording=recording,
        rules=probed.rules,
        buffers=[static_args[i] for i in plan.staged],
        pointers=_addresses(args, plan.fixed),
        capture_seconds=time.perf_counter() - start,
        staging_bytes=plan.predicted_bytes(args),
        copy_back=[(i, static_args[i]) for i in plan.mutated if i in staged],
        written=_written_homes(plan, static_args),
        effects=probed.effects,
        returned=[use for use in plan.regions if use.returned],
        reached=Reached(snapshot.python, plan.frozen) if snapshot.python is not None else None,
        beside=[t for t in snapshot.python.tensors if _homes([t]) & beside] if snapshot.python is not None else [],
    )


def _bind(plan: Plan, args: Sequence[Any]) -> list[Any]:
    """The static arguments: states enter their carries, staged arguments are copied."""
    for use in plan.regions:
        use.carry.enter(args[use.index], use.extent, in_place=use.output is None)
    static_args = list(args)
    for i in plan.staged:
        static_args[i] = same_geometry_copy(args[i])
    for use in plan.regions:
        static_args[use.index] = use.carry.view(use.extent)
    return static_args


def _baseline(
    plan: Plan,
    static_args: list[Any],
    args: Sequence[Any],
    names: Sequence[str],
    snapshot: certify.Snapshot,
    probed: Probed,
) -> certify.Outcome | Miss:
    """What the class is compared with: a stock run that a second one repeats, generators included.

    Where operators do not repeat that can be left out of the recording, runs are compared with their results given.
    """
    reference = probed.reference
    if probed.copies or plan.beside:
        plan.mutated.extend(probed.copies)
        plan.reached = _homes(snapshot.python.tensors if snapshot.python is not None else [])
        shared = overlap(plan, _written_homes(plan, static_args), args, names)
        if shared is not None:
            return shared
        # The probe's outcome does not hold what it found to be written.
        _, reference = certify.run_reference(plan, static_args, snapshot)
        snapshot.restore()
    unstable = _unstable(plan, reference, static_args, snapshot)
    if unstable is not None and plan.split is not None:
        split = plan.split(static_args, snapshot.restore)
        if split is not None:
            reference, unstable = _follow(plan, split, static_args, snapshot)
    if unstable is not None:
        return _not_reproducible(plan, unstable, static_args, snapshot)
    handed = hands_over(plan, static_args, snapshot) if plan.owner is not None else None
    return handed if handed is not None else reference


def _follow(
    plan: Plan, split: Split, static_args: Sequence[Any], snapshot: certify.Snapshot
) -> tuple[certify.Outcome, str | None]:
    """Run in parts from here on: a stock run, and how another one differs given the results of what does not repeat."""
    plan.follow(split)
    split.tape.start()
    _, reference = certify.run_reference(plan, static_args, snapshot)
    snapshot.restore()
    return reference, _unstable(plan, reference, static_args, snapshot)


def _unstable(
    plan: Plan, reference: certify.Outcome, static_args: Sequence[Any], snapshot: certify.Snapshot
) -> str | None:
    """How another stock run differs from one: a class is not blamed for that."""
    _, again = certify.run_reference(plan, static_args, snapshot)
    snapshot.restore()
    return reference.differs_from(again)


def _not_reproducible(plan: Plan, unstable: str, static_args: Sequence[Any], snapshot: certify.Snapshot) -> Miss:
    culprit = find_culprit(lambda: plan.reference(*static_args), snapshot.restore)
    what = f"{unstable} differs between two eager runs on the same input; {culprit or 'no operator was caught'}"
    return Miss("not_reproducible", f"{plan.label}: {what}", lasting=True)


def _record_certified(
    plan: Plan,
    static_args: list[Any],
    reference: certify.Outcome,
    trials: Trials,
    snapshot: certify.Snapshot,
    device: torch.device,
    ledger: Ledger,
) -> Recording | Miss | Split | None:
    """The first way to run the class whose bytes are the stock computation's; the others are noted and closed.

    Where eager turns out not to repeat on one of the inputs, how to run the class in parts.
    """
    everything = [*static_args, *destinations(plan)]
    generators = snapshot.generators.of(device)
    for way in plan.ways:
        plan.host, plan.kept = way.host, way.kept
        if way.host is not None:
            refused = way.host.bind(static_args, plan.label)
            snapshot.restore()
            if refused is not None:
                return refused
        kept = way.kept.residents if way.kept is not None else ()
        unkept = way.kept.bind(static_args) if way.kept is not None else None
        if unkept is not None:
            _dropped(plan, way, unkept, ledger)
            continue
        constants = [*(static_args[i] for i in plan.fixed if i not in plan.written), *kept]
        edited = EditContext(constants, device, way.cleared)
        try:
            run: Run = functools.partial(way.run, *everything)
            recording = record(run, device, generators, way.edits, edited, way.breaks)
        except EditFailed as error:
            snapshot.restore()
            _dropped(plan, way, str(error), ledger)
            continue
        if edited.refreshes:
            recording = RefreshedRecording(recording, edited.refreshes)
        if way.host is not None:
            recording = HostedRecording(recording, way.host)
        try:
            snapshot.restore()
            outcome = certify.run_recording(plan, static_args, recording, snapshot)
            snapshot.restore()
            if isinstance(outcome, Miss):
                problem: str | None = outcome.detail
            else:
                wrong = outcome.differs_from(reference)
                unstable = _unstable(plan, reference, static_args, snapshot) if wrong is not None else None
                wrong = wrong or trials.differs(recording)
                problem = f"{wrong} differs from eager in {plan.label}" if wrong is not None else None
                if unstable is not None or trials.unrepeated:
                    split = trials.split(None if unstable is not None else trials.unrepeated[0])
                    if split is not None or unstable is not None:
                        recording.close()
                        return split or _not_reproducible(plan, unstable or "", static_args, snapshot)
        except BaseException:
            recording.close()
            raise
        if problem is None:
            plan.notes += [*way.notes, *edited.notes]
            plan.admit(way)
            return recording
        recording.close()
        _dropped(plan, way, problem, ledger)
    return None


def _dropped(plan: Plan, way: Way, problem: str, ledger: Ledger) -> None:
    plan.notes.append(f"{way.name} dropped: {problem}")
    log.warning("%s: %s", ledger.name, plan.notes[-1])


def _is_unusual(tensor: torch.Tensor) -> bool:
    """Sparse, quantized, lazily conjugated or negated, or expanded: no copy can fill a static buffer of the same
    geometry."""
    return not is_plain(tensor) or is_lazy(tensor) or is_expanded(tensor)


def _addresses(args: Sequence[Any], fixed: list[int]) -> list[int | None]:
    wanted = set(fixed)
    return [arg.data_ptr() if i in wanted else None for i, arg in enumerate(args)]
