"""Warm-up: capture the whole catalog before traffic, in the caller's grad, inference and autocast context, then seal.

The declared stream is walked call by call through the compiled callable itself, so Dynamo compiles every graph the
stream will need and its guards are warm too. Each catalog entry is called twice: once eager, to see which output is
which state, then to capture. Afterwards what the callable reaches (attributes, the bytes of tensors, generators) is
exactly as before.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Iterator
from typing import Any

from cadence_fx._torch import backend_error, original_of, patient_tracing
from cadence_fx._torch_aside import broken_at
from cadence_fx._torch_propagation import twice_a_kind
from cadence_fx._units import counted
from cadence_fx.catalog import CatalogEntry
from cadence_fx.errors import ContractError, WrongModule
from cadence_fx.example import ExampleCall, Variant
from cadence_fx.locks import new_lock
from cadence_fx.lookup import program_of
from cadence_fx.prediction import predict
from cadence_fx.program import Program
from cadence_fx.report import Report, report
from cadence_fx.switch import is_off
from cadence_fx.untouched import Untouched

_QUIET_SECONDS = 2.0
# The module may be another one after the declared stream has been walked once (tables built, counters on their way):
# the calls of later turns meet it so.
_ROUNDS = 2
# Following code is not safe in several threads at once, whichever code they follow: PyTorch's tracers are process-wide.
_one_at_a_time = new_lock()


def warm_up(compiled: Any, *args: Any, progress: bool | None = None, **kwargs: Any) -> Report:
    """Capture every class of the declared stream, then seal. Under the kill switch (`switch`) nothing is done.

    Warm-ups of several threads take turns.

    Args:
        compiled: what `torch.compile(..., backend="cadence")` returned.
        *args, **kwargs: of one first call of a turn: real tensors, states at their starting extents. They are not
            changed.
        progress: a line to stderr for each class once warm-up has taken two seconds; by default only on a terminal.

    Returns:
        The report of the program.

    Raises:
        ContractError: the declaration does not fit the callable, its module or these arguments.
        CatalogMismatch: entries of the catalog that no graph serves.
        WeightsWritten: the code writes a parameter that is too large to be put back.
        CatalogTooWide, NotCompiled.
    """
    program = program_of(compiled, "warm_up")
    if program.contract is None:
        raise ContractError(
            "warm_up() captures a contract's catalog, and no contract is declared; pass options={'contract': ...} to "
            "torch.compile, or use cadence_fx.declare",
            field="contract",
        )
    original = original_of(compiled)
    call = ExampleCall(program, compiled, original, args, kwargs)
    call.check()
    if is_off():  # whoever has thrown the kill switch gets eager calls, and no error from what would have sped them up
        return report(compiled)
    with _one_at_a_time:
        program.prediction = predict(program.contract, call.example, call.module)
        try:
            _capture(program, original, call, progress)
        except WrongModule as error:
            if error.broken is None or (where := broken_at(compiled, args, kwargs)) is None:
                raise
            broken = error.broken[0], where
            raise WrongModule(error.contract, error.expected, error.found, broken=broken) from error
    return report(compiled)


def _capture(program: Program, original: Any, call: ExampleCall, progress: bool | None) -> None:
    entries = program.catalog.entries
    tell = _Progress(len(entries) + 1, program.name, progress)
    program.unseal()
    with program.ledger.timed("other"), Untouched(original, program) as module, _tracing():
        try:
            for round_ in range(_ROUNDS):
                start = module.attributes()
                tell.expect(len(entries) if round_ else 0)
                # Watching a call can show a layout of a state in which an entry has not been captured yet.
                done: set[tuple[CatalogEntry, Variant]] = set()
                while new := [(e, v) for e in entries for v in call.variants(e) if (e, v) not in done]:
                    entry, variant = new[0]
                    done.add(new[0])
                    tell.step(str(entry))
                    before = module.attributes()
                    call.watch(entry, variant)
                    module.put_back(before)  # the call that builds a table is captured too, not only those after it
                    call.capture(entry, variant)
                if not module.changed(start):
                    break
            tell.step("as called by the user")
            call.as_given()
        except Exception as error:
            inner = backend_error(error)
            if inner is error:
                raise
            raise inner from error
    program.seal()
    tell.done(program)


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    """What makes compiling many graphs of one model possible, and cheaper."""
    with patient_tracing(), twice_a_kind(), _patient_collector():
        yield


@contextlib.contextmanager
def _patient_collector() -> Iterator[None]:
    """Garbage is looked for less often. Tracing makes millions of objects that stay, and each full search walks all."""
    before = gc.get_threshold()
    if before[0]:  # 0: somebody has turned the collector off
        gc.set_threshold(max(before[0], 100_000), max(before[1], 20), *before[2:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Progress:
    """A line per class on stderr, once warm-up has taken more than two seconds."""

    def __init__(self, total: int, name: str, wanted: bool | None) -> None:
        self._total, self._name, self._done = total, name, 0
        self._start = time.perf_counter()
        self._wanted = sys.stderr.isatty() if wanted is None else wanted

    def expect(self, more: int) -> None:
        self._total += more

    def step(self, what: str) -> None:
        self._done += 1
        elapsed = time.perf_counter() - self._start
        if self._wanted and elapsed > _QUIET_SECONDS:
            left = elapsed / max(1, self._done - 1) * (self._total - self._done + 1)
            print(
                f"{self._name}: {self._done}/{self._total}, {elapsed:.0f} s, about {left:.0f} s left: {what}",
                file=sys.stderr,
                flush=True,
            )

    def done(self, program: Program) -> None:
        elapsed = time.perf_counter() - self._start
        if self._wanted and elapsed > _QUIET_SECONDS:
            print(
                f"{self._name}: {counted(program.ledger.captures, 'class')} captured in {elapsed:.1f} s, sealed",
                file=sys.stderr,
                flush=True,
            )
