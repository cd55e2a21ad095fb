"""Classes of one Dynamo graph: from a call's sizes to a rewritten static graph (the `Planner` of `torch.compile`)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx

from cadence_fx._torch import CompileSite
from cadence_fx._torch_retrace import to_static_aten
from cadence_fx._torch_switches import ambient_state
from cadence_fx.admission import Admission
from cadence_fx.binding import Binding, Instance, scalar_outputs
from cadence_fx.catalog import CatalogEntry
from cadence_fx.contract import Region
from cadence_fx.errors import CadenceError, NotCapturable, RetentionMismatch
from cadence_fx.layout import Layout, in_layout, is_channels_last, layout_of, same_geometry_copy
from cadence_fx.ledger import log
from cadence_fx.pairing import Pairing, extents
from cadence_fx.parking import awake
from cadence_fx.passes import PassContext, RegionSlot, select_edits, select_passes
from cadence_fx.passes.effects import all_known, draws
from cadence_fx.passes.graphs import GraphFacts
from cadence_fx.passes.layout import give_layout, reads_layout
from cadence_fx.passes.provenance import prove_retentions
from cadence_fx.plan import WATCHED, Miss, Plan, RegionUse, Split
from cadence_fx.proofs import Proof, proof_of, unchanged
from cadence_fx.signature import compare, fixed_key, is_lazy, is_plain, region_key, scalar_key, tensor_key
from cadence_fx.twins import fingerprint, in_terms_of
from cadence_fx.ways import Subject, split_around, ways

if TYPE_CHECKING:
    from cadence_fx.capture import ReplayClass
    from cadence_fx.eager_breaks import Tape
    from cadence_fx.program import Program

_NO_CONTRACT = "nothing declares what is state; pass options={'contract': ...} or use cadence_fx.declare"


class GraphPlanner:
    """Builds the classes of one Dynamo graph and looks after the states of its eager calls.

    Args:
        program: the `torch.compile` call this graph belongs to; owns contract, carries and catalog.
        gm: Dynamo's graph: the stock computation.
        binding: roles, instances and equations of its inputs.
        device: where it runs.
        site: the frame Dynamo compiles; tells which values leave it twice, or as they came.
    """

    def __init__(
        self, program: Program, gm: fx.GraphModule, binding: Binding, device: torch.device, site: CompileSite
    ) -> None:
        self.program = program
        self.device = device
        self.gm = gm
        self.binding = binding
        # What is done about every call of this graph, whatever its sizes: set where the graph can never be captured.
        self.verdict: Miss | None = _hopeless(binding)
        self.admission: Admission | None = None
        if program.contract is None:
            self.verdict = Miss("no_contract", _NO_CONTRACT)
        else:
            self.admission = Admission(binding, program.contract, program.catalog, program.sizes)
        self.pairing = Pairing(binding, gm, site)
        # (argument, shape) of states whose layout was found to make no difference.
        self._harmless: set[tuple[int, torch.Size]] = set()
        self.last_outputs: Sequence[Any] = ()
        self.tape: Tape | None = None  # of the last class with operators that do not repeat
        self.audited: Tape | None = None  # of the call that is being audited
        self.names = [i.accessor if i.origin.query == "value" and i.origin.path else i.name for i in binding.inputs]
        ints = {i: _evaluator(expr, binding) for i, expr in scalar_outputs(gm).items()}
        self._ints = {i: evaluate for i, evaluate in ints.items() if evaluate is not None}
        if len(ints) > len(self._ints):
            self.verdict = Miss("data_dependent", "an int that is read off a tensor is a result")
        self._in_place: set[int] = set()
        self._scratch = [i.index for i in binding.inputs if i.role == "fixed" and program.is_scratch(i.origin)]
        self.resumes = site.resumes
        (results,) = gm.graph.output_node().args
        self._shared = {i for i, out in enumerate(results) if site.times[getattr(out, "name", "")] > 1}  # type: ignore[arg-type]
        self._returned = {i.index for i in binding.inputs if i.name in site.returned_inputs}

    def itemsize(self, index: int) -> int:
        """Bytes of one element of a tensor input."""
        return int(self.gm.graph.find_nodes(op="placeholder")[index].meta["example_value"].element_size())

    def for_trial(self) -> GraphPlanner:
        """A planner of the same graph, which may plan without this one learning anything."""
        other = copy.copy(self)
        other._harmless = set(self._harmless)
        other.pairing = copy.copy(self.pairing)
        other.pairing.outputs = dict(self.pairing.outputs)
        return other

    # -- planning -----------------------------------------------------------------------------------------------------

    def plan(self, args: Sequence[Any]) -> Plan | Miss:
        if self.program.watching:
            return WATCHED
        point = self.point(args)
        if isinstance(point, Miss):
            return point
        self.program.settled.add(point)
        try:
            with self.program.ledger.timed("passes"):
                plan = self._specialise(args, point)
        except NotCapturable as error:
            return Miss(error.reason, str(error), lasting=True)
        except RetentionMismatch as error:
            if not self.program.sealed:
                raise
            # Dynamo has one graph for declared calls and others for odd ones, such as a state that is the input too.
            return Miss("retention", str(error), lasting=True)
        except CadenceError:
            raise
        except Exception as error:  # a graph that cannot be traced at concrete sizes runs eager, whatever the cause
            log.warning("%s: tracing %s failed", self.program.ledger.name, point, exc_info=True)
            numpy = ", ".join(i.accessor for i in self.binding.inputs if i.numpy)
            hint = f" ({numpy} holds numpy values, which Dynamo takes for arrays: make them Python numbers)"
            what = f"{point}: {type(error).__name__}{hint if numpy else ''}"
            return Miss("not_traceable", what, lasting=True)
        assert self.admission is not None
        self.program.note_sizes(self.admission.shapes(args))
        self.program.signatures.setdefault(point, []).append(self.signature(args))
        return plan

    def point(self, args: Sequence[Any]) -> CatalogEntry | Miss:
        """The catalog entry of a call, or why it has none."""
        if self.verdict is not None or self.admission is None:
            return self.verdict or Miss("no_contract", _NO_CONTRACT)
        return self.admission.point(args)

    def foresee(self, args: Sequence[Any]) -> Miss | None:
        point = self.point(args)
        return point if isinstance(point, Miss) else None

    def unknown(self, args: Sequence[Any]) -> Miss | None:
        """Whether warm-up has captured this very signature, perhaps through another Dynamo graph."""
        point = self.point(args)
        if isinstance(point, Miss):
            return point
        mine = self.signature(args)
        answers = [compare(known, mine) for known in self.program.signatures.get(point, [])]
        if None in answers:
            return None
        found = next((answer for answer in answers if answer is not None), None)
        return Miss(*found) if found is not None else Miss("sealed", f"{point} was not captured before the seal")

    def signature(self, args: Sequence[Any]) -> dict[str, tuple[Any, ...]]:
        """What decides which kernels a call runs, by what the user calls each argument; ambient state under ""."""
        found: dict[str, tuple[Any, ...]] = {"": ambient_state(self.device.type)}
        for entry in self.binding.inputs:
            if entry.role == "region":
                found[entry.accessor] = region_key(args[entry.index])
            elif entry.role == "staged":
                found[entry.accessor] = tensor_key(args[entry.index])
            elif entry.index in self.binding.used_scalars and entry.origin.query == "value":
                found[entry.accessor or entry.name] = scalar_key(args[entry.index])
        return found

    # -- specialising -------------------------------------------------------------------------------------------------

    def key_part(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The layouts, in eager, of incoming states, where they may make a difference."""
        instances = self.binding.instances
        if not self.program.ledger.layouts and all(args[instance.index].is_contiguous() for instance in instances):
            return ()  # no state of this program has ever been anything else
        part = []
        for instance in instances:
            layout = self._layout(instance, args)
            if layout is not None and not self._is_harmless(instance.index, args[instance.index].shape, layout):
                part.append((instance.index, layout))
        return tuple(part)

    def _is_harmless(self, index: int, shape: torch.Size, layout: Layout) -> bool:
        """Whether this graph only moves such a state's bytes. Channels-last strides pass on to what is made of them."""
        return (index, shape) in self._harmless and layout is not None and not is_channels_last(shape, layout[0])

    def _layout(self, instance: Instance, args: Sequence[Any]) -> Layout:
        carry = self.program.existing_carry(instance, args[instance.index])
        return carry.layout_of(args[instance.index]) if carry is not None else layout_of(args[instance.index])

    def _layouts(self, args: Sequence[Any]) -> dict[int, Layout]:
        """Argument index -> layout, of the incoming states that are not contiguous in eager."""
        found = {inst.index: self._layout(inst, args) for inst in self.binding.instances}
        return {index: layout for index, layout in found.items() if layout is not None}

    def stock_args(self, args: Sequence[Any]) -> list[Any]:
        """The arguments as eager would have them: states in their own layouts."""
        layouts = self._layouts(args)
        return [in_layout(arg, layouts[i]) if i in layouts else arg for i, arg in enumerate(args)]

    def _trace(self, args: Sequence[Any]) -> tuple[fx.GraphModule, dict[int, Layout]]:
        """The static graph of a call, taking contiguous states; and the layouts that it gives those that need one."""
        plain = self._plain(args)
        aten = to_static_aten(self.gm, plain)
        states = aten.graph.find_nodes(op="placeholder")
        indices = [instance.index for instance in self.binding.instances]
        read = reads_layout(aten, [states[i] for i in indices])
        self._harmless |= {(i, args[i].shape) for i in indices if states[i] not in read}
        needed = {i: at for i, at in self._layouts(args).items() if not self._is_harmless(i, args[i].shape, at)}
        if needed:
            aten = to_static_aten(self.gm, [in_layout(arg, needed.get(i)) for i, arg in enumerate(plain)])
            states = aten.graph.find_nodes(op="placeholder")
            for i, layout in needed.items():
                assert layout is not None
                give_layout(aten, states[i], layout[0], layout[1] // args[i].element_size())
        return aten, needed

    def _plain(self, args: Sequence[Any]) -> list[Any]:
        """The arguments with every state contiguous, as the carries are."""
        states = {instance.index for instance in self.binding.instances}
        return [arg.contiguous() if i in states else arg for i, arg in enumerate(args)]

    def _specialise(self, args: Sequence[Any], point: CatalogEntry) -> Plan:
        program, binding = self.program, self.binding
        with program.ledger.timed("tracing"):
            aten, layouts = self._trace(args)
        facts = GraphFacts(aten.graph)
        placeholders = aten.graph.find_nodes(op="placeholder")
        written = {i for i, node in enumerate(placeholders) if facts.writes_to(node)}
        self._in_place = {instance.index for instance in binding.instances if instance.index in written}
        self.pairing.complete(aten, facts, args, point, written)
        uses, slots = self._regions(args, point, placeholders)
        scratch = set(self._scratch)
        fixed = binding.indices("fixed")
        # A declared state that this graph neither returns nor writes is an argument like any other.
        used = {use.index for use in uses}
        only_read = {i.index: i.name for i in binding.instances if i.index not in used}
        staged = [*binding.indices("staged"), *only_read]
        passes = select_passes(program.passes)
        edits = select_edits(program.passes) if self.device.type == "cuda" else []
        tied = {placeholders[i].name: i for i in fixed}

        def context() -> PassContext:
            return PassContext(
                tuple(slots),
                frozenset(tied),
                written=frozenset(name for name, i in tied.items() if i in written),
                scratch_inputs=frozenset(placeholders[i].name for i in scratch),
                unsteady=self._unsteady(args, tied, written, scratch),
                origins={
                    name: repr((args[i].data_ptr(), fixed_key(args[i])))
                    for name, i in tied.items()
                    if is_plain(args[i])
                },
                keep=program.keep.in_mode(ambient_state(self.device.type)),
            )

        subject = Subject(aten, uses, staged, self.names, self.device, context, program.keep, program.restless)
        own = {use.index: use for use in uses}
        reference = self._layouts(args)

        def placed(given: Sequence[Any]) -> list[Any]:
            return [in_layout(a, reference[i]) if i in reference and i in own else a for i, a in enumerate(given)]

        def stock(*given: Any) -> Sequence[Any]:
            return self.run_stock(placed(given), plan.tape)

        def split(given: Sequence[Any], restore: Callable[[], None]) -> Split | None:
            found = split_around(subject, passes, self.gm, lambda: placed(given), given, restore, program.ledger)
            self.tape = found.tape if found is not None else self.tape
            return found

        plan = Plan(
            ways=ways(subject, passes, edits, program.ledger.name),
            reference=stock,
            label=str(point),
            fixed=fixed,
            staged=staged,
            only_read=only_read,
            mutated=sorted(written & {*fixed, *staged} - scratch),
            written=sorted(written & {*fixed, *staged}),
            regions=uses,
            fingerprint=fingerprint(aten.graph, self.names),
            draws=any(map(draws, aten.graph.nodes)) if all_known(aten.graph) else None,
            notes=[*self._prove(aten, slots), *self._unchanged(args, point, only_read)],
            split=split,
        )
        plan.notes.extend(f"{self.names[i]} is read in the layout {layout}" for i, layout in layouts.items())
        return plan

    def _unsteady(
        self, args: Sequence[Any], fixed: Mapping[str, int], written: set[int], scratch: set[int]
    ) -> dict[str, str]:
        """Fixed arguments from which nothing may be computed in advance: placeholder -> why."""
        homes = {args[i].untyped_storage().data_ptr(): self.names[i] for i in written if is_plain(args[i])}
        found = {}
        for name, i in fixed.items():
            if not is_plain(args[i]):
                found[name] = "it is no plain tensor"
            elif args[i].is_inference():
                found[name] = "it was made in inference mode, where nobody counts writes"
            elif i in scratch:
                found[name] = "it is declared to mean nothing between calls"
            elif args[i].untyped_storage().data_ptr() in homes:
                found[name] = (
                    f"its memory is that of {homes[args[i].untyped_storage().data_ptr()]}, which the call writes"
                )
            elif self.names[i] in self.program.restless:
                found[name] = "it was written before each of several calls in a row"
        return found

    def _regions(
        self, args: Sequence[Any], point: CatalogEntry, placeholders: list[fx.Node]
    ) -> tuple[list[RegionUse], list[RegionSlot]]:
        uses: list[RegionUse] = []
        slots: list[RegionSlot] = []
        for instance in self.binding.instances:
            if instance.key not in self.pairing.outputs:
                continue
            index, output = instance.index, self.pairing.outputs[instance.key]
            extent, following, advance = extents(instance, point, args)
            uses.append(
                RegionUse(
                    index,
                    self.program.carry(instance, args[index]),
                    extent,
                    following,
                    output,
                    shared=output in self._shared,
                    returned=index in self._returned and output is not None,
                )
            )
            slots.append(
                RegionSlot(
                    name=instance.region.name,
                    declared=instance.region,
                    instance=instance.name,
                    placeholder=placeholders[index].name,
                    output=output,
                    axis=instance.axis or 0,
                    extent=extent,
                    next_extent=following,
                    advance=advance,
                )
            )
        return uses, slots

    def _prove(self, aten: fx.GraphModule, slots: Sequence[RegionSlot]) -> list[str]:
        """Compare what the code keeps with what is declared; contradiction is an error."""
        notes = []
        slots = [slot for slot in slots if not _is_empty(aten, slot)]  # no bytes, nothing to prove
        for slot, verdict in zip(slots, prove_retentions(aten, slots), strict=True):
            proof = proof_of(aten.graph, slot, verdict)
            self.program.proofs[proof.key] = proof
            notes.append(self._agreed(proof, slot.declared))
        return notes

    def _agreed(self, proof: Proof, region: Region) -> str:
        """The note of a proof. Raises `RetentionMismatch` where it contradicts the declaration."""
        if proof.verdict == "contradicted":
            policy = f"{region.retention.describe()}: {proof.declared}"
            raise RetentionMismatch(proof.instance, policy, proof.found, proof.where, proof.counterexample)
        return f"{proof.instance}: retention {proof}"

    def _unchanged(self, args: Sequence[Any], point: CatalogEntry, only_read: Container[int]) -> list[str]:
        """Note that states stay as they are, where none of this call's graphs is known to change them."""
        notes = []
        for instance in self.binding.instances:
            if instance.index in only_read and not _is_empty_state(args[instance.index], instance.axis):
                stays = instance.key in self.pairing.kept
                proof = unchanged(instance, *extents(instance, point, args), stays=stays)
                if self.program.proofs.setdefault(proof.key, proof) is proof:
                    self._agreed(proof, instance.region)
                notes.append(f"{instance.name}: only read")
        return notes

    # -- sharing ------------------------------------------------------------------------------------------------------

    def twin(self, plan: Plan, args: Sequence[Any]) -> ReplayClass | None:
        """The class that another Dynamo graph of the same computation has captured for this very call."""
        found = self.program.twins.get(self._identity(plan, args))
        if found is None or found[0].recording.closed:
            return None
        return in_terms_of(*found, plan, self.names, args)

    def admitted(self, plan: Plan, args: Sequence[Any], entry: ReplayClass) -> None:
        """Offer a captured class to other graphs; those that were dropped are let go, with all that they hold."""
        twins = self.program.twins
        for identity in [identity for identity, (each, _) in twins.items() if each.recording.closed]:
            del twins[identity]
        if plan.fingerprint is not None:
            twins[self._identity(plan, args)] = (entry, self.names)

    def _identity(self, plan: Plan, args: Sequence[Any]) -> Any:
        """What two graphs must share to share a class: the computation and the signature of the call. Dynamo compiles
        another graph for a weight that is a lazy view now, and it may be the same computation."""
        lazy = frozenset(self.names[i] for i in plan.fixed if is_lazy(args[i]))
        return plan.fingerprint, frozenset(self.signature(args).items()), lazy

    # -- workspaces ---------------------------------------------------------------------------------------------------

    def workspaces(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """The arguments at fixed addresses that are declared to mean nothing between calls."""
        return [args[i] for i in self._scratch]

    # -- eager --------------------------------------------------------------------------------------------------------

    def run_stock(self, args: Sequence[Any], tape: Tape | None) -> Sequence[Any]:
        """Run Dynamo's own graph, on arguments as eager has them."""
        return tape.run(self.gm, args) if tape is not None else self.gm.forward(*args)  # type: ignore[no-any-return]

    def run_eager(self, args: Sequence[Any]) -> Any:
        """Run Dynamo's own graph. States it returns go into their carries; states it writes are as before if it
        raises. Workspaces that autograd may look at later keep their memory.

        Raises:
            StaleState: a state that a call has consumed was passed in.
        """
        with awake(self.workspaces(args)) as block:
            outputs = self._run_eager(args)
            block.keep(out for out in outputs if isinstance(out, torch.Tensor) and out.layout is torch.strided)
            if block.woken and _is_recorded(outputs, args):
                block.keep(self.workspaces(args))
        return outputs

    def _run_eager(self, args: Sequence[Any]) -> list[Any]:
        given = self.stock_args(args)
        saved = [(args[i], args[i].clone()) for i in self._in_place if not args[i].requires_grad]
        phase = contextlib.nullcontext() if self.program.sealed else self.program.ledger.timed("eager")
        try:
            with phase:
                outputs = list(self.run_stock(given, self.audited))
        except BaseException:
            for state, before in saved:
                state.copy_(before)
            raise
        self.last_outputs = outputs
        if self.program.watching:
            return outputs
        for instance in self.binding.instances:
            output = self.pairing.outputs.get(instance.key)
            carry = self.program.existing_carry(instance, args[instance.index])
            if carry is None or output is None or output in self._shared:
                continue
            if instance.index in self._returned:
                carry.release(args[instance.index])
            state = outputs[output]
            if not state.requires_grad and carry.fits(state):
                extent = state.shape[instance.axis] if instance.axis is not None else carry.capacity
                received = carry.receive(state, extent, args[instance.index])
                # A state that stays outside looks like a carry's where that makes no difference: Dynamo has that graph.
                harmless = (instance.index, received.shape) in self._harmless
                outputs[output] = received.contiguous() if harmless else received
            elif carry.owns(state):
                outputs[output] = state.clone()
        own = {args[i].untyped_storage().data_ptr() for i in self._in_place}
        return [same_geometry_copy(o) if self._is_carried(o, i, own) else o for i, o in enumerate(outputs)]

    def _is_carried(self, out: Any, index: int, own: Container[int]) -> bool:
        """An output that is a view of a carry without being a state would change behind the user's back; one of a state
        that is written in place (whose memory is in ``own``) changes in eager, too."""
        if not isinstance(out, torch.Tensor) or index in self.pairing.outputs.values():
            return False
        if out.untyped_storage().data_ptr() in own:
            return False
        return any(c.owns(out) for c in self.program.carries.values())

    # -- ints that Dynamo wants back
    # ------------------------------------------------------------------------------------

    def finish(self, outputs: list[Any], args: Sequence[Any]) -> list[Any]:
        """Put the ints computed from this call's own symbols where a class has the constants of its capture."""
        for i, evaluate in self._ints.items():
            outputs[i] = evaluate(args)
        return outputs


def _is_recorded(outputs: Sequence[Any], args: Sequence[Any]) -> bool:
    """Whether autograd may have recorded a call. What a backward reads is then the memory that the call has used, and
    whoever holds the graph, a result or a buffer that was written, may run one at any time."""
    holders = (*outputs, *args) if torch.is_grad_enabled() else outputs
    return any(isinstance(held, torch.Tensor) and held.requires_grad for held in holders)


def _hopeless(binding: Binding) -> Miss | None:
    """A value drawn on the host would be frozen into the recording."""
    for entry in binding.inputs:
        if entry.random:
            return Miss(
                "host_random", f"{entry.accessor or entry.name} is drawn from Python's random module on the host"
            )
    return None


def _evaluator(expr: sympy.Expr, binding: Binding) -> Callable[[Sequence[Any]], int] | None:
    """A function of the flat arguments that computes an int output of the graph; None when it depends on data."""
    symbols: list[sympy.Symbol] = sorted(expr.free_symbols, key=str)
    places = {i.sizes[0]: i.index for i in binding.inputs if i.role == "scalar" and i.sizes}
    if not places.keys() >= set(symbols):
        return None
    indices = [places[s] for s in symbols]
    if expr.is_polynomial(*symbols):
        compute = sympy.lambdify(symbols, expr, modules="math")
        return lambda args: int(compute(*(args[i] for i in indices)))
    # Floor divisions and remainders are PyTorch's own sympy functions, which evaluate themselves.
    return lambda args: int(expr.subs({s: sympy.Integer(args[i]) for s, i in zip(symbols, indices, strict=True)}))


def _is_empty(aten: fx.GraphModule, slot: RegionSlot) -> bool:
    """Whether a state has no elements at any extent: another dimension is 0."""
    state = next(n for n in aten.graph.find_nodes(op="placeholder") if n.name == slot.placeholder).meta["val"]
    return _is_empty_state(state, slot.axis)


def _is_empty_state(state: torch.Tensor, counted: int | None) -> bool:
    return any(size == 0 for axis, size in enumerate(state.shape) if axis != counted)
