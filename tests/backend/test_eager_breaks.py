"""Operators that do not repeat their bytes run eager in the middle of a class; all else is recorded and certified.

The operator at fault here adds a number that is another one in each of its calls. With the number of a call set, eager
and the class must agree on every byte: each calls the operator as often, in the same order, with the same inputs.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import cadence_fx
from cadence_fx import Clock, Contract, KeepLast, ways
from cadence_fx.lookup import program_of
from cadence_fx.passes import PassContext, PassResult, register_pass
from cadence_fx.passes.pipeline import _registered
from tests.backend.test_culprit import line_of
from tests.harness import assert_same, compile_with
from tests.streams import kept
from tests.toys import B, C, Toy

HERE = __file__


class Weather:
    """What the operator adds next; the calls that it has answered."""

    def __init__(self) -> None:
        self.calls = 0

    def next(self) -> float:
        self.calls += 1
        return 1 / self.calls


weather = Weather()


@torch.library.custom_op("cadence_tests::weathered", mutates_args=())
def weathered(x: Tensor) -> Tensor:
    return x + weather.next()


@weathered.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("cadence_tests::weathered_", mutates_args=("x",))
def weathered_(x: Tensor) -> None:
    x += weather.next()


@weathered_.register_fake
def _(x: Tensor) -> None:
    return None


op, aten = torch.ops.cadence_tests, torch.ops.aten


class Between(Toy):
    """The operator reads what is recorded before it, and what is recorded behind it reads it."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, self.key(x)], 1)
        shaken = op.weathered(torch.tanh(frames))  # at fault
        return self.attend(x, shaken), frames[:, -6:]


class InTheState(Toy):
    """The state itself is made of what does not repeat."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, op.weathered(self.key(x))], 1)
        return self.attend(x, frames), frames[:, -6:]


class InPlace(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, self.key(x)], 1)
        y = self.attend(x, frames)
        op.weathered_(y)
        return y * 2, frames[:, -6:]


class Twice(Toy):
    """Equal calls, which are no common subexpression, and a result that leaves as it is."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        frames = torch.cat([cache, self.key(x)], 1)
        one, other = op.weathered(frames), op.weathered(frames)
        return self.attend(x, one - other), frames[:, -6:], other


class OfWeights(Toy):
    """What only weights decide is still made in every call; nobody reads the last."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, self.key(x)], 1)
        shift = op.weathered(torch.tanh(self.query.weight)).sum(0)
        op.weathered(x)
        return self.attend(x, frames + shift), frames[:, -6:]


class Shifted(Toy):
    """The operator comes last, behind everything that the new state is made of."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, self.key(x)], 1)
        y, kept_frames = self.attend(x, frames), frames[:, -6:]
        return op.weathered(y), kept_frames


class Steady(Toy):
    """A class without any."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, self.key(x)], 1)
        return self.attend(x, frames), frames[:, -6:]


OPERATORS = {Between: 1, Shifted: 1, InTheState: 1, InPlace: 1, Twice: 2, OfWeights: 2}
CONTRACT = Contract((Clock("frames", 2),), (kept("cache", 1, 2, KeepLast(6)),))


@pytest.fixture(autouse=True, params=[torch.no_grad, torch.inference_mode])
def _serving(request: pytest.FixtureRequest) -> Iterator[None]:
    with request.param():
        yield


def stream(step: Callable[..., Any], calls: int, device: str = "cpu") -> list[Tensor]:
    """All results of one stream, the operator's first call being its 1,000th."""
    draw = torch.Generator().manual_seed(1)
    weather.calls, state, found = 999, torch.zeros(B, 2, C, device=device), []
    for _ in range(calls):
        results = step(torch.randn(B, 2, C, generator=draw).to(device), state)
        state = results[1]
        found += [result.clone() for result in results]
    return found


def warmed(module: torch.nn.Module, device: str = "cpu") -> Any:
    step = compile_with(module, CONTRACT)
    cadence_fx.warm_up(step, *(torch.randn(B, 2, C, device=device) for _ in range(2)))
    return step


