"""Refresh: compute and check anew what relies on weights, after a write on one that PyTorch has not counted."""

from __future__ import annotations

from typing import Any

from cadence_fx.lookup import program_of


def refresh(compiled: Any) -> None:
    """Before its next launch, each class computes what it keeps and checks what it relies on, from weights as they are.

    Needed after writes that PyTorch does not count: through `.data`, from numpy, by a CUDA graph of somebody else's,
    from another process. Every other write is seen without it.

    Raises:
        NotCompiled: `compiled` was not compiled with this backend.
    """
    program = program_of(compiled, "refresh")
    with program.gate.lock:
        for _, table in program.graphs:
            for entry in table.classes.values():
                for part in (entry.plan.kept, entry.plan.host):
                    if part is not None:
                        part.forget()
                entry.recording.forget()
