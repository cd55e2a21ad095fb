"""Python objects that a user names on the command line as MODULE:OBJECT: only these are imported and called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from cadence_fx.cli.output import Mistake, one_line
from cadence_fx.errors import CadenceError


def named(reference: str) -> Any:
    """The object; the current folder is looked into first.

    Raises:
        Mistake: no such thing, or its module raises.
    """
    name, colon, attribute = reference.partition(":")
    if not colon or not name or not attribute:
        raise Mistake(f"expected MODULE:OBJECT, found {reference!r}")
    sys.path.insert(0, "")
    try:
        return _guarded(reference, lambda: _attribute(import_module(name), attribute))
    finally:
        sys.path.remove("")


def example(reference: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What the named function returns: a callable and the arguments of a call of it.

    Raises:
        Mistake: it raises, or returns anything but (callable, args) or (callable, args, kwargs).
    """
    result = _guarded(reference, _function(reference))
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[1], (tuple, list)):
        raise Mistake(f"{reference} must return (module, args) or (module, args, kwargs)")
    return result[0], tuple(result[1]), dict(result[2]) if len(result) == 3 else {}


def call(reference: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the named function returns: the arguments of a call.

    Raises:
        Mistake: it raises, or returns anything but a tuple of arguments, or (args, kwargs).
    """
    result = _guarded(reference, _function(reference))
    if not isinstance(result, tuple):
        raise Mistake(f"{reference} must return the arguments as a tuple, or (args, kwargs)")
    if len(result) == 2 and isinstance(result[0], tuple) and isinstance(result[1], dict):
        return result
    return result, {}


def _function(reference: str) -> Callable[[], Any]:
    found = named(reference)
    if not callable(found):
        raise Mistake(f"{reference} is no function")
    return found  # type: ignore[no-any-return]


def _attribute(found: Any, path: str) -> Any:
    for step in path.split("."):
        found = getattr(found, step)
    return found


def _guarded(reference: str, use: Callable[[], Any]) -> Any:
    try:
        return use()
    except (CadenceError, Mistake):
        raise
    except Exception as error:  # the user's code, which may raise anything
        raise Mistake(f"{reference}: {type(error).__name__}: {one_line(str(error), 200)}") from error