@pytest.mark.parametrize("kind", OPERATORS, ids=lambda kind: kind.__name__)
def test_every_call_replays_and_every_byte_is_eagers(kind: type[Toy]) -> None:
    torch.manual_seed(0)
    module = kind().eval()
    step = warmed(copy.deepcopy(module))
    for i, (mine, right) in enumerate(zip(stream(step, 12), stream(module, 12), strict=True)):
        assert_same(mine, right, f"result {i}")
    report = cadence_fx.report(step)
    assert (report["replays"], report["misses"], report["refusals"]) == (12, {}, {})
    assert report["eager_operators"] == {"not_reproducible": 12 * OPERATORS[kind]}
    assert all(len(row["eager_operators"]) == OPERATORS[kind] for row in report["class_table"])


def test_the_operator_and_the_line_are_named() -> None:
    report = cadence_fx.report(warmed(Between().eval()))
    for row in report["class_table"]:
        (what,) = row["eager_operators"]
        assert what.startswith("cadence_tests.weathered.default at ")
        assert f'File "{HERE}", line {line_of(Between.forward, "# at fault")}' in what
        assert f"runs eager, since it does not repeat: {what}" in row["notes"]
    assert what in report["details"]["not_reproducible"]


def test_the_printed_report_counts_them() -> None:
    step = warmed(Between().eval())
    assert "ran eager" not in str(cadence_fx.report(step))
    stream(step, 2)
    lines = str(cadence_fx.report(step)).splitlines()
    at = lines.index("  operator calls that ran eager inside replays, not_reproducible: 2")
    assert "cadence_tests.weathered.default at " in lines[at + 1]


def test_audit_compares_given_what_they_made() -> None:
    step = warmed(Between().eval())
    with cadence_fx.audit(step) as ledger:
        stream(step, 5)
    assert ledger.calls == 5
    stream(step, 5)  # and makes nothing of it last
    assert weather.calls == 999 + 5


class Shift:
    """A pass that is wrong in one bit of one product, behind the operator or before it."""

    name = "shift"

    def __init__(self, target: Any) -> None:
        self._target = target

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        node = next(n for n in gm.graph.nodes if n.target is self._target)
        with gm.graph.inserting_after(node):
            wrong = gm.graph.call_function(aten.nextafter.default, (node, node))
            wrong.meta.update(node.meta)
        with gm.graph.inserting_before(wrong):
            up = gm.graph.call_function(aten.add.Tensor, (node, 1))
            up.meta.update(node.meta)
        node.replace_all_uses_with(wrong, lambda user: user not in (wrong, up))
        wrong.args = (node, up)
        return PassResult(gm, True)


@pytest.mark.parametrize("target", [aten.tanh.default, aten.softmax.int], ids=["before", "behind"])
def test_a_wrong_pass_is_caught_all_the_same(target: Any) -> None:
    register_pass(Shift(target))
    try:
        module = Between().eval()
        step = warmed(copy.deepcopy(module))
    finally:
        _registered.pop()
    for i, (mine, right) in enumerate(zip(stream(step, 6), stream(module, 6), strict=True)):
        assert_same(mine, right, f"result {i}")
    report = cadence_fx.report(step)
    assert (report["replays"], report["misses"]) == (6, {})
    for row in report["class_table"]:
        assert any(note.startswith("rewritten in place dropped: ") for note in row["notes"])
        assert "admitted: rewritten in place without shift" in row["notes"]


class Loses:
    """A pass that makes the operator anew, as a rewrite to another spelling would."""

    name = "loses"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        node = next(n for n in gm.graph.nodes if n.target is op.weathered.default)
        with gm.graph.inserting_after(node):
            other = gm.graph.call_function(node.target, node.args)
            other.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(other)
        gm.graph.erase_node(node)
        return PassResult(gm, True)


def test_a_pass_that_loses_one_is_left_out() -> None:
    register_pass(Loses())
    try:
        step = warmed(Between().eval())
    finally:
        _registered.pop()
    for row in cadence_fx.report(step)["class_table"]:
        assert len(row["eager_operators"]) == 1
        assert "admitted: rewritten in place without optional passes" in row["notes"]


def test_too_many_of_them_are_no_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "MOST_BREAKS", 1)
    report = cadence_fx.report(warmed(Twice().eval()))
    assert report["refusals"] == {"not_reproducible": 3} and report["classes"] == 0
    assert all("cadence_tests.weathered.default gives different" in d for d in report["details"]["not_reproducible"])


