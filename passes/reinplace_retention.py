"""The state a graph returns becomes writes on the storage of the state (paper section 5).

Before::

    def forward(self, x, cache):
        cat = aten.cat([cache, x], 1)          # keep the last 8 of 10
        state = aten.slice(cat, 1, 2, None)
        return [..., state]

After, with ``cache`` and ``carry_0`` at one address::

    def forward(self, x, cache, carry_0):
        ...
        carry_0[:, 0:2].copy_(cache[:, 2:4])   # steps of the distance moved, oldest first
        carry_0[:, 2:4].copy_(cache[:, 4:6])
        carry_0[:, 4:6].copy_(cache[:, 6:8])
        carry_0[:, 6:8].copy_(x)
        return [..., carry_0]

Why no byte moves: the returned value is followed only through operators that place bytes (``resolve``), every write is
``copy_`` between equal dtypes or ``fill_`` with the number the graph itself fills with, every write stands after every
other operator of the graph, and their order keeps each source until it is read (``moves``). What cannot be followed is
copied whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from cadence_fx.passes.base import PassContext, PassResult, RegionSlot
from cadence_fx.passes.constants import Constants
from cadence_fx.passes.graphs import GraphFacts, emit, erase_dead_code, live_nodes, output_node, tensor_val
from cadence_fx.passes.moves import Geometry, Move, schedule
from cadence_fx.passes.pieces import Fill, Piece, Source, merge, whole
from cadence_fx.passes.resolve import Resolver

__all__ = ["ReinplaceRetention"]

aten = torch.ops.aten
_MOST_WRITES = 16  # a value in more pieces than this is written whole


@dataclass(frozen=True, slots=True)
class _Site:
    """A slot that is rewritten, with the nodes that stand for it."""

    at: int  # index in the regions of the context
    slot: RegionSlot
    output: int
    old: fx.Node
    value: fx.Node
    geometry: Geometry


class ReinplaceRetention:
    """Appends a destination placeholder for each returned state and ends the graph with writes into it."""

    name = "reinplace_retention"

    def requires(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        """Each slot names a placeholder and an output that one contiguous storage can hold. Else ``ValueError``."""
        sites = _sites(gm.graph, ctx)
        for site in sites:
            old, new = tensor_val(site.old), tensor_val(site.value)
            if (old.dtype, old.device) != (new.dtype, new.device):
                raise ValueError(
                    f"state {site.slot.instance!r} comes in as {old.dtype} on {old.device} and goes out as "
                    f"{new.dtype} on {new.device}; one storage cannot hold both"
                )
            if not old.is_contiguous():
                raise ValueError(f"state {site.slot.instance!r} was traced with strides {old.stride()}, not contiguous")
            if new.layout != torch.strided or new.is_conj() or new.is_neg():
                raise ValueError(f"state {site.slot.instance!r} is not a plain strided tensor")
        if len({site.old for site in sites}) != len(sites):
            raise ValueError("two states share one placeholder")

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        graph = gm.graph
        sites = _sites(graph, ctx)
        if not sites:
            return PassResult(gm, False)
        facts = GraphFacts(graph)
        moves, reread = _moves(gm, facts, sites)
        ordered = schedule(moves, [site.geometry for site in sites])
        destinations = _add_destinations(graph, sites)
        out = output_node(graph)
        with graph.inserting_before(out):
            results = _privatised(graph, facts, sites, list(out.args[0]))  # type: ignore[arg-type]
            _write(graph, ordered, sites, destinations)
        for site, destination in zip(sites, destinations, strict=True):
            results[site.output] = destination
        out.args = (tuple(results) if isinstance(out.args[0], tuple) else results,)
        erased = erase_dead_code(graph)
        regions = list(ctx.regions)
        for which, (site, destination) in enumerate(zip(sites, destinations, strict=True)):
            regions[site.at] = replace(site.slot, destination=destination.name)
            mine = [move for move in ordered if move.into == which]
            scratch = sum(move.piece.numel for move in mine if move.scratch) * tensor_val(site.old).element_size()
            how = "read from a value the graph needs anyway" if which in reread else f"{scratch} bytes of scratch"
            ctx.notes.append(f"{self.name}: {site.slot.instance}: {len(mine)} writes, {how}")
        ctx.notes.append(f"{self.name}: {erased} operators are no longer needed")
        ctx.regions = tuple(regions)
        return PassResult(gm, True)

    def ensures(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        """Every returned state is its destination placeholder. Raises ``ValueError`` otherwise."""
        results = output_node(gm.graph).args[0]
        for slot in ctx.regions:
            if slot.output is not None and getattr(results[slot.output], "name", None) != slot.destination:  # type: ignore[index,union-attr]
                raise ValueError(f"state {slot.instance!r} is not returned in its destination {slot.destination!r}")


def _sites(graph: fx.Graph, ctx: PassContext) -> list[_Site]:
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    results = output_node(graph).args[0]
    sites = []
    for at, slot in enumerate(ctx.regions):
        if slot.output is None or slot.destination is not None:
            continue
        if slot.placeholder not in placeholders:
            raise ValueError(f"state {slot.instance!r} names placeholder {slot.placeholder!r}, which is not there")
        if not slot.output < len(results):  # type: ignore[arg-type]
            raise ValueError(f"state {slot.instance!r} names output {slot.output} of {len(results)}")  # type: ignore[arg-type]
        old, value = placeholders[slot.placeholder], results[slot.output]  # type: ignore[index]
        if not isinstance(value, fx.Node):
            raise ValueError(f"state {slot.instance!r} names output {slot.output}, which is {value!r} and no tensor")
        geometry = Geometry(slot.axis, tuple(tensor_val(old).shape), tuple(tensor_val(value).shape))
        sites.append(_Site(at, slot, slot.output, old, value, geometry))
    return sites


def _moves(gm: fx.GraphModule, facts: GraphFacts, sites: list[_Site]) -> tuple[list[Move], set[int]]:
    """The writes of all slots, unordered, and the slots whose retained frames are read from elsewhere."""
    carry = {facts.alias_class(site.old): which for which, site in enumerate(sites)}
    states = {site.output for site in sites}
    others = [r for i, r in enumerate(output_node(gm.graph).args[0]) if i not in states and isinstance(r, fx.Node)]  # type: ignore[arg-type]
    needed = live_nodes(gm.graph, facts, others)
    free = {node for node in needed if facts.alias_class(node) not in carry}
    resolver = Resolver(facts, Constants(gm, facts), free)
    moves: list[Move] = []
    reread = set()
    for into, site in enumerate(sites):
        pieces = resolver.at_end(site.value)
        if len(pieces) > _MOST_WRITES:
            pieces = whole(site.value, tensor_val(site.value).shape)
        mine = [_move(into, piece, facts, carry, sites) for piece in pieces]
        if any(m.reads is not None and m.piece.instead and not m.stays(site.geometry) for m in mine):
            # Frames that move would overlap themselves; another value holds the same bytes in other memory. All that
            # it holds is read from it, in as few copies as possible.
            reread.add(into)
            pieces = merge(
                [
                    replace(m.piece, source=m.piece.instead, instead=None)
                    if m.piece.instead and not m.stays(site.geometry)
                    else m.piece
                    for m in mine
                ]
            )
            mine = [_move(into, piece, facts, carry, sites) for piece in pieces]
        moves += mine
    return moves, reread


def _move(into: int, piece: Piece, facts: GraphFacts, carry: dict[fx.Node, int], sites: list[_Site]) -> Move:
    reads = carry.get(facts.alias_class(piece.source.node)) if isinstance(piece.source, Source) else None
    direct = reads is not None and isinstance(piece.source, Source) and piece.source.node is sites[reads].old
    return Move(into, piece, reads, direct)


def _add_destinations(graph: fx.Graph, sites: list[_Site]) -> list[fx.Node]:
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    destinations = []
    for site in sites:
        with graph.inserting_after(last):
            last = graph.placeholder(f"carry_{site.at}")
        val = tensor_val(site.value)
        last.meta["val"] = val.new_empty(val.shape)
        destinations.append(last)
    return destinations


def _privatised(
    graph: fx.Graph, facts: GraphFacts, sites: list[_Site], results: list[fx.node.Argument]
) -> list[fx.node.Argument]:
    """Results with those that share memory with a carry copied out of it, since the writes to come change it."""
    carries = {facts.alias_class(site.old) for site in sites}
    states = {site.output for site in sites}
    copies: dict[fx.Node, fx.Node] = {}
    for index, result in enumerate(results):
        if index in states or not isinstance(result, fx.Node) or facts.alias_class(result) not in carries:
            continue
        if result not in copies:
            copies[result] = _copy_like(graph, result)
        results[index] = copies[result]
    return results


def _copy_like(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A copy of ``node`` with its strides, where memory with those strides can be written at all."""
    val = tensor_val(node)
    overlapping = any(stride == 0 and size > 1 for size, stride in zip(val.shape, val.stride(), strict=True))
    if overlapping or torch.empty_like(val).stride() == val.stride():
        return emit(graph, aten.clone.default, node, like=node)
    copy = emit(graph, aten.new_empty_strided.default, node, list(val.shape), list(val.stride()), like=node)
    emit(graph, aten.copy_.default, copy, node, like=node)
    return copy


