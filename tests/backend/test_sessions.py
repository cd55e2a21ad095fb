"""Long sessions of random actions, as users mix them: calls, odd chunks, resets, edits, copies, suspended streams."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.harness import Pair, assert_same
from tests.streams import BY_NAME, Stream

ACTIONS = 120


def edited(state: Any, how: str) -> Any:
    """The state after the user touched it: the same tensors written, copies of them, or strided copies."""
    if how == "write":
        for tensor in pytree.tree_leaves(state):
            tensor.mul_(0.5)
        return state
    if how == "copy":
        return pytree.tree_map_only(Tensor, lambda t: t.clone(), state)
    return pytree.tree_map_only(Tensor, lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), state)


class Session:
    """One pair, the start state that is reused, and the streams that wait."""

    def __init__(self, stream: Stream, seed: int) -> None:
        self.pair, self.random = Pair(stream), random.Random(seed)
        self.start = self.pair.live.state
        self.start_bytes = copy.deepcopy(self.start)
        self.suspended: list[tuple[Any, Any]] = []

    def act(self, action: str, number: int) -> None:
        pair, stream = self.pair, self.pair.stream
        if action == "call":
            pair.call()
        elif action == "flush" and stream.flushes:
            pair.call(self.random.choice(stream.flushes))
            pair.restart(number)
        elif action == "odd":
            (clock,) = stream.calls[0]
            pair.call({clock: self.random.choice((2, 5))})
        elif action == "reset":
            pair.restart(number)
        elif action == "start again":
            pair.live.state, pair.eager.state = self.start, copy.deepcopy(self.start_bytes)
        elif action == "suspend":
            self.suspended.append((pair.live.state, pair.eager.state))
            pair.restart(number)
        elif action == "resume" and self.suspended:
            i = self.random.randrange(len(self.suspended))
            (pair.live.state, pair.eager.state), self.suspended[i] = (
                self.suspended[i],
                (pair.live.state, pair.eager.state),
            )
        elif action in ("write", "copy", "strided") and pair.live.state is not self.start:
            pair.live.state, pair.eager.state = edited(pair.live.state, action), edited(pair.eager.state, action)

    def check(self) -> None:
        """All that is still held has eager's bytes."""
        self.pair.check_kept()
        for live, eager in [*self.suspended, (self.start, self.start_bytes)]:
            for a, e in zip(pytree.tree_leaves(live), pytree.tree_leaves(eager), strict=True):
                assert_same(a, e, "a state that is held")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["AppendLast", "PromptPrepend", "PartialFlush", "LayerList", "SolverStack"])
def test_random_session(name: str, seed: int) -> None:
    names = ["call", "flush", "odd", "reset", "start again", "suspend", "resume", "write", "copy", "strided"]
    with torch.no_grad():
        session = Session(BY_NAME[name], seed)
        for number in range(ACTIONS):
            session.act(session.random.choices(names, [40, 5, 1, 3, 3, 4, 6, 3, 3, 2])[0], number)
        session.check()
        pair = session.pair
        assert pair.since("replays") + pair.missed().total() == pair.calls
        assert pair.since("replays") > pair.calls // 2
