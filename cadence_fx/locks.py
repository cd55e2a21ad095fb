"""Locks that a forked child can take.

A fork copies locks as they are, and not the threads that hold them: a child that waits for one waits for ever.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def new_lock() -> Any:
    """A re-entrant lock that is free in a forked child, whoever held it in the parent."""
    lock: Any = threading.RLock()
    _locks.add(lock)
    return lock


class Gate:
    """What all tables that share carries and classes go through.

    Attributes:
        lock: held by the call that is being answered.
        launching: whether that call runs code that may call back.
    """

    def __init__(self) -> None:
        self.lock = new_lock()
        self.launching = False


def _free_all() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()


os.register_at_fork(after_in_child=_free_all)
