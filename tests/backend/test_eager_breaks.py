"""Operators that do not repeat their bytes run eager in the middle of a class; all else is recorded and certified.

The operator at fault here adds a number that is another one in each of its calls. With the number of a call set, eager
and the class must agree on every byte: each calls the operator as often, in the same order, with the same inputs.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import inspect
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

import cadence_fx
from cadence_fx import Clock, Contract, KeepLast, ways
from cadence_fx.lookup import program_of
from cadence_fx.passes import PassContext, PassResult, register_pass
from cadence_fx.passes.pipeline import _registered
from tests.backend.test_culprit import line_of
from tests.harness import assert_same, compile_with
from tests.streams import STREAMS, Run, Stream, kept
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


@contextlib.contextmanager
def registered(pass_: Any) -> Iterator[None]:
    """What is compiled inside is rewritten by this pass, too."""
    register_pass(pass_)
    try:
        yield
    finally:
        _registered.pop()


@contextlib.contextmanager
def kernel(name: str, function: Callable[..., Tensor]) -> Iterator[None]:
    """One of PyTorch's own operators with another kernel."""
    override = torch.library.Library("aten", "IMPL")
    override.impl(name, function, "CPU")
    try:
        yield
    finally:
        override._destroy()


def compare_streams(module: torch.nn.Module, step: Any, calls: int = 6) -> dict[str, Any]:
    """Play both; returns the report."""
    for i, (mine, right) in enumerate(zip(stream(step, calls), stream(module, calls), strict=True)):
        assert_same(mine, right, f"result {i}")
        assert mine.stride() == right.stride() or mine.shape == (B, 6, C), f"result {i} lies otherwise"
    report = cadence_fx.report(step)
    assert (report["replays"], report["misses"]) == (calls, {})
    return report.as_dict()


@pytest.mark.parametrize("kind", OPERATORS, ids=lambda kind: kind.__name__)
def test_every_call_replays_and_every_byte_is_eagers(kind: type[Toy]) -> None:
    torch.manual_seed(0)
    module = kind().eval()
    step = warmed(copy.deepcopy(module))
    report = compare_streams(module, step, 12)
    assert report["refusals"] == {}
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
    with registered(Shift(target)):
        module = Between().eval()
        step = warmed(copy.deepcopy(module))
    report = compare_streams(module, step)
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
    with registered(Loses()):
        step = warmed(Between().eval())
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
    with kernel("erfc", lambda x: torch.tanh(x) + weather.next()):
        yield


class Erfc(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, torch.special.erfc(self.key(x))], 1)
        return self.attend(x, frames), frames[:, -6:]


def test_classes_are_compared_on_other_inputs_too(restless_erfc: None) -> None:
    module = Erfc().eval()
    step = warmed(copy.deepcopy(module))
    report = compare_streams(module, step)
    assert [row["compared_inputs"] for row in report["class_table"]] == [3] * 3
    assert all("erfc" in what for row in report["class_table"] for what in row["eager_operators"])


