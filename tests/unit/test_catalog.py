"""The catalog against a stream that is played at random until nothing new turns up."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadence_fx.catalog import Catalog, CatalogEntry
from cadence_fx.clock import Clock
from cadence_fx.contract import Contract, Lifetime, Region
from cadence_fx.errors import CatalogTooWide, ContractError
from cadence_fx.retention import KeepLast, Pinned, PromptPlusLast, Retention, Ring

Point = tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]


class PlayedStream:
    """A stream whose states are lists of frames, held by nothing but the declared numbers."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.regions = [region for region in contract.regions if region.lifetime in ("turn", "session", "process")]
        self.states = {region.name: [0] * region.start for region in self.regions}

    def begin_turn(self) -> None:
        for region in self.regions:
            if region.lifetime == "turn":
                self.states[region.name] = [0] * region.start

    def choices(self) -> Iterator[tuple[bool, dict[str, int]]]:
        """Every advance of one call: (does it end the turn, ticks of each base and derived clock)."""
        calls: list[dict[str, int]] = [{}]
        for clock in self.contract.clocks:
            if clock.stride is not None:
                calls = [{**call, clock.name: ticks} for call in calls for ticks in {clock.stride, *clock.flush}]
        for call in calls:
            flush = any(ticks != self.contract.clock(name).stride for name, ticks in call.items())
            for clock in self.contract.clocks:
                if clock.of is not None:
                    call[clock.name] = int(call[clock.of] * Fraction(clock.rate))
            yield flush, call

    def point(self, call: dict[str, int]) -> Point:
        extents = sorted((name, len(frames)) for name, frames in self.states.items())
        return tuple(sorted(call.items())), tuple(extents)

    def step(self, call: dict[str, int]) -> None:
        for region in self.regions:
            clock = next((name for name in region.clocks if name in call), None)
            if clock is None or region.mutability == "read_only" or isinstance(region.retention, (Pinned, Ring)):
                continue
            raw = [*self.states[region.name], *[1] * int(call[clock] * region.growth)]
            if isinstance(region.retention, KeepLast):
                raw = raw[-region.retention.n :]
            elif isinstance(region.retention, PromptPlusLast) and len(raw) > region.retention.bound:
                raw = raw[: region.retention.prompt] + raw[len(raw) - region.retention.last :]
            self.states[region.name] = raw

    def snapshot(self) -> tuple[tuple[str, int], ...]:
        return tuple((name, len(frames)) for name, frames in self.states.items())


def played(contract: Contract, rng: random.Random) -> set[Point]:
    """Every point that live streams visit: random walks go on until each state met has tried each thing it can do."""
    todo: dict[tuple[tuple[str, int], ...], list[tuple[str, dict[str, int]]]] = {}
    points: set[Point] = set()
    paths: dict[tuple[tuple[str, int], ...], list[tuple[str, dict[str, int]]]] = {}

    def meet(stream: PlayedStream, path: list[tuple[str, dict[str, int]]]) -> None:
        state = stream.snapshot()
        if state not in todo:
            ways = [(way, call) for flush, call in stream.choices() for way in (("end",) if flush else ("on", "end"))]
            rng.shuffle(ways)
            todo[state], paths[state] = ways, path

    meet(PlayedStream(contract), [])
    while open_states := [state for state, ways in todo.items() if ways]:
        start = rng.choice(open_states)
        stream, path = PlayedStream(contract), list(paths[start])
        for way, call in path:  # a live stream can only get there by being played
            stream.step(call)
            if way == "end":
                stream.begin_turn()
        while ways := todo[stream.snapshot()]:
            way, call = ways.pop()
            points.add(stream.point(call))
            stream.step(call)
            if way == "end":
                stream.begin_turn()
            path = [*path, (way, call)]
            meet(stream, path)
    return points


def points_of(catalog: Catalog) -> set[Point]:
    return {(tuple(sorted(entry.advance)), tuple(sorted(entry.extents))) for entry in catalog}


POLICIES: st.SearchStrategy[Retention] = st.one_of(
    st.builds(KeepLast, st.integers(1, 9)),
    st.builds(PromptPlusLast, st.integers(1, 4), st.integers(0, 5)),
    st.builds(Pinned, st.integers(1, 6)),
    st.builds(Ring, st.integers(1, 6)),
)
LIFETIMES: st.SearchStrategy[Lifetime] = st.sampled_from(("turn", "turn", "session", "process", "unit"))


