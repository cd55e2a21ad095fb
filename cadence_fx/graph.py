"""Classes of one Dynamo graph: from a call's sizes to a rewritten static graph (the `Planner` of `torch.compile`)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx

from cadence_fx import paths
from cadence_fx._torch import ambient_state, to_static_aten
from cadence_fx.binding import Binding, Instance, scalar_outputs
from cadence_fx.catalog import CatalogEntry
from cadence_fx.contract import Contract
from cadence_fx.errors import NotCapturable, PassFailed, RetentionMismatch
from cadence_fx.ledger import log
from cadence_fx.passes import PassContext, RegionSlot, default_passes, run_passes
from cadence_fx.passes.graphs import GraphFacts, output_node
from cadence_fx.passes.graphs import location as _location
from cadence_fx.passes.provenance import Contradicted, Proved, prove_retentions
from cadence_fx.plan import Miss, Plan, RegionUse
from cadence_fx.retention import Span
from cadence_fx.signature import compare, region_key, tensor_key
from cadence_fx.twins import fingerprint, in_terms_of

if TYPE_CHECKING:
    from cadence_fx.program import Program
    from cadence_fx.replay import ReplayClass


class GraphPlanner:
    """Builds the classes of one Dynamo graph and looks after the states of its eager calls.

    Args:
        program: the `torch.compile` call this graph belongs to; owns contract, carries and catalog.
        gm: Dynamo's graph: the stock computation.
        binding: roles, instances and equations of its inputs.
        device: where it runs.
    """

    def __init__(self, program: Program, gm: fx.GraphModule, binding: Binding, device: torch.device) -> None:
        self.program = program
        self.device = device
        self.gm = gm
        self.binding = binding
        self.serves: tuple[CatalogEntry, ...] = ()
        if program.contract is not None:
            self.serves = binding.serves(program.catalog, program.contract)
        # Where each instance's new state leaves, as far as known: by watching a call (warm-up) or from a traced graph.
        self.outputs_of: dict[tuple[str, Any], int | None] = {}
        self.last_outputs: Sequence[Any] = ()
        self.names = [i.accessor if i.origin.query == "value" and i.origin.path else i.name for i in binding.inputs]
        self._last_signature: dict[str, tuple[Any, ...]] = {}
        self._ints = {i: _evaluator(expr, binding) for i, expr in scalar_outputs(gm).items()}
        self._in_place: set[int] = set()

    def itemsize(self, index: int) -> int:
        """Bytes of one element of a tensor input."""
        return int(self.gm.graph.find_nodes(op="placeholder")[index].meta["example_value"].element_size())

    # -- planning -----------------------------------------------------------------------------------------------------

    def plan(self, args: Sequence[Any]) -> Plan | Miss:
        program, binding = self.program, self.binding
        for entry in binding.inputs:
            if entry.random:
                return Miss(
                    "host_random", f"{entry.accessor or entry.name} is drawn from Python's random module on the host"
                )
        if program.contract is None:
            return Miss(
                "no_contract",
                "nothing declares what is state; pass options={'contract': ...} or use cadence_fx.declare",
            )
        point = self.point(args, program.contract)
        if isinstance(point, Miss):
            return point
        program.settled.add(point)
        try:
            plan = self._specialise(args, point)
        except NotCapturable as error:
            return Miss(error.reason, str(error), lasting=True)
        program.note_sizes(self._argument_shapes(args))
        program.signatures.setdefault(point, []).append(self._signature(args))
        return plan

    def unknown(self, args: Sequence[Any]) -> Miss | None:
        """Whether warm-up has captured this very signature, perhaps through another Dynamo graph."""
        contract = self.program.contract
        if contract is None:
            return None
        point = self.point(args, contract)
        if isinstance(point, Miss):
            return point
        mine = self._signature(args)
        answers = [compare(known, mine) for known in self.program.signatures.get(point, [])]
        if None in answers:
            return None
        reason, detail = next(
            (a for a in answers if a is not None), ("sealed", f"{point} was not captured before the seal")
        )
        return Miss(reason, detail)

    def _signature(self, args: Sequence[Any]) -> dict[str, tuple[Any, ...]]:
        found: dict[str, tuple[Any, ...]] = {"": ambient_state(self.device.type)}
        for entry in self.binding.inputs:
            if entry.role == "region":
                found[entry.accessor] = region_key(args[entry.index])
            elif entry.role == "staged":
                found[entry.accessor] = tensor_key(args[entry.index])
        return found

    def _argument_shapes(self, args: Sequence[Any]) -> dict[paths.Path, tuple[int, ...]]:
        return {i.origin.path: tuple(args[i.index].shape) for i in self.binding.inputs if i.role == "staged"}

    def point(self, args: Sequence[Any], contract: Contract) -> CatalogEntry | Miss:
        """The catalog entry of a call, or why it has none."""
        shapes = {i.index: tuple(args[i.index].shape) for i in self.binding.inputs if i.role in ("region", "staged")}
        extents: dict[str, int] = {}
        for instance in self.binding.instances:
            if instance.axis is None:
                continue
            extent = shapes[instance.index][instance.axis]
            if extents.setdefault(instance.region.name, extent) != extent:
                return Miss(
                    "undeclared_extents",
                    f"instances of {instance.region.name} have different extents on axis {instance.axis}",
                )
        strange = self._undeclared_size(args, contract)
        if strange is not None:
            return strange
        sizes = self._input_sizes(shapes, contract)
        for entry in self.serves or program_entries(self.program):
            if all(
                entry.extent_of(name) == extent for name, extent in extents.items() if name in dict(entry.extents)
            ) and all(
                declared.size(
                    entry.advance_of(declared.clock)
                    if contract.clock(declared.clock).period is None
                    else contract.clock(declared.clock).period or 0
                )
                == size
                for declared, size in sizes
            ):
                return entry
        return self._outside(extents, sizes)

    def _undeclared_size(self, args: Sequence[Any], contract: Contract) -> Miss | None:
        """An axis that no Input lets vary must have the size it had when the declared stream was first seen."""
        free = {(paths.parse(i.argument), i.axis) for i in contract.inputs}
        for path, shape in self._argument_shapes(args).items():
            known = self.program.sizes.get(path)
            if known is None or len(known) != len(shape):
                continue
            for axis, (size, usual) in enumerate(zip(shape, known, strict=True)):
                if size != usual and not {(path, axis), (path, axis - len(shape))} & free:
                    spelled = paths.spell(path)
                    return Miss(
                        "undeclared_size",
                        f"axis {axis} of {spelled} has {size}, and no clock explains another size than {usual}{self._line(spelled)}",
                    )
        return None

    def _input_sizes(self, shapes: dict[int, tuple[int, ...]], contract: Contract) -> list[tuple[Any, int]]:
        found = []
        for declared in contract.inputs:
            for entry in self.binding.inputs:
                if (
                    entry.role == "staged"
                    and entry.origin.path == paths.parse(declared.argument)
                    and entry.origin.query == "value"
                ):
                    found.append((declared, shapes[entry.index][declared.axis]))
        return found

    def _outside(self, extents: dict[str, int], sizes: list[tuple[Any, int]]) -> Miss:
        for declared, size in sizes:
            contract = self.program.contract
            assert contract is not None
            period = contract.clock(declared.clock).period
            allowed = {
                declared.size(a) for a in ((period,) if period is not None else contract.advances_of(declared.clock))
            }
            if size not in allowed:
                return Miss(
                    "undeclared_size",
                    f"axis {declared.axis} of {declared.argument} has {size}; the contract allows {sorted(allowed)}{self._line(declared.argument)}",
                )
        for instance in self.binding.instances:
            name = instance.region.name
            if name in extents:
                known = sorted({e.extent_of(name) for e in self.program.catalog})
                if extents[name] not in known:
                    return Miss(
                        "undeclared_extents",
                        f"axis {instance.axis} of {instance.name} has {extents[name]}; the contract reaches {known}{self._line_of(instance)}",
                    )
        return Miss(
            "undeclared_extents",
            f"no call of the declared stream meets {', '.join(f'{n} = {e}' for n, e in extents.items())} together",
        )

    def _line(self, argument: str) -> str:
        places = [i.location for i in self.binding.inputs if str(i.origin) == argument and i.location]
        return f" (used at {places[0]})" if places else ""

    def _line_of(self, instance: Instance) -> str:
        place = self.binding.inputs[instance.index].location
        return f" (used at {place})" if place else ""

    # -- specialising -------------------------------------------------------------------------------------------------

    def _specialise(self, args: Sequence[Any], point: CatalogEntry | None) -> Plan:
        program, binding = self.program, self.binding
        aten = to_static_aten(self.gm, args)
        facts = GraphFacts(aten.graph)
        placeholders = aten.graph.find_nodes(op="placeholder")
        written = {i for i, node in enumerate(placeholders) if facts.writes_to(node)}
        self._in_place = {inst.index for inst in binding.instances if inst.index in written}
        uses, slots, free = self._regions(aten, args, point, placeholders, written)
        scratch = {i.index for i in binding.inputs if i.role == "fixed" and program.is_scratch(i.origin)}
        fixed = [i for i in binding.indices("fixed")]
        staged = [*binding.indices("staged"), *free]
        context = PassContext(tuple(slots), frozenset(placeholders[i].name for i in fixed))
        plan = Plan(
            runs=[],
            reference=self.gm.forward,
            label=program.label(point, self),
            fixed=fixed,
            staged=staged,
            mutated=sorted(written & {*fixed, *staged} - scratch),
            regions=uses,
        )
        plan.fingerprint = fingerprint(aten.graph, self.names)
        plan.notes.extend(self._prove(aten, slots))
        try:
            rewritten = run_passes(aten, context, default_passes())
            plan.runs.append(("rewritten in place", rewritten.forward))
            # The last pass has refused every operator that is tagged as drawing.
            plan.draws = False if _all_known(aten.graph) else None
        except PassFailed as error:
            log.warning("%s: %s", program.ledger.name, error)
            plan.notes.append(str(error))
        plan.runs.append(("state copied back", _written_back(aten.forward, uses)))
        plan.notes.extend(context.notes)
        return plan

    def _regions(
        self,
        aten: fx.GraphModule,
        args: Sequence[Any],
        point: CatalogEntry | None,
        placeholders: list[fx.Node],
        written: set[int],
    ) -> tuple[list[RegionUse], list[RegionSlot], list[int]]:
        """Pair every instance with the output that is its new state. Instances without one are staged like any argument."""
        uses: list[RegionUse] = []
        slots: list[RegionSlot] = []
        free: list[int] = []
        self._pair(aten, args, point, placeholders, written)
        for instance in self.binding.instances:
            region, index = instance.region, instance.index
            extent, following, advance = self._extents(instance, point, args)
            output = self.outputs_of.get(instance.key)
            if output is None and index not in written:
                free.append(index)
                continue
            carry = self.program.carry(instance, args[index])
            uses.append(RegionUse(index, carry, extent, following, output))
            slots.append(
                RegionSlot(
                    name=region.name,
                    declared=region,
                    instance=instance.name,
                    placeholder=placeholders[index].name,
                    output=output,
                    axis=instance.axis if instance.axis is not None else 0,
                    extent=extent,
                    next_extent=following,
                    advance=advance,
                )
            )
        return uses, slots, free

    def _extents(self, instance: Instance, point: CatalogEntry | None, args: Sequence[Any]) -> tuple[int, int, int]:
        """Extents on entry and exit, and frames added, in one class."""
        region = instance.region
        if instance.axis is None or point is None:
            size = args[instance.index].shape[instance.axis or 0] if args[instance.index].dim() else 1
            return size, size, 0
        ticks = point.advance_of(region.frame_clock) if region.frame_clock is not None else 0
        return point.extent_of(region.name), point.next_of(region.name), region.added(ticks)

    def _pair(
        self,
        aten: fx.GraphModule,
        args: Sequence[Any],
        point: CatalogEntry | None,
        placeholders: list[fx.Node],
        written: set[int],
    ) -> None:
        outputs = output_node(aten.graph).args[0]
        taken = {o for o in self.outputs_of.values() if o is not None}
        for instance in self.binding.instances:
            if instance.key in self.outputs_of:
                self._check_extent(instance, outputs, point, args)
                continue
            if instance.index in written:
                self.outputs_of[instance.key] = None
                continue
            shape = self._next_shape(instance, point, args)
            like = args[instance.index]
            fits = [
                i
                for i, out in enumerate(outputs)  # type: ignore[arg-type]
                if i not in taken
                and isinstance(out, fx.Node)
                and isinstance(out.meta.get("val"), torch.Tensor)
                and list(out.meta["val"].shape) == shape
                and out.meta["val"].dtype == like.dtype
            ]
            fed = [i for i in fits if _feeds(placeholders[instance.index], outputs[i])]  # type: ignore[index,arg-type]
            wanted = instance.region.result
            choice = wanted if isinstance(wanted, int) and wanted in fits else (fed or fits or [None])[0]
            if choice is None:
                self._refuse_shape(instance, outputs, point, args)
                continue
            taken.add(choice)
            self.outputs_of[instance.key] = choice

    def _next_shape(self, instance: Instance, point: CatalogEntry | None, args: Sequence[Any]) -> list[int]:
        shape = list(args[instance.index].shape)
        if instance.axis is not None:
            shape[instance.axis] = self._extents(instance, point, args)[1]
        return shape

    def _check_extent(self, instance: Instance, outputs: Any, point: CatalogEntry | None, args: Sequence[Any]) -> None:
        """A state whose extent is not the declared one is a contradiction, whatever it holds."""
        output = self.outputs_of[instance.key]
        if output is None:
            return
        found = list(outputs[output].meta["val"].shape)
        expected = self._next_shape(instance, point, args)
        if found != expected:
            self._mismatch(instance, point, args, f"a state of shape {found}", outputs[output])

    def _refuse_shape(self, instance: Instance, outputs: Any, point: CatalogEntry | None, args: Sequence[Any]) -> None:
        """No output has the declared shape. One that differs on the frame axis alone is the state, with another retention."""
        expected = self._next_shape(instance, point, args)
        axis = instance.axis
        for out in outputs:
            val = out.meta.get("val") if isinstance(out, fx.Node) else None
            if isinstance(val, torch.Tensor) and axis is not None and val.dim() == len(expected):
                shape = list(val.shape)
                if shape[:axis] + shape[axis + 1 :] == expected[:axis] + expected[axis + 1 :]:
                    self._mismatch(instance, point, args, f"a state of shape {shape}", out)

    def _mismatch(
        self, instance: Instance, point: CatalogEntry | None, args: Sequence[Any], found: str, node: fx.Node
    ) -> None:
        extent, following, advance = self._extents(instance, point, args)
        declared = f"{instance.region.retention.describe()} ({extent} frames + {advance} new -> {following})"
        raise RetentionMismatch(instance.name, declared, found, _location(node))

    def _prove(self, aten: fx.GraphModule, slots: Sequence[RegionSlot]) -> list[str]:
        """Compare what the code keeps with what is declared; contradiction is an error."""
        notes = []
        for slot, verdict in zip(slots, prove_retentions(aten, slots), strict=True):
            if isinstance(verdict, Contradicted):
                outputs = output_node(aten.graph).args[0]
                where = _location(outputs[slot.output]) if slot.output is not None else None  # type: ignore[index,arg-type]
                policy = slot.declared.retention.describe()
                raise RetentionMismatch(
                    slot.instance, f"{policy}: {_spans(verdict.declared)}", _spans(verdict.found), where
                )
            text = "proved" if isinstance(verdict, Proved) else f"not provable: {verdict.reason}"
            self.program.proofs[slot.instance, slot.extent, slot.next_extent] = text
            notes.append(f"{slot.instance}: retention {text}")
        return notes

    # -- sharing ------------------------------------------------------------------------------------------------------

    def twin(self, plan: Plan, args: Sequence[Any], key: Any) -> ReplayClass | None:
        """The class that another Dynamo graph of the same computation has captured for this very call."""
        found = self.program.twins.get(self._twin_key(plan, args))
        if found is None or found[0].recording.closed:
            return None
        return in_terms_of(*found, plan, self.names, args)

    def admitted(self, plan: Plan, key: Any, entry: ReplayClass) -> None:
        """Offer a captured class to other graphs."""
        if plan.fingerprint is not None:
            self.program.twins[key_of(plan, self._last_signature)] = (entry, self.names)

    def _twin_key(self, plan: Plan, args: Sequence[Any]) -> Any:
        self._last_signature = self._signature(args)
        return key_of(plan, self._last_signature)

    # -- eager --------------------------------------------------------------------------------------------------------

    def run_eager(self, args: Sequence[Any]) -> Any:
        """Run Dynamo's own graph. States it returns go into their carries; states it writes are as before if it raises."""
        saved = [(args[i], args[i].clone()) for i in self._in_place if not args[i].requires_grad]
        try:
            outputs = list(self.gm.forward(*args))
        except BaseException:
            for state, before in saved:
                state.copy_(before)
            raise
        self.last_outputs = outputs
        if self.program.watching:
            return outputs
        for instance in self.binding.instances:
            output = self.outputs_of.get(instance.key)
            carry = self.program.existing_carry(instance, args[instance.index])
            if carry is None:
                continue
            state = outputs[output] if output is not None else None
            if state is not None and not state.requires_grad and carry.fits(state):
                extent = state.shape[instance.axis] if instance.axis is not None else carry.capacity
                outputs[output] = carry.receive(state, extent, args[instance.index])  # type: ignore[index]
            elif state is not None and carry.owns(state):
                outputs[output] = state.clone()  # type: ignore[index]
        return [o.clone() if self._is_carried(o, i) else o for i, o in enumerate(outputs)]

    def _is_carried(self, out: Any, index: int) -> bool:
        """An output that is a view of a carry without being a state would change behind the user's back."""
        if not isinstance(out, torch.Tensor) or index in self.outputs_of.values():
            return False
        return any(c.owns(out) for c in self.program.carries.values())

    # -- ints that Dynamo wants back ------------------------------------------------------------------------------------

    def finish(self, outputs: list[Any], args: Sequence[Any]) -> list[Any]:
        """Put the ints computed from this call's own symbols where a class has the constants of its capture."""
        for i, evaluate in self._ints.items():
            outputs[i] = evaluate(args)
        return outputs


