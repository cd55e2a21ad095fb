"""Warm-up: capture the whole catalog before traffic, in the caller's grad, inference and autocast context, then seal.

The declared stream is walked call by call through the compiled callable itself, so Dynamo compiles every graph the
stream will need and its guards are warm too. Each catalog entry is called twice: once eager, to see which output is
which state, then to capture. Afterwards the module, its attributes and buffers and the generators are exactly as
before.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from cadence_fx import paths
from cadence_fx._torch import (
    CompileSite,
    backend_error,
    compile_wrapper_of,
    copy_marks,
    mark_dynamic,
    module_of,
    original_of,
    patient_tracing,
    tree_leaves,
    tree_map_only,
)
from cadence_fx.backend import contract_of
from cadence_fx.binding import Instance, declared_path
from cadence_fx.catalog import CatalogEntry
from cadence_fx.contract import Region
from cadence_fx.errors import (
    AxisOutOfRange,
    CadenceError,
    CatalogMismatch,
    ContractError,
    NotCompiled,
    NotServed,
    UnexplainedSize,
    UnknownArgument,
    WrongModule,
)
from cadence_fx.program import Program

_QUIET_SECONDS = 2.0


def program_of(compiled: Any, verb: str) -> Program:
    """The program behind what `torch.compile` returned; made now if nothing has been compiled yet.

    Raises:
        NotCompiled: not compiled, or with another backend.
    """
    wrapper = compile_wrapper_of(compiled)
    if wrapper is None or getattr(wrapper.compiler_fn, "__name__", "") != "cadence":
        raise NotCompiled(verb, compiled)
    module = module_of(original_of(compiled))
    site = CompileSite(wrapper=wrapper, module=module)
    options = wrapper.kwargs.get("options")
    return Program.of(site, options, contract_of(site, options))


def warm_up(compiled: Any, *args: Any, progress: bool | None = None, **kwargs: Any) -> Any:
    """Capture every class of the declared stream, then seal.

    Args:
        compiled: what `torch.compile(..., backend="cadence")` returned. *args, **kwargs: of one first call of a turn:
        real tensors, states at their starting extents. They are not changed. progress: a line to stderr for each
        class once warm-up has taken two seconds; by default only on a terminal.

    Returns:
        The report of the program.

    Raises:
        ContractError: the declaration does not fit the callable, its module or these arguments.
        CatalogMismatch: entries of the catalog that no graph serves.
        CatalogTooWide, NotCompiled.
    """
    from cadence_fx.report import report

    program = program_of(compiled, "warm_up")
    if program.contract is None:
        raise ContractError(
            "warm_up() captures a contract's catalog, and no contract is declared; pass options={'contract': ...} to "
            "torch.compile, or use cadence_fx.declare",
            field="contract",
        )
    original = original_of(compiled)
    call = _Call(program, compiled, original, args, kwargs)
    call.check()
    entries = program.catalog.entries
    tell = _Progress(len(entries) + 1, program.name, progress)
    program.unseal()
    with _Untouched(original, program), patient_tracing():
        try:
            for entry in entries:
                tell.step(str(entry))
                call.watch(entry)
                call.capture(entry)
            tell.step("as called by the user")
            call.as_given()
        except Exception as error:
            inner = backend_error(error)
            if inner is error:
                raise
            raise inner from error
    program.seal()
    tell.done(program)
    return report(compiled)


class _Call:
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
        self.args, self.kwargs = args, kwargs
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
            for path, leaf in self._leaves(region):
                self._check_leaf(region, path, leaf)
        for declared in contract.inputs:
            for path in paths.expand(self.example, paths.parse(declared.argument)):
                leaf = paths.get(self.example, path)
                if not isinstance(leaf, torch.Tensor):
                    raise ContractError(f"{declared.argument!r} is {type(leaf).__name__}, not a tensor", field="inputs")
                if not -leaf.dim() <= declared.axis < leaf.dim():
                    raise AxisOutOfRange(declared.argument, declared.axis, list(leaf.shape))

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
        root: Any = self.example if region.argument is not None else self.module
        for path in paths.expand(root, declared_path(region)):
            yield path, paths.get(root, path)

    # -- calls --------------------------------------------------------------------------------------------------------

    def watch(self, entry: CatalogEntry) -> None:
        """One eager call, to see which output of which graph is which state."""
        self.program.watching = True
        self._capturing(False)
        try:
            result = self._call(entry)
        except Exception as error:
            inner = backend_error(error)
            if isinstance(inner, CadenceError) or entry == self.program.catalog.entries[0]:
                raise
            raise ContractError(self._suspects(entry, inner), field="regions") from error
        finally:
            self.program.watching = False
            self._capturing(True)
        self._refuse_unexplained()
        self._recognise(result)

    def capture(self, entry: CatalogEntry) -> None:
        """One call that captures its class."""
        self._call(entry)
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
        return (
            f"the code fails at the declared call {entry}: {first}. "
            f"Arguments that are not declared and may have to grow: {', '.join(tensors) or 'none'}"
        )

    def as_given(self) -> None:
        """The user's own example call: its layouts may be another Dynamo graph than the carries' are."""
        arguments = {k: _cloned(v) for k, v in self.example.items()}
        with _Watching(self):
            self._invoke(arguments)
        self._invoke({k: _cloned(v) for k, v in self.example.items()})

    def _explain(self, entry: CatalogEntry) -> None:
        """A declared call that was not captured: say why as an error, since this is before traffic."""
        ledger = self.program.ledger
        for reason in ledger.misses:
            if reason not in ("watched", "undeclared_extents"):
                raise NotServed(entry, reason, "; ".join(ledger.details.get(reason, {})))
        raise CatalogMismatch([entry])

    def _refuse_unexplained(self) -> None:
        """In the declared stream only declared sizes vary, so a symbol that no clock explains is a mistake."""
        for planner, _ in self.program.graphs:
            for first in planner.binding.unexplained:
                raise UnexplainedSize(
                    first.accessor,
                    first.axis,
                    first.size,
                    [c.name for c in self.contract.clocks],
                    location=first.location,
                )

    def _call(self, entry: CatalogEntry) -> Any:
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
        for region in contract.regions:
            if not region.persistent or region.mutability != "carry":
                continue
            for path, leaf in self._leaves(region):
                state = self._state(region, path, leaf, entry)
                if region.argument is not None:
                    arguments = paths.put(arguments, path, state)
                else:
                    paths.put(self.module, path, state)
        return self._invoke(arguments)

    def _state(self, region: Region, path: paths.Path, leaf: torch.Tensor, entry: CatalogEntry) -> torch.Tensor:
        """A state at the entry's extent: the example's own frames, repeated where it has too few."""
        axis = region.frame_axis
        if axis is None:
            return leaf.clone(memory_format=torch.contiguous_format)
        extent = entry.extent_of(region.name)
        several = len({e.extent_of(region.name) for e in self.program.catalog}) > 1
        return self._sized(leaf, axis, extent, several)

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
        return self.compiled(*bound.args, **bound.kwargs)

    def _capturing(self, on: bool) -> None:
        for _, table in self.program.graphs:
            table.capturing = on

    def _recognise(self, result: Any) -> None:
        """Find each region's new state among the raw outputs of the graphs, by identity."""
        for planner, _ in self.program.graphs:
            for instance in planner.binding.instances:
                state = self._returned(instance, result)
                if state is None:
                    continue
                for i, out in enumerate(planner.last_outputs):
                    if out is state:
                        planner.pairing.outputs[instance.key] = i
            planner.last_outputs = ()

    def _returned(self, instance: Instance, result: Any) -> Any:
        region = instance.region
        try:
            if region.attribute is not None:
                return paths.get(self.module, instance.path)
            if region.result is None:
                return None
            pattern = paths.parse(region.result) if isinstance(region.result, str) else (region.result,)
            if pattern == (0,) and isinstance(result, torch.Tensor):
                return result
            stars = [
                step
                for step, declared in zip(instance.path, declared_path(region), strict=True)
                if declared == paths.ANY
            ]
            concrete = tuple(stars.pop(0) if step == paths.ANY else step for step in pattern)
            return paths.get(result, concrete)
        except (LookupError, IndexError):
            return None


