"""Streaming models in styles that nobody prepared for inference, with the contract that each has, if it has one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cadence_fx import Clock, Contract, KeepLast, Pinned, PromptPlusLast, Region, Ring, paths

C = 6


def frames(size: int, channels: int = C) -> Tensor:
    return torch.randn(1, size, channels)


def attend(x: Tensor, seen: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, seen, seen)


class TupleCaches(nn.Module):
    """A key and a value in a tuple for each layer, as language models pass them."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.ModuleList(nn.Linear(C, C) for _ in range(2))

    def forward(self, x: Tensor, past: tuple[tuple[Tensor, Tensor], ...]) -> tuple[Tensor, Any]:
        kept = []
        for layer, (key, value) in zip(self.keys, past, strict=True):
            key, value = torch.cat([key, layer(x)], 1), torch.cat([value, torch.tanh(x)], 1)
            x = F.scaled_dot_product_attention(x, key, value)
            kept.append((key[:, -5:], value[:, -5:]))
        return x, tuple(kept)


class NamedResults(nn.Module):
    """Arguments by name, results in a dict, a prompt that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(C, C)

    def forward(self, chunk: Tensor, *, memory: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        memory = torch.cat([memory, self.key(chunk) * scale], 1)
        if memory.shape[1] > 9:
            memory = torch.cat([memory[:, :4], memory[:, -5:]], 1)
        return {"out": attend(chunk, memory), "memory": memory}


class Rolled(nn.Module):
    """A window that is rolled, the newest frames first."""

    hist: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hist", torch.zeros(1, 8, C))

    def forward(self, x: Tensor) -> Tensor:
        y = attend(x, self.hist)
        self.hist.copy_(torch.roll(self.hist, x.size(1), 1))
        self.hist[:, : x.size(1)] = x.flip(1) * 0.5
        return y


class ListAttribute(nn.Module):
    """Caches in a plain list that the module keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.caches = [torch.zeros(1, 0, C) for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        for i, cache in enumerate(self.caches):
            seen = torch.cat([cache, torch.sin(x)], 1)
            x = x + attend(x, seen)
            self.caches[i] = seen[:, -6:]
        return x


@dataclass
class State:
    left: Tensor
    hidden: Tensor


class StateObject(nn.Module):
    """A convolution's left context and a recurrent state in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.cell = nn.Conv1d(C, C, 4), nn.GRUCell(C, C)
        self.state = State(torch.zeros(1, C, 3), torch.zeros(1, C))

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.state.left, x.tanh()], 2)
        self.state.left = joined[:, :, -3:]
        y = self.conv(joined)
        hidden = self.state.hidden
        for t in range(y.shape[2]):
            hidden = self.cell(y[:, :, t], hidden)
        self.state.hidden = hidden
        return y + hidden[:, :, None]


class Recurrent(nn.Module):
    """An LSTM, whose states are computed anew."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(C, C, batch_first=True)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, state = self.lstm(x, state)
        return y, state


class TwoRates(nn.Module):
    """Samples and tokens, each in a window of its own: 8 samples for 2 tokens."""

    def forward(self, audio: Tensor, text: Tensor, heard: Tensor, said: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heard, said = torch.cat([heard, audio * 2], 1), torch.cat([text.cos(), said], 1)
        return attend(text, heard) + attend(text, said), heard[:, -20:], said[:, :7]


class HalfRate(nn.Module):
    """A cache at half the rate of what comes in, and a smoothed level."""

    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(1))
        self.down = nn.Linear(2 * C, C)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        self.level.mul_(0.9).add_(x.abs().mean() * 0.1)
        seen = torch.cat([cache, self.down(x.reshape(1, -1, 2 * C))], 1)
        return attend(x, seen) * self.level, seen[:, -7:]


class LookAhead(nn.Module):
    """The last two frames of a chunk are seen and not kept."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat([cache, x.exp()], 1)
        return attend(x, seen), seen[:, :-2][:, -9:]


class Rings(nn.Module):
    """Two rings and the position that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.rings = nn.ParameterDict()
        self.register_buffer("k", torch.zeros(1, 2, 5, C))
        self.register_buffer("v", torch.zeros(1, 2, 5, C))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        index = (torch.arange(x.size(2)) + self.position) % 5  # type: ignore[operator]
        self.k.index_copy_(2, index, x.sin())  # type: ignore[operator]
        self.v.index_copy_(2, index, x.cos())  # type: ignore[operator]
        self.position.add_(x.size(2))  # type: ignore[operator]
        return F.scaled_dot_product_attention(x, self.k, self.v)  # type: ignore[arg-type]


FRAME = Clock("frame", 3)


def kept(name: str, policy: Any, result: Any = 1, **options: Any) -> Region:
    where = {} if "argument" in options or "attribute" in options else {"argument": name}
    fields = {"axis": 1, "clock": "frame", "start": 2, **where, **options}
    return Region(name, result=result, retention=policy, **fields)


@dataclass(frozen=True)
class Case:
    """A module, the arguments of a first call, how the next call is made of a result, and the contract."""

    module: type[nn.Module]
    first: Callable[[], tuple[Any, ...]]
    follow: Callable[[Any], tuple[Any, ...]]
    contract: Contract

    @property
    def name(self) -> str:
        return self.module.__name__


def named(call: dict[str, Any]) -> tuple[Any, ...]:
    return (), call


CASES = (
    Case(
        TupleCaches,
        lambda: (frames(3), tuple((frames(2), frames(2)) for _ in range(2))),
        lambda out: (frames(3), out[1]),
        Contract([FRAME], [kept("past", KeepLast(5), "1[*][*]", argument="past[*][*]")]),
    ),
    Case(
        NamedResults,
        lambda: named({"chunk": frames(3), "memory": frames(4)}),
        lambda out: named({"chunk": frames(3), "memory": out["memory"]}),
        Contract([FRAME], [kept("memory", PromptPlusLast(4, 5), "['memory']", start=4)]),
    ),
    Case(
        Rolled,
        lambda: (frames(3),),
        lambda out: (frames(3),),
        Contract([FRAME], [kept("hist", KeepLast(8, "prepend"), None, attribute="hist", start=8)]),
    ),
    Case(
        ListAttribute,
        lambda: (frames(2),),
        lambda out: (frames(2),),
        Contract([Clock("frame", 2)], [kept("caches", KeepLast(6), None, attribute="caches.*", start=0)]),
    ),
    Case(
        StateObject,
        lambda: (torch.randn(1, C, 4),),
        lambda out: (torch.randn(1, C, 4),),
        Contract(
            [Clock("frame", 4)],
            [
                kept("left", KeepLast(3), None, attribute="state.left", axis=2, start=3),
                kept("hidden", Pinned(1), None, attribute="state.hidden", axis=0, start=1),
            ],
        ),
    ),
    Case(
        Recurrent,
        lambda: (frames(3), (torch.randn(1, 1, C), torch.randn(1, 1, C))),
        lambda out: (frames(3), out[1]),
        Contract([Clock("frame", 1)], [kept("state", Pinned(1), "1[*]", argument="state[*]", axis=0, start=1)]),
    ),
    Case(
        TwoRates,
        lambda: (frames(8), frames(2), frames(4), frames(1)),
        lambda out: (frames(8), frames(2), out[1], out[2]),
        Contract(
            [Clock("audio", 8), Clock("text", 2)],
            [
                kept("heard", KeepLast(20), clock="audio", start=4),
                kept("said", KeepLast(7, "prepend"), 2, clock="text", start=1),
            ],
        ),
    ),
    Case(
        HalfRate,
        lambda: (frames(4), frames(1)),
        lambda out: (frames(4), out[1]),
        Contract(
            [Clock("frame", 4)],
            [
                kept("cache", KeepLast(7), start=1, growth=Fraction(1, 2)),
                kept("level", Pinned(1), None, attribute="level", axis=0, start=1),
            ],
        ),
    ),
    Case(
        LookAhead,
        lambda: (frames(5), frames(2)),
        lambda out: (frames(5), out[1]),
        Contract([FRAME], [kept("cache", KeepLast(9))]),
    ),
    Case(
        Rings,
        lambda: (torch.randn(1, 2, 2, C),),
        lambda out: (torch.randn(1, 2, 2, C),),
        Contract(
            [Clock("frame", 2)],
            [
                kept("k", Ring(5), None, attribute="k", axis=2, start=5),
                kept("v", Ring(5), None, attribute="v", axis=2, start=5),
                kept("position", Pinned(1), None, attribute="position", axis=0, start=1),
            ],
        ),
    ),
)


def same(found: Contract, declared: Contract, but: Collection[str] = ()) -> str | None:
    """How two contracts differ in what they say of a stream: None where they say the same, under whatever names.

    Policies are the same that keep the same frames in every call of the stream. Clocks of a product that only run
    inside a call, session lifetimes and scratch say nothing that one turn shows.

    Args:
        but: places of regions whose retention is not compared beyond its extents.
    """
    left, right = (_table(contract, but) for contract in (found, declared))
    if left.keys() != right.keys():
        return f"places {sorted(left)} and {sorted(right)}"
    for place, facts in left.items():
        if left[place] != right[place] and not (
            None in (left[place][1], right[place][1]) and _stays(left[place], right[place])
        ):
            return f"{place}: {facts} and {right[place]}"
    mine, theirs = (
        {(each.argument, each.axis, *map(each.size, contract.advances_of(each.clock))) for each in contract.inputs}
        for contract in (found, declared)
    )
    return None if mine == theirs else f"inputs {mine} and {theirs}"


def spelled_out(contract: Contract, like: Contract) -> Contract:
    """A contract with a region for each state that a ``*`` stands for, where another declares one by one."""
    regions: list[Region] = []
    for region in contract.regions:
        pattern = paths.parse(region.accessor)
        if paths.ANY not in pattern:
            regions.append(region)
            continue
        for other in like.regions:
            path = paths.parse(other.accessor)
            if paths.matches(pattern, path) and (region.argument is None) == (other.argument is None):
                field = "argument" if region.argument is not None else "attribute"
                change = {"name": other.name, field: getattr(other, field)}
                if region.result is not None:
                    steps = [step for step, star in zip(path, pattern, strict=True) if star == paths.ANY]
                    change["result"] = str(region.result).replace("[*]", "[{}]").format(*steps)
                regions.append(replace(region, **change))
    return replace(contract, regions=regions)


def _stays(*tables: tuple[Any, ...]) -> bool:
    """Of two regions that never move, one may be declared as replaced, along any axis: that says less."""
    return tables[0][0] == tables[1][0] and all(start == bound for _, _, start, bound, *_ in tables)


def lesser(found: Contract, declared: Contract) -> list[str]:
    """Regions that are only found to be replaced, where frames of the old state are kept beside fresh ones."""
    left, right = _table(found, ()), _table(declared, ())
    return [
        place
        for place, facts in left.items()
        if facts[1] is None
        and place in right
        and any(len({span.source for span in spans}) == 2 for spans in right[place][5])
    ]


def _table(contract: Contract, but: Collection[str]) -> dict[str, tuple[Any, ...]]:
    table: dict[str, tuple[Any, ...]] = {}
    for region in contract.regions:
        if not region.persistent:
            continue
        policy = region.retention
        kept: list[Any] = []
        if not policy.fixed and region.frame_clock is not None:
            for advance in contract.advances_of(region.frame_clock):
                extent, extents = region.start, set[int]()
                while extent not in extents:
                    extents.add(extent)
                    kept.append(policy.survivors(extent, region.added(advance)) if region.place not in but else extent)
                    extent = region.next_extent(extent, contract.stride_of(region.frame_clock))
        axis = None if isinstance(policy, Pinned) else region.frame_axis
        table[region.place] = (str(region.result), axis, region.start, policy.bound, policy.fixed, kept)
    return table
