"""Operators that run eager in the middle of a class, since they do not repeat their own bytes.

A recording would hold one of their results as good as eager's, but no certificate could say so: eager gives other bytes
each time, and so does everything behind. So such a class is recorded in parts, between which these operators run as in
eager, on every call. And it is held against eager with their results given: what they made in a run of the stock
computation is put in the place of what they make in every other run, stock or class, and what they are given there is
compared (`Tape`). Then the baseline repeats, and the certificate is what it is for any class: all other bytes are
eager's.

PyTorch takes other paths through some composite operators while a mode watches. So modes are on around the nodes that
make such calls alone, and everything else of the stock computation runs as it always does.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx, nn

from cadence_fx._torch import TorchDispatchMode, tree_flatten, without_modes
from cadence_fx.aside import aside
from cadence_fx.bytesops import bytes_equal
from cadence_fx.errors import NotCapturable
from cadence_fx.passes.graphs import RUNS_EAGER, location
from cadence_fx.signature import ALIGNMENT, is_plain
from cadence_fx.unsteady import Place, Unsteady, tensors_made, tensors_written

# Between more parts than this a recording has little left to save: each costs two launches and a copy.
MOST_BREAKS = 32

Places = Mapping[Place, int]  # of calls that do not repeat, among those of one node -> which of them all


@dataclasses.dataclass(slots=True)
class _Taken:
    """One call: what it was given, with how each tensor lies in memory, and what it made."""

    given: list[tuple[Any, Any]]
    spec: Any
    shared: list[int] | None
    made: list[torch.Tensor]


class Tape:
    """The operator calls that do not repeat, as they were in a run of the stock computation.

    Nothing is taken down or put in place but between `start` and `stop`.

    Attributes:
        turn: which input the next runs are on. The first stock run on an input is taken down.
    """

    def __init__(self, found: Sequence[Unsteady]) -> None:
        self.blank = [each.blank for each in found]
        self._places: dict[str, dict[Place, int]] = {}
        for index, each in enumerate(found):
            self._places.setdefault(each.stock.name, {})[each.stock_place] = index
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

    def run(self, stock: fx.GraphModule, args: Sequence[Any]) -> Sequence[Any]:
        """Run the stock graph."""
        if not self._on:
            return stock.forward(*args)  # type: ignore[no-any-return]
        taken = self._taken.get(self.turn)
        if taken is not None:
            known = taken
            return _Stock(stock, self._places, lambda places: _Dub(places, known, self)).run(*args)  # type: ignore[no-any-return]
        new: dict[int, _Taken] = {}
        result = _Stock(stock, self._places, lambda places: _Take(places, new, self)).run(*args)
        self._taken[self.turn] = new
        return result  # type: ignore[no-any-return]

    def part(self, places: Places) -> contextlib.AbstractContextManager[Any]:
        """Around the run of one node of a class."""
        if not self._on or self.turn not in self._taken:
            return contextlib.nullcontext()
        return _Dub(places, self._taken[self.turn], self)

    def astray(self) -> str | None:
        """The first operator that was given something else than in the stock run on the same input, since last asked
        for, in words."""
        found, self._astray = self._astray, None
        return found

    def stray(self, operator: str) -> None:
        """An operator was given something else."""
        self._astray = self._astray or f"what {operator} is given"


class _Stock(fx.Interpreter):
    """Runs the stock graph, with a mode around the nodes that make calls which do not repeat."""

    def __init__(
        self, gm: fx.GraphModule, places: Mapping[str, Places], mode: Callable[[Places], TorchDispatchMode]
    ) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self._places, self._mode = places, mode

    def run_node(self, n: fx.Node) -> Any:
        places = self._places.get(n.name)
        with self._mode(places) if places is not None else contextlib.nullcontext():
            return super().run_node(n)


class _Take(TorchDispatchMode):
    """Takes down the calls at some places among those of a node."""

    def __init__(self, places: Places, taken: dict[int, _Taken], tape: Tape) -> None:
        super().__init__()
        self._places, self._taken, self._tape = places, taken, tape
        self._seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = str(func)
        index = self._places.get((operator, self._seen[operator]))
        self._seen[operator] += 1
        if index is None:
            return func(*args, **kwargs)
        written = tensors_written(func, args, kwargs)
        with without_modes():  # what is asked of tensors here is not what the computation asks
            self._given(index, operator, *tree_flatten((args, kwargs)), bool(written))
        result = func(*args, **kwargs)
        with without_modes():
            self._made(index, tensors_made(result, written))
        return result

    def _given(self, index: int, operator: str, given: list[Any], spec: Any, writes: bool) -> None:
        blank = self._tape.blank[index]
        kept = [(_lies(value), None if i in blank else aside(value)) for i, value in enumerate(given)]
        self._taken[index] = _Taken(kept, spec, _shared(given) if writes else None, [])

    def _made(self, index: int, made: list[torch.Tensor]) -> None:
        self._taken[index].made = [aside(t) for t in made]


class _Dub(_Take):
    """Compares what the calls are given, and puts what was taken down in the place of what they make."""

    def _given(self, index: int, operator: str, given: list[Any], spec: Any, writes: bool) -> None:
        known, blank = self._taken[index], self._tape.blank[index]
        if spec != known.spec or (writes and _shared(given) != known.shared):
            self._tape.stray(operator)
            return
        for i, (value, (lies, right)) in enumerate(zip(given, known.given, strict=True)):
            if _lies(value) != lies or not (i in blank or _same(value, right)):
                self._tape.stray(operator)

    def _made(self, index: int, made: list[torch.Tensor]) -> None:
        for target, value in zip(made, self._taken[index].made, strict=True):
            target.copy_(value)


def _lies(value: Any) -> Any:
    """What else may decide which kernel takes a tensor."""
    if not isinstance(value, torch.Tensor) or not is_plain(value):
        return None
    return value.shape, value.dtype, value.stride(), value.data_ptr() % ALIGNMENT


def _shared(values: Sequence[Any]) -> list[int]:
    """For each value the first one that has the same memory: what is written in one is seen in the other."""
    homes: dict[int, int] = {}
    found = []
    for i, value in enumerate(values):
        is_memory = isinstance(value, torch.Tensor) and is_plain(value) and value.numel()
        found.append(homes.setdefault(value.untyped_storage().data_ptr(), i) if is_memory else i)
    return found


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
    """In a graph: a node that is not recorded."""

    def __init__(self, target: Callable[..., Any], places: Places, breaks: Breaks) -> None:
        super().__init__()
        self._target, self._places, self._breaks = target, places, breaks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            with self._breaks.tape.part(self._places):
                return self._target(*args, **kwargs)

        return run() if self._breaks.cut is None else self._breaks.cut(run)


def mark(found: Sequence[Unsteady]) -> list[fx.Node]:
    """Mark the nodes that make these calls as running eager, so that passes leave them as they are."""
    places: dict[fx.Node, dict[Place, int]] = {}
    for index, each in enumerate(found):
        places.setdefault(each.node, {})[each.place] = index
    for node, theirs in places.items():
        node.meta[RUNS_EAGER] = theirs
    return list(places)


def describe(node: fx.Node) -> str:
    """`aten.conv_transpose1d.default at File "vocoder.py", line 12, in forward`."""
    where = location(node)
    return f"{node.target} at {where}" if where else str(node.target)


def put_breaks(gm: fx.GraphModule, traced: fx.Graph, tape: Tape) -> Breaks:
    """Make calls that are not recorded of the marked nodes of a rewritten graph.

    Raises:
        NotCapturable: a pass has not left all of them, or their order, as they were traced.
    """
    wanted = [node for node in traced.nodes if RUNS_EAGER in node.meta]
    marked = [node for node in gm.graph.nodes if RUNS_EAGER in node.meta]
    if [(n.target, n.meta[RUNS_EAGER]) for n in wanted] != [(n.target, n.meta[RUNS_EAGER]) for n in marked]:
        raise NotCapturable("not_reproducible", wanted[0].name, location(wanted[0]))
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
