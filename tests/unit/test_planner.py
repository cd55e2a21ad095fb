"""Plans: widths, extents and bytes are those of a stream that is walked call by call, and nothing is enumerated."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from math import ceil
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cadence_fx
from cadence_fx.clock import Clock
from cadence_fx.contract import Contract, Input, Region
from cadence_fx.deployment import FRAMES, Deployment, Outside, PlannedCallable
from cadence_fx.errors import ContractError
from cadence_fx.footprint import Footprint
from cadence_fx.planner import plan
from cadence_fx.retention import KeepLast, Pinned, PromptPlusLast, Retention, Ring

FRAME = Clock("frame", 50, lookahead=6)
CACHE = Region("cache", argument="cache", axis=1, clock="frame", start=302, retention=PromptPlusLast(302, 100))


def walked(contract: Contract) -> tuple[set[tuple[Any, ...]], list[dict[str, int]]]:
    """All classes of a contract, met by walking streams of it: a turn may end after any call, and ends with a flush.
    Also what the extents are in the calls of a first turn, until they move no more."""
    regions = [region for region in contract.regions if region.persistent]
    normal = contract.advances[0]
    start = {region.name: region.start for region in regions}
    classes, seen, pending = set(), set(), [start]
    while pending:
        extents = pending.pop()
        if (state := tuple(extents.values())) in seen:
            continue
        seen.add(state)
        for advance in contract.advances:
            classes.add((*advance.items(), *extents.items()))
            after = {r.name: r.next_extent(extents[r.name], advance.get(r.frame_clock or "", 0)) for r in regions}
            turn = {r.name: r.start if r.lifetime == "turn" else after[r.name] for r in regions}
            pending += [turn, after] if advance == normal else [turn]
    course = [start]
    while len(course) < 2 or course[-1] != course[-2]:
        last = course[-1]
        course.append({r.name: r.next_extent(last[r.name], normal.get(r.frame_clock or "", 0)) for r in regions})
    return classes, course


def presented(contract: Contract, region: Region) -> int:
    """The most frames in flight in any call that meets the bound, look-ahead included in calls that end no turn."""
    clock = contract.clock(region.frame_clock or "")
    base = contract.base_of(clock.name)
    ahead = clock.lookahead or ceil(base.lookahead * clock.rate)
    calls = [contract.stride_of(clock.name) + ahead, *contract.advances_of(clock.name)]
    return region.bound + max(ceil(ticks * region.growth) for ticks in calls)


@st.composite
def clocks(draw: st.DrawFn) -> tuple[list[Clock], str]:
    """One or two base clocks, perhaps a derived one, and which of them the first region follows."""
    stride = draw(st.integers(1, 8))
    flush = draw(st.lists(st.integers(1, 9), max_size=2))
    found = [Clock("base", stride, lookahead=draw(st.integers(0, 5)), flush=flush)]
    if draw(st.booleans()):
        divisor = draw(st.sampled_from([n for n in (1, 2, 3) if all(t % n == 0 for t in (stride, *flush))]))
        found.append(Clock("derived", of="base", rate=Fraction(draw(st.integers(1, 3)), divisor)))
    if draw(st.booleans()):
        found.append(Clock("other", draw(st.integers(1, 3)), flush=draw(st.lists(st.integers(1, 4), max_size=1))))
    return found, draw(st.sampled_from([clock.name for clock in found]))


def policies(bound: int) -> list[Retention]:
    return [KeepLast(bound), PromptPlusLast(bound // 3, bound - bound // 3, "prepend"), Pinned(bound), Ring(bound)]


# 500 drawn sets of clocks, with 4 policies and 5 starts each: 10,000 contracts.
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(clocks(), st.integers(1, 24), st.integers(1, 3), st.integers(1, 12), st.sampled_from(["turn", "session"]))
def test_a_plan_is_what_a_walked_stream_meets(
    drawn: tuple[list[Clock], str], bound: int, growth: int, second: int, lifetime: Any
) -> None:
    declared, follows = drawn
    for policy, part in product(policies(bound), range(5)):
        start = bound if policy.fixed else bound * part // 5
        first = Region("first", argument="a", axis=1, clock=follows, start=start, growth=growth, retention=policy)
        others = [
            Region(clock.name, argument=clock.name, axis=0, clock=clock.name, retention=KeepLast(second),
                   lifetime=lifetime if clock.name == "base" else "turn")
            for clock in declared
        ]  # fmt: skip
        inputs = [Input("x", axis=0, clock=follows, rate=growth, offset=part)]
        contract = Contract(declared, [first, *others], inputs=inputs)
        weighs = {"first": Footprint((3, follows), "int16")}
        planned = PlannedCallable("c", contract, regions=weighs, inputs={"x": Footprint((follows, 5), "bool")})
        (report,) = plan(planned).callables
        classes, course = walked(contract)
        region = report.regions[0]

        assert report.classes is not None
        assert report.classes == len(classes) if report.exact else report.classes >= len(classes)
        assert report.exact or (lifetime == "session" and report.advances > 1)
        assert {r.name: r.classes for r in report.regions} == {
            name: len({extents[name] for extents in course}) for name in course[0]
        }
        assert [{r.name: r.extent(call) for r in report.regions} for call in range(len(course))] == course
        assert region.bytes == 3 * 2 * max(extents["first"] for extents in course)
        assert region.envelope == (bound if policy.in_place else presented(contract, contract.region("first")))
        staged = sum(5 * (part + growth * dict(key[: len(report.clocks)])[follows]) for key in classes)
        assert report.staging_bytes == staged if report.exact else (report.staging_bytes or 0) >= staged


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 50), st.integers(0, 60), st.integers(1, 20), st.booleans())
def test_state_outside_a_contract_is_what_a_walked_stream_meets(
    start: int, window: int, stride: int, drops: bool
) -> None:
    bound, extent = start + window, start
    met: list[int] = []
    while extent not in met or len(met) < 100:
        met.append(extent)
        extent = extent + stride if extent + stride <= bound else start if drops else bound
    outside = Outside("cache", stride=stride, start=start, bound=bound, drops=drops)
    region = plan(PlannedCallable("c", outside=(outside,), operators=7)).region("c", "cache")
    assert region.classes == len(set(met))
    assert [region.extent(call) for call in range(100)] == met[:100]


def test_more_classes_than_can_be_counted_are_planned() -> None:
    """One by one they would take days."""
    region = Region("cache", argument="cache", axis=1, clock="frame", retention=KeepLast(10**12))
    contract = Contract([Clock("frame", 1, flush=range(2, 500))], [region])
    report = plan(contract)
    assert report.callables[0].classes == (10**12 + 1) * 499
    assert report.region("contract", "cache").extent(10**11) == 10**11
    assert "too wide" in str(report) and report.as_dict()["callables"][0]["classes"] == (10**12 + 1) * 499


@pytest.mark.parametrize(
    "region, limit, word, told, remedy",
    [
        (CACHE, 64, "captured", "3 extents", ""),
        (CACHE, 3, "captured", "3 extents", ""),
        (CACHE, 2, "too wide", "3 extents, and 2 classes are allowed",
         "a stride of at least 100 frames, or a window of at most 50 frames, or max_classes = 3"),
        (CACHE, 1, "too wide", "3 extents, and 1 class is allowed",
         "a window of at most 0 frames, or max_classes = 3"),
        (Region("r", argument="r", axis=0, clock="frame", retention=Ring(8)), 64, "pinned",
         "its extent is always 8", ""),
        (Region("r", argument="r", axis=0, clock="frame", retention=KeepLast(8), lifetime="unit"), 64, "pinned",
         "holds nothing between calls", ""),
    ],
)  # fmt: skip
def test_verdicts(region: Region, limit: int, word: str, told: str, remedy: str) -> None:
    report = plan(Contract([FRAME], [region]), max_classes=limit)
    verdict = report.callables[0].regions[0].verdict
    assert (verdict.word, verdict.reason, verdict.remedy) == (word, told, remedy)
    assert report.capturable == (word in ("captured", "pinned"))


@pytest.mark.parametrize("limit", [2, 3, 7, 20])
def test_what_a_verdict_asks_for_is_enough_and_no_less_is(limit: int) -> None:
    """The stride and the window that it names just fit."""
    window = 100
    stride, kept = -(-window // (limit - 1)), (limit - 1) * 3

    def fits(stride: int, window: int) -> bool:
        cache = Region("r", argument="r", axis=1, clock="frame", retention=KeepLast(window))
        return plan(Contract([Clock("frame", stride)], [cache], max_classes=limit)).capturable

    cache = Region("r", argument="r", axis=1, clock="frame", retention=KeepLast(window))
    (region,) = plan(Contract([Clock("frame", 3)], [cache], max_classes=limit)).callables[0].regions
    assert f"a stride of at least {stride} frames" in region.verdict.remedy
    assert f"a window of at most {kept} frames" in region.verdict.remedy
    assert fits(stride, window) and (stride == 1 or not fits(stride - 1, window))
    assert fits(3, kept) and not fits(3, kept + 1)


def test_regions_that_fit_may_be_too_many_together() -> None:
    contract = Contract([Clock("frame", 50, flush=range(1, 41))], [CACHE])
    (report,) = plan(contract).callables
    assert report.regions[0].verdict.word == "too wide" and report.classes == 3 * 41
    session = Region("memory", argument="m", axis=0, clock="frame", retention=KeepLast(1000), lifetime="session")
    (report,) = plan(Contract([FRAME], [CACHE, session], max_classes=30)).callables
    assert [region.verdict.word for region in report.regions] == ["captured", "captured"]
    assert report.verdict.word == "too wide" and report.verdict.remedy == f"max_classes = {report.classes}"


def test_traffic_and_growth_without_end() -> None:
    grown = Outside("kv", stride=50, start=302, bound=None)
    asked = Outside("kv", stride=1, start=2, bound=2, traffic="text")
    report = plan(PlannedCallable("grown", outside=(grown,)), PlannedCallable("asked", outside=(asked,)))
    assert [each.verdict.word for each in report.callables] == ["unbounded", "traffic-dependent"]
    assert report.callables[0].classes is None and report.region("grown", "kv").extent(3) == 452
    assert "at most 3,452 frames: 64 extents" in report.callables[0].verdict.remedy
    assert report.unweighed == ["grown.kv", "asked.kv"] and report.classes == 0


def test_totals_sessions_and_what_counts_as_shipped() -> None:
    """One weighed carry, a workspace, a constant, and a callable that is not captured."""
    work = Region("work", attribute="work", axis=0, clock="frame", retention=KeepLast(402), lifetime="unit")
    captured = PlannedCallable(
        "captured",
        Contract([FRAME], [CACHE, work], inputs=[Input("x", axis=0, clock="frame")]),
        regions={
            "cache": Footprint((4, "frame"), stock=(16, 1000)),
            "work": Footprint(("frame",), "int8", stock=(1000,)),
        },
        inputs={"x": Footprint(("frame",), "int64"), "scale": Footprint((2,))},
        outside=(
            Outside("table", stride=0, start=5, bound=5, footprint=Footprint((FRAMES,), stock=(9,)), shared=True),
        ),
        operators=100,
    )
    wide = Outside("kv", stride=1, start=0, bound=1000, footprint=Footprint((FRAMES, 2), "int8", stock=(5000, 2)))
    weights = 10_000
    report = plan(Deployment("both", (captured, PlannedCallable("wide", outside=(wide,))), weights=weights),
                  device_memory=200_000)  # fmt: skip
    assert report.staging_bytes == 3 * (50 * 8 + 2 * 4) and not report.partial
    assert report.session_bytes == 4 * 402 * 4 + 10_000  # the second as shipped: it is not captured
    assert report.shared_bytes == weights + report.staging_bytes + (402 + 56) + 9 * 4
    assert report.peak_bytes == report.shared_bytes + report.session_bytes
    assert report.stock_peak_bytes == weights + 16_000 * 4 + 1000 + 36 + 10_000
    assert report.sessions == (200_000 - report.shared_bytes) // report.session_bytes == 11
    assert report.stock_sessions == (200_000 - weights - 1036) // 74_000 == 2
    assert report.region("captured", "cache").over_reservation == 64_000 / 6432
    assert report.capture_seconds == report.callable("captured").capture_seconds
    assert plan(captured, weights=7).weights == 7 and plan(captured).weights is None


def test_what_is_not_weighed_is_not_counted() -> None:
    """Nothing known is no 0 bytes, and a sum without some of its parts is a bound."""
    contract = Contract([FRAME], [CACHE], inputs=[Input("x", axis=0, clock="frame")])
    report = plan(contract, device_memory=1 << 30)
    totals = report.as_dict()["totals"]
    names = ("staging_bytes", "shared_bytes", "session_bytes", "peak_bytes", "stock_peak_bytes", "sessions",
             "stock_sessions")  # fmt: skip
    assert [totals[name] for name in names] == [None] * len(names)
    assert report.unweighed == ["contract.cache", "contract.x"]
    rows = {line.strip().split("  ")[0]: line.split("  ")[-1].strip() for line in str(report).splitlines()}
    told = ("staging", "state of a session", "resident, one session", "sessions in 1.0 GiB")
    assert [rows[name] for name in told] == ["not counted"] * 4
    weighed = PlannedCallable("c", contract, regions={"cache": Footprint((4, "frame"))})
    text = str(plan(contract, weighed, device_memory=1 << 30))
    assert "at least 6.3 KiB" in text and f"at most {(1 << 30) // (4 * 402 * 4):,}" in text
    nothing = plan(Contract([FRAME], inputs=[Input("x", axis=0, clock="frame")]))
    assert nothing.session_bytes == 0 and nothing.staging_bytes is None


def test_axes_of_one_input_may_differ() -> None:
    """Two of a clock with flush lengths, one of a periodic clock, one of another base clock without."""
    clocks = [Clock("frame", 4, flush=[2]), Clock("half", of="frame", rate=Fraction(1, 2)), Clock("layer", period=3),
              Clock("other", 5)]  # fmt: skip
    names = ("frame", "half", "layer", "other")
    inputs = [Input("x", axis=axis, clock=clock, offset=axis) for axis, clock in enumerate(names)]
    contract = Contract(clocks, [CACHE], inputs=inputs)
    report = plan(PlannedCallable("c", contract, inputs={"x": Footprint(names, "int8")}))
    normal, flush = 4 * (2 + 1) * (3 + 2) * (5 + 3), 2 * (1 + 1) * (3 + 2) * (5 + 3)
    (entry,) = report.callables[0].inputs
    assert (entry.bytes, entry.most_bytes, entry.staging_bytes) == (normal, normal, 26 * (normal + flush))
    assert report.classes == 26 * 2
    both = Contract([Clock("a", 4, flush=[2]), Clock("b", 4, flush=[2])],
                    inputs=[Input("x", axis=0, clock="a"), Input("x", axis=1, clock="b")])  # fmt: skip
    with pytest.raises(ContractError, match="follow two clocks with flush lengths"):
        plan(PlannedCallable("c", both, inputs={"x": Footprint(("a", "b"))}))


def test_plans_of_several_sources_are_one_plan() -> None:
    contract = Contract([FRAME], [CACHE], name="decoder")
    report = cadence_fx.plan(contract, contract)
    assert [each.name for each in report.callables] == ["decoder", "decoder (2)"]
    assert report.name == "decoder" and report.classes == 6
    assert isinstance(report, cadence_fx.PlanReport)


@pytest.mark.parametrize(
    "sources, options, told",
    [
        ((), {}, "needs a contract"),
        ((3,), {}, "expected a contract, a path or a deployment, found 3"),
        ((Contract([FRAME], [CACHE]),), {"max_classes": 0}, "expected at least 1, found 0"),
        ((Contract([FRAME], [CACHE]),), {"device_memory": -1}, "expected at least 0, found -1"),
        ((Contract([FRAME], [CACHE]),), {"weights": 1.5}, "expected a whole number, found 1.5"),
    ],
)
def test_nonsense_is_refused(sources: tuple[Any, ...], options: dict[str, Any], told: str) -> None:
    with pytest.raises(ContractError, match=told):
        plan(*sources, **options)


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda: Outside("r", stride=0, start=1, bound=2), "field 'stride': expected at least 1, found 0"),
        (lambda: Outside("r", stride=1, start=3, bound=2), "starts at 3, above the bound 2"),
        (lambda: Outside("r", stride=1, start=-1, bound=2), "expected at least 0, found -1"),
        (lambda: Outside("r", stride=1, start=1, bound=2, footprint=Footprint((1, "frame"))), "expected 'frames'"),
        (lambda: PlannedCallable("c", Contract([FRAME], [CACHE]), regions={"cahce": Footprint((1,))}),
         "did you mean 'cache'"),
        (lambda: PlannedCallable("c", Contract([FRAME], [CACHE]), regions={"cache": Footprint((1, 2))}),
         "region 'cache', field 'shape': axis 1: expected 'frame', found 2"),
        (lambda: PlannedCallable("c", Contract([FRAME], [CACHE]), inputs={"x": Footprint(("frame",))}),
         "field 'inputs.x.shape': axis 0: expected a number, found 'frame'"),
        (lambda: PlannedCallable("c", operators=0), "expected at least 1"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(make: Any, told: str) -> None:
    with pytest.raises(ContractError) as error:
        make()
    assert told in str(error.value)
