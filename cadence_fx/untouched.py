"""Whatever warm-up does to a module, to its tensors and to the generators is undone."""

from __future__ import annotations

from typing import Any

import torch

from cadence_fx import paths
from cadence_fx._torch import module_of
from cadence_fx.program import Program

_PLUMBING = ("_parameters", "_modules", "_buffers")


class Untouched:
    """Whatever warm-up does to a module, its tensors and the generators is undone on exit."""

    def __init__(self, original: Any, program: Program) -> None:
        self._module = module_of(original)
        self._program = program

    def __enter__(self) -> None:
        self._attributes: list[tuple[torch.nn.Module, dict[str, Any], dict[str, Any]]] = []
        self._bytes: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._rng = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        for name, module in self._module.named_modules() if self._module is not None else ():
            plain = {k: _shallow(v) for k, v in vars(module).items() if k not in _PLUMBING}
            buffers = dict(module._buffers)
            self._attributes.append((module, plain, buffers))
            prefix = paths.parse(name) if name else ()
            for key, value in (*buffers.items(), *plain.items()):
                scratch = self._program.is_scratch(paths.Origin("module", (*_numbers(prefix), key)))
                if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter) and not scratch:
                    self._bytes.append((value, value.detach().to("cpu", copy=True)))

    def __exit__(self, *exc: object) -> None:
        for module, plain, buffers in self._attributes:
            for key in [k for k in vars(module) if k not in plain and k not in _PLUMBING]:
                del vars(module)[key]
            vars(module).update(plain)
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for tensor, saved in self._bytes:
                tensor.copy_(saved)
        torch.set_rng_state(self._rng)
        for i, state in enumerate(self._cuda):
            torch.cuda.set_rng_state(state, i)


def _numbers(path: paths.Path) -> paths.Path:
    return tuple(int(s) if isinstance(s, str) and s.isdigit() else s for s in path)


def _shallow(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, dict)) else value
