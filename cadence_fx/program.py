"""Everything that belongs to one `torch.compile` call: contract, catalog, carries, and the tables of all its graphs.

Dynamo compiles one user callable into several graphs (fill phase, saturated phase, sizes 0 and 1, other strides).
They share one contract, one catalog (the union over graphs must be the whole of it) and one set of carries, so a
stream can walk from graph to graph without moving a byte of state. Storage, graphs and the state of a stream are
three owners: carries live here, classes in the tables, and which stream's state a carry holds is the carry's own
book-keeping.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from cadence_fx import paths
from cadence_fx._torch import CompileSite, own, owner_of, running_modules, user_options
from cadence_fx.binding import Instance, bind, declared_path
from cadence_fx.capture import ReplayClass
from cadence_fx.catalog import Catalog, CatalogEntry
from cadence_fx.contract import Contract
from cadence_fx.errors import ContractError, UnknownArgument, WrongModule, unknown_name
from cadence_fx.graph import GraphPlanner
from cadence_fx.kept import Keep
from cadence_fx.ledger import Ledger
from cadence_fx.locks import Gate
from cadence_fx.passes import Choice, select_passes, stage_reads
from cadence_fx.paths import Origin
from cadence_fx.plan import Miss
from cadence_fx.prediction import Prediction
from cadence_fx.proofs import Proof
from cadence_fx.recorder import DevicePool
from cadence_fx.storage import Carry
from cadence_fx.table import ReplayTable

_OPTIONS = ("contract", "passes")

CarryKey = tuple[str, paths.Path, tuple[int, ...], torch.dtype, torch.device, bool]


class Program:
    """One `torch.compile(..., backend="cadence")` call.

    Attributes:
        contract: what was declared, or None: then every call runs eager.
        passes: which passes its classes are rewritten by; None for the default ones.
        catalog: every reachable call; empty without a contract.
        graphs: one (planner, table) per Dynamo graph.
        carries: storage of the region instances.
        proofs: what the graph of each class says about the retention of each state, by `Proof.key`.
        audited_calls: calls that `audit` has compared with the stock computation.
        sizes: argument path → shape in the declared stream, as first seen; only a declared Input lets an axis vary.
        twins: what a class computes and for which call → the class and the accessors of its arguments, so that another
            Dynamo graph of the very same computation shares the recording.
        keep: memory of values that are computed once; classes share it.
        restless: weights that are written before every call, so that nothing is computed from them in advance.
        settled: catalog entries for which a class was captured or refused for good.
        signatures: catalog entry → what its captured calls looked like, by accessor.
        attributes: path -> value of the module's attributes and buffers when warm-up began, while it lasts.
        breaks: why and where Dynamo broke the callable into several graphs.
        prediction: what the last warm-up should come to.
        watching: calls run eager and their raw outputs are kept, so that warm-up can see which output is which state.
        auditor: answers calls in place of their table, with what it is asked: planner, table, arguments.
        sealed: warm-up is over.
    """

    _all: weakref.WeakSet[Program] = weakref.WeakSet()

    def __init__(self, contract: Contract | None, name: str, passes: Choice = None) -> None:
        self.contract = contract
        self.passes = passes
        self.name = name
        self.catalog = contract.catalog() if contract is not None else Catalog(())
        self.ledger = Ledger(name)
        self.gate = Gate()
        self.graphs: list[tuple[GraphPlanner, ReplayTable]] = []
        self.carries: dict[CarryKey, Carry] = {}
        self.proofs: dict[tuple[str, int, int, int], Proof] = {}
        self.audited_calls = 0
        self.sizes: dict[paths.Path, tuple[int, ...]] = {}
        self.twins: dict[Any, tuple[ReplayClass, list[str]]] = {}
        self.keep = Keep()
        self.restless: set[str] = set()
        self.settled: set[CatalogEntry] = set()
        self.signatures: dict[CatalogEntry, list[dict[str, tuple[Any, ...]]]] = {}
        self.attributes: Mapping[paths.Path, Any] | None = None
        self.breaks: dict[str, None] = {}
        self.prediction: Prediction | None = None
        self.watching = False
        self.sealed = False
        self.auditor: Callable[[GraphPlanner, ReplayTable, Sequence[Any]], Any] | None = None
        self.closed = False
        Program._all.add(self)

    # -- compiling ----------------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, site: CompileSite, options: Mapping[str, Any] | None, contract: Contract | None) -> Program:
        """The program of the `torch.compile` call at `site`, made on its first graph.

        Raises:
            ContractError: an unknown option, a contract of another type, or passes that do not exist.
        """
        existing = owner_of(site.wrapper)
        if existing is not None and not existing.closed:
            return existing  # type: ignore[no-any-return]
        for key in user_options(options):
            if key not in _OPTIONS:
                raise ContractError(f"options: {unknown_name('option', key, _OPTIONS)}", field=key)
        if contract is not None and not isinstance(contract, Contract):
            raise ContractError(f"expected a Contract, found {contract!r}", field="contract")
        name = (contract.name if contract is not None else None) or (
            type(site.module).__name__ if site.module is not None else "function"
        )
        passes = user_options(options).get("passes")
        try:
            select_passes(passes)
            passes = passes if passes is None or isinstance(passes, Mapping) else tuple(passes)
        except (TypeError, ValueError) as error:
            raise ContractError(f"options: passes: {error}", field="passes") from error
        program = cls(contract, name, passes)
        if site.wrapper is not None:
            own(site.wrapper, program)
        return program

    def compile(self, gm: fx.GraphModule, site: CompileSite) -> Callable[..., Any]:
        """What Dynamo calls instead of `gm`."""
        planner, table, complete = self.prepare(gm, site)
        if site.broken is not None:
            self.breaks[site.broken] = None
        self.graphs.append((planner, table))

        def call(*args: Any) -> Any:
            args = complete(args)
            if self.auditor is not None:
                return self.auditor(planner, table, args)
            return planner.finish(table(args), args)

        return call

    def prepare(
        self, gm: fx.GraphModule, site: CompileSite
    ) -> tuple[GraphPlanner, ReplayTable, Callable[[tuple[Any, ...]], tuple[Any, ...]]]:
        """The planner and the table that calls of a Dynamo graph get, and what makes their arguments of Dynamo's."""
        binding = bind(gm, self.contract, site, lambda path: self._is_lazy(site, path))
        numbers = {i.name for i in binding.inputs if i.role == "scalar" and i.origin.query == "value" and not i.random}
        tables = {i.name for i in binding.inputs if i.role in ("fixed", "staged") and i.origin.root == "module"}
        split = stage_reads(gm, numbers, tables)
        first = None
        if split is not None:
            first, gm = split[0].forward, split[1]
            binding = bind(gm, self.contract, site, lambda path: self._is_lazy(site, path))
        self._check_present(site)
        absent = self._unprimed(site)
        device = _device(gm)
        planner = GraphPlanner(self, gm, binding, device, site)
        if absent:
            planner.verdict = Miss("unprimed", f"{', '.join(absent)} is None: the state does not exist yet")
        roles = (
            binding.indices("region"),
            binding.indices("staged"),
            binding.indices("scalar"),
            binding.indices("fixed"),
        )
        names = [i.accessor or i.name for i in binding.inputs]
        limit = self.contract.max_classes if self.contract is not None else 0
        table = ReplayTable(planner, roles, names, device, self.ledger, limit, self.gate)
        table.sealed = self.sealed
        return planner, table, lambda args: args if first is None else (*args, *first(*args))

    def _is_lazy(self, site: CompileSite, path: paths.Path) -> bool:
        """Whether an attribute is not what it was when warm-up began: the code itself has put it there."""
        if self.attributes is None or site.module is None:
            return False
        try:
            owner, value = paths.get(site.module, path[:-1]), paths.get(site.module, path)
        except LookupError:
            return False
        kept = isinstance(owner, torch.nn.Module) and path[-1] not in owner._parameters
        return kept and not same_value(value, self.attributes.get(path))

    def _check_present(self, site: CompileSite) -> None:
        """Attributes a contract names must exist in the module it is given for."""
        if self.contract is None or site.module is None:
            return
        by_attribute = [r for r in self.contract.regions if r.attribute is not None]
        missing = [r for r in by_attribute if not paths.expand(site.module, declared_path(r))]
        if missing:
            running = (
                (m, at) for m, at in running_modules() if all(paths.expand(m, declared_path(r)) for r in missing)
            )
            meant = next(running, None)
            if meant is not None or len(missing) == len(self.contract.regions):
                raise WrongModule(
                    self.contract.name or repr(self.contract),
                    ", ".join(r.attribute or "" for r in missing),
                    type(site.module).__name__,
                    broken=None if meant is None else (type(meant[0]).__name__, meant[1]),
                )
            known = [n for n, _ in site.module.named_buffers()] + [
                k for k, v in vars(site.module).items() if isinstance(v, torch.Tensor)
            ]
            raise UnknownArgument(missing[0].attribute or "", known, field="attribute", region=missing[0].name)

    def _unprimed(self, site: CompileSite) -> list[str]:
        """Regions whose place holds None in the call being compiled."""
        found = []
        for region in self.contract.regions if self.contract is not None else ():
            root: Any = site.values if region.argument is not None else site.module
            if root is None or not region.persistent:
                continue
            concrete = paths.expand(root, declared_path(region))
            if (
                concrete
                and any(paths.get(root, path) is None for path in concrete)
                or not concrete
                and _cut_short(root, declared_path(region))
            ):
                found.append(region.argument or f"self.{region.attribute}")
        return found

    # -- state --------------------------------------------------------------------------------------------------------

    def carry(self, instance: Instance, like: torch.Tensor) -> Carry:
        """The carry of a region instance for states of this dtype, device and shape, made on first use."""
        key = self._carry_key(instance, like)
        carry = self.carries.get(key)
        if carry is None:
            carry = Carry(instance.name, like.shape, instance.axis, instance.region.bound, like, self.ledger)
            self.carries[key] = carry
        return carry

    def existing_carry(self, instance: Instance, like: torch.Tensor) -> Carry | None:
        """The carry, if a class has needed it."""
        return self.carries.get(self._carry_key(instance, like))

    @staticmethod
    def _carry_key(instance: Instance, like: torch.Tensor) -> CarryKey:
        rest = tuple(size for axis, size in enumerate(like.shape) if axis != instance.axis)
        return (*instance.key, rest, like.dtype, like.device, torch.is_inference_mode_enabled())

    def note_sizes(self, shapes: Mapping[paths.Path, tuple[int, ...]]) -> None:
        """Remember the shapes of arguments in the declared stream."""
        for path, shape in shapes.items():
            self.sizes.setdefault(path, shape)

    @contextlib.contextmanager
    def as_it_was(self) -> Iterator[None]:
        """What planning notes inside is forgotten: extents, shapes, proofs, signatures, carries that it has made."""
        tables: list[dict[Any, Any]] = [
            self.carries,
            self.proofs,
            self.sizes,
            self.signatures,
            self.ledger.seconds,
        ]
        before = [{key: list(v) if isinstance(v, list) else v for key, v in table.items()} for table in tables]
        settled = set(self.settled)
        try:
            yield
        finally:
            self.settled = settled
            for table, saved in zip(tables, before, strict=True):
                table.clear()
                table.update(saved)

    def is_scratch(self, origin: Origin) -> bool:
        """Whether a module attribute is declared to mean nothing between calls."""
        regions = self.contract.regions if self.contract is not None else ()
        return any(
            not r.persistent and r.attribute is not None and paths.matches(declared_path(r), origin.path)
            for r in regions
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        """A copied compiled callable starts afresh: classes are bound to the original's memory."""
        return Program(self.contract, self.name, self.passes)

    # -- life ---------------------------------------------------------------------------------------------------------

    def seal(self) -> None:
        """Warm-up is over: counting starts, and every later capture is a late one."""
        self.sealed = True
        self.ledger.begin_traffic()
        for _, table in self.graphs:
            table.sealed = True
            for entry in table.classes.values():
                entry.replays = 0

    def unseal(self) -> None:
        """A further warm-up (another mode, say) may capture, also what the last one had no memory for."""
        self.sealed = False
        for _, table in self.graphs:
            table.sealed = False
            table.retry()

    def close(self) -> None:
        """Give up every class and every carry."""
        with self.gate.lock:
            for _, table in self.graphs:
                table.clear()
            self.carries.clear()  # a state that is still held keeps its memory alive
            self.graphs.clear()
            self.twins.clear()
            self.closed = True

    @classmethod
    def close_all(cls) -> None:
        """`torch._dynamo.reset()`: every program and every device pool."""
        for program in list(cls._all):
            program.close()
        DevicePool.teardown()


def same_value(left: Any, right: Any) -> bool:
    """Whether two values of an attribute are one object, or one memory, or containers of the same, or equal numbers."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):  # what is written in place may come back as another object
        return left.data_ptr() == right.data_ptr() and left.shape == right.shape and left.stride() == right.stride()
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_value(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same_value, left, right))
    return isinstance(left, (int, float, str, set)) and bool(left == right)


def _cut_short(root: Any, path: paths.Path) -> bool:
    """Whether a None stands on the way to a state (`cache=None` for `cache[0]['k']`)."""
    for end in range(1, len(path)):
        if any(paths.get(root, prefix) is None for prefix in paths.expand(root, path[:end])):
            return True
    return False


def _device(gm: fx.GraphModule) -> torch.device:
    """Where the graph runs: its first accelerator input, or the CPU."""
    devices = [
        n.meta["example_value"].device
        for n in gm.graph.find_nodes(op="placeholder")
        if isinstance(n.meta.get("example_value"), torch.Tensor)
    ]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
