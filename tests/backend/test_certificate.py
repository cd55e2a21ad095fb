"""What stands between a wrong rewrite and the user: the certificate at capture, and the audit afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.passes.infra.pass_base import PassResult

import cadence_fx
import cadence_fx.graph
from cadence_fx import Clock, Contract, KeepLast, Region, ways
from cadence_fx.errors import AuditMismatch, ContractError
from cadence_fx.lookup import program_of
from cadence_fx.passes import PassContext, default_passes, pipeline
from tests.harness import Pair, Ticks, compile_with
from tests.streams import BY_NAME


@pytest.fixture(autouse=True)
def _serving() -> None:
    torch.set_grad_enabled(False)


class Rounded:
    """A tempting pass: the same value up to rounding. softmax(x) becomes softmax(x + 1): equal on paper."""

    def __init__(self, name: str = "rounded") -> None:
        self.name = name

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        changed = False
        for node in list(gm.graph.nodes):
            if node.op == "call_function" and "softmax" in str(node.target):
                with gm.graph.inserting_before(node):
                    shifted = gm.graph.call_function(torch.ops.aten.add.Scalar, (node.args[0], 1.0))
                shifted.meta["val"] = node.args[0].meta["val"]
                node.replace_input_with(node.args[0], shifted)
                changed = True
        return PassResult(gm, changed)


class Harmless:
    name = "harmless"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        ctx.notes.append("harmless was here")
        return PassResult(gm, True)


class Exploding:
    name = "exploding"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        raise ZeroDivisionError("in the pass")


def with_pass(pass_: Any, monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr(cadence_fx.graph, "select_passes", lambda choice: [*default_passes(), pass_])
    return Pair(BY_NAME["AppendLast"])


def notes(pair: Pair) -> list[str]:
    return [note for row in cadence_fx.report(pair.step)["class_table"] for note in row["notes"]]


def test_a_pass_that_changes_bytes_is_dropped_and_the_class_served_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = with_pass(Rounded(), monkeypatch)
    for _ in range(8):
        pair.call()
    assert pair.missed() == Counter()
    assert any(note.startswith("rewritten in place dropped: ") and "differs from eager" in note for note in notes(pair))
    assert "admitted: rewritten in place without rounded" in notes(pair)
    assert len({a for seen in pair.addresses.values() for a in seen}) == 1


def test_of_several_passes_the_one_at_fault_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_registered", [Harmless(), Rounded(), Exploding()])
    pair = Pair(BY_NAME["AppendLast"])
    for _ in range(8):
        pair.call()
    found = notes(pair)
    assert pair.missed() == Counter()
    assert any("'exploding' failed" in note for note in found)
    assert "harmless was here" in found
    assert found.count("admitted: rewritten in place without rounded") == 4


def test_where_two_passes_are_wrong_neither_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_registered", [Rounded(), Rounded("again")])
    pair = Pair(BY_NAME["AppendLast"])
    for _ in range(8):
        pair.call()
    assert pair.missed() == Counter()
    admitted = [note for note in notes(pair) if note.startswith("admitted: rewritten in place without rounded, again")]
    assert len(admitted) == 4


class Leaves(Harmless):
    """Leaves something behind that makes a class impossible, or its certificate fail, long after it has run."""

    name = "leaves"

    def __init__(self, leave: Callable[[fx.Graph], object]) -> None:
        self.leave = leave

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        self.leave(gm.graph)
        return super().__call__(gm, ctx)


def drop_a_result(graph: fx.Graph) -> None:
    graph.output_node().args = (graph.output_node().args[0][1:],)  # type: ignore[index]


@pytest.mark.parametrize(
    ("leave", "why"),
    [
        (drop_a_result, "the graph returns a list of 1, and returned a list of 2"),
        (lambda graph: torch.set_grad_enabled(True), "it leaves grad mode changed"),
        (lambda graph: torch.set_default_dtype(torch.float64), "it leaves default dtype changed"),
        (lambda graph: torch.set_autocast_enabled("cpu", True), "it leaves autocast changed"),
        (lambda graph: torch.set_default_device("meta"), "it leaves function modes, default device changed"),
    ],
    ids=["result", "grad", "dtype", "autocast", "device"],
)
def test_a_pass_that_leaves_something_behind_is_named_and_left_out(
    leave: Callable[[fx.Graph], object], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_registered", [Leaves(leave)])
    pair = Pair(BY_NAME["AppendLast"])
    for _ in range(8):
        pair.call()
    assert pair.missed() == Counter()
    assert notes(pair).count("admitted: rewritten in place") == 4
    assert sum("the pass 'leaves' failed: " in note and why in note for note in notes(pair)) == 4


class Writing:
    """Writes an argument of the caller, which no recording may."""

    name = "writing"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        x = gm.graph.find_nodes(op="placeholder")[-1]
        last = gm.graph.output_node()
        with gm.graph.inserting_before(last):
            gm.graph.call_function(torch.ops.aten.zero_.default, (x,)).meta["val"] = x.meta["val"]
        return PassResult(gm, True)


def test_a_pass_that_makes_a_class_impossible_to_record_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_registered", [Writing()])
    pair = Pair(BY_NAME["AppendLast"])
    for _ in range(8):
        pair.call()
    assert pair.missed() == Counter()
    assert notes(pair).count("admitted: rewritten in place without optional passes") == 4
    assert any(note.startswith("with the passes that can be left out: ") for note in notes(pair))


def test_an_admitted_class_keeps_its_graph_and_no_other() -> None:
    pair = Pair(BY_NAME["AppendLast"])
    for _, table in program_of(pair.step, "test").graphs:
        for entry in table.classes.values():
            assert [way.name for way in entry.plan.ways] == ["rewritten in place"]


class Replaces:
    """Puts what `make` makes in the place of the first result."""

    def __init__(self, make: Callable[[fx.Graph, fx.Node, list[fx.Node]], Any]) -> None:
        self.name = "replaces"
        self.make = make

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        last = gm.graph.output_node()
        results = list(last.args[0])  # type: ignore[arg-type]
        with gm.graph.inserting_before(last):
            results[0] = self.make(gm.graph, results[0], gm.graph.find_nodes(op="placeholder"))
        last.args = (tuple(results),)
        return PassResult(gm, True)


def call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda arg: arg.meta["val"]))
    return node


def turned(graph: fx.Graph, result: fx.Node, inputs: list[fx.Node]) -> fx.Node:
    """The same elements in other strides."""
    aten = torch.ops.aten
    there = call(graph, aten.transpose.int, result, 1, 2)
    copy = call(graph, aten.contiguous.default, there)
    return call(graph, aten.transpose.int, copy, 1, 2)


class Returns(nn.Module):
    """What a result is, by name: an argument's bytes in memory of its own, and two equal results in two tensors."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.clone(), torch.cat([cache, x], 1)[:, -6:], x.clone()


