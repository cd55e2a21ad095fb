"""Restore: begin a turn from states kept anywhere, without a second copy of them on the device."""

from __future__ import annotations

from typing import Any

import torch

from cadence_fx import paths
from cadence_fx.errors import ContractError, UnknownState
from cadence_fx.lookup import program_of
from cadence_fx.program import Program
from cadence_fx.turns import turn_on


def restore(compiled: Any, **states: torch.Tensor) -> dict[str, torch.Tensor]:
    """Write states into their carries and return the tensors to pass in the next call.

    Passing a state that is not the carry's own copies it in as well, so this changes no byte; it saves the memory of
    that second copy, and the source may be on another device (a primed turn kept on the host, say). Without a
    captured class to receive a state, it comes back as a copy on the device of the compiled callable's other states,
    or as it is.

    Args:
        compiled: what `torch.compile(..., backend="cadence")` returned, warmed up in the mode that is on now.
        **states: argument accessor -> tensor with the shape the argument takes.

    Raises:
        StaleState: a state that a call has consumed.
        ContractError: not a tensor.
        UnknownState: no region of the contract is passed as this argument.
        NotCompiled: `compiled` was not compiled with this backend.
    """
    program = program_of(compiled, "restore")
    declared = [r.argument for r in program.contract.regions if r.argument is not None] if program.contract else []
    restored = {}
    for accessor, state in states.items():
        if accessor not in declared:
            raise UnknownState(accessor, declared)
        if not isinstance(state, torch.Tensor):
            raise ContractError(f"expected a tensor for {accessor!r}, found {type(state).__name__}", field=accessor)
        restored[accessor] = _placed(program, accessor, state)
    return restored


def _placed(program: Program, accessor: str, state: torch.Tensor) -> torch.Tensor:
    path, mode = paths.parse(accessor), torch.is_inference_mode_enabled()
    for (_, where, _, _, _, inference), carry in program.carries.items():
        if where == path and inference == mode and carry.takes(state):
            with turn_on(carry.flat.device, program.gate.lock), program.gate.lock:
                loaded = carry.load(state)
            return loaded if loaded is not None else state.to(carry.flat.device, copy=True)
    return state
