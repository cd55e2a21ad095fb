"""Everything a computation can draw random numbers from: read, put back, compared.

A class draws from the generators of its own *device* or from a *host* source. What a device generator gives is part of
a launch: its state goes into the kernels and its offset moves with each launch. What the host gives is a number that
the recording would freeze. On a CPU class PyTorch's CPU generator is the device's own.

States are read whole. Reading and writing them is Python work of some ten microseconds each and takes place while a
class is captured, never in a steady call.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from cadence_fx._torch import same_generator


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Source:
    """One thing that random numbers are drawn from.

    Attributes:
        name: for messages.
        read, write: its state, in a form of its own.
        generator: PyTorch's object, where it is one; None for Python's and numpy's.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    generator: torch.Generator | None = None

    def is_of(self, device: torch.device) -> bool:
        """Whether a launch on this device may draw from it."""
        if self.generator is None or self.generator.device.type != device.type:
            return False
        return device.type == "cpu" or (self.generator.device.index or 0) == (device.index or 0)


def of_torch(generator: torch.Generator, name: str) -> Source:
    """PyTorch's generator as a source."""
    return Source(name, generator.get_state, lambda state: _set(generator, state), generator)


def of_python(owner: Any, name: str) -> Source:
    """Python's `random` module, or a `random.Random`."""
    return Source(name, owner.getstate, owner.setstate)


def of_numpy(owner: Any, name: str) -> Source:
    """A numpy `Generator`, a bit generator, a `RandomState`, or the legacy global state (`numpy.random`)."""
    if type(owner).__name__ == "Generator":
        bits = owner.bit_generator
        return of_numpy(bits, name)
    if hasattr(owner, "state"):
        return Source(name, lambda: owner.state, lambda state: setattr(owner, "state", state))
    return Source(name, owner.get_state, owner.set_state)


def is_numpy(value: Any) -> bool:
    """Whether a value is one of numpy's own generators; numpy need not be there."""
    kind = type(value)
    return kind.__module__.startswith("numpy.random") and (
        kind.__name__ in ("Generator", "RandomState") or hasattr(value, "random_raw")
    )


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that operators on this device draw from when they are given none."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def device_sources(device: torch.device) -> list[Source]:
    """What operators on this device draw from when they are given no generator."""
    return [of_torch(default_generator(device), _spell(device))]


def all_sources(device: torch.device | None = None) -> list[Source]:
    """Every process-wide source. CUDA's are left out while nothing has started CUDA, which costs seconds.

    Args:
        device: one that is about to be used, so that its generator counts in any case.
    """
    found = device_sources(torch.device("cpu"))
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if _cuda_runs(device) else []
    for each in devices:
        found += device_sources(each)
    found.append(of_python(random, "Python's random module"))
    if (numpy := sys.modules.get("numpy")) is not None:
        found.append(of_numpy(numpy.random, "numpy's global state"))
    return found


def _cuda_runs(device: torch.device | None) -> bool:
    return torch.cuda.is_initialized() or (device is not None and device.type == "cuda")


class Generators:
    """Sources with the states they had at the start.

    Args:
        sources: what is watched from now on; one that comes twice counts once.
    """

    def __init__(self, sources: Iterable[Source] = ()) -> None:
        self._saved: list[tuple[Source, Any]] = []
        for source in sources:
            if source.generator is None or not self.knows(source.generator):
                self._saved.append((source, source.read()))

    def knows(self, generator: torch.Generator) -> bool:
        """Whether PyTorch's generator is watched."""
        return any(s.generator is not None and same_generator(s.generator, generator) for s, _ in self._saved)

    def of(self, device: torch.device) -> list[torch.Generator]:
        """PyTorch's generators that launches on this device may draw from."""
        return [s.generator for s in self.sources if s.generator is not None and s.is_of(device)]

    @property
    def sources(self) -> list[Source]:
        """What is watched."""
        return [source for source, _ in self._saved]

    def restore(self) -> None:
        """Every source is as it was at the start."""
        for source, state in self._saved:
            source.write(state)

    def moved(self) -> list[Source]:
        """The sources whose state is another now."""
        return [source for source, state in self._saved if not same_state(state, source.read())]

    def read(self) -> list[Any]:
        """The states now, in the order of `sources`."""
        return [source.read() for source in self.sources]


def same_state(left: Any, right: Any) -> bool:
    """Whether two states of one source are equal."""
    return bool(_plain(left) == _plain(right))


def _plain(state: Any) -> Any:
    """A state as values that compare by content."""
    if isinstance(state, torch.Tensor):
        return bytes(state.tolist())
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, (tuple, list)):
        return [_plain(value) for value in state]
    return state.tobytes() if hasattr(state, "tobytes") else state


def _set(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _spell(device: torch.device) -> str:
    return "torch's CPU generator" if device.type == "cpu" else f"the generator of {device}"


def explicit(generators: Sequence[torch.Generator]) -> list[Source]:
    """Generators that were passed around, as sources."""
    return [of_torch(generator, f"a generator on {generator.device}") for generator in generators]
