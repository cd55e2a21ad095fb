"""Refresh: compute anew what is kept, after a write on a weight that PyTorch has not counted."""

from __future__ import annotations

from typing import Any

from cadence_fx.lookup import program_of


def refresh(compiled: Any) -> None:
    """Before its next launch, each class computes the values that it keeps from the weights as they are then.

    Needed after writes that PyTorch does not count: through `.data`, from numpy, by a CUDA graph of somebody else's,
    from another process. Every other write is seen without it.

    Raises:
        NotCompiled: `compiled` was not compiled with this backend.
    """
    program = program_of(compiled, "refresh")
    with program.lock:
        for user in program.keep.users:
            user.forget()
        for _, table in program.graphs:
            for entry in table.classes.values():
                entry.recording.forget()
