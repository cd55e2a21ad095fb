"""The kill switch: everything runs eager, from outside the process or for a stretch of code.

`CADENCE_DISABLE=1` in the environment turns replay off for the process; `with disabled():` for the calls inside it,
in this thread and the tasks it starts. Bytes are the same either way; every such call is counted under `disabled`.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator

_off = contextvars.ContextVar("cadence_disabled", default=os.environ.get("CADENCE_DISABLE", "") not in ("", "0"))

is_off = _off.get


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Run the calls inside eager: nothing is replayed and nothing captured."""
    token = _off.set(True)
    try:
        yield
    finally:
        _off.reset(token)
