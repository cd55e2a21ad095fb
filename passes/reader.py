"""What a placement rule may ask about the operator it explains."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from cadence_fx.passes.constants import Constants
from cadence_fx.passes.graphs import bound_args, tensor_val
from cadence_fx.passes.pieces import Piece

__all__ = ["Reader", "Rule", "Unresolvable"]


class Unresolvable(Exception):
    """The bytes of a value cannot be named, for want of a rule or because they are gone by the end of the graph."""


class Reader:
    """What a rule may ask about the node it explains: its arguments, and their pieces at the time in question."""

    def __init__(self, node: fx.Node, pieces: Callable[[fx.Node], list[Piece]], constants: Constants) -> None:
        self.node = node
        self.pieces = pieces
        self.args = bound_args(node) if node.target is not operator.getitem else {}
        self._constants = constants

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(tensor_val(node).shape)

    @property
    def base(self) -> fx.Node:
        node: fx.Node = self.args["self"]
        return node

    def dim(self, name: str = "dim", rank: int | None = None) -> int:
        dim: int = self.args[name]
        return dim + (len(self.shape(self.base)) if rank is None else rank) if dim < 0 else dim

    def scalar(self, value: Any) -> float | int | bool | complex:
        if isinstance(value, fx.Node):
            constant = self._constants.tensor(value)
            if constant is None or constant.numel() != 1:
                raise Unresolvable(value.name)
            value = constant.item()
        return value  # type: ignore[no-any-return]

    def indices(self, value: Any) -> list[int]:
        constant = self._constants.tensor(value) if isinstance(value, fx.Node) else None
        if constant is None or constant.dim() > 1 or constant.dtype not in (torch.int64, torch.int32):
            raise Unresolvable(self.node.name)
        return [int(i) for i in constant.reshape(-1).tolist()]


Rule = Callable[[Reader], list[Piece]]  # pieces of the result of an operator from pieces of its arguments