@st.composite
def contracts(draw: st.DrawFn) -> Contract:
    """Up to two base clocks, a derived one, and up to three regions of any lifetime and policy."""
    small = st.integers(1, 6)
    flush = st.lists(small, max_size=2)
    clocks = [Clock(name, draw(small), flush=draw(flush)) for name in ("a", "b")[: draw(st.integers(1, 2))]]
    if draw(st.booleans()):
        clocks.append(Clock("c", of="a", rate=draw(st.integers(1, 3))))
    clocks.append(Clock("p", period=3))
    regions = []
    names = [clock.name for clock in clocks]
    for number, clock in enumerate([*names, draw(st.sampled_from(names[:-1]))]):
        product = clock != "p" and draw(st.booleans())
        policy = Pinned(3) if clock == "p" else draw(POLICIES)
        regions.append(
            Region(
                f"r{number}",
                argument=f"s[{number}]",
                axis=(0, 1) if product else 1,
                clock=("p", clock) if product else clock,
                start=policy.bound if policy.fixed else draw(st.integers(0, policy.bound)),
                growth=draw(st.integers(1, 2)),
                retention=policy,
                lifetime=draw(LIFETIMES),
            )
        )
    return Contract(clocks, regions, max_classes=100_000)


@given(contracts(), st.randoms(use_true_random=False))
def test_the_catalog_is_what_a_stream_visits(contract: Contract, rng: random.Random) -> None:
    catalog = contract.catalog()
    assert points_of(catalog) == played(contract, rng)
    assert len(points_of(catalog)) == len(catalog)  # and no class twice
    width = contract.width()
    assert width.classes >= len(catalog)
    if width.exact:
        assert width.classes == len(catalog)


@given(contracts())
def test_entries_lead_to_each_other(contract: Contract) -> None:
    catalog = contract.catalog()
    states = {entry.extents for entry in catalog}
    assert catalog.entries[0].extents == tuple((r.name, r.start) for r in contract.regions if r.persistent)
    for entry in catalog:
        assert catalog.find(dict(entry.extents), dict(entry.advance)) is entry
        assert entry.flush == any(entry.advance_of(c.name) != c.stride for c in contract.clocks if c.is_base)
        if not entry.flush:
            assert entry.next_extents in states


def decoder(flush: range = range(0), lifetime: Lifetime = "turn", stride: int = 50) -> Contract:
    """The paper's speech decoder: prompt 302, retained 100."""
    cache = Region(
        "cache",
        argument="cache",
        axis=1,
        clock="frames",
        start=302,
        retention=PromptPlusLast(302, 100),
        lifetime=lifetime,
    )
    return Contract([Clock("frames", stride, flush=flush)], [cache])


def test_the_paper_decoder() -> None:
    catalog = decoder().catalog()
    assert [entry.extent_of("cache") for entry in catalog] == [302, 352, 402]
    assert [entry.next_of("cache") for entry in catalog] == [352, 402, 402]
    assert all(entry.advance_of("frames") == 50 and not entry.flush for entry in catalog)
    assert len(decoder(stride=20).catalog()) == 6


def test_normal_calls_come_first_in_stream_order() -> None:
    catalog = decoder(flush=range(10, 31, 10)).catalog()
    assert [entry.flush for entry in catalog] == [False] * 3 + [True] * 9
    assert [(e.extent_of("cache"), e.advance_of("frames")) for e in catalog][:6] == [
        (302, 50),
        (352, 50),
        (402, 50),
        (302, 10),
        (302, 20),
        (302, 30),
    ]


def test_a_flush_moves_a_session_region_off_the_stride() -> None:
    catalog = decoder(flush=range(20, 21), lifetime="session").catalog()
    extents = {entry.extent_of("cache") for entry in catalog}
    assert {302, 322, 342, 352, 362, 372, 382, 392, 402} == extents


@pytest.mark.parametrize(("turn", "session"), [(1, 5), (2, 7), (4, 4), (7, 2), (5, 1), (1, 1)])
def test_turn_and_session_regions_together(turn: int, session: int) -> None:
    def grows(name: str, extents: int, lifetime: Lifetime) -> Region:
        return Region(
            name,
            argument=name,
            axis=0,
            clock="f",
            start=1,
            retention=KeepLast(extents),
            lifetime=lifetime,
        )

    contract = Contract([Clock("f", 1)], [grows("t", turn, "turn"), grows("s", session, "session")])
    # (calls in this turn, calls in the session), each to its saturation, the first never above the second
    calls = range(turn + session)
    pairs = {(min(i, turn - 1), min(j, session - 1)) for i in calls for j in calls if i <= j}
    width = contract.width()
    assert (width.classes, width.exact) == (len(pairs), True)
    assert {(entry.extent_of("t") - 1, entry.extent_of("s") - 1) for entry in contract.catalog()} == pairs


