"""Tables of classes: key, admission, staging, launch, misses (paper section 3.3).

Every clause fails closed: a call that is not proved runs eager and is counted with its reason.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from cadence_fx._torch import copy_all, pointers_equal
from cadence_fx._units import counted
from cadence_fx.capture import ReplayClass, capture, overlap, unfit
from cadence_fx.errors import CadenceError
from cadence_fx.ledger import Ledger, log
from cadence_fx.locks import Gate
from cadence_fx.outputs import hand_out
from cadence_fx.parking import awake
from cadence_fx.plan import NEEDS_GRAD, WATCHED, Miss, Plan, Planner
from cadence_fx.recorder import give_back
from cadence_fx.signature import Unkeyable, call_key
from cadence_fx.switch import is_off
from cadence_fx.turns import turn_on

# Invalidations by one argument after which a table stops capturing: it is unlikely to be the last.
_RESTLESS = 3

_REENTRANT = Miss("reentrant", "the code calls its own replay, whose buffers hold the outer call's data")


class _Trying(threading.local):
    """Whether a class is being captured in this thread: calls that its code makes are stock, and nobody's traffic."""

    on = False


_trying = _Trying()


class ReplayTable:
    """The table of classes of one callable with flat arguments: admission, capture, launch, miss.

    Args:
        planner: builds classes and runs eager.
        roles: indices of the (region, staged, scalar, fixed) arguments.
        names: what the user calls each argument.
        device: where the callable runs.
        ledger: where everything is counted.
        max_classes: most classes this table will capture.
        gate: serialises calls (one for all tables that share carries or classes).
    """

    def __init__(
        self,
        planner: Planner,
        roles: tuple[list[int], list[int], list[int], list[int]],
        names: Sequence[str],
        device: torch.device,
        ledger: Ledger,
        max_classes: int,
        gate: Gate,
    ) -> None:
        self.planner = planner
        self.names = names
        self.regions, self.staged, self.scalars, self.fixed = roles
        self.device = device
        self.ledger = ledger
        self.max_classes = max_classes
        self.classes: dict[tuple[Any, ...], ReplayClass] = {}
        self.refused: dict[tuple[Any, ...], Miss] = {}
        self._begun: set[tuple[Any, ...]] = set()
        self.sealed = False
        self._gate, self._lock = gate, gate.lock
        self._turn = turn_on(device, gate.lock)
        self._moves: Counter[int] = Counter()
        self._rebindings: Counter[str] = Counter()
        self._tensors = sorted([*self.regions, *self.staged, *self.fixed])

    # -- the hot path -------------------------------------------------------------------------------------------------

    def __call__(self, args: Sequence[Any]) -> Any:
        start = time.perf_counter_ns()
        with self._turn, self._lock:
            result = self._call(args)
        self.ledger.latencies_us.append((time.perf_counter_ns() - start) / 1e3)
        return result

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """No other call of the same stream, or on the same device, is answered meanwhile."""
        with self._turn, self._lock:
            yield

    def _call(self, args: Sequence[Any]) -> Any:
        if is_off():
            return self._miss(args, Miss("disabled"))
        if self._gate.launching or _trying.on:
            return self._miss(args, _REENTRANT if self._gate.launching else WATCHED)
        try:
            key = self.key(args)
        except Unkeyable as error:
            return self._miss(args, Miss("unkeyable", str(error)))
        entry = self.classes.get(key)
        if entry is None or entry.recording.closed:
            answer = self._consider(key, args)
            if isinstance(answer, Miss):
                result = self._miss(args, answer)
                if answer.reason == "initialises":
                    self._consider(key, args)  # what the first call leaves behind is there now, for the next one
                return result
            entry = answer
        elif not pointers_equal(args, entry.pointers, entry.plan.fixed):
            return self._moved(entry, args)
        elif entry.reached is not None and (what := entry.reached.changed()) is not None:
            return self._rebound(what, args)
        if entry.written or entry.copy_back:
            shared = overlap(entry.plan, entry.written, args, self.names)
            if shared is not None:
                return self._miss(args, shared)
        if torch.is_grad_enabled() and (
            self.needs_grad(args) or (entry.reached is not None and entry.reached.needs_grad())
        ):
            return self._miss(args, NEEDS_GRAD)
        plan = entry.plan
        entering = [use for use in plan.regions if not use.carry.is_current(args[use.index])]
        for use in entering:
            problem = use.carry.make_room(args[use.index], in_place=use.output is None)
            if problem is not None:
                return self._miss(args, Miss(*problem))
        if plan.kept is not None and (changed := plan.kept.enter(args)) is not None:
            return self._unkept(key, changed, args)
        if plan.host is not None:
            changed = plan.host.enter(args)
            if changed is not None:
                return self._miss(args, changed)
        for use in entering:
            use.carry.enter(args[use.index], use.extent, in_place=use.output is None)
        for use in entry.returned:
            use.carry.release(args[use.index])
        copy_all(entry.buffers, [args[i] for i in plan.staged])
        is_graph = entry.recording.static_outputs
        raw = entry.recording.launch() if is_graph and not plan.eager else self._launch_operators(entry, args)
        if is_graph and (entry.touched or entry.beside):
            # PyTorch counts writes, others go by it, and a launch is not counted.
            increment_version([*(args[i] for i in entry.touched), *entry.beside])
        for i, buffer in entry.copy_back:
            args[i].copy_(buffer)
        entry.replays += 1
        self.ledger.replays += 1
        if plan.eager:
            self.ledger.eager_operators["not_reproducible"] += len(plan.eager)
        return hand_out(entry.rules, raw, args, is_graph)

    def _launch_operators(self, entry: ReplayClass, args: Sequence[Any]) -> Sequence[Any]:
        """Launch what may call back, or raise halfway: then declared states that the code writes in place are as they
        were, and other arguments are as far as eager would have left them."""
        states = [use.carry.view(use.extent) for use in entry.plan.regions if use.output is None]
        saved = [state.clone() for state in states]
        self._gate.launching = True
        try:
            return entry.recording.launch()
        except BaseException as error:
            for state, before in zip(states, saved, strict=True):
                state.copy_(before)
            for i, buffer in entry.copy_back:
                args[i].copy_(buffer)
            self.ledger.miss("raised", f"{entry.plan.label}: {type(error).__name__}")
            raise
        finally:
            self._gate.launching = False

    # -- everything else ----------------------------------------------------------------------------------------------

    def key(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The signature of a call.

        Raises:
            Unkeyable: an argument that is neither a tensor nor a plain scalar.
        """
        key = call_key(args, self.regions, self.staged, self.scalars, self.device.type)
        return key + self.planner.key_part(args)

    def find(self, args: Sequence[Any]) -> ReplayClass | None:
        """The class of a call's signature, if there is one."""
        try:
            return self.classes.get(self.key(args))
        except Unkeyable:
            return None

    def _miss(self, args: Sequence[Any], miss: Miss) -> Any:
        if miss is not WATCHED:
            self.ledger.miss(miss.reason, miss.detail)
        return self.planner.run_eager(args)

    def needs_grad(self, args: Sequence[Any]) -> bool:
        """Whether any tensor argument requires grad."""
        return any(args[i].requires_grad for i in self._tensors)

    def _moved(self, entry: ReplayClass, args: Sequence[Any]) -> Any:
        """A tensor bound by pointer is elsewhere now: drop the classes that have the old one; this call runs eager.

        The next call captures anew, unless the tensor keeps moving: then it is state that nobody declared.
        """
        moved = next(i for i in entry.plan.fixed if args[i].data_ptr() != entry.pointers[i])
        name = self.names[moved]
        self._moves[moved] += 1
        here = (None, args[moved].data_ptr())  # None: a class that does not use it
        for key in [key for key, each in self.classes.items() if each.pointers[moved] not in here]:
            self.ledger.invalidate("address", f"{name} moved")
            self.drop(key)
        return self._miss(args, elsewhere(name))

    def _unkept(self, key: tuple[Any, ...], changed: Miss, args: Sequence[Any]) -> Any:
        """Values that a class keeps are not what they were; where they never will be for long, it is captured anew."""
        if changed.lasting:
            self.ledger.invalidate("restless_value", changed.detail)
            self.drop(key)
        return self._miss(args, changed)

    def _rebound(self, what: str, args: Sequence[Any]) -> Any:
        """A plain callable would find something else in its objects: like `_moved`."""
        self._rebindings[what] += 1
        for key in [key for key, each in self.classes.items() if each.reached is not None and each.reached.changed()]:
            self.ledger.invalidate("rebound", what)
            self.drop(key)
        return self._miss(args, Miss("rebound", what))

    def restless(self) -> Miss | None:
        """Why nothing is captured any more, where the same thing has moved too often."""
        for what, times in self._rebindings.items():
            if times >= _RESTLESS:
                return Miss("unstable_state", f"{what}, again and again: pass it as an argument")
        for i, moves in self._moves.items():
            if moves >= _RESTLESS:
                return Miss(
                    "unstable_address", f"{self.names[i]} is a new tensor on every call; declare it as a Region"
                )
        return None

    def full(self) -> Miss:
        """What a call is told for which there is no room."""
        limit = counted(self.max_classes, "class")
        what = f"the table holds its limit of {limit}; raise Contract.max_classes to allow more"
        return Miss("too_many_classes", what)

    def drop(self, key: tuple[Any, ...]) -> None:
        """Forget one class and what it holds."""
        self.classes.pop(key).recording.close()

    def clear(self) -> None:
        """Forget every class."""
        for key in list(self.classes):
            self.drop(key)
        self.refused.clear()
        self._begun.clear()

    def _consider(self, key: tuple[Any, ...], args: Sequence[Any]) -> ReplayClass | Miss:
        """Capture a class for a signature that has none, or say why not."""
        refused = self.refused.get(key)
        if refused is not None:
            return refused
        if torch.is_grad_enabled() and self.needs_grad(args):
            return NEEDS_GRAD
        if self.sealed:
            unknown = self.planner.unknown(args)
            if unknown is not None:
                return unknown
        restless = self.restless()
        if restless is not None:
            return restless
        with awake(self.planner.workspaces(args)) as block:
            entry = self._admit(key, args)
            if isinstance(entry, ReplayClass):
                block.keep(args[i] for i in entry.plan.fixed)
        return entry

    def _admit(self, key: tuple[Any, ...], args: Sequence[Any]) -> ReplayClass | Miss:
        """Plan and capture a class for a signature that may have one."""
        plan = self.planner.plan(args)
        key = self.key(args)  # planning has told what else it depends on
        if isinstance(plan, Miss):
            return self._refuse(key, plan) if plan.lasting else plan
        if len(self.classes) >= self.max_classes:
            return self.full()
        problem = unfit(plan, args, self.names, self.device)
        if problem is not None:
            return problem
        twin: ReplayClass | None = self.planner.twin(plan, args)
        if twin is not None:
            self.classes[key] = twin
            return twin
        entry = self._capture(key, plan, args)
        if isinstance(entry, Miss):
            return self._refuse(key, entry) if entry.lasting else entry
        self.classes[key] = entry
        self.planner.admitted(plan, args, entry)
        self.ledger.captures += 1
        self.ledger.late_captures += self.sealed
        self.ledger.capture_seconds += entry.capture_seconds
        entry.ready_seconds = self.ledger.spent()
        for what in plan.eager:
            self.ledger.run_inside("not_reproducible", what)
        if self.sealed:
            log.warning("%s: class %s captured after the seal", self.ledger.name, plan.label)
        return entry

    def _capture(self, key: tuple[Any, ...], plan: Plan, args: Sequence[Any]) -> ReplayClass | Miss:
        """Capture; whatever fails in it is a refusal of this class alone."""
        _trying.on = True
        try:
            with self.ledger.timed("capture"):
                entry = capture(plan, args, self.names, self.device, self.ledger)
        except CadenceError:
            raise
        except Exception as error:
            log.exception("%s: capture of %s failed", self.ledger.name, plan.label)
            entry = _failed(plan.label, error)
        finally:
            _trying.on = False
        if isinstance(entry, Miss) and entry.reason in ("capture_failed", "out_of_memory"):
            give_back(self.device)
        if isinstance(entry, Miss) and entry.reason == "initialises":
            if key in self._begun:
                return Miss("mutates_state", f"{entry.detail}, and so does the next one", lasting=True)
            self._begun.add(key)
        return entry

    def retry(self) -> None:
        """Classes that were refused for want of memory may be tried again."""
        self.refused = {key: miss for key, miss in self.refused.items() if miss.reason != "out_of_memory"}

    def _refuse(self, key: tuple[Any, ...], miss: Miss) -> Miss:
        self.ledger.refuse(miss.reason, miss.detail)
        self.refused[key] = miss
        return miss


def elsewhere(name: str) -> Miss:
    """What a call is told that brings another tensor in the place of one that is bound by pointer."""
    return Miss("address", f"{name} is not where it was captured")


def _failed(label: str, error: BaseException) -> Miss:
    """The refusal that a failed capture is. What ended a capture is often the cause of the error that ending it
    raises."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    first = next((each for each in chain if isinstance(each, torch.OutOfMemoryError)), None)
    if first is not None:
        return Miss("out_of_memory", f"{label}: {_line(first)}", lasting=True)
    return Miss("capture_failed", f"{label}: {type(chain[-1]).__name__}: {_line(chain[-1])}", lasting=True)


def _line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else ""
