"""What Python code can rebind: attributes of modules, objects and classes, elements of lists and dicts, cells, globals.

Found by walking from a root, saved as shallow copies of every container on the way, compared and put back in place, so
that objects keep their identity. Of numpy arrays the bytes are saved, of tensors which memory they have; the bytes of
tensors are not looked at here.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import operator
import random
import sys
import types
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from cadence_fx.generators import Source, is_numpy, of_numpy, of_python, of_torch

_DEEPEST = 8  # containers and objects below a module or a root
_WIDEST = 512  # elements of a container that are themselves looked into
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
TABLES = ("_parameters", "_buffers", "_modules")
_FOREIGN = {*sys.stdlib_module_names, "torch", "numpy", "cadence_fx", "__builtin__"} - {"__main__"}


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
        if isinstance(live, _Attributes):
            return live.now()
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
        elif isinstance(live, _Attributes):
            live.put_back(saved)
        elif isinstance(live, dict):
            now = self._now()
            for key in now if self._names is None and list(now) != list(saved) else set(now) - set(saved):
                del live[key]
            live.update(saved)
        elif isinstance(live, (list, bytearray)):
            live[:] = saved
        elif isinstance(live, array):
            live[:] = array(live.typecode, saved)
        else:
            live.clear()
            live.update(saved) if isinstance(live, set) else live.extend(saved)


class _Attributes:
    """Attributes that no `__dict__` holds: the slots of an object, what is set on a class."""

    def __init__(self, owner: Any, slots: dict[str, Any] | None = None) -> None:
        self._owner = owner
        self._slots = slots

    def now(self) -> dict[str, Any]:
        if self._slots is None:
            return {key: value for key, value in vars(self._owner).items() if not _is_special(key)}
        found = {}
        for name, slot in self._slots.items():
            with contextlib.suppress(AttributeError):
                found[name] = slot.__get__(self._owner)
        return found

    def put_back(self, saved: dict[str, Any]) -> None:
        now = self.now()
        for name in {**now, **saved}:
            if name in saved and name in now and saved[name] is now[name]:
                continue
            if self._slots is not None:  # past what a frozen dataclass allows
                slot = self._slots[name]
                slot.__set__(self._owner, saved[name]) if name in saved else slot.__delete__(self._owner)
            elif name in saved:
                setattr(self._owner, name, saved[name])
            else:
                delattr(self._owner, name)


class _Array:
    """A numpy array and a copy of it."""

    def __init__(self, live: Any, name: str) -> None:
        self.live, self._name, self.saved = live, name, live.copy()

    def changed(self) -> list[str]:
        """The array's name, if a byte of it is another."""
        return [] if self.is_same() else [f"the contents of {self._name}"]

    def is_same(self) -> bool:
        """Whether every byte is as it was."""
        return bool(self.live.tobytes() == self.saved.tobytes())

    def put_back(self) -> None:
        self.live[...] = self.saved


class _Memory:
    """A tensor object and the memory that it had, which is kept alive: `tensor.data = ...` gives it another one."""

    def __init__(self, live: torch.Tensor, name: str) -> None:
        self.live, self._name, self.saved = live, name, live.data
        self._geometry = _geometry(live)

    def changed(self) -> list[str]:
        """The tensor's name, if it stands for other memory."""
        return [] if self.is_same() else [f"the memory of {self._name}"]

    def is_same(self) -> bool:
        """Whether the tensor stands for the same elements at the same place."""
        return _geometry(self.live) == self._geometry

    def put_back(self) -> None:
        self.live.data = self.saved


