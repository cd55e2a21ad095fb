"""Facts of a static aten graph that several passes need: what aliases what, what is written, what may be dropped."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.fx as fx
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = [
    "ALLOCATIONS",
    "KNOWN_NAMESPACES",
    "GraphFacts",
    "OpOverload",
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
]

aten = torch.ops.aten
OpOverload: Any = type(aten.copy_.default)

# Operators whose schema says "alias" for what is an alias only for some shapes, strides or dtypes. Shapes are static
# here, so the traced values know: these alias exactly when their storages are the same.
_ALIASES_BY_VALUE = {
    aten.reshape.default,
    aten.reshape_as.default,
    aten.contiguous.default,
    aten.flatten.using_ints,
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.to.other,
}

# Whose operators do what their schemas say and no more: PyTorch's, and those that passes put into graphs.
KNOWN_NAMESPACES = ("aten", "prims", "cadence_fx")

# Operators that return memory without giving it contents.
ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
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
    values: dict[str, Any] = {}
    for index, argument in enumerate(schema(node).arguments):
        if index < len(node.args):
            values[argument.name] = node.args[index]
        elif argument.name in node.kwargs:
            values[argument.name] = node.kwargs[argument.name]
        else:
            values[argument.name] = argument.default_value if argument.has_default_value() else None
    return values


def may_write(node: fx.Node) -> tuple[fx.Node, ...]:
    """Nodes whose memory the call may write. The schema decides; an unknown callable may write all it is given."""
    if node.op == "call_module" or node.op == "call_method":
        return tuple(node.all_input_nodes)
    if node.op != "call_function" or node.target is operator.getitem:
        return ()
    if not isinstance(node.target, OpOverload):
        return tuple(node.all_input_nodes)
    written: list[fx.Node] = []
    if schema(node).is_mutable and node.target is not aten.detach_.default:  # detach_ changes no byte
        values = bound_args(node)
        for argument in schema(node).arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += _nodes_in(values[argument.name])
    if _statistics(node):  # normalisations update their statistics, and their schemas do not say so
        values = bound_args(node)
        if values.get("training", True) and values.get("use_input_stats", True):
            written += [*_nodes_in(values["running_mean"]), *_nodes_in(values["running_var"])]
    return tuple(written)


def _statistics(node: fx.Node) -> bool:
    return any(argument.name == "running_mean" for argument in schema(node).arguments)


def is_impure(node: fx.Node) -> bool:
    """Whether dropping ``node`` could be observed: it writes memory, draws random numbers, or is not known not to."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "get_attr" or node.target is operator.getitem:
        return False
    if not isinstance(node.target, OpOverload):
        return True
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return True
    if node.target.namespace not in KNOWN_NAMESPACES:
        return True  # an operator of someone else's may have effects that its schema does not tell
    return bool(may_write(node)) or not schema(node).returns


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


def emit(graph: fx.Graph, target: Any, *args: Any, like: fx.Node) -> fx.Node:
    """Append ``target(*args)`` at the insertion point, with its value traced and the origin of ``like``."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda arg: arg.meta["val"]))
    for key in ("stack_trace", "nn_module_stack"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    return node


class GraphFacts:
    """Alias classes and writes of a graph, as it is when the object is made.

    Two nodes are in one class when they may share memory. Storage identity of the traced values decides, joined with
    what the schemas say, so that a value with a lost storage still joins its base.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.order: dict[fx.Node, int] = {node: index for index, node in enumerate(graph.nodes)}
        self._parent: dict[fx.Node, fx.Node] = {}
        by_storage: dict[StorageWeakRef, fx.Node] = {}
        for node in self.order:
            self._parent[node] = node
            for source in _schema_aliases(node):
                self._join(node, source)
            for tensor in tensors_in(node.meta.get("val")):
                self._join(node, by_storage.setdefault(StorageWeakRef(tensor.untyped_storage()), node))
        self.writes: dict[fx.Node, list[fx.Node]] = {}  # class representative -> nodes that may write it, in order
        for node in self.order:
            for rep in dict.fromkeys(self.alias_class(arg) for arg in may_write(node)):
                self.writes.setdefault(rep, []).append(node)

    def alias_class(self, node: fx.Node) -> fx.Node:
        """The representative of the class of ``node``."""
        while self._parent[node] is not node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def writes_to(self, node: fx.Node, after: int = -1, before: int | None = None) -> list[fx.Node]:
        """Nodes that may write the memory of ``node`` at positions ``after < position < before``."""
        end = len(self.order) if before is None else before
        return [w for w in self.writes.get(self.alias_class(node), ()) if after < self.order[w] < end]

    def aliases(self, left: fx.Node, right: fx.Node) -> bool:
        """Whether the two may share memory."""
        return self.alias_class(left) is self.alias_class(right)

    @staticmethod
    def same_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
        """Whether two traced tensors have one storage."""
        return StorageWeakRef(left.untyped_storage()) == StorageWeakRef(right.untyped_storage())

    def _join(self, left: fx.Node, right: fx.Node) -> None:
        self._parent[self.alias_class(left)] = self.alias_class(right)


def live_nodes(graph: fx.Graph, facts: GraphFacts, results: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes that must run for ``results`` and for every effect that can be observed from outside.

    A write on memory that the graph itself made is no effect by itself: it runs if anything of that memory is used.
    """
    outside = {facts.alias_class(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    local: dict[fx.Node, list[fx.Node]] = {}  # memory made in the graph -> writes that matter only with it
    pending = list(results)
    for node in graph.nodes:
        if node.op == "output" or not is_impure(node):
            continue
        written = {facts.alias_class(target) for target in may_write(node)}
        if written and not written & outside and _only_writes(node):
            for rep in written:
                local.setdefault(rep, []).append(node)
        else:
            pending.append(node)
    live: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in live:
            live.add(node)
            pending += node.all_input_nodes
            pending += local.pop(facts.alias_class(node), ())
    return live


def erase_dead_code(graph: fx.Graph) -> int:
    """Erase what ``live_nodes`` does not need for the output; returns how many nodes."""
    live = live_nodes(graph, GraphFacts(graph), [output_node(graph)])
    dead = [node for node in graph.nodes if node not in live]
    for node in reversed(dead):
        graph.erase_node(node)
    return len(dead)


def _only_writes(node: fx.Node) -> bool:
    return (
        isinstance(node.target, OpOverload)
        and node.target.namespace == "aten"
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )


def _schema_aliases(node: fx.Node) -> Iterator[fx.Node]:
    if node.op != "call_function":
        return
    if node.target is operator.getitem:
        yield node.args[0]  # type: ignore[misc]
        return
    if not isinstance(node.target, OpOverload):
        yield from node.all_input_nodes
        return
    if node.target in _ALIASES_BY_VALUE and isinstance(node.meta.get("val"), torch.Tensor):
        return
    if torch.Tag.maybe_aliasing_or_mutating in node.target.tags and not _statistics(node):
        # Dropout outside training returns its input, and its traced value does not show it.
        yield from node.all_input_nodes
        return
    if all(returned.alias_info is None for returned in schema(node).returns):
        return
    values = bound_args(node)
    for argument in schema(node).arguments:
        if argument.alias_info is not None:
            yield from _nodes_in(values[argument.name])


def _nodes_in(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nodes_in(item)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a traced value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
