"""Contracts: validation that names the field, the extents a region goes through, and the width of the catalog."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from cadence_fx.clock import Clock
from cadence_fx.contract import Contract, Input, Region
from cadence_fx.errors import ContractError, UnusedClock
from cadence_fx.retention import KeepLast, Pinned, PromptPlusLast, Ring

FRAMES = Clock("frames", 50)


UNTYPED: Any = Contract  # for arguments that a type checker would refuse first


def region(name: str = "cache", **changes: Any) -> Region:
    """A plain region on the clock "frames", with ``changes``."""
    fields: dict[str, Any] = {"argument": name, "axis": 1, "clock": "frames", "retention": KeepLast(8)} | changes
    return Region(name, **fields)


def decoder(**clock: Any) -> Contract:
    """The paper's speech decoder: prompt 302, retained 100, chunk 50, ten solver steps."""
    return Contract(
        [Clock("frames", 50, **clock), Clock("step", period=10)],
        [
            Region(
                "cache",
                argument="cache",
                result=1,
                axis=(0, 4),
                clock=("step", "frames"),
                start=302,
                retention=PromptPlusLast(302, 100),
            )
        ],
        max_classes=200,
    )


# Regions


def test_start_defaults_to_where_the_extent_begins() -> None:
    assert region().start == 0
    assert region(retention=Pinned(6)).start == region(retention=Ring(6)).start == 6
    assert region(mutability="read_only", retention=KeepLast(6)).start == 6


def test_extents_of_a_call() -> None:
    cache = region(start=302, retention=PromptPlusLast(302, 100))
    assert [cache.raw(extent, 50) for extent in (302, 352, 402)] == [352, 402, 452]
    assert [cache.next_extent(extent, 50) for extent in (302, 352, 402)] == [352, 402, 402]
    assert region(growth=Fraction(1, 2), retention=KeepLast(80)).next_extent(10, 50) == 35
    assert region(growth=2, retention=KeepLast(80)).raw(10, 3) == 16


def test_regions_that_do_not_grow() -> None:
    assert region(retention=Ring(6)).raw(6, 50) == 6  # written in place: nothing more is ever in flight
    assert region(retention=Pinned(6)).raw(6, 50) == 56
    assert region(retention=Pinned(6)).next_extent(6, 50) == 6
    assert region(mutability="read_only").next_extent(8, 50) == region(mutability="read_only").raw(8, 50) == 8


def test_lifetimes() -> None:
    lifetimes = ("operator", "unit", "turn", "session", "process")
    kept = [lifetime for lifetime in lifetimes if region(lifetime=lifetime).persistent]
    assert kept == ["turn", "session", "process"]


def test_the_frame_axis_is_known_in_a_contract() -> None:
    loose = Region("c", argument="c", axis=(0, 4), clock=("step", "frames"), retention=KeepLast(8))
    with pytest.raises(ContractError, match="contract.region"):
        loose.frame_axis  # noqa: B018
    held = Contract([Clock("step", period=10), FRAMES], [loose]).region("c")
    assert (held.frame_axis, held.frame_clock) == (4, "frames")
    assert held == loose
    still = Contract([Clock("step", period=10)], [region("c", axis=0, clock="step", retention=Pinned(10))])
    assert (still.region("c").frame_axis, still.region("c").frame_clock) == (None, None)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"argument": None}, "argument"),
        ({"attribute": "cache"}, "attribute"),
        ({"argument": "cache["}, "argument"),
        ({"argument": "f(x)"}, "argument"),
        ({"argument": "0.cache"}, "argument"),
        ({"argument": 3}, "argument"),
        ({"argument": "a" * 300}, "argument"),
        ({"argument": None, "attribute": "two words"}, "attribute"),
        ({"result": -1}, "result"),
        ({"result": True}, "result"),
        ({"result": "1 + 1"}, "result"),
        ({"result": 1, "mutability": "read_only"}, "result"),
        ({"axis": True}, "axis"),
        ({"axis": 1.0}, "axis"),
        ({"axis": (1, 2)}, "axis"),
        ({"axis": (1, 2), "clock": ("frames",)}, "axis"),
        ({"axis": (), "clock": ()}, "axis"),
        ({"axis": (1, 1), "clock": ("frames", "step")}, "axis"),
        ({"axis": (1, 2), "clock": ("step", "step")}, "clock"),
        ({"clock": 3}, "clock"),
        ({"start": -1}, "start"),
        ({"start": 9}, "start"),
        ({"start": True}, "start"),
        ({"start": 3, "retention": Pinned(6)}, "start"),
        ({"start": 0, "retention": Ring(6)}, "start"),
        ({"start": 0, "mutability": "read_only"}, "start"),
        ({"growth": 0}, "growth"),
        ({"growth": 0.5}, "growth"),
        ({"retention": 8}, "retention"),
        ({"retention": KeepLast}, "retention"),
        ({"retention": {"policy": "KeepLast", "n": 8}}, "retention"),
        ({"lifetime": "forever"}, "lifetime"),
        ({"mutability": "const"}, "mutability"),
        ({"placement": 3}, "placement"),
        ({"placement": ""}, "placement"),
    ],
)
def test_a_wrong_region_names_region_and_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ContractError) as caught:
        region(**changes)
    assert (caught.value.region, caught.value.field) == ("cache", field)


