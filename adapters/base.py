"""What an adapter is: the declarations for one model family, found by the class of the module being compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from cadence_fx.contract import Contract
from cadence_fx.hazard import Hazard

Compile = Callable[[nn.Module, Contract], Callable[..., Any]]


@runtime_checkable
class Adapter(Protocol):
    """Declares the clocks and regions of modules it knows.

    An adapter's module must not import the model's package: it reads the numbers off the objects that it is given.
    """

    @property
    def classes(self) -> tuple[str, ...]:
        """Qualified names (``package.module.Class``) of the module classes this adapter can declare."""

    def contract(self, module: nn.Module) -> Contract | None:
        """The contract of this module, or None when its configuration has no bounded state to declare."""


@runtime_checkable
class Advises(Protocol):
    """An adapter that knows hazards of its modules which no example call shows."""

    def hazards(self, module: nn.Module) -> Sequence[Hazard]:
        """The hazards of this module."""


def compiler(backend: str | Callable[..., Any] | None, passes: Any, dynamic: bool | None = None) -> Compile:
    """What makes a callable of a step and its contract: `torch.compile` with the backend, or nothing at all."""

    def compiled(step: nn.Module, contract: Contract) -> Callable[..., Any]:
        if backend is None:
            return step
        options: dict[str, Any] = {"contract": contract}
        if passes is not None:
            options["passes"] = passes
        return torch.compile(step, backend=backend, dynamic=dynamic, options=options)

    return compiled