@pytest.fixture
def restless_index_add() -> Iterator[None]:
    """The same in place."""

    def index_add_(self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
        return self.put_(index, source * weather.next(), accumulate=True)

    with kernel("index_add_", index_add_):
        yield


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
    report = compare_streams(module, step)
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


STATEFUL = [s for s in STREAMS if "self.attend(" in inspect.getsource(s.module.forward)]


@pytest.mark.parametrize("where", ["input", "attend"])
@pytest.mark.parametrize("base", STATEFUL, ids=lambda s: s.name)
def test_on_every_toy(base: Stream, where: str) -> None:
    """States of all kinds and layouts, with the operator on what comes in or on what is read of the state."""

    class Shaken(base.module):  # type: ignore[misc,name-defined]
        pass

    if where == "attend":
        Shaken.attend = lambda self, x, frames: base.module.attend(self, x, op.weathered(frames))  # type: ignore[attr-defined]
    else:
        names = list(inspect.signature(base.module.forward).parameters)[1:]
        env = {"base": base.module, "op": op}
        taken, rest = ", ".join(names), ", ".join(names[1:])
        body = f"base.forward(self, op.weathered({names[0]}), {rest})"
        exec(f"def forward(self, {taken}): return {body}", env)
        Shaken.forward = env["forward"]  # type: ignore[assignment]
    live = dataclasses.replace(base, module=Shaken)
    module = live.build()
    eager, step = Run(live, copy.deepcopy(module)), compile_with(module, live.contract)
    ours = Run(live, module, step)
    ours.restart(90)
    cadence_fx.warm_up(step, *ours.inputs(91, live.calls[0]), *ours.state)
    for each in (eager, ours):
        each.restart(0)
    for call in range(10):
        given = eager.inputs(1000 + call, live.calls[0])
        results, counts = [], []
        for each in (eager, ours):
            weather.calls = 50
            results.append(pytree.tree_leaves(each.call(*copy.deepcopy(given))))
            counts.append(weather.calls)
        assert counts[0] == counts[1] > 50
        for mine, right in zip(results[1], results[0], strict=True):
            assert_same(mine, right, f"call {call}")
        for name, tensors in eager.tensors().items():
            for mine, right in zip(ours.tensors()[name], tensors, strict=True):
                assert_same(mine, right, f"call {call}, region {name}")
    report = cadence_fx.report(step)
    assert (report["replays"], report["misses"], report["refusals"]) == (10, {}, {})
    assert report["eager_operators"]["not_reproducible"] >= 10


class Pooled(Toy):
    """PyTorch takes another path through this pooling while a mode watches, and its result lies otherwise."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        frames = torch.cat([cache, self.key(x)], 1)
        pooled = torch.nn.functional.max_pool1d(frames.transpose(1, 2), 2)
        return self.attend(x, op.weathered(frames)), frames[:, -6:], pooled


class Indexed:
    """A pass that takes that path."""

    name = "indexed"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        node = next(n for n in gm.graph.nodes if n.target is aten.max_pool1d.default)
        with gm.graph.inserting_after(node):
            pair = gm.graph.call_function(aten.max_pool1d_with_indices.default, node.args, node.kwargs)
            pair.meta = {**node.meta, "val": (node.meta["val"], node.meta["val"])}
        with gm.graph.inserting_after(pair):
            first = gm.graph.call_function(operator.getitem, (pair, 0))
            first.meta = node.meta
        node.replace_all_uses_with(first)
        gm.graph.erase_node(node)
        return PassResult(gm, True)


def test_what_watches_the_operator_changes_nothing_else() -> None:
    module = Pooled().eval()
    compare_streams(module, warmed(copy.deepcopy(module)))
    with registered(Indexed()):
        step = warmed(copy.deepcopy(module))
    report = compare_streams(module, step)
    assert all("admitted: rewritten in place without indexed" in row["notes"] for row in report["class_table"])


library = torch.library.Library("cadence_weather", "DEF")
library.define("scaled(Tensor x, *, float a=0.0, float b=0.0) -> Tensor")
library.impl("scaled", lambda x, *, a=0.0, b=0.0: x * (1 + a) + b + weather.next(), "CompositeExplicitAutograd")
library.impl("scaled", lambda x, *, a=0.0, b=0.0: torch.empty_like(x), "Meta")


@torch.library.custom_op("cadence_tests::mixed_", mutates_args=("x",))
def mixed_(x: Tensor, y: Tensor) -> None:
    x.add_(weather.next())
    x.add_(y)


@mixed_.register_fake
def _(x: Tensor, y: Tensor) -> None:
    return None


class Order(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, self.key(x)], 1)
        one, other = op.weathered(frames), op.weathered(torch.tanh(frames))
        return self.attend(x, one - other), frames[:, -6:]


class Keyword(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, self.key(x)], 1)
        return self.attend(x, torch.ops.cadence_weather.scaled(frames, a=0.5)), frames[:, -6:]


class Mixed(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, self.key(x)], 1)
        y = torch.tanh(frames)
        op.mixed_(y, y)
        return self.attend(x, y), frames[:, -6:]


def swap(gm: fx.GraphModule) -> None:
    first, second = (n for n in gm.graph.nodes if n.target is op.weathered.default)
    second.append(first)


def rename(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        if node.target is torch.ops.cadence_weather.scaled.default:
            node.kwargs = {"b": 0.5}


def sever(gm: fx.GraphModule) -> None:
    node = next(n for n in gm.graph.nodes if n.target is op.mixed_.default)
    with gm.graph.inserting_before(node):
        copied = gm.graph.call_function(aten.clone.default, (node.args[0],))
    copied.meta = dict(node.args[0].meta)  # type: ignore[union-attr]
    node.args = (node.args[0], copied)


class Rewires:
    name = "rewires"

    def __init__(self, change: Callable[[fx.GraphModule], None]) -> None:
        self._change = change

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        self._change(gm)
        return PassResult(gm, True)


@pytest.mark.parametrize(
    ("kind", "change"), [(Order, swap), (Keyword, rename), (Mixed, sever)], ids=["order", "keyword", "aliasing"]
)
def test_a_pass_may_not_change_what_they_are_given_nor_their_order(
    kind: type[Toy], change: Callable[[fx.GraphModule], None]
) -> None:
    module = kind().eval()
    with registered(Rewires(change)):
        step = warmed(copy.deepcopy(module))
    for row in compare_streams(module, step)["class_table"]:
        assert not any(note == "admitted: rewritten in place" for note in row["notes"])


@pytest.fixture
def scaled_erfc() -> Iterator[None]:
    """Its differences grow with what it is given: none on zeros."""
    with kernel("erfc", lambda x: torch.tanh(x) * (1 + weather.next())):
        yield


class OfZeros(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        frames = torch.cat([cache, self.key(x)], 1)
        y = self.attend(x, frames) + torch.sin(cache).mean((0, 1))
        return y, frames[:, -6:], torch.special.erfc(cache)


class WrongButOnZeros(Rewires):
    name = "wrong_but_on_zeros"

    def __init__(self) -> None:
        super().__init__(self._double)

    @staticmethod
    def _double(gm: fx.GraphModule) -> None:
        node = next(n for n in gm.graph.nodes if n.target is aten.sin.default)
        with gm.graph.inserting_after(node):
            twice = gm.graph.call_function(aten.mul.Tensor, (node, 2))
        twice.meta = dict(node.meta)
        node.replace_all_uses_with(twice, lambda user: user is not twice)


def test_one_that_repeats_on_the_first_data_only(scaled_erfc: None) -> None:
    """A cache of zeros, as a stream begins with: what does not repeat shows on the other inputs of the certificate."""
    module = OfZeros().eval()
    with registered(WrongButOnZeros()):
        step = compile_with(copy.deepcopy(module), CONTRACT)
        cadence_fx.warm_up(step, torch.randn(B, 2, C), torch.zeros(B, 2, C))
    for row in compare_streams(module, step)["class_table"]:
        assert (row["compared_inputs"], len(row["eager_operators"])) == (3, 1)
        assert not any("not compared" in note or note == "admitted: rewritten in place" for note in row["notes"])


class IntoEmpty(Toy):
    """As kernels are called that take memory for their result; and views in place, allocations, draws."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        frames = torch.cat([cache, self.key(x)], 1)
        room = torch.empty_like(frames)
        op.weathered_out(frames, room)
        y = (frames * 2).unsqueeze_(0).squeeze_(0)
        z = torch.empty_permuted((3, 2), (1, 0)).copy_(y[0, :2, :3].T)
        return self.attend(x, room), frames[:, -6:], y.transpose_(1, 2), z


@torch.library.custom_op("cadence_tests::weathered_out", mutates_args=("out",))
def weathered_out(x: Tensor, out: Tensor) -> None:
    out.copy_(x + weather.next())


@weathered_out.register_fake
def _(x: Tensor, out: Tensor) -> None:
    return None


def test_memory_without_contents_and_views_in_place_are_no_matter() -> None:
    module = IntoEmpty().eval()
    report = compare_streams(module, warmed(copy.deepcopy(module)))
    assert report["eager_operators"] == {"not_reproducible": 6}


@torch.library.custom_op("cadence_tests::expanded", mutates_args=())
def expanded(x: Tensor) -> Tensor:
    return (x[:, :1] + weather.next()).expand(x.shape)


@expanded.register_fake
def _(x: Tensor) -> Tensor:
    return x[:, :1].clone().expand(x.shape)


class Expanded(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, self.key(x)], 1)
        return self.attend(x, op.expanded(frames)), frames[:, -6:]


