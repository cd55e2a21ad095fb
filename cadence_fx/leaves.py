"""Where there are tensors: in what a call is given and returns, and in what a module keeps."""

from __future__ import annotations

from collections.abc import Mapping
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


def kept_tensors(module: nn.Module) -> dict[Path, torch.Tensor]:
    """The tensors that a module keeps and that are no parameters: in buffers, attributes, containers and objects of a
    user's classes. What can be reached in two ways is named once, under its modules first."""
    found: dict[Path, torch.Tensor] = {}
    seen: set[int] = set()

    def walk(value: Any, path: Path) -> None:
        if isinstance(value, nn.Parameter) or id(value) in seen:
            return
        if isinstance(value, torch.Tensor):
            seen.add(id(value))
            found[path] = value
        elif isinstance(value, nn.Module):
            seen.add(id(value))
            for name, child in value._modules.items():
                walk(child, (*path, _step(name)))
            for name, held in {**value._buffers, **vars(value)}.items():
                if name not in _PARTS:
                    walk(held, (*path, _step(name)))
        elif isinstance(value, Mapping):
            seen.add(id(value))
            for key, item in value.items():
                if isinstance(key, (str, int)):
                    walk(item, (*path, key))
        elif isinstance(value, (list, tuple)):
            seen.add(id(value))
            for i, item in enumerate(value):
                walk(item, (*path, i))
        elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, type) and _is_users(value):
            seen.add(id(value))
            for name, item in vars(value).items():
                walk(item, (*path, _step(name)))

    walk(module, ())
    return found


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
