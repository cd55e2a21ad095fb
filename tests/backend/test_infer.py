"""Inference: contracts from example calls, never a wrong one, and what cannot be declared is said."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from cadence_fx import infer
from tests.streams import BY_NAME, STREAMS, Run, Stream
from tests.unprepared import CASES, Case, same

NO_FLUSH = [stream for stream in STREAMS if not stream.flushes]


def example_calls(stream: Stream, *advances: dict[str, int]) -> tuple[Any, list[tuple[Any, ...]]]:
    """A fresh module, and the arguments of a turn's first calls."""
    module = stream.build()
    run = Run(stream, module)
    run.restart(0)
    untouched = copy.deepcopy(module)
    calls = []
    for number, advance in enumerate(advances):
        inputs = run.inputs(number, advance)
        calls.append(copy.deepcopy((*inputs, *run.state)))
        with torch.no_grad():
            run.call(*inputs)
    return untouched, calls


@pytest.mark.parametrize("stream", NO_FLUSH, ids=lambda stream: stream.name)
def test_toys_from_two_calls(stream: Stream) -> None:
    module, calls = example_calls(stream, stream.calls[0], stream.calls[0])
    found = infer(module, *calls)
    assert found.contract is not None, found
    assert same(found.contract, stream.contract) is None


@pytest.mark.parametrize("stream", NO_FLUSH, ids=lambda stream: stream.name)
def test_toys_from_one_call(stream: Stream) -> None:
    module, calls = example_calls(stream, stream.calls[0])
    found = infer(module, *calls)
    if stream.name == "GrowThenPinned":  # one call cannot tell it from a result that only begins with an argument
        assert found.contract is None and "second example call" in found.problems[0]
        return
    assert found.contract is not None, found
    assert same(found.contract, stream.contract) is None


@pytest.mark.parametrize("name", ["TwoClocks", "Duplex", "PartialFlush"])
def test_a_second_call_of_other_sizes_ends_a_turn(name: str) -> None:
    stream = BY_NAME[name]
    module, calls = example_calls(stream, stream.calls[0], stream.flushes[0])
    found = infer(module, *calls)
    assert found.contract is not None, found
    flushed = {dict(advance).popitem()[1] for advance in [tuple(stream.flushes[0].items())]}
    assert flushed  # one length was shown, so one is declared
    assert sum(len(clock.flush) for clock in found.contract.clocks) == 1
    assert [entry.argument for entry in found.contract.inputs] == [entry.argument for entry in stream.contract.inputs]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_models_that_nobody_prepared(case: Case) -> None:
    torch.manual_seed(0)
    module = case.module().eval()
    first = case.first()
    with torch.no_grad():
        args, kwargs = first if len(first) == 2 and isinstance(first[1], dict) else (first, {})
        second = case.follow(copy.deepcopy(module)(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
    found = infer(module, first, second)
    assert found.contract is not None, found
    assert same(found.contract, case.contract) is None
