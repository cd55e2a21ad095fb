"""What Python code can rebind: attributes of modules and objects, elements of lists and dicts, cells, named globals.

Found by walking from a root, saved as shallow copies of every container on the way, compared and put back in place, so
that objects keep their identity. Bytes of tensors are not looked at here.
"""

from __future__ import annotations

import functools
import operator
import random
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from cadence_fx.generators import Source, is_numpy, of_numpy, of_python, of_torch

_DEEPEST = 8  # containers and objects below a module or a root
_WIDEST = 512  # elements of a container that are themselves looked into
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_TABLES = ("_parameters", "_buffers", "_modules")
_FOREIGN = {*sys.stdlib_module_names, "torch", "numpy", "cadence_fx", "__builtin__"}


Place = tuple[Any, Any, str]


class _Container:
    """One container and the shallow copy that was taken of it."""

    def __init__(self, live: Any, spell: str, names: tuple[str, ...] | None = None) -> None:
        self.live = live
        self.spell = spell  # a pattern with one {} for the key
        self._names = names  # of a namespace, the ones that count
        self.saved = self._now()

    def _now(self) -> Any:
        live = self.live
        if isinstance(live, types.CellType):
            return {"": live.cell_contents} if _is_filled(live) else {}
        if isinstance(live, dict):
            keys = live if self._names is None else [name for name in self._names if name in live]
            return {key: live[key] for key in keys}
        return set(live) if isinstance(live, set) else list(live)

    def changed(self) -> list[str]:
        """What has been rebound, added or removed, in words."""
        now, saved = self._now(), self.saved
        if isinstance(saved, dict):
            keys = [k for k in {**saved, **now} if k not in saved or k not in now or not _same(saved[k], now[k])]
            return [self.spell.format(key) for key in keys]
        if isinstance(saved, set):
            return [] if now == saved else [self.spell.format("...")]
        if len(now) == len(saved) and all(map(_same, saved, now)):
            return []
        first = next((i for i, (a, b) in enumerate(zip(saved, now, strict=False)) if not _same(a, b)), len(saved))
        return [self.spell.format(first)]

    def is_same(self) -> bool:
        """Whether nothing has changed; fast where every element is the very object that it was."""
        live, saved = self.live, self.saved
        if isinstance(live, (dict, list)) and len(live) == len(saved):
            mine, theirs = (live.values(), saved.values()) if isinstance(live, dict) else (live, saved)
            if all(map(operator.is_, mine, theirs)) and (isinstance(live, list) or live.keys() == saved.keys()):
                return True
        return not self.changed()

    def put_back(self) -> None:
        live, saved = self.live, self.saved
        if isinstance(live, types.CellType):
            if saved:
                live.cell_contents = saved[""]
            elif _is_filled(live):
                del live.cell_contents
        elif isinstance(live, dict):
            now = self._now()
            for key in now if self._names is None and list(now) != list(saved) else set(now) - set(saved):
                del live[key]
            live.update(saved)
        elif isinstance(live, list):
            live[:] = saved
        else:
            live.clear()
            live.update(saved) if isinstance(live, set) else live.extend(saved)


