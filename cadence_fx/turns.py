"""One call at a time on a device, each after what the call before it has put on its stream.

All classes of a device share a pool, static buffers belong to a class and carries to a program, so the launch of one
call must not begin before another thread's call has taken its outputs out, nor overtake the work of a call that was
made on another stream. Eager PyTorch shares no such memory between calls, so nobody can be expected to wait for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from cadence_fx._torch import current_raw_stream
from cadence_fx.locks import new_lock

_turns: dict[torch.device, _DeviceTurn] = {}
_guard = new_lock()


def turn_on(device: torch.device, otherwise: Any) -> contextlib.AbstractContextManager[Any]:
    """What a call on a device is made in: on a GPU its turn, on the host only what is given (a lock)."""
    if device.type != "cuda":
        return otherwise  # type: ignore[no-any-return]
    with _guard:
        if device not in _turns:
            _turns[device] = _DeviceTurn(device)
        return _turns[device]


class _DeviceTurn:
    """Taken before the lock of any program, so that two programs that call each other cannot wait for each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = new_lock()
        self._stream: torch.cuda.Stream | None = None
        self._raw: int | None = None
        self._current: Callable[[], int] = current_raw_stream(device)

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            if self._current() != self._raw:
                self._follow()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    def _follow(self) -> None:
        """Let this stream wait for all that the stream of the call before has been given so far."""
        if torch.cuda.is_current_stream_capturing():
            return  # somebody else's capture may not wait for anything outside; such a call runs eager
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None:
            stream.wait_stream(self._stream)
        self._stream, self._raw = stream, self._current()
