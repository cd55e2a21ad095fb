"""Where exactness is easily lost: aliases, layouts, geometry, graph breaks, numbers of Python, plain callables."""

import copy
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cadence_fx
from cadence_fx.clock import Clock
from cadence_fx.contract import Contract, Region
from cadence_fx.errors import StaleState
from cadence_fx.retention import KeepLast
from tests.harness import assert_same, compile_with, counts
from tests.toys import B, C


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield


def keep(name: str, bound: int = 9, start: int = 0, result: int | None = 1, attribute: bool = False) -> Region:
    where: dict[str, Any] = {"attribute": name} if attribute else {"argument": name, "result": result}
    return Region(name, axis=1, clock="n", start=start, retention=KeepLast(bound), **where)


def compiled(module: nn.Module, *regions: Region, stride: int = 3) -> Any:
    return compile_with(module, Contract([Clock("n", stride=stride)], regions))


def noise(*shape: int) -> Tensor:
    return torch.randn(*(shape or (B, 3, C)))


def play(step: Any, eager: Any, ours: Tensor, theirs: Tensor, calls: int = 5) -> tuple[Tensor, Tensor]:
    """Calls of `(x, state) -> (y, state, ...)` on both; every result must agree."""
    for i in range(calls):
        x = noise()
        mine, right = step(x.clone(), ours), eager(x, theirs)
        for j, (a, e) in enumerate(zip(mine, right, strict=True)):
            if isinstance(e, Tensor):
                assert_same(a, e, f"call {i}, result {j}")
            else:
                assert a == e, f"call {i}, result {j}"
        ours, theirs = mine[1], right[1]
    return ours, theirs


