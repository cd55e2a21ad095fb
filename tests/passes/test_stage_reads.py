"""What a counter picks out of a table comes in like any argument. The graphs are Dynamo's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from cadence_fx._torch import patient_tracing
from cadence_fx.passes import stage_reads
from cadence_fx.passes.stage_reads import STAGED
from tests.passes.toolbox import assert_same_bytes, flat_outputs

PE = torch.randn(1, 40, 3)


class Counter(torch.nn.Module):
    """``rule(module, x)`` with a counter ``t`` and a table ``pe`` on the module."""

    def __init__(self, rule: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.rule, self.t = rule, 2
        self.pe: Tensor
        self.register_buffer("pe", PE.clone())

    def forward(self, x: Tensor) -> object:
        return self.rule(self, x)


def dynamo(rule: Callable[[Any, Tensor], object]) -> tuple[fx.GraphModule, list[Any]]:
    """Dynamo's graph once it has made a symbol of the counter, with the arguments of one call."""
    seen: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            seen.append((gm, list(args)))
            return gm.forward(*args)

        return run

    module = Counter(rule)
    step = torch.compile(module, backend=backend)
    with torch.no_grad(), patient_tracing():
        for t in (2, 5, 7):
            module.t = t
            step(torch.ones(1, 2, 3))
    return seen[-1]


def split(rule: Callable[[Any, Tensor], object]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split, and compare with Dynamo's own graph at several counts."""
    gm, args = dynamo(rule)
    code = gm.code
    found = stage_reads(gm, {names(gm)[i] for i, a in enumerate(args) if isinstance(a, int)}, tables(gm))
    assert found is not None and gm.code == code
    first, rest = found
    for t in (0, 3, 21, 38):
        given = [t if isinstance(a, int) else a for a in args]
        assert_same_bytes(flat_outputs(rest(*given, *first(*given))), flat_outputs(gm(*given)))
    added = rest.graph.find_nodes(op="placeholder")[len(args) :]
    assert all(node.meta[STAGED] for node in added) and len(added) == len(first(*args))
    return first, rest


def names(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.find_nodes(op="placeholder")]


def tables(gm: fx.GraphModule) -> set[str]:
    return {name for name in names(gm) if "pe" in name}


def kept(rule: Callable[[Any, Tensor], object]) -> None:
    gm, args = dynamo(rule)
    assert stage_reads(gm, {names(gm)[i] for i, a in enumerate(args) if isinstance(a, int)}, tables(gm)) is None


def operators(gm: fx.GraphModule) -> list[str]:
    return [getattr(n.target, "__name__", str(n.target)) for n in gm.graph.nodes if n.op.startswith("call_")]


def test_slice() -> None:
    first, rest = split(lambda m, x: x + m.pe[:, m.t : m.t + 2])
    assert operators(first) == ["add", "getitem"] and operators(rest) == ["add"]


@pytest.mark.parametrize(
    "rule",
    [
        lambda m, x: x * m.pe[:, (m.t * 2) % 8 : (m.t * 2) % 8 + 2],
        lambda m, x: x * m.pe[0, m.t, None, ...],
        lambda m, x: x * m.pe.narrow(1, m.t, 2).exp(),
        lambda m, x: x * m.pe.select(1, m.t),
        lambda m, x: (x + m.pe[:, m.t : m.t + 2], m.pe[:, m.t : m.t + 2] * 2),
        lambda m, x: x + m.pe[:, m.t : m.t + 2][:, :, :1],
    ],
    ids=["ring", "index", "narrow", "select", "twice", "view_of_view"],
)
def test_spellings(rule: Callable[[Any, Tensor], object]) -> None:
    _, rest = split(rule)
    counters = [n for n in rest.graph.find_nodes(op="placeholder") if isinstance(n.meta["example_value"], torch.SymInt)]
    assert all(not node.users for node in counters)


def test_positions_are_made_first_and_gathered_in_the_graph() -> None:
    first, rest = split(lambda m, x: x + m.pe[:, torch.arange(m.t, m.t + 2)])
    assert "arange" in operators(first) and "arange" not in operators(rest) and "getitem" in operators(rest)


def test_counter_that_is_computed_with_stays() -> None:
    kept(lambda m, x: x * m.t)
    kept(lambda m, x: x[:, : m.t % 2 + 1] + 1)


def test_picked_by_a_tensor_of_the_call() -> None:
    kept(lambda m, x: m.pe[:, x.long().flatten() + m.t])


def test_what_draws_or_computes_is_not_run_first() -> None:
    """A draw out of turn would give every later one another number."""
    kept(lambda m, x: x + torch.rand(m.t)[:1])
    kept(lambda m, x: x + torch.full((2, 3), m.t))


def test_no_counter() -> None:
    kept(lambda m, x: x + m.pe[:, 2:4])