def _all_known(graph: fx.Graph) -> bool:
    """Whether every operator is PyTorch's own, so that its tags tell whether it draws."""
    calls = [node.target for node in graph.nodes if node.op == "call_function"]
    return all(target is operator.getitem or getattr(target, "namespace", "") in ("aten", "prims") for target in calls)


def key_of(plan: Plan, signature: dict[str, tuple[Any, ...]]) -> Any:
    """What two graphs must share to share a class: the computation and the signature of the call."""
    return plan.fingerprint, frozenset(signature.items())


def program_entries(program: Program) -> tuple[CatalogEntry, ...]:
    """Every catalog entry: a call outside a graph's own guards is compared with all of them for its message."""
    return program.catalog.entries


def _evaluator(expr: sympy.Expr, binding: Binding) -> Callable[[Sequence[Any]], int]:
    """A function of the flat arguments that computes an int output of the graph."""
    symbols: list[sympy.Symbol] = sorted(expr.free_symbols, key=str)
    places = {i.sizes[0]: i.index for i in binding.inputs if i.role == "scalar" and i.sizes}
    compute = sympy.lambdify(symbols, expr, modules="math")
    indices = [places[s] for s in symbols]
    return lambda args: int(compute(*(args[i] for i in indices)))


def _written_back(forward: Callable[..., Sequence[Any]], uses: list[RegionUse]) -> Callable[..., list[Any]]:
    """The unrewritten graph with each new state copied into its carry at the end: right for any spelling, one copy slower."""
    receiving = [use for use in uses if use.output is not None]

    def run(*everything: Any) -> list[Any]:
        split = len(everything) - len(receiving)
        args, homes = everything[:split], everything[split:]
        outputs = list(forward(*args))
        for i, out in enumerate(outputs):
            if isinstance(out, torch.Tensor) and any(use.carry.owns(out) for use in uses):
                outputs[i] = out.clone()
        for use, home in zip(receiving, homes, strict=True):
            home.copy_(outputs[use.output])
            outputs[use.output] = home
        return outputs

    return run


def _feeds(source: fx.Node, target: fx.Node) -> bool:
    """Whether the value of `target` depends on `source` at all."""
    seen: set[fx.Node] = set()
    pending = [target]
    while pending:
        node = pending.pop()
        if node is source:
            return True
        if node not in seen:
            seen.add(node)
            pending.extend(node.all_input_nodes)
    return False


def _spans(spans: Sequence[Span]) -> str:
    """`old[3:8] + new[0:3]`."""
    return " + ".join(f"{span.source}[{span.start}:{span.stop}]" for span in spans) or "nothing"