@pytest.mark.parametrize("name", ["", " cache", "two\nlines", 3, None])
def test_a_region_needs_a_printable_name(name: Any) -> None:
    with pytest.raises(ContractError) as caught:
        Region(name, argument="cache", axis=0, clock="frames", retention=Ring(1))
    assert caught.value.field == "name"


# Inputs


def test_the_size_of_an_input() -> None:
    mel = Input("mel", axis=-1, clock="frames", rate=2, offset=6)
    assert [mel.size(advance) for advance in (0, 3, 50)] == [6, 12, 106]
    assert Input("mel", axis=0, clock="frames", rate=Fraction(1, 2)).size(50) == 25
    with pytest.raises(ContractError) as caught:
        Input("mel", axis=0, clock="frames", offset=-51).size(50)
    assert caught.value.field == "offset"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"argument": "a b"}, "argument"),
        ({"axis": "1"}, "axis"),
        ({"clock": None}, "clock"),
        ({"rate": 0}, "rate"),
        ({"rate": True}, "rate"),
        ({"offset": 1.5}, "offset"),
    ],
)
def test_a_wrong_input_names_its_field(changes: dict[str, Any], field: str) -> None:
    fields: dict[str, Any] = {"argument": "mel", "axis": 1, "clock": "frames"} | changes
    with pytest.raises(ContractError) as caught:
        Input(**fields)
    assert caught.value.field == field


# Contracts


def test_contracts_are_values_and_take_any_iterable() -> None:
    contract: Contract = UNTYPED(iter([FRAMES]), (r for r in [region()]), inputs=[Input("x", axis=1, clock="frames")])
    assert contract == Contract((FRAMES,), (region(),), inputs=(Input("x", axis=1, clock="frames"),))
    assert hash(contract) == hash(Contract(contract.clocks, contract.regions, inputs=contract.inputs))
    assert contract != Contract([FRAMES], [region()])
    assert isinstance(contract.regions, tuple)


def test_derived_clocks_scale_stride_flush_and_lookahead() -> None:
    contract = Contract(
        [Clock("tokens", 25, lookahead=3, flush=[5, 28]), Clock("mel", of="tokens", rate=2)],
        [region(clock="mel", retention=KeepLast(100))],
    )
    assert contract.stride_of("mel") == 50
    assert contract.advances_of("mel") == (50, 10, 56)
    assert contract.advances == (
        {"tokens": 25, "mel": 50},
        {"tokens": 5, "mel": 10},
        {"tokens": 28, "mel": 56},
    )
    assert contract.envelope("cache") == 100 + 56  # look-ahead 3 x 2 and the longest flush agree here


@pytest.mark.parametrize(("rate", "lookahead", "envelope"), [(2, 0, 156), (2, 10, 160), (Fraction(1, 5), 0, 106)])
def test_a_derived_clock_takes_its_base_lookahead_scaled(rate: int | Fraction, lookahead: int, envelope: int) -> None:
    clocks = [Clock("tokens", 25, lookahead=3), Clock("mel", of="tokens", rate=rate, lookahead=lookahead)]
    contract = Contract(clocks, [region(clock="mel", retention=KeepLast(100))])
    assert contract.envelope("cache") == envelope  # bound 100, advance 50 or 5, look-ahead rounded up


def test_independent_clocks_combine_their_flushes() -> None:
    contract = Contract(
        [Clock("a", 4, flush=[1]), Clock("b", 6, flush=[2, 3])], [region("x", clock="a"), region("y", clock="b")]
    )
    advances = [(advance["a"], advance["b"]) for advance in contract.advances]
    assert advances == [(4, 6), (4, 2), (4, 3), (1, 6), (1, 2), (1, 3)]


def test_periodic_clocks_have_a_stride_and_no_advance() -> None:
    contract = decoder()
    assert contract.stride_of("step") == 10
    assert contract.advances_of("step") == ()
    assert contract.advances == ({"frames": 50},)


