"""What is known to go wrong with a module under capture: kinds of hazards, whether they stop it, and the remedies."""

from __future__ import annotations

import dataclasses

from cadence_fx.remedies import remedy_for

# Kind -> what to do about it. The first group keeps calls eager, the second costs time or is easily got wrong.
_STOPPING = {
    "host_read": remedy_for("host_read"),
    "data_dependent_shape": "compute on the full size and mask, or move it outside",
    "host_random": remedy_for("host_random"),
    "hidden_generator": remedy_for("hidden_generator"),
    "collective": remedy_for("collective"),
    "own_graph": "leave capturing to the backend: call the code without its own CUDA graphs",
    "undeclared_state": "declare it as a Region, or pass it as an argument and return it",
    "undeclared_write": remedy_for("undeclared_write"),
    "moves_memory": remedy_for("moves_memory"),
    "shared_state": remedy_for("shared_state"),
    "growing_cache": "keep it outside of the module, or in a tensor that is declared as a Region",
    "raises": "correct the call: nothing further was looked at",
}
_COSTING = {
    "host_constant": "make it on the device (device=x.device), or once, as a buffer (register_buffer)",
    "lazy_buffer": "register it in __init__: the first call changes the module",
    "lazy_table": "compute it in __init__: the first call does what no other one does",
    "counter": "keep it in a tensor that is written in place, or outside: Dynamo may compile anew for each value",
    "global_cache": "make it an attribute of the module, filled in __init__: copies and streams share it unseen",
    "aliased_state": "return a clone(): the next call overwrites the memory that the caller holds",
    "compiled_inside": "call the original: guards of another torch.compile stand in the way",
    "autocast_inside": "enter autocast around warm-up and traffic: the mode is part of the signature",
    "unsteady": "with cadence.deterministic(): where every byte must repeat; else it runs eager inside a replay",
    "vendor_graphs": "none needed: the backend captures the declared sizes exactly",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Hazard:
    """One hazard.

    Attributes:
        kind: a stable word.
        what: what was found, in words.
        line: `file:line` of the user's code; None where no line of it is to blame.
        stops: whether calls cannot be captured because of it.
        remedy: what to do about it.
    """

    kind: str
    what: str
    line: str | None
    stops: bool
    remedy: str


def hazard(kind: str, what: str, line: str | None = None, *, stops: bool | None = None) -> Hazard:
    """A hazard of a known kind.

    Args:
        stops: where it differs from what is usual for the kind.
    """
    usual = kind in _STOPPING
    remedy = _STOPPING.get(kind) or _COSTING.get(kind) or ""
    return Hazard(kind, what, line, usual if stops is None else stops, remedy)


KINDS = (*_STOPPING, *_COSTING)
