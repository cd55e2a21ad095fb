"""What `infer` returns: a contract, and how sure each of its facts is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cadence_fx.contract import Contract
from cadence_fx.errors import ContractError
from cadence_fx.serialize import dumps, to_dict
from cadence_fx.source import python_source


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """One fact of a contract: which field of which part, how sure it is, and why.

    ``confidence`` is "proved" (the graph of every call that was made says so), "observed" (calls say so) or "ambiguous"
    (other declarations explain all that was seen as well). ``where`` is the user's line, if one is known.
    """

    part: str
    field: str
    value: str
    confidence: str
    why: str
    where: str | None

    def __str__(self) -> str:
        return f"{self.field} {self.value}{f' ({self.why})' if self.why else ''}"


@dataclasses.dataclass(frozen=True, slots=True)
class Inferred:
    """What `infer` found; ``str()`` is a contract ready to paste, with what is known of it as comments.

    Attributes:
        contract: None where no contract can say what the module does, or where it did otherwise when it was checked.
        facts: of each clock and region.
        ambiguous: what could not be decided, and what is assumed.
        problems: why there is no contract.
        checked: what the contract was compared with.
    """

    contract: Contract | None
    facts: tuple[Fact, ...]
    ambiguous: tuple[str, ...]
    problems: tuple[str, ...]
    checked: str

    def facts_of(self, part: str) -> dict[str, Fact]:
        """The facts of a region or a clock, by field."""
        return {fact.field: fact for fact in self.facts if fact.part == part}

    def python(self) -> str:
        """Python text that makes the contract; ContractError without one."""
        return python_source(self._found(), self._comments())

    def toml(self) -> str:
        """The contract as a TOML file; ContractError without one."""
        return dumps(self._found())

    def save(self, path: str | Path) -> None:
        """Write the contract to a ``.toml`` or ``.json`` file; ContractError without one."""
        self._found().save(path)

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain containers."""
        return {
            "contract": to_dict(self.contract) if self.contract is not None else None,
            "facts": [dataclasses.asdict(fact) for fact in self.facts],
            "ambiguous": list(self.ambiguous),
            "problems": list(self.problems),
            "checked": self.checked,
        }

    def to_json(self, *, indent: int | None = 2) -> str:
        """Everything as JSON."""
        return json.dumps(self.as_dict(), indent=indent)

    def _found(self) -> Contract:
        if self.contract is None:
            raise ContractError("; ".join(self.problems), field="infer")
        return self.contract

    def _comments(self) -> dict[str, list[str]]:
        parts = dict.fromkeys(fact.part for fact in self.facts)
        return {part: _told([fact for fact in self.facts if fact.part == part]) for part in parts}

    def __str__(self) -> str:
        lines = [f"# {self.checked}"] if self.checked else []
        if self.contract is None:
            lines += ["# There is no contract:", *(f"#   {problem}" for problem in self.problems)]
            for part, told in self._comments().items():
                lines += [f"# {part}:", *(f"#   {line}" for line in told)]
        if self.ambiguous:
            lines += ["# Not decided:", *(f"#   {doubt}" for doubt in self.ambiguous)]
        return "\n".join([*lines, *([self.python()] if self.contract is not None else [])])


def _told(facts: Sequence[Fact]) -> list[str]:
    """Facts in words, those that are equally sure and of one line together."""
    kinds = dict.fromkeys((fact.confidence, fact.where) for fact in facts)
    return [
        f"{confidence}{f' ({_short(where)})' if where else ''}: "
        + "; ".join(str(fact) for fact in facts if (fact.confidence, fact.where) == (confidence, where))
        for confidence, where in kinds
    ]


def _short(where: str) -> str:
    """A file and line, relative to the working directory where that is shorter."""
    here = f"{Path.cwd()}/"
    return where.removeprefix(here)
