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

A workspace on the way (memory that the graph makes, or a placeholder that means nothing between calls) is seen through:
what was stored there is written from where it was made, and the stores are gone::

    def forward(self, x, cache, workspace):            def forward(self, x, cache, workspace, carry_0):
        k = aten.cat([x, cache[0]], 1)                     k = aten.cat([x, cache[0]], 1)
        workspace[0].copy_(k)                    ->        carry_0[0].copy_(k[:, :8])
        ...                                                ...
        return [..., workspace[:, :, :8].clone()]          return [..., carry_0]

Why no byte moves: the returned value is followed only through operators that place bytes (``resolve``), and every write
is ``copy_`` between equal dtypes or ``fill_`` with the number the graph itself fills with. A write whose source lies in
no state stands as soon as all reads of what it destroys are over (``placement``); the others stand after every other
operator of the graph, and their order keeps each source until it is read (``moves``). What cannot be followed, or comes
from more places than is worth it (``costs``), is copied whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from cadence_fx.passes.base import PassContext, PassResult, RegionSlot
from cadence_fx.passes.constants import Constants
from cadence_fx.passes.emission import Rows, emit_box, emit_copy, emit_source
from cadence_fx.passes.graphs import (
    MEMORY_OF,
    GraphFacts,
    Liveness,
    emit,
    erase_dead_code,
    output_node,
    tensor_val,
)
from cadence_fx.passes.moves import Geometry, Move, schedule
from cadence_fx.passes.pieces import Fill, Piece, Source, merge, whole
from cadence_fx.passes.placement import Carries, place
from cadence_fx.passes.resolve import Resolver
from cadence_fx.passes.savings import WRITE, cost_of_nodes
from cadence_fx.passes.windows import Windows

__all__ = ["ReinplaceRetention"]

aten = torch.ops.aten


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
    """Appends a destination placeholder for each returned state and writes it there."""

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
        plan = _Rewrite(gm, ctx.facts_of(graph), sites, ctx.scratch_inputs)
        early, late = plan.place()
        ordered = schedule(late, plan.geometries)
        destinations = _add_destinations(graph, sites)
        rows = Rows(graph, destinations[-1].next)
        for anchor, moves in early.items():
            after = destinations[-1] if anchor.op == "placeholder" else anchor
            with graph.inserting_before(after.next):
                _write(graph, moves, sites, destinations, rows)
        out = output_node(graph)
        with graph.inserting_before(out):
            results = _privatised(graph, plan.facts, sites, list(out.args[0]))  # type: ignore[arg-type]
            _write(graph, ordered, sites, destinations, rows)
        for site, destination in zip(sites, destinations, strict=True):
            results[site.output] = destination
        out.args = (tuple(results) if isinstance(out.args[0], tuple) else results,)
        erased = erase_dead_code(graph, ctx.scratch_inputs)
        regions = list(ctx.regions)
        for which, (site, destination) in enumerate(zip(sites, destinations, strict=True)):
            regions[site.at] = replace(site.slot, destination=destination.name)
            mine = [move for move in ordered if move.into == which]
            ahead = sum(move.into == which for moves in early.values() for move in moves)
            scratch = sum(move.piece.numel for move in mine if move.scratch) * tensor_val(site.old).element_size()
            how = "read from a value the graph needs anyway" if which in plan.reread else f"{scratch} bytes of scratch"
            when = f" ({ahead} before the end)" if ahead else ""
            ctx.notes.append(f"{self.name}: {site.slot.instance}: {len(mine) + ahead} writes{when}, {how}")
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


