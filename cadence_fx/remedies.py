"""What to do about each counted reason, in a line, and which clause of admission it belongs to (paper section 3.3).

`docs/errors.md` has the same lines with what each reason means; `tests/test_docs.py` holds the two together.
"""

from __future__ import annotations

SIGNATURE, ADDRESS, EFFECT = "signature match", "address stability", "effect class"
BEFORE = "before any clause"

_REMEDIES = {
    BEFORE: {
        "disabled": "none needed",
        "reentrant": "wrap the outermost call only",
        "recompile_limit": "raise the limit before the first such call (after it, torch._dynamo.reset()); declare what "
        "changes from call to call",
        "dynamo_off": "switch it on; torch._dynamo.reset() and warm-up where Dynamo has given the code up",
    },
    SIGNATURE: {
        "no_contract": 'options={"contract": ...} or cadence.declare',
        "undeclared_size": "declare the size: an Input, a flush length; or cut chunks to the stride",
        "undeclared_extents": "begin the turn from its start state; correct start",
        "retention": "pass a clone()",
        "unprimed": "none needed for a first call; pass an empty or primed tensor to have it replayed",
        "unkeyable": "pass tensors, numbers, strings",
        "too_many_classes": "raise max_classes",
        "sealed": "warm up with such a call",
        "requires_grad": "serve under torch.no_grad() or torch.inference_mode()",
        "mode": "set the switches as in warm-up, or warm up again in this mode",
        "shape": "keep the size: one compiled callable serves one (contract.md); compile a second one for another",
        "stride": ".contiguous(), or give warm-up a call with that layout",
        "dtype": "convert it, or warm up with it",
        "device": "move it",
        "alignment": ".clone() slices of a recording",
        "layout": ".contiguous(), .resolve_conj(); as_strided without an offset, on dense tensors",
        "scalar": "warm up with that value",
    },
    ADDRESS: {
        "address": "edit weights in place (copy_); warm up after loading",
        "rebound": "nothing; frozen=True if it never happens and the look costs too much",
        "unstable_state": "pass it as an argument",
        "restless_value": "nothing; declare what changes with every call as a Region, or pass it as an argument",
        "kept_value": "the log has the exception",
        "unstable_address": "declare it as a Region",
        "overlap": "pass a copy",
        "shared_state": "give the state contiguous memory of its own",
        "held_state": "drop the view, or clone() it",
    },
    EFFECT: {
        "aliased_output": "return a copy, or a dense one",
        "opaque_output": "register the class, or return a tuple",
        "draws_random": ".eval(), or dropout as a layer of its own",
        "host_random": "draw on the device, or outside and pass a tensor",
        "hidden_generator": "make it once, and pass it or keep it on the module",
        "mutates_state": "keep it outside, or in a tensor that is written in place",
        "opaque_state": "keep it outside, or pass what it gives as an argument",
        "mutates_argument": "return what is new, or write into tensors in place",
        "host_read": "compute on the device (torch.where with three arguments), or move it outside",
        "host_copy": "convert first, or make the tensor on the device",
        "host_value": "keep the tensor on the device, or use a Python number",
        "host_state": "move the state to the device",
        "symbolic_size": "remove the operator whose output size depends on data",
        "opaque_call": "register it with torch.library",
        "collective": "keep it outside",
        "undeclared_write": "declare it as a Region without a result, or do not write it",
        "moves_memory": "bind the attribute anew (self.state = new), return what is new, or write it in place (copy_)",
        "not_reproducible": "with cadence.deterministic(): around warm-up and traffic (exactness.md)",
        "certificate": "report it: this is a defect of a rewrite or of a kernel under capture",
        "not_traceable": "keep such code out of the compiled callable; make numpy numbers on the module Python numbers",
        "data_dependent": "keep it outside",
        "raised": "none needed",
        "initialises": "none needed",
        "capture_failed": "read the log (debugging.md)",
        "out_of_memory": "a smaller window, fewer classes, or less else on the device",
    },
}


def clause_of(reason: str) -> str | None:
    """The clause of admission that a call with this reason has missed."""
    return next((clause for clause, reasons in _REMEDIES.items() if reason in reasons), None)


def remedy_for(reason: str) -> str | None:
    """What to do about a reason; None for one that there is nothing to say about."""
    return next((reasons[reason] for reasons in _REMEDIES.values() if reason in reasons), None)
