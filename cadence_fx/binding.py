"""Binding: a Dynamo graph's inputs and size symbols, solved against the declared clocks with sympy.

Every input gets a role: state of a region, tensor fixed in memory (parameters, buffers, anything reached through the
module), tensor staged on each call (the caller's arguments), or scalar. Every size that varies must be explained: it
is the extent of a region, or a declared input that follows a clock. For one catalog entry the equations give each
symbol a value, and the graph's guards decide whether this graph is the one that serves the entry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from cadence_fx import paths
from cadence_fx._torch import (
    CompileSite,
    as_expr,
    current_guards,
    example_value,
    is_from_numpy,
    is_random_source,
    source_name,
)
from cadence_fx.catalog import Catalog, CatalogEntry
from cadence_fx.contract import Contract, Input, Region
from cadence_fx.errors import AxisOutOfRange, ContractError
from cadence_fx.passes.graphs import GraphFacts
from cadence_fx.passes.stage_reads import STAGED
from cadence_fx.paths import Origin, Path

Equation = tuple[sympy.Expr, str, str]  # size, "region" or "input", its name or accessor


@dataclasses.dataclass(frozen=True, slots=True)
class GraphInput:
    """One flat input of a Dynamo graph.

    Attributes:
        role: "region", "fixed", "staged" or "scalar".
        sizes: sympy expressions of a tensor's shape, or of the scalar itself; empty for other scalars.
        random: fed from the host's random module.
        numpy: made of a numpy value in every call.
        lazy: an attribute that an earlier call has made: its size is no sign of a state that grows.
        location: the user's line that first uses it, if Dynamo kept it.
    """

    index: int
    name: str
    origin: Origin
    role: str
    sizes: tuple[sympy.Expr, ...]
    random: bool
    location: str | None
    lazy: bool = False
    numpy: bool = False

    @property
    def accessor(self) -> str:
        """What the user calls this input."""
        text = str(self.origin)
        return f"self.{text}" if self.origin.root == "module" else text


@dataclasses.dataclass(frozen=True, slots=True)
class Instance:
    """One instance of a region in one graph."""

    region: Region
    path: Path
    index: int
    axis: int | None

    @property
    def name(self) -> str:
        """The region, and which of its instances."""
        return (
            f"{self.region.name} ({paths.spell(self.path, attributes=self.region.attribute is not None)})"
            if paths.ANY in declared_path(self.region)
            else self.region.name
        )

    @property
    def result_path(self) -> Path | None:
        """Where in the user's result the new state is, with this instance's own steps for each `*`."""
        declared = self.region.result
        if declared is None:
            return None
        pattern = paths.parse(declared) if isinstance(declared, str) else (declared,)
        stars = [s for s, d in zip(self.path, declared_path(self.region), strict=True) if d == paths.ANY]
        return tuple(stars.pop(0) if step == paths.ANY and stars else step for step in pattern)

    @property
    def key(self) -> tuple[str, Path]:
        """Identifies the instance across graphs."""
        return self.region.name, self.path


@dataclasses.dataclass(frozen=True, slots=True)
class Unexplained:
    """A size that varies and that nothing declared explains."""

    path: Path
    accessor: str
    axis: int
    size: sympy.Expr
    location: str | None


def declared_path(region: Region) -> Path:
    """Where a region's old state comes in."""
    return paths.parse(region.argument if region.argument is not None else region.attribute or "")


@dataclasses.dataclass(frozen=True, slots=True)
class Binding:
    """What `bind` found: inputs with roles, region instances, the equations and the guards."""

    inputs: tuple[GraphInput, ...]
    instances: tuple[Instance, ...]
    equations: tuple[Equation, ...]
    guards: tuple[sympy.Expr, ...]
    ranges: dict[sympy.Symbol, tuple[int | None, int | None]]
    unexplained: tuple[Unexplained, ...]
    used_scalars: tuple[int, ...]

    def indices(self, role: str) -> list[int]:
        """Indices of the inputs with a role; unused scalars have none."""
        if role == "scalar":
            return list(self.used_scalars)
        return [i.index for i in self.inputs if i.role == role]

    def solve(self, entry: CatalogEntry, contract: Contract) -> dict[sympy.Symbol, int] | None:
        """Values of the symbols at a catalog entry, or None when this graph does not serve it."""
        inputs = {i.argument + f"@{i.axis}": i for i in contract.inputs}
        solution: dict[sympy.Symbol, int] = {}
        for size, kind, name in self.equations:
            if kind == "region":
                value = entry.extent_of(name)
            else:
                declared = inputs[name]
                value = declared.size(_advance(entry, declared, contract))
            if not _assign(size, value, solution):
                return None
        for guard in self.guards:
            if _holds(guard, solution) is False:
                return None
        for symbol, (low, high) in self.ranges.items():
            found = solution.get(symbol)
            if found is not None and ((low is not None and found < low) or (high is not None and found > high)):
                return None
        return solution

    def serves(self, catalog: Catalog, contract: Contract) -> tuple[CatalogEntry, ...]:
        """The catalog entries whose calls Dynamo sends to this graph."""
        return tuple(entry for entry in catalog if self.solve(entry, contract) is not None)


