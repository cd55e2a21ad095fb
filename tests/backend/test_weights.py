"""What may happen to weights between calls: they are edited, loaded, replaced, moved, cast."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cadence_fx
from tests.harness import Pair, assert_same, counts
from tests.streams import BY_NAME


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def pair() -> Pair:
    pair = Pair(BY_NAME["AppendLast"])
    for _ in range(5):
        pair.call()
    return pair


def modules(pair: Pair) -> tuple[Any, Any]:
    return pair.eager.module, pair.live.module


def other_weights(pair: Pair) -> dict[str, Tensor]:
    return {name: torch.randn_like(value) for name, value in pair.eager.module.state_dict().items()}


def served(pair: Pair, calls: int = 4) -> tuple[Counter[str], int]:
    """Misses and late captures of some further calls, each equal to eager."""
    missed, late = pair.missed(), pair.since("late_captures")
    for _ in range(calls):
        pair.call()
    pair.check_kept()
    return pair.missed() - missed, pair.since("late_captures") - late


def test_a_state_dict_loaded_in_place_is_picked_up(pair: Pair) -> None:
    weights = other_weights(pair)
    for module in modules(pair):
        module.load_state_dict(weights)
    assert served(pair) == (Counter(), 0)


def test_weights_replaced_by_assign_drop_their_classes_and_are_captured_anew(pair: Pair) -> None:
    weights = other_weights(pair)
    old = [p.data for p in pair.live.module.parameters()]  # kept alive: reading the old ones would be silent
    for module in modules(pair):
        module.load_state_dict(copy.deepcopy(weights), assign=True)
    missed, late = served(pair)
    assert missed["address"] >= 1 and set(missed) == {"address"}
    assert counts(pair.step)["invalidations"]["address"] >= 1 and late >= 1
    assert served(pair, 6)[0] == Counter()
    del old


def test_weights_moved_within_a_device_are_found(pair: Pair) -> None:
    """As `.to(device)` and back does: the same parameters with the same values, elsewhere."""
    for module in modules(pair):
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
    missed, late = served(pair)
    assert missed["address"] >= 1 and late >= 1
    assert served(pair, 6) == (Counter(), 0)


def test_a_move_that_moves_nothing_costs_nothing(pair: Pair) -> None:
    for module in modules(pair):
        module.to("cpu").float()
    assert served(pair) == (Counter(), 0)


def test_weights_cast_to_half_and_back(pair: Pair) -> None:
    inputs = pair.eager.inputs(3, pair.stream.calls[0])
    state = pair.eager.state
    for module in modules(pair):
        module.half()
    with pytest.raises(RuntimeError, match="dtype"):
        pair.eager.module(*inputs, *state)
    with pytest.raises(Exception, match="dtype"):
        pair.step(*inputs, *pair.live.state)
    pair.check_state()  # a call that raises leaves the state
    before = pair.missed()
    for run in (pair.eager, pair.live):
        run.state = tuple(s.half() for s in run.state)
    for _ in range(3):
        pair.feed(*(x.half() for x in inputs))
    assert (pair.missed() - before).total() == 3 and pair.since("late_captures") == 0
    for run in (pair.eager, pair.live):
        run.module.float()
        run.state = tuple(s.float() for s in run.state)
    served(pair)
    assert served(pair, 6)[0] == Counter()


def test_a_weight_that_starts_at_an_odd_address() -> None:
    """Fixed arguments are bound where they are, whatever that is a multiple of."""
    stream = BY_NAME["AppendLast"]
    pair = Pair(stream, warm=False)
    for module in modules(pair):
        memory = torch.empty(module.key.weight.numel() + 1)
        weight = memory[1:].view_as(module.key.weight).copy_(module.key.weight)
        assert weight.data_ptr() % 16 == 4
        module.key.weight = nn.Parameter(weight)
    pair.warm_up()
    assert served(pair, 8) == (Counter(), 0)
    for module in modules(pair):
        module.key.weight = nn.Parameter(module.key.weight.clone())
    missed, _ = served(pair, 8)
    assert set(missed) == {"address"}


def test_casts_of_weights_under_autocast_do_not_outlive_an_edit() -> None:
    """Eager keeps a cast of each weight until the context is left; the next one must see the edited weight."""
    stream = BY_NAME["AppendLast"]
    pair = Pair(stream, warm=False)
    with torch.autocast("cpu", torch.bfloat16):
        pair.warm_up()
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(3):
                pair.call()
        for module in modules(pair):
            module.key.weight.mul_(1.5)
    assert pair.missed() == Counter()
    pair.check_kept()


def test_a_replayed_class_leaves_the_weights_alone() -> None:
    module = BY_NAME["AppendLast"].build()
    before = copy.deepcopy(module.state_dict())
    replay = cadence_fx.ExactShapeReplay(module)
    for _ in range(3):
        replay(torch.randn(2, 3, 8), torch.randn(2, 4, 8))
    for name, value in module.state_dict().items():
        assert_same(value, before[name], name)
