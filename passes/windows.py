"""Where a view lies in the memory that it is a view of."""

from __future__ import annotations

import operator

import torch.fx as fx

from cadence_fx.passes.constants import Constants
from cadence_fx.passes.graphs import GraphFacts, tensor_val
from cadence_fx.passes.pieces import Piece, Source, merge, whole
from cadence_fx.passes.reader import Reader, Unresolvable
from cadence_fx.passes.value_rules import WRITE_RULES
from cadence_fx.passes.view_rules import VIEW_RULES

__all__ = ["Windows", "through_window"]


class Windows:
    """Windows of views in the node that made their memory. Each node is followed once."""

    def __init__(self, facts: GraphFacts, constants: Constants) -> None:
        self._facts = facts
        self._constants = constants
        self._known: dict[fx.Node, list[Piece] | None] = {}

    def of(self, view: fx.Node) -> Piece | None:
        """The whole of ``view`` as one piece of the node that made its memory; None if it is empty.

        Raises ``Unresolvable`` where it is no plain box.
        """
        if tensor_val(view).numel() == 0:
            return None
        chain = [view]
        while chain[-1] not in self._known and (base := self._base(chain[-1])) is not None:
            chain.append(base)
        for node in reversed(chain):
            if node not in self._known:
                self._known[node] = self._follow(node)
        pieces = self._known[view]
        if pieces is None or len(pieces) != 1 or not isinstance(pieces[0].source, Source):
            raise Unresolvable(view.name)
        return pieces[0]

    def _base(self, node: fx.Node) -> fx.Node | None:
        """What ``node`` is a view of; None for a node that made its memory, or is a view in an unknown way."""
        viewed = node.args[0] if node.target is operator.getitem else node
        assert isinstance(viewed, fx.Node)
        inputs = [arg for arg in viewed.all_input_nodes if self._facts.aliases(arg, node)]
        return inputs[0] if len(inputs) == 1 else None

    def _follow(self, node: fx.Node) -> list[Piece] | None:
        base = self._base(node)
        if base is None:
            made_by = node.args[0] if node.target is operator.getitem else node
            assert isinstance(made_by, fx.Node)
            is_view = any(self._facts.aliases(arg, node) for arg in made_by.all_input_nodes)
            return None if is_view else whole(node, tensor_val(node).shape)
        seen = self._known.get(base)
        if seen is None or node.target in WRITE_RULES:  # an in-place operator returns its target
            return seen
        rule = VIEW_RULES.get(node.target)
        try:
            return merge(rule(Reader(node, lambda _: seen, self._constants))) if rule is not None else None
        except Unresolvable:
            return None


def through_window(piece: Piece, window: Piece) -> Piece:
    """A piece of a view, as a piece of the base that the view is a window of. Raises ``Unresolvable``."""
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