def returning(make: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Tensor, tuple[Any, ...]]:
    """One call of such a step with a pass that replaces the first result, its input, and what came back."""
    monkeypatch.setattr(cadence_fx.graph, "select_passes", lambda choice: [*default_passes(), Replaces(make)])
    cache = Region("cache", argument="cache", result=1, axis=1, clock="frames", start=2, retention=KeepLast(6))
    step = compile_with(Returns(), Contract((Clock("frames", 2),), (cache,)))
    cadence_fx.warm_up(step, torch.randn(2, 2, 8), torch.randn(2, 2, 8))
    x = torch.randn(2, 2, 8)
    return step, x, step(x, torch.randn(2, 2, 8))


def test_a_pass_that_gives_a_result_other_strides_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    step, x, (y, _, _) = returning(turned, monkeypatch)
    assert y.stride() == x.stride() and y.view(-1).equal(x.view(-1))
    (row, *_) = cadence_fx.report(step)["class_table"]
    assert "admitted: rewritten in place without replaces" in row["notes"]
    assert any("output 0 (strides (16, 1, 2), not (16, 8, 1)) differs from eager" in note for note in row["notes"])


def test_a_pass_that_gives_a_result_memory_of_an_argument_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host the caller would hold the buffer that the next call fills."""
    step, x, (y, state, _) = returning(lambda graph, result, inputs: inputs[0], monkeypatch)
    before = y.clone()
    step(torch.randn(2, 2, 8), state)
    assert y.equal(before) and y.equal(x)
    (row, *_) = cadence_fx.report(step)["class_table"]
    assert any("output 0 (memory argument 0's, not its own) differs from eager" in note for note in row["notes"])


def test_a_pass_that_makes_one_result_of_two_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(graph: fx.Graph, result: fx.Node, inputs: list[fx.Node]) -> fx.Node:
        return graph.output_node().args[0][2]  # type: ignore[index,return-value]

    step, x, (y, _, again) = returning(other, monkeypatch)
    y.zero_()
    assert again.equal(x)
    (row, *_) = cadence_fx.report(step)["class_table"]
    assert any("(memory that of outputs 0, 2, not its own) differs from eager" in note for note in row["notes"])


def test_a_pass_that_makes_a_result_no_tensor_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    step, x, (y, _, _) = returning(lambda graph, result, inputs: None, monkeypatch)
    assert y.equal(x)
    (row, *_) = cadence_fx.report(step)["class_table"]
    assert any("output 0 (NoneType, not Tensor) differs from eager" in note for note in row["notes"])


def test_a_plain_callable_that_returns_other_numbers_is_not_reproducible() -> None:
    numbers = Ticks()
    replay = cadence_fx.ExactShapeReplay(lambda x: (x + 1, numbers.next()))
    first, second = replay(torch.zeros(2))[1], replay(torch.zeros(2))[1]
    assert first != second
    assert dict(replay.ledger.refusals) == {"not_reproducible": 1}


def test_passes_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_registered", [Harmless(), Rounded()])
    for choice, admitted in (
        ({"rounded": False}, "admitted: rewritten in place"),
        (["harmless"], "admitted: rewritten in place"),
        ([], "admitted: rewritten in place"),
        (None, "admitted: rewritten in place without rounded"),
    ):
        pair = Pair(BY_NAME["AppendLast"], passes=choice)
        for _ in range(4):
            pair.call()
        assert notes(pair).count(admitted) == 4
        assert ("harmless was here" in notes(pair)) == (choice != [])


@pytest.mark.parametrize(
    "choice", [{"roundet": True}, ["roundet"], "rounded", {"split_host": False}, {"rounded": 1}, 3]
)
def test_a_choice_that_cannot_be_is_refused(choice: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_registered", [Rounded()])
    with pytest.raises(ContractError, match="options: passes: "):
        Pair(BY_NAME["AppendLast"], passes=choice).call()


def test_a_pass_that_raises_is_named_and_the_class_served_unrewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = with_pass(Exploding(), monkeypatch)
    for _ in range(8):
        pair.call()
    assert pair.missed() == Counter()
    assert any("'exploding' failed: ZeroDivisionError" in note for note in notes(pair))


def test_a_class_whose_every_form_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to run but the stock code, and that is what runs."""

    def wrong(forward: Any, uses: Any) -> Any:
        def run(*everything: Any) -> list[Any]:
            outputs = list(forward(*everything[: len(everything) - 1]))
            everything[-1].copy_(outputs[1])
            return [outputs[0] + 1, everything[-1]]

        return run

    monkeypatch.setattr(ways, "written_back", wrong)
    monkeypatch.setattr(ways, "is_needed", lambda pass_: True)
    pair = with_pass(Rounded(), monkeypatch)
    for _ in range(8):
        pair.call()
    assert pair.missed() == Counter({"certificate": 8})
    assert cadence_fx.report(pair.step)["refusals"] == {"certificate": 4}


