"""The toy modules of ``toys`` as live streams: contract, fresh states, inputs and calls of each.

:class:`Run` plays one live stream on any callable (the module itself, or a compiled one); :func:`visits` finds, by
running the eager module alone, every (extents, advance) point a stream can reach. Nothing here asks the library under
test for an answer.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cadence_fx.clock import Clock
from cadence_fx.contract import Contract, Input, Region
from cadence_fx.retention import KeepLast, Pinned, PromptPlusLast, Retention, Ring
from tests import toys
from tests.toys import B, C, T

Inputs = Callable[[torch.Generator, Mapping[str, int]], tuple[Tensor, ...]]
Fresh = Callable[[torch.Generator], tuple[Any, ...] | dict[str, Tensor]]


@dataclass(frozen=True)
class Stream:
    """One toy with its declaration and its traffic.

    ``fresh`` makes a start state: the trailing arguments of a call, or a dict of module attributes. ``where`` finds
    each region's tensors in (module, state). ``calls`` and ``flushes`` are the advances of every clock in an ordinary
    and in a turn-ending call. ``keeps`` are the indices of trailing arguments that outlive a turn.
    """

    module: type[nn.Module]
    contract: Contract
    fresh: Fresh
    inputs: Inputs
    where: Callable[[Any, tuple[Any, ...]], dict[str, list[Tensor]]]
    axes: dict[str, int]
    calls: tuple[dict[str, int], ...]
    flushes: tuple[dict[str, int], ...] = ()
    keeps: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.module.__name__

    def build(self, device: str = "cpu", seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.module().eval().to(device)


class Run:
    """One live stream on one callable: holds the state between calls and starts turns."""

    def __init__(self, stream: Stream, module: Any, step: Any = None, device: str = "cpu"):
        self.stream, self.module, self.device = stream, module, device
        self.step = module if step is None else step  # a compiled module has no truth value
        self.state: tuple[Any, ...] = ()

    def restart(self, seed: int, everything: bool = True) -> None:
        """Begin a turn: pass start states again, rebind attributes, refill buffers (``everything``: a new session)."""
        fresh = self._move(self.stream.fresh(torch.Generator().manual_seed(seed)))
        if isinstance(fresh, tuple):
            kept = () if everything else self.stream.keeps
            self.state = tuple(self.state[i] if i in kept else value for i, value in enumerate(fresh))
            return
        for path, value in fresh.items():
            owner, _, leaf = path.rpartition(".")
            target = self.module.get_submodule(owner)
            if leaf in target._buffers:
                getattr(target, leaf).copy_(value)
            else:
                setattr(target, leaf, value)

    def fork(self) -> "Run":
        """An eager stream that goes on from here on its own copies of the module and the state."""
        module, state = copy.deepcopy((self.module, self.state))
        twin = Run(self.stream, module, device=self.device)
        twin.state = state
        return twin

    def inputs(self, seed: int, advance: Mapping[str, int]) -> tuple[Tensor, ...]:
        return self._move(self.stream.inputs(torch.Generator().manual_seed(seed), advance))

    def call(self, *inputs: Tensor) -> Tensor:
        result = self.step(*inputs, *self.state)
        if not self.state:
            return result
        y, *state = result
        self.state = tuple(state)
        return y

    def tensors(self) -> dict[str, list[Tensor]]:
        return self.stream.where(self.module, self.state)

    def extents(self) -> dict[str, int]:
        found = {name: {t.size(self.stream.axes[name]) for t in ts} for name, ts in self.tensors().items()}
        assert all(len(sizes) == 1 for sizes in found.values()), f"instances of one region differ: {found}"
        return {name: sizes.pop() for name, sizes in found.items()}

    def _move(self, value: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda t: t.to(self.device), value)


Point = tuple[frozenset[tuple[str, int]], frozenset[tuple[str, int]]]


def visits(stream: Stream) -> set[Point]:
    """Every (extents on entry, advance) the eager module can be called at: ordinary calls, flushes, turn boundaries."""
    start = Run(stream, stream.build())
    start.restart(0)
    queue, seen, points = [start], set(), set()
    while queue:
        run = queue.pop()
        here = frozenset(run.extents().items())
        if here in seen:
            continue
        seen.add(here)
        for advance in (*stream.calls, *stream.flushes):
            after = run.fork()
            with torch.no_grad():
                after.call(*after.inputs(1, advance))
            points.add((here, frozenset(advance.items())))
            turn = after.fork()
            turn.restart(0, everything=False)
            queue += [turn] if advance in stream.flushes else [turn, after]
    return points


def declared(contract: Contract) -> Iterator[Point]:
    """The same points as the catalog states them."""
    for entry in contract.catalog():
        yield frozenset(entry.extents), frozenset(entry.advance)


def noise(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def frames(g: torch.Generator, advance: Mapping[str, int]) -> tuple[Tensor, ...]:
    """One input of (B, new frames, C)."""
    return (noise(g, B, advance["frames"], C),)


def on_argument(module: type[nn.Module], stride: int, region: Region, shape: tuple[int, ...], **options: Any) -> Stream:
    """A stream on one clock ``frames`` whose only state is the second argument and the second result."""
    extra = options.pop("clocks", ())
    return Stream(
        module,
        Contract((Clock("frames", stride), *extra), (region,)),
        fresh=lambda g: (noise(g, *shape),),
        where=lambda m, s: {region.name: [s[0]]},
        axes={region.name: region.axes[-1]},
        calls=({"frames": stride},),
        **{"inputs": frames, **options},
    )


def on_module(module: type[nn.Module], stride: int, regions: tuple[Region, ...], fresh: Fresh, where: Any) -> Stream:
    """A stream on one clock ``frames`` whose state lives on the module itself."""
    return Stream(
        module,
        Contract((Clock("frames", stride),), regions),
        fresh=fresh,
        inputs=frames,
        where=lambda m, s: where(m),
        axes={r.name: r.axes[-1] for r in regions},
        calls=({"frames": stride},),
    )


def kept(name: str, axis: Any, start: int, retention: Retention, result: Any = 1, **options: Any) -> Region:
    """A region passed as the argument ``name`` and returned; on the clock ``frames`` unless ``options`` differ."""
    return Region(
        name,
        axis=axis,
        start=start,
        retention=retention,
        **{"argument": name, "result": result, "clock": "frames", **options},
    )


def own(name: str, axis: int, start: int, retention: Retention, **options: Any) -> Region:
    """A region that is the module attribute ``name``."""
    return Region(
        name, axis=axis, start=start, retention=retention, **{"attribute": name, "clock": "frames", **options}
    )


def nested_state(g: torch.Generator) -> tuple[Any, ...]:
    return ({"conv": noise(g, B, C, 2), "att": {"k": noise(g, B, 2, C), "v": noise(g, B, 2, C)}},)


def part(name: str, path: str, axis: int, bound: int) -> Region:
    return kept(name, axis, 2, KeepLast(bound), f"1{path}", argument=f"state{path}")


STREAMS = (
    on_argument(toys.AppendLast, 3, kept("cache", 1, 2, KeepLast(9)), (B, 2, C)),
    on_argument(toys.PrependLast, 3, kept("cache", 1, 2, KeepLast(9, "prepend")), (B, 2, C)),
    on_argument(toys.PromptAppend, 3, kept("cache", 1, 6, PromptPlusLast(6, 7)), (B, 6, C)),
    on_argument(toys.PromptPrepend, 3, kept("cache", 1, 6, PromptPlusLast(6, 7, "prepend")), (B, 6, C)),
    on_argument(
        toys.ConvContext,
        6,
        kept("context", 2, 4, KeepLast(4)),
        (B, C, 4),
        inputs=lambda g, advance: (noise(g, B, C, advance["frames"]),),
    ),
    on_argument(toys.GrowThenPinned, 3, kept("cache", 1, 0, PromptPlusLast(8, 0)), (B, 0, C)),
    on_argument(toys.ZeroStart, 2, kept("cache", 1, 0, KeepLast(5)), (B, 0, C)),
    on_argument(toys.ViewState, 3, kept("cache", 2, 3, KeepLast(8)), (B, C, 3)),
    on_argument(toys.ReadsState, 3, kept("cache", 1, 3, KeepLast(9)), (B, 3, C)),
    on_argument(
        toys.SolverStack,
        3,
        kept("cache", (0, 2), 2, KeepLast(8), clock=("steps", "frames")),
        (T, B, 2, C),
        clocks=(Clock("steps", period=T),),
    ),
    on_argument(
        toys.SolverWorkspace,
        3,
        kept("cache", (0, 2), 4, PromptPlusLast(4, 6, "prepend"), clock=("steps", "frames")),
        (T, B, 4, C),
        clocks=(Clock("steps", period=T),),
    ),
    on_module(
        toys.Rebound,
        3,
        (own("hist", 2, 2, KeepLast(8)),),
        lambda g: {"hist": noise(g, B, C, 2)},
        lambda m: {"hist": [m.hist]},
    ),
    on_module(
        toys.BufferShift,
        3,
        (own("hist", 1, 8, KeepLast(8)),),
        lambda g: {"hist": noise(g, B, 8, C)},
        lambda m: {"hist": [m.hist]},
    ),
    on_module(
        toys.RingByIndex,
        3,
        (own("ring", 1, 7, Ring(7)), own("position", 0, 1, Pinned(1))),
        lambda g: {"ring": noise(g, B, 7, C), "position": torch.zeros(1, dtype=torch.int64)},
        lambda m: {"ring": [m.ring], "position": [m.position]},
    ),
    on_module(
        toys.LayerAttributes,
        2,
        (own("hist", 1, 1, KeepLast(6), attribute="layers.*.hist"),),
        lambda g: {f"layers.{i}.hist": noise(g, B, 1, C) for i in range(3)},
        lambda m: {"hist": [layer.hist for layer in m.layers]},
    ),
    Stream(
        toys.LayerList,
        Contract(
            (Clock("frames", 2),),
            (kept("kv", 1, 2, KeepLast(7), "1[*]", argument="caches[*]"),),
        ),
        fresh=lambda g: ([noise(g, B, 2, C) for _ in range(3)],),
        inputs=frames,
        where=lambda m, s: {"kv": list(s[0])},
        axes={"kv": 1},
        calls=({"frames": 2},),
    ),
    Stream(
        toys.NestedDict,
        Contract(
            (Clock("frames", 3),),
            (part("conv", "['conv']", 2, 2), part("k", "['att']['k']", 1, 6), part("v", "['att']['v']", 1, 6)),
        ),
        fresh=nested_state,
        inputs=frames,
        where=lambda m, s: {"conv": [s[0]["conv"]], "k": [s[0]["att"]["k"]], "v": [s[0]["att"]["v"]]},
        axes={"conv": 2, "k": 1, "v": 1},
        calls=({"frames": 3},),
    ),
    Stream(
        toys.TwoClocks,
        Contract(
            (Clock("tokens", 5, flush=(2,)), Clock("frames", of="tokens", rate=2)),
            (
                kept("tokens", 1, 1, KeepLast(11), clock="tokens", lifetime="session"),
                kept("frames", 1, 2, KeepLast(23), 2),
            ),
            inputs=(Input("x", axis=1, clock="tokens"),),
        ),
        fresh=lambda g: (noise(g, B, 1, C), noise(g, B, 2, C)),
        inputs=lambda g, advance: (noise(g, B, advance["tokens"], C),),
        where=lambda m, s: {"tokens": [s[0]], "frames": [s[1]]},
        axes={"tokens": 1, "frames": 1},
        calls=({"tokens": 5, "frames": 10},),
        flushes=({"tokens": 2, "frames": 4},),
        keeps=(0,),
    ),
    Stream(
        toys.Duplex,
        Contract(
            (Clock("heard", 3), Clock("said", 2, flush=(1,))),
            (
                kept("ear", 1, 2, KeepLast(6), clock="heard"),
                kept("mouth", 1, 1, KeepLast(5), 2, clock="said"),
            ),
            inputs=(Input("said", axis=1, clock="said"),),
        ),
        fresh=lambda g: (noise(g, B, 2, C), noise(g, B, 1, C)),
        inputs=lambda g, advance: (noise(g, B, advance["heard"], C), noise(g, B, advance["said"], C)),
        where=lambda m, s: {"ear": [s[0]], "mouth": [s[1]]},
        axes={"ear": 1, "mouth": 1},
        calls=({"heard": 3, "said": 2},),
        flushes=({"heard": 3, "said": 1},),
    ),
    Stream(
        toys.PartialFlush,
        Contract(
            (Clock("frames", 4, flush=(1, 2, 3)),),
            (kept("cache", 1, 2, KeepLast(10)),),
            inputs=(Input("x", axis=1, clock="frames"),),
        ),
        fresh=lambda g: (noise(g, B, 2, C),),
        inputs=frames,
        where=lambda m, s: {"cache": [s[0]]},
        axes={"cache": 1},
        calls=({"frames": 4},),
        flushes=({"frames": 3}, {"frames": 1}, {"frames": 2}),
    ),
)
BY_NAME = {stream.name: stream for stream in STREAMS}
