"""Audit: the stock computation beside the rewritten one, on every call (paper section 3.6).

Every output, every state and every tensor the code writes is compared byte for byte; the first difference stops the
stream with the region, the axis, the range of indices and the number of the call.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cadence_fx.bytesops import bytes_equal, digest, first_difference
from cadence_fx.eager_breaks import Tape
from cadence_fx.errors import AuditMismatch
from cadence_fx.graph import GraphPlanner
from cadence_fx.lookup import program_of
from cadence_fx.parking import awake
from cadence_fx.program import Program
from cadence_fx.signature import is_plain
from cadence_fx.table import ReplayTable


@dataclasses.dataclass(slots=True)
class AuditLedger:
    """What an audit has compared.

    Attributes:
        calls: graph calls compared.
        tensors: tensors compared.
        hashes: SHA-256 of all outputs and states of each call, in call order.
    """

    calls: int = 0
    tensors: int = 0
    hashes: list[str] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def audit(compiled: Any) -> Iterator[AuditLedger]:
    """Run the stock computation beside every call inside the context and compare all bytes.

    Raises (from the audited call):
        AuditMismatch: at the first byte that differs.
        NotCompiled: `compiled` was not compiled with this backend.
    """
    program = program_of(compiled, "audit")
    ledger = AuditLedger()
    previous = program.auditor
    program.auditor = _Auditor(program, ledger)
    try:
        yield ledger
    finally:
        program.auditor = previous


class _Auditor:
    def __init__(self, program: Program, ledger: AuditLedger) -> None:
        self._program = program
        self._ledger = ledger

    def __call__(self, planner: GraphPlanner, table: ReplayTable, args: Sequence[Any]) -> list[Any]:
        with table.alone():
            entry = table.find(args)
            tape = entry.plan.tape if entry is not None else planner.tape
            if tape is None:
                return self._audited(planner, table, args, None)
            tape.start()  # what operators that do not repeat make in the stock computation, they make in the class
            planner.audited = tape
            try:
                found = self._audited(planner, table, args, tape)
                if (astray := tape.astray()) is not None:
                    call = self._ledger.calls
                    raise AuditMismatch(astray, call=call, axis=0, start=0, stop=0, expected=b"", actual=b"")
                return found
            finally:
                planner.audited = None
                tape.stop()

    def _audited(self, planner: GraphPlanner, table: ReplayTable, args: Sequence[Any], tape: Tape | None) -> list[Any]:
        with awake(planner.workspaces(args)):
            stock_args = _copies(planner.stock_args(args))
        generators = _generators()
        expected = planner.run_stock(stock_args, tape)
        after = _generators()
        _set_generators(generators)
        found = planner.finish(table(args), args)
        self._ledger.calls += 1
        self._program.audited_calls += 1
        states = {i: key[0] for key, i in planner.pairing.outputs.items() if i is not None}
        axes = {instance.region.name: instance.axis for instance in planner.binding.instances}
        for i, (right, mine) in enumerate(zip(expected, found, strict=True)):
            name = states.get(i)
            where = f"region {name}" if name is not None else f"output {i}"
            self._compare(where, axes.get(name or ""), right, mine)
            if name is None:
                self._compare_strides(where, right, mine)
        for entry in planner.binding.inputs:
            scratch = self._program.is_scratch(entry.origin)
            if isinstance(args[entry.index], torch.Tensor) and entry.role != "region" and not scratch:
                self._compare(f"argument {entry.accessor}", None, stock_args[entry.index], args[entry.index])
        in_place = [inst for inst in planner.binding.instances if planner.pairing.outputs.get(inst.key, 0) is None]
        for instance in in_place:
            self._compare(f"region {instance.name}", instance.axis, stock_args[instance.index], args[instance.index])
        for mine, right in zip(_generators(), after, strict=True):
            self._compare("generator", None, right, mine)
        self._ledger.hashes.append(digest(*(o for o in found if isinstance(o, torch.Tensor))))
        return found

    def _compare_strides(self, what: str, expected: Any, found: Any) -> None:
        """An output of the same bytes lies as eager's does; a state lies as its carry does."""
        if not isinstance(expected, torch.Tensor) or not (is_plain(expected) and is_plain(found)):
            return
        if expected.stride() != found.stride():
            as_text = [f"strides {t.stride()}".encode() for t in (expected, found)]
            call = self._ledger.calls
            raise AuditMismatch(what, call=call, axis=0, start=0, stop=0, expected=as_text[0], actual=as_text[1])

    def _compare(self, what: str, axis: int | None, expected: Any, found: Any) -> None:
        if not isinstance(expected, torch.Tensor):
            return
        self._ledger.tensors += 1
        call = self._ledger.calls
        if expected.shape != found.shape or expected.dtype != found.dtype:
            as_text = [f"{t.dtype} {tuple(t.shape)}".encode() for t in (expected, found)]
            raise AuditMismatch(what, call=call, axis=0, start=0, stop=0, expected=as_text[0], actual=as_text[1])
        if not (is_plain(expected) and is_plain(found)):
            if not bytes_equal(expected, found):
                as_text = [digest(t).encode() for t in (expected, found)]
                raise AuditMismatch(what, call=call, axis=0, start=0, stop=0, expected=as_text[0], actual=as_text[1])
            return
        different = first_difference(expected, found)
        if different is None:
            return
        index, ranges, _ = different
        if axis is None:
            axis = next((a for a, (low, high) in enumerate(ranges) if low != high), 0)
        low, high = ranges[axis] if ranges else (0, 0)
        raise AuditMismatch(
            what,
            call=call,
            axis=axis,
            start=low,
            stop=high + 1,
            expected=_bytes_at(expected, index),
            actual=_bytes_at(found, index),
        )


def _bytes_at(tensor: torch.Tensor, index: tuple[int, ...]) -> bytes:
    element = tensor[index].reshape(1).cpu().contiguous()
    return bytes(element.view(torch.uint8).tolist())


def _copies(args: Sequence[Any]) -> list[Any]:
    """Private copies that keep strides and the memory arguments share with each other."""
    homes: dict[int, torch.Tensor] = {}
    copies: list[Any] = []
    for arg in args:
        if not isinstance(arg, torch.Tensor):
            copies.append(arg)
            continue
        if not is_plain(arg):
            copies.append(arg.detach().clone())
            continue
        home = arg.untyped_storage().data_ptr()
        if home not in homes or arg.numel() == 0:
            flat = torch.empty(0, dtype=torch.uint8, device=arg.device).set_(arg.untyped_storage())  # type: ignore[call-overload]
            homes[home] = flat.clone()
        storage = homes[home].untyped_storage()
        twin = torch.empty(0, dtype=arg.dtype, device=arg.device)
        twin.set_(storage, arg.storage_offset(), arg.shape, arg.stride())  # type: ignore[call-overload]
        copies.append(twin)
    return copies


def _generators() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return states


def _set_generators(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for i, state in enumerate(states[1:]):
        torch.cuda.set_rng_state(state, i)
