"""The effects of a class: what it does besides computing its results, found by running the stock computation once.

Three verdicts. *Pure*: it draws nothing. *Device-random*: it draws on its own device, from generators whose state the
recorder takes into every launch. *Refused*, by a named reason: what it does could not be done by a launch, or not be
undone by whoever tries it. The probe itself leaves nothing behind.

A graph tells most of this before it runs (`passes/verify_capturable`); a plain callable, and a graph with operators
that are not PyTorch's own, are watched.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from cadence_fx.bytesops import bytes_equal
from cadence_fx.certify import Outcome, Snapshot, run_reference
from cadence_fx.outputs import OutputRule, derive_rules, opaque, unusual
from cadence_fx.plan import NEEDS_GRAD, Miss, Plan
from cadence_fx.writes import FunctionWatcher, Stopped, WriteWatcher

PURE, DEVICE_RANDOM, REFUSED = "pure", "device-random", "refused"


@dataclasses.dataclass(frozen=True, slots=True)
class Effects:
    """The verdict on an admitted class, and the names of what it draws from."""

    verdict: str = PURE
    draws: tuple[str, ...] = ()


@dataclasses.dataclass(slots=True)
class Probed:
    """What one run of the stock computation has shown.

    Attributes:
        reference: its outcome.
        rules: how the user's outputs are made.
        effects: the verdict.
        copies: staged arguments that it has written, beyond those the plan knows of.
    """

    reference: Outcome
    rules: list[OutputRule]
    effects: Effects
    copies: list[int]


def probe(
    plan: Plan, static_args: Sequence[Any], args: Sequence[Any], snapshot: Snapshot, device: torch.device
) -> Probed | Miss:
    """Run the stock computation once, look at everything it has done, and undo it.

    Memory that is no argument and that it has written goes into `plan.beside` and into the snapshot.
    """
    unready = _unready(snapshot)
    if unready is not None:
        return Miss("initialises", f"{plan.label}: {unready} gets its shape in the first call")
    watched = [buffer for module in snapshot.modules for buffer in module.buffers(recurse=False)]
    before = [tensor.clone() for tensor in watched]
    watcher = WriteWatcher() if plan.draws is None else None
    try:
        try:
            with watcher or contextlib.nullcontext():
                raw, reference = run_reference(plan, static_args, snapshot)
        except (torch.OutOfMemoryError, Stopped):
            raise
        except Exception as error:  # the code itself refuses these arguments: eager will tell the user so
            return Miss("raised", f"{plan.label}: {type(error).__name__}")
        effects = _verdict(plan, snapshot, watcher, device)
        if isinstance(effects, Miss):
            return effects
        if any(
            isinstance(out, torch.Tensor) and out.requires_grad for out in raw
        ):  # of something that nobody has found
            return NEEDS_GRAD
        unmade = opaque(raw[:-1]) if plan.owner is not None else None  # its last one is the structure of the others
        if unmade is not None:
            return Miss("opaque_output", f"{plan.label}: {unmade}", lasting=True)
        strange = unusual(static_args, raw)
        if strange is not None:
            return Miss("aliased_output", f"{plan.label}: {strange}", lasting=True)
        rules = derive_rules(plan, static_args, raw)
        copies = _written_copies(plan, watcher, static_args, args)
        plan.beside = _beside(watcher, static_args, watched, before)
    except Stopped as stop:
        return Miss("collective", f"{plan.label}: {stop} was about to run", lasting=True)
    finally:
        snapshot.restore()
        if watcher is not None:
            watcher.put_back(snapshot.generators)
            for tensor, saved in zip(watched, before, strict=True):
                tensor.copy_(saved)
    snapshot.include(plan.beside)
    return Probed(reference, rules, effects, copies)


def _unready(snapshot: Snapshot) -> str | None:
    """A parameter that takes its shape from the first call: what that call does to it could not be undone."""
    for module in snapshot.modules:
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if torch.nn.parameter.is_lazy(tensor):
                return f"{type(module).__name__}.{name}"
    return None


def _verdict(plan: Plan, snapshot: Snapshot, watcher: WriteWatcher | None, device: torch.device) -> Effects | Miss:
    """What the run that has just ended did, before any of it is undone."""
    changes = snapshot.python.changes() if snapshot.python is not None else []
    if changes:
        return Miss("initialises", f"{plan.label}: the call rebinds {', '.join(changes[:4])}")
    if plan.altered:
        what = f"the call changes {', '.join(plan.altered[:4])}, a container that is the caller's"
        return Miss("mutates_argument", f"{plan.label}: {what}", lasting=True)
    if watcher is not None:
        if any(not snapshot.generators.knows(generator) for generator, _ in watcher.generators):
            what = "it draws from a generator that is neither an argument nor an attribute"
            return Miss("hidden_generator", f"{plan.label}: {what}", lasting=True)
        # Also on the host: one run has told how results are made, and a plain callable may make them in another way.
        if watcher.reads is not None and (plan.owner is not None or device.type != "cpu"):
            return _reads(plan, watcher.reads)
    moved = snapshot.generators.moved()
    foreign = [source.name for source in moved if not source.is_of(device)]
    if foreign:
        return Miss(
            "host_random", f"{plan.label}: it runs on {device} and draws from {', '.join(foreign)}", lasting=True
        )
    names = tuple(source.name for source in moved)
    return Effects(DEVICE_RANDOM if names or plan.draws else PURE, names)


def _reads(plan: Plan, what: str) -> Miss:
    return Miss("host_read", f"{plan.label}: the host waits for the result of {what}", lasting=True)


def hands_over(plan: Plan, static_args: Sequence[Any], snapshot: Snapshot) -> Miss | None:
    """Whether the host gets at bytes without an operator. In a run of its own: code that is watched for functions takes
    other paths."""
    watcher = FunctionWatcher()
    try:
        with watcher:
            plan.reference(*static_args)
    finally:
        snapshot.restore()
    return _reads(plan, watcher.reads) if watcher.reads is not None else None


def _beside(
    watcher: WriteWatcher | None,
    static_args: Sequence[Any],
    watched: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Memory that is no argument and that the run has written."""
    if watcher is None:
        return []
    known = {arg.untyped_storage().data_ptr() for arg in static_args if isinstance(arg, torch.Tensor)}
    found = [memory for memory in watcher.memories() if memory.data_ptr() not in known]
    return found + [tensor for tensor, saved in zip(watched, before, strict=True) if not bytes_equal(tensor, saved)]


def _written_copies(
    plan: Plan, watcher: WriteWatcher | None, static_args: Sequence[Any], args: Sequence[Any]
) -> list[int]:
    """Staged arguments that the run has written, beyond those the plan knows of."""
    seen = watcher.written if watcher is not None else set()
    return [
        i
        for i in plan.staged
        if i not in plan.mutated
        and (static_args[i].untyped_storage().data_ptr() in seen or not bytes_equal(static_args[i], args[i]))
    ]