def corrupt(pair: Pair, what: str, byte: int) -> None:
    """From now on every launch flips one byte of an output or of the new state, after the kernels have run."""
    program = program_of(pair.step, "test")
    for _, table in program.graphs:
        for entry in table.classes.values():
            launch, use = entry.recording.launch, entry.plan.regions[0]

            def flipped(launch: Any = launch, use: Any = use) -> Any:
                outputs = launch()
                target = use.carry.view(use.next_extent) if what == "state" else outputs[0]
                target.view(-1).view(torch.uint8)[byte] ^= 1
                return outputs

            entry.recording.launch = flipped  # type: ignore[method-assign]


@pytest.mark.parametrize("what", ["state", "output"])
def test_an_audit_stops_at_the_first_wrong_byte(what: str) -> None:
    pair = Pair(BY_NAME["AppendLast"])
    with cadence_fx.audit(pair.step) as ledger:
        for _ in range(4):
            pair.call()
        corrupt(pair, what, byte=4 * 8 * 2)  # the first element of frame 2 of batch 0; a frame has 8 elements
        with pytest.raises(AuditMismatch) as caught:
            pair.call()
    error = caught.value
    assert (ledger.calls, error.call) == (5, 5)
    assert ("region cache" if what == "state" else "output 0") in error.where
    assert (error.axis, error.start, error.stop) == (1 if what == "state" else error.axis, error.start, error.stop)
    if what == "state":
        assert (error.start, error.stop) == (2, 3)
    assert bytes(a ^ b for a, b in zip(error.expected, error.actual, strict=True)) == b"\x01\0\0\0"
    assert "call 5" in str(error)