def test_pinned_regions_have_one_class() -> None:
    pinned = Region("conv", argument="conv", axis=1, clock="frames", retention=Pinned(6))
    catalog = Contract([Clock("frames", 50)], [pinned]).catalog()
    assert [str(entry) for entry in catalog] == ["frames +50: conv 6 -> 6"]


def test_of_many_regions_that_stay_an_entry_tells_the_number() -> None:
    frame = Clock("frame", 2)
    still = [Region(f"r{i}", attribute=f"r{i}", axis=1, clock="frame", retention=Pinned(4)) for i in range(9)]
    cache = Region("cache", argument="cache", result=1, axis=1, clock="frame", retention=KeepLast(2))
    assert [str(entry) for entry in Contract([frame], [*still, cache]).catalog()] == [
        "frame +2: cache 0 -> 2, 9 regions that stay",
        "frame +2: 10 regions that stay",
    ]
    assert str(Contract([frame], still[:8]).catalog().entries[0]).endswith("r6 4 -> 4, r7 4 -> 4")


def test_scratch_has_no_extent_in_the_catalog() -> None:
    scratch = Region("work", attribute="work", axis=1, clock="frames", retention=KeepLast(402), lifetime="unit")
    (entry,) = Contract([Clock("frames", 50)], [scratch]).catalog()
    assert entry == CatalogEntry((("frames", 50),), (), (), False)
    with pytest.raises(ContractError, match="no region 'work'"):
        entry.extent_of("work")


def test_a_backbone_of_unit_stride_is_refused_with_its_arithmetic() -> None:
    window = Region("kv", argument="kv", axis=1, clock="token", retention=KeepLast(2000))
    with pytest.raises(CatalogTooWide) as caught:
        Contract([Clock("token", 1)], [window]).catalog()
    assert (caught.value.width, caught.value.limit) == (2001, 64)
    assert caught.value.arithmetic == "kv: ceil((2,000 - 0) / 1) + 1 = 2,001"
    assert len(Contract([Clock("token", 1)], [window], max_classes=2001).catalog()) == 2001


def test_an_upper_bound_is_checked_by_walking() -> None:
    def contract(limit: int) -> Contract:
        region = Region("s", argument="s", axis=0, clock="f", retention=KeepLast(50), lifetime="session")
        return Contract([Clock("f", 30, flush=[49])], [region], max_classes=limit)

    # Totals 0, 30, 49, 50: four extents by two advances, where the bound on totals of ticks allows 102.
    assert (contract(8).width().classes, contract(8).width().exact) == (102, False)
    assert len(contract(8).catalog()) == 8
    with pytest.raises(CatalogTooWide, match="more than 7 classes"):
        contract(7).catalog()


def test_a_wide_upper_bound_is_refused_without_walking_it_all() -> None:
    region = Region("s", argument="s", axis=0, clock="f", retention=KeepLast(10**9), lifetime="session")
    with pytest.raises(CatalogTooWide):
        Contract([Clock("f", 3, flush=[2])], [region]).catalog()


def test_lookups() -> None:
    catalog = decoder().catalog()
    first, *_ = catalog
    assert first in catalog and "first" not in catalog
    assert catalog.find({"cache": 302}, {"frames": 50}) == first
    assert catalog.find({"cache": 303}, {"frames": 50}) is None
    assert catalog.find({}, {"frames": 50}) is None
    assert catalog == decoder().catalog() and hash(first) == hash(decoder().catalog().entries[0])
    with pytest.raises(ContractError, match="did you mean 'frames'"):
        first.advance_of("frame")
    with pytest.raises(ContractError, match="did you mean 'cache'"):
        first.next_of("cach")


def test_the_table_has_a_line_a_class() -> None:
    contract = decoder(flush=range(10, 11))
    assert str(contract.catalog()).splitlines() == [
        "#  advance     extents           kind",
        "0  frames +50  cache 302 -> 352  normal",
        "1  frames +50  cache 352 -> 402  normal",
        "2  frames +50  cache 402 -> 402  normal",
        "3  frames +10  cache 302 -> 312  flush",
        "4  frames +10  cache 352 -> 362  flush",
        "5  frames +10  cache 402 -> 402  flush",
    ]
