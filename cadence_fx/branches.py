"""A graph on several branches of a device: which stream each node runs on, and what it waits for there.

The plan is the passes' (`Branches`); this carries it out. Branch 0 is the stream on which the run begins, the others
are side streams that are forked from it and joined to it again, so that a capture on the first takes in all of them.

A plan relies on the traced geometry: what is a view, what may share memory, which bytes of it meet. So the first run of
a graph goes in one row and compares; where something differs, the graph stays in one row. A recording is made in a
later run, after one on branches that was not recorded, so that what libraries keep for each stream exists by then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from cadence_fx.ledger import log
from cadence_fx.passes import Branches
from cadence_fx.recorder import DevicePool


class Streams(Protocol):
    """The branches of one run."""

    def on(self, branch: int) -> contextlib.AbstractContextManager[Any]:
        """What is launched inside goes to this branch, and memory that is allocated belongs to it."""

    def mark(self, branch: int) -> Any:
        """All that has been launched on a branch so far."""

    def wait(self, branch: int, mark: Any) -> None:
        """Let what is launched on a branch from now on come after what has been marked."""


class CudaStreams:
    """Branch 0 is the current stream; the others are the device's side streams."""

    def __init__(self, device: torch.device, count: int) -> None:
        pool = DevicePool.of(device)
        self._streams = [torch.cuda.current_stream(device), *(pool.side(i) for i in range(count - 1))]

    def on(self, branch: int) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._streams[branch]) if branch else contextlib.nullcontext()

    def mark(self, branch: int) -> torch.cuda.Event:
        return self._streams[branch].record_event()  # type: ignore[no-any-return]

    def wait(self, branch: int, mark: torch.cuda.Event) -> None:
        self._streams[branch].wait_event(mark)


def on_branches(
    gm: fx.GraphModule, plan: Branches | None, device: torch.device, note: Callable[[str], None]
) -> BranchedForward | None:
    """The graph on branches, where there is a plan and a device that has them."""
    if plan is None or device.type != "cuda":
        return None
    return BranchedForward(gm, plan, lambda: CudaStreams(device, plan.count), note)


