"""The movement part of a graph, run on element numbers instead of values.

Every element of the old state gets its own number, and so does every element of any value that a moving operator
takes from a computing one. Moving operators then run for real on these numbers, in-place ones included, so views,
aliases and buffers that are written and read back come out right because PyTorch itself carries them out.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.fx as fx

from cadence_fx.passes.constants import Constants
from cadence_fx.passes.graphs import GraphFacts, bound_args, may_write, tensor_val
from cadence_fx.passes.movement import (
    DROPOUTS,
    FACTORIES,
    FILLS,
    IDENTITIES,
    SELECTS,
    SHAPED_LIKE,
    converts_nothing,
    index_arguments,
    is_movement,
)

__all__ = ["FILL", "IdRun", "Leaf", "NotFollowed"]

aten = torch.ops.aten
FILL = 2**31 - 1  # constants, and memory nothing was written to
_TAKE_A_NUMBER = {
    aten.constant_pad_nd.default,
    aten.pad.default,
    aten.index_fill.int_Scalar,
    aten.index_fill_.int_Scalar,
    aten.masked_fill.Scalar,
    aten.masked_fill_.Scalar,
}


class NotFollowed(Exception):
    """The run cannot go on, with the node where it stops."""

    def __init__(self, reason: str, node: fx.Node) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node


@dataclass(frozen=True, slots=True)
class Leaf:
    """A computed value: its elements have the numbers ``first, first + 1, …`` in row-major order."""

    node: fx.Node
    first: int
    shape: tuple[int, ...]
    from_state: bool  # whether it was computed from the old state


class IdRun:
    """Numbers of the elements of ``target`` at the end of the graph, as ``int32``.

    ``0 … n-1`` are the elements of ``old`` in row-major order, then come those of ``leaves``; ``FILL`` is a constant.
    A negative number ``-1 - i`` is an element of which only the call decides what it holds; ``undecided[i]`` is the
    operator that makes it so. ``nodes`` is what ``target`` is made of, in order of execution. Raises ``NotFollowed``.
    """

    def __init__(self, graph: fx.Graph, facts: GraphFacts, constants: Constants, old: fx.Node, target: fx.Node) -> None:
        self.leaves: list[Leaf] = []
        self.undecided: list[fx.Node] = []
        self._facts = facts
        self._constants = constants
        self._old = old
        self._count = tensor_val(old).numel()
        self._next = self._count
        self._from_state = self._reached_from(graph, old)
        self._values: dict[fx.Node, Any] = {}
        self.nodes = self._cone(target)
        self.result = self._run(target)

    def leaf_of(self, number: int) -> Leaf | None:
        """The leaf that holds element ``number``, or None for an element of the old state or a constant."""
        at = bisect_right(self.leaves, number, key=lambda leaf: leaf.first) - 1
        if at < 0 or number >= self.leaves[at].first + prod(self.leaves[at].shape):
            return None
        return self.leaves[at]

    def _reached_from(self, graph: fx.Graph, old: fx.Node) -> set[fx.Node]:
        """Nodes whose values depend on the old state."""
        reached = {old}
        memory: set[fx.Node] = set()
        for node in graph.nodes:
            if any(arg in reached or self._facts.alias_class(arg) in memory for arg in node.all_input_nodes):
                reached.add(node)
                memory |= {self._facts.alias_class(arg) for arg in may_write(node)}
        return reached

    # -- which nodes -----------------------------------------------------------------------------------------------

    def _inputs(self, node: fx.Node) -> list[fx.Node]:
        """The arguments whose numbers are needed to number ``node``."""
        if node.op != "call_function" or node.target in FACTORIES:
            return []
        if node.target in FILLS or node.target in SHAPED_LIKE:
            return [bound_args(node)["self"]]
        if self._places(node) or self._undecided(node):
            return [arg for arg in node.all_input_nodes if arg not in index_arguments(node)]
        same = self._unchanged(node)
        return list(dict.fromkeys([*([same] if same else []), *may_write(node)]))

    def _places(self, node: fx.Node) -> bool:
        return is_movement(node, self._constants)

    def _undecided(self, node: fx.Node) -> bool:
        return node.target in SELECTS and not self._places(node) and converts_nothing(node)

    def _unchanged(self, node: fx.Node) -> fx.Node | None:
        """The argument that ``node`` returns as it is, if it does."""
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor) or may_write(node):
            return None
        for arg in node.all_input_nodes:
            given = arg.meta.get("val")
            if (
                isinstance(given, torch.Tensor)
                and self._facts.same_memory(given, val)
                and (given.dtype, given.shape, given.stride(), given.storage_offset())
                == (val.dtype, val.shape, val.stride(), val.storage_offset())
                and given.is_conj() == val.is_conj()
                and given.is_neg() == val.is_neg()
            ):
                return arg
        return None

    def _cone(self, target: fx.Node) -> list[fx.Node]:
        """What ``target`` is made of, in order of execution, with all writes to any memory involved."""
        pending, cone = [target], set()
        while pending:
            node = pending.pop()
            if node not in cone:
                cone.add(node)
                pending += self._inputs(node)
                pending += self._facts.writes_to(node)
        return sorted(cone, key=self._facts.order.__getitem__)

    # -- the run ---------------------------------------------------------------------------------------------------

    def _run(self, target: fx.Node) -> torch.Tensor:
        cone = self.nodes
        last_use = {arg: node for node in cone for arg in self._inputs(node)}
        dying: dict[fx.Node, list[fx.Node]] = {}
        for arg, user in last_use.items():
            dying.setdefault(user, []).append(arg)
        with torch.no_grad():
            for node in cone:
                try:
                    self._values[node] = self._step(node)
                except (RuntimeError, IndexError, NotImplementedError) as error:
                    raise NotFollowed(f"could not be run on element numbers: {error}", node) from error
                for arg in [*dying.get(node, ()), *([node] if node not in last_use else [])]:
                    if arg is not target:
                        del self._values[arg]
        result: torch.Tensor = self._values.pop(target)
        return result

    def _step(self, node: fx.Node) -> Any:
        if node is self._old:
            return _numbered(tensor_val(node), 0)
        if node.op != "call_function":
            return self._fresh(node, node)
        if node.target in FACTORIES:
            return _laid_out(tensor_val(node)).fill_(FILL)
        if node.target in FILLS:
            return self._values[bound_args(node)["self"]].fill_(FILL)
        if self._places(node):
            return self._move(node)
        if self._undecided(node):
            return self._choose(node)
        same = self._unchanged(node)
        return self._values[same] if same is not None else self._compute(node)

    def _move(self, node: fx.Node) -> Any:
        target: Any = node.target
        if target in DROPOUTS:
            return self._values[node.all_input_nodes[0]]
        if target in IDENTITIES or target in SHAPED_LIKE:
            base, val = bound_args(node)["self"], tensor_val(node)
            value = self._values[base]
            if target in IDENTITIES:
                shared = self._facts.same_memory(tensor_val(base), val)
                return value if shared else _laid_out(val).copy_(value)
            return value.expand(val.shape) if target is aten.expand_as.default else value.reshape(val.shape)
        choices = index_arguments(node)

        def known(arg: fx.Node) -> torch.Tensor | None:
            if arg not in choices:
                value: torch.Tensor = self._values[arg]
                return value
            constant = self._constants.tensor(arg)
            return None if constant is None else constant.cpu()  # numbers are on the host wherever the graph runs

        if target in _TAKE_A_NUMBER:
            return target(**fx.map_arg({**bound_args(node), "value": FILL}, known))
        return target(*fx.map_arg(node.args, known), **fx.map_arg(node.kwargs, known))

    def _choose(self, node: fx.Node) -> torch.Tensor:
        """A choice that only the call can make. It matters if bytes of the old state are among what it chooses from."""
        matters = any(bool((self._values[arg] < self._count).any()) for arg in self._inputs(node))
        if matters:
            self.undecided.append(node)
        written = may_write(node)
        for arg in written:
            self._values[arg].copy_(torch.tensor(-len(self.undecided)) if matters else self._fresh(node, arg))
        if written:
            value: torch.Tensor = self._values[written[0]]
            return value
        return _laid_out(tensor_val(node)).fill_(-len(self.undecided)) if matters else self._fresh(node, node)

    def _compute(self, node: fx.Node) -> torch.Tensor | None:
        written = may_write(node)
        for arg in written:
            self._values[arg].copy_(self._fresh(node, arg))
        for arg in written:
            if self._facts.aliases(arg, node):
                value: torch.Tensor = self._values[arg]
                return value
        if self._facts.writes_to(node) and any(self._facts.aliases(arg, node) for arg in node.all_input_nodes):
            raise NotFollowed("is a view that does not only place bytes, of memory that is written", node)
        return self._fresh(node, node) if isinstance(node.meta.get("val"), torch.Tensor) else None

    def _fresh(self, maker: fx.Node, shaped: fx.Node) -> torch.Tensor:
        """New numbers, in the shape of ``shaped``, for what ``maker`` computes."""
        val = tensor_val(shaped)
        first, self._next = self._next, self._next + val.numel()
        if self._next > FILL:
            raise NotFollowed("brings more elements than can be numbered", maker)
        if val.numel():
            self.leaves.append(Leaf(maker, first, tuple(val.shape), maker in self._from_state))
        return _numbered(val, first)


def _numbered(val: torch.Tensor, first: int) -> torch.Tensor:
    """``first, first + 1, …`` in row-major order, in memory that lies as that of ``val``."""
    numbers = torch.arange(first, first + val.numel(), dtype=torch.int32).view(val.shape)
    return numbers if val.is_contiguous() else _laid_out(val).copy_(numbers)


def _laid_out(val: torch.Tensor) -> torch.Tensor:
    """Memory with the strides of ``val``, so that views of it alias just where views of ``val`` do."""
    if any(stride == 0 and size > 1 for size, stride in zip(val.shape, val.stride(), strict=True)):
        return torch.empty(val.shape, dtype=torch.int32)  # one element in many places cannot hold many numbers
    return torch.empty_strided(val.shape, val.stride(), dtype=torch.int32)
