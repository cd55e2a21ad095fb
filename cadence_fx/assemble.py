"""From the facts of each state to a contract: clocks, regions with stars for what is alike, inputs that vary."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

from cadence_fx import paths
from cadence_fx.calls import Arguments, Place, Slot
from cadence_fx.clock import Clock
from cadence_fx.contract import Contract, Input, Region
from cadence_fx.deduce import Deduced
from cadence_fx.growth import Growth
from cadence_fx.leaves import accessor, tensor_paths
from cadence_fx.pairs import Doubt
from cadence_fx.paths import ANY, Path
from cadence_fx.retention import Pinned


@dataclasses.dataclass(slots=True)
class Assembled:
    """A contract, the states of each of its regions, and the clocks' strides by the growth that gave them."""

    contract: Contract
    members: dict[str, list[Deduced]]
    doubts: list[Doubt]
    drivers: dict[str, Growth | None]


@dataclasses.dataclass(slots=True)
class _Group:
    """States that advance together, and what they grow with."""

    driver: Growth | None
    states: list[Deduced]
    name: str
    stride: int = 1
    flush: int | None = None


def assemble(
    states: Sequence[Deduced],
    grown: Mapping[Place, Growth],
    normal: Arguments,
    flush: Arguments | None,
) -> Assembled:
    """The contract of a stream.

    Args:
        grown: what states grow with.
        normal, flush: a normal call, and one of other sizes that ends a turn.
    """
    doubts: list[Doubt] = []
    slots = {state.slot.place for state in states}
    groups = _groups(states, grown)
    for group in groups:
        group.stride = _stride(group, normal)
    varying = _varying(normal, flush, slots) if flush is not None else {}
    inputs: list[Input] = []
    if flush is not None:
        inputs = _flush(groups, grown, normal, varying, doubts)
    members = _members(states)
    regions = [_region(name, alike, next(g for g in groups if alike[0] in g.states)) for name, alike in members.items()]
    used = {region.clock for region in regions} | {entry.clock for entry in inputs}
    clocks = [
        Clock(group.name, group.stride, flush=[group.flush] if group.flush else ())
        for group in groups
        if group.name in used
    ]
    return Assembled(
        Contract(clocks, regions, inputs=inputs), members, doubts, {group.name: group.driver for group in groups}
    )


def _groups(states: Sequence[Deduced], grown: Mapping[Place, Growth]) -> list[_Group]:
    """States by the argument that they grow with. Those that grow with none that is known have a clock of their own;
    those whose extents say nothing go with the first."""
    found: dict[object, _Group] = {}
    for state in states:
        growth = grown.get(state.slot.place)
        if growth is not None:
            group = found.setdefault(growth.counted, _Group(growth, [], "frame"))
            group.states.append(state)
            if growth.is_multiple:
                group.driver = growth
    groups = list(found.values())
    unknown = [s for s in states if s.added and s.slot.place not in grown]
    silent = [s for s in states if not s.added]
    if groups:  # a ring does not show in its extents what it grows with
        silent += [s for s in unknown if s.retention.fixed]
        unknown = [s for s in unknown if not s.retention.fixed]
    if unknown:
        groups.append(_Group(None, unknown, "frame"))
    groups = groups or [_Group(None, [], "call")]
    groups[0].states += silent
    if len(groups) > 1:
        names = ["frame" if g.driver is None else _word(paths.spell(g.driver.counted[0].path)) for g in groups]
        for number, (group, name) in enumerate(zip(groups, names, strict=True)):
            group.name = name if names.count(name) == 1 else f"{name}_{number}"
    return groups


def _stride(group: _Group, normal: Arguments) -> int:
    """The frames of the argument that drives the clock, or, where a call brings others too, the fewest a state adds."""
    added = [state.added for state in group.states if state.added]
    if group.driver is not None and group.driver.is_multiple:
        place, axis = group.driver.counted
        size: int = paths.get(normal, place.path).shape[axis]
        return size
    return min(added, default=1)


