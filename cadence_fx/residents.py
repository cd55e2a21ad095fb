"""What a class does on the host before each launch: tensors on the device that stand for tensors on the host, numbers
that kernels took by value, and premises that rewrites rely on.

A class is recorded with device memory in the place of what its graph would copy from the host in every call. Before a
launch that memory holds what this call would copy: the host's part of the graph (`HostPart`) runs on the call's own
arguments, and its values are copied over. Where every argument of that part is as it was, byte for byte, nothing needs
to be done; comparing a small tensor takes a few tenths of a microsecond.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cadence_fx.bytesops import bytes_equal
from cadence_fx.layout import same_geometry_copy, span
from cadence_fx.passes import HostPart, Premise
from cadence_fx.plan import Miss
from cadence_fx.recorder import Recording

# Bytes of a tensor on the host that are compared in each call (0.7 us); a larger one is copied over in each call.
COMPARED = 8192


class Watch:
    """Whether tensors at fixed addresses are as they were when last looked at.

    Small ones on the host are compared byte for byte. The others are never taken to be unchanged, or, `by_version`, by
    PyTorch's count of writes, which a write through `.data` or from outside PyTorch escapes.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], by_version: bool = False) -> None:
        found = list({id(t): t for t in tensors if t.numel()}.values())
        small = [t.device.type == "cpu" and _extent(t) <= COMPARED for t in found]
        self._small = [t for t, is_small in zip(found, small, strict=True) if is_small]  # alive while looked at
        others = [t for t, is_small in zip(found, small, strict=True) if not is_small]
        self._windows = [(ctypes.c_char * _extent(t)).from_address(t.data_ptr()) for t in self._small]
        self._bytes = [window.raw for window in self._windows]
        self.blind = bool(others) and (not by_version or any(t.is_inference() for t in others))
        self._counted = [] if self.blind else others
        self._versions = [t._version for t in self._counted]
        self._written: list[torch.Tensor] = []
        self._forgotten = False

    def forget(self) -> None:
        """Take the tensors to be changed when next looked at."""
        self._forgotten = True

    def changed(self) -> bool:
        """Whether anything may have been written since the last call of this."""
        raw = [window.raw for window in self._windows]
        versions = [t._version for t in self._counted]
        if raw == self._bytes and versions == self._versions and not self._forgotten:
            return self.blind
        before, after = [*self._bytes, *self._versions], [*raw, *versions]
        tensors = [*self._small, *self._counted]
        self._written = [t for t, old, new in zip(tensors, before, after, strict=True) if old != new]
        self._bytes, self._versions, self._forgotten = raw, versions, False
        return True

    def would_change(self) -> list[torch.Tensor]:
        """What `changed` would find written, and nothing is noted."""
        found = [t for t, window, old in zip(self._small, self._windows, self._bytes, strict=True) if window.raw != old]
        return found + [t for t, old in zip(self._counted, self._versions, strict=True) if t._version != old]

    def written(self) -> list[torch.Tensor]:
        """What was found to be written when something last was, as far as that can be told."""
        return self._written


def _extent(tensor: torch.Tensor) -> int:
    """Bytes between the first and the last element; what lies between them is looked at with them."""
    return span(tensor.shape, tensor.stride()) * tensor.element_size()


