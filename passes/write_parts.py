"""Values are computed where they are concatenated, and what is concatenated in steps is concatenated once.

Before::

    add = aten.add.Tensor(x, y)                            # [2, 50, 512], used by the cat alone
    transpose = aten.transpose.int(add, 1, 2)
    repeat = aten.repeat.default(z, [2, 1, 1])             # one row, twice
    cat = aten.cat.default([cache, transpose], 2)
    cat_1 = aten.cat.default([repeat, w], 1)
    cat_2 = aten.cat.default([cat_1, v], 1)

After::

    empty = aten.empty_strided.default([2, 512, 52], [26624, 52, 1])
    permute = aten.permute.default(empty[:, :, 2:52], [0, 2, 1])
    add = aten.add.out(x, y, out=permute)
    copy_ = aten.copy_.default(empty[:, :, 0:2], cache)    # no longer waits for the sum
    cat_2 = aten.cat.default([aten.expand(z, [2, ...]), w, v], 1)

Why no byte moves: a cat places bytes, so a cat of cats is one cat, and a repeat of a single row is that row read twice.
The ``out=`` of an elementwise operator is the same computation for each element, stored at other strides; ATen's
elementwise kernels compute an element by the same function whatever the strides are. That does not hold on the CPU,
where whole vectors and the rest of a row go by different instructions, so there values are computed as they were. The
result of the cat has the geometry it was traced with, and all of it is written.

Left alone: values that anything else uses, that leave the graph or are written; other operators; results that are made
of more than one part that would have to be copied, or mostly of such a part, since that is no fewer kernels; parts that
are written between; results whose strides would become others; and everything that would be computed in place where
PyTorch fills fresh memory (``torch.utils.deterministic.fill_uninitialized_memory``), which costs a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.fx as fx

from cadence_fx.passes.base import PassContext, PassResult
from cadence_fx.passes.graphs import bound_args, emit, output_node, tensor_val
from cadence_fx.passes.homes import Homes

__all__ = ["WriteParts"]

aten = torch.ops.aten

# Elementwise operators, and the same ones into memory that is given.
_INTO: dict[Any, Any] = {
    aten.add.Tensor: aten.add.out,
    aten.cos.default: aten.cos.out,
    aten.div.Tensor: aten.div.out,
    aten.elu.default: aten.elu.out,
    aten.exp.default: aten.exp.out,
    aten.gelu.default: aten.gelu.out,
    aten.leaky_relu.default: aten.leaky_relu.out,
    aten.mish.default: aten.mish.out,
    aten.mul.Tensor: aten.mul.out,
    aten.neg.default: aten.neg.out,
    aten.relu.default: aten.relu.out,
    aten.sigmoid.default: aten.sigmoid.out,
    aten.silu.default: aten.silu.out,
    aten.sin.default: aten.sin.out,
    aten.sub.Tensor: aten.sub.out,
    aten.tanh.default: aten.tanh.out,
}


@dataclass(frozen=True, slots=True)
class _Producer:
    """What computes a part: ``views``, from the part back to it, turn its dimension ``order[i]`` into ``i``."""

    node: fx.Node
    views: tuple[fx.Node, ...]
    order: tuple[int, ...]


class WriteParts:
    """Visits the cats of a graph, the last ones first, so that a cat of cats takes in all of them."""

    name = "write_parts"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        parts = _Parts(gm.graph, ctx)
        for cat in reversed(gm.graph.find_nodes(op="call_function", target=aten.cat.default)):
            if cat in parts.gone or not _is_plain_cat(cat):
                continue
            parts.flatten(cat)
            parts.broadcast(cat)
            parts.compute_in_place(cat)
        done = [
            f"{count} {what}"
            for count, what in (
                (parts.flattened, "cats are part of another"),
                (parts.broadcasts, "repeats are read as broadcasts"),
                (parts.placed, "values are computed where they are concatenated"),
            )
            if count
        ]
        if done:
            ctx.notes.append(f"{self.name}: {', '.join(done)}")
        return PassResult(gm, bool(done))


class _Parts:
    def __init__(self, graph: fx.Graph, ctx: PassContext) -> None:
        self._graph = graph
        self._facts = ctx.facts_of(graph)
        self._homes = Homes(graph, self._facts, ctx)
        self._results = set(output_node(graph).all_input_nodes)
        self._filled = torch.are_deterministic_algorithms_enabled() and (
            torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        )
        self.gone: set[fx.Node] = set()
        self.flattened = 0
        self.broadcasts = 0
        self.placed = 0

    def flatten(self, cat: fx.Node) -> None:
        """Take in the cats along the same axis that only ``cat`` uses."""
        axis = _axis(cat)
        given = _given(cat)
        at = 0
        while at < len(given):
            inner = given[at]
            nested = inner.target is aten.cat.default and _is_plain_cat(inner) and _axis(inner) == axis
            flat = [*given[:at], *_given(inner), *given[at + 1 :]] if nested else []
            if nested and self._can_go(inner, cat) and _same_result(cat, flat):
                given = flat
                self._give(cat, given)
                self._erase(inner)
                self.flattened += 1
            else:
                at += 1

    def broadcast(self, cat: fx.Node) -> None:
        """Read rows that are repeated for ``cat`` alone from where they are."""
        for at, part in enumerate(_given(cat)):
            if part.target is not aten.repeat.default or not self._can_go(part, cat):
                continue
            (row, repeats), shape = part.args, list(tensor_val(part).shape)
            assert isinstance(row, fx.Node)
            sizes = [1] * (len(shape) - tensor_val(row).dim()) + list(tensor_val(row).shape)
            if any(times != 1 and size != 1 for size, times in zip(sizes, repeats, strict=True)):  # type: ignore[arg-type]
                continue
            with self._graph.inserting_before(cat):
                expand = emit(self._graph, aten.expand.default, row, shape, like=part)
            given = _given(cat)
            given[at] = expand
            if _same_result(cat, given):
                self._give(cat, given)
                self._erase(part)
                self.broadcasts += 1
            else:
                self._graph.erase_node(expand)

    def compute_in_place(self, cat: fx.Node) -> None:
        """Let what computes the parts write into the result, where that is no more kernels."""
        val = tensor_val(cat)
        if self._filled or val.device.type == "cpu":
            return
        given = _given(cat)
        producers = {at: found for at, part in enumerate(given) if (found := self._producer(part, cat)) is not None}
        copied = [part for at, part in enumerate(given) if at not in producers]
        if not producers or len(copied) > 1 or 2 * sum(tensor_val(part).numel() for part in copied) > val.numel():
            return
        first = min((found.node for found in producers.values()), key=self._facts.order.__getitem__)
        with self._graph.inserting_before(first):
            memory = self._graph.call_function(
                aten.empty_strided.default,
                (list(val.shape), list(val.stride())),
                {"dtype": val.dtype, "device": val.device},
            )
        memory.meta.update({**cat.meta, "val": val.new_empty_strided(val.shape, val.stride())})
        axis, start = _axis(cat), 0
        for at, part in enumerate(given):
            stop = start + tensor_val(part).shape[axis]
            before = producers[at].node if at in producers else cat
            with self._graph.inserting_before(before):
                place = emit(self._graph, aten.slice.Tensor, memory, axis, start, stop, like=cat)
                if at in producers:
                    self._compute_into(producers[at], place)
                else:
                    copied_in = self._graph.call_function(aten.copy_.default, (place, part))
                    copied_in.meta.update({**cat.meta, "val": place.meta["val"]})
            start = stop
        cat.replace_all_uses_with(memory)
        self._erase(cat)
        for found in producers.values():
            for node in (*found.views, found.node):
                self._erase(node)
        self.placed += len(producers)

    def _producer(self, part: fx.Node, cat: fx.Node) -> _Producer | None:
        """What computes ``part`` for ``cat`` alone and can as well write it elsewhere."""
        views: list[fx.Node] = []
        order = list(range(tensor_val(part).dim()))
        node = part
        while (turned := _turned(node)) is not None and self._is_used_once(node):
            order = [turned[dim] for dim in order]
            views.append(node)
            (node,) = node.all_input_nodes
        if node.target not in _INTO or _given(cat).count(part) > 1 or not self._is_used_once(node):
            return None
        val, want = tensor_val(node), tensor_val(cat)
        if (val.dtype, val.device) != (want.dtype, want.device) or val.requires_grad or self._facts.writes_to(node):
            return None
        return _Producer(node, tuple(views), tuple(order))

    def _compute_into(self, producer: _Producer, place: fx.Node) -> None:
        node, order = producer.node, producer.order
        if order != tuple(sorted(order)):
            back = [order.index(dim) for dim in range(len(order))]
            place = emit(self._graph, aten.permute.default, place, back, like=node)
        written = self._graph.call_function(_INTO[node.target], node.args, {**node.kwargs, "out": place})
        written.meta.update({**node.meta, "val": place.meta["val"]})

    def _can_go(self, part: fx.Node, cat: fx.Node) -> bool:
        """Whether ``cat`` may read what ``part`` reads instead of ``part``."""
        if not self._is_used_once(part) or _given(cat).count(part) > 1 or self._facts.writes_to(part):
            return False
        start, end = self._facts.order[part], self._facts.order[cat]
        return not any(self._homes.written_between(source, start, end) for source in part.all_input_nodes)

    def _is_used_once(self, node: fx.Node) -> bool:
        return len(node.users) == 1 and node not in self._results and node in self._facts.order

    def _give(self, cat: fx.Node, parts: Sequence[fx.Node]) -> None:
        cat.args = (list(parts), *cat.args[1:])

    def _erase(self, node: fx.Node) -> None:
        self.gone.add(node)
        self._graph.erase_node(node)


def _given(cat: fx.Node) -> list[fx.Node]:
    return list(bound_args(cat)["tensors"])


def _axis(cat: fx.Node) -> int:
    return int(bound_args(cat)["dim"]) % tensor_val(cat).dim()


def _is_plain_cat(cat: fx.Node) -> bool:
    """Whether every part has elements, and the dtype and the rank of the result."""
    want = tensor_val(cat)
    given = [part.meta.get("val") for part in _given(cat)]
    return prod(want.shape) > 0 and all(
        isinstance(val, torch.Tensor)
        and (val.dtype, val.device, val.dim(), val.layout) == (want.dtype, want.device, want.dim(), torch.strided)
        and val.numel() > 0
        and not (val.is_conj() or val.is_neg())
        for val in given
    )


def _same_result(cat: fx.Node, parts: Sequence[fx.Node]) -> bool:
    """Whether the cat of ``parts`` has the geometry of ``cat``."""
    made = aten.cat.default([tensor_val(part) for part in parts], _axis(cat))
    return made.shape == tensor_val(cat).shape and made.stride() == tensor_val(cat).stride()


def _turned(node: fx.Node) -> list[int] | None:
    """Which dimension of its argument each dimension of a permuting view is; None for anything else."""
    if node.target not in (aten.transpose.int, aten.permute.default):
        return None
    values, order = bound_args(node), list(range(tensor_val(node).dim()))
    if node.target is aten.permute.default:
        return [order[dim] for dim in values["dims"]]
    one, other = order[values["dim0"]], order[values["dim1"]]
    order[one], order[other] = other, one
    return order
