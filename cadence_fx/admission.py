"""Admission, first half: which point of the catalog a call is, from its sizes alone (paper section 3.3, clause i).

A call is declared when its states have extents of one catalog entry, its inputs the sizes of that entry's advance,
and every other axis the size it had when the declared stream was first seen. Anything else is answered with a reason
that names the argument, the axis and the user's line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cadence_fx import paths
from cadence_fx.binding import Binding, Instance
from cadence_fx.catalog import Catalog, CatalogEntry
from cadence_fx.contract import Contract, Input
from cadence_fx.paths import Path
from cadence_fx.plan import Miss


class Admission:
    """Finds the catalog entry of a call of one Dynamo graph.

    Args:
        serves: entries that satisfy the graph's guards; a call outside them is compared with the whole catalog.
        usual: argument path -> shape in the declared stream, as first seen; shared by the graphs of a program.
    """

    def __init__(
        self, binding: Binding, contract: Contract, catalog: Catalog, usual: Mapping[Path, tuple[int, ...]]
    ) -> None:
        self.binding = binding
        self.contract = contract
        self.catalog = catalog
        self.usual = usual
        self.serves = binding.serves(catalog, contract)
        self._free = {(paths.parse(i.argument), i.axis) for i in contract.inputs}
        self._inputs = [
            (declared, entry.index)
            for declared in contract.inputs
            for entry in binding.inputs
            if entry.role == "staged"
            and entry.origin.query == "value"
            and entry.origin.path == paths.parse(declared.argument)
        ]

    def shapes(self, args: Sequence[Any]) -> dict[Path, tuple[int, ...]]:
        """Shapes of the arguments that are not states."""
        given = [i for i in self.binding.inputs if i.role == "staged" and not i.lazy]
        return {i.origin.path: tuple(args[i.index].shape) for i in given}

    def point(self, args: Sequence[Any]) -> CatalogEntry | Miss:
        """The catalog entry of a call, or why it has none."""
        extents: dict[str, int] = {}
        for instance in self.binding.instances:
            if instance.axis is None:
                continue
            name, extent = instance.region.name, args[instance.index].shape[instance.axis]
            if extents.setdefault(name, extent) != extent:
                return Miss("undeclared_extents", f"instances of {name} have different extents on axis {instance.axis}")
        strange = self._undeclared_size(args)
        if strange is not None:
            return strange
        sizes = [(declared, args[index].shape[declared.axis]) for declared, index in self._inputs]
        for entry in self.serves or self.catalog:
            if all(entry.extent_of(name) == extent for name, extent in extents.items()) and all(
                declared.size(self._advance(entry, declared)) == size for declared, size in sizes
            ):
                return entry
        return self._outside(extents, sizes)

    def _advance(self, entry: CatalogEntry, declared: Input) -> int:
        period = self.contract.clock(declared.clock).period
        return period if period is not None else entry.advance_of(declared.clock)

    def _undeclared_size(self, args: Sequence[Any]) -> Miss | None:
        for path, shape in self.shapes(args).items():
            known = self.usual.get(path)
            if known is None or len(known) != len(shape):
                continue
            for axis, (size, usual) in enumerate(zip(shape, known, strict=True)):
                if size != usual and not {(path, axis), (path, axis - len(shape))} & self._free:
                    argument = paths.spell(path)
                    what = f"axis {axis} of {argument} has {size}, and no clock explains another size than {usual}"
                    return Miss("undeclared_size", what + self._line(argument))
        return None

    def _outside(self, extents: dict[str, int], sizes: list[tuple[Input, int]]) -> Miss:
        for declared, size in sizes:
            period = self.contract.clock(declared.clock).period
            advances = (period,) if period is not None else self.contract.advances_of(declared.clock)
            allowed = sorted({declared.size(advance) for advance in advances})
            if size not in allowed:
                what = f"axis {declared.axis} of {declared.argument} has {size}; the contract allows {allowed}"
                return Miss("undeclared_size", what + self._line(declared.argument))
        for instance in self.binding.instances:
            name = instance.region.name
            reached = sorted({entry.extent_of(name) for entry in self.catalog})
            if name in extents and extents[name] not in reached:
                what = f"axis {instance.axis} of {instance.name} has {extents[name]}; the contract reaches {reached}"
                return Miss("undeclared_extents", what + self._line_of(instance))
        met = ", ".join(f"{name} = {extent}" for name, extent in extents.items())
        return Miss("undeclared_extents", f"no call of the declared stream meets {met} together")

    def _line(self, argument: str) -> str:
        places = [i.location for i in self.binding.inputs if str(i.origin) == argument and i.location]
        return f" (used at {places[0]})" if places else ""

    def _line_of(self, instance: Instance) -> str:
        place = self.binding.inputs[instance.index].location
        return f" (used at {place})" if place else ""
