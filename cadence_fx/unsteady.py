"""Which operator calls of a computation do not repeat their own bytes, and which node of a traced graph makes each.

Every call is made several times in a row on the very inputs it has: sums by atomic additions, say, come out otherwise
on one of them. What is found this way is left out of a recording (`eager_breaks`). A difference that shows too rarely
to be found leaves a baseline that does not repeat, and the class is refused.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from cadence_fx._torch import TorchDispatchMode, tree_leaves
from cadence_fx.bytesops import bytes_equal
from cadence_fx.passes.graphs import ALLOCATIONS, OpOverload
from cadence_fx.passes.operators import operator_of

# How often a call is made again.
_TRIES = 3

Key = tuple[Any, ...]


class Calls(TorchDispatchMode):
    """Takes down what tells the operator calls of a run from each other: operator, shapes given, numbers given."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[Key] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs))
        self.keys.append((str(func), *(tuple(v.shape) if isinstance(v, torch.Tensor) else str(v) for v in given)))
        return self.make(func, args, kwargs)

    def make(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Make one call."""
        return func(*args, **kwargs)


class Repeater(Calls):
    """Makes every call several times on the same inputs; `unsteady` holds the positions of those that differ."""

    def __init__(self) -> None:
        super().__init__()
        self.unsteady: list[int] = []

    def make(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not _may_differ(func):
            return func(*args, **kwargs)
        written = tensors_written(func, args, kwargs)
        before = [t.clone() for t in written]
        result = func(*args, **kwargs)
        made = tensors_made(result, written)
        right = [t.clone() for t in made] if written else made
        for _ in range(_TRIES):
            for target, saved in zip(written, before, strict=True):
                target.copy_(saved)
            again = tensors_made(func(*args, **kwargs), written)
            if len(again) != len(right) or not all(map(bytes_equal, again, right)):
                self.unsteady.append(len(self.keys) - 1)
                break
        for target, value in zip(made, right, strict=True) if written else ():
            target.copy_(value)
        return result


def tensors_written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that a call says it writes."""
    found = []
    for at, name in operator_of(func).written if isinstance(func, OpOverload) else ():
        found += tree_leaves(args[at] if at < len(args) else kwargs.get(name))
    return [t for t in found if isinstance(t, torch.Tensor)]


def tensors_made(result: Any, written: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a call leaves behind: its results and what it has written, each once."""
    leaves = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    return list({id(t): t for t in (*leaves, *written)}.values())


def _may_differ(func: Any) -> bool:
    """Whether a call makes bytes, and from nothing but its arguments."""
    if not isinstance(func, OpOverload) or func in ALLOCATIONS:
        return False
    known = operator_of(func)
    if known.may_draw or known.has_statistics or known.may_return_input:
        return False
    return bool(known.written) or not known.aliased


@dataclasses.dataclass(frozen=True, slots=True)
class Unsteady:
    """A node of a traced graph that makes calls which do not repeat.

    Attributes:
        places: position among the operator calls of the node -> position among those of the stock computation.
    """

    node: fx.Node
    places: dict[int, int]


def find_unsteady(
    stock: Callable[[], Any], aten: fx.GraphModule, args: Sequence[Any], restore: Callable[[], None]
) -> list[Unsteady]:
    """The nodes of a traced graph whose calls do not repeat; empty where there are none, or where one cannot be told.

    Args:
        stock: the computation that the graph was traced from, on these arguments.
        restore: puts back what either of them writes.
    """
    with Repeater() as repeater:
        stock()
    restore()
    if not repeater.unsteady:
        return []
    run = _Nodes(aten)
    with run.calls:
        run.run(*args)
    restore()
    # Of one operator with the same numbers and shapes, the graph makes as many calls as the stock computation, in the
    # same order: the passes that trace do not reorder.
    here: dict[Key, list[int]] = {}
    for at, key in enumerate(run.calls.keys):
        here.setdefault(key, []).append(at)
    totals, seen = Counter(repeater.keys), Counter[Key]()
    wanted, places = set(repeater.unsteady), dict[fx.Node, dict[int, int]]()
    for position, key in enumerate(repeater.keys):
        if position in wanted:
            if len(here.get(key, ())) != totals[key]:
                return []
            node, first = run.node_of(here[key][seen[key]])
            places.setdefault(node, {})[here[key][seen[key]] - first] = position
        seen[key] += 1
    return [Unsteady(node, found) for node, found in places.items()]


class _Nodes(fx.Interpreter):
    """Runs a graph and takes down which node makes which operator calls."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.calls = Calls()
        self._spans: list[tuple[int, fx.Node]] = []

    def run_node(self, n: fx.Node) -> Any:
        self._spans.append((len(self.calls.keys), n))
        return super().run_node(n)

    def node_of(self, position: int) -> tuple[fx.Node, int]:
        """The node that makes a call, and the position of its first one."""
        first, node = next((first, node) for first, node in reversed(self._spans) if first <= position)
        return node, first
