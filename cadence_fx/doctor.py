"""Doctor: what is known about a process and a module before anything is captured.

The module's hazards are found by making the example call and watching it (`hazards`); what an adapter knows of its
models is added. Nothing is compiled, and nothing is another afterwards.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from cadence_fx._torch import CompileSite, compile_wrapper_of, module_of, original_of
from cadence_fx._units import counted
from cadence_fx.backend import contract_of
from cadence_fx.contract import Contract
from cadence_fx.environment import Environment, environment
from cadence_fx.errors import ContractError
from cadence_fx.hazard import Hazard
from cadence_fx.hazards import find_hazards
from cadence_fx.replay import ExactShapeReplay


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the doctor has found. `str()` is for people, `as_dict()` and `to_json()` for programs.

    Attributes:
        environment: versions, device, switches, flags, and what is wrong with them.
        module: the name of what was looked at, if anything was.
        hazards: its hazards, in the order of their lines.
    """

    environment: Environment
    module: str | None = None
    hazards: tuple[Hazard, ...] = ()

    @property
    def stops(self) -> bool:
        """Whether something keeps calls from being captured."""
        return any(p.stops for p in self.environment.problems) or any(h.stops for h in self.hazards)

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain containers."""
        return {
            **self.environment.facts,
            "problems": [dataclasses.asdict(each) for each in self.environment.problems],
            "module": self.module,
            "hazards": [dataclasses.asdict(each) for each in self.hazards],
            "stops": self.stops,
        }

    def to_json(self, *, indent: int | None = 2) -> str:
        """Everything as JSON."""
        return json.dumps(self.as_dict(), indent=indent, default=str)

    def __str__(self) -> str:
        lines = []
        for title, facts in self.environment.facts.items():
            lines.append(f"{title}: " + ", ".join(f"{name} {value}" for name, value in facts.items()))
        for problem in self.environment.problems:
            lines += [f"{_mark(problem.stops)} {problem.what}", f"    remedy: {problem.remedy}"]
        return "\n".join([*lines, *self._hazard_lines()])

    def _hazard_lines(self) -> list[str]:
        if self.module is None:
            return []
        if not self.hazards:
            return [f"{self.module}: no known hazards"]
        stopping = sum(each.stops for each in self.hazards)
        found = counted(len(self.hazards), "hazard")
        lines = [f"{self.module}: {found}, of which {stopping or 'none'} in the way of capture"]
        for each in self.hazards:
            lines.append(f"{_mark(each.stops)} {each.kind}: {each.what}")
            lines += [f"    at {each.line}"] if each.line is not None else []
            lines += [f"    remedy: {each.remedy}"]
        return lines


def _mark(stops: bool) -> str:
    return "  stops" if stops else "  note "


def doctor(module: Any = None, *args: Any, contract: Contract | None = None, **kwargs: Any) -> Diagnosis:
    """Look at the process, and at a module by making an example call of it.

    Not beside traffic: what is compiled in this process runs eager meanwhile.

    Args:
        module: a module, a function, what `torch.compile` made of one, or an `ExactShapeReplay`; None: the process
            alone. Called in the mode that is on, a few times; its attributes, tensors and generators are put back.
        *args, **kwargs: of the example call. They are not changed.
        contract: what it declares is no hazard; by default what applies to the module (`declare`, options, adapters).

    Raises:
        ContractError: a module that takes arguments, and no example call.
        WeightsWritten: the call writes a parameter that is too large to be put back.
    """
    if module is None:
        return Diagnosis(environment())
    target = module.fn if isinstance(module, ExactShapeReplay) else original_of(module)
    if not callable(target):
        raise ContractError(f"doctor() takes a callable, found {type(module).__name__}", field="module")
    owner = module_of(target)
    wrapper = None if isinstance(module, ExactShapeReplay) else compile_wrapper_of(module)
    options = wrapper.kwargs.get("options") if wrapper is not None else None
    contract = contract or contract_of(CompileSite(module=owner), options)
    found = find_hazards(target, args, kwargs, contract)
    if owner is not None and target is owner:
        from cadence_fx.adapters import hazards_for

        found = [*found, *hazards_for(owner)]
    name = getattr(target, "__name__", None) or type(target).__name__
    return Diagnosis(environment(), name, tuple(found))
