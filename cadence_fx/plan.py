"""What a class is made of, as the builder of a class hands it to the engine.

A `Plan` says how to run one signature on static arguments, which arguments are fixed by pointer, which are staged,
which are regions, and how the user's outputs come out of the raw ones. `Miss` is the other answer: this call runs
eager, and why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from cadence_fx.layout import Layout
from cadence_fx.storage import Carry

if TYPE_CHECKING:
    from cadence_fx.eager_breaks import Breaks, Tape
    from cadence_fx.kept import KeptValues
    from cadence_fx.passes import Edit
    from cadence_fx.residents import HostSide


@dataclasses.dataclass(frozen=True, slots=True)
class Miss:
    """A call that runs eager: a stable reason, and the argument, axis and line in words.

    `lasting`: found by looking at the computation, so it holds for every call of this signature.
    """

    reason: str
    detail: str = ""
    lasting: bool = False


# Warm-up looks at how a call leaves its states; such a call is no traffic and is not counted.
WATCHED = Miss("watched")
NEEDS_GRAD = Miss(
    "requires_grad", "something read requires grad and grad mode is on; serve under no_grad or inference_mode"
)


@dataclasses.dataclass(slots=True)
class RegionUse:
    """One region instance in one class.

    Attributes:
        index: of the state among the arguments.
        carry: its storage.
        extent, next_extent: attended extents on entry and on exit, in frames.
        output: index of the new state among the outputs; None when the code writes the state in place.
        next_layout: eager gives the new state, None when it is contiguous; read off the stock computation at capture.
        shared: the new state leaves as another result too, which must keep its bytes: it is handed out as a copy.
        returned: the old state leaves as a result, which must keep its bytes: it is moved out of the carry first.
    """

    index: int
    carry: Carry
    extent: int
    next_extent: int
    output: int | None
    next_layout: Layout = None
    shared: bool = False
    returned: bool = False


@dataclasses.dataclass(slots=True)
class Way:
    """One way to run a class.

    Attributes:
        run: called with the static arguments followed by the destination view of each region that has an output, in
            order of `Plan.regions`; returns the flat outputs. A region's output is written to its destination.
        host: what runs on the host before each launch.
        notes: what was done and what was refused on the way here.
        kept: the values that it finds computed.
        edits: what is done to the captured graph.
        cleared: see `EditContext`.
        idle: indices of fixed arguments that it neither reads nor writes, and that nothing it relies on was made of.
        breaks: where it is not recorded.
    """

    name: str
    run: Callable[..., Sequence[Any]]
    host: HostSide | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    kept: KeptValues | None = None
    edits: Sequence[Edit] = ()
    cleared: Sequence[torch.Tensor] = ()
    idle: frozenset[int] = frozenset()
    breaks: Breaks | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """A computation with operators that do not repeat, as it may be recorded all the same.

    Attributes:
        ways: to run it in parts.
        tape: of the results of these operators.
        eager: which operators run eager between the parts, and the user's lines.
    """

    ways: Iterable[Way]
    tape: Tape
    eager: list[str]


@dataclasses.dataclass(slots=True)
class Plan:
    """One class before it is recorded.

    Attributes:
        ways: to run the class, best first; made when they are asked for. The first one that passes the certificate is
            admitted.
        reference: the stock computation on the same arguments (without destinations), for the certificate.
        label: names the class in reports: clocks and extents.
        fixed: indices of arguments bound by pointer; once a way is admitted, of those that it uses.
        idle: indices of arguments that were to be bound by pointer and that the admitted way does not use.
        staged: indices of arguments copied in on each call.
        only_read: those of them that are declared states, by name; this code neither writes nor returns them.
        mutated: indices of fixed or staged arguments the code writes and whose contents mean something afterwards.
        written: all indices of fixed or staged arguments the code writes, declared workspaces among them.
        regions: the states.
        draws: whether the computation draws random numbers on its device, as far as its graph tells; None when nothing
            is known, and then every source of randomness is watched while it runs.
        generators: generators among the arguments.
        owner: the plain callable, whose objects may be rebound while it runs; None for a graph.
        altered: what the last run of `reference` has rebound in containers that a plain callable was given, in words.
        frozen: the user vouches that nobody rebinds them between calls.
        host, kept: those of the way that is tried or admitted.
        beside: memory that is no argument and that the computation was seen to write.
        reached: storage addresses of the tensors that a plain callable finds by itself.
        compared: inputs on which the certificate has compared the class with eager; 0 before it.
        fingerprint: of the computation, with arguments by name: equal ones compute the same thing.
        split: how to run it in parts where it does not repeat its bytes, given the static arguments and what puts them
            back; None where that is not known.
        tape: of the results of the operators that do not repeat, where some do not.
        eager: these operators, which run eager in every call, and the user's lines.
    """

    ways: Iterable[Way]
    reference: Callable[..., Sequence[Any]]
    label: str
    fixed: list[int]
    staged: list[int]
    mutated: list[int] = dataclasses.field(default_factory=list)
    written: list[int] = dataclasses.field(default_factory=list)
    only_read: dict[int, str] = dataclasses.field(default_factory=dict)
    regions: list[RegionUse] = dataclasses.field(default_factory=list)
    idle: frozenset[int] = frozenset()
    notes: list[str] = dataclasses.field(default_factory=list)
    compared: int = 0
    fingerprint: str | None = None
    draws: bool | None = None
    generators: list[torch.Generator] = dataclasses.field(default_factory=list)
    owner: Any = None
    altered: list[str] = dataclasses.field(default_factory=list)
    frozen: bool = False
    beside: list[torch.Tensor] = dataclasses.field(default_factory=list)
    reached: frozenset[int] = frozenset()
    host: HostSide | None = None
    kept: KeptValues | None = None
    split: Callable[[Sequence[Any], Callable[[], None]], Split | None] | None = None
    tape: Tape | None = None
    eager: list[str] = dataclasses.field(default_factory=list)

    def admit(self, way: Way) -> None:
        """Settle for one way to run the class: what it leaves alone may be anywhere."""
        self.ways = [way]  # a recording reads the constants of its graph, and does not keep them alive
        self.split = None  # it holds the call that is captured
        self.idle = way.idle
        self.fixed = [i for i in self.fixed if i not in way.idle]
        self.written = [i for i in self.written if i not in way.idle]
        self.notes.append(f"admitted: {way.name}")

    def follow(self, split: Split) -> None:
        """Run in parts."""
        self.ways, self.tape, self.eager = split.ways, split.tape, split.eager
        self.notes += [f"runs eager, since it does not repeat: {what}" for what in split.eager]

    def predicted_bytes(self, args: Sequence[Any]) -> int:
        """Bytes of the inputs that are neither aliased nor fixed."""
        return sum(args[i].numel() * args[i].element_size() for i in self.staged)


class Planner(Protocol):
    """Builds classes for an `ExactShapeReplay` and looks after the states of calls that run eager."""

    def key_part(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """What else decides which kernels run, besides the arguments' own signature."""

    def plan(self, args: Sequence[Any]) -> Plan | Miss:
        """The class that serves this call, or why there is none."""

    def foresee(self, args: Sequence[Any]) -> Miss | None:
        """Why `plan` would give no class, as far as that shows without planning; nothing is changed."""

    def unknown(self, args: Sequence[Any]) -> Miss | None:
        """After the seal: why this call may not be captured; None when warm-up has captured its signature before."""

    def twin(self, plan: Plan, args: Sequence[Any]) -> Any | None:
        """A class of another table that computes the very same thing on the same memory, in this table's terms."""

    def admitted(self, plan: Plan, args: Sequence[Any], entry: Any) -> None:
        """A class has been captured."""

    def workspaces(self, args: Sequence[Any]) -> Sequence[torch.Tensor]:
        """Those arguments whose contents mean nothing between calls, and that may be parked."""

    def run_eager(self, args: Sequence[Any]) -> Any:
        """Run the stock computation; states it returns are put back into their carries."""


def destinations(plan: Plan) -> list[torch.Tensor]:
    """The destination views, in the order `Way.run` takes them."""
    return [use.carry.view(use.next_extent) for use in plan.regions if use.output is not None]
