"""States in the shapes that users give them: shared, expanded, kept and reused, in lists, dicts and odd dtypes."""

import contextlib
import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cadence_fx
from cadence_fx.clock import Clock
from cadence_fx.contract import Contract, Region
from cadence_fx.errors import ContractError
from cadence_fx.retention import KeepLast, Pinned
from tests.harness import Pair, assert_same, compile_with, counts
from tests.streams import BY_NAME, Stream, frames, kept, noise, on_argument, on_module, own
from tests.toys import B, C, Toy


@pytest.fixture(autouse=True)
def _serving() -> None:
    torch.set_grad_enabled(False)


def played(stream: Stream, turns: int = 3, calls: int = 6) -> Pair:
    pair = Pair(stream)
    for turn in range(turns):
        pair.restart(turn)
        for _ in range(calls):
            pair.call()
    pair.check_kept()
    assert pair.missed() == Counter()
    assert pair.since("late_captures") == 0
    assert all(len(seen) == 1 for seen in pair.addresses.values())
    return pair


@pytest.mark.parametrize("name", ["AppendLast", "PromptPrepend", "LayerList", "SolverStack", "ConvContext"])
def test_one_start_state_for_every_turn(name: str) -> None:
    """The usual reset: a start state made once and passed again. It is never written and never stale."""
    pair = Pair(BY_NAME[name])
    start = pair.live.state
    before = copy.deepcopy(start)
    for _ in range(4):
        pair.live.state, pair.eager.state = start, copy.deepcopy(before)
        for _ in range(4):
            pair.call()
    pair.check_kept()
    for a, b in zip(torch.utils._pytree.tree_leaves(start), torch.utils._pytree.tree_leaves(before), strict=True):
        assert_same(a, b, "the start state")
    assert pair.missed() == Counter()


@pytest.mark.parametrize("name", ["LayerList", "LayerAttributes"])
def test_all_layers_start_from_one_tensor(name: str) -> None:
    """`[zeros] * layers`: one tensor object in the place of several states."""
    pair = Pair(BY_NAME[name])
    for turn in range(3):
        pair.restart(turn)
        for run in (pair.eager, pair.live):
            if name == "LayerList":
                run.state = ([run.state[0][0]] * 3,)
            else:
                for layer in run.module.layers:
                    layer.hist = run.module.layers[0].hist
        for _ in range(5):
            pair.call()
    pair.check_kept()


def test_an_expanded_start_state() -> None:
    pair = Pair(BY_NAME["AppendLast"])
    for turn in range(3):
        row = noise(torch.Generator().manual_seed(turn), 1, 1, C)
        pair.live.state, pair.eager.state = (row.expand(B, 2, C),), (row.expand(B, 2, C),)
        for _ in range(5):
            pair.call()
    pair.check_kept()


def test_special_values_keep_their_bits() -> None:
    """NaN payloads, negative zero, infinities and subnormals, in the input and in the state."""
    bits = torch.tensor([0x7FC01234, -0x00400000 + 0x5678, -0x80000000, 0x7F800000, 1, 0x7F801111], dtype=torch.int32)
    special = bits.view(torch.float32).repeat(B * 3 * C // 6 + 1)

    class Moves(nn.Module):
        def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
            raw = torch.cat([cache, x], 1)
            return raw.flip(1) * 1.0, raw[:, -7:]

    stream = on_argument(Moves, 3, kept("cache", 1, 2, KeepLast(7)), (B, 2, C))
    pair = played(stream, turns=1)
    pair.live.state, pair.eager.state = ((special[: B * 2 * C].reshape(B, 2, C).clone(),) for _ in range(2))
    for _ in range(4):
        pair.feed(special[: B * 3 * C].reshape(B, 3, C).clone())
    pair.check_kept()
    assert pair.missed() == Counter()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool])
def test_dtypes(dtype: torch.dtype) -> None:
    def made(g: torch.Generator, *shape: int) -> Tensor:
        return (torch.randn(*shape, generator=g) * 5).to(dtype)

    class AnyType(nn.Module):
        def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
            raw = torch.cat([cache, x.roll(1, 2)], 1)
            return raw.float().cumsum(1).sin(), raw[:, -7:]

    stream = on_argument(AnyType, 3, kept("cache", 1, 2, KeepLast(7)), (B, 2, C))
    played(replace(stream, fresh=lambda g: (made(g, B, 2, C),), inputs=lambda g, a: (made(g, B, a["frames"], C),)))


class OutputIsState(Toy):
    def __init__(self, how: str = "itself") -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        new = torch.cat([cache, self.attend(x, cache)], 1)[:, -8:]
        if self.how == "the old one":
            return cache, new
        return {"itself": new, "a slice": new[:, :], "a view": new.unsqueeze(0), "detached": new.detach()}[
            self.how
        ], new