@pytest.mark.parametrize("clock", [{"flush": range(2, 57, 2)}, {"lookahead": 6}])
def test_the_paper_decoder_has_an_envelope_of_458(clock: dict[str, Any]) -> None:
    contract = decoder(**clock)
    assert contract.envelope("cache") == contract.envelope(contract.region("cache")) == 458
    assert contract.region("cache").bound == 402


def test_envelopes_of_regions_that_never_pass_their_bound() -> None:
    still = [region("ring", retention=Ring(6)), region("table", mutability="read_only")]
    contract = Contract([FRAMES], [*still, region("conv", retention=Pinned(6))])
    assert [contract.envelope(name) for name in ("ring", "table", "conv")] == [6, 8, 56]


@pytest.mark.parametrize(
    ("build", "field", "words"),
    [
        (lambda: Contract([]), "clocks", "at least one clock"),
        (lambda: UNTYPED(FRAMES), "clocks", "in a list"),
        (lambda: UNTYPED("frames"), "clocks", "in a list"),
        (lambda: UNTYPED({"frames": FRAMES}), "clocks", "in a list"),
        (lambda: UNTYPED([FRAMES, "step"]), "clocks", "'step'"),
        (lambda: UNTYPED([FRAMES], [FRAMES]), "regions", "Region objects"),
        (lambda: UNTYPED([FRAMES], region()), "regions", "in a list"),
        (lambda: UNTYPED([FRAMES], [region()], inputs=[region("x")]), "inputs", "Input objects"),
        (lambda: Contract([FRAMES, FRAMES], [region()]), "clocks", "same name"),
        (lambda: Contract([FRAMES], [region(), region()]), "regions", "same name"),
        (
            lambda: Contract([FRAMES], [region("a", argument="c[0]"), region("b", argument="c.0")]),
            "regions",
            "same place",
        ),
        (lambda: Contract([FRAMES], [region("a", result=1), region("b", result="1")]), "regions", "same result"),
        (lambda: Contract([FRAMES], [region(clock="frame")]), "clock", "did you mean 'frames'?"),
        (lambda: Contract([FRAMES, Clock("m", of="frame")], [region()]), "clocks.m.of", "did you mean 'frames'?"),
        (
            lambda: Contract([FRAMES, Clock("m", of="n"), Clock("n", of="frames")], [region()]),
            "clocks.m.of",
            "'n' is derived",
        ),
        (
            lambda: Contract([FRAMES, Clock("m", of="p"), Clock("p", period=2)], [region()]),
            "clocks.m.of",
            "'p' is periodic",
        ),
        (
            lambda: Contract([FRAMES, Clock("m", of="frames", rate=Fraction(1, 3))], [region(clock="m")]),
            "clocks.m.rate",
            "not a whole number",
        ),
        (
            lambda: Contract(
                [Clock("frames", 50, flush=[3]), Clock("m", of="frames", rate=Fraction(1, 2))], [region(clock="m")]
            ),
            "clocks.m.rate",
            "3 ticks",
        ),
        (lambda: Contract([FRAMES], [region(growth=Fraction(1, 3))]), "growth", "whole number of frames"),
        (
            lambda: Contract([FRAMES, Clock("b", 2)], [region(axis=(0, 1), clock=("frames", "b"))]),
            "clock",
            "all but one must be periodic",
        ),
        (lambda: Contract([Clock("s", period=4)], [region(clock="s")]), "retention", "Pinned(4)"),
        (lambda: Contract([Clock("s", period=4)], [region(clock="s", retention=Pinned(5))]), "retention", "Pinned(4)"),
        (
            lambda: Contract([FRAMES], [region()], inputs=[Input("cache", axis=1, clock="frames")]),
            "inputs",
            "declared twice",
        ),
        (
            lambda: Contract([FRAMES], inputs=[Input("x", axis=1, clock="frames"), Input("x", axis=1, clock="frames")]),
            "inputs",
            "declared twice",
        ),
        (
            lambda: Contract([FRAMES], inputs=[Input("x", axis=1, clock="frames", rate=Fraction(1, 3))]),
            "rate",
            "not a size",
        ),
        (lambda: Contract([FRAMES], inputs=[Input("x", axis=1, clock="farmes")]), "inputs.clock", "did you mean"),
        (lambda: Contract([FRAMES], [region()], max_classes=0), "max_classes", "at least 1"),
        (lambda: Contract([FRAMES], [region()], max_classes=True), "max_classes", "whole number"),
        (lambda: Contract([FRAMES], [region()], name=""), "name", "printable"),
        (lambda: UNTYPED([FRAMES], [region()], name=3), "name", "printable"),
    ],
)
def test_a_wrong_contract_names_its_field(build: Callable[[], Contract], field: str, words: str) -> None:
    with pytest.raises(ContractError) as caught:
        build()
    assert caught.value.field == field
    assert words in str(caught.value)