class _Rewrite:
    """The writes of all slots: what each is read from, and where it may stand.

    Attributes:
        reread: slots whose retained frames are read from elsewhere.
    """

    def __init__(self, gm: fx.GraphModule, facts: GraphFacts, sites: list[_Site], scratch: frozenset[str]) -> None:
        self.facts = facts
        self.geometries = [site.geometry for site in sites]
        self.reread: set[int] = set()
        self._sites = sites
        self._olds = {site.old: which for which, site in enumerate(sites)}
        self._carry = {facts.alias_class(site.old): which for which, site in enumerate(sites)}
        states = {site.output for site in sites}
        results = output_node(gm.graph).args[0]
        self._others = [r for i, r in enumerate(results) if i not in states and isinstance(r, fx.Node)]  # type: ignore[arg-type]
        self._liveness = Liveness(gm.graph, facts, scratch)
        self._needed = self._liveness.needed([*self._liveness.roots, *self._others])
        free = {node for node in self._needed if facts.alias_class(node) not in self._carry}
        constants = Constants(gm, facts)
        self._windows = Windows(facts, constants)
        self._resolver = Resolver(facts, constants, free, scratch, self._windows)
        self._moves = [move for into in range(len(sites)) for move in self._of(into)]

    def _of(self, into: int) -> list[Move]:
        """The writes of one slot, unordered."""
        site = self._sites[into]
        pieces = self._resolver.at_end(site.value)
        mine = [self._move(into, piece) for piece in pieces]
        if any(m.reads is not None and m.piece.instead and not m.stays(site.geometry) for m in mine):
            # Frames that move would overlap themselves; another value holds the same bytes in other memory. All that
            # it holds is read from it, in as few copies as possible.
            pieces = merge(
                [
                    replace(m.piece, source=m.piece.instead, instead=None)
                    if m.piece.instead and not m.stays(site.geometry)
                    else m.piece
                    for m in mine
                ]
            )
            self.reread.add(into)
        else:
            pieces = merge([replace(piece, instead=None) for piece in pieces])
        moves = [self._move(into, piece) for piece in pieces]
        together = [self._move(into, piece) for piece in whole(site.value, tensor_val(site.value).shape)]
        if self._cost(together) < self._cost(moves):
            self.reread.discard(into)
            return together
        return moves

    def _move(self, into: int, piece: Piece) -> Move:
        if not isinstance(piece.source, Source):
            return Move(into, piece)
        node = piece.source.node
        itself = self._olds.get(node)
        reads = self._carry.get(self.facts.alias_class(node)) if itself is None else itself
        return Move(into, piece, reads, itself is not None)

    def _cost(self, moves: list[Move]) -> int:
        """Of the writes of a slot, and of what is computed for them alone."""
        moves = [move for move in moves if not move.stays(self.geometries[move.into])]
        itemsize = tensor_val(self._sites[moves[0].into].old).element_size() if moves else 0
        for_them = self._liveness.needed(_sources(moves), self._needed)
        writes = sum(WRITE + 2 * move.piece.numel * itemsize for move in moves)
        return writes + cost_of_nodes(self.facts, for_them)

    def place(self) -> tuple[dict[fx.Node, list[Move]], list[Move]]:
        """The writes that may follow a node of the graph, and those that must stand at its end."""
        live = self._liveness.needed(_sources(self._moves), self._needed) | self._needed
        carries = Carries([site.old for site in self._sites], self.geometries, self._carry)
        return place(self.facts, self._windows, live, carries, self._moves, self._others)


def _sources(moves: list[Move]) -> list[fx.Node]:
    return [move.piece.source.node for move in moves if isinstance(move.piece.source, Source)]


def _add_destinations(graph: fx.Graph, sites: list[_Site]) -> list[fx.Node]:
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    destinations = []
    for site in sites:
        with graph.inserting_after(last):
            last = graph.placeholder(f"carry_{site.at}")
        val = tensor_val(site.value)
        last.meta["val"] = val.new_empty(val.shape)
        last.meta[MEMORY_OF] = site.old.name
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


def _write(graph: fx.Graph, moves: list[Move], sites: list[_Site], destinations: list[fx.Node], rows: Rows) -> None:
    scratch = {}
    for move in moves:
        if move.scratch:
            like = sites[move.into].value
            scratch[id(move)] = emit(graph, aten.clone.default, emit_source(graph, move.piece, like), like=like)
    for move in moves:
        like, destination = sites[move.into].value, destinations[move.into]
        if isinstance(move.piece.source, Fill):
            place = emit_box(graph, destination, move.piece.start, move.piece.size, like)
            emit(graph, aten.fill_.Scalar, place, move.piece.source.value, like=like)
        elif move.scratch:
            place = emit_box(graph, destination, move.piece.start, move.piece.size, like)
            emit_copy(graph, place, scratch[id(move)], like)
        else:
            place, without = rows.place(destination, move.piece, like)
            emit_copy(graph, place, emit_source(graph, move.piece, like, without), like)