def _attributes(module: torch.nn.Module | None) -> list[str]:
    """Names under which a module keeps tensors of its own, for suggestions."""
    if module is None:
        return []
    return [n for n, _ in module.named_buffers()] + [k for k in vars(module) if not k.startswith("_")]


class _Watching:
    """Calls inside run eager and keep their raw outputs; on exit the states are recognised in nothing (attributes
    aside)."""

    def __init__(self, call: _Call) -> None:
        self._call = call

    def __enter__(self) -> None:
        self._call.program.watching = True
        self._call._capturing(False)

    def __exit__(self, *exc: object) -> None:
        self._call.program.watching = False
        self._call._capturing(True)


class _Untouched:
    """Whatever warm-up does to a module, its tensors and the generators is undone on exit."""

    def __init__(self, original: Any, program: Program) -> None:
        self._module = module_of(original)
        self._program = program

    def __enter__(self) -> None:
        self._attributes: list[tuple[torch.nn.Module, dict[str, Any], dict[str, Any]]] = []
        self._bytes: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._rng = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        for name, module in self._module.named_modules() if self._module is not None else ():
            plain = {
                k: _shallow(v) for k, v in vars(module).items() if k not in ("_parameters", "_modules", "_buffers")
            }
            buffers = dict(module._buffers)
            self._attributes.append((module, plain, buffers))
            prefix = paths.parse(name) if name else ()
            for key, value in (*buffers.items(), *plain.items()):
                scratch = self._program.is_scratch(paths.Origin("module", (*_numbers(prefix), key)))
                if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter) and not scratch:
                    self._bytes.append((value, value.detach().to("cpu", copy=True)))

    def __exit__(self, *exc: object) -> None:
        for module, plain, buffers in self._attributes:
            for key in [k for k in vars(module) if k not in plain and k not in ("_parameters", "_modules", "_buffers")]:
                del vars(module)[key]
            vars(module).update(plain)
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for tensor, saved in self._bytes:
                tensor.copy_(saved)
        torch.set_rng_state(self._rng)
        for i, state in enumerate(self._cuda):
            torch.cuda.set_rng_state(state, i)