def test_results_that_overlap_themselves_are_refused() -> None:
    report = cadence_fx.report(warmed(Expanded().eval()))
    assert report["refusals"] == {"not_reproducible": 3}


class Plays:
    """What an operator calls back, if anything."""

    step: Any = None
    heard: list[Tensor] = []


@torch.library.custom_op("cadence_tests::calls_back", mutates_args=())
def calls_back(x: Tensor) -> Tensor:
    step, Plays.step = Plays.step, None
    if step is not None:
        Plays.heard = [result.clone() for result in step(torch.ones(B, 2, C), torch.ones(B, 6, C))]
        Plays.step = step
    return x + weather.next()


@calls_back.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class CallsBack(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, self.key(x)], 1)
        return self.attend(x, op.calls_back(frames)), frames[:, -6:]


def test_one_that_calls_its_own_replay_through_another_graph() -> None:
    module = CallsBack().eval()
    step = warmed(copy.deepcopy(module))
    played = []
    for each in (step, module):
        Plays.step = each
        played.append([*stream(each, 6), *Plays.heard])
        Plays.step = None
    for i, (mine, right) in enumerate(zip(*played, strict=True)):
        assert_same(mine, right, f"result {i}")
    assert cadence_fx.report(step)["misses"] == {"reentrant": 6}


def test_audits_of_several_threads_take_turns() -> None:
    step, wrong = warmed(Between().eval()), []
    given = [(torch.randn(B, 2, C), torch.randn(B, 6, C)) for _ in range(6)]
    inference = torch.is_inference_mode_enabled()

    def play() -> None:
        try:
            with torch.inference_mode(inference), torch.no_grad():
                for x, cache in given:
                    step(x, cache)
        except cadence_fx.AuditMismatch as error:
            wrong.append(error)

    with cadence_fx.audit(step) as ledger:
        threads = [threading.Thread(target=play) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong and ledger.calls == 18


def test_an_audit_in_another_autocast_than_that_of_the_warm_up() -> None:
    """Weights are cast in one and were cast already in the other: calls are counted by operator, not in all."""
    with torch.autocast("cpu", torch.bfloat16):
        step = warmed(Between().eval())
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16), cadence_fx.audit(step) as ledger:
            stream(step, 4)
        assert ledger.calls == 4


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
