"""A plan as text for people: tables of regions and callables, totals, and what to do about the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cadence_fx._table import aligned
from cadence_fx._units import counted, size_text
from cadence_fx.plan_report import sample

if TYPE_CHECKING:
    from cadence_fx.plan_report import CallablePlan, PlanReport, RegionPlan

Table = Callable[[Sequence[Sequence[str]]], list[str]]
_HEAD = ("region", "mode", "stride", "W", "extents", "envelope", "K", "bytes", "stock", "over", "verdict")


def plan_text(report: PlanReport, table: Table = aligned) -> str:
    """Several lines; ``table`` aligns rows, the first of which is a heading."""
    lines = [f"plan of {report.name}: {counted(len(report.callables), 'callable')}"]
    for each in report.callables:
        lines += ["", *_callable(each, table)]
    return "\n".join([*lines, "", *_totals(report, table), *_notes(report)])


def _callable(each: CallablePlan, table: Table) -> list[str]:
    at_most = "" if each.exact else "at most "
    width = "no bound" if each.classes is None else f"{at_most}{each.classes:,}"
    lines = [f"{each.name}: {each.verdict.word}, {each.verdict.reason}"]
    lines += [f"  clock {clock}" for clock in each.clocks]
    lines.append(f"  classes {width} of {each.limit:,} allowed: {each.arithmetic}")
    if each.regions:
        lines += table([_HEAD, *map(_region, each.regions)])
        lines += [f"  K of {region.name}: {region.arithmetic}" for region in each.regions if (region.classes or 0) > 1]
    if each.inputs:
        rows = [("staged", "bytes a call", "in all classes")]
        rows += [(i.name, _span(i.bytes, i.most_bytes), _size(i.staging_bytes)) for i in each.inputs]
        lines += table(rows)
    if each.verdict.capturable and each.frozen_bytes is not None and each.staging_bytes is not None:
        held = size_text(each.frozen_bytes + each.staging_bytes)
        staged, regions = size_text(each.staging_bytes), size_text(each.frozen_bytes)
        lines.append(f"  replay holds {held}: {staged} staged, {regions} of regions")
    if each.verdict.capturable and each.capture_seconds is not None:
        work = counted(each.operators or 0, "operator")
        lines.append(f"  capture about {each.capture_seconds:.0f} s ({work} a call)")
    told: set[str] = set()
    for region in each.regions:
        if not region.verdict.capturable:
            told.add(region.verdict.remedy)
            lines.append(f"  {region.name}: {region.verdict.reason}; it takes {region.verdict.remedy}")
    if each.verdict.remedy and each.verdict.remedy not in told:
        lines.append(f"  it takes {each.verdict.remedy}")
    return lines


def _region(region: RegionPlan) -> tuple[str, ...]:
    ratio = region.over_reservation
    return (
        region.name,
        region.mode,
        f"{region.stride:,}",
        "-" if region.window is None else f"{region.window:,}",
        sample(region),
        "-" if region.envelope is None else f"{region.envelope:,}",
        "-" if region.classes is None else f"{region.classes:,}",
        _size(region.bytes),
        _size(region.stock_bytes),
        "-" if ratio is None else f"{ratio:.2f}x",
        region.verdict.word,
    )


def _size(count: int | None) -> str:
    return "-" if count is None else size_text(count)


def _span(normal: int | None, most: int | None) -> str:
    return _size(normal) if normal == most else f"{_size(normal)}, at most {_size(most)}"


def _totals(report: PlanReport, table: Table) -> list[str]:
    each, rest, staging = ("session" in report.partial, "shared" in report.partial, "staging" in report.partial)
    state, stock_state = _sum(report.session_bytes, each), _sum(report.stock_session_bytes, each)
    peak, stock_peak = _sum(report.peak_bytes, each or rest or staging), _sum(report.stock_peak_bytes, each or rest)
    rows = [
        ("total", "declared", "stock"),
        ("classes", f"{report.classes:,}", ""),
        ("staging", _sum(report.staging_bytes, staging), ""),
        ("weights", _size(report.weights), _size(report.weights)),
        ("state of a session", state, stock_state),
        ("resident, one session", peak, stock_peak),
    ]
    if report.device_memory is not None:
        device = f"sessions in {size_text(report.device_memory)}"
        fit = _fitting(report.sessions, report.session_bytes, each or rest)
        rows.append((device, fit, _fitting(report.stock_sessions, report.stock_session_bytes, each or rest)))
    if report.capture_seconds is not None:
        rows.append(("capture, estimated", f"{report.capture_seconds:.0f} s", ""))
    return table(rows)


def _sum(count: int | None, partial: bool = False) -> str:
    """A total; ``partial`` where the bytes of some of it are not known."""
    return "not counted" if count is None else f"{'at least ' if partial else ''}{size_text(count)}"


def _fitting(sessions: int | None, state: int | None, partial: bool) -> str:
    """How many sessions of so many bytes fit; "-" for any number of them."""
    if state is None:
        return "not counted"
    return "-" if sessions is None else f"{'at most ' if partial else ''}{sessions:,}"


def _notes(report: PlanReport) -> list[str]:
    notes = ["activations are in no configuration and are not counted"]
    if report.weights is None:
        notes.append("weights are not known and not counted")
    if report.unweighed:
        few = ", ".join(report.unweighed[:4]) + (", ..." if len(report.unweighed) > 4 else "")
        notes.append(f"not counted, since no shape or no bound is known: {few}")
    if any(r.mode == "constant" and (r.over_reservation or 1) > 1 for c in report.callables for r in c.regions):
        notes.append("constants stay as they are shipped, and count so")
    if not report.capturable:
        notes.append("callables that are not captured run eager, and their regions count as shipped")
    return [f"  note: {note}" for note in [*notes, *report.notes]]
