"""Lines of the user's code: the one that is running, and those at which something becomes another."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

import torch

_OURS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
_PYTHONS = os.path.dirname(os.__file__) + os.sep  # the standard library; other packages may be in a folder of it


def is_users(filename: str) -> bool:
    """Whether a file is neither PyTorch's, Python's own nor of this package, nor generated code."""
    if filename.startswith((*_OURS, "<")):
        return False
    return not filename.startswith(_PYTHONS) or "site-packages" in filename


def user_frame(skip: int = 1) -> FrameType | None:
    """The innermost running frame of the user's, not looking at the innermost `skip`."""
    frame: FrameType | None = sys._getframe(skip + 1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_line(skip: int = 1) -> str | None:
    """`file:line` of that frame."""
    frame = user_frame(skip + 1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else None


def raised_at(error: BaseException) -> str | None:
    """`file:line` of the innermost frame of the user's that an error has come through."""
    place, trace = None, error.__traceback__
    while trace is not None:
        if is_users(trace.tb_frame.f_code.co_filename):
            place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


class LineWatch:
    """Runs code and looks, after each line of the user's, which of some things have become others.

    Args:
        probes: each gives names of what is now another; called after every line.

    Attributes:
        lines: name -> `file:line` behind which it was found first.
        codes: the code of the user's that was entered -> the globals it had.
        run: the lines that were run.
    """

    def __init__(self, probes: Iterable[Callable[[], Iterable[str]]]) -> None:
        self._probes = list(probes)
        self.lines: dict[str, str] = {}
        self.codes: dict[CodeType, dict[str, Any]] = {}
        self.run: set[tuple[str, int]] = set()
        self._last: tuple[str, int] | None = None
        self._before: Any = None

    def __enter__(self) -> LineWatch:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self._before)
        self._look()

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if event == "call":
            if not is_users(code.co_filename):
                return None
            self.codes[code] = frame.f_globals
        elif event == "line":
            self._look()
            self._last = code.co_filename, frame.f_lineno
            self.run.add(self._last)
        elif event == "return":
            self._look()
            caller = frame.f_back
            if caller is not None and is_users(caller.f_code.co_filename):
                self._last = caller.f_code.co_filename, caller.f_lineno
        return self._trace

    def _look(self) -> None:
        if self._last is None:
            return
        for probe in self._probes:
            for name in probe():
                self.lines.setdefault(name, "{}:{}".format(*self._last))
