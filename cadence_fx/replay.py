"""ExactShapeReplay: one captured class per exact signature, anything else eager (paper section 3.3).

The engine names no model, decoder or operator. It keys a call on its full signature, checks what must not have moved
by pointer, makes the carries hold the incoming states, copies the other tensors into static buffers, launches, and
hands out results that are safe to keep. Every clause fails closed: a call that is not proved runs eager and is
counted with its reason.

A class is admitted only after its certificate (`certify`). What is captured, and how, comes from a `Planner`: a plain
callable (`PlainPlanner`) or a graph of `torch.compile` (`graph.GraphPlanner`).
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cadence_fx import certify
from cadence_fx._torch import copy_all, pointers_equal, tree_flatten, tree_unflatten
from cadence_fx.bytesops import bytes_equal
from cadence_fx.errors import CadenceError
from cadence_fx.ledger import Ledger, log
from cadence_fx.outputs import OutputRule, derive_rules, hand_out
from cadence_fx.plan import Miss, Plan, Planner, destinations
from cadence_fx.recorder import Recording, record
from cadence_fx.signature import ALIGNMENT, Unkeyable, call_key

# Invalidations by one argument after which a table stops capturing: it is unlikely to be the last.
_RESTLESS = 3


@dataclasses.dataclass(slots=True)
class ReplayClass:
    """One signature with its recording.

    Attributes:
        buffers: static tensors of the staged arguments, in the order of `plan.staged`.
        pointers: addresses of the fixed arguments, by argument index; None for the others.
        copy_back: staged arguments that the code writes: their buffers are copied back after a launch.
        guarded: something is written, so each call checks that no two arguments share memory.
    """

    plan: Plan
    recording: Recording
    rules: list[OutputRule]
    buffers: list[torch.Tensor]
    pointers: list[int | None]
    capture_seconds: float
    staging_bytes: int
    copy_back: list[tuple[int, torch.Tensor]]
    guarded: bool
    replays: int = 0


class ReplayTable:
    """The table of classes of one callable with flat arguments: admission, capture, launch, miss.

    Args:
        planner: builds classes and runs eager.
        roles: indices of the (region, staged, scalar, fixed) arguments.
        names: what the user calls each argument.
        device: where the callable runs.
        ledger: where everything is counted.
        max_classes: most classes this table will capture.
        lock: serialises calls (one for all tables that share carries).
    """

    def __init__(
        self,
        planner: Planner,
        roles: tuple[list[int], list[int], list[int], list[int]],
        names: Sequence[str],
        device: torch.device,
        ledger: Ledger,
        max_classes: int,
        lock: Any,
    ) -> None:
        self.planner = planner
        self.names = names
        self.regions, self.staged, self.scalars, self.fixed = roles
        self.device = device
        self.ledger = ledger
        self.max_classes = max_classes
        self.classes: dict[tuple[Any, ...], ReplayClass] = {}
        self.refused: dict[tuple[Any, ...], Miss] = {}
        self.sealed = False
        self.capturing = True
        self._lock = lock
        self._moves: dict[int, int] = {}
        self._tensors = sorted([*self.regions, *self.staged, *self.fixed])

    # -- the hot path -------------------------------------------------------------------------------------------------

    def __call__(self, args: Sequence[Any]) -> Any:
        start = time.perf_counter_ns()
        with self._lock:
            result = self._call(args)
        self.ledger.latencies_us.append((time.perf_counter_ns() - start) / 1e3)
        return result

    def _call(self, args: Sequence[Any]) -> Any:
        try:
            key = call_key(args, self.regions, self.staged, self.scalars, self.device.type)
        except Unkeyable as error:
            return self._miss(args, Miss("unkeyable", str(error)))
        entry = self.classes.get(key)
        if entry is None or entry.recording.closed:
            answer = self._consider(key, args)
            if isinstance(answer, Miss):
                return self._miss(args, answer)
            entry = answer
        elif not pointers_equal(args, entry.pointers, entry.plan.fixed):
            return self._moved(key, entry, args)
        if entry.guarded:
            overlap = self._overlap(entry.plan, args)
            if overlap is not None:
                return self._miss(args, overlap)
        if torch.is_grad_enabled() and self._needs_grad(args):
            return self._miss(
                args,
                Miss(
                    "requires_grad", "an input requires grad and grad mode is on; serve under no_grad or inference_mode"
                ),
            )
        plan = entry.plan
        for use in plan.regions:
            use.carry.enter(args[use.index], use.extent, in_place=use.output is None)
            if use.returned:
                use.carry.release(args[use.index])
        copy_all(entry.buffers, [args[i] for i in plan.staged])
        raw = entry.recording.launch()
        for i, buffer in entry.copy_back:
            args[i].copy_(buffer)
        entry.replays += 1
        self.ledger.replays += 1
        return hand_out(entry.rules, raw, args, entry.recording.static_outputs)

    # -- everything else ----------------------------------------------------------------------------------------------

    def _miss(self, args: Sequence[Any], miss: Miss) -> Any:
        self.ledger.miss(miss.reason, miss.detail)
        return self.planner.run_eager(args)

    def _needs_grad(self, args: Sequence[Any]) -> bool:
        return any(args[i].requires_grad for i in self._tensors)

    def _moved(self, key: tuple[Any, ...], entry: ReplayClass, args: Sequence[Any]) -> Any:
        """A tensor bound by pointer is elsewhere now: drop the class and serve this call eager.

        The next call captures anew, unless the tensor keeps moving: then it is state that nobody declared.
        """
        moved = next(i for i in entry.plan.fixed if args[i].data_ptr() != entry.pointers[i])
        name = self.names[moved]
        self._moves[moved] = self._moves.get(moved, 0) + 1
        self.ledger.invalidate("address", f"{name} moved")
        self.drop(key)
        return self._miss(args, Miss("address", f"{name} is not where it was captured"))

    def _restless(self) -> Miss | None:
        for i, moves in self._moves.items():
            if moves >= _RESTLESS:
                return Miss(
                    "unstable_address", f"{self.names[i]} is a new tensor on every call; declare it as a Region"
                )
        return None

    def drop(self, key: tuple[Any, ...]) -> None:
        """Forget one class and what it holds."""
        self.classes.pop(key).recording.close()

    def clear(self) -> None:
        """Forget every class."""
        for key in list(self.classes):
            self.drop(key)
        self.refused.clear()

    def _consider(self, key: tuple[Any, ...], args: Sequence[Any]) -> ReplayClass | Miss:
        """Capture a class for a signature that has none, or say why not."""
        refused = self.refused.get(key)
        if refused is not None:
            return refused
        if torch.is_grad_enabled() and self._needs_grad(args):
            return Miss(
                "requires_grad", "an input requires grad and grad mode is on; serve under no_grad or inference_mode"
            )
        if not self.capturing:
            return Miss("watched")
        if self.sealed:
            unknown = self.planner.unknown(args)
            if unknown is not None:
                return unknown
        restless = self._restless()
        if restless is not None:
            return restless
        plan = self.planner.plan(args)
        if isinstance(plan, Miss):
            return self._refuse(key, plan) if plan.lasting else plan
        if len(self.classes) >= self.max_classes:
            return Miss(
                "too_many_classes",
                f"the table holds its limit of {self.max_classes} classes; raise Contract.max_classes to allow more",
            )
        unfit = self._unfit(plan, args)
        if unfit is not None:
            return unfit
        twin: ReplayClass | None = self.planner.twin(plan, args, key)
        if twin is not None:
            self.classes[key] = twin
            return twin
        try:
            entry = self._capture(plan, args)
        except CadenceError:
            raise
        except Exception as error:  # a failed capture is a refusal of this class alone, whatever went wrong in it
            log.exception("%s: capture of %s failed", self.ledger.name, plan.label)
            entry = Miss(
                "capture_failed",
                f"{plan.label}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            )
        if isinstance(entry, Miss):
            return self._refuse(key, entry)
        self.classes[key] = entry
        self.planner.admitted(plan, key, entry)
        self.ledger.captures += 1
        self.ledger.late_captures += self.sealed
        self.ledger.capture_seconds += entry.capture_seconds
        if self.sealed:
            log.warning("%s: class %s captured after the seal", self.ledger.name, plan.label)
        return entry

    def _refuse(self, key: tuple[Any, ...], miss: Miss) -> Miss:
        self.ledger.refuse(miss.reason, miss.detail)
        self.refused[key] = miss
        return miss

    def _unfit(self, plan: Plan, args: Sequence[Any]) -> Miss | None:
        for i in plan.staged:
            if args[i].data_ptr() % ALIGNMENT:
                return Miss("alignment", f"{self.names[i]} does not start at a multiple of {ALIGNMENT} bytes")
            if _is_unusual(args[i]):
                return Miss("layout", f"{self.names[i]} is not a plain strided tensor")
        for use in plan.regions:
            if use.output is None and not use.carry.may_point_here(args[use.index]):
                return Miss(
                    "shared_state", f"{use.carry.name} is written in place and shares its memory with another tensor"
                )
        return self._overlap(plan, args)

    def _overlap(self, plan: Plan, args: Sequence[Any]) -> Miss | None:
        """Copying an argument severs what it shares with another; that is seen only when one of the two is written."""
        written = {*plan.mutated, *(use.index for use in plan.regions if use.output is None)}
        if not written:
            return None
        homes: dict[int, list[int]] = {}
        for i in self._tensors:
            if args[i].numel():
                homes.setdefault(args[i].untyped_storage().data_ptr(), []).append(i)
        fixed = set(plan.fixed)
        for sharers in homes.values():
            if len(sharers) > 1 and written & set(sharers) and not fixed >= set(sharers):
                return Miss(
                    "overlap", f"{' and '.join(self.names[i] for i in sharers)} share memory and one is written"
                )
        return None

    def _capture(self, plan: Plan, args: Sequence[Any]) -> ReplayClass | Miss:
        start = time.perf_counter()
        for use in plan.regions:
            use.carry.enter(args[use.index], use.extent, in_place=use.output is None)
        static_args = list(args)
        for i in plan.staged:
            static_args[i] = _static_copy(args[i])
        for use in plan.regions:
            static_args[use.index] = use.carry.view(use.extent)
        everything = [*static_args, *destinations(plan)]

        snapshot = certify.Snapshot(plan, args, static_args, self.device)
        try:
            raw, reference = certify.run_reference(plan, static_args)
            rules = derive_rules(plan, static_args, raw)
            del raw
            drew = snapshot.generators_moved()
            written = [i for i in plan.staged if i not in plan.mutated and not bytes_equal(static_args[i], args[i])]
            snapshot.restore()
            if drew:
                return Miss("draws_random", f"{plan.label}: the computation draws random numbers")
            if written:
                plan.mutated.extend(written)
                _, reference = certify.run_reference(plan, static_args)
                snapshot.restore()
            _, again = certify.run_reference(plan, static_args)
            snapshot.restore()
            unstable = reference.differs_from(again)
            if unstable is not None:
                return Miss(
                    "not_reproducible", f"{plan.label}: {unstable} differs between two eager runs on the same input"
                )
            recording = self._record_certified(plan, static_args, everything, reference, snapshot)
        finally:
            snapshot.restore()
        if recording is None:
            return Miss("certificate", "; ".join(plan.notes) or plan.label)
        staged = set(plan.staged)
        return ReplayClass(
            plan=plan,
            recording=recording,
            rules=rules,
            buffers=[static_args[i] for i in plan.staged],
            pointers=_addresses(args, plan.fixed),
            capture_seconds=time.perf_counter() - start,
            staging_bytes=plan.predicted_bytes(args),
            copy_back=[(i, static_args[i]) for i in plan.mutated if i in staged],
            guarded=bool(plan.mutated) or any(use.output is None for use in plan.regions),
        )

    def _record_certified(
        self,
        plan: Plan,
        static_args: list[Any],
        everything: list[Any],
        reference: certify.Outcome,
        snapshot: certify.Snapshot,
    ) -> Recording | None:
        """The first way to run the class whose bytes are the stock computation's; the others are noted and closed."""
        for name, run in plan.runs:
            recording = record(lambda run=run: run(*everything), self.device)  # type: ignore[misc]
            snapshot.restore()
            outcome = certify.run_recording(plan, static_args, recording)
            snapshot.restore()
            wrong = outcome.differs_from(reference)
            if wrong is None:
                plan.notes.append(f"admitted: {name}")
                return recording
            recording.close()
            plan.notes.append(f"{name} dropped: {wrong} differs from eager in {plan.label}")
            log.warning("%s: %s", self.ledger.name, plan.notes[-1])
        return None