class HostSide:
    """The host's work for one class.

    Args:
        part: the host's part of the graph, if it has one.
        premises: what the recording relies on.
        positions: placeholder name -> index among the class's arguments.
        staged: indices of the arguments that are copied in on each call.
    """

    def __init__(
        self, part: HostPart | None, premises: Sequence[Premise], positions: Mapping[str, int], staged: Sequence[int]
    ) -> None:
        self._part = part
        self._premises = [(premise, [positions[name] for name in premise.inputs]) for premise in premises]
        self._inputs = [positions[name] for name in part.inputs] if part is not None else []
        self._staged = [i for i in self._inputs if i in set(staged)]
        self._buffers: list[torch.Tensor] = []
        self._values: list[Any] = []  # outputs of the last run, shared by all users of a class

    def bind(self, args: Sequence[Any], label: str) -> Miss | None:
        """Take the class's own static arguments, and fill what the recording will read; or why it may not be made."""
        self._buffers = [args[i] for i in self._staged]
        self._relied_on = [(premise, [args[i] for i in indices]) for premise, indices in self._premises]
        self._facts = Watch([t for _, tensors in self._relied_on for t in tensors], by_version=True)
        if self._facts.blind:
            what = f"{self._premises[0][0].what} checks a tensor made in inference mode, whose writes nobody counts"
            return Miss("host_read", f"{label}: {what}", lasting=True)
        if (broken := self._broken()) is not None:
            return broken
        self._given = [args[i] for i in self._inputs]
        self._watch = Watch(self._given)
        self._run(first=True)
        return None

    def enter(self, args: Sequence[Any]) -> Miss | None:
        """Do this call's work on the host; or why the recording may not answer it."""
        for i, buffer in zip(self._staged, self._buffers, strict=True):
            buffer.copy_(args[i])
        if self._facts.changed() and (broken := self._broken()) is not None:
            return broken
        part = self._part
        if part is not None and (self._watch.changed() or part.writes or part.outputs):
            return self._run()
        return None

    def foresee(self, args: Sequence[Any]) -> Miss | None:
        """What `enter` would answer, found on copies: nothing that a launch reads is touched."""
        for premise, indices in self._premises:
            if bool(premise.graph(*(args[i] for i in indices))[0]) is not premise.expected:
                return _unlike(premise)
        if self._part is None or not self._part.held:
            return None
        values = self._part.graph(*(same_geometry_copy(args[i]) for i in self._inputs))[len(self._part.residents) :]
        for number, value, name in zip(self._part.held, values, self._part.held_names, strict=False):
            if not bytes_equal(number, value):
                return _another_number(name)
        return None

    def forget(self) -> None:
        """Look at everything anew before the next launch."""
        self._facts.forget()
        self._watch.forget()

    def _broken(self) -> Miss | None:
        for premise, tensors in self._relied_on:
            if bool(premise.graph(*tensors)[0]) is not premise.expected:
                self._facts.forget()
                return _unlike(premise)
        return None

    def _run(self, first: bool = False) -> Miss | None:
        part = self._part
        if part is None:
            return None
        values = part.graph(*self._given)
        sent, held = len(part.residents), len(part.held)
        for number, value, name in zip(part.held, values[sent : sent + held], part.held_names, strict=True):
            if first:
                number.copy_(value)
            elif not bytes_equal(number, value):
                self._watch.forget()
                return _another_number(name)
        for resident, value in zip(part.residents, values, strict=False):
            resident.copy_(value)
        self._values[:] = values[sent + held :]
        return None

    def complete(self, raw: Sequence[Any]) -> Sequence[Any]:
        """The outputs of a launch, with those of the host in their places."""
        if self._part is None or not self._part.outputs:
            return raw
        outputs = list(raw)
        for index, value in zip(self._part.outputs, self._values, strict=True):
            outputs[index] = value
        return outputs

    def moved(self, places: Mapping[int, int]) -> HostSide:
        """The same work for the same class, called with arguments in another order."""
        other = copy.copy(self)
        other._staged = [places[i] for i in self._staged]
        return other


def _unlike(premise: Premise) -> Miss:
    return Miss("host_read", f"{premise.what} found something else than when the class was captured")


def _another_number(name: str) -> Miss:
    return Miss("host_value", f"{name} takes a number from the host that is another one than was captured")


class HostedRecording:
    """A recording whose outputs come partly from the host."""

    def __init__(self, inner: Recording, host: HostSide) -> None:
        self._inner = inner
        self._host = host
        self.static_outputs = inner.static_outputs
        self.nbytes = inner.nbytes
        self.closed = False

    def launch(self) -> Sequence[Any]:
        return self._host.complete(self._inner.launch())

    def forget(self) -> None:
        self._inner.forget()

    def close(self) -> None:
        self.closed = True
        self._inner.close()


class RefreshedRecording:
    """A recording that reads what was made of constants, made again once these have been written.

    Args:
        refreshes: constants, and what to run when one of them has changed.
    """

    def __init__(
        self, inner: Recording, refreshes: Sequence[tuple[Sequence[torch.Tensor], Callable[[], None]]]
    ) -> None:
        self._inner = inner
        self._watches = [(Watch(tensors, by_version=True), refresh) for tensors, refresh in refreshes]
        self._watch = Watch([tensor for tensors, _ in refreshes for tensor in tensors], by_version=True)
        self.static_outputs = inner.static_outputs
        self.nbytes = inner.nbytes
        self.closed = False

    def launch(self) -> Sequence[Any]:
        if self._watch.changed():
            for watch, refresh in self._watches:
                if watch.changed():
                    refresh()
        return self._inner.launch()

    def forget(self) -> None:
        for watch in (self._watch, *(watch for watch, _ in self._watches)):
            watch.forget()
        self._inner.forget()

    def close(self) -> None:
        self.closed = True
        self._watches = []
        self._inner.close()
