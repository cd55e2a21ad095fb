"""Facts of a static aten graph that several passes need: what aliases what, what is written, what may be dropped."""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

import torch
import torch.fx as fx

from cadence_fx._torch import storage_identity, traced_view
from cadence_fx.passes.operators import KNOWN_NAMESPACES, OpOverload, Place, operator_of

__all__ = [
    "ALLOCATIONS",
    "MEMORY_OF",
    "RUNS_EAGER",
    "KNOWN_NAMESPACES",
    "GraphFacts",
    "Liveness",
    "OpOverload",
    "SharedFacts",
    "add_tensor",
    "bound_args",
    "emit",
    "erase_dead_code",
    "is_impure",
    "live_nodes",
    "location",
    "may_write",
    "output_node",
    "schema",
    "tensor_val",
    "tensors_in",
    "trace_again",
]

aten = torch.ops.aten
# In the meta of a node that is not recorded, since it does not repeat its bytes: the engine's. Passes leave it alone.
RUNS_EAGER = "cadence_runs_eager"
MEMORY_OF = "cadence_memory_of"  # in the meta of a placeholder: the name of another one, in whose memory it lies

# Operators that return memory without giving it contents.
ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_permuted.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}

# Operators that give one view of their first argument, or, for `reshape`, a copy where there is none.
_VIEWS = {
    aten.as_strided.default,
    aten.expand.default,
    aten.permute.default,
    aten.reshape.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
}


def output_node(graph: fx.Graph) -> fx.Node:
    """The output node, whose ``args[0]`` is the flat list of what the graph returns."""
    return next(iter(reversed(graph.nodes)))


def tensor_val(node: fx.Node) -> torch.Tensor:
    """The traced tensor of ``node``. Raises ``ValueError`` when the node does not hold exactly one tensor."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        raise ValueError(f"node {node.name!r} holds {type(val).__name__}, where one tensor was expected")
    return val


def location(node: fx.Node) -> str | None:
    """The innermost line of user code that made ``node`` (``file:line``-like text), or None when it was not kept."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    frames = [line for line in lines if line.startswith("File ")]
    return frames[-1] if frames else None


def schema(node: fx.Node) -> Any:
    """The schema of an aten node."""
    target: Any = node.target
    return target._schema


def bound_args(node: fx.Node) -> dict[str, Any]:
    """Arguments of an aten node by schema name, defaults filled in."""
    defaults = operator_of(node.target).defaults
    found = dict(defaults)
    found.update(zip(defaults, node.args, strict=False))
    for name, value in node.kwargs.items():
        if name in defaults:
            found[name] = value
    return found


def may_write(node: fx.Node) -> tuple[fx.Node, ...]:
    """Nodes whose memory the call may write. The schema decides; an unknown callable may write all it is given."""
    if node.op == "call_module" or node.op == "call_method":
        return tuple(node.all_input_nodes)
    if node.op != "call_function" or node.target is operator.getitem:
        return ()
    if not isinstance(node.target, OpOverload):
        return tuple(node.all_input_nodes)
    known = operator_of(node.target)
    if not known.written and not known.has_statistics:
        return ()
    written = _given(node, known.written)
    if known.has_statistics:
        values = bound_args(node)
        if values.get("training", True) and values.get("use_input_stats", True):
            written += [*_nodes_in(values["running_mean"]), *_nodes_in(values["running_var"])]
    return tuple(written)


def is_impure(node: fx.Node) -> bool:
    """Whether dropping ``node``, or making it once instead of twice, could be observed: it writes memory, draws random
    numbers, does not repeat its bytes, or is not known not to."""
    if node.op in ("placeholder", "output") or RUNS_EAGER in node.meta:
        return True
    if node.op == "get_attr" or node.target is operator.getitem:
        return False
    if not isinstance(node.target, OpOverload):
        return True
    return operator_of(node.target).has_effect or bool(may_write(node))


