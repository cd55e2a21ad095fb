"""Operators that run eager in the middle of a class, since they do not repeat their own bytes.

A recording would hold one of their results as good as eager's, but no certificate could say so: eager gives other bytes
each time, and so does everything behind. So such a class is recorded in parts, between which these operators run as in
eager, on every call. And it is held against eager with their results given: what they made in a run of the stock
computation is put in the place of what they make in every other run, stock or class, and what they are given there is
compared (`Tape`). Then the baseline repeats, and the certificate is what it is for any class: all other bytes are
eager's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx, nn

from cadence_fx._torch import TorchDispatchMode, tree_leaves, without_modes
from cadence_fx.aside import aside
from cadence_fx.bytesops import bytes_equal
from cadence_fx.errors import NotCapturable
from cadence_fx.passes.graphs import RUNS_EAGER, location
from cadence_fx.signature import ALIGNMENT, is_plain
from cadence_fx.unsteady import Unsteady, tensors_made, tensors_written

# Between more parts than this a recording has little left to save: each costs two launches and a copy.
MOST_BREAKS = 32


@dataclasses.dataclass(slots=True)
class _Taken:
    """One call: what it was given, each with how it lies in memory, and what it made."""

    given: list[tuple[Any, Any]]
    made: list[torch.Tensor]


class Tape:
    """The operator calls that do not repeat, as they were in a run of the stock computation.

    Nothing is taken down or put in place but between `start` and `stop`.

    Attributes:
        turn: which input the next runs are on. The first stock run on an input is taken down.
    """

    def __init__(self, positions: Sequence[int]) -> None:
        self._positions = {position: position for position in positions}
        self._taken: dict[Any, dict[int, _Taken]] = {}
        self._on = False
        self._astray: str | None = None
        self.turn: Any = None

    def start(self) -> None:
        """From here on runs are held against each other."""
        self._on, self.turn, self._astray = True, None, None

    def stop(self) -> None:
        """Operators make their own results again; those that were taken down are forgotten."""
        self._on = False
        self._taken.clear()

    @contextlib.contextmanager
    def stock(self) -> Iterator[None]:
        """Around a run of the stock computation."""
        if not self._on:
            yield
        elif self.turn in self._taken:
            with _Dub(self._positions, self._taken[self.turn], self._stray):
                yield
        else:
            taken: dict[int, _Taken] = {}
            with _Take(self._positions, taken):
                yield
            self._taken[self.turn] = taken

    def part(self, places: Mapping[int, int]) -> contextlib.AbstractContextManager[Any]:
        """Around the run of one operator of a class: positions of its calls here -> in the stock computation."""
        if not self._on or self.turn not in self._taken:
            return contextlib.nullcontext()
        return _Dub(places, self._taken[self.turn], self._stray)

    def astray(self) -> str | None:
        """The first operator that was given something else than in the stock run on the same input, since last asked
        for, in words."""
        found, self._astray = self._astray, None
        return found

    def _stray(self, operator: str) -> None:
        self._astray = self._astray or f"what {operator} is given"


class _Take(TorchDispatchMode):
    """Takes down the calls at some positions."""

    def __init__(self, places: Mapping[int, int], taken: dict[int, _Taken]) -> None:
        super().__init__()
        self._places, self._taken, self._at = places, taken, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        position = self._places.get(self._at)
        self._at += 1
        if position is None:
            return func(*args, **kwargs)
        with without_modes():  # what is asked of tensors here is not what the computation asks
            self._given(position, func, tree_leaves((args, kwargs)))
        result = func(*args, **kwargs)
        with without_modes():
            self._made(position, tensors_made(result, tensors_written(func, args, kwargs)))
        return result

    def _given(self, position: int, func: Any, given: list[Any]) -> None:
        self._taken[position] = _Taken([(_lies(value), aside(value)) for value in given], [])

    def _made(self, position: int, made: list[torch.Tensor]) -> None:
        self._taken[position].made = [aside(t) for t in made]


class _Dub(_Take):
    """Compares what the calls are given, and puts what was taken down in the place of what they make."""

    def __init__(self, places: Mapping[int, int], taken: dict[int, _Taken], stray: Callable[[str], None]) -> None:
        super().__init__(places, taken)
        self._stray = stray

    def _given(self, position: int, func: Any, given: list[Any]) -> None:
        right = self._taken[position].given
        same = (
            _lies(value) == lies and _same(value, known) for value, (lies, known) in zip(given, right, strict=False)
        )
        if len(given) != len(right) or not all(same):
            self._stray(str(func))

    def _made(self, position: int, made: list[torch.Tensor]) -> None:
        for target, value in zip(made, self._taken[position].made, strict=True):
            target.copy_(value)


def _lies(value: Any) -> Any:
    """What else may decide which kernel takes a tensor."""
    if not isinstance(value, torch.Tensor) or not is_plain(value):
        return None
    return value.stride(), value.data_ptr() % ALIGNMENT


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return bytes_equal(left, right)
    return type(left) is type(right) and repr(left) == repr(right)


class Cut(Protocol):
    """What a recorder does where a recording is cut: it runs the operator, and gives the memory of its results."""

    def __call__(self, run: Callable[[], Any]) -> Any: ...


class Breaks:
    """The breaks of one way to run a class. `cut` is set while the way is recorded."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.cut: Cut | None = None