def _advance(entry: CatalogEntry, declared: Input, contract: Contract) -> int:
    period = contract.clock(declared.clock).period
    return period if period is not None else entry.advance_of(declared.clock)


def _assign(size: sympy.Expr, value: int, solution: dict[sympy.Symbol, int]) -> bool:
    """Solve size == value for the one unknown symbol in it, or check it when there is none."""
    size = sympy.sympify(size).subs(solution)
    unknown = list(size.free_symbols)
    if not unknown:
        return bool(size == value)
    if len(unknown) > 1:
        return True  # left to the guards: another equation determines the symbols
    symbol = unknown[0]
    roots = [value] if size == symbol else [r for r in sympy.solve(size - value, symbol) if r.is_Integer and r >= 0]
    if len(roots) != 1:
        return False
    solution[symbol] = int(roots[0])
    return True


def _holds(guard: sympy.Expr, solution: dict[sympy.Symbol, int]) -> bool | None:
    """Whether a guard holds; None when it speaks of symbols no clock gives a value (strides, counters)."""
    if not guard.free_symbols <= solution.keys():
        return None
    result = sympy.sympify(guard).subs(solution)
    return bool(result) if result in (sympy.true, sympy.false) else None


def bind(
    gm: fx.GraphModule,
    contract: Contract | None,
    site: CompileSite,
    is_lazy: Callable[[Path], bool] = lambda path: False,
) -> Binding:
    """Give every input of a Dynamo graph its role and collect the equations of its sizes.

    `is_lazy` tells of an attribute of the module whether a call since the beginning of warm-up has put it there. Must
    run while Dynamo is compiling this graph: guards and ranges are read from its tracing context.

    Raises:
        AxisOutOfRange: a declared axis the tensor does not have.
        ContractError: a product clock's fixed axis has another size than its period; a placement that is not where
            the tensor is.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    regions = contract.regions if contract is not None else ()
    inputs: list[GraphInput] = []
    instances: list[Instance] = []
    equations: list[Equation] = []
    unexplained: list[Unexplained] = []
    declared_inputs = {(paths.parse(i.argument), i.axis): i for i in (contract.inputs if contract else ())}
    origins = [paths.origin(source_name(node), site.module_name) for node in placeholders]
    moving = {o.path for o in origins if o.query in ("stride", "offset")}
    for index, node in enumerate(placeholders):
        origin = origins[index]
        value = example_value(node)
        where = _location(node)
        if not isinstance(value, torch.Tensor):
            sizes = (as_expr(value),) if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool) else ()
            inputs.append(GraphInput(index, node.name, origin, "scalar", sizes, is_random_source(node), where))
            continue
        shape = tuple(as_expr(size) for size in value.shape)
        # After a graph break a local that is called like an argument need not be that argument.
        mine = [r for r in regions if r.persistent and not (site.resumes and r.argument is not None)]
        region = next((r for r in mine if _is_at(r, origin)), None)
        # Only what Dynamo's guards hold to one geometry may be bound by its pointer.
        lazy = origin.root == "module" and is_lazy(origin.path)
        still = (
            origin.root != "argument"
            and not any(size.free_symbols for size in shape)
            and origin.path not in moving
            and not (lazy or STAGED in node.meta or is_from_numpy(node) or _is_rebound(gm, site, node, origin))
        )
        role = "region" if region is not None and region.mutability == "carry" else "fixed" if still else "staged"
        entry = GraphInput(
            index, node.name, origin, role, shape, is_random_source(node), where, lazy, is_from_numpy(node)
        )
        inputs.append(entry)
        if region is not None and contract is not None:
            axis = _check_axes(region, contract, entry, value)
            if role == "region":
                instances.append(Instance(region, origin.path, index, axis))
            if axis is not None:
                equations.append((shape[axis], "region", region.name))
        for axis, size in enumerate(shape):
            declared = declared_inputs.get((origin.path, axis)) or declared_inputs.get((origin.path, axis - len(shape)))
            explained = region is not None and axis == (instances[-1].axis if role == "region" else None)
            if declared is not None and origin.root == "argument":
                equations.append((size, "input", f"{declared.argument}@{declared.axis}"))
            elif size.free_symbols and not explained:
                unexplained.append(Unexplained(origin.path, entry.accessor, axis, size, where))
    guards, ranges = current_guards()
    known = frozenset().union(*(size.free_symbols for size, _, _ in equations)) if equations else frozenset()
    left = tuple(u for u in unexplained if not u.size.free_symbols <= known)
    return Binding(tuple(inputs), tuple(instances), tuple(equations), guards, ranges, left, _used_scalars(gm, inputs))


def _is_rebound(gm: fx.GraphModule, site: CompileSite, node: fx.Node, origin: Origin) -> bool:
    """Whether this very frame puts another tensor in the place of the attribute it reads."""
    if not site.assigned or origin.root != "module":
        return False
    nodes = {n.name: n for n in gm.graph.nodes}
    for source, name in site.assigned.items():
        if paths.origin(source, site.module_name).path == origin.path and name in nodes:
            before, after = example_value(node), example_value(nodes[name])
            if isinstance(after, torch.Tensor) and not GraphFacts.same_memory(before, after):
                return True
    return False


def _is_at(region: Region, origin: Origin) -> bool:
    root = "argument" if region.argument is not None else "module"
    return origin.root == root and origin.query == "value" and paths.matches(declared_path(region), origin.path)


def _check_axes(region: Region, contract: Contract, entry: GraphInput, value: torch.Tensor) -> int | None:
    """The frame axis, made non-negative, after checking every declared axis."""
    rank = value.dim()
    for axis in region.axes:
        if not -rank <= axis < rank:
            raise AxisOutOfRange(entry.accessor, axis, [str(s) for s in entry.sizes], region=region.name)
    if region.placement is not None and torch.device(region.placement).type != value.device.type:
        raise ContractError(
            f"declared on {region.placement}, but {entry.accessor} is on {value.device}",
            field="placement",
            region=region.name,
        )
    for axis, name in zip(region.axes, region.clocks, strict=True):
        period = contract.clock(name).period
        size = entry.sizes[axis % rank]
        if period is not None and size.is_Integer and size != period:
            raise ContractError(
                f"axis {axis} of {entry.accessor} has {size} elements, but clock {name!r} has a period of {period}",
                field="axis",
                region=region.name,
            )
    return region.frame_axis % rank if region.frame_axis is not None else None


def _used_scalars(gm: fx.GraphModule, inputs: Sequence[GraphInput]) -> tuple[int, ...]:
    """Scalars that reach a tensor operation. A counter that is only counted up does not decide what runs."""
    placeholders = {node.name: node for node in gm.graph.find_nodes(op="placeholder")}
    return tuple(
        i.index
        for i in inputs
        if i.role == "scalar" and i.origin.query != "size" and _reaches_tensor(placeholders[i.name])
    )


def _reaches_tensor(node: fx.Node) -> bool:
    seen: set[fx.Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        for user in current.users:
            if user.op == "output" or user in seen:
                continue
            if isinstance(example_value(user), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)):
                seen.add(user)
                pending.append(user)
            else:
                return True
    return False


def _location(node: fx.Node) -> str | None:
    """`file:line` of the user's code that first uses an input."""
    for user in node.users:
        lines = (user.stack_trace or "").strip().splitlines()
        files = [line.strip() for line in lines if line.strip().startswith("File")]
        if files:
            parts = files[-1].split(",")
            return f"{parts[0].removeprefix('File ').strip(chr(34))}:{parts[1].replace('line', '').strip()}"
    return None


def scalar_outputs(gm: fx.GraphModule) -> dict[int, Any]:
    """Outputs of a Dynamo graph that are ints computed from its symbols: index → sympy expression."""
    (outputs,) = gm.graph.output_node().args
    found: dict[int, Any] = {}
    for i, out in enumerate(outputs):  # type: ignore[arg-type,union-attr]
        value = example_value(out) if isinstance(out, fx.Node) else out
        if isinstance(value, torch.SymInt):
            found[i] = as_expr(value)
    return found