def test_an_audit_stops_at_strides_that_are_not_eagers() -> None:
    pair = Pair(BY_NAME["AppendLast"])
    program = program_of(pair.step, "test")
    for _, table in program.graphs:
        for entry in table.classes.values():
            launch = entry.recording.launch

            def laid_otherwise(launch: Any = launch) -> Any:
                y, *rest = launch()
                return [y.transpose(1, 2).contiguous().transpose(1, 2), *rest]

            entry.recording.launch = laid_otherwise  # type: ignore[method-assign]
    with cadence_fx.audit(pair.step), pytest.raises(AuditMismatch, match="output 0") as caught:
        pair.call()
    assert caught.value.expected == b"strides (24, 8, 1)" and caught.value.actual == b"strides (24, 1, 3)"


def test_without_an_audit_nobody_would_have_noticed() -> None:
    """The control of the test above: the corruption is real, and only the comparison with eager sees it."""
    pair = Pair(BY_NAME["AppendLast"])
    pair.call()
    corrupt(pair, "output", byte=0)
    with pytest.raises(AssertionError, match="bytes differ from eager"):
        pair.call()


def test_the_ledger_of_an_audit_holds_a_hash_for_each_call() -> None:
    hashes = []
    for _ in range(2):
        pair = Pair(BY_NAME["PromptAppend"])
        with cadence_fx.audit(pair.step) as ledger:
            for _ in range(5):
                pair.call()
        hashes.append(ledger.hashes)
        assert ledger.tensors > 10
    assert hashes[0] == hashes[1] and len(set(hashes[0])) == 5


def test_a_baseline_that_does_not_repeat_is_not_blamed_on_the_replay() -> None:
    """Eager itself does not repeat: it takes a number from where nobody looks."""
    numbers = Ticks()
    replay = cadence_fx.ExactShapeReplay(lambda x: x * numbers.next())
    x = torch.randn(4)
    replay(x)
    assert dict(replay.ledger.refusals) == {"not_reproducible": 1}
    assert not replay.classes
