"""Edits of captured graphs on a device: fewer nodes, the same bytes, and weights that change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cadence_fx
from cadence_fx.captured_graph import DriverGraph
from cadence_fx.lookup import program_of
from cadence_fx.passes import CapturedGraph, EditContext
from cadence_fx.recorder import DevicePool, EditFailed, record
from tests.harness import assert_same, compile_with

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def _serving() -> None:
    torch.set_grad_enabled(False)


class Block(nn.Module):
    """Two convolutions of the size that cuDNN lays out anew, and seven products that cuBLAS splits. The first one's
    input is transposed and the last one is returned, so five are put into cleared memory."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv1d(512, 512, 3) for _ in range(2))
        self.linears = nn.ModuleList(nn.Linear(512, 512) for _ in range(7))

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:  # (2, 50, 512), (2, 512, 2)
        frames = torch.cat([cache, x.transpose(1, 2)], 2)
        y = self.convolutions[0](frames)
        y = self.convolutions[1](torch.cat([cache, y], 2)).transpose(1, 2)
        for linear in self.linears:
            y = linear(y)
        return y, frames[..., -2:]


def compiled(module: nn.Module, passes: Any = None) -> Callable[..., Any]:
    region = cadence_fx.Region(
        "cache", argument="cache", result=1, axis=2, clock="frame", start=2, retention=cadence_fx.KeepLast(2)
    )
    contract = cadence_fx.Contract([cadence_fx.Clock("frame", 50)], [region])
    step = compile_with(module, contract, passes)
    cadence_fx.warm_up(step, torch.randn(2, 50, 512, device=DEVICE), torch.randn(2, 512, 2, device=DEVICE))
    return step


def notes(step: Any) -> list[str]:
    return [note for row in cadence_fx.report(step)["class_table"] for note in row["notes"]]


def check(step: Any, module: nn.Module, calls: int = 4) -> None:
    mine = theirs = torch.randn(2, 512, 2, device=DEVICE)
    for _ in range(calls):
        x = torch.randn(2, 50, 512, device=DEVICE)
        y, mine = step(x, mine)
        expected, theirs = module(x, theirs)
        assert_same(y, expected, "output")
        assert_same(mine, theirs, "cache")


def test_conversions_and_counters_leave_the_graph_and_weights_may_be_written() -> None:
    module = Block().to(DEVICE)
    step = compiled(module)
    found = notes(step)
    assert "admitted: rewritten in place" in found, found
    assert any(note.startswith("keep_conversions: 2 of 2") for note in found), found
    assert any(note.startswith("clear_once: ") for note in found), found
    assert any(note.startswith("cleared_products: 5 products") for note in found), found
    assert any(note.startswith("drop_scalings: 5 kernels") for note in found), found
    check(step, module)
    for parameter in module.parameters():
        parameter.mul_(1.5)
    check(step, module)
    module.load_state_dict({name: torch.randn_like(value) for name, value in module.state_dict().items()})
    check(step, module)
    assert not program_of(step, "test").ledger.misses


def test_edits_can_be_turned_off() -> None:
    module = Block().to(DEVICE)
    step = compiled(module, {"keep_conversions": False, "clear_once": False, "drop_scalings": False})
    assert not any("conversions" in note or "memsets" in note or "left out" in note for note in notes(step))
    check(step, module)


class Wrong:
    """Takes out the last node, which nothing waits for."""

    name = "wrong"

    def __call__(self, graph: CapturedGraph, ctx: EditContext) -> bool:
        graph.remove([node for node in graph.nodes if node.kind == "kernel"][-1])
        return True


class Raising:
    name = "raising"

    def __call__(self, graph: CapturedGraph, ctx: EditContext) -> bool:
        raise ValueError("no")


@pytest.mark.parametrize("edit", [Wrong(), Raising()], ids=lambda e: e.name)
def test_an_edit_that_is_wrong_or_raises_is_dropped(edit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cadence_fx.graph, "select_edits", lambda choice: [edit])
    module = Block().to(DEVICE)
    step = compiled(module)
    assert any(note.startswith("rewritten in place dropped: ") for note in notes(step))
    assert f"admitted: rewritten in place without {edit.name}" in notes(step)
    check(step, module)


def test_a_graph_is_read_with_its_branches() -> None:
    x, side = torch.randn(64, device=DEVICE), torch.cuda.Stream()

    def run() -> list[Tensor]:
        y = x * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = y + 1
        w = y - 1
        torch.cuda.current_stream().wait_stream(side)
        return [z * w]

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    pool = DevicePool.of(DEVICE)
    run()
    with torch.cuda.graph(graph, stream=pool.stream):
        run()
    opened = DriverGraph(graph)
    first, left, right, last = opened.nodes
    assert {id(node) for node in opened.after(first)} == {id(left), id(right)}
    assert {id(node) for node in opened.before(last)} == {id(left), id(right)}
    opened.remove(left)
    assert {id(node) for node in opened.before(last)} == {id(first), id(right)}
    graph.instantiate()
    graph.replay()
    torch.cuda.synchronize()


def test_a_failing_edit_leaves_the_pool_usable() -> None:
    with pytest.raises(EditFailed, match="raising failed: ValueError: no"):
        record(lambda: [torch.ones(4, device=DEVICE) * 2], DEVICE, (), [Raising()], EditContext([], DEVICE))
    recording = record(lambda: [torch.ones(4, device=DEVICE) * 2], DEVICE)
    assert recording.launch()[0].tolist() == [2.0] * 4