class PythonState:
    """The state of everything that is reached from the roots, as it is when the object is made.

    Walked: modules with their parameters, buffers and submodules; lists, dicts, sets, tuples; objects of classes that
    are neither PyTorch's nor the standard library's, with their slots, and those classes; of such functions the
    closure, the defaults, the object they are bound to, and the globals that their own code names.

    Args:
        roots: modules, functions, objects.
        moving: tensors of which it says so may get other memory.

    Attributes:
        modules: all modules found.
        tensors: all tensors found.
        generators: the places that hold a `torch.Generator`: (namespace, key, name).
        opaque: names of what has a state of its own that cannot be saved: iterators, files.
    """

    def __init__(self, *roots: Any, moving: Callable[[torch.Tensor], bool] = lambda tensor: False) -> None:
        self.modules: list[torch.nn.Module] = []
        self.tensors: list[torch.Tensor] = []
        self.generators: list[Place] = []
        self._dice: list[Source] = []
        self.opaque: list[str] = []
        self._moving = moving
        self._containers: list[_Container | _Array | _Memory] = []
        self._classes: list[tuple[torch.nn.Module, type, str]] = []
        self._seen: dict[int, Any] = {}
        for root in roots:
            self._visit(root, "self", 0, root=True)

    def changes(self) -> list[str]:
        """What is no longer as it was: `self.table`, `self.layers.0.seen[2]`."""
        found = [f"the class of {name}" for module, kind, name in self._classes if type(module) is not kind]
        return found + [name for container in self._containers for name in container.changed()]

    def changing(self) -> list[Callable[[], list[str]]]:
        """For each container in which something has changed, what finds that: it may be asked again and again."""
        return [container.changed for container in self._containers if container.changed()]

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
            has_memory = value.layout is torch.strided and value.device.type != "meta" and not is_lazy(value)
            if has_memory and not self._moving(value):
                self._containers.append(_Memory(value, name))
        elif isinstance(value, torch.nn.Module):
            self._module(value, name)
            if root and isinstance(value.forward, types.MethodType):
                self._globals(value.forward.__func__)
        elif isinstance(value, dict):
            self._dict(value, name + "[{!r}]", name + "[{!r}]", depth)
        elif isinstance(value, (bytearray, array)):
            self._containers.append(_Container(value, name + "[{}]"))
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
            self._function(value, name, depth, root)
        elif isinstance(value, type):
            self._class(value, depth)
        elif _is_array(value):
            self._array(value, name, depth)
        elif type(value).__module__ == "cadence_fx.replay":  # tried by another, it only calls what it wraps
            self._visit(value.fn, name + ".fn", depth + 1, root=True)
        elif _is_opaque(value):
            self.opaque.append(f"{name} ({type(value).__name__})")
        elif _is_plain_object(value):
            self._object(value, name, depth)
            for method in ("__call__", "forward"):
                if root and isinstance(code := getattr(type(value), method, None), types.FunctionType):
                    self._globals(code)

    def _object(self, value: Any, name: str, depth: int) -> None:
        self._class(type(value), depth)
        if isinstance(getattr(value, "__dict__", None), dict):
            self._dict(vars(value), name + ".{}", name + ".{}", depth)
        if slots := _slots(type(value)):
            self._attributes(_Attributes(value, slots), name, depth)

    def _class(self, kind: type, depth: int) -> None:
        """What is set on a user's class and its bases; methods are looked into only where they are kept as values."""
        for each in kind.__mro__:
            if id(each) not in self._seen and not _is_foreign(each.__module__):
                self._seen[id(each)] = each
                self._attributes(_Attributes(each), each.__name__, depth)

    def _attributes(self, attributes: _Attributes, name: str, depth: int) -> None:
        container = _Container(attributes, name + ".{}")
        self._containers.append(container)
        for key, value in list(container.saved.items())[:_WIDEST]:
            if not isinstance(value, types.FunctionType):
                self._held(container.saved, key, value, f"{name}.{key}", depth)

    def _array(self, value: Any, name: str, depth: int) -> None:
        while _is_array(value.base):  # what the memory belongs to
            value = value.base
        if value.dtype.hasobject:
            self._elements(value.flat, name, depth)
        if value.flags.writeable and not any(each.live is value for each in self._containers):
            self._containers.append(_Array(value, name))

    def _module(self, module: torch.nn.Module, name: str) -> None:
        self.modules.append(module)
        self._classes.append((module, type(module), name))
        self._class(type(module), 0)
        self._dict(vars(module), name + ".{}", name + ".{}", 0, skip=TABLES)
        for table in TABLES:
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

    def _function(self, function: Any, name: str, depth: int, root: bool) -> None:
        owner = getattr(function, "__self__", None)
        function = getattr(function, "__func__", function)
        if owner is not None:
            self._visit(owner, name, depth)
        if not isinstance(function, types.FunctionType):
            return
        self._visit(vars(function).get("__wrapped__"), name, depth, root)
        if not root and _is_foreign(function.__globals__.get("__name__", "")):
            return
        self._dict(vars(function), name + ".{}", name + ".{}", depth)
        self._visit((function.__defaults__, function.__kwdefaults__), f"{name}'s defaults", depth)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._containers.append(_Container(cell, variable + "{}"))
            if _is_filled(cell):
                self._held(cell, "", cell.cell_contents, variable, depth)
        self._globals(function, depth)

    def _globals(self, function: Any, depth: int = 0) -> None:
        space = function.__globals__
        names = tuple(name for name in _global_names(function.__code__) if name in space)
        self._containers.append(_Container(space, "{}", names))
        for variable in names:
            if not isinstance(space[variable], types.ModuleType):
                self._held(space, variable, space[variable], variable, depth)

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
    if isinstance(value, types.ModuleType):
        return False
    if type(value).__module__ in ("types", "collections"):
        return isinstance(getattr(value, "__dict__", None), dict)
    return not _is_foreign(type(value).__module__)


def _is_foreign(module: str) -> bool:
    return module.split(".")[0] in _FOREIGN


def _is_opaque(value: Any) -> bool:
    """Whether a use of an object changes what nobody outside it can save."""
    return isinstance(value, Iterator) and _is_foreign(type(value).__module__)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_special(name: str) -> bool:
    """Python's own names on a class, some of which come with a first use."""
    return (name.startswith("__") and name.endswith("__")) or name == "_abc_impl"


def _slots(kind: type) -> dict[str, Any]:
    found = [vars(each) for each in reversed(kind.__mro__) if not _is_foreign(each.__module__)]
    return {n: v for space in found for n, v in space.items() if isinstance(v, types.MemberDescriptorType)}


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _first(values: Any) -> Iterator[Any]:
    for i, value in enumerate(values):
        if i == _WIDEST:
            return
        yield value


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    steps = (step for each in _codes(code) for step in dis.get_instructions(each))
    return tuple(dict.fromkeys(step.argval for step in steps if step.opname.endswith("_GLOBAL")))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
