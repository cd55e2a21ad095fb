"""What `plan` is given: callables with their contracts, what their tensors weigh, and the state that no contract has.

Configuration readers in `adapters/` make these; files and example calls do, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

from cadence_fx.clock import check_count
from cadence_fx.contract import Contract
from cadence_fx.errors import ContractError, unknown_name
from cadence_fx.footprint import Footprint, countable, region_axes

FRAMES = "frames"  # the name of the counted axis in the footprint of an `Outside`


@dataclass(frozen=True, slots=True)
class Outside:
    """State that a contract does not declare: without a bound, with sizes that traffic decides, or a constant.

    * ``stride``: frames a call adds; 0 for a constant.
    * ``start``, ``bound``: its extents; no bound where nothing in the code limits it.
    * ``drops``: what passes the bound is dropped down to ``start`` at once, as caches with two watermarks do.
    * ``traffic``: what decides the other sizes of its calls, in words, where no clock does.
    * ``footprint``: with `FRAMES` for the counted axis.
    * ``shared``: there is one for all sessions.
    """

    name: str
    _: KW_ONLY
    stride: int
    start: int
    bound: int | None
    footprint: Footprint | None = None
    drops: bool = False
    traffic: str | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        moves = self.bound is None or self.bound != self.start
        check_count(self.stride, "stride", least=1 if moves else 0, region=self.name)
        countable(check_count(self.start, "start", least=0, region=self.name), "start", self.name)
        countable(max(self.stride, self.bound or 0), "bound", self.name)
        if self.bound is not None and self.bound < self.start:
            raise ContractError(f"starts at {self.start}, above the bound {self.bound}", field="start",
                                region=self.name)  # fmt: skip
        if self.footprint is not None:
            names = {axis: size for axis, size in enumerate(self.footprint.shape) if isinstance(size, str)}
            self.footprint.check(dict.fromkeys(names, FRAMES), self.name)


@dataclass(frozen=True, slots=True)
class PlannedCallable:
    """One callable that is to be captured.

    * ``contract``: None where no clock of it can be declared; all its state is ``outside`` then. Beside a contract,
      ``outside`` is what the caller keeps or what is constant, and decides no class.
    * ``regions``: by name of a region; ``inputs``: by argument, those that each call stages. An input that the
      contract declares has its clock's name on its axis.
    * ``operators``: calls of operators in one call of it, for the estimate of capture times.

    Raises ContractError for a name that the contract does not have and for a shape that contradicts it.
    """

    name: str
    contract: Contract | None = None
    _: KW_ONLY
    regions: Mapping[str, Footprint] = field(default_factory=dict)
    inputs: Mapping[str, Footprint] = field(default_factory=dict)
    outside: tuple[Outside, ...] = ()
    operators: int | None = None

    def __post_init__(self) -> None:
        declared = {region.name: region for region in self.contract.regions} if self.contract else {}
        for name, footprint in self.regions.items():
            if name not in declared:
                raise ContractError(unknown_name("region", name, list(declared)), field=f"regions.{name}")
            footprint.check(region_axes(declared[name]), name)
        for argument, footprint in self.inputs.items():
            axes = {entry.axis: entry.clock for entry in self.contract.inputs if entry.argument == argument} if (
                self.contract) else {}  # fmt: skip
            try:
                footprint.check(axes)
            except ContractError as error:
                raise ContractError(error.problem, field=f"inputs.{argument}.{error.field}") from error
        if self.operators is not None:
            countable(check_count(self.operators, "operators", least=1), "operators")


@dataclass(frozen=True, slots=True)
class Deployment:
    """Callables that are served together. ``weights``: bytes of what all of them read and never write, if known."""

    name: str
    callables: tuple[PlannedCallable, ...]
    _: KW_ONLY
    weights: int | None = None
    notes: tuple[str, ...] = ()
