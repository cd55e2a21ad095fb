"""Whatever warm-up does to a module, to its tensors and to everything random numbers come from is undone."""

from __future__ import annotations

from typing import Any

import torch

from cadence_fx import paths
from cadence_fx._torch import module_of
from cadence_fx.binding import declared_path
from cadence_fx.generators import Generators, all_sources
from cadence_fx.program import Program, same_value
from cadence_fx.python_state import PythonState

# Name of a module, the module, its attributes, its buffers.
Attributes = list[tuple[str, torch.nn.Module, dict[str, Any], dict[str, Any]]]

_PLUMBING = ("_parameters", "_modules", "_buffers")


class Untouched:
    """Whatever warm-up does to a module, its tensors and the generators is undone on exit.

    Meanwhile the program knows what the attributes were (`Program.attributes`), and `attributes` and `put_back` take a
    module back to where it was before a call.
    """

    def __init__(self, original: Any, program: Program) -> None:
        self._module = module_of(original)
        self._program = program

    def __enter__(self) -> Untouched:
        self._python = PythonState(*([self._module] if self._module is not None else []))
        self._generators = Generators([*all_sources(), *self._python.dice()])
        self._bytes: list[tuple[torch.Tensor, torch.Tensor]] = []
        known: dict[paths.Path, Any] = {}
        for name, _, plain, buffers in self.attributes():
            prefix = _numbers(paths.parse(name)) if name else ()
            for key, value in (*buffers.items(), *plain.items()):
                known[(*prefix, key)] = value
                scratch = self._program.is_scratch(paths.Origin("module", (*prefix, key)))
                if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter) and not scratch:
                    self._bytes.append((value, value.detach().to("cpu", copy=True)))
        self._program.attributes = known
        return self

    def attributes(self) -> Attributes:
        """Every module with its name, its own attributes and its buffers, as they are now."""
        return [
            (name, module, {k: _shallow(v) for k, v in vars(module).items() if k not in _PLUMBING}, {**module._buffers})
            for name, module in (self._module.named_modules() if self._module is not None else ())
        ]

    def changed(self, before: Attributes) -> bool:
        """Whether calls since have put anything else in the place of an attribute that is no declared state."""
        return any(
            key not in _PLUMBING and not same_value(old.get(key), new.get(key)) and not self._is_state(name, key)
            for name, module, plain, buffers in before
            for old, new in ((plain, vars(module)), (buffers, module._buffers))
            for key in old.keys() | new.keys()
        )

    def _is_state(self, name: str, key: str) -> bool:
        path = (*(_numbers(paths.parse(name)) if name else ()), key)
        regions = self._program.contract.regions if self._program.contract is not None else ()
        declared = [declared_path(region) for region in regions if region.attribute is not None]
        return any(paths.matches(place[: len(path)], path) for place in declared)

    def put_back(self, attributes: Attributes) -> None:
        """Undo what has been put in the place of attributes and buffers since."""
        for _, module, plain, buffers in attributes:
            for key in [k for k in vars(module) if k not in plain and k not in _PLUMBING]:
                del vars(module)[key]
            now = vars(module)
            now.update({key: value for key, value in plain.items() if not same_value(now.get(key), value)})
            module._buffers.clear()
            module._buffers.update(buffers)

    def __exit__(self, *exc: object) -> None:
        self._program.attributes = None
        self._python.put_back()
        with torch.no_grad():
            for tensor, saved in self._bytes:
                tensor.copy_(saved)
        self._generators.restore()


def _numbers(path: paths.Path) -> paths.Path:
    return tuple(int(s) if isinstance(s, str) and s.isdigit() else s for s in path)


def _shallow(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, dict, set)) else value
