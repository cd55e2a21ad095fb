"""The certificate of a class: the same bytes as the stock computation, checked before the class is admitted.

The stock computation runs twice on the class's own static arguments (a class whose baseline does not repeat is not
blamed on the replay, it is named so), then the class is launched; outputs, states and every argument the code writes
are compared byte for byte. Results wait on the host, so that the check needs little device memory. States and
generators are as before afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from cadence_fx.bytesops import bytes_equal
from cadence_fx.plan import Plan
from cadence_fx.recorder import Recording


@dataclasses.dataclass(slots=True)
class Outcome:
    """Everything one execution of a class produced, on the host: outputs, new states, written arguments."""

    outputs: list[Any]
    states: list[torch.Tensor]
    written: list[torch.Tensor]

    def differs_from(self, other: Outcome) -> str | None:
        """The first thing that differs, in words; None when every byte is equal."""
        for what, mine, theirs in (
            ("output", self.outputs, other.outputs),
            ("state", self.states, other.states),
            ("argument", self.written, other.written),
        ):
            for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                if isinstance(a, torch.Tensor) and not bytes_equal(a, b):
                    return f"{what} {i}"
        return None


class Snapshot:
    """Host copies of everything a class may write, and of the generators; `restore` puts them back."""

    def __init__(self, plan: Plan, args: Sequence[Any], static_args: Sequence[Any], device: torch.device) -> None:
        self._device = device
        # The caller's own tensors are the saved copies of the staging buffers.
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = [(static_args[i], args[i]) for i in plan.staged]
        for use in plan.regions:
            head = use.carry.view(max(use.extent, use.next_extent))
            self._pairs.append((head, _to_host(head)))
        for i in set(plan.mutated) - set(plan.staged):
            self._pairs.append((static_args[i], _to_host(static_args[i])))
        # Where the graph tells that nothing is drawn, the generators are left alone: other threads may be using them.
        watched = plan.draws is None
        self._host_generator = torch.get_rng_state() if watched else None
        self._device_generator = torch.cuda.get_rng_state(device) if watched and device.type == "cuda" else None

    def include(self, tensors: Sequence[torch.Tensor]) -> None:
        """Save more tensors, as they are now."""
        self._pairs += [(tensor, _to_host(tensor)) for tensor in tensors]

    def restore(self) -> None:
        """Put every byte and every generator back."""
        for target, saved in self._pairs:
            target.copy_(saved)
        if self._host_generator is not None:
            torch.set_rng_state(self._host_generator)
        if self._device_generator is not None:
            torch.cuda.set_rng_state(self._device_generator, self._device)

    def generators_moved(self) -> bool:
        """Whether anything has been drawn since, as far as that is watched."""
        if self._host_generator is not None and not torch.equal(self._host_generator, torch.get_rng_state()):
            return True
        return self._device_generator is not None and not torch.equal(
            self._device_generator, torch.cuda.get_rng_state(self._device)
        )


def run_reference(plan: Plan, static_args: Sequence[Any]) -> tuple[Sequence[Any], Outcome]:
    """Run the stock computation; returns its raw outputs and the outcome."""
    outputs = plan.reference(*static_args)
    states = [static_args[use.index] if use.output is None else outputs[use.output] for use in plan.regions]
    return outputs, Outcome(
        [None if i in _region_outputs(plan) else _to_host(o) for i, o in enumerate(outputs)],
        [_to_host(s) for s in states],
        [_to_host(tensor) for tensor in (*(static_args[i] for i in plan.mutated), *plan.beside)],
    )


def run_recording(plan: Plan, static_args: Sequence[Any], recording: Recording) -> Outcome:
    """Launch the class once; returns the outcome."""
    outputs = recording.launch()
    states = [static_args[use.index] if use.output is None else use.carry.view(use.next_extent) for use in plan.regions]
    return Outcome(
        [None if i in _region_outputs(plan) else _to_host(o) for i, o in enumerate(outputs)],
        [_to_host(s) for s in states],
        [_to_host(tensor) for tensor in (*(static_args[i] for i in plan.mutated), *plan.beside)],
    )


def _region_outputs(plan: Plan) -> set[int | None]:
    return {use.output for use in plan.regions}


def _to_host(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to("cpu", copy=True)
