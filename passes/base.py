"""What a pass is, and the facts a pass may use.

A pass is called as ``pass_(gm, ctx)`` on a *static pre-dispatch aten* graph: every shape is concrete, composite
operators are intact, mutation is kept, ``node.meta["val"]`` holds a fake tensor for each tensor, and the output
node returns one flat list. A pass may move work and storage; no pass may move a byte of any result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
import torch.fx as fx
from torch.fx.passes.infra.pass_base import PassResult

if TYPE_CHECKING:
    from cadence_fx.contract import Region

__all__ = ["HostPart", "Pass", "PassContext", "PassResult", "Premise", "RegionSlot"]


@dataclass(frozen=True, slots=True)
class RegionSlot:
    """One instance of a region in one graph: where its old state comes in and where its new state goes out."""

    name: str  # the region, as the contract names it
    declared: Region
    instance: str  # which instance, such as "layers.0.hist"
    placeholder: str  # node name of the old state
    output: int | None  # index in the flat outputs of the new state; None: written in place through the placeholder
    axis: int  # frame axis, never negative
    extent: int  # frames on entry
    next_extent: int  # frames on exit
    advance: int  # new frames this class adds, before retention
    destination: str | None = None  # node name of the placeholder for the new state's storage, once there is one


@dataclass(frozen=True, slots=True)
class Premise:
    """What a rewrite relies on: a value that the host read in every call, decided by inputs at fixed addresses alone.

    ``graph`` takes ``inputs`` (placeholder names) and returns the value; it must equal ``expected`` whenever the class
    is launched.
    """

    what: str  # the node and the user's line
    graph: fx.GraphModule
    inputs: tuple[str, ...]
    expected: bool


@dataclass(frozen=True, slots=True)
class HostPart:
    """The part of a graph that runs on the host, before each launch of the rest.

    ``graph`` takes ``inputs`` (placeholder names) and returns the values of ``residents``, of ``held`` and of the
    ``outputs``, in this order.
    """

    graph: fx.GraphModule
    inputs: tuple[str, ...]
    residents: tuple[torch.Tensor, ...]  # on the device; each call's value is copied into them
    held: tuple[torch.Tensor, ...]  # on the host; numbers that kernels take by value, and so may not change
    held_names: tuple[str, ...]  # the node that takes each of them, and the user's line
    outputs: tuple[int, ...]  # indices among the outputs of the whole graph
    writes: bool  # whether it writes an input


@dataclass(slots=True)
class PassContext:
    """The facts shared by the passes of one graph; passes replace ``regions`` entries and append to ``notes``."""

    regions: tuple[RegionSlot, ...] = ()
    frozen_inputs: frozenset[str] = frozenset()  # placeholders whose pointer never changes: parameters and buffers
    scratch_inputs: frozenset[str] = frozenset()  # placeholders whose contents mean nothing between calls: workspaces
    notes: list[str] = field(default_factory=list)  # what was done or refused, and why
    premises: list[Premise] = field(default_factory=list)  # what must hold before each launch
    host: HostPart | None = None  # what runs on the host before each launch


@runtime_checkable
class Pass(Protocol):
    """One rewrite. Its docstring shows the graph before and after, and says why no byte can move.

    ``modified`` of the result is true exactly when the graph changed. A pass may also define
    ``requires(gm, ctx)`` and ``ensures(gm, ctx)``, called before and after it, which raise when they do not hold.
    """

    name: str

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult: ...