class EagerCall(nn.Module):
    """In a graph: a call that is not recorded."""

    def __init__(self, target: Callable[..., Any], places: Mapping[int, int], breaks: Breaks) -> None:
        super().__init__()
        self._target, self._places, self._breaks = target, places, breaks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            with self._breaks.tape.part(self._places):
                return self._target(*args, **kwargs)

        return run() if self._breaks.cut is None else self._breaks.cut(run)


def mark(found: Sequence[Unsteady]) -> Tape:
    """Mark nodes as running eager, so that passes leave them as they are; returns the tape of their results."""
    for each in found:
        each.node.meta[RUNS_EAGER] = each.places
    return Tape([position for each in found for position in each.places.values()])


def describe(node: fx.Node) -> str:
    """`aten.conv_transpose1d.default at File "vocoder.py", line 12, in forward`."""
    where = location(node)
    return f"{node.target} at {where}" if where else str(node.target)


def put_breaks(gm: fx.GraphModule, traced: fx.Graph, tape: Tape) -> Breaks:
    """Make calls that are not recorded of the marked nodes of a rewritten graph.

    Raises:
        NotCapturable: a pass has not left all of them as they were traced.
    """
    marked = [node for node in gm.graph.nodes if RUNS_EAGER in node.meta]
    left = list(map(_identity, marked))
    for node in traced.nodes:
        if RUNS_EAGER in node.meta:
            if _identity(node) not in left:
                raise NotCapturable("not_reproducible", node.name, location(node))
            left.remove(_identity(node))
    if left:
        raise NotCapturable("not_reproducible", str(left[0][0]), None)
    breaks = Breaks(tape)
    for number, node in enumerate(marked):
        gm.add_submodule(f"_eager_{number}", EagerCall(node.target, node.meta[RUNS_EAGER], breaks))  # type: ignore[arg-type]
        with gm.graph.inserting_before(node):
            call = gm.graph.call_module(f"_eager_{number}", node.args, node.kwargs)
        call.meta = node.meta
        node.replace_all_uses_with(call)
        gm.graph.erase_node(node)
    gm.recompile()
    return breaks


def _identity(node: fx.Node) -> tuple[str, list[int]]:
    return str(node.target), sorted(node.meta[RUNS_EAGER].values())


class Step:
    """An operator between two parts of a recording: it runs as in eager, and its results go where the next part reads
    them.

    Args:
        run: the operator, on memory that stays where it is.
        made: what it made while the parts were recorded; what it writes in place is there already.
    """

    def __init__(self, run: Callable[[], Any], made: Any) -> None:
        self._run = run
        self._homes = tensors_made(made, ())

    @property
    def nbytes(self) -> int:
        """Bytes of the results."""
        return sum(home.untyped_storage().nbytes() for home in self._homes)

    def __call__(self) -> None:
        for home, value in zip(self._homes, tensors_made(self._run(), ()), strict=True):
            if value.data_ptr() != home.data_ptr():
                home.copy_(value)