def _varying(normal: Arguments, flush: Arguments, slots: set[Place]) -> dict[tuple[Place, int], tuple[int, int]]:
    """Sizes of arguments, no states, that differ between the two calls."""
    found: dict[tuple[Place, int], tuple[int, int]] = {}
    for path in tensor_paths(normal):
        place = Place("argument", path)
        if place not in slots:
            sizes = paths.get(normal, path).shape, paths.get(flush, path).shape
            found |= {(place, axis): pair for axis, pair in enumerate(zip(*sizes, strict=True)) if pair[0] != pair[1]}
    return found


def _flush(
    groups: Sequence[_Group],
    grown: Mapping[Place, Growth],
    normal: Arguments,
    varying: Mapping[tuple[Place, int], tuple[int, int]],
    doubts: list[Doubt],
) -> list[Input]:
    """Give the clock that advances otherwise its flush length, and the arguments that vary with it."""
    ticks = [(group, _flush_ticks(group, grown, varying, alone=len(groups) == 1)) for group in groups]
    moved = [(group, found) for group, found in ticks if found not in (None, group.stride)]
    if len(moved) != 1:
        why = "no clock" if not moved else "more than one clock"
        doubts.append(Doubt("the second call", f"has other sizes, and {why} accounts for them: no flush is declared"))
        return []
    ((group, found),) = moved
    assert found is not None
    entries = [_input(place, axis, sizes, group, found) for (place, axis), sizes in varying.items()]
    if None in entries:
        place, axis = list(varying)[entries.index(None)]
        why = f"axis {axis} of {place} has {' and '.join(map(str, varying[place, axis]))} elements"
        doubts.append(Doubt("the second call", f"{why}, which no clock accounts for: no flush is declared"))
        return []
    group.flush = found
    return [entry for entry in entries if entry is not None]


def _flush_ticks(
    group: _Group, grown: Mapping[Place, Growth], varying: Mapping[tuple[Place, int], tuple[int, int]], *, alone: bool
) -> int | None:
    """How far the clock of a group advances in the call that ends a turn; None where that cannot be told."""
    ratios = {Fraction(s.flushed, s.added) for s in group.states if s.flushed is not None and s.added}
    for growth in (grown.get(state.slot.place) for state in group.states):
        if growth is not None:
            sizes = varying.get(growth.counted)
            ratios.add(Fraction(growth.added(sizes[1]), growth.added(sizes[0])) if sizes is not None else Fraction(1))
    if len(ratios) > 1:
        return None
    if ratios:
        ticks = ratios.pop() * group.stride
    elif alone and not any(state.added for state in group.states):
        short = min(varying.values(), default=(0, 0))
        group.stride = short[0] or group.stride
        ticks = Fraction(short[1])
    else:
        return None
    return int(ticks) if ticks.denominator == 1 and ticks >= 1 else None


def _input(place: Place, axis: int, sizes: tuple[int, int], group: _Group, flush: int) -> Input | None:
    """Size = offset + rate * advance, in both calls; None where it is not so."""
    rate = Fraction(sizes[0] - sizes[1], group.stride - flush)
    offset = sizes[0] - rate * group.stride
    if rate <= 0 or offset.denominator != 1:
        return None
    return Input(str(place), axis=axis, clock=group.name, rate=rate, offset=int(offset))


# -- regions -----------------------------------------------------------------------------------------------------------


