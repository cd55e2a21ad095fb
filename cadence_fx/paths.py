"""Accessors such as `cache[0]['k']` or `layers.*.hist`: how a contract names where a state lives.

A path is a tuple of steps, each an attribute or key name (`str`) or an index (`int`); `*` stands for every element.
Dynamo's source names are brought to the same form, so a declaration and a graph input can be compared.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from cadence_fx.errors import ContractError

Step = str | int
Path = tuple[Step, ...]

ANY = "*"
# Containers of nn.Module that Dynamo spells out and users do not.
_PLUMBING = {"_modules", "_buffers", "_parameters", "__dict__"}


@lru_cache(maxsize=4096)
def parse(text: str) -> Path:
    """`"layers.*.hist"` → ("layers", "*", "hist"); `"cache[0]['k']"` → ("cache", 0, "k"); `"1[*]"` → (1, "*").

    Raises:
        ContractError: the text is not an accessor.
    """
    # Dotted digits and stars are not Python; quote them into subscripts, then let Python's own parser do the rest.
    source, first = "", True
    for part in _split(text):
        if part.startswith("["):
            source += ("_root" if first else "") + part.replace("[*]", "['*']")
        elif first and part.isidentifier():
            source += part
        elif part.isidentifier():
            source += "." + part
        elif part.isdigit() or part == ANY:
            source += ("_root" if first else "") + (f"[{part}]" if part.isdigit() else "['*']")
        else:
            raise ContractError(f"{text!r} is not an accessor: write it like cache[0]['k'] or layers.*.hist")
        first = False
    try:
        steps = _steps(ast.parse(source, mode="eval").body)
    except (SyntaxError, ValueError) as error:
        raise ContractError(f"{text!r} is not an accessor: write it like cache[0]['k'] or layers.*.hist") from error
    return steps[1:] if steps[0] == "_root" else steps


def _split(text: str) -> list[str]:
    parts, current, depth = [], "", 0
    for ch in text:
        if ch == "[" and depth == 0:
            if current:
                parts.append(current)
            current = ""
        depth += (ch == "[") - (ch == "]")
        if ch == "." and depth == 0:
            if current:
                parts.append(current)
            current = ""
            continue
        current += ch
        if ch == "]" and depth == 0:
            parts.append(current)
            current = ""
    if current:
        parts.append(current)
    return parts


def _steps(node: ast.expr) -> Path:
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        return (*_steps(node.value), node.attr)
    if isinstance(node, ast.Subscript):
        index = ast.literal_eval(node.slice)
        if isinstance(index, (str, int)):
            return (*_steps(node.value), index)
    raise ValueError(ast.dump(node))


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where a graph input comes from.

    Attributes:
        root: "argument" (of the compiled function), "module" (an attribute path of the compiled module) or "other"
            (globals, closures, values Dynamo made up).
        path: steps from the argument's name or from the module; empty for "other".
        query: "value", "size", "stride" or "offset".
        index: the axis of a size or stride.
    """

    root: str
    path: Path
    query: str = "value"
    index: int = 0

    def __str__(self) -> str:
        return spell(self.path, attributes=self.root == "module") if self.path else "?"


def origin(source: str | None, module_name: str | None) -> Origin:
    """Bring one of Dynamo's source names to a path; `module_name` is the local that holds the compiled module."""
    if source is None:
        return Origin("other", ())
    try:
        node: ast.expr = ast.parse(source, mode="eval").body
    except SyntaxError:
        return Origin("other", ())
    query, index = "value", 0
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call):
        axis = node.slice
        call = node.value
        if isinstance(call.func, ast.Attribute) and isinstance(axis, ast.Constant):
            query, index, node = call.func.attr, int(axis.value), call.func.value  # type: ignore[arg-type]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        query, node = node.func.attr, node.func.value
    query = {"size": "size", "stride": "stride", "storage_offset": "offset"}.get(query, query)
    try:
        steps = _steps(node)
    except ValueError:
        return Origin("other", ())
    if steps[0] != "L" or len(steps) < 2:
        return Origin("other", (), query, index)
    if steps[1] == module_name:
        path = tuple(s for s in steps[2:] if s not in _PLUMBING)
        return Origin("module", tuple(int(s) if isinstance(s, str) and s.isdigit() else s for s in path), query, index)
    return Origin("argument", steps[1:], query, index)


def matches(pattern: Path, path: Path) -> bool:
    """Whether a declared path (with `*`) names this path."""
    return len(pattern) == len(path) and all(p in (ANY, s) for p, s in zip(pattern, path, strict=True))


def spell(path: Path, *, attributes: bool = False) -> str:
    """A path as a user would write it: `cache[0]['k']`, or `layers.0.hist` for attributes of a module."""
    if attributes:
        return ".".join(map(str, path))
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif not text:
            text = step if step.isidentifier() else f"[{step!r}]"
        else:
            text += "[*]" if step == ANY else f"[{step!r}]"
    return text


def get(root: Any, path: Path) -> Any:
    """Follow a path from a container or module.

    Raises:
        LookupError: no such element.
    """
    value = root
    for step in path:
        try:
            if isinstance(value, Mapping) or isinstance(step, int) and not hasattr(value, str(step)):
                value = value[step]
            else:
                value = getattr(value, str(step))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise LookupError(spell(path)) from error
    return value


def expand(root: Any, pattern: Path) -> list[Path]:
    """Every concrete path under `root` that a pattern with `*` names; empty where a step is missing."""
    found: list[tuple[Path, Any]] = [((), root)]
    for step in pattern:
        following: list[tuple[Path, Any]] = []
        for path, value in found:
            for key in _keys(value) if step == ANY else [step]:
                try:
                    following.append(((*path, key), get(value, (key,))))
                except LookupError:
                    continue
        found = following
    return [path for path, _ in found]


def _keys(value: Any) -> list[Step]:
    if isinstance(value, Mapping):
        return list(value)
    if hasattr(value, "__len__"):
        return list(range(len(value)))
    return []


def put(root: Any, path: Path, leaf: Any, *, attribute: bool = False) -> Any:
    """`root` with the element at `path` replaced: containers on the way are copied, modules are changed in place.

    Args:
        attribute: `root` is a module, whose code sets attributes of the objects that it keeps; so dataclasses on the
            way are changed in place too, unless they are frozen. As arguments they are the caller's, and are copied.
    """
    if not path:
        return leaf
    step, rest = path[0], path[1:]
    child = put(get(root, (step,)), rest, leaf, attribute=attribute)
    if isinstance(root, Mapping):
        return type(root)({**root, step: child})  # type: ignore[call-arg]
    if isinstance(root, list):
        return [child if i == step else x for i, x in enumerate(root)]
    if isinstance(root, tuple):
        items = [
            child if i == step or f == step else x for i, (x, f) in enumerate(zip(root, _fields(root), strict=True))
        ]
        return type(root)(*items) if hasattr(root, "_fields") else tuple(items)
    if dataclasses.is_dataclass(root) and not isinstance(root, type):
        frozen: bool = root.__dataclass_params__.frozen  # type: ignore[attr-defined]
        if frozen or not attribute:
            return dataclasses.replace(root, **{str(step): child})
    setattr(root, str(step), child)
    return root


def _fields(value: tuple[Any, ...]) -> tuple[str | None, ...]:
    return tuple(getattr(value, "_fields", (None,) * len(value)))
