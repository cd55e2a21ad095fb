"""Hazards in what a call does to tensors: seen while it runs, each with the line of the user's code that does it.

Functions are watched in one run and operators in another: code that is watched for functions takes other paths.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from cadence_fx._torch import TorchFunctionMode, tree_leaves
from cadence_fx._torch_switches import ambient_names, ambient_state
from cadence_fx.generators import Generators
from cadence_fx.hazard import Hazard, hazard
from cadence_fx.lines import user_line
from cadence_fx.passes.effects import is_collective, only_gathers, reads_value
from cadence_fx.signature import is_plain
from cadence_fx.unsteady import Repeater, tensors_made, tensors_written
from cadence_fx.writes import HANDS_OVER, Stopped

_OF_DATA = (torch.tensor, torch.as_tensor, torch.from_numpy, torch.asarray)
_DRAWS = (torch.rand, torch.randint, torch.randn, torch.randperm)
_MAKERS = {
    *_OF_DATA,
    *_DRAWS,
    *(torch.arange, torch.eye, torch.empty, torch.full, torch.linspace, torch.logspace, torch.ones, torch.zeros),
    *(torch.hann_window, torch.hamming_window),
}
_READS = {
    torch.Tensor.item,
    torch.Tensor.__bool__,
    torch.Tensor.__float__,
    torch.Tensor.__int__,
    torch.Tensor.__index__,
    torch.Tensor.__contains__,
}
_SENDS = {torch.Tensor.to, torch.Tensor.cuda}


class FunctionHazards(TorchFunctionMode):
    """Watches the functions that are called: bytes handed to the host, and tensors of the host that are sent away.

    Args:
        kept: tensors on the module that no move of the module takes along: neither parameters nor buffers.
        given: all others that the call begins with.

    Attributes:
        found: the hazards, each line once for a kind.
    """

    def __init__(self, kept: Sequence[torch.Tensor], given: Sequence[torch.Tensor], device: torch.device) -> None:
        super().__init__()
        state = ambient_state(device.type)
        self._device, self._autocast = device, ambient_names(state).index("autocast")
        self._entered = state[self._autocast]
        self.found: dict[tuple[str, str | None], Hazard] = {}
        self._kept = {id(t): t for t in kept}
        self._made: dict[int, tuple[torch.Tensor, Any]] = {}
        # What functions have given, or the call began with: a constructor (`torch.FloatTensor`) is no function.
        self._seen = {id(t): weakref.ref(t) for t in given}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if ambient_state(self._device.type)[self._autocast] != self._entered:
            self._note("autocast_inside", "autocast is another than where the call began")
        if func in _READS:
            self._note("host_read", f"the host takes a number ({func.__name__})")
        elif _brings_home(func, args) and not self._is_hosts(args[0]):
            self._note("host_read", "a tensor is copied to the host")
        elif func in HANDS_OVER:
            self._note("host_read", f"{func.__name__}() hands bytes to the host")
        elif func in _OF_DATA and kwargs.get("device") is not None and not _is_tensor(args):
            self._note("host_constant", f"torch.{func.__name__} copies data of the host to the device in each call")
        elif func in _SENDS and not _brings_home(func, args) and _names_a_place(args[1:], kwargs):
            self._sent(args[0])
        result = func(*args, **kwargs)
        if func in _MAKERS and kwargs.get("device") is None and isinstance(result, torch.Tensor):
            self._made[id(result)] = result, func
        elif self._made and func not in _SENDS and isinstance(result, torch.Tensor):
            self._inherit(result, args)
        self._seen |= {id(t): weakref.ref(t) for t in tree_leaves(result) if isinstance(t, torch.Tensor)}
        return result

    def _inherit(self, result: torch.Tensor, args: Any) -> None:
        """What is computed from nothing but what the call has made on the host is made there, too."""
        given = [a for a in tree_leaves(args) if isinstance(a, torch.Tensor)]
        if given and all(id(a) in self._made for a in given):
            self._made[id(result)] = result, self._made[id(given[0])][1]

    def _is_hosts(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._made or id(tensor) in self._kept

    def _sent(self, tensor: torch.Tensor) -> None:
        if id(tensor) in self._made:
            maker = self._made[id(tensor)][1]
            if maker in _DRAWS:
                self._note("host_random", f"torch.{maker.__name__} draws on the host, and the result is moved")
            else:
                self._note("host_constant", f"what torch.{maker.__name__} makes on the host is moved in each call")
        elif id(tensor) in self._kept:
            self._note("host_constant", "a tensor that is no buffer is moved in each call")
        elif id(tensor) not in self._seen or self._seen[id(tensor)]() is not tensor:
            self._note("host_constant", "a tensor that a constructor makes on the host is moved in each call")

    def _note(self, kind: str, what: str) -> None:
        line = user_line(2)
        self.found.setdefault((kind, line), hazard(kind, what, line))


def _is_tensor(args: Sequence[Any]) -> bool:
    return bool(args) and isinstance(args[0], torch.Tensor)


def _brings_home(func: Any, args: Sequence[Any]) -> bool:
    """Whether a call copies to the host whatever it is given: on a host, a device that is a variable does not tell."""
    named = any(isinstance(value, str) and value == "cpu" for value in args[1:])
    return func is torch.Tensor.cpu or (func is torch.Tensor.to and named)


def _names_a_place(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a `.to` says where to; a dtype alone does not."""
    given = [*args, *kwargs.values()]
    return any(isinstance(value, (torch.device, str, torch.Tensor)) for value in given) or not given


