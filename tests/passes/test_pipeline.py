"""The runner: order, copies, failures by name, and what is logged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx

from cadence_fx.errors import NotCapturable, PassFailed
from cadence_fx.passes import PassContext, PassResult, default_passes, pipeline, register_pass, run_passes
from cadence_fx.passes.graphs import GraphFacts
from tests.passes.toolbox import trace

X = torch.randn(3)


class Negate:
    name = "negate"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
            node.target = torch.ops.aten.sub.Tensor
        return PassResult(gm, True)


class Idle:
    name = "idle"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        return PassResult(gm, False)


class Broken(Idle):
    name = "broken"

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        raise self.error


class Demanding(Idle):
    name = "demanding"

    def requires(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        raise ValueError("the moon is not full")


def graph() -> fx.GraphModule:
    return trace(lambda x: (x + 1,), X)


def test_graph_given_is_not_changed() -> None:
    gm = graph()
    before = gm.code
    assert torch.equal(run_passes(gm, PassContext(), [Negate()])(X)[0], X - 1)
    assert gm.code == before


def test_tensors_are_shared_with_the_graph_given() -> None:
    """A copy of a weight would not follow the weight."""
    gm = trace(lambda x: (x + torch.tensor([1.0, 2.0, 3.0]),), X)
    name = next(node.target for node in gm.graph.nodes if node.op == "get_attr")
    assert getattr(run_passes(gm, PassContext(), []), name) is getattr(gm, name)


def test_failure_names_the_pass_and_those_before_it() -> None:
    with pytest.raises(PassFailed, match="'broken' failed: KeyError.*had run before it: idle, negate") as caught:
        run_passes(graph(), PassContext(), [Idle(), Negate(), Broken(KeyError("x"))])
    assert caught.value.before == ("idle", "negate") and isinstance(caught.value.__cause__, KeyError)


def test_requirement_that_does_not_hold() -> None:
    with pytest.raises(PassFailed, match="'demanding' failed: ValueError: the moon is not full"):
        run_passes(graph(), PassContext(), [Demanding()])


class Edits(Idle):
    """Changes what the graph takes and returns, and says nothing of it."""

    name = "edits"

    def __init__(self, edit: Callable[[fx.Graph], object]) -> None:
        self.edit = edit

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        self.edit(gm.graph)
        return PassResult(gm, False)


def set_results(graph: fx.Graph, results: Any) -> None:
    graph.output_node().args = (results,)


def first_result(graph: fx.Graph) -> Any:
    return graph.output_node().args[0][0]  # type: ignore[index]


def drop_input(graph: fx.Graph) -> None:
    unused = graph.find_nodes(op="placeholder")[1]
    graph.erase_node(unused)


def add_input(graph: fx.Graph) -> None:
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        graph.placeholder("another")


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (
            lambda graph: set_results(graph, (first_result(graph),)),
            "the graph returns a list of 1, and returned a list of 2",
        ),
        (
            lambda graph: set_results(graph, (first_result(graph),) * 3),
            "the graph returns a list of 3, and returned a list of 2",
        ),
        (lambda graph: set_results(graph, first_result(graph)), "the graph returns no list, and returned a list of 2"),
        (drop_input, "the graph takes x_1, and took x_1, y_1"),
        (add_input, "the graph takes x_1, y_1, another, and took x_1, y_1"),
    ],
    ids=["drops a result", "adds one", "no list", "drops an input", "adds one"],
)
def test_a_pass_that_changes_what_the_graph_takes_or_returns(edit: Callable[[fx.Graph], object], why: str) -> None:
    gm = trace(lambda x, y: (x + 1, x * 2), X, X)
    with pytest.raises(PassFailed, match=f"'edits' failed: .*{why}"):
        run_passes(gm, PassContext(), [Idle(), Edits(edit)])


@pytest.mark.parametrize("error", [None, KeyError("x"), NotCapturable("host_read", "item")])
def test_a_pass_that_leaves_modes_changed(error: Exception | None) -> None:
    def leave(graph: fx.Graph) -> None:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float64)
        if error is not None:
            raise error

    what = "leaves grad mode, default dtype changed" if error is None else "x|item"
    expected = NotCapturable if isinstance(error, NotCapturable) else PassFailed
    with torch.no_grad():
        with pytest.raises(expected, match=what):
            run_passes(graph(), PassContext(), [Edits(leave), Broken(AssertionError("it goes on"))])
        assert not torch.is_grad_enabled() and torch.get_default_dtype() is torch.float32


def test_refusal_goes_through_unchanged() -> None:
    with pytest.raises(NotCapturable):
        run_passes(graph(), PassContext(), [Broken(NotCapturable("host_read", "item"))])


def test_default_order() -> None:
    assert [pass_.name for pass_ in default_passes()] == [
        "hoist_host_reads",
        "fold_host_constants",
        "split_host",
        "constant_writes",
        "merge_common",
        "forward_stores",
        "elide_copies",
        "reinplace_retention",
        "spell_casts",
        "hoist_slow",
        "batch_copies",
        "cleared_products",
        "late_writes",
        "verify_capturable",
        "parallel_branches",
    ]


def test_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_registered", [])
    register_pass(Negate())
    assert default_passes()[0].name == "negate"
    assert torch.equal(run_passes(graph(), PassContext())(X)[0], X - 1)
    with pytest.raises(ValueError, match="'negate' is already registered"):
        register_pass(Negate())
    with pytest.raises(TypeError, match="called as"):
        register_pass(object())  # type: ignore[arg-type]


def test_debug_switch_shows_both_graphs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_passes(graph(), PassContext(), [Negate()])
    assert not capsys.readouterr().err
    monkeypatch.setenv("CADENCE_DEBUG_PASSES", "1")
    run_passes(graph(), PassContext(), [Negate(), Idle()])
    shown = capsys.readouterr().err
    assert "negate: aten.add.Tensor -1, aten.sub.Tensor +1" in shown
    assert "--- before" in shown and "--- after" in shown and "idle: unchanged" in shown


def test_facts_are_shared_until_a_pass_changes_the_graph() -> None:
    """What a pass of somebody else's says it has not changed is looked at again."""
    seen: list[GraphFacts] = []

    class Look:
        name = "look"

        def __init__(self, modified: bool) -> None:
            self._modified = modified

        def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
            seen.append(ctx.facts_of(gm.graph))
            return PassResult(gm, self._modified)

    class Own(Look):
        __module__ = "cadence_fx.passes.look"

    ctx = PassContext()
    looks = [Own(False), Own(True), Own(False), Look(False), Own(False)]
    gm = run_passes(trace(lambda x: (x + 1,), torch.zeros(2)), ctx, looks)
    assert seen[0] is seen[1] is not seen[2]
    assert seen[2] is seen[3] is not seen[4]
    assert ctx.facts_of(gm.graph) is not ctx.facts_of(gm.graph)  # outside of the runner nobody tells of changes
