"""Two copies of one stream side by side: eager PyTorch, and the same module compiled with the cadence backend."""

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import cadence_fx
from cadence_fx.backend import cadence
from cadence_fx.contract import Contract
from tests.streams import Run, Stream

# By name where the package is installed (its entry point), by function from a bare checkout.
BACKEND: Any = "cadence" if "cadence" in torch.compiler.list_backends(exclude_tags=()) else cadence

TURNS = (23, 17, 25)  # calls in each turn; the last of a turn is a flush where the stream declares one
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def compile_with(target: Any, contract: Contract, passes: Any = None) -> Callable[..., Any]:
    options: dict[str, Any] = {"contract": contract, "passes": passes}
    return torch.compile(target, backend=BACKEND, options=options)


def byte_view(t: Tensor) -> Tensor:
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal shape, dtype and bytes, in logical order; bytes are compared as integers."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, eager {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, eager {expected.dtype}"
    wrong = (byte_view(actual) != byte_view(expected)).sum().item()
    assert wrong == 0, f"{what}: {wrong} of {expected.nbytes} bytes differ from eager"


_ticks = itertools.count(1)


class Ticks:
    """A counter that nobody finds who walks from a callable: only a method names the global that it is in."""

    def next(self) -> int:
        return next(_ticks)


def counts(step: Callable[..., Any]) -> dict[str, Any]:
    return cadence_fx.report(step).as_dict()


class Pair:
    """An eager and a compiled run of one stream, fed the same inputs and compared after every call."""

    def __init__(
        self,
        stream: Stream,
        device: str = "cpu",
        contract: Contract | None = None,
        warm: bool = True,
        passes: Any = None,
    ):
        module = stream.build(device)
        self.stream = stream
        self.eager = Run(stream, copy.deepcopy(module), device=device)
        self.step = compile_with(module, contract or stream.contract, passes)
        self.live = Run(stream, module, self.step, device)
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.addresses: dict[str, set[int]] = {}
        self.calls = 0
        self.strides = True  # outputs have eager's strides; one that is a state itself has the carry's
        self.before: dict[str, Any] = {}
        if warm:
            self.warm_up()

    def warm_up(self) -> None:
        self.live.restart(90)
        cadence_fx.warm_up(self.step, *self.live.inputs(91, self.stream.calls[0]), *self.live.state)
        self.restart(0)
        self.before = counts(self.step)

    def restart(self, seed: int, everything: bool = True) -> None:
        self.eager.restart(seed, everything)
        self.live.restart(seed, everything)

    def call(self, advance: Mapping[str, int] | None = None) -> Tensor:
        """One call of both; the outputs and every region must agree, and all outputs are kept."""
        self.calls += 1
        inputs = self.eager.inputs(1000 + self.calls, advance or self.stream.calls[0])
        return self.feed(*inputs)

    def feed(self, *inputs: Tensor) -> Tensor:
        expected = pytree.tree_leaves(self.eager.call(*(copy.deepcopy(x) for x in inputs)))
        actual = pytree.tree_leaves(self.live.call(*inputs))
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_same(a, e, f"call {self.calls}, output {i}")
            assert not self.strides or a.stride() == e.stride(), f"output {i}: strides {a.stride()}, eager {e.stride()}"
            self.kept.append((a, e))
        self.check_state()
        return actual[0]

    def check_state(self) -> None:
        for name, expected in self.eager.tensors().items():
            for i, (a, e) in enumerate(zip(self.live.tensors()[name], expected, strict=True)):
                assert_same(a, e, f"call {self.calls}, region {name}[{i}]")
                self.addresses.setdefault(f"{name}[{i}]", set()).add(a.data_ptr())

    def check_kept(self) -> None:
        """Outputs handed out earlier still hold the bytes that eager gave."""
        for i, (actual, expected) in enumerate(self.kept):
            assert_same(actual, expected, f"output {i} of {len(self.kept)}, read at the end")

    def since(self, field: str) -> int:
        return counts(self.step)[field] - self.before[field]

    def missed(self) -> Counter[str]:
        """Calls that ran eager since the warm-up, by reason."""
        return Counter(counts(self.step)["misses"]) - Counter(self.before["misses"])


def check_stream(stream: Stream, device: str = "cpu") -> None:
    """Every turn of a stream with its flushes: bytes, addresses, and that each call is the replay of a class."""
    pair = Pair(stream, device)
    for turn, calls in enumerate(TURNS):
        if turn:
            pair.restart(turn, everything=False)
        for _ in range(calls - 1):
            pair.call()
        pair.call(stream.flushes[turn % len(stream.flushes)] if stream.flushes else None)
    pair.check_kept()
    moved = {name: len(seen) for name, seen in pair.addresses.items() if len(seen) > 1}
    assert not moved, f"regions seen at several addresses: {moved}"
    assert pair.missed() == Counter()
    assert pair.since("late_captures") == 0
    assert pair.since("captures") == 0
    assert pair.since("replays") == sum(TURNS)
    check_prediction(counts(pair.step))


def check_prediction(report: dict[str, Any]) -> None:
    """What the contract and the example call told of classes and bytes is what there is, exactly."""
    found = report["prediction"]
    for what in ("classes", "staging", "carries", "workspaces"):
        assert found[what]["predicted"] == found[what]["measured"], what
    assert found["held"] and found["staging"]["measured"] and found["carries"]["measured"]
    for what in ("staging", "carries"):
        assert report["bytes"][f"predicted_{what}"] == report["bytes"][f"measured_{what}"] > 0
