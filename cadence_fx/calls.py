"""Calls of a copy of a module: what goes in, what comes out, and what the module keeps afterwards."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from cadence_fx import paths
from cadence_fx._torch import storage_identity, tree_map_only
from cadence_fx._torch_calls import TracedCall, raised_at, trace_call
from cadence_fx.bytesops import bytes_equal
from cadence_fx.errors import ExampleFailed
from cadence_fx.leaves import kept_numbers, kept_tensors, objects_with_tensors, passed_over, tensor_paths
from cadence_fx.paths import Path
from cadence_fx.signature import is_plain

Arguments = dict[str, Any]
_SMALL = 1 << 20  # bytes of a parameter that is copied before a call


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor comes in: below an argument, or among the attributes of the module."""

    root: Literal["argument", "attribute"]
    path: Path

    def __str__(self) -> str:
        text = paths.spell(self.path, attributes=self.root == "attribute")
        return f"self.{text}" if self.root == "attribute" else text


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """A state: where it comes in, and where among the results the next one is; None where the call leaves it in its
    place, written or bound anew. ``proved``: the graph shows frames of it there, and others. ``given``: a second call
    was given what the first left there."""

    place: Place
    result: Path | None
    proved: bool
    given: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """One call that was made.

    Attributes:
        results: the tensors it returned.
        before, after: copies of the tensors under the arguments and of those that the module keeps.
        changed: the places that were written, or hold another tensor than before.
        shared: results that lie in the memory of a tensor that the module keeps and has written.
        numbers: the plain numbers that the module keeps, after the call.
        passed_over: containers that it keeps with tensors in them, and that are not looked into.
    """

    results: dict[Path, torch.Tensor]
    before: dict[Place, torch.Tensor]
    after: dict[Place, torch.Tensor]
    changed: frozenset[Place]
    shared: dict[Path, Place]
    numbers: dict[Path, int | float]
    passed_over: dict[Path, str]


class Live:
    """A copy of a module, weights shared, that may be called without a trace in the user's own.

    Raises:
        ExampleFailed: the module cannot be copied, or a call raises.
    """

    def __init__(self, module: Callable[..., Any]) -> None:
        self.signature = inspect.signature(module.forward if isinstance(module, nn.Module) else module)
        self.module = _copied(module)

    def twin(self) -> Live:
        """Another copy, as this one is now."""
        return Live(self.module)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """Arguments by name, tensors copied."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ExampleFailed(f"the example call does not fit the signature: {error}", None) from error
        return copied(dict(bound.arguments))

    def run(self, arguments: Arguments) -> Any:
        """The bare result of a call."""
        bound = inspect.BoundArguments(self.signature, dict(arguments))  # type: ignore[arg-type]
        try:
            with torch.no_grad():
                return self.module(*bound.args, **bound.kwargs)
        except Exception as error:
            text = str(error).strip().splitlines()
            problem = f"the call raised {type(error).__name__}{f': {text[0]}' if text else ''}"
            raise ExampleFailed(problem, raised_at(error)) from error

    def tensors(self, arguments: Arguments) -> dict[Place, torch.Tensor]:
        """The tensors under the arguments, and those that the module keeps."""
        found = {Place("argument", path): paths.get(arguments, path) for path in tensor_paths(arguments)}
        if isinstance(self.module, nn.Module):
            found |= {Place("attribute", path): tensor for path, tensor in kept_tensors(self.module).items()}
        return found

    def get(self, place: Place) -> Any:
        """What the module keeps at an attribute's place; None where there is nothing."""
        try:
            return paths.get(self.module, place.path)
        except LookupError:
            return None

    def put(self, place: Place, value: torch.Tensor) -> None:
        """Put a tensor at an attribute's place."""
        paths.put(self.module, place.path, value, attribute=True)

    def watch(self, arguments: Arguments) -> Ran:
        """Make a call, and look at everything it changes."""
        arguments = {**arguments}
        held = self.tensors(arguments)
        before = {place: tensor.detach().clone() for place, tensor in held.items()}
        versions = {place: _version(tensor) for place, tensor in held.items()}
        weights = self._weights()
        result = self.run(arguments)
        _refuse_writes(weights)
        now = self.tensors(arguments)
        changed = {
            place
            for place, tensor in now.items()
            if tensor is not held.get(place)
            or _version(tensor) != versions.get(place)
            or tensor.is_inference()
            and not bytes_equal(tensor, before[place])  # nobody counts writes there
        }
        results = {path: paths.get(result, path) for path in tensor_paths(result)}
        homes = {
            _memory(tensor): place
            for place, tensor in now.items()
            if place.root == "attribute" and place in changed and tensor is held.get(place)
        }
        return Ran(
            results,
            before,
            {place: tensor.detach().clone() for place, tensor in now.items()},
            frozenset(changed),
            {path: homes[_memory(tensor)] for path, tensor in results.items() if _memory(tensor) in homes},
            kept_numbers(self.module) if isinstance(self.module, nn.Module) else {},
            passed_over(self.module) if isinstance(self.module, nn.Module) else {},
        )

    def _weights(self) -> dict[str, _Weight]:
        if not isinstance(self.module, nn.Module):
            return {}
        named = self.module.named_parameters()
        return {name: _Weight(parameter) for name, parameter in named if not is_lazy(parameter)}

    def trace(
        self, arguments: Arguments, attributes: Sequence[Place], open_axes: Mapping[Place, Sequence[int]] | None = None
    ) -> Graph:
        """The graph of a call, on another copy, with a placeholder for each tensor argument and attribute named.

        Raises:
            NotTraced: the call is no single graph.
        """
        twin = self.twin()
        places = [Place("argument", path) for path in tensor_paths(arguments)]
        places += [place for place in attributes if isinstance(twin.get(place), torch.Tensor)]
        tensors = [paths.get(arguments, p.path) if p.root == "argument" else twin.get(p) for p in places]
        results: list[Path] = []

        def run(*values: Any) -> list[Any]:
            given = arguments
            for place, value in zip(places, values, strict=True):
                if place.root == "argument":
                    given = paths.put(given, place.path, value)
                else:
                    twin.put(place, value)
            bound = inspect.BoundArguments(twin.signature, dict(given))  # type: ignore[arg-type]
            result = twin.module(*bound.args, **bound.kwargs)
            results[:] = tensor_paths(result)
            kept = [paths.get(given, p.path) if p.root == "argument" else twin.get(p) for p in places]
            return [*(paths.get(result, path) for path in results), *kept]

        axes = [tuple((open_axes or {}).get(place, ())) for place in places] if open_axes is not None else ()
        return Graph(trace_call(run, [t.detach() for t in tensors], axes), places, list(results))


