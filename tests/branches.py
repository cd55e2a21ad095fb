"""A device without a device: streams that only keep time, and a watch on what runs on them.

`Watched` stands for the streams of a run; the very code that forks, waits and joins on a GPU runs against it. Every
operator that executes is noted with the branch it would be launched on and the bytes it reads and writes. Time is a
vector clock: a branch knows how far each other one has come by what it has waited for. Memory comes from an allocator
that, like PyTorch's, gives back to a branch whatever was made on it as soon as the host lets go of it, and reuses it as
eagerly as it can.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from cadence_fx.branches import BranchedForward
from cadence_fx.passes import Branches

Clock = dict[int, int]


class Race(AssertionError):
    """Two accesses that nothing orders."""


class OneRow(AssertionError):
    """A plan that is not followed, and why."""


@dataclass
class _Access:
    branch: int
    time: int
    writes: bool
    bytes: frozenset[int] | None  # None: all of the block
    what: str


@dataclass
class _Block:
    """Memory that one storage after another lives in."""

    home: int | None  # None: it comes from outside
    accesses: list[_Access] = field(default_factory=list)


class Watched(TorchDispatchMode):
    """The streams of one run on ``count`` branches. ``ignore`` is the number of a wait that does not happen."""

    def __init__(self, count: int, ignore: int | None = None) -> None:
        super().__init__()
        self.clocks: list[Clock] = [{} for _ in range(count)]
        self.clocks[0] = {0: 1}
        self.current = 0
        self.ignore = ignore
        self.waits = 0
        self.launched = [0] * count  # operators on each branch
        self._live: dict[StorageWeakRef, _Block] = {}
        self._free: dict[int, list[_Block]] = {}

    # -- streams ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def on(self, branch: int) -> Iterator[None]:
        self._collect()
        before, self.current = self.current, branch
        try:
            yield
        finally:
            self.current = before

    def mark(self, branch: int) -> Clock:
        self._collect()
        if branch and 0 not in self.clocks[branch]:
            raise Race(f"branch {branch} is marked before it was forked")
        return dict(self.clocks[branch])

    def wait(self, branch: int, mark: Clock) -> None:
        self._collect()
        self.waits += 1
        if self.waits - 1 == self.ignore:
            return
        for other, time in mark.items():
            self.clocks[branch][other] = max(time, self.clocks[branch].get(other, 0))

    # -- what runs on them --------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._collect()
        result = func(*args, **(kwargs or {}))
        clock = self.clocks[self.current]
        if self.current and 0 not in clock:
            raise Race(f"{func} runs on branch {self.current}, which was not forked")
        read, written = _operands(func, args, kwargs or {})
        if not written and func._schema.returns and _aliases(func):
            return result
        clock[self.current] = clock.get(self.current, 0) + 1
        self.launched[self.current] += 1
        known = {self._key(tensor) for tensor in (*read, *written)}
        made = [tensor for tensor in _tensors(result) if self._key(tensor) not in known]
        for tensor in read:
            self._note(tensor, False, str(func))
        for tensor in (*written, *made):
            self._note(tensor, True, str(func))
        return result

    @staticmethod
    def _key(tensor: Tensor) -> StorageWeakRef:
        return StorageWeakRef(tensor.untyped_storage())

    def _note(self, tensor: Tensor, writes: bool, what: str) -> None:
        if not tensor.numel():
            return
        key = self._key(tensor)
        block = self._live.get(key)
        if block is None:
            free = self._free.get(self.current, [])
            block = self._live[key] = free.pop() if free else _Block(self.current)
            covered = None  # the one who lived there before had other bytes of it
        else:
            covered = _bytes(tensor)
        access = _Access(self.current, self.clocks[self.current][self.current], writes, covered, what)
        for other in block.accesses:
            if (writes or other.writes) and not self._knows(self.current, other) and _meet(other, access):
                raise Race(f"{what} on branch {self.current} does not wait for {other.what} on {other.branch}")
        block.accesses.append(access)

    def _knows(self, branch: int, access: _Access) -> bool:
        return access.branch == branch or self.clocks[branch].get(access.branch, 0) >= access.time

    def _collect(self) -> None:
        """Give memory that nobody holds any more back to the branch it was made on."""
        for key, block in list(self._live.items()):
            if block.home is None or not key.expired():
                continue
            del self._live[key]
            for access in block.accesses:
                if not self._knows(block.home, access):
                    raise Race(f"memory of branch {block.home} is let go of while {access.what} may still use it")
            self._free.setdefault(block.home, []).append(block)

    def adopt(self, tensors: Sequence[Any]) -> None:
        """Memory from outside, which nobody takes back."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._live.setdefault(self._key(tensor), _Block(None))

    def check_end(self) -> None:
        """At the end the main branch has waited for all others."""
        for branch, clock in enumerate(self.clocks):
            if clock.get(branch, 0) > self.clocks[0].get(branch, 0):
                raise Race(f"branch {branch} is not joined")


def watched_run(
    gm: fx.GraphModule,
    plan: Branches,
    args: Sequence[Any],
    fresh: Callable[[], Sequence[Any]],
    ignore: int | None = None,
) -> tuple[Sequence[Any], Watched]:
    """Results of a run on branches, watched. ``args`` are for the look that precedes it, ``fresh()`` for the run."""
    constants = [*vars(gm).values(), *gm.buffers(), *gm.parameters()]
    watches: list[Watched] = []
    with contextlib.ExitStack() as stack:

        def begin() -> Watched:
            watches.append(Watched(plan.count, ignore))
            watches[0].adopt([*given, *constants])
            stack.enter_context(watches[0])
            return watches[0]

        forward = BranchedForward(gm, plan, begin, lambda _: None)
        forward(*args)
        if forward.one_row is not None:
            raise OneRow(forward.one_row)
        given = fresh()
        results = forward(*given)
    watches[0].check_end()
    return results, watches[0]


def _aliases(func: Any) -> bool:
    """Whether every result of an operator is memory of an argument."""
    return all(returned.alias_info is not None for returned in func._schema.returns)


def _operands(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    read: list[Tensor] = []
    written: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        (written if writes else read).extend(_tensors(value))
    return read, written


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return list(itertools.chain(*map(_tensors, value))) if isinstance(value, (list, tuple)) else []


def _bytes(tensor: Tensor) -> frozenset[int]:
    width = tensor.element_size()
    places = torch.arange(tensor.untyped_storage().nbytes() // width)
    mine = places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).reshape(-1).tolist()
    return frozenset(place * width + byte for place in mine for byte in range(width))


def _meet(left: _Access, right: _Access) -> bool:
    return left.bytes is None or right.bytes is None or not left.bytes.isdisjoint(right.bytes)