def _numbers(path: paths.Path) -> paths.Path:
    return tuple(int(s) if isinstance(s, str) and s.isdigit() else s for s in path)


def _shallow(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, dict)) else value


def _cloned(value: Any) -> Any:
    """Containers of tensors, cloned: warm-up never writes into the caller's own arguments."""
    return tree_map_only(torch.Tensor, lambda t: copy_marks(t, _twin(t)), value)


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, which are part of the signature; an expanded tensor is its own copy."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return tensor.clone()
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


class _Progress:
    """A line per class on stderr, once warm-up has taken more than two seconds."""

    def __init__(self, total: int, name: str, wanted: bool | None) -> None:
        self._total, self._name, self._done = total, name, 0
        self._start = time.perf_counter()
        self._wanted = sys.stderr.isatty() if wanted is None else wanted

    def step(self, what: str) -> None:
        self._done += 1
        elapsed = time.perf_counter() - self._start
        if self._wanted and elapsed > _QUIET_SECONDS:
            left = elapsed / max(1, self._done - 1) * (self._total - self._done + 1)
            print(
                f"{self._name}: {self._done}/{self._total}, {elapsed:.0f} s, about {left:.0f} s left: {what}",
                file=sys.stderr,
                flush=True,
            )

    def done(self, program: Program) -> None:
        elapsed = time.perf_counter() - self._start
        if self._wanted and elapsed > _QUIET_SECONDS:
            print(
                f"{self._name}: {program.ledger.captures} classes captured in {elapsed:.1f} s, sealed",
                file=sys.stderr,
                flush=True,
            )
