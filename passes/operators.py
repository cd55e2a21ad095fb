"""What the schema and the tags of an operator tell, looked up once for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["KNOWN_NAMESPACES", "OpOverload", "Operator", "operator_of"]

aten = torch.ops.aten
OpOverload: Any = type(aten.copy_.default)

# Whose operators do what their schemas say and no more: PyTorch's, and those that passes put into graphs.
KNOWN_NAMESPACES = ("aten", "prims", "cadence_fx")

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

Place = tuple[int, str]  # of an argument: its position and its name


@dataclass(frozen=True, slots=True)
class Operator:
    """The facts of one operator.

    Attributes:
        defaults: its arguments, in order, with their defaults.
        written: the arguments that it says it writes.
        aliased: the arguments whose memory a result may share.
        by_value: the traced values alone know whether memory is shared.
        may_return_input: it may return an argument, and neither its schema nor its traced value tells.
        has_statistics: it is a normalisation, which updates its statistics without saying so.
        may_draw: it may draw random numbers.
        has_effect: dropping a call could be observed, whatever the arguments are.
        reads_value: the host needs a value of the arguments to go on: as a number, or as the size of a result.
    """

    target: Any
    defaults: dict[str, Any]
    written: tuple[Place, ...]
    aliased: tuple[Place, ...]
    by_value: bool
    may_return_input: bool
    has_statistics: bool
    may_draw: bool
    has_effect: bool
    reads_value: bool


_known: dict[int, Operator] = {}


def operator_of(target: Any) -> Operator:
    """The facts of an ``OpOverload``."""
    # By identity: operators hash in Python, which would be most of what a look-up costs. The entry keeps its target.
    found = _known.get(id(target))
    if found is None:
        found = _known[id(target)] = _read(target)
    return found


def _read(target: Any) -> Operator:
    schema = target._schema
    places = [((at, a.name), a.alias_info) for at, a in enumerate(schema.arguments)]
    writes = schema.is_mutable and target is not aten.detach_.default  # detach_ changes no byte
    shares = any(returned.alias_info is not None for returned in schema.returns)
    has_statistics = any(a.name == "running_mean" for a in schema.arguments)
    may_draw = torch.Tag.nondeterministic_seeded in target.tags
    return Operator(
        target,
        {a.name: a.default_value if a.has_default_value() else None for a in schema.arguments},
        tuple(place for place, alias in places if writes and alias is not None and alias.is_write),
        tuple(place for place, alias in places if shares and alias is not None),
        target in _ALIASES_BY_VALUE,
        torch.Tag.maybe_aliasing_or_mutating in target.tags and not has_statistics,
        has_statistics,
        may_draw,
        # An operator of someone else's may have effects that its schema does not tell.
        may_draw or target.namespace not in KNOWN_NAMESPACES or not schema.returns,
        torch.Tag.data_dependent_output in target.tags or torch.Tag.dynamic_output_shape in target.tags,
    )
