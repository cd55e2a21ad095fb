"""The clock of each value: the join of what it depends on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cadence_fx.passes.graphs import GraphFacts
from cadence_fx.passes.native_clocks import NativeClock, native_clocks
from tests.passes.toolbox import trace

CONSTANT, PROCESS, CALL = NativeClock
X, W = torch.randn(4), torch.randn(4)


def clocks(function: Callable[..., object], *examples: Tensor) -> dict[str, NativeClock]:
    """By operator, with every argument but the first at a fixed address."""
    gm = trace(function, *examples)
    steady = {node.name for node in gm.graph.find_nodes(op="placeholder")[1:]}
    found = native_clocks(gm, GraphFacts(gm.graph), steady)
    return {node.name: clock for node, clock in found.items() if node.op == "call_function"}


def test_join_of_what_a_value_depends_on() -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return (x.sin() * (w.cos() + torch.arange(4).exp()),)

    assert clocks(step, X, W) == {
        "sin": CALL,
        "cos": PROCESS,
        "arange": CONSTANT,
        "exp": CONSTANT,
        "add": PROCESS,
        "mul": CALL,
    }


def test_tensor_literal_is_a_constant() -> None:
    gm = trace(lambda x: (x + torch.tensor([1.0, 2.0, 3.0, 4.0]).neg(),), X)
    found = native_clocks(gm, GraphFacts(gm.graph), ())
    assert {node.name: clock for node, clock in found.items()}["neg"] == CONSTANT


def test_what_is_drawn_follows_the_call() -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return (x + torch.rand(4).neg() + torch.dropout(w, 0.5, True).exp(),)

    found = clocks(step, X, W)
    assert found["rand"] == found["neg"] == found["dropout"] == found["exp"] == CALL


def test_dropout_outside_training_draws_nothing() -> None:
    assert clocks(lambda x, w: (x + torch.dropout(w, 0.5, False).exp(),), X, W)["exp"] == PROCESS


def test_memory_without_contents_follows_the_call() -> None:
    assert clocks(lambda x: (x + torch.empty(4).zero_() + torch.empty_like(x).mul(0),), X)["mul"] == CALL


def test_what_the_graph_writes_follows_the_call() -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        table = torch.zeros(4)
        table[1:] = 2
        return (x + table.exp() + w.add_(1).sin(),)

    found = clocks(step, X, W)
    assert found["exp"] == found["sin"] == CALL


def test_several_results_of_one_operator() -> None:
    assert clocks(lambda x, w: (x + torch.sort(w)[0].exp(),), X, W)["exp"] == PROCESS
