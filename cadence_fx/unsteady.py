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
from cadence_fx.layout import is_expanded
from cadence_fx.passes.graphs import ALLOCATIONS, OpOverload
from cadence_fx.passes.operators import operator_of
from cadence_fx.signature import is_plain

# How often a call is made again.
_TRIES = 3

Key = tuple[Any, ...]
Place = tuple[str, int]  # of a call among those that one node makes: its operator, how many of that came before


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
    """Makes every call several times on the same inputs.

    Attributes:
        unsteady: the position of each call that differs -> which of its leaves are memory that nobody has written.
        awkward: results of one of them overlap themselves, so that nothing can be put in their place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unsteady: dict[int, frozenset[int]] = {}
        self.awkward = False
        self._blank: set[int] = set()  # storages that were only allocated

    def make(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = tree_leaves((args, kwargs))
        blank = frozenset(i for i, value in enumerate(given) if _home(value) in self._blank)
        written = tensors_written(func, args, kwargs)
        if not _may_differ(func):
            result = func(*args, **kwargs)
            made = tensors_made(result, written)
            if func in ALLOCATIONS:
                self._blank |= set(map(_home, made)) - {-1}
            elif written or not (isinstance(func, OpOverload) and operator_of(func).aliased):
                self._blank -= set(map(_home, made))
            return result
        before = [t.clone() for t in written]
        result = func(*args, **kwargs)
        made = tensors_made(result, written)
        right = [t.clone() for t in made] if written else made
        for _ in range(_TRIES):
            for target, saved in zip(written, before, strict=True):
                target.copy_(saved)
            again = tensors_made(func(*args, **kwargs), written)
            if len(again) != len(right) or not all(map(bytes_equal, again, right)):
                self.unsteady[len(self.keys) - 1] = blank
                self.awkward |= any(not is_plain(t) or is_expanded(t) for t in made)
                break
        for target, value in zip(made, right, strict=True) if written else ():
            target.copy_(value)
        self._blank -= set(map(_home, made))
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


def _home(value: Any) -> int:
    """The memory of a tensor; -1 for what has none."""
    if not isinstance(value, torch.Tensor) or not is_plain(value) or not value.numel():
        return -1
    return value.untyped_storage().data_ptr()


def _may_differ(func: Any) -> bool:
    """Whether a call makes bytes, and from nothing but its arguments."""
    if not isinstance(func, OpOverload) or func in ALLOCATIONS or torch.Tag.inplace_view in func.tags:
        return False
    known = operator_of(func)
    if known.may_draw or known.has_statistics or known.may_return_input:
        return False
    return bool(known.written) or not known.aliased


@dataclasses.dataclass(frozen=True, slots=True)
class Unsteady:
    """A call that does not repeat.

    Attributes:
        stock, stock_place: the node of the stock graph that makes it, and where among that node's calls.
        node, place: the node of the traced graph, and where among its calls.
        blank: which leaves of its arguments hold no contents.
    """

    stock: fx.Node
    stock_place: Place
    node: fx.Node
    place: Place
    blank: frozenset[int]


def find_unsteady(
    stock: fx.GraphModule,
    stock_args: Callable[[], Sequence[Any]],
    aten: fx.GraphModule,
    args: Sequence[Any],
    restore: Callable[[], None],
) -> list[Unsteady]:
    """The calls that do not repeat; empty where there are none, or where one cannot be told or be replaced.

    Args:
        stock, stock_args: the stock graph, and what makes its arguments of what is at hand.
        aten, args: the graph that was traced from it, and its arguments.
        restore: puts back what either of them writes.
    """
    repeater = Repeater()
    there = _Nodes(stock, repeater)
    there.run(*stock_args())
    restore()
    if not repeater.unsteady or repeater.awkward:
        return []
    here = _Nodes(aten, Calls())
    here.run(*args)
    restore()
    # Of one operator with the same numbers and shapes, the graph makes as many calls as the stock computation, in the
    # same order: the passes that trace do not reorder.
    known: dict[Key, list[int]] = {}
    for at, key in enumerate(here.calls.keys):
        known.setdefault(key, []).append(at)
    totals, seen = Counter(repeater.keys), Counter[Key]()
    found = []
    for position, key in enumerate(repeater.keys):
        if position in repeater.unsteady:
            if len(known.get(key, ())) != totals[key]:
                return []
            node, place = here.place_of(known[key][seen[key]])
            found.append(Unsteady(*there.place_of(position), node, place, repeater.unsteady[position]))
        seen[key] += 1
    return found


class _Nodes(fx.Interpreter):
    """Runs a graph under a mode that takes down its calls, and knows which node makes which."""

    def __init__(self, gm: fx.GraphModule, calls: Calls) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self.calls = calls
        self._spans: list[tuple[int, fx.Node]] = []

    def run_node(self, n: fx.Node) -> Any:
        self._spans.append((len(self.calls.keys), n))
        with self.calls:
            return super().run_node(n)

    def place_of(self, position: int) -> tuple[fx.Node, Place]:
        """The node that makes a call, and where among its calls."""
        first, node = next((first, node) for first, node in reversed(self._spans) if first <= position)
        operator = self.calls.keys[position][0]
        return node, (operator, sum(key[0] == operator for key in self.calls.keys[first:position]))
