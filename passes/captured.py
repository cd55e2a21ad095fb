"""What an edit of a captured graph is, and what it may know of the graph.

A pass rewrites operators before they are recorded; an edit rewrites the kernels that were recorded, before the graph is
instantiated. A kernel is known by its name and by the bytes of its parameters alone, so an edit acts only on kernels
whose reads and writes are documented here by name, and the certificate compares the edited recording with eager like
any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

__all__ = ["CapturedGraph", "CapturedNode", "Edit", "EditContext", "Pointer", "pointers"]

# Where an address stands among the parameters of a kernel: index of the parameter, offset in it in bytes.
Pointer = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class CapturedNode:
    """One node of a captured graph, as it was when the graph was read.

    ``params`` holds the bytes of each parameter of a kernel; ``address`` and ``nbytes`` what a memset fills.
    """

    kind: str  # "kernel", "memset" or "other"
    name: str = ""
    launch: tuple[int, ...] = ()  # grid and block
    params: tuple[bytes, ...] = ()
    address: int = 0
    nbytes: int = 0
    value: int = 0


class CapturedGraph(Protocol):
    """A captured graph that is not instantiated yet."""

    @property
    def nodes(self) -> Sequence[CapturedNode]:
        """In an order in which they could run one by one."""

    def before(self, node: CapturedNode) -> Sequence[CapturedNode]:
        """The nodes that ``node`` waits for, as the graph is now."""

    def after(self, node: CapturedNode) -> Sequence[CapturedNode]:
        """The nodes that wait for ``node``, as the graph is now."""

    def repoint(self, node: CapturedNode, changes: Mapping[Pointer, int]) -> None:
        """Give a kernel other addresses."""

    def remove(self, node: CapturedNode) -> None:
        """Take a node out; what waited for it waits for what it waited for."""

    def clear_first(self, memory: torch.Tensor) -> None:
        """Fill ``memory`` with zeros before anything else runs."""

    def alone(self, nodes: Sequence[CapturedNode], changes: Sequence[Mapping[Pointer, int]]) -> Callable[[], None]:
        """A launch of these kernels alone, one after the other, each with other addresses."""


@dataclass(slots=True)
class EditContext:
    """``constants``: tensors at fixed addresses that the recording does not write. ``device``: where it runs.
    ``cleared``: memory in which every product finds zeros where it is about to put its result.

    An edit appends to ``notes`` what it did or why it did nothing, to ``kept`` the memory that the recording now reads,
    to ``added`` the bytes of it that no other recording has, and to ``refreshes`` what has to run again when one of
    some constants has been written.
    """

    constants: Sequence[torch.Tensor]
    device: torch.device
    cleared: Sequence[torch.Tensor] = ()
    notes: list[str] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)
    added: int = 0
    refreshes: list[tuple[Sequence[torch.Tensor], Callable[[], None]]] = field(default_factory=list)


class Edit(Protocol):
    """One edit. Returns whether it changed the graph."""

    name: str

    def __call__(self, graph: CapturedGraph, ctx: EditContext) -> bool: ...


def pointers(node: CapturedNode, first: int, last: int) -> Iterator[tuple[Pointer, int]]:
    """The aligned words among a kernel's parameters that hold an address from ``first`` on and before ``last``."""
    for index, raw in enumerate(node.params):
        for offset in range(0, len(raw) - 7, 8):
            word = int.from_bytes(raw[offset : offset + 8], "little")
            if first <= word < last:
                yield (index, offset), word
