"""The certificate of a class: the same bytes as the stock computation, checked before the class is admitted.

The stock computation runs twice on the class's own static arguments (a class whose baseline does not repeat is not
blamed on the replay, it is named so), then the class is launched; outputs, states, every argument the code writes and
the generators it draws from are compared byte for byte, each time from the same start. Results are set aside
meanwhile. A copy that is set aside need not lie as the output did, so what an output is besides its bytes (`forms`)
is read off the output itself. States, generators and whatever Python code has rebound are as before afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from cadence_fx.aside import aside
from cadence_fx.bytesops import bytes_equal
from cadence_fx.forms import Form, forms, odd_value
from cadence_fx.generators import Generators, Source, all_sources, device_sources, explicit, same_state
from cadence_fx.plan import Miss, Plan
from cadence_fx.python_state import PythonState
from cadence_fx.recorder import Recording


@dataclasses.dataclass(slots=True)
class Outcome:
    """Everything one execution of a class produced, set aside: outputs and what they are besides their bytes, new
    states, written arguments, and the states in which it left the generators. `astray`: an operator that does not
    repeat and was given something else than in the stock run that it is held against, in words."""

    outputs: list[Any]
    forms: list[Form | None]
    states: list[torch.Tensor]
    written: list[torch.Tensor]
    generators: list[Any]
    astray: str | None

    def differs_from(self, other: Outcome) -> str | None:
        """The first thing that differs, in words; None when every byte is equal and every output of the same form."""
        if self.astray is not None or other.astray is not None:
            return self.astray or other.astray
        for i, (a, b) in enumerate(zip(self.outputs, other.outputs, strict=True)):
            odd = odd_value(a, b)
            if odd is not None:
                return f"output {i} ({odd})"
        for what, mine, theirs in (
            ("output", self.outputs, other.outputs),
            ("state", self.states, other.states),
            ("argument", self.written, other.written),
        ):
            for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                if isinstance(a, torch.Tensor) and not bytes_equal(a, b):
                    return f"{what} {i}"
        for i, (form, right) in enumerate(zip(self.forms, other.forms, strict=True)):
            if form is not None and right is not None and form != right:
                return f"output {i} ({form.against(right)})"
        if not all(map(same_state, self.generators, other.generators)):
            return "the state of a generator"
        return None


class Snapshot:
    """Everything a class may change, as it was: what it may write, what it may draw from, what it may rebind.

    Attributes:
        generators: the sources that are watched. Where the graph tells that nothing is drawn there are none: other
            threads may be using them.
        python: the state of the plain callable's objects; None for a graph, which has none.
    """

    def __init__(self, plan: Plan, args: Sequence[Any], static_args: Sequence[Any], device: torch.device) -> None:
        # The caller's own tensors are the saved copies of the staging buffers.
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = [(static_args[i], args[i]) for i in plan.staged]
        for use in plan.regions:
            head = use.carry.view(max(use.extent, use.next_extent))
            self._pairs.append((head, aside(head)))
        for i in set(plan.mutated) - set(plan.staged):
            self._pairs.append((static_args[i], aside(static_args[i])))
        self.python = PythonState(plan.owner) if plan.owner is not None else None
        self.generators = Generators(_sources(plan, device, self.python))

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The modules that a plain callable is, belongs to or uses."""
        return self.python.modules if self.python is not None else []

    def include(self, tensors: Sequence[torch.Tensor]) -> None:
        """Save more tensors, as they are now."""
        self._pairs += [(tensor, aside(tensor)) for tensor in tensors]

    def restore(self) -> None:
        """Put everything back."""
        if self.python is not None:
            self.python.put_back()
        for target, saved in self._pairs:
            target.copy_(saved)
        self.generators.restore()


def _sources(plan: Plan, device: torch.device, python: PythonState | None) -> list[Source]:
    """What the class could draw from, as far as that is known before it runs."""
    if plan.draws is None:
        found = all_sources(device) + explicit(plan.generators)
        return found + (python.dice() if python is not None else [])
    return device_sources(device) if plan.draws else []


def run_reference(plan: Plan, static_args: Sequence[Any], snapshot: Snapshot) -> tuple[Sequence[Any], Outcome]:
    """Run the stock computation; returns its raw outputs and the outcome."""
    outputs = plan.reference(*static_args)
    states = [static_args[use.index] if use.output is None else outputs[use.output] for use in plan.regions]
    return outputs, _outcome(plan, static_args, outputs, states, _returned(plan), snapshot)


def run_recording(plan: Plan, static_args: Sequence[Any], recording: Recording, snapshot: Snapshot) -> Outcome | Miss:
    """Launch the class once; returns the outcome, or why the class would not answer such a call."""
    refused = plan.host.enter(static_args) if plan.host is not None else None
    if refused is not None:
        return refused
    if plan.tape is not None:
        plan.tape.astray()  # what it was given while it was recorded is no matter
    outputs = recording.launch()
    states = [static_args[use.index] if use.output is None else use.carry.view(use.next_extent) for use in plan.regions]
    copied = _returned(plan) if recording.static_outputs else set()
    return _outcome(plan, static_args, outputs, states, copied, snapshot)


def _returned(plan: Plan) -> set[int]:
    """Indices of the states that the code returns anew: eager's views of the old ones are handed out as copies. A view
    of one that the code writes in place stays one."""
    return {use.index for use in plan.regions if use.output is not None}


def _outcome(
    plan: Plan,
    static_args: Sequence[Any],
    outputs: Sequence[Any],
    states: Sequence[torch.Tensor],
    copied: set[int],
    snapshot: Snapshot,
) -> Outcome:
    carried = {use.output for use in plan.regions if use.output is not None}
    return Outcome(
        [None if i in carried else aside(o) for i, o in enumerate(outputs)],
        forms(outputs, static_args, copied, carried),
        [aside(s) for s in states],
        [aside(tensor) for tensor in (*(static_args[i] for i in plan.mutated), *plan.beside)],
        snapshot.generators.read(),
        plan.tape.astray() if plan.tape is not None else None,
    )