def _write(graph: fx.Graph, moves: list[Move], sites: list[_Site], destinations: list[fx.Node]) -> None:
    scratch = {}
    for move in moves:
        if move.scratch:
            like = sites[move.into].value
            scratch[id(move)] = emit(graph, aten.clone.default, _view(graph, move.piece, like), like=like)
    for move in moves:
        like = sites[move.into].value
        place = _box(graph, destinations[move.into], move.piece.start, move.piece.size, like)
        if isinstance(move.piece.source, Fill):
            emit(graph, aten.fill_.Scalar, place, move.piece.source.value, like=like)
        else:
            source = scratch[id(move)] if move.scratch else _view(graph, move.piece, like)
            emit(graph, aten.copy_.default, place, source, like=like)


def _box(graph: fx.Graph, node: fx.Node, start: tuple[int, ...], size: tuple[int, ...], like: fx.Node) -> fx.Node:
    for dim, (first, length) in enumerate(zip(start, size, strict=True)):
        if (first, length) != (0, tensor_val(node).shape[dim]):
            node = emit(graph, aten.slice.Tensor, node, dim, first, first + length, like=like)
    return node


def _view(graph: fx.Graph, piece: Piece, like: fx.Node) -> fx.Node:
    """The source of ``piece`` with the dimensions of the value; size one where it is broadcast."""
    assert isinstance(piece.source, Source)
    index = piece.source.index
    size = tuple(1 if d is None else piece.size[d] for d, _ in index)
    node = _box(graph, piece.source.node, tuple(s for _, s in index), size, like)
    for dim in reversed([e for e, (d, _) in enumerate(index) if d is None]):
        node = emit(graph, aten.select.int, node, dim, 0, like=like)
    followed = [d for d, _ in index if d is not None]
    if followed != sorted(followed):
        node = emit(graph, aten.permute.default, node, [followed.index(d) for d in sorted(followed)], like=like)
    for dim in [d for d in range(len(piece.size)) if d not in followed]:
        node = emit(graph, aten.unsqueeze.default, node, dim, like=like)
    return node