def _members(states: Sequence[Deduced]) -> dict[str, list[Deduced]]:
    """Region name -> its states: alike, and all that a star in their paths stands for."""
    rows = [(state.slot.place.path, state.slot.result, [state]) for state in states]
    changed = True
    while changed:
        changed = False
        for path, result, _ in rows:
            for at, step in enumerate(path):
                alike = [row for row in rows if _differ_at(row, (path, result), at)]
                if not isinstance(step, int) or len(alike) < 2 or not _is_whole(alike, at):
                    continue
                keys = {state.key for row in alike for state in row[2]}
                starred = _starred(path, result, at)
                if len(keys) != 1 or starred is None:
                    continue
                rows = [row for row in rows if row not in alike]
                rows.append((*starred, [state for row in alike for state in row[2]]))
                changed = True
                break
            if changed:
                break
    order = {id(state): i for i, state in enumerate(states)}
    rows.sort(key=lambda row: min(order[id(state)] for state in row[2]))
    names = _names([row[0] for row in rows])
    return {name: row[2] for name, row in zip(names, rows, strict=True)}


Row = tuple[Path, Path | None, list[Deduced]]


def _differ_at(row: Row, other: tuple[Path, Path | None], at: int) -> bool:
    """Whether two paths are the same but for an index, by which results differ too, if they differ."""
    path, result = other
    mine = row[0]
    if len(mine) != len(path) or mine[:at] + mine[at + 1 :] != path[:at] + path[at + 1 :]:
        return False
    if not isinstance(mine[at], int) or (row[1] is None) != (result is None):
        return False
    return result is None or row[1] is None or _starred(*row[:2], at) == _starred(path, result, at)


def _is_whole(alike: Sequence[Row], at: int) -> bool:
    """Whether the indices are all of 0, 1, ...: a star stands for every element."""
    return sorted(int(row[0][at]) for row in alike) == list(range(len(alike)))


def _starred(path: Path, result: Path | None, at: int) -> tuple[Path, Path | None] | None:
    """Paths with a star for the index, in the result for the last index that is the same."""
    place = (*path[:at], ANY, *path[at + 1 :])
    if result is None:
        return place, None
    stars = path[:at].count(ANY)
    open_at = [i for i, step in enumerate(result) if i > 0 and step == path[at] and isinstance(step, int)]
    if not open_at or result.count(ANY) != stars:
        return None
    return place, (*result[: open_at[0]], ANY, *result[open_at[0] + 1 :])


def _names(places: Sequence[Path]) -> list[str]:
    """A short name for each: the last words of its path, as many as make it the only one."""
    words = [[_word(str(step)) for step in path if step != ANY] or ["state"] for path in places]
    named: list[str] = []
    for mine in words:
        for count in range(1, len(mine) + 1):
            name = "_".join(mine[-count:])
            last = count == len(mine)
            if last or (not name[0].isdigit() and sum("_".join(w[-count:]) == name for w in words) == 1):
                break
        named.append(name if named.count(name) == 0 else f"{name}_{len(named)}")
    return named


def _word(text: str) -> str:
    return re.sub(r"\W+", "_", text).strip("_") or "state"


def _region(name: str, alike: Sequence[Deduced], group: _Group) -> Region:
    state = alike[0]
    place, result = _pattern([each.slot for each in alike])
    fixed = isinstance(state.retention, Pinned) or not state.added
    return Region(
        name,
        argument=paths.spell(place) if state.slot.place.root == "argument" else None,
        attribute=paths.spell(place, attributes=True) if state.slot.place.root == "attribute" else None,
        result=None
        if result is None
        else result[0]
        if len(result) == 1 and isinstance(result[0], int)
        else (accessor(result) or 0),
        axis=state.axis,
        clock=group.name,
        start=state.start,
        growth=1 if fixed else Fraction(state.added, group.stride),
        retention=state.retention,
    )


def _pattern(slots: Sequence[Slot]) -> tuple[Path, Path | None]:
    """The paths of states that are alike, with a star wherever they differ."""
    place = _merged([slot.place.path for slot in slots])
    results = [slot.result for slot in slots if slot.result is not None]
    return place, _merged(results) if results else None


def _merged(alike: Sequence[Path]) -> Path:
    return tuple(steps[0] if len(set(steps)) == 1 else ANY for steps in zip(*alike, strict=True))