@dataclasses.dataclass(frozen=True, slots=True)
class Graph:
    """A traced call, and which of its values are which."""

    traced: TracedCall
    places: list[Place]
    results: list[Path]

    def placeholder(self, place: Place) -> Any:
        """The node of a tensor that came in."""
        return self.traced.gm.graph.find_nodes(op="placeholder")[self.places.index(place)]

    def after(self, slot: Slot) -> int:
        """Which of the returned values is the next state."""
        if slot.result is not None:
            return self.results.index(slot.result)
        return len(self.results) + self.places.index(slot.place)


def copied(arguments: Any) -> Any:
    """Containers with their tensors copied, and the objects that hold tensors."""
    return tree_map_only(object, _copied_leaf, arguments)


def _copied_leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if objects_with_tensors(value) else value


def drawn(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random numbers in the shape of a tensor of floats; of anything else, which may index something, a copy."""
    if not (like.dtype.is_floating_point or like.dtype.is_complex):
        return like.clone()
    made = torch.randn(like.shape, generator=generator, dtype=torch.float64 if like.dtype == torch.float64 else None)
    return made.to(like.device, like.dtype)


def _memory(tensor: torch.Tensor) -> object:
    return storage_identity(tensor) if is_plain(tensor) else tensor


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class _Weight:
    """A parameter before a call, with a copy of its contents if it is as small as a state may be."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter, self.version, self.memory = parameter, _version(parameter), _memory(parameter)
        small = parameter.numel() * parameter.element_size() <= _SMALL
        self.contents = parameter.detach().clone() if small else None

    @property
    def written(self) -> bool:
        return _version(self.parameter) != self.version or _memory(self.parameter) != self.memory


def _refuse_writes(weights: Mapping[str, _Weight]) -> None:
    """Copies of a module share its parameters. One that a call writes gets its contents back, and no call follows.

    Raises:
        ExampleFailed: a parameter was written.
    """
    written = {name: weight for name, weight in weights.items() if weight.written}
    for weight in written.values():
        if weight.contents is not None and _memory(weight.parameter) == weight.memory:
            with torch.no_grad():
                weight.parameter.copy_(weight.contents)
    if written:
        problem = f"the call writes the parameter {next(iter(written))}, which no copy of the module has for itself"
        raise ExampleFailed(f"{problem}: make it a buffer", None)


def _copied(module: Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(module, nn.Module):
        return module
    weights: dict[int, Any] = {id(parameter): _alias(parameter) for parameter in module.parameters()}
    try:
        return copy.deepcopy(module, weights)
    except Exception as error:
        text = str(error).strip().splitlines()
        raise ExampleFailed(
            f"the module cannot be copied ({text[0] if text else type(error).__name__}); states that were made with "
            "gradients on are a frequent cause",
            None,
        ) from error


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    """Another parameter of the same memory, so that other memory may be put under it (``.data``)."""
    if type(parameter) is not nn.Parameter:
        return parameter
    return nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
