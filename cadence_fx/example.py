"""One example call, and from it a call at any point of the catalog.

Warm-up needs every declared call before there is traffic. Each is made from the user's own first call: states at the
extents of a catalog entry, inputs at the sizes of its advance, everything else as given.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cadence_fx import paths
from cadence_fx._torch import (
    asks_for_dynamic,
    backend_error,
    copy_marks,
    is_marked,
    mark_dynamic,
    module_of,
    tree_leaves,
    tree_map_only,
)
from cadence_fx._torch_aside import broken_at, standing
from cadence_fx._units import counted
from cadence_fx.binding import Instance, declared_path
from cadence_fx.catalog import CatalogEntry
from cadence_fx.contract import Input, Region
from cadence_fx.errors import (
    AxisOutOfRange,
    CadenceError,
    CatalogMismatch,
    ContractError,
    NotServed,
    UnexplainedSize,
    UnknownArgument,
    WrongModule,
)
from cadence_fx.foresee import barred
from cadence_fx.layout import Layout, is_expanded, layout_of, same_geometry_copy
from cadence_fx.leaves import tensor_paths
from cadence_fx.program import Program

# One layout for each instance of each persistent region, in the contract's order.
Variant = tuple[Layout, ...]


class ExampleCall:
    """Makes calls of the compiled callable at any catalog entry out of one example call."""

    def __init__(
        self, program: Program, compiled: Any, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        assert program.contract is not None  # warm_up has refused a program without one
        self.program, self.contract = program, program.contract
        self.compiled = compiled
        self.module = module_of(original)
        target: Any = original
        if self.module is not None and original is self.module:
            target = self.module.forward
        self.signature = inspect.signature(target)
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ContractError(
                f"the example call does not fit the compiled callable: {error}", field="args"
            ) from error
        self.example: dict[str, Any] = bound.arguments
        self.dynamic = asks_for_dynamic(compiled)
        self._layouts: dict[tuple[str, paths.Path, int], list[Layout]] = {}
        self._generator = torch.Generator().manual_seed(0)

    # -- checks before anything runs ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare the declaration with the callable and the example call."""
        contract = self.contract
        names = list(self.signature.parameters)
        named = [r.argument for r in contract.regions if r.argument] + [i.argument for i in contract.inputs]
        unknown = [a for a in named if paths.parse(a)[0] not in names]
        attributes = [r for r in contract.regions if r.attribute is not None]
        if contract.regions and len(unknown) == len(named) == len(contract.regions) + len(contract.inputs) > 1:
            raise WrongModule(
                contract.name or repr(contract),
                ", ".join(named),
                type(self.module).__name__ if self.module is not None else "function",
            )
        if unknown:
            owner = next((r.name for r in contract.regions if r.argument == unknown[0]), None)
            raise UnknownArgument(unknown[0], names, region=owner)
        for region in attributes:
            if self.module is None or not paths.expand(self.module, declared_path(region)):
                raise UnknownArgument(
                    region.attribute or "", _attributes(self.module), field="attribute", region=region.name
                )
        for region in contract.regions:
            leaves = list(self._leaves(region))
            if not leaves:
                known = [paths.spell(path) for path in tensor_paths(self.example)]
                raise UnknownArgument(region.argument or "", known, region=region.name)
            for path, leaf in leaves:
                self._check_leaf(region, path, leaf)
        first = self.program.catalog.entries[0]
        self._learn(first.extents, lambda name, path: paths.get(self._root(contract.region(name)), path))
        for declared in contract.inputs:
            for path in paths.expand(self.example, paths.parse(declared.argument)):
                leaf = paths.get(self.example, path)
                if not isinstance(leaf, torch.Tensor):
                    raise ContractError(f"{declared.argument!r} is {type(leaf).__name__}, not a tensor", field="inputs")
                if not -leaf.dim() <= declared.axis < leaf.dim():
                    raise AxisOutOfRange(declared.argument, declared.axis, list(leaf.shape))
                self._check_size(declared, leaf.shape[declared.axis])

    def _check_size(self, declared: Input, size: int) -> None:
        period = self.contract.clock(declared.clock).period
        allowed = sorted(
            {declared.size(a) for a in ((period,) if period else self.contract.advances_of(declared.clock))}
        )
        if size not in allowed:
            raise ContractError(
                f"axis {declared.axis} of {declared.argument!r} has {size} in the example call; "
                f"clock {declared.clock!r} gives {' or '.join(map(str, allowed))}",
                field="inputs",
            )

    def _check_result(self, region: Region, path: paths.Path, result: Any) -> None:
        """The declared place of a new state must hold a tensor."""
        if region.result is not None and not isinstance(self._returned(region, path, result), torch.Tensor):
            known = [paths.spell(found) or "0" for found in tensor_paths(result)]
            raise UnknownArgument(str(region.result), known, field="result", region=region.name)

    def _check_leaf(self, region: Region, path: paths.Path, leaf: Any) -> None:
        if not isinstance(leaf, torch.Tensor):
            raise ContractError(
                f"{paths.spell(path)} is {type(leaf).__name__}; warm-up needs a state tensor at its starting extent",
                field="argument" if region.argument else "attribute",
                region=region.name,
            )
        for axis in region.axes:
            if not -leaf.dim() <= axis < leaf.dim():
                raise AxisOutOfRange(paths.spell(path), axis, list(leaf.shape), region=region.name)
        if region.frame_axis is not None and region.persistent:
            size, reached = (
                leaf.shape[region.frame_axis],
                sorted({e.extent_of(region.name) for e in self.program.catalog}),
            )
            if size not in reached:
                raise ContractError(
                    f"axis {region.frame_axis} of {paths.spell(path)} has {size} in the example call; "
                    f"the declared extents are {reached}",
                    field="start",
                    region=region.name,
                )

    def _leaves(self, region: Region) -> Iterator[tuple[paths.Path, Any]]:
        root = self._root(region)
        for path in paths.expand(root, declared_path(region)):
            yield path, paths.get(root, path)

    def _root(self, region: Region) -> Any:
        return self.example if region.argument is not None else self.module

    # -- calls --------------------------------------------------------------------------------------------------------

    def variants(self, entry: CatalogEntry) -> Iterator[Variant]:
        """The layouts, in eager, in which the states of an entry have been seen so far; at first those of the
        example."""
        seen = [self._layouts.get((*key, extent), [None]) for key, extent in self._extents(entry.extents)]
        for number in range(max(map(len, seen), default=1)):
            yield tuple(layouts[min(number, len(layouts) - 1)] for layouts in seen)

    def _extents(self, named: tuple[tuple[str, int], ...]) -> list[tuple[tuple[str, paths.Path], int]]:
        """Instance and extent, in the contract's order."""
        return [
            ((name, path), extent) for name, extent in named for path, _ in self._leaves(self.contract.region(name))
        ]

    def _learn(self, named: tuple[tuple[str, int], ...], find: Callable[[str, paths.Path], Any]) -> None:
        for (name, path), extent in self._extents(named):
            state = find(name, path)
            layouts = self._layouts.setdefault((name, path, extent), [])
            if isinstance(state, torch.Tensor) and layout_of(state) not in layouts:
                layouts.append(layout_of(state))

    def watch(self, entry: CatalogEntry, variant: Variant) -> None:
        """One eager call, to see which output of which graph is which state, and in what layout."""
        try:
            with self._watching():
                result = self._call(entry, variant)
        except Exception as error:
            inner = backend_error(error)
            if isinstance(inner, CadenceError):
                raise
            raise ContractError(self._suspects(entry, inner), field="regions") from error
        self._refuse_unexplained()
        for region in self.contract.regions:
            for path, _ in self._leaves(region) if region.persistent else ():
                self._check_result(region, path, result)
        self._recognise(result)
        self._learn(entry.next_extents, lambda name, path: self._returned(self.contract.region(name), path, result))

    def capture(self, entry: CatalogEntry, variant: Variant) -> None:
        """One call that captures its class."""
        self._call(entry, variant)
        if entry not in self.program.settled:
            self._explain(entry)

    def _suspects(self, entry: CatalogEntry, error: BaseException) -> str:
        """The code works at the example's extents and fails at another declared point: something that grows is not
        declared."""
        declared = {
            paths.parse(a)[0]
            for a in (*(r.argument for r in self.contract.regions), *(i.argument for i in self.contract.inputs))
            if a
        }
        tensors = [
            k
            for k, v in self.example.items()
            if k not in declared and any(isinstance(x, torch.Tensor) for x in tree_leaves(v))
        ]
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        moved = [
            f"{paths.spell(path)} was given with {counted(leaf.shape[region.frame_axis], 'frame')} and tried with "
            f"{entry.extent_of(region.name)} (start={region.start})"
            for region in self.contract.regions
            if region.persistent and region.frame_axis is not None
            for path, leaf in self._leaves(region)
            if leaf.shape[region.frame_axis] != entry.extent_of(region.name)
        ]
        numpy = [
            f"self.{name}.{key}" if name else f"self.{key}"
            for name, module in (self.module.named_modules() if self.module is not None else ())
            for key, value in vars(module).items()
            if type(value).__module__ == "numpy"
        ]
        return (
            f"the code fails at the declared call {entry}: {first}. "
            f"Arguments that are not declared and may have to grow: {', '.join(tensors) or 'none'}. "
            f"States at other extents than in the example call: {'; '.join(moved) or 'none'}"
            + (
                f". Numpy numbers, which Dynamo takes for arrays: {', '.join(numpy)}; make them Python's"
                if numpy
                else ""
            )
        )

    def as_given(self) -> None:
        """The user's own example call: its layouts may be another Dynamo graph than the carries' are."""
        arguments = {k: _cloned(v) for k, v in self.example.items()}
        with self._watching():
            self._invoke(arguments)
        self._invoke({k: _cloned(v) for k, v in self.example.items()})

    def _explain(self, entry: CatalogEntry) -> None:
        """A declared call that was not captured: say why as an error, since this is before traffic."""
        ledger = self.program.ledger
        broken = [f"Dynamo breaks the graph: {where}" for where in self.program.breaks]
        for reason in ledger.misses:
            if broken:  # behind a break, a local is not known to be the argument that is called like it
                raise NotServed(entry, reason, "; ".join([*broken, *ledger.details.get(reason, {})]))
            if reason == "undeclared_size" and not self.contract.inputs:
                names = ", ".join(c.name for c in self.contract.clocks if c.is_base)
                raise CatalogMismatch(
                    [f"{entry} (no input follows {names}, so no argument changes its size: declare an Input)"]
                )
            if reason != "undeclared_extents":
                raise NotServed(entry, reason, "; ".join(ledger.details.get(reason, {})))
        if not ledger.misses:  # the call has not come before the backend
            self._blame_dynamo(entry)
        raise CatalogMismatch([entry])

    def _blame_dynamo(self, entry: CatalogEntry) -> None:
        """Say so if Dynamo compiles nothing for the example call, or cannot make one graph of it."""
        given = inspect.BoundArguments(self.signature, dict(self.example))  # type: ignore[arg-type]
        dynamos = standing(self.compiled, given.args, given.kwargs)
        miss = barred(dynamos)
        if miss is not None and not dynamos.given_up:
            raise NotServed(entry, miss.reason, miss.detail)
        broken = broken_at(self.compiled, given.args, given.kwargs)
        if broken is not None:
            raise NotServed(entry, "not_traceable", f"Dynamo breaks the graph: {broken}")
        if miss is not None:  # a code that breaks is given up, too
            raise NotServed(entry, miss.reason, miss.detail)

    def _refuse_unexplained(self) -> None:
        """In the declared stream only declared sizes vary; an axis that the user has marked dynamic must be declared.

        Other symbols come from elsewhere (Dynamo remembers sizes per code, not per module) and have the example's
        value.
        """
        for planner, _ in self.program.graphs:
            for first in planner.binding.unexplained if not planner.resumes else ():
                leaves = paths.expand(self.example, first.path)
                if self.dynamic or any(is_marked(paths.get(self.example, leaf), first.axis) for leaf in leaves):
                    clocks = [c.name for c in self.contract.clocks]
                    raise UnexplainedSize(first.accessor, first.axis, first.size, clocks, location=first.location)

    def _call(self, entry: CatalogEntry, variant: Variant) -> Any:
        arguments = {k: _cloned(v) for k, v in self.example.items()}
        contract = self.contract
        for declared in contract.inputs:
            period = contract.clock(declared.clock).period
            size = declared.size(period if period is not None else entry.advance_of(declared.clock))
            for path in paths.expand(arguments, paths.parse(declared.argument)):
                arguments = paths.put(
                    arguments,
                    path,
                    self._sized(
                        paths.get(arguments, path),
                        declared.axis,
                        size,
                        len(contract.advances_of(declared.clock)) > 1 if period is None else False,
                    ),
                )
        layouts = dict(zip((key for key, _ in self._extents(entry.extents)), variant, strict=True))
        for region in contract.regions:
            if not region.persistent or region.mutability != "carry":
                continue
            for path, leaf in self._leaves(region):
                state = self._state(region, path, leaf, entry, layouts[region.name, path])
                if region.argument is not None:
                    arguments = paths.put(arguments, path, state)
                else:
                    paths.put(self.module, path, state, attribute=True)
        return self._invoke(arguments)

    def _state(
        self, region: Region, path: paths.Path, leaf: torch.Tensor, entry: CatalogEntry, layout: Layout
    ) -> torch.Tensor:
        """A state at the entry's extent: the example's own frames, repeated where it has too few.

        It is contiguous, as carries are, so that no graph is compiled for a layout that the stream will not show; a
        layout is put beside the carry.
        """
        axis = region.frame_axis
        several = len({e.extent_of(region.name) for e in self.program.catalog}) > 1
        made = leaf.clone(memory_format=torch.contiguous_format)
        if axis is not None:
            made = self._sized(leaf, axis, entry.extent_of(region.name), several)
        if layout is not None:
            instance = Instance(region, path, -1, axis % leaf.dim() if axis is not None else None)
            loaded = self.program.carry(instance, made).load(made, layout)
            made = loaded if loaded is not None else made
            if axis is not None and several:
                mark_dynamic(made, axis)
        return made

    def _sized(self, leaf: torch.Tensor, axis: int, size: int, symbolic: bool) -> torch.Tensor:
        if leaf.shape[axis] == 0 and size:
            shape = list(leaf.shape)
            shape[axis] = size
            made = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
            if leaf.dtype.is_floating_point:
                made.copy_(torch.randn(shape, generator=self._generator).to(leaf.dtype))
            else:
                made.zero_()
        elif leaf.shape[axis] == size:
            made = leaf.clone(memory_format=torch.contiguous_format)
        else:
            positions = torch.arange(size, device=leaf.device) % leaf.shape[axis]
            made = leaf.index_select(axis, positions)
        if symbolic and size > 1:
            mark_dynamic(made, axis)
        return made

    def _invoke(self, arguments: dict[str, Any]) -> Any:
        bound = inspect.BoundArguments(self.signature, arguments)  # type: ignore[arg-type]
        with self.program.ledger.timed("dynamo"):
            return self.compiled(*bound.args, **bound.kwargs)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Calls inside run eager, and their graphs keep their raw outputs."""
        self.program.watching = True
        try:
            yield
        finally:
            self.program.watching = False

    def _recognise(self, result: Any) -> None:
        """Find each region's new state among the raw outputs of the graphs, by identity."""
        for planner, _ in self.program.graphs:
            for instance in planner.binding.instances:
                state = self._returned(instance.region, instance.path, result)
                if state is None:
                    continue
                for i, out in enumerate(planner.last_outputs):
                    if out is state:
                        planner.pairing.outputs[instance.key] = i
            planner.last_outputs = ()

    def _returned(self, region: Region, path: paths.Path, result: Any) -> Any:
        try:
            if region.attribute is not None:
                return paths.get(self.module, path)
            place = Instance(region, path, -1, None).result_path
            if place is None:
                return None
            return result if place == (0,) and isinstance(result, torch.Tensor) else paths.get(result, place)
        except LookupError:
            return None


def _attributes(module: torch.nn.Module | None) -> list[str]:
    """Names under which a module keeps tensors of its own, for suggestions."""
    if module is None:
        return []
    return [n for n, _ in module.named_buffers()] + [k for k in vars(module) if not k.startswith("_")]


def _cloned(value: Any) -> Any:
    """Containers of tensors, cloned: warm-up never writes into the caller's own arguments."""
    return tree_map_only(torch.Tensor, lambda t: copy_marks(t, _twin(t)), value)


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the same geometry where there can be one."""
    return tensor.clone() if is_expanded(tensor) else same_geometry_copy(tensor)