class BranchedForward:
    """Runs a graph as planned. `begin()` gives the streams of one run; `note()` takes why the plan is not followed."""

    def __init__(
        self, gm: fx.GraphModule, plan: Branches, begin: Callable[[], Streams], note: Callable[[str], None]
    ) -> None:
        self._gm = gm
        self._plan = plan
        self._begin = begin
        self._note = note
        self.count = plan.count
        self._placeholders = gm.graph.find_nodes(op="placeholder")
        (self._results,) = gm.graph.output_node().args
        waited = [wait for step in plan.steps for wait in step.waits]
        self._marked = {*waited, *plan.joins}
        self._looked = False
        self.one_row: str | None = None  # why the plan is not followed

    def __call__(self, *args: Any) -> Sequence[Any]:
        if not self._looked:
            self._looked = True
            return self._look(args)
        if self.one_row is not None:
            return self._gm.forward(*args)  # type: ignore[no-any-return]
        return self._run(args)

    def _run(self, args: Sequence[Any]) -> Sequence[Any]:
        plan, streams = self._plan, self._begin()
        values: dict[fx.Node, Any] = dict(zip(self._placeholders, args, strict=True))
        marks: dict[fx.Node | None, Any] = {None: streams.mark(0)} if None in self._marked else {}
        begun: set[int] = set()
        try:
            for step in plan.steps:
                begun.add(step.branch)
                for wait in step.waits:
                    streams.wait(step.branch, marks[wait])
                for dropped in step.drops:
                    del values[dropped]
                with streams.on(step.branch):
                    values[step.node] = _call(self._gm, step.node, values)
                if step.node in self._marked:
                    marks[step.node] = streams.mark(step.branch)
            for join in plan.joins:
                streams.wait(0, marks[join])
        except BaseException:
            # A capture ends, and memory is used again, only after what was begun on other streams.
            for branch in begun - {0}:
                with contextlib.suppress(RuntimeError):
                    streams.wait(0, streams.mark(branch))
            raise
        return fx.map_arg(self._results, values.__getitem__)  # type: ignore[no-any-return,arg-type]

    def _look(self, args: Sequence[Any]) -> Sequence[Any]:
        """A run in one row that compares what the plan relies on with what is there."""
        values: dict[fx.Node, Any] = dict(zip(self._placeholders, args, strict=True))
        last = {node: user for user in self._gm.graph.nodes for node in user.all_input_nodes}
        inputs = {node: values[node] for node in self._placeholders}
        for step in self._plan.steps:
            node = step.node
            values[node] = _call(self._gm, node, values)
            if node.op == "get_attr":
                inputs[node] = values[node]
            if self.one_row is None:
                self._compare(node, values)
            for used in (node, *node.all_input_nodes):
                if last.get(used, node) is node and used not in inputs:
                    del values[used]
        for node in inputs:
            if self._plan.owners[node] in self._plan.written and not self._is_traced(node, inputs):
                self.one_row = f"{node.name} has another geometry than it was traced with"
        self._meet(inputs)
        if self.one_row is not None:
            self._note(f"one branch after all: {self.one_row}")
            log.warning("a graph that was planned on branches runs in one row: %s", self.one_row)
        return fx.map_arg(self._results, values.__getitem__)  # type: ignore[no-any-return,arg-type]

    def _compare(self, node: fx.Node, values: dict[fx.Node, Any]) -> None:
        plan = self._plan
        given = [(a, t) for a in node.all_input_nodes for t, _ in _pairs(values[a], a.meta.get("val"))]
        for made, _ in _pairs(values[node], node.meta.get("val")):
            home = made.untyped_storage().data_ptr()
            owners = {plan.owners[a] for a, t in given if t.untyped_storage().data_ptr() == home}
            if made.numel() and node in plan.views and plan.owners[node] not in owners:
                self.one_row = f"{node.name} makes a value, and was traced as a view"
            if made.numel() and owners and plan.owners[node] not in owners:
                self.one_row = f"{node.name} is a view, and was traced as a new value"
        if plan.owners[node] in plan.written and not self._is_traced(node, values):
            self.one_row = f"{node.name} has another geometry than it was traced with"

    def _is_traced(self, node: fx.Node, values: dict[fx.Node, Any]) -> bool:
        """Whether a value lies where it was traced to. Which calls meet in memory that is written depends on that."""
        pairs = [pair for pair in _pairs(values[node], node.meta.get("val")) if pair[0].numel()]
        if any(_steps(made) != _steps(traced) for made, traced in pairs):
            return False
        bases = [pair for a in node.all_input_nodes for pair in _pairs(values[a], a.meta.get("val"))]
        return node not in self._plan.views or all(
            any(_offset(made, base) == _traced_offset(traced, seen) for base, seen in bases) for made, traced in pairs
        )

    def _meet(self, inputs: dict[fx.Node, Any]) -> None:
        """Whether two inputs that were taken for two memories are one, and it is written."""
        plan = self._plan
        spans = sorted(
            (t.data_ptr(), t.data_ptr() + _span(t), i, plan.owners[node])
            for i, (node, value) in enumerate(inputs.items())
            for t in ([value] if isinstance(value, torch.Tensor) and value.numel() else [])
            if t.layout is torch.strided
        )
        nodes = list(inputs)
        open_spans: list[tuple[int, int, fx.Node]] = []
        for first, end, i, owner in spans:
            open_spans = [span for span in open_spans if span[0] > first]
            for _, other, whose in open_spans:
                if whose is not owner and (owner in plan.written or whose in plan.written):
                    self.one_row = f"{nodes[i].name} shares memory with {nodes[other].name}"
            open_spans.append((end, i, owner))


def _call(gm: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        value: Any = gm
        for name in str(node.target).split("."):
            value = getattr(value, name)
        return value
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _pairs(value: Any, traced: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tensors with their traced ones."""
    if isinstance(value, torch.Tensor) and isinstance(traced, torch.Tensor):
        yield value, traced
    elif isinstance(value, (list, tuple)) and isinstance(traced, (list, tuple)):
        for one, other in zip(value, traced, strict=False):
            yield from _pairs(one, other)


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Sizes and strides, as far as they say where elements are."""
    return [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _offset(made: torch.Tensor, base: torch.Tensor) -> int | None:
    """Bytes from where a tensor begins to where a view of it does; None if it is none."""
    if made.untyped_storage().data_ptr() != base.untyped_storage().data_ptr():
        return None
    return made.data_ptr() - base.data_ptr()


def _traced_offset(traced: torch.Tensor, seen: torch.Tensor) -> int:
    return int(traced.storage_offset()) * traced.element_size() - int(seen.storage_offset()) * seen.element_size()


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()