@pytest.fixture
def restless_erfc() -> Iterator[None]:
    """PyTorch's own operator with a kernel that does not repeat."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("erfc", lambda x: torch.tanh(x) + weather.next(), "CPU")
    try:
        yield
    finally:
        library._destroy()


class Erfc(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, torch.special.erfc(self.key(x))], 1)
        return self.attend(x, frames), frames[:, -6:]


def test_classes_are_compared_on_other_inputs_too(restless_erfc: None) -> None:
    module = Erfc().eval()
    step = warmed(copy.deepcopy(module))
    for i, (mine, right) in enumerate(zip(stream(step, 6), stream(module, 6), strict=True)):
        assert_same(mine, right, f"result {i}")
    report = cadence_fx.report(step)
    assert (report["replays"], report["misses"]) == (6, {})
    assert [row["compared_inputs"] for row in report["class_table"]] == [3] * 3
    assert all("erfc" in what for row in report["class_table"] for what in row["eager_operators"])


@pytest.fixture
def restless_index_add() -> Iterator[None]:
    """The same in place."""

    def index_add_(self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
        return self.put_(index, source * weather.next(), accumulate=True)

    library = torch.library.Library("aten", "IMPL")
    library.impl("index_add_", index_add_, "CPU")
    try:
        yield
    finally:
        library._destroy()


class Cells(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, self.key(x)], 1)
        index = torch.arange(C, device=x.device) % 4
        cells = torch.zeros(4, device=x.device).index_add_(0, index, frames[0, -1])
        return self.attend(x, frames) + cells.sum(), frames[:, -6:]


def test_what_they_are_given_is_looked_at_behind_the_backs_of_those_who_watch(restless_index_add: None) -> None:
    """Whether values reach the host decides on which inputs a class is compared; the tape's own looks do not count."""
    module = Cells().eval()
    step = warmed(copy.deepcopy(module))
    for i, (mine, right) in enumerate(zip(stream(step, 6), stream(module, 6), strict=True)):
        assert_same(mine, right, f"result {i}")
    report = cadence_fx.report(step)
    assert (report["replays"], report["misses"]) == (6, {})
    assert [row["compared_inputs"] for row in report["class_table"]] == [3] * 3
    assert all("index_add_" in what for row in report["class_table"] for what in row["eager_operators"])


@pytest.mark.parametrize("kind", [Between, Steady], ids=lambda kind: kind.__name__)
def test_no_class_keeps_the_call_that_it_was_captured_in(kind: type[Toy]) -> None:
    """States of 4 frames are on the way to 6 only: what holds one after warm-up holds a call."""
    step = warmed(kind().eval())
    assert cadence_fx.report(step)["classes"] == 3
    gc.collect()
    found = [o for o in gc.get_objects() if type(o) is Tensor and o.shape == (B, 4, C)]
    assert all(t.untyped_storage().nbytes() == B * 6 * C * 4 for t in found), "views of the carry"


def test_what_was_taken_down_is_let_go() -> None:
    step = warmed(Between().eval())
    tapes = [c.plan.tape for _, table in program_of(step, "test").graphs for c in table.classes.values()]
    assert len(tapes) == 3 and all(tape is not None and not tape._taken and not tape._on for tape in tapes)


class Stops(Exception):
    """What the operator raises, having been called once too often."""


@pytest.mark.parametrize("kind", [Between, Twice, Shifted], ids=lambda kind: kind.__name__)
def test_one_that_raises_leaves_the_state_as_it_was(kind: type[Toy], monkeypatch: pytest.MonkeyPatch) -> None:
    raises_and_goes_on(kind, "cpu", monkeypatch)


def raises_and_goes_on(kind: type[Toy], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state may be passed again after a call that raised, and has its bytes."""
    torch.manual_seed(0)
    module = kind().eval().to(device)
    step = warmed(copy.deepcopy(module), device)
    x, states = torch.randn(B, 2, C, device=device), [torch.randn(B, 2, C, device=device) for _ in range(2)]
    states[1].copy_(states[0])

    def stops() -> float:
        raise Stops

    for _ in range(4):
        with monkeypatch.context() as patch:
            patch.setattr(weather, "next", stops)
            with pytest.raises(Stops):
                step(x, states[0])
        results = []
        for i, each in enumerate((step, module)):
            weather.calls = 7
            results.append(each(x, states[i]))
            states[i] = results[i][1]
        for mine, right in zip(*results, strict=True):
            assert_same(mine, right, "after a call that raised")
    assert cadence_fx.report(step)["misses"] == {"raised": 4}
