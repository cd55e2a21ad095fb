"""Python text of a contract: it makes an equal one."""

from fractions import Fraction
from typing import Any

import pytest

import cadence_fx
from cadence_fx import Clock, Contract, Input, KeepLast, Pinned, PromptPlusLast, Region
from cadence_fx.source import python_source
from tests.streams import STREAMS

ODD = Contract(
    [
        Clock("frame", 4, flush=[2, 8], lookahead=3),
        Clock("half", of="frame", rate=Fraction(1, 2)),
        Clock("s", period=3),
    ],
    [
        Region(
            "a", argument="state['k'][*]", result='1["k"][*]', axis=(0, 2), clock=("s", "frame"), retention=KeepLast(8)
        ),
        Region(
            "b", attribute="layers.*.hist", axis=-1, clock="half", start=2, retention=PromptPlusLast(2, 4, "prepend")
        ),
        Region(
            "c", attribute="c", axis=0, clock="frame", growth=Fraction(1, 2), retention=Pinned(1), lifetime="session"
        ),
    ],
    inputs=[Input("x", axis=1, clock="half", rate=Fraction(3, 1), offset=2)],
    name='it is "odd"',
    max_classes=100,
)


@pytest.mark.parametrize("contract", [ODD, *(stream.contract for stream in STREAMS)])
def test_the_text_makes_an_equal_contract(contract: Contract) -> None:
    space: dict[str, Any] = {"cadence": cadence_fx}
    exec(python_source(contract, name="made"), space)
    assert space["made"] == contract


def test_comments_stand_above_their_part() -> None:
    lines = python_source(ODD, {"b": ["one", "two"]}).splitlines()
    at = lines.index("        # one")
    assert lines[at + 1] == "        # two" and '"b"' in "".join(lines[at + 2 : at + 4])