class OperatorHazards(Repeater):
    """Watches the operators that run, each made several times: what they read, write, draw from, and whether they
    repeat.

    Args:
        memory: address of the storage of a tensor on the module -> its name.
        states: addresses of those that are declared.
        known: generators that may be drawn from.
        arguments: tensors of the call, those that it may not write with a name.
        strict: there is a declaration, so that what it lacks keeps calls eager.

    Attributes:
        found: the hazards, each line once for a kind.
        views: id of a tensor that an operator has made as a view -> the line.
    """

    def __init__(
        self,
        memory: dict[int, str],
        states: set[int],
        known: Generators,
        arguments: Sequence[tuple[str | None, torch.Tensor]],
        strict: bool,
    ) -> None:
        super().__init__()
        self.found: dict[tuple[str, str | None], Hazard] = {}
        self.views: dict[int, str | None] = {}
        self._strict = strict
        self._memory, self._known = memory, known
        self._arguments = {_home(t): name for name, t in arguments if name is not None}
        # Storages whose bytes depend on what is called with.
        self._varying = states | {_home(t) for _, t in arguments}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_collective(func):
            self._note("collective", f"{func} talks to other processes")
            raise Stopped(str(func))
        if torch.Tag.dynamic_output_shape in func.tags and not only_gathers(func, args):
            self._note("data_dependent_shape", f"the size of what {func} makes depends on values")
        elif reads_value(func) and not only_gathers(func, args):
            # A check of constants inside an operator of PyTorch's is made once, by the passes.
            self._note("host_read", f"the host waits for the result of {func}", stops=self._varies(args))
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Generator) and not self._known.knows(value):
                self._note("hidden_generator", f"{func} draws from a generator that is neither argument nor attribute")
        for tensor in tensors_written(func, args, kwargs):
            name = self._arguments.get(_home(tensor))
            if name is not None:
                what = f"the argument {name} is written in place and is no declared state"
                self._note("undeclared_write", what, stops=self._strict)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.keys) - 1 in self.unsteady:
            self._note("unsteady", f"{func} gives other bytes each time for the same inputs")
        self._follow(func, args, kwargs, result)
        line = user_line()
        self.views |= {id(t): line for t in tensors_made(result, ()) if _home(t) in self._memory}
        return result

    def _varies(self, given: Any) -> bool:
        return any(_home(t) in self._varying for t in tree_leaves(given) if isinstance(t, torch.Tensor))

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """What an operator makes depends on the call if an argument of it does, or chance."""
        homes = {_home(t) for t in tensors_made(result, tensors_written(func, args, kwargs))} - {-1}
        if self._varies((args, kwargs)) or torch.Tag.nondeterministic_seeded in func.tags:
            self._varying |= homes
        else:
            self._varying -= homes

    def _note(self, kind: str, what: str, stops: bool | None = None) -> None:
        line = user_line(2)
        self.found.setdefault((kind, line), hazard(kind, what, line, stops=stops))


def _home(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if is_plain(tensor) and tensor.numel() else -1
