"""What an adapter is: the declarations for one model family, found by the class of the module being compiled."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import nn

from cadence_fx.contract import Contract


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
