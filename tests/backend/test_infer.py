"""Inference: contracts from example calls, never a wrong one, and what cannot be declared is said."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cadence_fx
from cadence_fx import Contract, ContractError, ExampleFailed, KeepLast, Ring, infer
from tests import hazards_of_inference as hazards
from tests.harness import assert_same
from tests.streams import BY_NAME, STREAMS, Run, Stream
from tests.unprepared import CASES, C, Case, frames, lesser, same

TOYS = [stream for stream in STREAMS if not stream.flushes]
# One of each way in which a single call shows the state, or does not.
FROM_ONE_CALL = ["ConvContext", "ZeroStart", "SolverWorkspace", "RingByIndex"]


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


@pytest.mark.parametrize("stream", TOYS, ids=lambda stream: stream.name)
def test_toys(stream: Stream) -> None:
    module, calls = example_calls(stream, stream.calls[0], stream.calls[0])
    found = infer(module, *calls)
    assert found.contract is not None, found
    assert same(found.contract, stream.contract) is None and not lesser(found.contract, stream.contract)


@pytest.mark.parametrize("name", FROM_ONE_CALL)
def test_toys_from_one_call(name: str) -> None:
    stream = BY_NAME[name]
    module, calls = example_calls(stream, stream.calls[0])
    found = infer(module, *calls)
    assert found.contract is not None, found
    assert same(found.contract, stream.contract) is None and not lesser(found.contract, stream.contract)


def shown(contract: Contract, flush: dict[str, int]) -> Contract:
    """The contract of what one call that ends a turn shows: one flush length, of one clock."""
    clocks = [replace(c, flush=[flush[c.name]]) if c.flush else c for c in contract.clocks]
    return replace(contract, clocks=clocks)


@pytest.mark.parametrize("name", ["TwoClocks", "Duplex", "PartialFlush"])
def test_a_second_call_of_other_sizes_ends_a_turn(name: str) -> None:
    stream = BY_NAME[name]
    module, calls = example_calls(stream, stream.calls[0], stream.flushes[0])
    found = infer(module, *calls)
    assert found.contract is not None, found
    assert same(found.contract, shown(stream.contract, stream.flushes[0])) is None
    (flush,) = (fact for fact in found.facts if fact.field == "flush")
    assert flush.confidence == "observed" and "other lengths" in flush.why


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
    assert same(found.contract, case.contract) is None and not lesser(found.contract, case.contract)


# -- what cannot be declared -------------------------------------------------------------------------------------------


def two_calls(module: nn.Module, start: int = 2) -> list[tuple[Any, ...]]:
    first = frames(2), frames(start)
    with torch.no_grad():
        result = copy.deepcopy(module)(*copy.deepcopy(first))
    return [first, (frames(2), *result[1:])]


@pytest.mark.parametrize(
    "kind, told",
    [
        (hazards.GrowsForever, "cache: unbounded: it grows by 2 frames a call along axis 1"),
        (hazards.LimitedPositions, "must match the size of tensor b (300)"),
        (hazards.DataDependent, "cache: its extent depends on the data"),
        (hazards.Sawtooth, "cache: its extent grows and falls again"),
        (hazards.EveryThird, "cache: its extent grows and falls again"),
    ],
)
def test_states_that_no_contract_can_declare(kind: type[nn.Module], told: str) -> None:
    torch.manual_seed(0)
    module = kind()
    found = infer(module, *two_calls(module))
    assert found.contract is None and len(found.problems) == 1 and told in found.problems[0]
    line = found.problems[0] + "".join(found.ambiguous)
    assert "hazards_of_inference.py:" in line  # the user's line
    with pytest.raises(ContractError, match="cache"):
        found.toml()


@pytest.mark.parametrize(
    "module, call, doubts",
    [
        (hazards.Symmetric(), (frames(2), frames(2)), ["a: what is returned at 1 holds frames of it as of b", "b: "]),
        (hazards.Computed(), (frames(2), frames(1)), ["x: ", "hidden: what is returned at 1 has its shape"]),
        (hazards.Lazy(), (frames(2),), ["self.cache: is made by the first call"]),
        (hazards.Appended(), (frames(2), {"cache": frames(2)}), ["state['cache']: is replaced in the caller's own"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_one_call_does_not_tell(module: nn.Module, call: tuple[Any, ...], doubts: Sequence[str]) -> None:
    found = infer(module, call)
    assert found.contract is None and found.problems == ("no state was found",)
    assert len(found.ambiguous) == len(doubts)
    assert all(text.startswith(start) for text, start in zip(found.ambiguous, doubts, strict=True))


def test_a_second_call_that_was_given_something_else() -> None:
    found = infer(hazards.Conditioned(), (frames(2), frames(3)), (frames(2), frames(3)))
    assert found.contract is None
    assert found.ambiguous[0].startswith(
        "prompt: what is returned at 0 holds frames of it, but the second call was given"
    )


def test_a_state_that_is_none_at_first() -> None:
    module = hazards.NothingAtFirst()
    first = (frames(2),)
    second = (frames(2), module(*first)[1].detach())
    assert infer(module, first, second).ambiguous[0].startswith("cache: is no tensor in the first example call")
    found = infer(module, second)
    assert found.contract is not None and found.contract.region("cache").start == 2


def test_fresh_frames_in_another_order_are_not_proved() -> None:
    found = infer(hazards.Reversed(), *two_calls(hazards.Reversed()))
    assert found.contract is not None and found.facts_of("cache")["retention"].confidence == "observed"


def test_a_result_that_would_freeze_is_no_state_for_sure() -> None:
    stream = BY_NAME["GrowThenPinned"]
    module, calls = example_calls(stream, stream.calls[0])
    found = infer(module, *calls)
    assert found.contract is None and "second example call" in found.problems[0]


def test_a_bound_that_is_far_away() -> None:
    module = hazards.LateCut()
    found = infer(module, *two_calls(module))
    assert found.contract is not None and found.contract.region("cache").retention == KeepLast(2500)
    assert found.facts_of("cache")["retention"].confidence == "observed"  # not every class between was traced
    assert "1,250 classes" in found.checked


def test_a_call_that_cannot_be_traced_is_watched() -> None:
    module = hazards.HostRead()
    found = infer(module, *two_calls(module))
    assert found.contract is not None and found.contract.region("cache").retention == KeepLast(6)
    assert {fact.confidence for fact in found.facts} == {"observed"}
    (doubt,) = (text for text in found.ambiguous if text.startswith("the call"))
    assert "cannot be traced" in doubt and "hazards_of_inference.py:" in doubt


def test_a_ring_whose_position_python_counts() -> None:
    found = infer(hazards.PythonPosition(), (frames(2),))
    assert found.contract is not None and found.contract.region("ring").retention == Ring(6)
    assert "Python counts its position" in found.facts_of("ring")["retention"].why


def test_a_result_in_memory_that_the_next_call_writes() -> None:
    found = infer(hazards.Sharing(), (frames(2), frames(2)))
    assert any(text.startswith("result 1: lies in the memory of self.work") for text in found.ambiguous)


def test_numbers_that_python_counts() -> None:
    found = infer(hazards.PythonPosition(), (frames(2),))
    assert any(text.startswith("self.at: is a number that Python counts") for text in found.ambiguous)


def test_one_call_pairs_by_what_a_result_holds_and_says_so() -> None:
    found = infer(hazards.GrowsForever(), (frames(2), frames(2)))
    assert found.problems[0].startswith("if result 1 is its next state, cache: unbounded")
    found = infer(hazards.LateCut(), (frames(2), frames(2)))
    assert found.facts_of("cache")["next state"].confidence == "observed"


def test_what_is_left_out_is_said() -> None:
    left_out = (hazards.WholeNumber(), "self.count"), (hazards.Sharing(), "self.work"), (hazards.InDeque(), "self.line")
    for module, place in left_out:
        found = infer(module, *two_calls(module))
        assert found.contract is not None and [region.name for region in found.contract.regions] == ["cache"]
        assert any(text.startswith(place) for text in found.ambiguous)


# -- what is returned, and what is left alone --------------------------------------------------------------------------


def test_a_contract_ready_to_paste_and_to_save(tmp_path: Path) -> None:
    stream = BY_NAME["NestedDict"]
    module, calls = example_calls(stream, stream.calls[0], stream.calls[0])
    found = infer(module, *calls)
    space: dict[str, Any] = {"cadence": cadence_fx}
    exec(str(found), space)  # comments and all
    assert space["contract"] == found.contract
    found.save(tmp_path / "found.toml")
    assert Contract.load(tmp_path / "found.toml") == found.contract
    assert "# proved (tests/toys.py:" in str(found) and found.to_json()
    assert found.as_dict()["facts"][0].keys() == {"part", "field", "value", "confidence", "why", "where"}


@pytest.mark.parametrize("name", ["NestedDict", "RingByIndex"])
def test_the_backend_serves_what_was_inferred(name: str) -> None:
    stream = BY_NAME[name]
    module, calls = example_calls(stream, stream.calls[0], stream.calls[0])
    contract = infer(module, *calls).contract
    torch._dynamo.reset()
    with torch.no_grad():
        options: dict[str, Any] = {"contract": contract}
        step = torch.compile(module, backend=cadence_fx.cadence, options=options)
        cadence_fx.warm_up(step, *calls[0])
        run, twin = Run(stream, module, step), Run(stream, copy.deepcopy(module))
        for each in (run, twin):
            each.restart(0)
        for number in range(6):
            inputs = run.inputs(number, stream.calls[0])
            assert_same(run.call(*inputs), twin.call(*inputs), f"call {number}")
    assert cadence_fx.report(step)["replays"] == 6 and not cadence_fx.report(step)["misses"]


def test_nothing_of_the_users_is_touched() -> None:
    stream = BY_NAME["RingByIndex"]
    module, calls = example_calls(stream, stream.calls[0])
    before, given = copy.deepcopy(module.state_dict()), copy.deepcopy(calls)
    drawn = torch.get_rng_state()
    infer(module, *calls)
    assert torch.equal(torch.get_rng_state(), drawn)
    for name, value in module.state_dict().items():
        assert_same(value, before[name], name)
    for mine, theirs in zip(calls[0], given[0], strict=True):
        assert_same(mine, theirs, "an argument")


@pytest.mark.parametrize("rebound", [True, False])
def test_a_parameter_that_a_call_writes_is_put_back(rebound: bool) -> None:
    module = hazards.WrittenParameter(rebound=rebound)
    with pytest.raises(ExampleFailed, match="writes the parameter state.*make it a buffer"):
        infer(module, (frames(8),))
    assert_same(module.state, torch.zeros(1, 3, C), "the parameter")


@pytest.mark.parametrize(
    "calls, told",
    [
        ((), "one or two example calls"),
        (((frames(2),),) * 3, "one or two example calls"),
        ((frames(2),), "is a tuple of arguments"),
        (((frames(2), 1, 2),), "does not fit the signature"),
    ],
)
def test_mistakes_of_the_user(calls: Any, told: str) -> None:
    with pytest.raises((ContractError, ExampleFailed), match=told):
        infer(nn.Identity(), *calls)


def test_a_call_that_raises() -> None:
    with pytest.raises(ExampleFailed) as caught:
        infer(hazards.Broken(), (frames(2),))
    assert caught.value.location is not None and "hazards_of_inference.py:" in caught.value.location
    tracked = nn.Linear(C, C)
    tracked.kept = tracked(frames(2))  # type: ignore[assignment]
    with pytest.raises(ExampleFailed, match="cannot be copied"):
        infer(tracked, (frames(2),))


def test_functions_have_states_in_arguments_only() -> None:
    def step(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat([cache, x.tanh()], 1)
        return seen.mean(1), seen[:, -5:]

    found = infer(step, (frames(2), frames(1)))
    assert found.contract is not None and found.contract.region("cache").retention == KeepLast(5)


class Quantised(nn.Module):
    """Its state shows in results only where it changes which code is the nearest."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.codes = torch.zeros(1, 2, C), torch.linspace(-200, 200, 3)

    def forward(self, x: Tensor) -> Tensor:
        frames = torch.cat([self.seen, x.tanh()], 1)
        self.seen = frames[:, -2:]
        return self.codes[(frames[:, :-2].sum(2, keepdim=True) - self.codes).abs().argmin(2)]


def test_a_state_that_seldom_shows_is_one() -> None:
    found = infer(Quantised(), (torch.randn(1, 4, C),))
    assert found.contract is not None and found.contract.region("seen").retention == KeepLast(2)


def test_a_second_call_that_does_not_go_on_is_told() -> None:
    class Cells(nn.Module):
        def forward(self, x: Tensor, a: Tensor, b: Tensor, token: Tensor) -> tuple[Tensor, ...]:
            return (x.sum(1) + a + b).tanh(), (a + x.mean(1)).tanh(), (b - x.mean(1)).tanh(), token + 1

    calls = [(torch.randn(1, 2, C), torch.randn(1, C), torch.randn(1, C), torch.tensor([n])) for n in range(2)]
    found = infer(Cells(), *calls)
    told = "the second call was given something else: an input, or the calls do not follow each other"
    assert [doubt.split(":")[0] for doubt in found.ambiguous if told in doubt] == ["a", "b"]
