"""Python objects that a user names on the command line as MODULE:OBJECT: only these are imported and called."""

from __future__ import annotations

import contextlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from cadence_fx.cli.output import Mistake, one_line, users_output
from cadence_fx.errors import CadenceError, nearest_name
from cadence_fx.lines import raised_at

EXAMPLE = "(module, args) or (module, args, kwargs)"
CALL = "the arguments as a tuple, or (args, kwargs)"
_NAMES_SHOWN = 8


@contextlib.contextmanager
def current_folder() -> Iterator[None]:
    """Modules of the current folder can be imported, before others of their name."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # user code may have taken it out
            sys.path.remove("")


def named(reference: str) -> Any:
    """The object; where the reference ends with (), what a call of it returns.

    Raises:
        Mistake: no such thing, with the nearest name; or its module, or the call, raises.
    """
    name, colon, path = reference.partition(":")
    if not colon or not name or not path:
        raise Mistake(f"expected MODULE:OBJECT, found {reference!r}")
    found = _imported(name)
    for step in path.removesuffix("()").split("."):
        found = _attribute(found, step, name)
    return _called(reference, found) if path.endswith("()") else found


def target(reference: str) -> Any:
    """A module or a function that calls can be made of.

    Raises:
        Mistake: it is a class, or cannot be called.
    """
    found = named(reference)
    if isinstance(found, type):
        raise Mistake(f"{reference} is a class: name an object of it, such as '{reference}()'")
    if not callable(found):
        raise Mistake(f"{reference} cannot be called, found {_kind(found)}")
    return found


def example(reference: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A callable and the arguments of a call of it: the object itself, or what it returns if it is a function.

    Raises:
        Mistake: it raises, or is and returns anything but (callable, args) or (callable, args, kwargs).
    """
    result = _told(reference, EXAMPLE)
    if not isinstance(result, (tuple, list)) or len(result) not in (2, 3) or not isinstance(result[1], (tuple, list)):
        raise Mistake(f"{reference} must return {EXAMPLE}, found {_kind(result)}")
    kwargs = result[2] if len(result) == 3 else {}
    if not callable(result[0]) or isinstance(result[0], type) or not _is_named(kwargs):
        raise Mistake(f"{reference} must return {EXAMPLE}, found ({', '.join(map(_kind, result))})")
    return result[0], tuple(result[1]), kwargs


def call(reference: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call: the object itself, or what it returns if it is a function.

    Raises:
        Mistake: it raises, or is and returns anything but a tuple of arguments, or (args, kwargs).
    """
    result = _told(reference, CALL)
    if not isinstance(result, (tuple, list)):
        raise Mistake(f"{reference} must return {CALL}, found {_kind(result)}")
    if len(result) == 2 and isinstance(result[0], (tuple, list)) and _is_named(result[1]):
        return tuple(result[0]), result[1]
    return tuple(result), {}


def _told(reference: str, wanted: str) -> Any:
    """The object, or what it returns if it is a function; a module or a class tells no arguments."""
    found = named(reference)
    if isinstance(found, (torch.nn.Module, type)):
        what = "a class" if isinstance(found, type) else f"a module ({_kind(found)})"
        raise Mistake(f"{reference} is {what}: name a function that returns {wanted}")
    return _called(reference, found) if callable(found) else found


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _kind(value: Any) -> str:
    return f"class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _imported(name: str) -> Any:
    try:
        with users_output():
            return import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's code, which may raise anything
        hint = ""
        if isinstance(error, ModuleNotFoundError):
            hint = _module_hint(name, error.name or "")
        raise Mistake(f"{name} cannot be imported: {_what(error)}{hint}") from error


def _module_hint(name: str, missing: str) -> str:
    if name.endswith(".py") or os.sep in name:
        dotted = ".".join(Path(name).with_suffix("").parts)
        return f"; a module is written {dotted!r}"
    if not name.startswith(missing) or "." in missing:
        return ""
    near = None
    with contextlib.suppress(OSError):  # the current folder may be gone
        near = nearest_name(missing, [found.name for found in pkgutil.iter_modules([os.getcwd()])])
    return f"; did you mean {near + name.removeprefix(missing)!r}?" if near else ""


def _attribute(owner: Any, name: str, where: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        known = [each for each in dir(owner) if not each.startswith("_")]
        near = nearest_name(name, known)
        hint = f"; did you mean {near!r}?" if near else f" (known: {_listed(known)})"
        raise Mistake(f"{where}: there is no attribute {name!r}{hint}") from error
    except Exception as error:  # a property of the user's
        raise Mistake(f"{where}: {name} raises {_what(error)}") from error


def _listed(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _NAMES_SHOWN else ""
    return (", ".join(map(repr, names[:_NAMES_SHOWN])) or "none") + more


def _called(reference: str, found: Callable[[], Any]) -> Any:
    try:
        with users_output():
            return found()
    except (CadenceError, Mistake, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise Mistake(f"{reference} raises {_what(error)}") from error


def _what(error: BaseException) -> str:
    where = raised_at(error)
    return f"{type(error).__name__}: {one_line(str(error), 200)}{f' ({where})' if where else ''}"
