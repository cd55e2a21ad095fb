"""A plan as a picture: extents over time against the bound, bytes by region, classes by callable."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cadence_fx.errors import NoPicture

if TYPE_CHECKING:
    from cadence_fx.plan_report import PlanReport, RegionPlan

_SUFFIXES = ("png", "svg")
_MOST_POINTS = 400  # of a line
_WITHOUT_BOUND = 16  # after so many calls an extent without a bound leaves the picture
_MOST_BARS = 12
_COLOURS = {"captured": "tab:green", "pinned": "tab:blue"}
_OTHER = "tab:red"


def draw(report: PlanReport, path: str | Path) -> None:
    """Draws a report into a .png or .svg file, the same bytes each time.

    Raises:
        NoPicture: another suffix, matplotlib is not installed, or the file cannot be written.
    """
    suffix = Path(path).suffix.removeprefix(".").lower()
    if suffix not in _SUFFIXES:
        raise NoPicture(str(path), "a picture is a .png or .svg file")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoPicture(str(path), "matplotlib is not installed: pip install matplotlib") from error
    with matplotlib.rc_context({"svg.hashsalt": "cadence", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(12, 4), layout="constrained")
        extents, memory, classes = figure.subplots(1, 3)
        _extents(extents, report)
        _memory(memory, report)
        _classes(classes, report)
        figure.suptitle(report.name)
        try:
            figure.savefig(path, dpi=110, metadata={"Date": None} if suffix == "svg" else {"Software": None})
        except OSError as error:
            raise NoPicture(str(path), f"cannot be written: {error}") from error


def _moving(report: PlanReport) -> list[tuple[str, RegionPlan]]:
    """Regions whose extent moves, one of each course."""
    found: dict[tuple[Any, ...], tuple[str, RegionPlan]] = {}
    for each in report.callables:
        for region in each.regions:
            if region.window != 0 and region.mode != "scratch":
                course = (region.start / region.attended if region.attended else region.start, region.classes)
                found.setdefault(course, (f"{each.name}.{region.name}", region))
    return list(found.values())[:_MOST_BARS]


def _calls(region: RegionPlan) -> list[int]:
    """Calls of a turn, to some after the last new extent; a selection of them where there are many."""
    climb = region.classes if region.classes is not None else 2 * _WITHOUT_BOUND
    last = climb + max(2, climb // 4)
    return sorted({last * step // _MOST_POINTS for step in range(_MOST_POINTS + 1)} | {climb - 1, climb})


def _extents(axes: Any, report: PlanReport) -> None:
    """Each extent over the calls of a turn, as a part of its bound."""
    for name, region in _moving(report):
        calls = _calls(region)
        whole = region.attended if region.attended is not None else region.extent(_WITHOUT_BOUND)
        bound = f"bound {region.attended:,}" if region.attended is not None else "no bound"
        axes.plot(
            [call + 1 for call in calls],
            [region.extent(call) / whole for call in calls],
            drawstyle="steps-post" if len(calls) < _MOST_POINTS else "default",
            label=f"{name}, {bound}",
        )
    axes.axhline(1, color="black", linestyle="--", linewidth=0.8, label="bound")
    axes.set_xscale("log")
    axes.set(title="extents over the calls of a turn", xlabel="call", ylabel="extent, of its bound", ylim=(-0.05, 1.1))
    axes.legend(fontsize=6, loc="lower right")


def _memory(axes: Any, report: PlanReport) -> None:
    weighed = [
        (f"{each.name}.{region.name}", region.bytes or 0, region.stock_bytes)
        for each in report.callables
        for region in each.regions
        if region.bytes
    ]
    weighed = sorted(weighed, key=lambda row: -(row[2] or row[1]))[:_MOST_BARS][::-1]
    places = range(len(weighed))
    axes.barh([place + 0.2 for place in places], [row[2] or 0 for row in weighed], 0.4, color="lightgray",
              label="stock")  # fmt: skip
    axes.barh([place - 0.2 for place in places], [row[1] for row in weighed], 0.4, label="declared")
    axes.set_yticks(list(places), [row[0] for row in weighed])
    if weighed:
        axes.set_xscale("log")
        ticks = [1024**power for power in range(5)]
        axes.set_xticks(ticks, ["1 B", "1 KiB", "1 MiB", "1 GiB", "1 TiB"])
        axes.minorticks_off()
        axes.set_xlim(min(row[1] for row in weighed) / 4, max(max(row[1], row[2] or 0) for row in weighed) * 4)
    axes.set(title="bytes by region")
    axes.legend(fontsize=6, loc="lower right")


def _classes(axes: Any, report: PlanReport) -> None:
    names = [each.name for each in report.callables]
    places = range(len(names))
    colours = [_COLOURS.get(each.verdict.word, _OTHER) for each in report.callables]
    axes.barh(list(places), [each.classes or 0 for each in report.callables], color=colours)
    for place, each in zip(places, report.callables, strict=True):
        count = "no bound" if each.classes is None else f"{each.classes:,}"
        axes.text(each.classes or 1, place, f" {count}, {each.verdict.word}", va="center", fontsize=7)
    axes.set_yticks(list(places), names)
    axes.set_xscale("symlog")
    axes.set_xlim(0, 500 * max([each.classes or 1 for each in report.callables], default=1))
    axes.invert_yaxis()
    axes.set(title="classes by callable")
