"""Which operator makes a computation give other bytes when it is repeated.

The computation runs twice more, and each operator's inputs and outputs are reduced to short sums of their bytes. The
first operator that had the same inputs both times and gave different outputs is at fault; where an operator was called
with another number, or another operator was called, the host is.
"""

from __future__ import annotations

import dataclasses
import linecache
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from cadence_fx._torch import TorchDispatchMode, tree_leaves
from cadence_fx.bytesops import as_integers
from cadence_fx.lines import is_users
from cadence_fx.passes.graphs import ALLOCATIONS, location

# Rare differences may need more than one look.
_ATTEMPTS = 3
_GENERATED = "<eval_with_key>"


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One operator call of a run: its name, the user's line, and sums that tell inputs and outputs apart."""

    operator: str
    line: str
    tensors: tuple[Any, ...]
    numbers: tuple[Any, ...]
    results: tuple[Any, ...]


def find_culprit(run: Callable[[], Any], restore: Callable[[], None]) -> str | None:
    """The operator at fault and the user's line, in words; None when every operator repeated itself this time.

    Args:
        run: the computation, on inputs that stay where they are.
        restore: puts the inputs, and whatever else the computation writes, back.
    """
    for _ in range(_ATTEMPTS):
        runs = []
        for _ in range(2):
            restore()
            with _Listener() as listener:
                run()
            runs.append(listener.calls)
        restore()
        found = _first_difference(*runs)
        if found is not None:
            return found
    return None


def _first_difference(one: list[Call], other: list[Call]) -> str | None:
    for a, b in zip(one, other, strict=False):
        if a.operator != b.operator:
            return f"the code calls {a.operator} once and {b.operator} the other time{b.line}"
        if a.tensors == b.tensors and a.numbers != b.numbers:
            was, now = next((x, y) for x, y in zip(a.numbers, b.numbers, strict=False) if x != y)
            return f"{a.operator} is given {was} once and {now} the other time{a.line}"
        if a.tensors == b.tensors and a.results != b.results:
            return f"{a.operator} gives different results for the same inputs{a.line}"
    return None


class _Listener(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs))
        tensors = tuple(_sums(value) for value in given if isinstance(value, torch.Tensor))
        numbers = tuple(_text(value) for value in given if not isinstance(value, torch.Tensor))
        result = func(*args, **kwargs)
        # Memory that is only allocated holds what was there before.
        results = () if func in ALLOCATIONS else tuple(_sums(v) for v in tree_leaves((result, args, kwargs)))
        self.calls.append(Call(str(func), _line(), tensors, numbers, results))
        return result


def _sums(value: Any) -> Any:
    """Two sums over the bytes of a tensor, one of them weighted by the place; any other value as its text."""
    if not isinstance(value, torch.Tensor):
        return _text(value)
    if value.layout is not torch.strided or value.numel() == 0:
        return tuple(value.shape)
    integers = as_integers(value).to(torch.int64).reshape(-1)
    places = torch.arange(1, integers.numel() + 1, device=value.device)
    return tuple(value.shape), int(integers.sum()), int((integers * places).sum())


def _text(value: Any) -> str:
    """A plain value as written; of any other object only its type, since its text may hold an address."""
    kind = type(value)
    return repr(value) if kind.__module__ in ("builtins", "torch") else kind.__name__


def _line() -> str:
    """` at File "decoder.py", line 12, in forward`: the innermost running line of the user's, if there is one."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_GENERATED):
            found = _line_of_node(frame)
            return f" at {found}" if found else ""
        if is_users(name):
            return f' at File "{name}", line {frame.f_lineno}, in {frame.f_code.co_name}'
        frame = frame.f_back
    return ""


def _line_of_node(frame: FrameType) -> str | None:
    """The user's line for the statement that a graph's generated code is at: each assigns to the name of its node."""
    assigned = re.match(r"\s*(\w+)", linecache.getline(frame.f_code.co_filename, frame.f_lineno))
    graph = frame.f_locals["self"].graph
    node = next((n for n in graph.nodes if assigned is not None and n.name == assigned[1]), None)
    return location(node) if node is not None else None