class OutputIsAttribute(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.hist = torch.ones(B, 2, C)

    def forward(self, x: Tensor) -> Tensor:
        self.hist = torch.cat([self.hist, self.attend(x, self.hist)], 1)[:, -8:]
        return self.hist


def outputs_survive(stream: Stream, strides: bool = False) -> None:
    pair = Pair(stream)
    pair.strides = strides
    for _ in range(10):
        pair.call()
    pair.check_kept()
    assert pair.missed() == Counter()


def output_is_state(how: str) -> Stream:
    class Toy(OutputIsState):
        def __init__(self) -> None:
            super().__init__(how)

    return on_argument(Toy, 3, kept("cache", 1, 2, KeepLast(8)), (B, 2, C))


@pytest.mark.parametrize("how", ["itself", "a slice", "a view", "detached"])
def test_an_output_that_is_the_state(how: str) -> None:
    """One tensor leaves as output and as state; the user keeps the output."""
    outputs_survive(output_is_state(how), strides=how != "itself")


def test_an_output_that_is_the_old_state() -> None:
    """The call consumes the state it is given, and this code hands it out again: exact, or refused before traffic."""
    try:
        outputs_survive(output_is_state("the old one"))
    except ContractError as error:
        assert error.region == "cache"


def test_an_output_that_is_the_attribute() -> None:
    region = own("hist", 1, 2, KeepLast(8))
    outputs_survive(
        on_module(OutputIsAttribute, 3, (region,), lambda g: {"hist": noise(g, B, 2, C)}, lambda m: {"hist": [m.hist]})
    )


class ListOnModule(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.caches = [torch.ones(B, 2, C) for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            raw = torch.cat([self.caches[i], self.key(x)], 1)
            x = x + self.attend(x, raw)
            self.caches[i] = raw[:, -7:]
        return x


class DictOnModule(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"k": torch.ones(B, 2, C), "v": torch.ones(B, 2, C)}

    def forward(self, x: Tensor) -> Tensor:
        k = torch.cat([self.state["k"], self.key(x)], 1)
        v = torch.cat([self.state["v"], x.tanh()], 1)
        self.state = {"k": k[:, -7:], "v": v[:, -7:]}
        return F.scaled_dot_product_attention(self.query(x), k, v)


def test_a_list_on_the_module() -> None:
    def fresh(g: torch.Generator) -> dict[str, Any]:
        return {"caches": [noise(g, B, 2, C) for _ in range(2)]}

    region = own("caches", 1, 2, KeepLast(7), attribute="caches[*]")
    played(on_module(ListOnModule, 3, (region,), fresh, lambda m: {"caches": list(m.caches)}))


def test_a_dict_rebound_on_the_module() -> None:
    def fresh(g: torch.Generator) -> dict[str, Any]:
        return {"state": {"k": noise(g, B, 2, C), "v": noise(g, B, 2, C)}}

    regions = tuple(own(name, 1, 2, KeepLast(7), attribute=f"state['{name}']") for name in "kv")
    played(on_module(DictOnModule, 3, regions, fresh, lambda m: {name: [m.state[name]] for name in "kv"}))


class Decoder(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.hist = torch.ones(B, 2, C)

    def decode(self, x: Tensor) -> Tensor:
        self.hist = torch.cat([self.hist, self.key(x)], 1)[:, -8:]
        return self.attend(x, self.hist)


def test_a_bound_method() -> None:
    """`torch.compile(model.decode)`: the state is an attribute of the object that the method belongs to."""
    module = Decoder()
    eager = copy.deepcopy(module)
    step = compile_with(module.decode, replace(BY_NAME["Rebound"].contract, regions=(own("hist", 1, 2, KeepLast(8)),)))
    cadence_fx.warm_up(step, torch.randn(B, 3, C))
    before = counts(step)
    for i in range(10):
        (x,) = frames(torch.Generator().manual_seed(i), {"frames": 3})
        assert_same(step(x), eager.decode(x), f"call {i}")
        assert_same(module.hist, eager.hist, f"state {i}")
    after = counts(step)
    assert after["misses"] == before["misses"] and after["replays"] == before["replays"] + 10


def compare(module: Any, contract: Contract, calls: int = 5) -> None:
    """The module and an eager copy of it, fed the same: outputs and buffers, and every call a replay."""
    eager = copy.deepcopy(module)
    step = compile_with(module, contract)
    cadence_fx.warm_up(step, torch.randn(2, 2, C))
    before = Counter(counts(step)["misses"])
    for call in range(calls):
        x = torch.randn(2, 2, C)
        for i, (a, e) in enumerate(zip(step(x), eager(x), strict=True)):
            assert_same(a, e, f"call {call}, output {i}")
        for name, value in eager.named_buffers():
            assert_same(module.get_buffer(name), value, f"call {call}, {name}")
    assert Counter(counts(step)["misses"]) == before


class ReturnsWhatItWrites(torch.nn.Module):
    """An operator that writes in place returns what it wrote, which is the buffer itself."""

    state: Tensor

    def __init__(self, how: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("state", torch.zeros(2, 6, C))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, self.how(self.state, torch.cat([self.state[:, 2:], x], 1))


@pytest.mark.parametrize(
    "how",
    [
        lambda state, new: state.copy_(new),
        lambda state, new: state.copy_(new).contiguous(),
        lambda state, new: torch.nn.functional.dropout(state.copy_(new), 0.5, False),
        lambda state, new: torch.add(new, 0.5, out=state),
        lambda state, new: state.mul_(0.5).add_(new),
    ],
    ids=["copy_", "contiguous", "dropout", "out", "arithmetic"],
)
def test_a_buffer_that_is_written_and_returned(how: Callable[[Tensor, Tensor], Tensor]) -> None:
    region = Region("state", attribute="state", axis=1, clock="frames", start=6, retention=KeepLast(6))
    compare(ReturnsWhatItWrites(how), Contract((Clock("frames", 2),), (region,)))


class DelayLine(torch.nn.Module):
    """One buffer becomes the other, which is replaced."""

    first: Tensor
    second: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(2, 6, C))
        self.register_buffer("second", torch.ones(2, 6, C))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        y = x + self.first.mean(1, keepdim=True)
        new = torch.cat([self.second[:, 2:], x], 1)
        self.first = self.second
        self.second = new
        return (y,)


def test_a_delay_line_of_two_buffers() -> None:
    regions = (
        Region(name, attribute=name, axis=1, clock="frames", retention=Pinned(6)) for name in ("first", "second")
    )
    compare(DelayLine(), Contract((Clock("frames", 2),), tuple(regions)))


@pytest.mark.parametrize(
    "read",
    [
        lambda state: state.clone().sum(1),
        lambda state: state.flip(1).sum(1),
        lambda state: state[:, :, :].clone().sum(1),
        lambda state: torch.empty_like(state).copy_(state).sum(1),
        lambda state: state.to(torch.float32, copy=True).sum(1),
        lambda state: state.roll(1, 1).sum(1),
    ],
    ids=["clone", "flip", "slice", "like", "to", "roll"],
)
def test_operators_that_pass_the_strides_of_a_state_on(read: Callable[[Tensor], Tensor]) -> None:
    """Eager's state is transposed, and a sum over it goes another way than over the contiguous carry."""

    def step(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        following = torch.cat([x, state[:, 2:]], 1)
        return read(state), following.transpose(1, 2).contiguous().transpose(1, 2) + 1

    region = Region("state", argument="state", result=1, axis=1, clock="frames", retention=Pinned(6))
    compiled = compile_with(step, Contract((Clock("frames", 2),), (region,)))
    cadence_fx.warm_up(compiled, torch.randn(2, 2, C), torch.randn(2, 6, C))
    mine = theirs = torch.randn(2, 6, C)
    for call in range(5):
        x = torch.randn(2, 2, C)
        (y, theirs), (z, mine) = step(x, theirs), compiled(x, mine)
        assert_same(z, y, f"call {call}")
        assert_same(mine, theirs, f"call {call}, state")


@pytest.mark.parametrize(
    "look",
    [
        lambda state: state[:, :2],
        lambda state: state[:, :, ::2],
        lambda state: state.transpose(1, 2),
        lambda state: state[:, :1].expand(-1, 3, -1),
    ],
    ids=["slice", "holes", "transpose", "expand"],
)
def test_a_result_that_is_a_view_of_the_old_state_has_eagers_strides(look: Callable[[Tensor], Tensor]) -> None:
    """Eager's state is a slice of a longer tensor, and the carry is not."""

    def step(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return look(state), torch.cat([state, x], 1)[:, -6:]

    region = Region("state", argument="state", result=1, axis=1, clock="frames", start=2, retention=KeepLast(6))
    compiled = compile_with(step, Contract((Clock("frames", 2),), (region,)))
    cadence_fx.warm_up(compiled, torch.randn(2, 2, C), torch.randn(2, 2, C))
    mine = theirs = torch.randn(2, 2, C)
    for call in range(6):
        x = torch.randn(2, 2, C)
        with cadence_fx.disabled() if call == 4 else contextlib.nullcontext():
            z, mine = compiled(x, mine)
        y, theirs = step(x, theirs)
        assert_same(z, y, f"call {call}")
        assert z.stride() == y.stride(), f"call {call}"
    assert cadence_fx.report(compiled)["misses"] == {"disabled": 1}
