"""Where the bytes of a value are: it is followed back through operators that only place bytes.

The question is asked for the *end* of the graph: a piece may name a node only if that node still holds the bytes when
every other operator has run. So the answer depends on time. A buffer that the graph makes and then fills by slice
assignment is replayed write by write; a value read before its memory was written again cannot be named at all.
"""

from __future__ import annotations

import operator
from typing import Any

import torch.fx as fx

from cadence_fx.passes.constants import Constants
from cadence_fx.passes.graphs import GraphFacts, bound_args, tensor_val
from cadence_fx.passes.pieces import Piece, Source, Stale, aligned, merge, overwrite, whole
from cadence_fx.passes.reader import Reader, Rule, Unresolvable
from cadence_fx.passes.value_rules import VALUE_RULES, WRITE_RULES
from cadence_fx.passes.view_rules import VIEW_RULES

__all__ = ["Resolver"]

_RULES: dict[Any, Rule] = {**VIEW_RULES, **VALUE_RULES}
_DEEPEST = 120  # longer chains are copied whole; keeps well inside Python's recursion limit
_MOST_PIECES = 1024  # and so are values in more pieces, or with more writes, than is worth following


class Resolver:
    """Resolves values of one graph. ``free`` holds nodes that are computed whatever the answer is.

    A piece whose bytes a free node also holds names that node in ``instead``.
    """

    def __init__(self, facts: GraphFacts, constants: Constants, free: set[fx.Node]) -> None:
        self.facts = facts
        self.constants = constants
        self.free = free
        self._end = len(facts.order)
        self._known: dict[tuple[fx.Node, int], list[Piece] | None] = {}
        self._depth = 0

    def at_end(self, node: fx.Node) -> list[Piece]:
        """Pieces of ``node`` as it is at the end. Raises ``Unresolvable``, never for a node that is returned."""
        return [aligned(piece) for piece in self._at(node, self._end)]

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
            if len(pieces) > _MOST_PIECES or any(isinstance(piece.source, Stale) for piece in pieces):
                raise Unresolvable(node.name)
        except Unresolvable:
            return whole(node, tensor_val(node).shape) if lasting else None
        finally:
            self._depth -= 1
        if lasting and node in self.free:
            pieces = [Piece(p.start, p.size, p.source, _same_place(node, p)) for p in pieces]
        return pieces

    def _through(self, node: fx.Node, time: int) -> list[Piece]:
        """Pieces by the operator of ``node``, with later writes on top. Raises ``Unresolvable`` without a rule."""
        if node.target in WRITE_RULES:  # an in-place operator returns its target
            return self._at(bound_args(node)["self"], time)
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        if rule is None:
            raise Unresolvable(node.name)
        writes = self.facts.writes_to(node, before=time)
        if not writes:
            return rule(self._reader(node, self.facts.order[node]))
        if len(writes) > _MOST_PIECES:
            raise Unresolvable(node.name)
        bases = [arg for arg in node.all_input_nodes if self.facts.aliases(arg, node)]
        if bases:  # a view: what its base holds at that time, seen through the same window
            return rule(self._reader(node, time))
        pieces = rule(self._reader(node, self.facts.order[node]))
        for write in writes:
            pieces = overwrite(pieces, self._written(node, write))
        return pieces

    def _reader(self, node: fx.Node, time: int) -> Reader:
        return Reader(node, lambda arg: self._at(arg, time), self.constants)

    def _written(self, base: fx.Node, write: fx.Node) -> list[Piece]:
        """What ``write`` puts into ``base``, in coordinates of ``base``."""
        if write.target not in WRITE_RULES:
            raise Unresolvable(write.name)
        values = bound_args(write)
        target: fx.Node = values["self"]
        window = self._window(base, target)
        if window is None:
            return []
        written = WRITE_RULES[write.target](self._reader(write, self.facts.order[write]))
        return [_through_window(piece, window) for piece in written]

    def _window(self, base: fx.Node, view: fx.Node) -> Piece | None:
        """The affine place of ``view`` in ``base``; None if it is empty."""
        if tensor_val(view).numel() == 0:
            return None
        chain = [view]
        while chain[-1] is not base:
            node = chain[-1]
            if node.target not in _RULES and node.target not in WRITE_RULES:
                raise Unresolvable(view.name)
            viewed = node.args[0] if node.target is operator.getitem else node
            inputs = [arg for arg in viewed.all_input_nodes if self.facts.aliases(arg, base)]  # type: ignore[union-attr]
            if len(inputs) != 1:
                raise Unresolvable(view.name)
            chain.append(inputs[0])
        pieces = whole(base, tensor_val(base).shape)
        while len(chain) > 1:
            seen = {chain.pop(): pieces}
            if chain[-1].target not in WRITE_RULES:  # an in-place operator returns its target
                pieces = merge(_RULES[chain[-1].target](Reader(chain[-1], seen.__getitem__, self.constants)))
        if len(pieces) != 1 or not isinstance(pieces[0].source, Source):
            raise Unresolvable(view.name)
        return pieces[0]


def _same_place(node: fx.Node, piece: Piece) -> Source:
    return Source(node, tuple((dim, start) for dim, start in enumerate(piece.start)))


def _through_window(piece: Piece, window: Piece) -> Piece:
    """A piece of a view, as a piece of the base that the view is a window of."""
    assert isinstance(window.source, Source)
    index = window.source.index
    followed = {d: e for e, (d, _) in enumerate(index) if d is not None}
    if any(d not in followed and extent != 1 for d, extent in enumerate(window.size)):
        raise Unresolvable("a write through an expanded view")  # several elements of the view are one of the base
    start = tuple(first if d is None else first + piece.start[d] for d, first in index)
    size = tuple(1 if d is None else piece.size[d] for d, _ in index)

    def moved(source: Source) -> Source:
        return Source(source.node, tuple((None if d is None else followed.get(d), s) for d, s in source.index))

    source = moved(piece.source) if isinstance(piece.source, Source) else piece.source
    return Piece(start, size, source, moved(piece.instead) if piece.instead else None)
