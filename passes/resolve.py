"""Where the bytes of a value are: it is followed back through operators that only place bytes.

The question is asked for the *end* of the graph: a piece may name a node only if that node still holds the bytes when
every other operator has run. So the answer depends on time. A buffer that the graph makes and then fills by slice
assignment is replayed write by write; a value read before its memory was written again cannot be named at all.
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from cadence_fx.passes.constants import Constants
from cadence_fx.passes.graphs import GraphFacts, bound_args, tensor_val
from cadence_fx.passes.pieces import Piece, Source, Stale, aligned, merge, overwrite, whole
from cadence_fx.passes.reader import Reader, Rule, Unresolvable
from cadence_fx.passes.value_rules import VALUE_RULES, WRITE_RULES
from cadence_fx.passes.view_rules import VIEW_RULES
from cadence_fx.passes.windows import Windows, through_window

__all__ = ["Resolver"]

_RULES: dict[Any, Rule] = {**VIEW_RULES, **VALUE_RULES}
_DEEPEST = 120  # longer chains are copied whole; keeps well inside Python's recursion limit
_MOST_PIECES = 8192  # and so are values in more pieces, or with more writes, than is worth following


class Resolver:
    """Resolves values of one graph. ``free`` holds nodes that are computed whatever the answer is.

    A piece whose bytes a free node also holds names that node in ``instead``. ``scratch`` names placeholders that hold
    nothing until the graph writes them.
    """

    def __init__(
        self,
        facts: GraphFacts,
        constants: Constants,
        free: set[fx.Node],
        scratch: frozenset[str] = frozenset(),
        windows: Windows | None = None,
    ) -> None:
        self.facts = facts
        self.constants = constants
        self.free = free
        self.scratch = scratch
        self.windows = windows or Windows(facts, constants)
        self._end = len(facts.order)
        self._known: dict[tuple[fx.Node, int], list[Piece] | None] = {}
        self._replayed: dict[fx.Node, tuple[int, list[Piece]]] = {}  # the last writes that were replayed, of each base
        self._depth = 0

    def at_end(self, node: fx.Node) -> list[Piece]:
        """Pieces of ``node`` as it is at the end. Raises ``Unresolvable``, never for a node that is returned."""
        pieces = [aligned(piece) for piece in self._at(node, self._end)]
        if any(isinstance(piece.source, Source) and piece.source.node is node for piece in pieces):
            return whole(node, tensor_val(node).shape)  # it is there whatever the rest is read from
        return pieces

    def _at(self, node: fx.Node, time: int) -> list[Piece]:
        """Pieces of what ``node`` held just before position ``time``."""
        key = (node, len(self.facts.writes_to(node, before=time)))
        if key not in self._known:
            self._known[key] = None  # stands while the answer is sought
            self._known[key] = self._seek(node, time)
        found = self._known[key]
        if found is None:
            raise Unresolvable(node.name)
        return found

    def _seek(self, node: fx.Node, time: int) -> list[Piece] | None:
        lasting = not self.facts.writes_to(node, after=time - 1)
        self._depth += 1
        try:
            if self._depth > _DEEPEST:
                raise Unresolvable(node.name)
            pieces = merge(self._through(node, time))
            if len(pieces) > _MOST_PIECES:
                raise Unresolvable(node.name)
        except Unresolvable:
            return whole(node, tensor_val(node).shape) if lasting else None
        finally:
            self._depth -= 1
        if lasting:  # what nobody else holds is in the node itself
            itself = [
                Piece(p.start, p.size, _same_place(node, p)) if isinstance(p.source, Stale) else p for p in pieces
            ]
            pieces = itself
            if node in self.free:
                pieces = [Piece(p.start, p.size, p.source, _same_place(node, p)) for p in pieces]
        return pieces

    def _through(self, node: fx.Node, time: int) -> list[Piece]:
        """Pieces by the operator of ``node``, with later writes on top. Raises ``Unresolvable`` without a rule."""
        if node.target in WRITE_RULES:  # an in-place operator returns its target
            return self._at(bound_args(node)["self"], time)
        writes = self.facts.writes_to(node, before=time)
        if node.op == "placeholder" and node.name in self.scratch and writes:
            return self._replay(node, writes, _nothing(node))
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        if rule is None:
            raise Unresolvable(node.name)
        if not writes:
            return rule(self._reader(node, self.facts.order[node]))
        bases = [arg for arg in node.all_input_nodes if self.facts.aliases(arg, node)]
        if bases:  # a view: what its base holds at that time, seen through the same window
            return rule(self._reader(node, time))
        return self._replay(node, writes, rule(self._reader(node, self.facts.order[node])))

    def _replay(self, node: fx.Node, writes: list[fx.Node], pieces: list[Piece]) -> list[Piece]:
        """``pieces`` of what ``node`` held at first, with what was written since on top."""
        if len(writes) > _MOST_PIECES:
            raise Unresolvable(node.name)
        done, known = self._replayed.get(node, (0, pieces))
        done, pieces = (done, known) if done <= len(writes) else (0, pieces)
        for write in writes[done:]:
            pieces = overwrite(pieces, self._written(node, write))
        self._replayed[node] = len(writes), pieces
        return pieces

    def _reader(self, node: fx.Node, time: int) -> Reader:
        return Reader(node, lambda arg: self._at(arg, time), self.constants)

    def _written(self, base: fx.Node, write: fx.Node) -> list[Piece]:
        """What ``write`` puts into ``base``, in coordinates of ``base``."""
        if write.target not in WRITE_RULES:
            raise Unresolvable(write.name)
        target: fx.Node = bound_args(write)["self"]
        window = self.windows.of(target)
        if window is None:
            return []
        if not isinstance(window.source, Source) or window.source.node is not base:
            raise Unresolvable(write.name)
        written = WRITE_RULES[write.target](self._reader(write, self.facts.order[write]))
        return [through_window(piece, window) for piece in written]


def _nothing(node: fx.Node) -> list[Piece]:
    shape = tuple(tensor_val(node).shape)
    return [Piece((0,) * len(shape), shape, Stale())] if 0 not in shape else []


def _same_place(node: fx.Node, piece: Piece) -> Source:
    return Source(node, tuple((dim, start) for dim, start in enumerate(piece.start)))
