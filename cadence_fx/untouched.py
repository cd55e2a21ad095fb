"""Whatever warm-up does to a module, to its tensors and to everything random numbers come from is undone."""

from __future__ import annotations

from typing import Any

import torch

from cadence_fx import paths
from cadence_fx._torch import module_of
from cadence_fx.generators import Generators, all_sources
from cadence_fx.program import Program
from cadence_fx.python_state import PythonState


class Untouched:
    """Whatever warm-up does to a module, its tensors and the generators is undone on exit."""

    def __init__(self, original: Any, program: Program) -> None:
        self._module = module_of(original)
        self._program = program

    def __enter__(self) -> None:
        self._python = PythonState(*([self._module] if self._module is not None else []))
        self._generators = Generators([*all_sources(), *self._python.dice()])
        self._bytes: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, module in self._module.named_modules() if self._module is not None else ():
            prefix = paths.parse(name) if name else ()
            for key, value in (*module._buffers.items(), *vars(module).items()):
                scratch = self._program.is_scratch(paths.Origin("module", (*_numbers(prefix), key)))
                if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter) and not scratch:
                    self._bytes.append((value, value.detach().to("cpu", copy=True)))

    def __exit__(self, *exc: object) -> None:
        self._python.put_back()
        with torch.no_grad():
            for tensor, saved in self._bytes:
                tensor.copy_(saved)
        self._generators.restore()


def _numbers(path: paths.Path) -> paths.Path:
    return tuple(int(s) if isinstance(s, str) and s.isdigit() else s for s in path)
