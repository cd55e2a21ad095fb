"""ExactShapeReplay around plain callables, of which nothing is known: what they write, return and are given."""

import copy
import dataclasses
import enum
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cadence_fx._torch import tree_leaves
from cadence_fx.replay import ExactShapeReplay
from tests.harness import assert_same
from tests.toys import B, C


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield


def noise(*shape: int) -> Tensor:
    return torch.randn(*(shape or (B, 3, C)))


def test_outputs_that_are_a_conjugate_or_a_part_of_an_input() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x.conj(), x.imag, x.real

    replay = ExactShapeReplay(f)
    for i in range(2):
        x = torch.randn(4, dtype=torch.complex64)
        for a, e in zip(replay(x), f(x), strict=True):
            assert_same(a.resolve_conj(), e.resolve_conj(), f"call {i}")


def as_number(x: Tensor) -> tuple[Tensor, float]:
    return x * 2, float(x.sum())


def itself(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else x * 2


def itself_by_list(x: Tensor) -> Tensor:
    return x if x.tolist()[0] > 0 else x * 2


def itself_by_numpy(x: Tensor) -> Tensor:
    return x if x.numpy()[0] > 0 else x * 2


def itself_by_array(x: Tensor) -> Tensor:
    return x if np.asarray(x)[0] > 0 else x * 2


def random_or_not(x: Tensor) -> Tensor:
    return x + torch.rand(2) if x.sum() > 0 else x


def written_or_not(x: Tensor) -> Tensor:
    if x.sum() > 0:
        x.add_(1)
    return x * 2


def one_or_two(x: Tensor) -> Any:
    return (x + 1, x + 2) if x.sum() > 0 else x * 2


@pytest.mark.parametrize(
    "f",
    [as_number, itself, itself_by_list, itself_by_numpy, itself_by_array, random_or_not, written_or_not, one_or_two],
    ids=lambda f: f.__name__,
)
def test_what_is_done_may_follow_values_on_the_host_too(f: Callable[[Tensor], Any]) -> None:
    replay = ExactShapeReplay(f)
    for sign in (-1, 1, -1, 1):
        given = [torch.full((2,), float(sign)) for _ in range(2)]
        results = []
        for x, function in zip(given, (replay.__call__, f), strict=True):
            torch.manual_seed(0)
            results.append(function(x))
        assert (results[0] is given[0]) == (results[1] is given[1])
        for found, expected in zip(tree_leaves(results[0]), tree_leaves(results[1]), strict=True):
            assert_same(torch.as_tensor(found), torch.as_tensor(expected), f"sign {sign}")
        assert_same(given[0], given[1], "the argument")
    assert replay.ledger.misses == {"host_read": 4}


def test_replay_of_a_write_that_changed_nothing_at_capture() -> None:
    replay = ExactShapeReplay(lambda x: x.relu_().sum())
    replay(torch.ones(4))
    x = -torch.ones(4)
    replay(x)
    assert_same(x, torch.zeros(4), "the argument")


def test_replay_of_one_tensor_passed_twice_and_written() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x + y

    replay = ExactShapeReplay(f)
    replay(noise(4), noise(4))
    for i in range(2):
        x = noise(4)
        twin = x.clone()
        assert_same(replay(x, x), f(twin, twin), f"output {i}")


def test_replay_of_one_tensor_passed_twice_first() -> None:
    replay = ExactShapeReplay(lambda x, y: x.add_(1) + y)
    x = noise(4)
    expected = (x + 1) * 2
    assert_same(replay(x, x), expected, "output")


def test_replay_of_a_module_that_writes_its_own_buffers() -> None:
    """Capture runs it several times, and the buffers count each."""
    module = nn.BatchNorm1d(4).train()
    eager, replay = copy.deepcopy(module), ExactShapeReplay(module)
    for i in range(3):
        x = noise(5, 4)
        assert_same(replay(x), eager(x), f"output {i}")
        assert module.running_mean is not None and eager.running_mean is not None
        assert_same(module.running_mean, eager.running_mean, f"running mean {i}")


@pytest.mark.parametrize("change", ["transposed", "shorter"])
def test_replay_of_an_aliased_tensor_of_another_geometry(change: str) -> None:
    held, x = noise(4, 4), noise(4)
    replay = ExactShapeReplay(lambda x, s: x + s.sum(0), aliased=[held])
    replay(x, held)
    other = held.t() if change == "transposed" else held[:2]
    assert_same(replay(x, other), x + other.sum(0), "output")


def test_replay_with_none_where_a_tensor_was() -> None:
    def f(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return x if bias is None else x + bias

    replay = ExactShapeReplay(f)
    for bias in (torch.ones(4), None, torch.ones(4), None):
        x = noise(4)
        assert_same(replay(x, bias=bias), f(x, bias), f"bias {bias}")


def test_replay_where_the_structure_of_the_result_follows_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a launch does not run the callable again."""

    class Once:
        static_outputs, nbytes, closed = True, 0, False

        def __init__(self, run: Any) -> None:
            self._outputs = run()

        def launch(self) -> Any:
            return self._outputs

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr("cadence_fx.capture.record", lambda run, device: Once(run))
    replay = ExactShapeReplay(lambda x: (torch.ones(2), torch.ones(2)) if x.numel() > 3 else {"a": torch.ones(2)})
    for size in (4, 3, 4, 3):
        assert isinstance(replay(noise(size)), tuple if size > 3 else dict)


def test_replay_of_a_sparse_argument() -> None:
    replay = ExactShapeReplay(lambda x: x.to_dense() * 2)
    x = torch.eye(3).to_sparse()
    assert_same(replay(x), x.to_dense() * 2, "output")


def test_containers_among_the_arguments_are_the_callers_own() -> None:
    def step(x: Tensor, kv: dict[str, Any]) -> Tensor:
        kv["k"] = torch.cat([kv["k"], x])
        kv["log"].append(len(kv["log"]))
        return x * 2

    replay = ExactShapeReplay(step)
    kv: dict[str, Any] = {"k": torch.zeros(0), "log": []}
    expected = copy.deepcopy(kv)
    for _ in range(3):
        x = noise(2)
        assert_same(replay(x, kv), step(x, expected), "output")
    assert_same(kv["k"], expected["k"], "the dict's tensor")
    assert kv["log"] == [0, 1, 2]
    assert replay.ledger.misses == {"mutates_argument": 3}
    assert "args[1]['k']" in replay.refused[0].detail


def test_a_container_that_is_replaced_by_an_equal_one() -> None:
    def f(x: Tensor, *, box: dict[str, list[int]]) -> Tensor:
        box["inner"] = [*box["inner"]]
        return x * 2

    replay, inner = ExactShapeReplay(f), [1]
    box = {"inner": inner}
    for _ in range(2):
        replay(noise(2), box=box)
        assert box["inner"] == [1] and box["inner"] is not inner
    assert replay.ledger.misses == {"mutates_argument": 2}


def test_containers_that_are_only_read_are_replayed() -> None:
    replay = ExactShapeReplay(lambda x, parts: x * parts["a"][0] + parts["b"])
    for i in range(3):
        x, a, b = noise(2), noise(2), noise(2)
        assert_same(replay(x, {"a": [a], "b": b}), x * a + b, f"output {i}")
    assert replay.ledger.replays == 3


@dataclasses.dataclass
class Pair:
    y: Tensor
    x: Tensor


class Size(enum.Enum):
    SMALL = 1


RESULTS: list[Callable[[Tensor], Any]] = [
    lambda x: Pair(x * 2, x).x,
    lambda x: (x * 2, [None, 1.5, "a", Size.SMALL, x.shape, x.dtype]),
]


def in_object(x: Tensor) -> Pair:
    return Pair(x * 2, x)


def in_closure(x: Tensor) -> Callable[[], Tensor]:
    return lambda: x


def in_generator(x: Tensor) -> Iterator[Tensor]:
    return iter([x])


def in_set(x: Tensor) -> set[Tensor]:
    return {x}


READ: list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = [
    (in_object, lambda result: result.x),
    (in_closure, lambda result: result()),
    (in_generator, next),
    (in_set, lambda result: result.pop()),
]


@pytest.mark.parametrize(("f", "read"), READ, ids=["object", "closure", "generator", "set"])
def test_results_that_no_launch_can_make(f: Callable[[Tensor], Any], read: Callable[[Any], Tensor]) -> None:
    replay = ExactShapeReplay(f)
    inputs = [noise(2) for _ in range(3)]
    for x, result in zip(inputs, [replay(x) for x in inputs], strict=True):
        assert read(result) is x
    assert replay.ledger.misses == {"opaque_output": 3}


@pytest.mark.parametrize("f", RESULTS, ids=["a tensor out of an object", "constants"])
def test_results_that_a_launch_can_make(f: Callable[[Tensor], Any]) -> None:
    replay = ExactShapeReplay(f)
    for _ in range(3):
        x = noise(2)
        result, expected = replay(x), f(x)
        if isinstance(expected, tuple):
            assert result[1] == expected[1]
            result, expected = result[0], expected[0]
        assert_same(result, expected, "output")
    assert replay.ledger.replays == 3


class Hidden:
    """Its tensor is in the closure of a function, where nobody looks."""

    def __init__(self, weight: Tensor) -> None:
        self._functions = (lambda x: x * weight,)

    def __call__(self, x: Tensor) -> Tensor:
        return self._functions[0](x)


def doubled_by(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x * weight


@pytest.mark.parametrize("held", [doubled_by, Hidden], ids=["in a closure", "where nobody looks"])
def test_a_tensor_that_requires_grad_and_is_no_argument(held: Callable[[Tensor], Any]) -> None:
    weight = torch.full((3,), 2.0, requires_grad=True)
    replay = ExactShapeReplay(held(weight))
    with torch.enable_grad():
        for x in (noise(3), noise(3)):
            weight.grad = None
            replay(x).sum().backward()
            assert weight.grad is not None
            assert_same(weight.grad, x, "the gradient")
    assert replay.ledger.misses == {"requires_grad": 2}
    for _ in range(2):
        x = noise(3)
        assert_same(replay(x), x * 2, "without grad mode")
    assert replay.ledger.replays == 2


def test_a_weight_that_requires_grad_only_after_the_capture() -> None:
    module = nn.Linear(3, 3).requires_grad_(False)
    replay = ExactShapeReplay(module)
    with torch.enable_grad():
        assert not replay(noise(2, 3)).requires_grad
        module.bias.requires_grad_(True)
        assert replay(noise(2, 3)).requires_grad
    assert replay.ledger.replays == 1 and replay.ledger.misses == {"requires_grad": 1}


_again: list[Callable[[Tensor, int], Tensor]] = []


class Again:
    """Calls what a global holds that only this method names, so that nobody finds it beforehand."""

    def step(self, x: Tensor, depth: int) -> Tensor:
        return _again[-1](x, depth)


def test_a_callable_that_calls_its_own_replay() -> None:
    again = Again()

    def f(x: Tensor, depth: int) -> Tensor:
        return again.step(x + 1, depth - 1) * 2 + x if depth else x

    _again.append(f)
    inputs = [noise(3) for _ in range(3)]
    expected = [f(x, 2) for x in inputs]
    replay = ExactShapeReplay(f)
    _again.append(replay)
    for i, x in enumerate(inputs):
        assert_same(replay(x, 2), expected[i], f"output {i}")
    assert replay.ledger.replays == 3 and replay.ledger.misses == {"reentrant": 6}
    assert_same(replay(inputs[0], 0), inputs[0], "a call of its own")
    assert replay.ledger.replays == 4


def test_a_replay_that_raises_leaves_what_eager_leaves() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 2)
            self.calls = nn.Buffer(torch.zeros(1))

        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            x.add_(1)
            self.calls.add_(torch.rand(1))
            return self.table(index) + x

    eager = Looks()
    module = copy.deepcopy(eager)
    replay = ExactShapeReplay(module)
    for last in (1, 9, 2):
        results: list[Any] = []
        for function in (replay.__call__, eager.forward):
            torch.manual_seed(last)
            x = torch.ones(2, 2)
            try:
                result = function(x, torch.tensor([0, last]))
            except IndexError as error:
                result = torch.tensor(len(str(error)))
            results.append((result, x, torch.get_rng_state()))
        for a, e in zip(*results, strict=True):
            assert_same(a, e, f"index {last}")
        assert_same(module.calls, eager.calls, f"the buffer, index {last}")
    assert replay.ledger.replays == 2 and replay.ledger.misses == {"raised": 1}


def test_replays_within_a_replay() -> None:
    """While the outer class is tried the inner ones run their code, uncounted; afterwards the host's recording calls
    them."""
    inner = ExactShapeReplay(lambda x: x.cos() * 3)
    outer = ExactShapeReplay(lambda x: inner(x + 1) - x)
    for i in range(4):
        x = noise(3)
        assert_same(outer(x), (x + 1).cos() * 3 - x, f"output {i}")
    assert outer.ledger.replays == 4 and not outer.ledger.misses
    assert inner.ledger.replays == 4 and not inner.ledger.misses


def test_a_method_replaced_by_its_own_replay() -> None:
    class Decoder(nn.Module):
        def step(self, x: Tensor) -> Tensor:
            return x.sin() * 2

    module = Decoder()
    module.step = replay = ExactShapeReplay(module.step)  # type: ignore[method-assign,assignment]
    for i in range(3):
        x = noise(3)
        assert_same(module.step(x), x.sin() * 2, f"output {i}")
    assert replay.ledger.replays == 3 and not replay.ledger.misses