class Append(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(C, C, bias=False)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        raw = torch.cat([cache, self.key(x)], 1)
        return F.scaled_dot_product_attention(x, raw, raw), raw[:, -9:]


def warm() -> tuple[Append, Append, Any, Tensor]:
    module = Append()
    eager, step, start = copy.deepcopy(module), compiled(module, keep("cache")), torch.zeros(B, 0, C)
    cadence_fx.warm_up(step, noise(), start)
    return module, eager, step, start


# -- a state known by its memory, not by the object that was handed out ----------------------------------


def test_another_view_of_a_consumed_state_is_refused_or_right() -> None:
    _, eager, step, start = warm()
    old, right = play(step, eager, start, start)
    play(step, eager, old, right, 1)
    x = noise()
    try:
        y, _ = step(x, old.detach())
    except StaleState:
        return
    assert_same(y, eager(x, right)[0], "output from the older state")


def test_a_stream_whose_state_is_held_through_a_view_survives_another_stream() -> None:
    _, eager, step, start = warm()
    ours, theirs = play(step, eager, start, start)
    ours = ours.detach()
    play(step, eager, start, start)
    assert_same(ours, theirs, "state of the first stream, never consumed")


def test_threads_whose_states_pass_through_a_view() -> None:
    _, eager, step, start = warm()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with torch.no_grad():
                ours = theirs = start
                for _ in range(100):
                    ours, theirs = play(step, eager, ours, theirs, 1)
                    ours = ours.view(ours.shape)
        except BaseException as error:  # noqa: B036 - shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_restore_refuses_a_consumed_state() -> None:
    _, eager, step, start = warm()
    old, right = play(step, eager, start, start)
    play(step, eager, old, right, 1)
    try:
        restored = cadence_fx.restore(step, cache=old)["cache"]
    except StaleState:
        return
    assert_same(restored, right, "restored")


@pytest.mark.parametrize("part", [slice(-6, None), slice(None, 6)], ids=["last", "first"])
def test_the_current_state_cut_by_the_user(part: slice) -> None:
    """It is not stale: no call has consumed it."""
    _, eager, step, start = warm()
    ours, theirs = play(step, eager, start, start)
    play(step, eager, ours[:, part], theirs[:, part])


# -- a state that this call only reads -------------------------------------------------------------------


class Peeks(nn.Module):
    def forward(self, x: Tensor, cache: Tensor, update: bool = True) -> tuple[Tensor, Tensor | None]:
        if not update:
            return cache * 2, None
        new = torch.cat([cache, x], 1)[:, -3:]
        return x + new.sum(), new


def test_a_call_that_only_reads_the_state_leaves_it() -> None:
    """Its output has the state's shape, and is taken for the new state."""
    module = Peeks()
    step, ours = compiled(module, keep("cache", 3)), torch.zeros(B, 0, C)
    cadence_fx.warm_up(step, noise(), ours)
    ours, theirs = play(step, module, ours, ours, 3)
    x = noise()
    assert_same(step(x, ours, False)[0], module(x, theirs, False)[0], "peek")
    assert_same(ours, theirs, "state after the peek")


class PeeksAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hist = torch.zeros(B, 0, C)

    def forward(self, x: Tensor, update: bool = True) -> Tensor:
        if not update:
            return self.hist * 2
        self.hist = torch.cat([self.hist, x], 1)[:, -3:]
        return x + self.hist.sum()


def test_a_call_that_only_reads_an_attribute_leaves_it() -> None:
    module = PeeksAttribute()
    eager, step = copy.deepcopy(module), compiled(module, keep("hist", 3, attribute=True))
    cadence_fx.warm_up(step, noise())
    for i in range(4):
        x = noise()
        assert_same(step(x), eager(x), f"output {i}")
        assert_same(step(x, False), eager(x, False), f"peek {i}")
        assert_same(module.hist, eager.hist, f"state {i}")


# -- tensors of the module --------------------------------------------------------------------------------


def test_a_parameter_replaced_by_its_own_transpose() -> None:
    """The same address, other strides."""
    module, eager, step, start = warm()
    ours, theirs = play(step, eager, start, start)
    for m in (module, eager):
        m.key.weight = nn.Parameter(m.key.weight.data.t())
    play(step, eager, ours, theirs)


class Window(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(64, C)
        self.window = self.table[:4]

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.window.sum(0), torch.cat([cache, x], 1)[:, -9:]


@pytest.mark.parametrize("of", ["size", "stride"])
def test_an_attribute_of_another_geometry_at_the_same_address(of: str) -> None:
    module = Window()
    eager, step, ours = copy.deepcopy(module), compiled(module, keep("cache")), torch.zeros(B, 0, C)
    cadence_fx.warm_up(step, noise(), ours)
    theirs = ours
    for n in (4, 5, 6, 7, 8, 4, 1, 2, 3):
        for m in (module, eager):
            m.window = m.table[:n] if of == "size" else m.table[: 4 * n : n]
        ours, theirs = play(step, eager, ours, theirs, 2)


# -- states written in place that share memory ------------------------------------------------------------


class InPlace(nn.Module):
    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        cache.copy_(torch.cat([cache, x], 1)[:, -8:])
        return x + cache[:, -3:].tanh()


def in_place() -> tuple[InPlace, Any]:
    module = InPlace()
    step = compiled(module, keep("cache", 8, 8, None))
    cadence_fx.warm_up(step, noise(), torch.zeros(B, 8, C))
    return module, step


def test_a_state_written_in_place_that_is_a_slot_of_a_pool() -> None:
    module, step = in_place()
    ours, theirs = torch.zeros(4, B, 8, C), torch.zeros(4, B, 8, C)
    for i in range(3):
        x = noise()
        assert_same(step(x, ours[1]), module(x, theirs[1]), f"output {i}")
        assert_same(ours, theirs, f"pool {i}")


def test_a_state_written_in_place_that_is_passed_as_a_view() -> None:
    module, step = in_place()
    ours = [noise(B, 8, C) for _ in range(2)]
    theirs = copy.deepcopy(ours)
    for i in range(6):
        x = noise()
        step(x, ours[i % 2].view(B, 8, C))
        module(x, theirs[i % 2])
        for a, e in zip(ours, theirs, strict=True):
            assert_same(a, e, f"call {i}")


class Buffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hist: Tensor
        self.register_buffer("hist", torch.ones(B, 8, C))

    def forward(self, x: Tensor) -> Tensor:
        self.hist.copy_(torch.cat([self.hist, x], 1)[:, -8:])
        return x + self.hist[:, -3:].tanh()


def test_a_buffer_that_a_state_dict_of_before_warm_up_shares() -> None:
    module, eager = Buffer(), Buffer()
    ours, theirs = module.state_dict(), eager.state_dict()
    step = compiled(module, keep("hist", 8, 8, attribute=True))
    cadence_fx.warm_up(step, noise())
    x = noise()
    assert_same(step(x), eager(x), "output")
    assert_same(ours["hist"], theirs["hist"], "the dict's view of the buffer")


class BufferAndView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Buffer()
        self.view = self.inner.hist[:, 2:]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.view.sum()


def test_a_buffer_that_the_module_also_reads_through_a_view() -> None:
    module, eager = BufferAndView(), BufferAndView()
    region = Region("hist", attribute="inner.hist", axis=1, clock="n", start=8, retention=KeepLast(8))
    step = compiled(module, region)
    cadence_fx.warm_up(step, noise())
    for i in range(3):
        x = noise()
        assert_same(step(x), eager(x), f"output {i}")


# -- layout of a state ------------------------------------------------------------------------------------


class ReadsState(nn.Module):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return x + cache.mean((0, 1)), torch.cat([cache, x], 1)[:, -32:]


class ReadsTransposed(nn.Module):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        raw = torch.cat([cache, x], 1)
        return x + cache.sum(), raw[:, -32:].transpose(0, 2).contiguous().transpose(0, 2)


@pytest.mark.parametrize("kind", [ReadsState, ReadsTransposed])
def test_a_reduction_over_a_state_that_is_not_contiguous_in_eager(kind: type[nn.Module]) -> None:
    """Eager's state is a slice or a transpose, its kernels sum in another order than over the carry's."""
    module = kind()
    step, ours = compiled(module, keep("cache", 32, 4), stride=4), noise(B, 4, 64)
    cadence_fx.warm_up(step, noise(B, 4, 64), ours)
    theirs = ours
    for i in range(30):
        x = noise(B, 4, 64)
        (y, ours), (z, theirs) = step(x, ours), module(x, theirs)
        assert_same(y, z, f"call {i}")


# -- graph breaks ------------------------------------------------------------------------------------------------------


class BreaksWithOld(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hist = torch.zeros(B, 9, C)

    def forward(self, x: Tensor) -> Tensor:
        old = self.hist
        self.hist = torch.cat([self.hist, x], 1)[:, -9:]
        torch._dynamo.graph_break()
        return self.hist * 2 + old


@pytest.mark.parametrize("warmed", [True, False])
def test_the_old_state_read_after_a_graph_break(warmed: bool) -> None:
    module = BreaksWithOld()
    eager, step = copy.deepcopy(module), compiled(module, keep("hist", 9, 9, attribute=True))
    if warmed:
        cadence_fx.warm_up(step, noise())
    for i in range(4):
        x = noise()
        assert_same(step(x), eager(x), f"output {i}")


class BreaksRebound(nn.Module):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cache = torch.cat([cache, x], 1)[:, -3:]
        torch._dynamo.graph_break()
        y = cache * 2 + 1
        torch._dynamo.graph_break()
        return y + cache, cache


class BreaksSplit(nn.Module):
    def forward(self, x: Tensor, cache: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cache = torch.cat([cache, x], 1)[:, -9:]
        torch._dynamo.graph_break()
        other = torch.cat([other, x * 2], 1)[:, -9:]
        return F.scaled_dot_product_attention(x, cache, other), cache, other


@pytest.mark.parametrize("warmed", [True, False])
def test_a_local_of_the_argument_s_name_after_a_graph_break(warmed: bool) -> None:
    """The second graph's `cache` is not the argument; no caller passes a stale state here."""
    module = BreaksRebound()
    step, start = compiled(module, keep("cache", 3)), torch.zeros(B, 0, C)
    if warmed:
        cadence_fx.warm_up(step, noise(), start)
    play(step, module, start, start)


def test_states_of_two_graphs() -> None:
    """The retention is the declared one; the second graph returns no state of the first's name."""
    module = BreaksSplit()
    step = compiled(module, keep("cache"), keep("other", result=2))
    start = torch.zeros(B, 0, C)
    cadence_fx.warm_up(step, noise(), start, start.clone())
    a = b = c = d = start
    for i in range(8):
        x = noise()
        (y, a, c), (z, b, d) = step(x, a, c), module(x, b, d)
        for mine, right in ((y, z), (a, b), (c, d)):
            assert_same(mine, right, f"call {i}")


# -- numbers of Python -------------------------------------------------------------------------------------------------


class Numbers(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.position, self.gain = kind, 0, 0.5

    def forward(self, x: Tensor, cache: Tensor) -> Sequence[Any]:
        raw = torch.cat([cache, x], 1)
        if self.kind == "modulo":
            self.position = (self.position + 3) % 7
        if self.kind == "gain":
            self.gain = self.gain * 0.9 + 0.1
        y = x * self.gain if self.kind == "gain" else x * 2
        return (y, raw[:, -9:], cache.shape[1] // 2 if self.kind == "floor" else 0)


@pytest.mark.parametrize("kind", ["modulo", "floor", "gain"])
def test_numbers_computed_beside_the_tensors(kind: str) -> None:
    module = Numbers(kind)
    eager, step, start = copy.deepcopy(module), compiled(module, keep("cache")), torch.zeros(B, 0, C)
    cadence_fx.warm_up(step, noise(), start)
    play(step, eager, start, start, 12)
    assert (module.position, module.gain) == (eager.position, eager.gain)


class Scales(nn.Module):
    def forward(self, x: Tensor, cache: Tensor, gain: float) -> tuple[Tensor, Tensor]:
        return x * gain, torch.cat([cache, x], 1)[:, -9:]


def test_a_float_argument_that_varies() -> None:
    module = Scales()
    step, ours = compiled(module, keep("cache")), torch.zeros(B, 0, C)
    theirs = ours
    for i in range(6):
        x = noise()
        (y, ours), (z, theirs) = step(x, ours, 0.5 + i), module(x, theirs, 0.5 + i)
        assert_same(y, z, f"call {i}")


class Counts(nn.Module):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, int]:
        count = int(x.abs().sum().item())
        return x * count, torch.cat([cache, x], 1)[:, -9:], count


def test_a_number_read_from_a_tensor() -> None:
    module = Counts()
    step, start = compiled(module, keep("cache")), torch.zeros(B, 0, C)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        play(step, module, start, start)


# -- views of another dtype --------------------------------------------------------------------------------------------


class Reinterprets(nn.Module):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.view(torch.int32)[:, 1:], torch.cat([cache, x], 1)[:, -9:], x.view(torch.int16)


def test_outputs_that_are_an_input_read_as_another_dtype() -> None:
    module = Reinterprets()
    step, start = compiled(module, keep("cache")), torch.zeros(B, 0, C)
    cadence_fx.warm_up(step, noise(), start)
    play(step, module, start, start)


# -- wrongly refused ---------------------------------------------------------------------------------------------------


class Chunk(nn.Module):
    """The state is the chunk before."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return cache.sum(1, keepdim=True) * x[:, :1], x


def test_a_new_state_that_is_an_argument() -> None:
    module = Chunk()
    step, start = compiled(module, keep("cache", 3, 3)), noise()
    cadence_fx.warm_up(step, noise(), start)
    play(step, module, start, start)


def test_an_empty_batch() -> None:
    module = Append()
    step, start = compiled(module, keep("cache")), torch.zeros(0, 0, C)
    cadence_fx.warm_up(step, torch.zeros(0, 3, C), start)
    y, ours = step(torch.zeros(0, 3, C), start)
    assert y.shape == (0, 3, C) and ours.shape == (0, 3, C)


class LooksUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, C)
        self.hist: Tensor
        self.register_buffer("hist", torch.zeros(B, 8, C))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.hist.copy_(torch.cat([self.hist, x], 1)[:, -8:])
        return self.table(ids) + self.hist.sum()


def test_a_first_call_that_raises_does_not_refuse_its_class_for_good() -> None:
    module = LooksUp()
    eager, step = copy.deepcopy(module), compiled(module, keep("hist", 8, 8, attribute=True))
    with pytest.raises(IndexError):
        step(noise(), torch.tensor([9]))
    for m in (module, eager):
        m.hist.zero_()
    for i in range(5):
        x = noise()
        assert_same(step(x, torch.tensor([1])), eager(x, torch.tensor([1])), f"output {i}")
    assert counts(step)["replays"] >= 4, counts(step)["misses"]


def test_a_state_is_as_it_was_before_a_call_that_raised() -> None:
    """Unlike a module's other buffers: a declared state is never left half written."""
    module = LooksUp()
    step = compiled(module, keep("hist", 8, 8, attribute=True))
    cadence_fx.warm_up(step, noise(), torch.tensor([1]))
    step(noise(), torch.tensor([1]))
    before = module.hist.clone()
    with pytest.raises(IndexError):
        step(noise(), torch.tensor([9]))
    assert_same(module.hist, before, "state after the exception")


def test_a_compiled_module_can_be_copied() -> None:
    """As with every other backend."""
    _, eager, step, start = warm()
    play(copy.deepcopy(step), eager, start, start)


def test_two_modules_of_one_class_with_chunks_of_different_sizes() -> None:
    """Either works alone; Dynamo lets the second one's chunk size vary because the first one's was another."""
    for stride in (3, 2):
        module = Append()
        step, start = compiled(module, keep("cache"), stride=stride), torch.zeros(B, 0, C)
        cadence_fx.warm_up(step, noise(B, stride, C), start)


@pytest.mark.parametrize("value", [None, "text"])
def test_restore_names_a_value_that_is_no_tensor(value: Any) -> None:
    _, _, step, _ = warm()
    with pytest.raises(cadence_fx.errors.CadenceError):
        cadence_fx.restore(step, cache=value)
