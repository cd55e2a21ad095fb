"""The certificate on several inputs: what the first data does not show, what is not compared, what is put back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.passes.infra.pass_base import PassResult

import cadence_fx
import cadence_fx.graph
from cadence_fx import Clock, Contract, KeepLast, Region
from cadence_fx.passes import PassContext, default_passes
from cadence_fx.replay import ExactShapeReplay
from tests.harness import Pair, Ticks, assert_same, compile_with
from tests.streams import BY_NAME, kept
from tests.toys import B, C, Toy

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield


class Replacing:
    """A wrong pass: calls of one operator become something that is the same on the data that comes first."""

    name = "replacing"

    def __init__(self, target: Any, by: Callable[..., Any]) -> None:
        self._target, self._by = target, by

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        found = [node for node in gm.graph.nodes if node.target == self._target]
        for node in found:
            with gm.graph.inserting_before(node):
                node.replace_all_uses_with(self._by(gm.graph, *node.args))
            gm.graph.erase_node(node)
        return PassResult(gm, bool(found))


class Gated(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return self.attend(x, cache.relu()), torch.cat([cache, self.key(x).exp()], 1)[:, -6:]


def notes_with(pass_: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(cadence_fx.graph, "select_passes", lambda choice: [*default_passes(), pass_])
    contract = Contract((Clock("frames", 2),), (kept("cache", 1, 2, KeepLast(6)),))
    step = compile_with(Gated(), contract)
    cadence_fx.warm_up(step, torch.randn(B, 2, C), torch.zeros(B, 2, C))
    report = cadence_fx.report(step)
    assert report["captured_entries"] == report["catalog"] and not report["refusals"]
    return [note for row in report["class_table"] for note in row["notes"] if "dropped" in note]


def test_what_the_first_data_does_not_show_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn begins with zeros, of which a relu seems to do nothing."""
    dropped = notes_with(Replacing(aten.relu.default, lambda graph, x: x), monkeypatch)
    assert any("on random inputs of the same ranges" in note and "cache 2 -> 4" in note for note in dropped)


class Once:
    """A recording that is wrong on some data only, and leaves no trace on the data that came first."""

    static_outputs, nbytes, closed = True, 0, False

    def __init__(self, run: Any, wrong: Callable[[list[Any]], None]) -> None:
        self._run, self._wrong = run, wrong

    def launch(self) -> Any:
        outputs = list(self._run())
        self._wrong(outputs)
        return outputs

    def close(self) -> None:
        self.closed = True


def positive_zeros(outputs: list[Any]) -> None:
    outputs[0] = outputs[0] + 0.0


def no_payloads(outputs: list[Any]) -> None:
    outputs[0] = torch.where(outputs[0].isnan(), math.nan, outputs[0])