def test_a_clock_that_nothing_follows_is_refused() -> None:
    with pytest.raises(UnusedClock) as caught:
        Contract([FRAMES, Clock("idle", 2)], [region()])
    assert caught.value.clock == "idle"
    with pytest.raises(UnusedClock):
        Contract([Clock("tokens", 25), Clock("mel", of="tokens", rate=2), FRAMES], [region()])
    # A base clock is in use through a derived one, and an input is enough.
    Contract([Clock("tokens", 25), Clock("mel", of="tokens", rate=2)], [region(clock="mel")])
    Contract([FRAMES], inputs=[Input("x", axis=1, clock="frames")])


def test_lookups_suggest_the_nearest_name() -> None:
    contract = decoder()
    with pytest.raises(ContractError, match="did you mean 'cache'"):
        contract.region("cach")
    with pytest.raises(ContractError, match="did you mean 'frames'"):
        contract.stride_of("frame")


# Width: equation 7 and what combines with it


def one_region(start: int, bound: int, stride: int) -> Contract:
    return Contract([Clock("frames", stride)], [region(start=start, retention=KeepLast(bound))])


@pytest.mark.parametrize(
    ("start", "bound", "stride", "classes"),
    [
        (302, 402, 50, 3),  # the paper's speech decoder
        (0, 2000, 1, 2001),  # unit stride: W + 1
        (402, 402, 50, 1),  # W = 0
        (0, 100, 20, 6),
        (0, 101, 20, 7),
        (0, 8, 50, 2),  # one call fills it
    ],
)
def test_width_of_one_region(start: int, bound: int, stride: int, classes: int) -> None:
    width = one_region(start, bound, stride).width()
    assert (width.classes, width.exact) == (classes, True)


def test_the_arithmetic_is_shown() -> None:
    assert decoder().width().arithmetic == "cache: ceil((402 - 302) / 50) + 1 = 3"
    flushing = decoder(flush=range(2, 57, 2)).width()
    assert flushing.classes == 84
    assert flushing.arithmetic == ("cache: ceil((402 - 302) / 50) + 1 = 3; x 28 advances (stride and flush) = 84")
    assert str(flushing) == flushing.arithmetic


def test_width_needs_no_enumeration() -> None:
    started = time.perf_counter()
    width = one_region(0, 1_000_000, 1).width()
    flushing = Contract(
        [Clock("t", 1, flush=range(1, 1000))],
        [region(clock="t", retention=KeepLast(10**9), lifetime="session"), region("b", clock="t")],
    ).width()
    assert time.perf_counter() - started < 1
    assert width.classes == 1_000_001
    assert flushing.classes > 10**9 and not flushing.exact


def test_scratch_and_still_regions_add_no_classes() -> None:
    contract = Contract(
        [FRAMES],
        [
            region("work", retention=KeepLast(1000), lifetime="unit"),
            region("ring", retention=Ring(6)),
            region("table", mutability="read_only", retention=KeepLast(300), lifetime="process"),
        ],
    )
    assert (contract.width().classes, contract.width().exact) == (1, True)
    assert contract.width().arithmetic == "ring: 1 (W = 0)"
    assert Contract([FRAMES], inputs=[Input("x", axis=0, clock="frames")]).width().arithmetic == "one state"


def test_the_text_shows_clocks_regions_and_width() -> None:
    text = str(decoder(flush=range(2, 57, 2)))
    assert text.splitlines()[:4] == [
        "contract (unnamed)",
        "clocks",
        "  frames: 50 a call, flush 2..56 (28 lengths)",
        "  step: 10 ticks inside every call",
    ]
    row = next(line for line in text.splitlines() if line.startswith("  cache"))
    assert re.split(r"\s{2,}", row.strip()) == [
        "cache",
        "cache",
        "first 302 and last 100, appended",
        "turn",
        "50",
        "402 - 302 = 100",
        "402",
        "458",
        "ceil((402 - 302) / 50) + 1 = 3",
    ]
    assert text.splitlines()[-1].startswith("classes: 84 of 200 allowed: ")


def test_short_repr() -> None:
    assert repr(decoder()) == "Contract(2 clocks, 1 region)"
    named = Contract([FRAMES], [region()], inputs=[Input("x", axis=1, clock="frames", offset=6)], name="toy")
    assert repr(named) == "Contract('toy', 1 clock, 1 region, 1 input)"
    assert "  x axis 1: 6 + frames" in str(named).splitlines()
