"""What a deployment reaches and costs, from its numbers alone: nothing is run and nothing is enumerated.

Extents, widths and verdicts are those of paper sections 3.1 and 3.5 (equation 7), over-reservation is equation 2, and
the bytes of replay are equation 6: the staged inputs of every class, and each region's storage once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

from cadence_fx._region import Region
from cadence_fx._width import region_arithmetic, region_extents
from cadence_fx.clock import check_count
from cadence_fx.contract import Contract
from cadence_fx.deployment import Deployment, Outside, PlannedCallable
from cadence_fx.errors import ContractError
from cadence_fx.estimates import capture_seconds
from cadence_fx.footprint import Footprint, countable, region_axes
from cadence_fx.plan_report import CallablePlan, InputPlan, PlanReport, RegionPlan
from cadence_fx.planned import load_callable
from cadence_fx.retention import Pinned, Ring
from cadence_fx.verdicts import callable_verdict, region_verdict

Source = Contract | PlannedCallable | Deployment | str | Path
DEFAULT_LIMIT = 64  # classes, for a callable without a contract that says how many are allowed


def plan(
    *sources: Source, weights: int | None = None, device_memory: int | None = None, max_classes: int | None = None
) -> PlanReport:
    """What can be captured, in how many classes and bytes, and why not where not.

    Args:
        *sources: contracts, the paths of contract files (.toml, .json, .yaml), callables, or deployments as the
            configuration readers in `cadence_fx.adapters` make them; served together.
        weights: bytes of the weights, where the sources do not tell.
        device_memory: bytes of a device, for the number of sessions that fit.
        max_classes: allowed for each callable, instead of what its contract says.

    Raises:
        ContractError, ContractFileError: a source is wrong in itself.
    """
    if not sources:
        raise ContractError("plan() needs a contract, a file or a deployment", field="sources")
    for name, value in (("weights", weights), ("device_memory", device_memory)):
        if value is not None:
            countable(check_count(value, name, least=0), name)
    if max_classes is not None:
        check_count(max_classes, "max_classes", least=1)
    deployments = [_deployment(source) for source in sources]
    callables = [_callable(c, max_classes) for deployment in deployments for c in deployment.callables]
    known = [countable(d.weights, "weights") for d in deployments if d.weights is not None]
    return PlanReport(
        name=" + ".join(dict.fromkeys(d.name for d in deployments)),
        callables=tuple(_distinct(callables)),
        weights=weights if weights is not None else (sum(known) if known else None),
        device_memory=device_memory,
        notes=tuple(note for d in deployments for note in d.notes),
    )


def _deployment(source: Source) -> Deployment:
    if isinstance(source, Deployment):
        return source
    if isinstance(source, (str, Path)):
        return load_callable(source)
    if isinstance(source, Contract):
        source = PlannedCallable(source.name or "contract", source)
    if not isinstance(source, PlannedCallable):
        raise ContractError(f"expected a contract, a path or a deployment, found {source!r:.80}", field="sources")
    return Deployment(source.name, (source,))


def _distinct(callables: Iterable[CallablePlan]) -> Iterator[CallablePlan]:
    """Callables whose names differ: a second one of a name gets a number."""
    seen: dict[str, int] = {}
    for each in callables:
        seen[each.name] = count = seen.get(each.name, 0) + 1
        yield each if count == 1 else replace(each, name=f"{each.name} ({count})")


def _callable(given: PlannedCallable, max_classes: int | None) -> CallablePlan:
    contract = given.contract
    limit = max_classes or (contract.max_classes if contract else DEFAULT_LIMIT)
    advances = _advances(contract)
    regions = [_outside(outside, limit) for outside in given.outside]
    if contract is not None:
        declared = [_region(contract, r, given.regions.get(r.name), limit, advances) for r in contract.regions]
        regions = declared + regions
    classes, exact, arithmetic = _width(contract, given.outside)
    countable(classes or 0, "max_classes")
    states = classes // advances if classes is not None else None
    verdict = callable_verdict({r.name: r.verdict for r in regions}, classes=classes, limit=limit, exact=exact,
                               states=states, advances=advances)  # fmt: skip
    inputs = [_input(contract, name, weighs, states) for name, weighs in given.inputs.items()]
    unweighed = [i.argument for i in contract.inputs if i.argument not in given.inputs] if contract is not None else []
    inputs += [InputPlan(name, None, None, None) for name in dict.fromkeys(unweighed)]
    seconds = None
    if given.operators is not None and classes is not None and verdict.capturable:
        seconds = capture_seconds(given.operators, classes)
    return CallablePlan(
        name=given.name,
        clocks=tuple(clock.describe() for clock in contract.clocks) if contract else (),
        advances=advances,
        classes=classes,
        exact=exact,
        arithmetic=arithmetic,
        limit=limit,
        regions=tuple(regions),
        inputs=tuple(inputs),
        operators=given.operators,
        capture_seconds=seconds,
        verdict=verdict,
    )


def _width(contract: Contract | None, outside: Iterable[Outside]) -> tuple[int | None, bool, str]:
    """Classes, whether they are the number itself, and its arithmetic.

    State outside specialises a callable that has no contract, as a region would; beside a contract it is the caller's.
    """
    width = contract.width() if contract else None
    classes, text = (width.classes, width.arithmetic) if width else (1, "one state")
    for each in outside:
        if each.bound is None:
            return None, True, f"{each.name}: no bound"
        extents = _extents(each)
        if contract is None and (extents > classes or text == "one state"):
            classes, text = extents, f"{each.name}: {_arithmetic(each)}"
    return classes, width.exact if width else True, text


def _extents(outside: Outside) -> int:
    """K = ceil((A - A-) / s) + 1 (paper equation 7), rounded down where what passes the bound is dropped to A-."""
    assert outside.bound is not None
    window = outside.bound - outside.start
    if window == 0:
        return 1
    return (window // outside.stride if outside.drops else -(-window // outside.stride)) + 1


def _arithmetic(outside: Outside) -> str:
    if outside.bound is None:
        return "no bound"
    if outside.bound == outside.start:
        return "1 (W = 0)"
    rounded = "floor" if outside.drops else "ceil"
    span = f"({outside.bound:,} - {outside.start:,}) / {outside.stride:,}"
    return f"{rounded}({span}) + 1 = {_extents(outside):,}"


def _region(contract: Contract, region: Region, footprint: Footprint | None, limit: int, advances: int) -> RegionPlan:
    ticks = contract.frame_stride(region)
    stride = countable(region.added(ticks), "growth", region.name)
    countable(region.bound, "retention", region.name)
    # The workspace of a state whose extent never moves is as large as that; frames in flight are in another one.
    unmoving = not region.persistent and region.retention.fixed
    envelope = region.bound if unmoving else contract.envelope(region)
    classes = region_extents(region, ticks) if region.persistent else 1
    stored = region.bound if region.persistent else envelope
    sizes = {axis: contract.clock(name).period or stored for axis, name in region_axes(region).items()}
    return RegionPlan(
        name=region.name,
        place=region.place,
        clock=" x ".join(region.clocks),
        mode=_mode(region),
        stride=stride,
        start=region.start if region.persistent else region.bound,
        attended=region.bound,
        envelope=envelope,
        classes=classes,
        arithmetic=region_arithmetic(region, ticks) if region.persistent else "1 (scratch)",
        bytes=footprint.nbytes(sizes, region.name) if footprint else None,
        stock_bytes=footprint.stock_bytes if footprint else None,
        shared=not region.persistent or region.lifetime == "process" or region.mutability == "read_only",
        verdict=region_verdict(start=region.start, bound=region.bound, stride=stride, classes=classes, limit=limit,
                               advances=advances, scratch=not region.persistent),
    )  # fmt: skip


def _mode(region: Region) -> str:
    if not region.persistent:
        return "scratch"
    if region.mutability == "read_only":
        return "read only"
    if isinstance(region.retention, Ring):
        return "ring"
    return "pinned" if isinstance(region.retention, Pinned) or region.bound == region.start else "grows"


def _outside(outside: Outside, limit: int) -> RegionPlan:
    start, bound, stride = outside.start, outside.bound, outside.stride
    classes = None if bound is None else _extents(outside)
    constant = bound == start
    mode = "no bound" if bound is None else "constant" if stride == 0 else "pinned" if constant else (
        "grows, drops" if outside.drops else "grows")  # fmt: skip
    weight = None
    if outside.footprint is not None and bound is not None:
        counted = [axis for axis, size in enumerate(outside.footprint.shape) if isinstance(size, str)]
        weight = outside.footprint.nbytes(dict.fromkeys(counted, bound), outside.name)
    return RegionPlan(
        name=outside.name,
        place="",
        clock="",
        mode=mode,
        stride=stride,
        start=start,
        attended=bound,
        envelope=None if bound is None else bound if constant else bound + stride,
        classes=classes,
        arithmetic=_arithmetic(outside),
        bytes=weight,
        stock_bytes=outside.footprint.stock_bytes if outside.footprint else None,
        shared=outside.shared,
        verdict=region_verdict(start=start, bound=bound, stride=stride, classes=classes, limit=limit,
                               traffic=outside.traffic),
    )  # fmt: skip


def _input(contract: Contract | None, name: str, weighs: Footprint, states: int | None) -> InputPlan:
    """The bytes that the classes stage for one argument: each extent meets every combination of advances."""
    entries = [entry for entry in contract.inputs if entry.argument == name] if contract else []
    ticks = {e.clock: _ticks(contract, e.clock) for e in entries} if contract else {}
    followed = {contract.base_of(clock).name for clock, found in ticks.items() if len(found) > 1} if contract else set()
    if len(followed) > 1:
        raise ContractError("axes that follow two clocks with flush lengths are not planned", field=f"inputs.{name}")
    steps = max(map(len, ticks.values()), default=1)
    sizes = [
        weighs.nbytes({e.axis: e.size(ticks[e.clock][step % len(ticks[e.clock])]) for e in entries})
        for step in range(steps)
    ]
    staged = None if states is None else states * (_advances(contract) // steps) * sum(sizes)
    return InputPlan(name, sizes[0], max(sizes), staged)


def _ticks(contract: Contract, clock: str) -> tuple[int, ...]:
    """Ticks of a clock in each call that differs in them."""
    period = contract.clock(clock).period
    return contract.advances_of(clock) if period is None else (period,)


def _advances(contract: Contract | None) -> int:
    """Combinations of what one call may advance the base clocks by."""
    if contract is None:
        return 1
    return prod(len(contract.advances_of(clock.name)) for clock in contract.clocks if clock.is_base)
