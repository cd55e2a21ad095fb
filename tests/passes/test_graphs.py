"""Facts of graphs: what aliases what, what writes, what may be dropped, what is constant, what moves bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cadence_fx._torch import traced_view
from cadence_fx.passes.constants import Constants
from cadence_fx.passes.graphs import GraphFacts, erase_dead_code, location, may_write, tensor_val
from cadence_fx.passes.movement import is_movement
from tests.passes.toolbox import trace

X = torch.randn(2, 4)
aten = torch.ops.aten


def nodes(gm: torch.fx.GraphModule) -> dict[str, torch.fx.Node]:
    return {node.name: node for node in gm.graph.nodes}


def calls(gm: torch.fx.GraphModule) -> list[str]:
    return [node.target.__name__ for node in gm.graph.nodes if node.op == "call_function"]


def test_views_alias_and_copies_do_not() -> None:
    gm = trace(lambda x: (x[:, 1:], x.reshape(8), x.T.reshape(8), x.contiguous(), x.T.contiguous(), x + 0), X)
    facts, x = GraphFacts(gm.graph), nodes(gm)["x_1"]
    results = nodes(gm)["output"].args[0]
    assert [facts.aliases(result, x) for result in results] == [True, True, False, True, False, False]  # type: ignore[arg-type,union-attr]


VIEWS: list[tuple[Any, ...]] = [
    (aten.as_strided.default, [2, 3], [1, 2], 1),
    (aten.expand.default, [3, 2, 1, 6]),
    (aten.permute.default, [2, 0, -2]),
    (aten.reshape.default, [2, -1]),
    (aten.reshape.default, [6, 2]),
    (aten.select.int, -1, 2),
    (aten.slice.Tensor, 2, -3, 9223372036854775807),
    (aten.slice.Tensor, 2, 0, 6, 2),
    (aten.slice.Tensor, 2, 4, 4),
    (aten.squeeze.dim, 1),
    (aten.transpose.int, 0, -1),
    (aten.unsqueeze.default, -1),
    (aten.view.default, [12]),
]
MODES = [contextlib.nullcontext, torch.inference_mode, torch.no_grad, FakeTensorMode]


@pytest.mark.parametrize("made_in", MODES[:2])
@pytest.mark.parametrize("traced_in", MODES)
@pytest.mark.parametrize("kind", ["plain", "offset", "turned", "constant", "gradient"])
@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_a_view_is_what_the_tracer_makes_of_it(made_in: Any, traced_in: Any, kind: str, view: tuple[Any, ...]) -> None:
    with made_in():
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        base: Any = mode.from_tensor(torch.zeros(3, 1, 6) if kind == "offset" else torch.zeros(2, 1, 6))
        if kind == "offset":
            base = base[1:]
        elif kind == "turned":
            base = mode.from_tensor(torch.zeros(6, 1, 2)).permute(2, 1, 0)
        elif kind == "constant":
            base.constant = torch.zeros(2, 1, 6)
        elif kind == "gradient" and made_in is not torch.inference_mode:
            base.requires_grad_(True)
    if kind == "turned" and view[0] is aten.view.default:
        pytest.skip("there is no such view, and only its kernel says so")
    with base.fake_mode if traced_in is FakeTensorMode else traced_in():
        assert _traced(traced_view, base, view) == _traced(lambda target, *args: target(*args), base, view)


def _traced(trace_it: Callable[..., Tensor], base: Tensor, view: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Everything that anybody asks of a traced value; None where the tracer refuses."""
    target, *args = view
    try:
        made: Any = trace_it(target, base, *args)
    except (RuntimeError, ValueError):
        return None
    storage = made.untyped_storage()
    where = storage._cdata if storage._cdata == base.untyped_storage()._cdata else "its own"
    geometry = made.shape, made.stride(), made.storage_offset(), made.dtype, made.device, made.layout
    kind = type(made), made.requires_grad, made.is_leaf, made.is_inference(), made.constant is None
    return where, storage.nbytes(), geometry, kind, made.fake_mode


def test_dropout_outside_training_aliases() -> None:
    gm = trace(lambda x: (torch.nn.functional.dropout(x, 0.5, False),), X)
    assert GraphFacts(gm.graph).aliases(nodes(gm)["dropout"], nodes(gm)["x_1"])


def test_writes_go_by_the_schema() -> None:
    def write(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x[0].copy_(y[0])
        return (x.detach_() + y,)

    gm = trace(write, X, X)
    found = {name: [written.name for written in may_write(node)] for name, node in nodes(gm).items()}
    assert {name: written for name, written in found.items() if written} == {"copy_": ["select"]}
    facts = GraphFacts(gm.graph)
    assert facts.writes_to(nodes(gm)["x_1"]) and not facts.writes_to(nodes(gm)["y_1"])


def test_dead_code_goes_effects_stay() -> None:
    def messy(x: Tensor, log: Tensor) -> tuple[Tensor, ...]:
        torch.tanh(x)
        torch.rand(2)  # moves the generator
        torch.zeros(2, 4).copy_(x)  # memory nobody reads
        kept = torch.zeros(2, 4)
        kept[0].copy_(x[0])
        log[1].fill_(1.0)
        return (kept,)

    gm = trace(messy, X, X)
    erase_dead_code(gm.graph)
    assert calls(gm) == [
        "rand.default",
        "zeros.default",
        "select.int",
        "select.int",
        "copy_.default",
        "select.int",
        "fill_.Tensor" if "fill_.Tensor" in calls(gm) else "fill_.Scalar",
    ]


def test_constants() -> None:
    def mixed(x: Tensor) -> tuple[Tensor, ...]:
        steps = torch.arange(4) + 1
        noise = torch.rand(4)
        blank = torch.empty(4)
        counted = torch.zeros(4)
        counted.add_(1)
        return steps + x, noise * 1, blank * 1, counted * 1, torch.tensor([2, 3])[1:] * 1

    gm = trace(mixed, X)
    constants = Constants(gm, GraphFacts(gm.graph))
    known = {name: constants.tensor(node) for name, node in nodes(gm).items() if node.op == "call_function"}
    assert known["add"] is not None and known["add"].tolist() == [1, 2, 3, 4]
    results = [constants.tensor(result) for result in nodes(gm)["output"].args[0]]  # type: ignore[arg-type,union-attr]
    assert [result is not None for result in results] == [False, False, False, False, True]


def test_movement() -> None:
    def mixed(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.cat([x, x]),
            x.split(2, 1)[1],
            x[:, torch.tensor([0, 1])],
            x[:, index],
            torch.cat([x, x.double()]),
            x + 1,
            x.double(),
            torch.layer_norm(x, [4]),
        )

    gm = trace(mixed, X, torch.tensor([0, 1]))
    constants = Constants(gm, GraphFacts(gm.graph))
    results = nodes(gm)["output"].args[0]
    moves = [is_movement(result, constants) for result in results]  # type: ignore[arg-type,union-attr]
    assert moves == [True, True, True, False, False, False, False, False]


def test_location_is_the_innermost_user_line() -> None:
    node = torch.fx.Graph().placeholder("x")
    assert location(node) is None
    node.meta["stack_trace"] = '  File "a.py", line 1, in f\n    g()\n  File "b.py", line 2, in g\n    x + 1\n'
    assert location(node) == 'File "b.py", line 2, in g'


def test_node_without_one_tensor_is_named() -> None:
    with pytest.raises(ValueError, match="node 'x' holds NoneType"):
        tensor_val(torch.fx.Graph().placeholder("x"))
