"""Hazards in what code is made of: capturing and compiling of its own, which a run on a host does not show."""

from __future__ import annotations

import dis
from types import CodeType
from typing import Any

import torch

from cadence_fx.hazard import Hazard, hazard
from cadence_fx.lines import LineWatch

_GRAPHS = {"CUDAGraph", "make_graphed_callables"}


def inside(lines: LineWatch, root: torch.nn.Module | None) -> list[Hazard]:
    """The hazards of the code that a watched run has entered, and of what is set on a module."""
    found = []
    for code, space in lines.codes.items():
        for number in _captures(code):
            line = f"{code.co_filename}:{number}"
            runs = (code.co_filename, number) in lines.run
            found.append(hazard("own_graph", "the code captures CUDA graphs of its own", line, stops=runs))
        for name in code.co_names:
            if (inner := _compiled(space.get(name))) is not None:
                found.append(hazard("compiled_inside", f"{name} is compiled by another torch.compile", _defined(inner)))
    for prefix, module in root.named_modules() if root is not None else ():
        values = [(key, value) for kind in type(module).__mro__ for key, value in vars(kind).items()]
        for key, value in [*values, *vars(module).items()]:
            if (inner := _compiled(value)) is not None and key != "_compiled_call_impl":
                what = f"{'.'.join(filter(None, ('self', prefix, key)))} is compiled by another torch.compile"
                found.append(hazard("compiled_inside", what, _defined(inner)))
    return found


def _captures(code: CodeType) -> list[int]:
    """Lines of a code that capture CUDA graphs: which of them run cannot be seen without a GPU."""
    found, before = [], ""
    for step in dis.get_instructions(code):
        name = str(step.argval)
        if name in _GRAPHS or (name == "graph" and before == "cuda"):
            found.append(step.positions.lineno if step.positions is not None else code.co_firstlineno)
        before = name
    return [number for number in dict.fromkeys(found) if number is not None]


def _compiled(value: Any) -> Any | None:
    """What another `torch.compile` has made this value of, if one has."""
    inner = getattr(value, "_torchdynamo_orig_callable", None) if callable(value) else None
    return inner if inner is not None else getattr(value, "_orig_mod", None)


def _defined(function: Any) -> str | None:
    code = getattr(getattr(function, "forward", function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None