def _is_unusual(tensor: torch.Tensor) -> bool:
    """Sparse, lazily conjugated or negated, or expanded: no copy can fill a static buffer of the same geometry."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return True
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _addresses(args: Sequence[Any], fixed: list[int]) -> list[int | None]:
    wanted = set(fixed)
    return [arg.data_ptr() if i in wanted else None for i, arg in enumerate(args)]


def _static_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A static buffer of the same geometry, with the same contents."""
    buffer = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    buffer.copy_(tensor)
    return buffer


class PlainPlanner:
    """Classes of a plain callable: no graph, no regions; what the callable does is recorded as it runs."""

    def __init__(self, fn: Callable[..., Sequence[Any]], fixed: list[int], staged: list[int], name: str) -> None:
        self._fn = fn
        self._fixed = fixed
        self._staged = staged
        self._name = name

    def plan(self, args: Sequence[Any]) -> Plan | Miss:
        shapes = ", ".join(str(list(args[i].shape)) for i in self._staged)
        # Nothing is known of what the callable writes: every aliased tensor counts as written.
        return Plan(
            [("as written", self._fn)],
            self._fn,
            f"{self._name}({shapes})",
            self._fixed,
            self._staged,
            mutated=list(self._fixed),
        )

    def unknown(self, args: Sequence[Any]) -> Miss | None:
        return Miss("sealed", f"{self._name}: a signature that was not captured before the seal")

    def twin(self, plan: Plan, args: Sequence[Any], key: Any) -> None:
        return None

    def admitted(self, plan: Plan, key: Any, entry: ReplayClass) -> None:
        pass

    def run_eager(self, args: Sequence[Any]) -> Any:
        return self._fn(*args)