@pytest.mark.parametrize(
    ("wrong", "says"), [(positive_zeros, "random inputs"), (no_payloads, "extreme values")], ids=["zeros", "payloads"]
)
def test_a_recording_is_tried_on_signed_zeros_and_on_nans(
    wrong: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cadence_fx.capture.record", lambda run, *_: Once(run, wrong))
    replay = ExactShapeReplay(lambda x: x * 1)
    x = torch.rand(200) + 1
    assert_same(replay(x), x, "eager answer")
    assert replay.ledger.refusals == Counter(certificate=1) and not replay.classes
    assert all(says in detail for detail in replay.ledger.details["certificate"])


def test_streams_are_compared_on_three_inputs() -> None:
    pair = Pair(BY_NAME["AppendLast"])
    report = cadence_fx.report(pair.step)
    assert [row["compared_inputs"] for row in report["class_table"]] == [3] * report["classes"]
    assert f"classes compared with eager: {report['classes']} on 3 inputs" in str(report)


def test_integers_keep_their_values() -> None:
    """Others would be no indices of the table; floats beside them are varied."""
    table = torch.randn(5, 3)
    replay = ExactShapeReplay(lambda index, x: table[index] + x)
    for _ in range(2):
        index, x = torch.tensor([0, 4]), torch.randn(2, 3)
        assert_same(replay(index, x), table[index] + x, "output")
    (entry,) = replay.classes
    assert entry.plan.compared == 3 and entry.plan.notes == ["admitted: as written"]


def test_an_input_that_becomes_an_index_keeps_its_values_and_is_named() -> None:
    table = torch.randn(8, 4)
    replay = ExactShapeReplay(lambda pitch, x: table[(pitch * 7).long()] + x)
    for _ in range(2):
        pitch, x = torch.rand(3), torch.randn(3, 4)
        assert_same(replay(pitch, x), table[(pitch * 7).long()] + x, "output")
    (entry,) = replay.classes
    assert entry.plan.compared == 3  # the other input is varied
    (note,) = [note for note in entry.plan.notes if "not varied" in note]
    assert note.endswith(": leaf 0")


def test_inputs_on_which_eager_raises_compare_nothing() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.histc(x, 8)  # has no bins for numbers without an end

    replay = ExactShapeReplay(f)
    for _ in range(2):
        x = torch.randn(30)
        assert_same(replay(x), f(x), "output")
    (entry,) = replay.classes
    assert entry.plan.compared == 2
    assert "not compared on inputs with extreme values: eager raises RuntimeError" in entry.plan.notes
    assert cadence_fx.report(replay)["class_table"][0]["compared_inputs"] == 2


def test_inputs_on_which_eager_does_not_repeat_compare_nothing() -> None:
    runs = Ticks()

    def f(x: Tensor) -> Tensor:
        return torch.where(x.isnan(), 1 + runs.next(), x * 2)

    replay = ExactShapeReplay(f)
    for _ in range(2):
        x = torch.randn(30)
        assert_same(replay(x), x * 2, "output")
    (entry,) = replay.classes
    assert entry.plan.compared == 2
    assert "not compared on inputs with extreme values: eager does not repeat output 0" in entry.plan.notes


def test_capture_leaves_arguments_states_and_generators_as_one_eager_call_does() -> None:
    def f(x: Tensor, held: Tensor) -> Tensor:
        held.add_(x.sum())
        return x.mul_(2) + held

    held, twin = torch.zeros(3), torch.zeros(3)
    replay = ExactShapeReplay(f, aliased=[held])
    x = torch.randn(3)
    copy, state = x.clone(), torch.get_rng_state()
    assert_same(replay(x, held), f(copy, twin), "output")
    assert_same(x, copy, "the staged argument")
    assert_same(held, twin, "the aliased argument")
    assert torch.equal(torch.get_rng_state(), state)
    assert replay.classes[0].plan.compared == 3


class ReadsWorkspace(Toy):
    """Attends over all of a workspace that is declared to mean nothing, behind a mask: what is there must be finite."""

    work: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("work", torch.zeros(B, 12, C), persistent=False)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        raw = torch.cat([cache, self.key(x)], 1)
        self.work[:, : raw.size(1)] = raw
        mask = torch.zeros(12).masked_fill(torch.arange(12) >= raw.size(1), -math.inf)
        weights = torch.softmax(self.query(x) @ self.work.transpose(1, 2) + mask, -1)
        return weights @ self.work, raw[:, -6:]


def test_workspaces_hold_nothing_odd_afterwards() -> None:
    workspace = Region("work", attribute="work", axis=1, clock="frames", retention=KeepLast(6), lifetime="unit")
    module = ReadsWorkspace()
    contract = Contract((Clock("frames", 2),), (kept("cache", 1, 2, KeepLast(6)), workspace))
    step = compile_with(module, contract)
    x, cache = torch.randn(B, 2, C), torch.randn(B, 2, C)
    cadence_fx.warm_up(step, x, cache)
    assert module.work.isfinite().all()
    assert cadence_fx.report(step)["class_table"][0]["compared_inputs"] == 3
    for _ in range(4):
        y, cache = step(torch.randn(B, 2, C), cache)
        assert y.isfinite().all()
