"""The proof of retention in the report: every region and class, with what holds its bytes where it is no proof."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cadence_fx
from cadence_fx import Clock, Contract, KeepLast, Pinned, Region, RetentionMismatch
from cadence_fx.lookup import program_of
from cadence_fx.report import Report
from tests import toys
from tests.harness import assert_same
from tests.streams import BY_NAME, Run, kept
from tests.toys import B, C

PROVED = ["PromptPrepend", "SolverWorkspace", "BufferShift", "LayerAttributes"]


@torch.library.custom_op("tests::stitched", mutates_args=())
def stitched(old: Tensor, new: Tensor) -> Tensor:
    """Nothing of what it does shows in a graph."""
    return torch.cat([old, new], 1)[:, -9:].contiguous()


@stitched.register_fake
def _(old: Tensor, new: Tensor) -> Tensor:
    return old.new_empty(old.shape[0], min(old.shape[1] + new.shape[1], 9), old.shape[2])


class Opaque(toys.Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.ops.tests.stitched(cache, self.key(x))
        return self.attend(x, state), state


CACHE = Contract((Clock("frames", 3),), (kept("cache", 1, 2, KeepLast(9)),))


def compiled(module: Any, contract: Contract) -> Any:
    torch._dynamo.reset()
    options: dict[str, Any] = {"contract": contract}
    return torch.compile(module, backend=cadence_fx.cadence, options=options)


@pytest.mark.parametrize("name", PROVED)
def test_standard_modules_are_proved_in_every_class(name: str) -> None:
    stream = BY_NAME[name]
    module = stream.build()
    step = compiled(module, stream.contract)
    run = Run(stream, module, step)
    run.restart(0)
    with torch.no_grad():
        report = cadence_fx.warm_up(step, *run.inputs(0, stream.calls[0]), *run.state)
    (fact,) = report["proof"]
    assert fact["classes"] == fact["proved"] == len(stream.contract.catalog()) and not fact["unseen"]
    assert fact["shows"] == "frames" and fact["held_by"] == "proof and certificate"
    entries = {(e["extent"], e["next_extent"]): e for e in fact["entries"]}
    assert len(entries) == fact["classes"] and {e["verdict"] for e in entries.values()} == {"proved"}
    assert all(e["declared"] == e["found"] and "new[" in e["found"] for e in entries.values())
    assert "proof of  classes  proved" in str(report)


def warmed(module: Any) -> tuple[Any, Report]:
    step = compiled(module, CACHE)
    with torch.no_grad():
        return step, cadence_fx.warm_up(step, torch.randn(B, 3, C), torch.randn(B, 2, C))


def test_what_an_opaque_operator_makes_is_not_provable_and_held_by_other_means() -> None:
    step, report = warmed(Opaque().eval())
    (fact,) = report["proof"]
    assert (fact["classes"], fact["proved"], fact["unseen"]) == (4, 0, 0)
    assert fact["held_by"] == "certificate only"
    for entry in fact["entries"]:
        assert entry["verdict"] == "not provable" and "stitched" in entry["operator"] and entry["node"]
        assert "test_proofs.py" in entry["where"] and entry["reason"]
    text = str(report)
    assert "not provable" in text and "stitched" in text and "certificate only" in text
    with torch.no_grad(), cadence_fx.audit(step):
        step(torch.randn(B, 3, C), torch.randn(B, 2, C))
    assert cadence_fx.report(step)["proof"][0]["held_by"] == "certificate and audit of 1 call"


def test_a_contradiction_is_raised_with_the_first_frame_that_differs() -> None:
    step = compiled(toys.PrependLast().eval(), CACHE)
    with torch.no_grad(), pytest.raises(RetentionMismatch) as caught:
        cadence_fx.warm_up(step, torch.randn(B, 3, C), torch.randn(B, 2, C))
    told = "frame 0 of the next state is new[0], and old[0] by the contract"
    assert caught.value.counterexample == told and told in str(caught.value)
    (proof,) = program_of(step, "report").proofs.values()
    assert proof.verdict == "contradicted" and (proof.declared, proof.found) == (
        "old[0:2] + new[0:3]",
        "new[0:3] + old[0:2]",
    )
    assert f"contradicted: {told}" in str(cadence_fx.report(step))


def test_a_state_that_is_replaced_is_proved_in_its_extent_only() -> None:
    stream = BY_NAME["RingByIndex"]
    module = stream.build()
    step = compiled(module, stream.contract)
    with torch.no_grad():
        report = cadence_fx.warm_up(step, torch.randn(B, 3, C))
    assert [(f["region"], f["proved"], f["shows"], f["held_by"]) for f in report["proof"]] == [
        ("ring", 1, "extent", "certificate only"),
        ("position", 1, "extent", "certificate only"),
    ]
    (ring,) = report["proof"][0]["entries"]
    assert "index that only the call knows" in ring["reason"] and "toys.py" in ring["where"]


class Two(nn.Module):
    """Two states that no graph changes; what becomes of them is in the subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.a: Tensor
        self.b: Tensor
        self.register_buffer("a", torch.ones(4, 2))
        self.register_buffer("b", torch.zeros(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a[:2] - self.b[2:]


class Exchanged(Two):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.a, self.b = self.b, self.a
        return y


class InAList(Two):
    def __init__(self) -> None:
        super().__init__()
        self.held = [torch.ones(4, 2), torch.zeros(4, 2)]

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.held
        self.held[0], self.held[1] = second, first
        return x + first[:2] - second[2:]


class BreaksOff(Two):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        torch._dynamo.graph_break()
        self.a.set_(self.a + 1)  # type: ignore[call-overload]
        self.b.set_(self.b - 1)  # type: ignore[call-overload]
        return y


@pytest.mark.parametrize(
    "kind, names, proved",
    [(Two, "ab", True), (Exchanged, "ab", False), (InAList, ["held[*]"], False), (BreaksOff, "ab", False)],
)
def test_what_is_only_read_is_proved_where_it_stays_in_its_place(kind: type[Two], names: Any, proved: bool) -> None:
    regions = [Region(n[0], attribute=n, axis=0, clock="frames", retention=Pinned(4)) for n in names]
    eager, module = kind(), kind()
    step = compiled(module, Contract((Clock("frames", 2),), tuple(regions)))
    with torch.no_grad():
        facts = cadence_fx.warm_up(step, torch.zeros(2, 2))["proof"]
        for _ in range(3):
            x = torch.randn(2, 2)
            assert_same(step(x), eager(x), "result")
    for fact in facts:
        assert fact["proved"] == int(proved)
        assert fact["held_by"] == ("proof and certificate" if proved else "certificate only")
        assert proved or "only read" in fact["entries"][0]["reason"]


class HandedBack(nn.Module):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return x + cache.sum(), cache


@pytest.mark.parametrize("place", ["argument", "attribute"])
def test_frames_that_should_move_and_are_only_read_are_a_contradiction(place: str) -> None:
    where: dict[str, Any] = {"argument": "cache", "result": 1} if place == "argument" else {"attribute": "a"}
    region = Region("kept", axis=0, clock="frames", start=4, retention=KeepLast(4), **where)
    module, given = (HandedBack(), (torch.ones(4, 2),)) if place == "argument" else (Two(), ())
    step = compiled(module, Contract((Clock("frames", 2),), (region,)))
    with (
        torch.no_grad(),
        pytest.raises(RetentionMismatch, match=r"frame 0 of the next state is old\[0\], and old\[2\]"),
    ):
        cadence_fx.warm_up(step, torch.zeros(2, 2), *given)