class PythonState:
    """The state of everything that is reached from the roots, as it is when the object is made.

    Walked: modules with their parameters, buffers and submodules; lists, dicts, sets, tuples; objects of classes that
    are neither PyTorch's nor the standard library's; of functions the closure, the defaults, the object they are bound
    to, and the globals that their own code names.

    Args:
        roots: modules, functions, objects.

    Attributes:
        modules: all modules found.
        tensors: all tensors found.
        generators: the places that hold a `torch.Generator`: (namespace, key, name).
    """

    def __init__(self, *roots: Any) -> None:
        self.modules: list[torch.nn.Module] = []
        self.tensors: list[torch.Tensor] = []
        self.generators: list[Place] = []
        self._dice: list[Source] = []
        self._containers: list[_Container] = []
        self._classes: list[tuple[torch.nn.Module, type, str]] = []
        self._seen: dict[int, Any] = {}
        for root in roots:
            self._visit(root, "self", 0, root=True)

    def changes(self) -> list[str]:
        """What is no longer as it was: `self.table`, `self.layers.0.seen[2]`."""
        found = [f"the class of {name}" for module, kind, name in self._classes if type(module) is not kind]
        return found + [name for container in self._containers for name in container.changed()]

    def is_same(self) -> bool:
        """Whether `changes` would find nothing."""
        if any(type(module) is not kind for module, kind, _ in self._classes):
            return False
        return all(container.is_same() for container in self._containers)

    def put_back(self) -> None:
        """Everything that was rebound is as it was; containers that did not change are not touched."""
        for module, kind, _ in self._classes:
            if type(module) is not kind:
                module.__class__ = kind
        for container in self._containers:
            if container.changed():
                container.put_back()

    def dice(self) -> list[Source]:
        """Everything found that random numbers can be drawn from: PyTorch's, Python's and numpy's generators."""
        found = [of_torch(held(place), place[2]) for place in self.generators]
        return found + self._dice

    # -- walking ------------------------------------------------------------------------------------------------------

    def _visit(self, value: Any, name: str, depth: int, root: bool = False) -> None:
        if isinstance(value, _SCALARS) or depth > _DEEPEST or id(value) in self._seen:
            return
        self._seen[id(value)] = value  # kept alive, so that no other object gets its id
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, torch.nn.Module):
            self._module(value, name)
            if root and isinstance(value.forward, types.MethodType):
                self._globals(value.forward.__func__)
        elif isinstance(value, dict):
            self._dict(value, name + "[{!r}]", name + "[{!r}]", depth)
        elif isinstance(value, (list, deque, set)):
            self._containers.append(_Container(value, name + "[{}]"))
            self._elements(value, name, depth)
        elif isinstance(value, (tuple, frozenset)):
            self._elements(value, name, depth)
        elif isinstance(value, random.Random) or is_numpy(value):
            self._dice.append(of_python(value, name) if isinstance(value, random.Random) else of_numpy(value, name))
        elif isinstance(value, functools.partial):
            self._visit(value.func, name, depth, root)
            self._visit((value.args, value.keywords), name, depth)
        elif isinstance(value, (types.FunctionType, types.MethodType)):
            if root:
                self._function(value, name, depth)
        elif _is_plain_object(value):
            self._dict(vars(value), name + ".{}", name + ".{}", depth)
            for method in ("__call__", "forward"):
                if root and isinstance(code := getattr(type(value), method, None), types.FunctionType):
                    self._globals(code)

    def _module(self, module: torch.nn.Module, name: str) -> None:
        self.modules.append(module)
        self._classes.append((module, type(module), name))
        self._dict(vars(module), name + ".{}", name + ".{}", 0, skip=_TABLES)
        for table in _TABLES:
            self._dict(vars(module)[table], name + ".{}", name + ".{}", 0)

    def _dict(self, values: dict[Any, Any], spell: str, child: str, depth: int, skip: tuple[str, ...] = ()) -> None:
        self._containers.append(_Container(values, spell))
        for key, value in list(values.items())[:_WIDEST]:
            if key in skip:
                continue
            if isinstance(value, torch.Generator):
                self.generators.append((values, key, child.format(key)))
            self._visit(value, child.format(key), depth + 1)

    def _elements(self, values: Any, name: str, depth: int) -> None:
        for i, value in enumerate(_first(values)):
            if isinstance(value, torch.Generator):
                self.generators.append((values, i, f"{name}[{i}]"))
            self._visit(value, f"{name}[{i}]", depth + 1)

    def _function(self, function: Any, name: str, depth: int) -> None:
        owner = getattr(function, "__self__", None)
        function = getattr(function, "__func__", function)
        if owner is not None:
            self._visit(owner, name, depth)
        self._dict(vars(function), name + ".{}", name + ".{}", depth)
        self._visit((function.__defaults__, function.__kwdefaults__), f"{name}'s defaults", depth)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._containers.append(_Container(cell, variable + "{}"))
            if _is_filled(cell):
                self._held(cell, "", cell.cell_contents, variable, depth)
        self._globals(function)

    def _globals(self, function: Any) -> None:
        space = function.__globals__
        names = tuple(dict.fromkeys(n for code in _codes(function.__code__) for n in code.co_names if n in space))
        self._containers.append(_Container(space, "{}", names))
        for variable in names:
            if not isinstance(space[variable], (types.FunctionType, types.ModuleType, type)):
                self._held(space, variable, space[variable], variable, 0)

    def _held(self, space: Any, key: Any, value: Any, name: str, depth: int) -> None:
        if isinstance(value, torch.Generator):
            self.generators.append((space, key, name))
        self._visit(value, name, depth + 1)


def held(place: Place) -> Any:
    """What is at a place of `PythonState.generators` now; None when the place is gone."""
    space, key, _ = place
    try:
        return space.cell_contents if isinstance(space, types.CellType) else space[key]
    except (LookupError, ValueError, TypeError):
        return None


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b) or not isinstance(a, _SCALARS):
        return False
    return repr(a) == repr(b) if isinstance(a, (float, complex)) else bool(a == b)


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _is_plain_object(value: Any) -> bool:
    """An object of a user's class, whose attributes are state; not what PyTorch or Python keep for themselves."""
    if isinstance(value, (type, types.ModuleType)) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    return isinstance(value, types.SimpleNamespace) or type(value).__module__.split(".")[0] not in _FOREIGN


def _first(values: Any) -> Iterator[Any]:
    for i, value in enumerate(values):
        if i == _WIDEST:
            return
        yield value


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
