"""Whatever warm-up does to Python objects, to tensors and to everything random numbers come from is undone.

Bytes are set aside meanwhile: those of all tensors that can be reached, but of parameters, which hardly any code
writes and which may be gigabytes, only `KEPT` in all, the small ones first. Of the others a fingerprint is taken on
their device: a write is seen and is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cadence_fx import paths
from cadence_fx._torch import module_of
from cadence_fx.aside import aside
from cadence_fx.binding import declared_path
from cadence_fx.bytesops import bytes_equal, fingerprint
from cadence_fx.contract import Region
from cadence_fx.errors import StaleState, WeightsWritten
from cadence_fx.generators import Generators, all_sources
from cadence_fx.program import Program, same_value
from cadence_fx.python_state import TABLES, PythonState

# Name of a module, the module, its attributes, its buffers.
Attributes = list[tuple[str, torch.nn.Module, dict[str, Any], dict[str, Any]]]

KEPT = 256 << 20  # bytes of parameters


class Untouched:
    """Whatever warm-up does to what the compiled callable reaches, to its tensors and to generators is undone on exit.

    Meanwhile the program knows what the attributes were (`Program.attributes`), and `attributes` and `put_back` take a
    module back to where it was before a call.

    Raises:
        WeightsWritten: on exit; a parameter of which no bytes were kept has been written.
    """

    def __init__(self, original: Any, program: Program) -> None:
        self._original = original
        self._module = module_of(original)
        self._program = program

    def __enter__(self) -> Untouched:
        states = {id(state) for state in self._states()}
        carries = [*self._program.carries.values()]
        # A state's memory is its carry's business.
        self._python = PythonState(
            self._original, moving=lambda t: id(t) in states or any(carry.owns(t) for carry in carries)
        )
        self._generators = Generators([*all_sources(), *self._python.dice()])
        known: dict[paths.Path, Any] = {}
        scratch: set[int] = set()
        for name, _, plain, buffers in self.attributes():
            prefix = _numbers(paths.parse(name)) if name else ()
            for key, value in (*buffers.items(), *plain.items()):
                known[(*prefix, key)] = value
                if self._program.is_scratch(paths.Origin("module", (*prefix, key))):
                    scratch.add(id(value))
        self._constant = [t for t in self._python.tensors if not t.requires_grad]
        self._keep([t for t in self._python.tensors if id(t) not in scratch and t.device.type != "meta"])
        self._program.attributes = known
        return self

    def _states(self) -> list[Any]:
        """The tensors at the declared places on the module."""
        declared = [declared_path(r) for r in self._regions() if r.attribute is not None]
        return [paths.get(self._module, place) for each in declared for place in paths.expand(self._module, each)]

    def _regions(self) -> Sequence[Region]:
        return self._program.contract.regions if self._program.contract is not None else ()

    def _keep(self, tensors: list[torch.Tensor]) -> None:
        self._bytes: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._fingerprints: list[tuple[torch.Tensor, int]] = []
        room = KEPT
        for tensor in sorted(tensors, key=_size):
            if torch.nn.parameter.is_lazy(tensor):
                continue
            if isinstance(tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
                room -= _size(tensor)
                if room < 0:
                    self._fingerprints.append((tensor, fingerprint(tensor)))
                    continue
            self._bytes.append((tensor, aside(tensor)))

    def attributes(self) -> Attributes:
        """Every module with its name, its own attributes and its buffers, as they are now."""
        return [
            (name, module, {k: _shallow(v) for k, v in vars(module).items() if k not in TABLES}, {**module._buffers})
            for name, module in (self._module.named_modules() if self._module is not None else ())
        ]

    def changed(self, before: Attributes) -> bool:
        """Whether calls since have put anything else in the place of an attribute that is no declared state."""
        return any(
            key not in TABLES and not same_value(old.get(key), new.get(key)) and not self._is_state(name, key)
            for name, module, plain, buffers in before
            for old, new in ((plain, vars(module)), (buffers, module._buffers))
            for key in old.keys() | new.keys()
        )

    def _is_state(self, name: str, key: str) -> bool:
        path = (*(_numbers(paths.parse(name)) if name else ()), key)
        declared = [declared_path(region) for region in self._regions() if region.attribute is not None]
        return any(paths.matches(place[: len(path)], path) for place in declared)

    def put_back(self, attributes: Attributes) -> None:
        """Undo what has been put in the place of attributes and buffers since."""
        for _, module, plain, buffers in attributes:
            for key in [k for k in vars(module) if k not in plain and k not in TABLES]:
                del vars(module)[key]
            now = vars(module)
            now.update({key: value for key, value in plain.items() if not same_value(now.get(key), value)})
            module._buffers.clear()
            module._buffers.update(buffers)

    def __exit__(self, *exc: object) -> None:
        self._program.attributes = None
        self._python.put_back()
        for tensor in self._constant:
            if tensor.requires_grad:  # in grad mode a call that writes it makes it a part of its graph
                tensor.detach_()
        with torch.no_grad():
            for tensor, saved in self._bytes:
                if not self._is_stale(tensor) and not _is_kept(tensor, saved):
                    tensor.copy_(saved)
        self._generators.restore()
        written = [tensor for tensor, before in self._fingerprints if fingerprint(tensor) != before]
        if written and exc[0] is None:
            names = {id(value): name for module in self._python.modules for name, value in module.named_parameters()}
            raise WeightsWritten([names.get(id(tensor), f"of shape {list(tensor.shape)}") for tensor in written], KEPT)

    def _is_stale(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a state that a call has consumed: its memory holds a newer one."""
        try:
            for carry in self._program.carries.values():
                carry.is_current(tensor)
        except StaleState:
            return True
        return False


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_kept(tensor: torch.Tensor, saved: torch.Tensor) -> bool:
    """Whether the bytes are as they were: then the tensor is not written, which others may count."""
    return tensor.layout is torch.strided and not tensor.is_quantized and bytes_equal(saved, tensor)


def _numbers(path: paths.Path) -> paths.Path:
    return tuple(int(s) if isinstance(s, str) and s.isdigit() else s for s in path)


def _shallow(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, dict, set)) else value
