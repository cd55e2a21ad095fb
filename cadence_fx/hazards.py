"""Hazards of a callable, found by making one example call a few times and watching it; all of it is undone.

The first call is watched for operators, the second one tells what the first has only built and what each call changes,
a third one is watched for functions, and a last one is followed line by line, to find the lines of what has changed.
Compiled code inside is run as written.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from cadence_fx import paths
from cadence_fx._torch import module_of, original_of, tree_leaves, tree_map_only
from cadence_fx.binding import declared_path
from cadence_fx.call_hazards import FunctionHazards, OperatorHazards
from cadence_fx.code_hazards import inside
from cadence_fx.contract import Contract
from cadence_fx.errors import ContractError
from cadence_fx.generators import Generators, Source, all_sources, same_state
from cadence_fx.hazard import Hazard, hazard
from cadence_fx.layout import same_geometry_copy
from cadence_fx.lines import LineWatch, is_users, raised_at
from cadence_fx.parking import awake
from cadence_fx.program import Program
from cadence_fx.python_state import PythonState
from cadence_fx.signature import is_plain
from cadence_fx.untouched import Untouched
from cadence_fx.writes import Stopped


def find_hazards(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], contract: Contract | None = None
) -> list[Hazard]:
    """The known hazards of one example call, in the order of the lines.

    Args:
        target: a module, a function, or what `torch.compile` made of one.
        args, kwargs: of the call; they are not changed.
        contract: what it declares is no hazard.

    Raises:
        ContractError: the call does not fit the signature.
    """
    target = original_of(target)
    try:
        inspect.signature(target.forward if isinstance(target, torch.nn.Module) else target).bind(*args, **kwargs)
    except TypeError as error:
        raise ContractError(f"the example call does not fit the callable: {error}", field="args") from error
    with Untouched(target, Program(contract, "doctor")), torch.compiler.set_stance("force_eager"):
        found = _Examination(target, args, kwargs, contract).found()
    # The same read is seen as a function and as an operator; every layer of a model has the same line.
    alike: dict[tuple[str, str | None, str], list[Hazard]] = {}
    for each in found:
        alike.setdefault((each.kind, each.line, each.what if each.line is None else ""), []).append(each)
    return sorted(map(_as_one, alike.values()), key=lambda each: (each.line is None, _place(each.line)))


def _as_one(alike: list[Hazard]) -> Hazard:
    """Hazards of a kind and a line as one: what stops capture goes before what does not."""
    worst = max(alike, key=lambda each: each.stops)
    others = len({each.what for each in alike}) - 1
    if not others or worst.kind == "host_read":
        return worst
    return dataclasses.replace(worst, what=f"{worst.what}, and {others} more at this line")


def _place(line: str | None) -> tuple[str, int]:
    file, _, number = (line or ":0").rpartition(":")
    return file, int(number)


class _Examination:
    def __init__(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], contract: Contract | None) -> None:
        self._target, self._args, self._kwargs = target, args, kwargs
        self._module = module_of(target)
        regions = contract.regions if contract is not None else ()
        self._declared = [declared_path(r) for r in regions if r.attribute is not None]
        self._stateful = {paths.parse(r.argument)[0] for r in regions if r.argument is not None}
        self._strict = contract is not None
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self._tensors = tensors
        self._held = self._names()
        devices = [t.device for t in (*tensors, *(t for _, t in self._held.values()))]
        self._device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))

    def _names(self) -> dict[str, tuple[bool, torch.Tensor]]:
        """Tensors on the module: whether a move of the module takes them along, by name."""
        found: dict[str, tuple[bool, torch.Tensor]] = {}
        for prefix, module in self._module.named_modules() if self._module is not None else ():
            spell = f"self.{prefix}.{{}}" if prefix else "self.{}"
            for table in (module._parameters, module._buffers):
                found |= {spell.format(k): (True, v) for k, v in table.items() if isinstance(v, torch.Tensor)}
            found |= {spell.format(k): (False, v) for k, v in vars(module).items() if isinstance(v, torch.Tensor)}
        return found

    def _copies(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        copies: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(
            torch.Tensor, same_geometry_copy, (self._args, self._kwargs)
        )
        return copies

    def _call(self) -> Any:
        args, kwargs = self._copies()
        return self._target(*args, **kwargs)

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str | None, torch.Tensor]]:
        """The tensors of a call with the names of their arguments, but for declared states."""
        target = self._target.forward if isinstance(self._target, torch.nn.Module) else self._target
        for name, value in inspect.signature(target).bind(*args, **kwargs).arguments.items():
            for leaf in tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    yield None if name in self._stateful else name, leaf

    # -- the runs -----------------------------------------------------------------------------------------------------

    def found(self) -> list[Hazard]:
        """Everything, or what was found until the call raised."""
        with awake([tensor for _, tensor in self._held.values()]):
            start = PythonState(self._target, *self._functions())
            try:
                return self._found(start)
            finally:
                start.put_back()

    def _functions(self) -> list[types.FunctionType]:
        """The methods of the user's classes: what they keep in globals and defaults counts too."""
        kinds = {kind: None for module in self._modules() for kind in type(module).__mro__}
        functions = [value for kind in kinds for value in vars(kind).values() if isinstance(value, types.FunctionType)]
        return [function for function in functions if is_users(function.__code__.co_filename)]

    def _modules(self) -> list[torch.nn.Module]:
        return list(self._module.modules()) if self._module is not None else []

    def _found(self, start: PythonState) -> list[Hazard]:
        generators = Generators([*all_sources(), *start.dice()])
        plain = {name: t for name, (_, t) in self._held.items() if is_plain(t) and t.numel()}
        memory = {t.untyped_storage().data_ptr(): name for name, t in plain.items()}
        given = self._copies()
        states = {home for home, name in memory.items() if self._is_declared(name)}
        operators = OperatorHazards(memory, states, generators, list(self._named(*given)), self._strict)
        found = self._shared(memory)
        try:
            with operators:
                result = self._target(*given[0], **given[1])
            first, probes = start.changes(), start.changing()
            moved = [source for source in generators.moved() if not source.is_of(self._device)]
            found += self._aliases(result, memory, operators.views)
            second = PythonState(self._target, *self._functions())
            self._call()
            every = second.changes()
            start.put_back()
            given = self._copies()
            kept = [t for along, t in self._held.values() if not along]
            begins = [*(t for along, t in self._held.values() if along), *(t for _, t in self._named(*given))]
            watched = FunctionHazards(kept, begins, self._device)
            with watched:
                self._target(*given[0], **given[1])
            start.put_back()
            generators.restore()
            lines = self._followed([*probes, *map(_moved, moved)])
        except Stopped:
            return [*found, *operators.found.values()]
        except Exception as error:
            what = f"the example call raises {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            return [*found, *operators.found.values(), hazard("raises", what.rstrip(": "), raised_at(error))]
        found += [
            *watched.found.values(),
            *operators.found.values(),
        ]
        found += [hazard("host_random", f"it draws from {s.name} on the host", lines.lines.get(s.name)) for s in moved]
        found += self._changes(first, every, lines.lines)
        return found + inside(lines, self._module)

    def _followed(self, probes: Sequence[Callable[[], Sequence[str]]]) -> LineWatch:
        with LineWatch(probes) as lines:
            self._call()
        return lines

    # -- what they tell -----------------------------------------------------------------------------------------------

    def _is_declared(self, name: str) -> bool:
        path = _path(name)
        return any(paths.matches(each, path) for each in self._declared)

    def _shared(self, memory: dict[int, str]) -> list[Hazard]:
        """Arguments that share memory with the module, and declared states that share theirs."""
        homes = [t.untyped_storage().data_ptr() for t in self._tensors if is_plain(t) and t.numel()]
        shared = dict.fromkeys(memory[home] for home in homes if home in memory)
        found = [hazard("aliased_state", f"an argument shares memory with {name}") for name in shared]
        for name, (_, tensor) in self._held.items():
            if self._is_declared(name) and is_plain(tensor) and tensor.untyped_storage().nbytes() > tensor.nbytes:
                found.append(hazard("shared_state", f"{name} is a view of other memory"))
        return found

    def _aliases(self, result: Any, memory: dict[int, str], views: dict[int, str | None]) -> list[Hazard]:
        """Results that are memory of the module."""
        found = []
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and is_plain(value) and value.numel():
                name = memory.get(value.untyped_storage().data_ptr())
                if name is not None:
                    found.append(hazard("aliased_state", f"a result is memory of {name}", views.get(id(value))))
        return found

    def _changes(self, first: Sequence[str], every: Sequence[str], lines: dict[str, str]) -> list[Hazard]:
        """What the first call has rebound, and what each one does."""
        again = {_owner(name) for name in every}
        found = []
        for name in dict.fromkeys(first):
            if name.startswith("the memory of ") and _owner(name) in again:
                found.append(
                    hazard("moves_memory", f"{_owner(name)} is given other memory by each call", lines.get(name))
                )
            elif not self._is_declared(_owner(name)):
                found.append(self._change(name, _owner(name) in again, lines.get(name)))
        return found

    def _change(self, name: str, again: bool, line: str | None) -> Hazard:
        owner = _owner(name)
        if not re.match(r"self(\.|$)", owner):
            name = name.replace("self's defaults", "a default argument")
            what = f"{name} is kept outside of the module and " + (
                "changed by each call" if again else "filled by the first call"
            )
            return hazard("growing_cache" if again else "global_cache", what, line)
        value = self._value(owner)
        if again and name != owner:
            return hazard("growing_cache", f"{owner} is changed by each call", line)
        if again and isinstance(value, torch.Tensor):
            return hazard(
                "undeclared_state",
                f"{owner} is another tensor after each call and is no declared state",
                line,
                stops=self._strict,
            )
        if again:
            return hazard("counter", f"{owner} is another {type(value).__name__} after each call", line)
        is_buffer = owner.rpartition(".")[2] in _buffers(self._module, owner)
        if is_buffer:
            return hazard("lazy_buffer", f"{owner} is registered as a buffer by the first call", line)
        return hazard("lazy_table", f"{owner} is built by the first call", line)

    def _value(self, name: str) -> Any:
        try:
            return paths.get(self._module if self._module is not None else self._target, _path(name))
        except LookupError:
            return None


def _moved(source: Source) -> Callable[[], Sequence[str]]:
    before = source.read()
    return lambda: [] if same_state(before, source.read()) else [source.name]


def _owner(name: str) -> str:
    """`self.layers.0.seen` of `self.layers.0.seen[2]` or `the memory of self.layers.0.seen`."""
    name = re.sub(r"^(the (memory|contents|class) of )", "", name)
    return re.sub(r"(\[[^\]]*\])+$", "", name)


def _path(name: str) -> paths.Path:
    """The steps of `self.layers.0.seen[2]`; none where the name is no accessor."""
    try:
        return paths.parse(name.removeprefix("self").removeprefix("."))
    except ContractError:
        return ()


def _buffers(module: torch.nn.Module | None, name: str) -> Sequence[str]:
    if module is None:
        return ()
    owner = name.removeprefix("self.").rpartition(".")[0]
    return tuple(module.get_submodule(owner)._buffers)