def add_tensor(gm: fx.GraphModule, prefix: str, value: torch.Tensor, like: torch.Tensor) -> fx.Node:
    """A node at the insertion point for a tensor that is put on the graph module.

    ``like`` is a traced tensor of its geometry.
    """
    number = 0
    while hasattr(gm, f"{prefix}{number}"):
        number += 1
    gm.register_buffer(f"{prefix}{number}", value, persistent=False)
    node = gm.graph.get_attr(f"{prefix}{number}")
    # The traced value stands for the tensor in later passes, which compare storages; a shared one would alias.
    node.meta["val"] = torch.empty_like(like, device=value.device)
    return node


def emit(graph: fx.Graph, target: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
    """Append a call of ``target`` at the insertion point, with its value traced and the origin of ``like``."""
    node = graph.call_function(target, args, kwargs)
    trace_again(node)
    for key in ("stack_trace", "nn_module_stack"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    return node


def trace_again(node: fx.Node) -> None:
    """The traced value of a node follows what it is made of now: later passes tell aliases by it."""
    target: Any = node.target
    base = node.args[0] if node.args else None
    if target in _VIEWS and isinstance(base, fx.Node) and node.all_input_nodes == [base]:
        node.meta["val"] = traced_view(target, base.meta["val"], *node.args[1:], **node.kwargs)
        return
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    node.meta["val"] = target(*args, **kwargs)


class GraphFacts:
    """Alias classes and writes of a graph, as it is when the object is made.

    Two nodes are in one class when they may share memory. Storage identity of the traced values decides, joined with
    what the schemas say, so that a value with a lost storage still joins its base.

    Attributes:
        order: node -> its position.
        storages: node -> the identities of the storages of its tensors, in order.
        writes: representative of a class -> nodes that may write it, in order.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.order: dict[fx.Node, int] = {node: index for index, node in enumerate(graph.nodes)}
        self._parent: dict[fx.Node, fx.Node] = {}
        by_name: dict[str, fx.Node] = {}
        by_storage: dict[int, fx.Node] = {}  # the traced values live as long as the graph, and so do their storages
        self.storages: dict[fx.Node, tuple[int, ...]] = {}
        writing: list[tuple[fx.Node, tuple[fx.Node, ...]]] = []
        for node in self.order:
            self._parent[node] = node
            if node.op == "placeholder":
                by_name[node.name] = node
                if node.meta.get(MEMORY_OF) in by_name:
                    self._join(node, by_name[node.meta[MEMORY_OF]])
            for source in _schema_aliases(node):
                self._join(node, source)
            self.storages[node] = mine = tuple(map(storage_identity, tensors_in(node.meta.get("val"))))
            for storage in mine:
                first = by_storage.setdefault(storage, node)
                if first is not node:
                    self._join(node, first)
            if written := may_write(node):
                writing.append((node, written))
        self.writes: dict[fx.Node, list[fx.Node]] = {}
        self._positions: dict[fx.Node, list[int]] = {}  # of the nodes in `writes`
        for node, written in writing:
            for rep in dict.fromkeys(map(self.alias_class, written)):
                self.writes.setdefault(rep, []).append(node)
                self._positions.setdefault(rep, []).append(self.order[node])

    def alias_class(self, node: fx.Node) -> fx.Node:
        """The representative of the class of ``node``."""
        parents = self._parent
        while (parent := parents[node]) is not node:
            parents[node] = node = parents[parent]
        return node

    def writes_to(self, node: fx.Node, after: int = -1, before: int | None = None) -> list[fx.Node]:
        """Nodes that may write the memory of ``node`` at positions ``after < position < before``."""
        rep = self.alias_class(node)
        positions = self._positions.get(rep)
        if positions is None:
            return []
        end = len(positions) if before is None else bisect_left(positions, before)
        return self.writes[rep][bisect_right(positions, after) : end]

    def aliases(self, left: fx.Node, right: fx.Node) -> bool:
        """Whether the two may share memory."""
        return self.alias_class(left) is self.alias_class(right)

    @staticmethod
    def same_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
        """Whether two traced tensors have one storage."""
        return storage_identity(left) == storage_identity(right)

    def _join(self, left: fx.Node, right: fx.Node) -> None:
        self._parent[self.alias_class(left)] = self.alias_class(right)


class SharedFacts:
    """Facts of the graph at hand, for passes that run one after another: made when the first of them asks, and kept
    until one has changed the graph."""

    def __init__(self) -> None:
        self._found: tuple[fx.Graph, GraphFacts] | None = None

    def of(self, graph: fx.Graph) -> GraphFacts:
        if self._found is None or self._found[0] is not graph:
            self._found = graph, GraphFacts(graph)
        return self._found[1]

    def forget(self) -> None:
        self._found = None


class Liveness:
    """What must run: for results, and for every effect that can be observed from outside.

    A write on memory that the graph itself made, or that means nothing between calls, is no effect by itself: it runs
    if anything of that memory is used.

    Args:
        scratch: names of placeholders whose memory means nothing between calls.

    Attributes:
        roots: nodes that run whatever the results are; all placeholders but scratch among them.
    """

    def __init__(self, graph: fx.Graph, facts: GraphFacts, scratch: frozenset[str] = frozenset()) -> None:
        self._facts = facts
        outside = {
            facts.alias_class(node)
            for node in graph.nodes
            if node.op == "get_attr" or (node.op == "placeholder" and node.name not in scratch)
        }
        self._local: dict[fx.Node, list[fx.Node]] = {}  # such memory -> writes that matter only with it
        self.roots: list[fx.Node] = []
        for node in graph.nodes:
            if node.op == "output" or not is_impure(node) or (node.op == "placeholder" and node.name in scratch):
                continue
            written = {facts.alias_class(target) for target in may_write(node)}
            if written and not written & outside and _only_writes(node):
                for rep in written:
                    self._local.setdefault(rep, []).append(node)
            else:
                self.roots.append(node)

    def needed(self, results: Iterable[fx.Node], known: Set[fx.Node] = frozenset()) -> set[fx.Node]:
        """Nodes that must run for ``results``, without those that ``known`` holds and what only they need."""
        found: set[fx.Node] = set()
        touched: set[fx.Node] = set()
        pending = list(results)
        while pending:
            node = pending.pop()
            if node in found or node in known:
                continue
            found.add(node)
            pending += node.all_input_nodes
            rep = self._facts.alias_class(node)
            if rep not in touched:
                touched.add(rep)
                pending += self._local.get(rep, ())
        return found


def live_nodes(
    graph: fx.Graph, facts: GraphFacts, results: Iterable[fx.Node], scratch: frozenset[str] = frozenset()
) -> set[fx.Node]:
    """Nodes that must run for ``results`` and for every effect that can be observed from outside (see ``Liveness``)."""
    liveness = Liveness(graph, facts, scratch)
    return liveness.needed([*liveness.roots, *results])


def erase_dead_code(graph: fx.Graph, scratch: frozenset[str] = frozenset()) -> int:
    """Erase what ``live_nodes`` does not need for the output; returns how many nodes. Placeholders stay."""
    live = live_nodes(graph, GraphFacts(graph), [output_node(graph)], scratch)
    dead = [node for node in graph.nodes if node not in live and node.op != "placeholder"]
    for node in reversed(dead):
        graph.erase_node(node)
    return len(dead)


def _only_writes(node: fx.Node) -> bool:
    return (
        isinstance(node.target, OpOverload)
        and node.target.namespace == "aten"
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )


def _schema_aliases(node: fx.Node) -> Sequence[fx.Node]:
    if node.op != "call_function":
        return ()
    if node.target is operator.getitem:
        return (node.args[0],)  # type: ignore[return-value]
    if not isinstance(node.target, OpOverload):
        return node.all_input_nodes
    known = operator_of(node.target)
    if known.by_value and isinstance(node.meta.get("val"), torch.Tensor):
        return ()
    if known.may_return_input:  # dropout outside training
        return node.all_input_nodes
    return _given(node, known.aliased)


def _given(node: fx.Node, places: Sequence[Place]) -> list[fx.Node]:
    """The nodes that a call is given as the arguments at ``places``."""
    found: list[fx.Node] = []
    if places:
        args = node.args
        for at, name in places:
            found += _nodes_in(args[at] if at < len(args) else node.kwargs.get(name))
    return found


def _nodes_in(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nodes_in(item)


def tensors_in(value: Any) -> Sequence[torch.Tensor]:
    """The tensors in a traced value."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return ()
