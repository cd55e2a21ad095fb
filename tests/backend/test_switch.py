"""The kill switch: eager bytes, counted, and the stream goes on."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import cadence_fx
from tests.harness import Pair
from tests.streams import BY_NAME

PROGRAM = """
import torch, cadence_fx
from tests.harness import Pair
from tests.streams import BY_NAME
torch.set_grad_enabled(False)
pair = Pair(BY_NAME["AppendLast"], warm=False)
pair.restart(0)
for _ in range(5):
    pair.call()
facts = cadence_fx.report(pair.step).as_dict()
print(facts["replays"], facts["captures"], facts["misses"])
"""


@pytest.fixture(autouse=True)
def _serving() -> None:
    torch.set_grad_enabled(False)


@pytest.mark.parametrize("name", ["AppendLast", "Rebound", "BufferShift", "RingByIndex", "ReadsState", "LayerList"])
def test_switched_off_and_on_in_the_middle_of_a_stream(name: str) -> None:
    pair = Pair(BY_NAME[name])
    for stretch in range(6):
        if stretch % 2:
            with cadence_fx.disabled():
                for _ in range(3):
                    pair.call()
        else:
            for _ in range(3):
                pair.call()
    assert pair.missed() == Counter(disabled=9)
    assert pair.since("replays") == 9
    assert pair.since("captures") == 0
    pair.check_kept()
    assert all(len(seen) == 1 for seen in pair.addresses.values())


def test_it_is_nested_and_reset_by_an_exception() -> None:
    pair = Pair(BY_NAME["AppendLast"])
    with pytest.raises(ZeroDivisionError), cadence_fx.disabled():
        with cadence_fx.disabled():
            pair.call()
        pair.call()
        raise ZeroDivisionError
    pair.call()
    assert pair.missed() == Counter(disabled=2)


@pytest.mark.parametrize(("value", "shown"), [("1", "0 0 {'disabled': 5}"), ("0", "5 4 {}"), ("", "5 4 {}")])
def test_from_outside_the_process(value: str, shown: str) -> None:
    environment = {**os.environ, "CADENCE_DISABLE": value, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == shown


def test_warm_up_while_it_is_off_does_nothing() -> None:
    pair = Pair(BY_NAME["AppendLast"], warm=False)
    with cadence_fx.disabled():
        pair.warm_up()
        for _ in range(3):
            pair.call()
    assert pair.missed() == Counter(disabled=3) and pair.since("captures") == 0
    pair.warm_up()
    for _ in range(3):
        pair.call()
    assert pair.missed() == Counter() and pair.since("replays") == 3
    pair.check_kept()
