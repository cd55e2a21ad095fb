"""The pinned protocol: PyTorch's switches for repeatable results, set for a stretch of code and put back.

Under it eager PyTorch repeats its own bytes, so that a class can be certified at all where stock settings would have
it refused as `not_reproducible`. The switches are process-wide: they hold for all threads while any thread is inside.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from cadence_fx._torch_switches import Determinism, inductor_deterministic
from cadence_fx.errors import SetTooLate
from cadence_fx.locks import new_lock

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
# The two settings with which cuBLAS repeats its results; the first one gives it enough memory to be fast.
REPEATABLE = (":4096:8", ":16:8")

_lock = new_lock()
_inside: list[_Entry] = []


class _Entry:
    """One stretch of code under the protocol, and what it has to put back."""

    def __init__(self, switches: Determinism, variable: str | None) -> None:
        self.switches = switches
        self.variable = variable


@contextlib.contextmanager
def deterministic(*, warn_only: bool = False) -> Iterator[None]:
    """Run the code inside under the pinned protocol; also a decorator.

    Sets `torch.use_deterministic_algorithms(True)` with uninitialised memory filled, cuDNN and oneDNN deterministic,
    cuDNN benchmark off, and `CUBLAS_WORKSPACE_CONFIG=:4096:8` unless it is `:16:8`. On exit, also through an
    exception, everything is as it was, but for the variable once CUDA has been initialised inside: it stays, because it
    tells what cuBLAS uses from then on. Threads whose stretches overlap share the protocol until the last one leaves.

    Args:
        warn_only: an operator that has no deterministic algorithm warns and runs; otherwise it raises. Whether such an
            operator repeats its bytes is then found out by each class's certificate.

    Raises:
        SetTooLate: CUDA is initialised, and the variable was not set.
    """
    with _lock:
        entry = _enter(warn_only)
    try:
        with inductor_deterministic():
            yield
    finally:
        with _lock:
            _leave(entry)


def _enter(warn_only: bool) -> _Entry:
    variable = os.environ.get(VARIABLE)
    if variable not in REPEATABLE:
        if torch.cuda.is_initialized():
            raise SetTooLate(VARIABLE, REPEATABLE[0], variable)
        os.environ[VARIABLE] = REPEATABLE[0]
    before = Determinism.now()
    entry = _Entry(before, variable)
    _inside.append(entry)
    Determinism(
        algorithms=True,
        warn_only=warn_only,
        fill=True,
        cudnn=True,
        benchmark=False,
        onednn=before.onednn if before.onednn is None else True,
    ).apply()
    return entry


def _leave(entry: _Entry) -> None:
    at = _inside.index(entry)
    _inside.remove(entry)
    if at < len(_inside):  # another thread came later and is still inside: it puts back what this one found
        _inside[at].switches, _inside[at].variable = entry.switches, entry.variable
        return
    entry.switches.apply()
    if not torch.cuda.is_initialized():
        if entry.variable is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = entry.variable