class ExactShapeReplay:
    """Wrap a plain callable so that each exact signature replays one captured graph.

    For code that Dynamo cannot trace, and for measuring; `torch.compile(m, backend="cadence")` uses the same tables.

    Args:
        fn: any callable of tensors, scalars and (nested) lists, tuples and dicts of them. On a GPU it must be
        capturable:
            no host reads, no allocation on other streams.
        aliased: the tensors among the arguments that are bound by pointer: never copied, and `fn` may write them. A
        call
            that brings another tensor in their place runs eager and drops the class.
        name: for messages and reports.
        max_classes: most signatures captured; further ones run eager, counted.

    Outputs are safe to keep, except views of aliased arguments, which are views of the caller's own memory as in eager.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        aliased: Sequence[torch.Tensor] = (),
        name: str | None = None,
        max_classes: int = 64,
    ) -> None:
        self.fn = fn
        self.name: str = name or str(getattr(fn, "__name__", type(fn).__name__))
        self.ledger = Ledger(self.name)
        self._aliased = {id(t): t for t in aliased}
        self._max_classes = max_classes
        self._tables: dict[Any, tuple[ReplayTable, list[Any]]] = {}
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        found = self._tables.get(spec)
        if found is None:
            found = self._tables[spec] = self._table(leaves, spec)
        table, out_spec = found
        flat = table(leaves)
        return tree_unflatten(flat, out_spec[0])

    def _table(self, leaves: Sequence[Any], spec: Any) -> tuple[ReplayTable, list[Any]]:
        out_spec: list[Any] = [None]

        def flat_fn(*flat: Any) -> list[Any]:
            args, kwargs = tree_unflatten(list(flat[: len(leaves)]), spec)
            outputs, out_spec[0] = tree_flatten(self.fn(*args, **kwargs))
            return outputs

        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        fixed = [i for i in tensors if id(leaves[i]) in self._aliased]
        staged = [i for i in tensors if i not in fixed]
        scalars = [i for i in range(len(leaves)) if i not in set(tensors)]
        device = next((leaves[i].device for i in tensors), torch.device("cpu"))
        planner = PlainPlanner(flat_fn, fixed, staged, self.name)
        names = [f"leaf {i}" for i in range(len(leaves))]
        return ReplayTable(
            planner, ([], staged, scalars, fixed), names, device, self.ledger, self._max_classes, self._lock
        ), out_spec

    @property
    def classes(self) -> list[ReplayClass]:
        """The captured classes."""
        return [c for table, _ in self._tables.values() for c in table.classes.values()]

    def seal(self) -> None:
        """Count every later capture as a late one."""
        for table, _ in self._tables.values():
            table.sealed = True

    def close(self) -> None:
        """Drop every class."""
        for table, _ in self._tables.values():
            table.clear()
