"""What a pass is, and the facts a pass may use.

A pass is called as ``pass_(gm, ctx)`` on a *static pre-dispatch aten* graph: every shape is concrete, composite
operators are intact, mutation is kept, ``node.meta["val"]`` holds a fake tensor for each tensor, and the output
node returns one flat list. A pass may move work and storage; no pass may move a byte of any result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
import torch.fx as fx
from torch.fx.passes.infra.pass_base import PassResult

from cadence_fx.passes.graphs import GraphFacts, SharedFacts

if TYPE_CHECKING:
    from cadence_fx.contract import Region

__all__ = ["Branches", "HostPart", "Pass", "PassContext", "PassResult", "Premise", "RegionSlot", "SlowPart", "Step"]


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


@dataclass(frozen=True, slots=True)
class SlowPart:
    """The part of a graph that depends on constants and on inputs at fixed addresses alone, and runs when these change.

    ``graph`` takes ``inputs`` (placeholder names), fills ``residents`` and returns nothing.
    """

    graph: fx.GraphModule
    inputs: tuple[str, ...]
    residents: tuple[torch.Tensor, ...]  # where the rest of the graph finds the values


@dataclass(frozen=True, slots=True)
class Step:
    """One node of a graph that runs on several branches, in the order in which the host comes to it.

    Attributes:
        branch: 0 is the one on which the graph was begun.
        waits: what its branch first waits for, each on another branch; None stands for the beginning of the graph.
        drops: whose values are let go of after that and before the node runs. The memory of a value goes back to the
            branch it was made on, so nothing on another may still be using it by then.
    """

    node: fx.Node
    branch: int
    waits: tuple[fx.Node | None, ...] = ()
    drops: tuple[fx.Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Branches:
    """How a graph runs on several branches of a device at once.

    Attributes:
        count: branches, the main one included.
        steps: every node but placeholders and the output.
        joins: what the main branch waits for at the end.
        serial, branched: estimated microseconds in one row, and on these branches.
        views: nodes whose result is taken to be memory of an argument.
        owners: node -> whose memory its value is; two values of different owners are taken never to meet.
        written: owners whose memory some node writes.
    """

    count: int
    steps: tuple[Step, ...]
    joins: tuple[fx.Node, ...]
    serial: float
    branched: float
    views: frozenset[fx.Node]
    owners: dict[fx.Node, fx.Node]
    written: frozenset[fx.Node]


@dataclass(slots=True)
class PassContext:
    """The facts shared by the passes of one graph; passes replace ``regions`` entries and append to ``notes``."""

    regions: tuple[RegionSlot, ...] = ()
    frozen_inputs: frozenset[str] = frozenset()  # placeholders whose pointer never changes: parameters and buffers
    scratch_inputs: frozenset[str] = frozenset()  # placeholders whose contents mean nothing between calls: workspaces
    written: frozenset[str] | None = None  # of the frozen inputs, those that the code itself writes; None: not known
    notes: list[str] = field(default_factory=list)  # what was done or refused, and why
    premises: list[Premise] = field(default_factory=list)  # what must hold before each launch
    host: HostPart | None = None  # what runs on the host before each launch
    cleared: list[torch.Tensor] = field(default_factory=list)  # holds zeros whenever a product writes its result there
    modified: list[str] = field(default_factory=list)  # the passes that changed the graph, in order; the runner's
    # Of the frozen inputs, those that nothing may be computed from in advance, and why.
    unsteady: Mapping[str, str] = field(default_factory=dict)
    # What tells the memory of a frozen input, and how it is read, from that of others in other graphs too.
    origins: Mapping[str, str] = field(default_factory=dict)
    # Memory for a value that is computed once, by a name that says what computes it, and a traced tensor like it;
    # None where nobody will run `slow`, and then nothing is kept.
    keep: Callable[[str, torch.Tensor], torch.Tensor] | None = None
    slow: SlowPart | None = None  # what runs before the first launch, and after a write on an input at a fixed address
    branches: Branches | None = None  # how the graph runs on several branches of its device; None: in one row
    shared: SharedFacts | None = None  # the runner's, which knows when the graph has changed

    def facts_of(self, graph: fx.Graph) -> GraphFacts:
        """Facts of a graph as a pass finds it. One that has changed it makes its own."""
        return GraphFacts(graph) if self.shared is None else self.shared.of(graph)


@runtime_checkable
class Pass(Protocol):
    """One rewrite. Its docstring shows the graph before and after, and says why no byte can move.

    ``modified`` of the result is true exactly when the graph changed. A pass may also define
    ``requires(gm, ctx)`` and ``ensures(gm, ctx)``, called before and after it, which raise when they do not hold.
    """

    name: str

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult: ...
