"""Numbers out of released configuration files: read by name, checked, and nothing in them is executed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from cadence_fx.clock import check_count
from cadence_fx.errors import ContractError, ContractFileError, unknown_name

MAX_NUMBER = 1 << 40


@dataclass(slots=True)
class Config:
    """The tables of a configuration; a field is named by its path, ``"flow.decoder.estimator.depth"``.

    A field that is missing has the released value, which the reader gives. Configurations hold much that no plan
    reads, so other fields are passed over, except those that look like a misspelling of one that is missing.
    """

    data: Mapping[str, Any]
    source: str = "configuration"
    _read: set[str] = field(default_factory=set)

    def _get(self, name: str, released: Any) -> Any:
        self._read.add(name)
        value: Any = self.data
        walked: list[str] = []
        for step in name.split("."):
            if not isinstance(value, Mapping):
                self._refuse(".".join(walked), f"expected a table, found {type(value).__name__}")
            walked.append(step)
            if step not in value:
                return released
            value = value[step]
        return value

    def _refuse(self, name: str, problem: str) -> None:
        raise ContractFileError(self.source, problem, field=name)

    def whole(self, name: str, released: int, *, least: int = 1) -> int:
        """A whole number from ``least`` on; 3.0 counts as one, since some tools write it so."""
        value = self._get(name, released)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            number = check_count(value, name, least=least)
        except ContractError as error:
            raise ContractFileError(self.source, error.problem, field=name) from error
        if number > MAX_NUMBER:
            self._refuse(name, f"expected at most {MAX_NUMBER:,}, found {number}")
        return number

    def wholes(self, name: str, released: tuple[int, ...], *, least: int = 1, most: int = 64) -> tuple[int, ...]:
        """Whole numbers from ``least`` on, one to ``most`` of them."""
        values = self._get(name, released)
        if not isinstance(values, (list, tuple)) or not 0 < len(values) <= most:
            self._refuse(name, f"expected 1 to {most} whole numbers, found {str(values)[:80]}")
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_NUMBER:
                self._refuse(name, f"expected whole numbers from {least} on, found {str(value)[:80]}")
        return tuple(values)

    def part(self, name: str, released: int, parts: str, released_parts: int) -> int:
        """A whole number divided by another, which must divide it: the width of one of several heads."""
        whole, count = self.whole(name, released), self.whole(parts, released_parts)
        if whole % count:
            self._refuse(parts, f"{count} do not divide {name} = {whole}")
        return whole // count

    def times(self, name: str, released: int, rate: str, released_rate: float) -> int:
        """How often a rate goes into another, which must be a whole number: samples a frame."""
        whole, each = self.whole(name, released), self._get(rate, released_rate)
        if isinstance(each, bool) or not isinstance(each, (int, float)) or not 0 < each <= whole:
            self._refuse(rate, f"expected a number above 0 and up to {name} = {whole}, found {str(each)[:80]}")
        if not (whole / each).is_integer():
            self._refuse(rate, f"{each} does not divide {name} = {whole}")
        return int(whole / each)

    def choice(self, name: str, released: str, known: tuple[str, ...]) -> str:
        """One of the ``known`` words."""
        value = self._get(name, released)
        if value not in known:
            self._refuse(name, unknown_name("value", str(value)[:80], known))
        return str(value)

    def check(self) -> None:
        """After all is read: ContractFileError for a field that looks like a misspelling of a missing one."""
        by_table: dict[str, set[str]] = {}
        for name in self._read:
            table, _, leaf = name.rpartition(".")
            by_table.setdefault(table, set()).add(leaf)
        for table, leaves in by_table.items():
            found: Any = self.data
            for step in table.split(".") if table else ():
                found = found.get(step, {})
            missing = [leaf for leaf in leaves if leaf not in found]
            for name in found:
                near = get_close_matches(str(name), missing, n=1, cutoff=0.8) if name not in leaves else []
                if near and abs(len(near[0]) - len(str(name))) < 3:  # longer names are other fields of a like kind
                    where = f"{table}.{name}" if table else str(name)
                    self._refuse(where, f"{str(name)[:80]!r} is not a field that is read; did you mean {near[0]!r}?")


def options(given: Mapping[str, str], known: Mapping[str, int | str | tuple[int, ...]]) -> dict[str, Any]:
    """``known`` with its values replaced by what was ``given`` as text: numbers, words, or lists such as ``2,4,6-28``.

    Raises ContractError for an unknown name, with the nearest one, and for text that is no such value.
    """
    values: dict[str, Any] = dict(known)
    for name, text in given.items():
        if name not in known:
            raise ContractError(unknown_name("option", name, list(known)), field=name)
        released = known[name]
        if isinstance(released, tuple):
            values[name] = _list(name, text)
        elif isinstance(released, int):
            values[name] = _number(name, text)
        else:
            values[name] = text
    return values


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 12:
        raise ContractError(f"expected a whole number, found {text[:80]!r}", field=name)
    return int(text)


def _list(name: str, text: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, dash, last = part.partition("-")
        low, high = _number(name, first), _number(name, last if dash else first)
        if not low <= high < low + 4096:
            raise ContractError(f"expected a range of at most 4,096 numbers, found {part[:80]!r}", field=name)
        numbers += range(low, high + 1)
    return tuple(numbers)


def chosen(name: str, value: str, known: tuple[str, ...]) -> str:
    """``value`` when it is one of the ``known`` words; ContractError, with the nearest one, otherwise."""
    if value not in known:
        raise ContractError(unknown_name("value", value[:80], known), field=name)
    return value
