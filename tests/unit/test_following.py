"""Following states through traced calls and through bytes, and the policies that explain what is found."""

from __future__ import annotations

from types import FunctionType
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from cadence_fx import KeepLast, PromptPlusLast
from cadence_fx._torch_calls import NotTraced, trace_call
from cadence_fx.calls import Live, Place, Slot
from cadence_fx.following import Follower, Lost, Seen, agree, fitting, frames_by_bytes
from cadence_fx.joined import Frames
from cadence_fx.leaves import accessor, kept_numbers, kept_tensors, tensor_paths
from cadence_fx.retention import Retention


def frames_of(policy: Retention, old: int, added: int) -> Frames:
    spans = policy.survivors(old, added)
    assert spans is not None
    return tuple((s.source == "old", i) for s in spans for i in range(s.start, s.stop))


def seen(policy: Retention, start: int, added: int) -> list[Seen]:
    """Every call of a stream."""
    calls: list[Seen] = []
    extent = start
    while not calls or calls[-1].old != calls[-1].new:
        following = policy.attended(extent + added)
        calls.append(Seen(extent, following, frames_of(policy, extent, added)))
        extent = following
    return calls


POLICIES = [
    KeepLast(7),
    KeepLast(7, "prepend"),
    PromptPlusLast(3, 4),
    PromptPlusLast(3, 4, "prepend"),
    PromptPlusLast(7, 0),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("start, added", [(0, 2), (3, 3), (1, 6), (0, 9)])
def test_what_a_policy_keeps_leads_back_to_it(policy: Retention, start: int, added: int) -> None:
    calls = seen(policy, start, added)
    found = fitting(calls, 7, added)
    assert found
    for each in found:  # others may fit, which keep the same in all of these calls
        assert all(frames_of(each, call.old, added) == call.frames for call in calls)
    assert policy in found


def test_nothing_fits_frames_that_no_policy_keeps() -> None:
    calls = seen(KeepLast(4), 0, 2)
    odd = Seen(4, 4, ((True, 0), (True, 2), (False, 0), (False, 1)))
    assert not fitting([*calls, odd], 4, 2)
    assert not fitting(calls, 4, 3)  # nor another stride
    assert not fitting(calls, 5, 2)  # nor another bound


def test_bytes_tell_frames_apart_or_nothing() -> None:
    old, new = torch.randn(1, 4, 3), torch.randn(1, 2, 3)
    after = torch.cat([old[:, 2:], new], 1)
    assert frames_by_bytes(old, after, 1) == ((True, 2), (True, 3), (False, None), (False, None))
    assert frames_by_bytes(torch.zeros(1, 4, 3), after, 1) is None  # equal frames
    assert frames_by_bytes(old[..., :0], after[..., :0], 1) is None  # frames without bytes


def test_a_fresh_frame_may_have_the_bytes_of_an_old_one() -> None:
    graph: Frames = ((True, 1), (False, None))
    assert agree(graph, ((True, 1), (False, None))) and agree(graph, ((True, 1), (True, 0)))
    assert not agree(graph, ((True, 0), (False, None))) and not agree(graph, ((False, None), (False, None)))


def line_of(function: FunctionType, after: int) -> str:
    """`file:line` of a line of a function, counted from its first."""
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno + after}"


class Window(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(3)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raw = torch.cat([cache, x * self.scale], 1)
        return x, raw[:, -5:], torch.cumsum(raw, 1)


def test_a_traced_call_is_followed_to_frames_and_lines() -> None:
    live = Live(Window())
    arguments = live.bind((torch.randn(1, 2, 3), torch.randn(1, 4, 3)), {})
    follower = Follower(live.trace(arguments, []))
    cache = Place("argument", ("cache",))
    state = follower.graph.after(Slot(cache, (1,), True))
    assert follower.frames(cache, state, 1) == ((True, 1), (True, 2), (True, 3), (False, 0), (False, 1))
    assert follower.line(state) == line_of(cast(FunctionType, Window.forward), 2)
    assert isinstance(follower.frames(cache, state, 0), Lost)
    assert follower.graph.traced.same[0] == 0  # x itself


def test_sizes_may_be_symbols() -> None:
    live = Live(Window())
    arguments = live.bind((torch.randn(1, 2, 3), torch.randn(1, 0, 3)), {})
    x, cache = (Place("argument", (name,)) for name in ("x", "cache"))
    graph = live.trace(arguments, [], {x: [1], cache: [1]})
    new, old = (graph.traced.symbols[graph.places.index(place), 1] for place in (x, cache))
    sizes = graph.traced.sizes[graph.after(Slot(cache, (1,), True))]
    assert sizes is not None and sizes[1] == new + old


def test_what_cannot_be_traced_names_the_line() -> None:
    def reads(x: Tensor) -> list[Tensor]:
        return [x + x.sum().item()]

    with pytest.raises(NotTraced) as caught:
        trace_call(reads, [torch.randn(2)])
    assert caught.value.where == line_of(cast(FunctionType, reads), 1)


class Kept:
    def __init__(self) -> None:
        self.ring, self.count = torch.zeros(2), 3


class Keeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept, self.lists = Kept(), [{"k": torch.ones(1)}]
        self.again, self.weight = self.kept, nn.Parameter(torch.ones(1))
        self.layers = nn.ModuleList([Window()])


def test_where_tensors_and_numbers_are() -> None:
    assert set(kept_tensors(Keeper())) == {("layers", 0, "scale"), ("kept", "ring"), ("lists", 0, "k")}
    assert kept_numbers(Keeper()) == {("kept", "count"): 3}
    assert tensor_paths({"a": [1, torch.ones(1)], "b": (torch.ones(1),)}) == [("a", 1), ("b", 0)]
    assert [accessor(path) for path in ((), (1,), (1, "k", 0, "*"), ("y",))] == ["0", "1", "1['k'][0][*]", "['y']"]
