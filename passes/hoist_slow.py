"""What does not change from call to call is computed once and kept.

Before::

    silu = aten.silu.default(time_embedding)               # computed from constants and weights, in every call
    linear = aten.linear.default(silu, weight, bias)
    chunk = aten.chunk.default(linear, 2, -1)
    add = aten.add.Tensor(chunk[1], 1)
    mul = aten.mul.Tensor(x, add)
    add_1 = aten.add.Tensor(mul, chunk[0])

After::

    _kept_0 = self._kept_0                                 # what ``linear`` gives; filled before the first launch, and
    chunk = aten.chunk.default(_kept_0, 2, -1)             # again when a weight it comes from has been written
    _kept_1 = self._kept_1                                 # what ``add`` gives
    mul = aten.mul.Tensor(x, _kept_1)
    add_1 = aten.add.Tensor(mul, chunk[0])

and `SlowPart`, the graph of what has left, which fills the kept tensors.

Why no byte moves: the part runs the graph's own operators in its order, on the inputs themselves, where and in the mode
in which the graph would; what is kept has the sizes and strides that the graph gave it, and views of it stay views. It
depends on nothing but constants and inputs at fixed addresses whose writes are counted, nothing in the graph writes
it, and it does not leave the graph. The engine fills it anew before a launch that follows a write.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx as fx

from cadence_fx.bytesops import digest
from cadence_fx.passes.base import PassContext, PassResult, SlowPart
from cadence_fx.passes.constants import VARIES, attribute
from cadence_fx.passes.graphs import (
    OpOverload,
    location,
    output_node,
    tensors_in,
)
from cadence_fx.passes.native_clocks import NativeClock, native_clocks, steady_inputs
from cadence_fx.passes.subgraph import ancestors

__all__ = ["HoistSlow"]

# Bytes. A kept value may take `ALWAYS`, or `GROWTH` times the inputs that it is computed from; all of a graph together
# may take `ROOM`, or as much as the inputs. So a weight that is expanded to something huge is expanded in each call.
ALWAYS = 1 << 20
GROWTH = 2
ROOM = 16 << 20


class HoistSlow:
    """Keeps what only constants and weights decide. Nothing that is cheaper to have than to keep: no views."""

    name = "hoist_slow"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        if ctx.keep is None or ctx.slow is not None:
            return PassResult(gm, False)
        frontier = _Frontier(gm, ctx)
        ctx.notes.extend(f"{self.name}: {refusal}" for refusal in frontier.refusals())
        if not frontier.kept:
            return PassResult(gm, False)
        before = _operators(gm.graph)
        ctx.slow = _take_out(gm, ctx, frontier, ctx.keep)
        ctx.notes.append(
            f"{self.name}: {before - _operators(gm.graph)} operators are run once, {len(ctx.slow.residents)} values of "
            f"{len(ctx.slow.inputs)} inputs are kept in {sum(map(_size, ctx.slow.residents))} bytes"
        )
        return PassResult(gm, True)


def _operators(graph: fx.Graph) -> int:
    return sum(node.op == "call_function" and node.target is not operator.getitem for node in graph.nodes)


class _Frontier:
    """Which values to keep: those of a slower clock than the call's that something of the call reads.

    Attributes:
        kept: in the order of the graph.
    """

    def __init__(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        self._graph = gm.graph
        self._facts = ctx.facts_of(gm.graph)
        self._leaving = {self._facts.alias_class(result) for result in output_node(gm.graph).all_input_nodes}
        self._unsteady = ctx.unsteady
        self._clocks = native_clocks(gm, self._facts, steady_inputs(ctx))
        tensors = [t for node in gm.graph.nodes for t in tensors_in(node.meta.get("val"))]
        self._accelerated = any(t.device.type != "cpu" for t in tensors)
        self._inputs = self._trace_inputs()
        self._refused: dict[str, list[fx.Node]] = {}
        self._settled: set[fx.Node] = set()  # everything of the call, and of what is slower all that it reads
        self._values: set[fx.Node] = set()
        self._settle([node for node in gm.graph.nodes if not self.is_slow(node)])
        self._make_room()
        self.kept = [node for node in gm.graph.nodes if node in self._values]

    def is_slow(self, node: fx.Node) -> bool:
        """Whether a value is the same in every call as long as no weight is written."""
        return self._clocks[node] < NativeClock.CALL

    def _trace_inputs(self) -> dict[fx.Node, int]:
        """For each slow value the placeholders that it is computed from, as bits of a number."""
        self._sizes: list[int] = []
        found: dict[fx.Node, int] = {}
        for node in self._graph.nodes:
            if not self.is_slow(node):
                continue
            if node.op == "placeholder":
                found[node] = 1 << len(self._sizes)
                self._sizes.append(_size(node.meta["val"]))
                continue
            found[node] = 0
            for used in node.all_input_nodes:
                found[node] |= found[used]
        return found

    def _size_of_inputs(self, bits: int) -> int:
        total = 0
        while bits:
            lowest = bits & -bits
            total += self._sizes[lowest.bit_length() - 1]
            bits ^= lowest
        return total

    def _settle(self, staying: list[fx.Node]) -> list[fx.Node]:
        """Keep or refuse what the nodes that stay in the graph read; what is refused stays, and so do views.

        Returns what is kept.
        """
        kept = []
        self._settled.update(staying)
        while staying:
            for used in staying.pop().all_input_nodes:
                if used in self._settled:
                    continue
                self._settled.add(used)
                is_view = used.op != "call_function" or self._source(used) is not None
                reason = "" if is_view else self._refusal(used)
                if reason is None:
                    kept.append(used)
                    continue
                if reason:
                    self._refused.setdefault(reason, []).append(used)
                staying.append(used)
        self._values.update(kept)
        return kept

    def _source(self, node: fx.Node) -> fx.Node | None:
        """What ``node`` is a view of. One of several results of an operator is a value of its own."""
        found = next((used for used in node.all_input_nodes if self._facts.aliases(used, node)), None)
        if found is not None and node.target is operator.getitem and self._source(found) is None:
            return None
        return found

    def _refusal(self, node: fx.Node) -> str | None:
        """Why the value of an operator is not kept; empty where nothing would be saved."""
        val = node.meta["val"]
        if not isinstance(val, torch.Tensor) or val.numel() == 0:
            return ""
        if self._accelerated and val.device.type == "cpu":
            return ""  # the host is not there in a launch
        if self._facts.alias_class(node) in self._leaving:
            return "it leaves the graph, and each call needs its own"
        if not _is_dense(val):
            return "its elements do not fill memory of their own"
        limit = max(ALWAYS, GROWTH * self._size_of_inputs(self._inputs[node]))
        if _size(val) > limit:
            return f"it takes more than {limit} bytes"
        return None

    def _make_room(self) -> None:
        """Let the largest values go while all of them together are too large."""
        total = sum(_size(node.meta["val"]) for node in self._values)
        inputs = 0
        for node in self._values:
            inputs |= self._inputs[node]
        room = max(ROOM, self._size_of_inputs(inputs))
        if total <= room:
            return
        order = self._facts.order
        largest = [(-_size(node.meta["val"]), order[node], node) for node in self._values]
        heapq.heapify(largest)
        while total > room:
            _, _, node = heapq.heappop(largest)
            self._values.discard(node)
            self._refused.setdefault(f"all of them take more than {room} bytes", []).append(node)
            total -= _size(node.meta["val"])
            for fresh in self._settle([node]):
                total += _size(fresh.meta["val"])
                heapq.heappush(largest, (-_size(fresh.meta["val"]), order[fresh], fresh))

    def refusals(self) -> Iterator[str]:
        """What is not kept, and why, in words."""
        for reason, nodes in self._refused.items():
            more = f" and {len(nodes) - 1} others" if len(nodes) > 1 else ""
            yield f"{nodes[0].name}{more} not kept, since {reason}{_at(nodes[0])}"
        for node in self._graph.find_nodes(op="placeholder"):
            if node.name in self._unsteady and self._would_be_slow(node):
                yield f"nothing is computed in advance from {node.name}, since {self._unsteady[node.name]}{_at(node)}"

    def _would_be_slow(self, node: fx.Node) -> bool:
        """Whether an operator reads an input, beside other slow values, or through views."""
        pending = list(node.users)
        while pending:
            user = pending.pop()
            others = [used for used in user.all_input_nodes if not self._facts.aliases(used, node)]
            if user.op != "call_function" or not all(map(self.is_slow, others)):
                continue
            if not self._facts.aliases(user, node):
                return True
            pending += user.users
        return False


def _at(node: fx.Node) -> str:
    where = location(node)
    return f" ({where})" if where is not None else ""


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_dense(val: torch.Tensor) -> bool:
    """Whether a tensor is plain numbers that fill memory from its start, in whatever order of axes."""
    if val.layout is not torch.strided or val.is_quantized or val.is_conj() or val.is_neg() or val.storage_offset():
        return False
    following = 1
    for stride, size in sorted(zip(val.stride(), val.shape, strict=True)):
        if size > 1 and stride != following:
            return False
        following *= size
    return True


def _take_out(
    gm: fx.GraphModule, ctx: PassContext, frontier: _Frontier, keep: Callable[[str, torch.Tensor], torch.Tensor]
) -> SlowPart:
    """Put residents in the place of the values, and what computes these in a graph of its own."""
    kept, needed = set(frontier.kept), ancestors(frontier.kept)
    nodes = list(gm.graph.nodes)
    names = _Names(gm, ctx)
    part = fx.Graph()
    copies = {node: part.node_copy(node) for node in nodes if node in needed and node.op == "placeholder"}
    inputs = tuple(node.name for node in copies)
    residents: dict[str, torch.Tensor] = {}  # by attribute
    known: dict[str, str] = {}  # what computes a value -> attribute
    stand_ins: list[tuple[fx.Node, fx.Node]] = []
    for node in nodes:
        is_switch = _is_switch(node)
        if not (is_switch or node in needed):
            continue
        name = names.give(node, is_switch)
        if node.op != "placeholder":
            copies[node] = part.node_copy(node, lambda used: copies[used])
        if node not in kept:
            continue
        with gm.graph.inserting_before(node):
            if name in known:
                stand_in = gm.graph.get_attr(known[name])
            else:
                resident = keep(name, node.meta["val"])
                target = known[name] = f"_kept_{len(residents)}"
                gm.register_buffer(target, resident, persistent=False)
                stand_in = gm.graph.get_attr(target)
                residents[target] = resident
                part.call_function(_fill, (part.get_attr(target), copies[node]))
        # Nothing else has the storage of the traced value, and by it later passes know the views of it.
        stand_in.meta = {**node.meta, VARIES: True}
        stand_ins.append((node, stand_in))
    for node, stand_in in stand_ins:
        node.replace_all_uses_with(stand_in)
    for node in reversed(nodes):
        if node.op in ("call_function", "get_attr") and frontier.is_slow(node) and not node.users:
            gm.graph.erase_node(node)
    part.output(())
    return SlowPart(fx.GraphModule(gm, part), inputs, tuple(residents.values()))


def _fill(resident: torch.Tensor, value: torch.Tensor) -> None:
    """Keep a value. Raises ``ValueError`` where it is not what the graph said it would be."""
    if (value.shape, value.stride(), value.dtype) != (resident.shape, resident.stride(), resident.dtype):
        raise ValueError(f"strides {value.stride()} of a value that was traced with {resident.stride()}")
    resident.copy_(value.detach())


def _is_switch(node: fx.Node) -> bool:
    """Whether a call switches a mode (gradients, autocast), which holds for what both graphs run."""
    return (
        node.op == "call_function" and not isinstance(node.target, OpOverload) and node.target is not operator.getitem
    )


_numbers = itertools.count()


class _Names:
    """A name for every value by what computes it: two values of one name have equal bytes, in whatever graphs."""

    def __init__(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        self._gm = gm
        self._ctx = ctx
        self._mode = ""  # the switches so far
        self._known: dict[fx.Node, str] = {}

    def give(self, node: fx.Node, is_switch: bool) -> str:
        """Name a node; those it uses have names."""
        if node.op == "placeholder":
            what = self._ctx.origins.get(node.name) or f"nobody else's {next(_numbers)}"
        elif node.op == "get_attr":
            value = attribute(self._gm, node)
            what = f"{value.shape} {value.stride()} {value.dtype} {value.device} {digest(value)}"
        else:
            operands = fx.map_arg((node.args, node.kwargs), self._known.__getitem__)
            what = f"{self._mode} {node.target} {operands!r} {_geometry(node.meta.get('val'))}"
        name = self._known[node] = hashlib.sha256(f"{node.op} {what}".encode()).hexdigest()
        if is_switch:
            self._mode = name
        return name


def _geometry(val: Any) -> Any:
    if isinstance(val, torch.Tensor):
        return (*val.shape, val.stride(), val.dtype, val.device)
    return [_geometry(each) for each in val] if isinstance(val, (list, tuple)) else None
