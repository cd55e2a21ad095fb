"""Where there are tensors: in what a call is given and returns, and in what a module keeps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from cadence_fx.paths import ANY, Path, Step

_FOREIGN = ("torch", "builtins", "typing", "functools", "contextlib", "threading", "weakref", "numpy")
_PARTS = {"_parameters", "_buffers", "_modules"}


def tensor_paths(value: Any, path: Path = ()) -> list[Path]:
    """Where in nested containers there are tensors."""
    if isinstance(value, torch.Tensor):
        return [path]
    if isinstance(value, Mapping):
        return [found for key, item in value.items() for found in tensor_paths(item, (*path, key))]
    if isinstance(value, (list, tuple)):
        return [found for i, item in enumerate(value) for found in tensor_paths(item, (*path, i))]
    return []


def objects_with_tensors(value: Any, path: Path = ()) -> list[Path]:
    """Where in nested containers there are objects of a user's classes, modules aside, that hold tensors."""
    if isinstance(value, Mapping):
        return [found for key, item in value.items() for found in objects_with_tensors(item, (*path, key))]
    if isinstance(value, (list, tuple)):
        return [found for i, item in enumerate(value) for found in objects_with_tensors(item, (*path, i))]
    if isinstance(value, torch.Tensor) or _contents(value) is None or isinstance(value, nn.Module):
        return []
    return [path] if any(isinstance(held, torch.Tensor) for _, held in _kept(value)) else []


def kept_tensors(module: nn.Module) -> dict[Path, torch.Tensor]:
    """The tensors that a module keeps and that are no parameters: in buffers, attributes, containers and objects of a
    user's classes. What can be reached in two ways is named once, under its modules first."""
    found: dict[Path, torch.Tensor] = {}
    seen: set[int] = set()
    for path, value in _kept(module):
        if isinstance(value, torch.Tensor) and id(value) not in seen:
            seen.add(id(value))
            found[path] = value
    return found


def kept_numbers(module: nn.Module) -> dict[Path, int | float]:
    """The plain numbers that a module keeps in the same places."""
    return {path: value for path, value in _kept(module) if type(value) in (int, float)}


def passed_over(module: nn.Module) -> dict[Path, str]:
    """The containers in the same places that are not looked into, and hold tensors: where, and what they are."""
    kinds = (deque, set, frozenset)
    return {
        path: type(value).__name__
        for path, value in _kept(module)
        if isinstance(value, kinds) and any(isinstance(item, torch.Tensor) for item in value)
    }


def _kept(module: Any) -> Iterator[tuple[Path, Any]]:
    """Whatever is no container, by its path."""
    seen: set[int] = set()
    pending: list[tuple[Path, Any]] = [((), module)]
    while pending:
        path, value = pending.pop()
        inside = _contents(value)
        if inside is None:
            if not isinstance(value, nn.Parameter):
                yield path, value
        elif id(value) not in seen:
            seen.add(id(value))
            pending += [((*path, step), item) for step, item in reversed(inside)]


def _contents(value: Any) -> list[tuple[Step, Any]] | None:
    if isinstance(value, nn.Module):
        own = {**value._buffers, **vars(value)}
        named = [*value._modules.items(), *((name, held) for name, held in own.items() if name not in _PARTS)]
        return [(_step(name), held) for name, held in named]
    if isinstance(value, Mapping):
        return [(key, item) for key, item in value.items() if isinstance(key, (str, int))]
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, (type, torch.Tensor)):
        return [(_step(name), item) for name, item in vars(value).items()] if _is_users(value) else None
    return None


def _is_users(value: Any) -> bool:
    return not callable(value) and type(value).__module__.split(".")[0] not in _FOREIGN


def _step(name: str) -> Step:
    return int(name) if name.isdigit() else name


def accessor(path: Path) -> str:
    """A path into a result as a contract spells it: ``1['layers'][*]``, ``0`` for a result that is one tensor."""
    if not path:
        return "0"
    first = str(path[0]) if isinstance(path[0], int) else f"[{path[0]!r}]"
    return first + "".join("[*]" if step == ANY else f"[{step!r}]" for step in path[1:])
