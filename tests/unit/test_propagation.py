"""Propagating shapes twice a kind: Dynamo's graph, its metadata and its guards are the same, and less is run."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cadence_fx import _torch_propagation
from cadence_fx._torch_propagation import twice_a_kind

MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": contextlib.nullcontext,
}


class Layer(nn.Module):
    """Views, products, writes and symbolic sizes; `scale` is a parameter of which views are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.convolution = nn.LayerNorm(8), nn.Linear(8, 16), nn.Conv1d(8, 8, 3)
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("memory", torch.zeros(1, 64, 8))

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        key, value = self.linear(self.norm(x)).chunk(2, dim=-1)
        key = torch.cat([cache, key], dim=1)
        memory = self.get_buffer("memory")
        memory[:, : key.shape[1]] = key
        y = self.convolution(value.transpose(1, 2))[..., -2:].transpose(1, 2)
        y = y.expand(3, -1, -1).sum(0, keepdim=True) * self.scale.unsqueeze(0).unsqueeze(-1).squeeze(-1)
        weights = (y @ memory[:, : key.shape[1]].transpose(1, 2)).double().softmax(-1).float()
        out = torch.zeros_like(y)
        out.add_(weights @ key)
        return nn.functional.pad(out, (0, 0, 2, 0)), key[:, -key.shape[1] // 2 :].contiguous()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        kept = []
        for layer in self.layers:
            x, state = layer(x, cache)
            kept.append(state)
        return x, *kept


def traced(module: Any, *args: Tensor) -> tuple[fx.Graph, str]:
    """The graph that Dynamo makes of a call, with a symbol for the extent of the cache, and the conditions on it."""
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch._dynamo.maybe_mark_dynamic(args[1], 1)
    torch.compile(module, backend=backend)(*args)
    (gm,) = found
    placeholders = gm.graph.find_nodes(op="placeholder")
    values = [node.meta["example_value"] for node in placeholders]
    env = next(value.fake_mode.shape_env for value in values if isinstance(value, FakeTensor))
    guards = env.guards if env is not None else []
    return gm.graph, "\n".join(sorted({str(guard.expr) for guard in guards}))


def shown(value: Any) -> Any:
    """All that can be seen of a traced value."""
    if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
        return str(tuple(value.shape)), str(value.stride())  # inside a transform of functions
    if isinstance(value, Tensor):
        offset = value.storage_offset()
        return (str(tuple(value.shape)), str(value.stride()), str(offset), value.dtype, value.device,
                value.requires_grad, value.is_inference(), str(value.untyped_storage().nbytes()))  # fmt: skip
    if isinstance(value, (tuple, list)):
        return [shown(item) for item in value]
    return str(value)


def memories(graph: fx.Graph) -> list[list[str]]:
    """Names of nodes whose traced tensors have one memory."""
    found: dict[int, list[str]] = {}
    for node in graph.nodes:
        value = node.meta.get("example_value")
        for tensor in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(tensor, FakeTensor):
                found.setdefault(tensor.untyped_storage()._cdata, []).append(node.name)
    return sorted(found.values())


def check_metadata(ours: fx.Graph, stock: fx.Graph) -> None:
    for mine, theirs in zip(ours.nodes, stock.nodes, strict=True):
        assert shown(mine.meta.get("example_value")) == shown(theirs.meta.get("example_value")), mine


def check(code: Any, *args: Tensor) -> None:
    """Graph, metadata and conditions are those of stock Dynamo."""
    stock, conditions = traced(code, *args)
    with twice_a_kind():
        ours, found = traced(code, *args)
    assert str(ours) == str(stock)
    check_metadata(ours, stock)
    assert memories(ours) == memories(stock)
    assert found == conditions


@pytest.mark.parametrize("mode", MODES)
def test_graph_metadata_and_guards_are_those_of_stock_dynamo(mode: str) -> None:
    with MODES[mode]():
        check(Stack(), torch.randn(1, 4, 8), torch.randn(1, 6, 8))


class Slices(nn.Module):
    """Views of views of a cache of several layers, which begin where the extent says: offsets are symbols, too."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        found = []
        for layer in range(5):
            key, value = cache[layer].unsqueeze(0).chunk(2, dim=-1)
            key, value = (torch.cat([old, x], 1) for old in (key, value))
            found += [key[:, 1:].transpose(1, 2), value[:, :-1], cache[layer, 1:, 3:].flatten()[2:]]
        return tuple(found)


def test_offsets_that_are_symbols() -> None:
    with torch.inference_mode():
        check(Slices(), torch.randn(1, 4, 8), torch.randn(5, 6, 16))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often Dynamo has run each operator on tensors without data."""
    found: Counter[str] = Counter()
    stock = torch._dynamo.utils.run_node

    def counted(tracer: Any, node: fx.Node, *rest: Any) -> Any:
        found[getattr(node.target, "__name__", str(node.target))] += 1
        return stock(tracer, node, *rest)

    monkeypatch.setattr(torch._dynamo.utils, "run_node", counted)
    return found


@pytest.mark.parametrize("mode", ["inference", "no_grad"])
def test_each_kind_runs_twice(mode: str, ran: Counter[str]) -> None:
    with MODES[mode](), twice_a_kind():
        traced(Stack(), torch.randn(1, 4, 8), torch.randn(1, 6, 8))
    assert (ran["linear"], ran["layer_norm"], ran["conv1d"], ran["chunk"], ran["cat"]) == (2, 2, 2, 2, 2)
    assert (ran["add_"], ran["setitem"]) == (3, 3)  # writes are run every time


def test_what_the_second_of_a_kind_gives_otherwise_is_run_every_time(
    ran: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator that goes by its argument's place in memory, as if nobody knew that."""
    monkeypatch.setattr(_torch_propagation, "_is_plain_name", lambda name: True)
    with torch.no_grad():
        args = torch.randn(5, 4), torch.randn(5, 4)
        stock, _ = traced(placed, *args)
        ran.clear()
        with twice_a_kind():
            ours, _ = traced(placed, *args)
    assert ran["as_strided"] == 5
    check_metadata(ours, stock)


def test_results_that_have_no_memory_to_compare() -> None:
    def code(x: Tensor) -> Tensor:
        return x.to_sparse().to_dense() + torch.sparse.mm(x.to_sparse(), x)

    x = torch.randn(4, 4)
    torch._dynamo.reset()
    with torch.no_grad(), twice_a_kind():
        assert torch.equal(torch.compile(code, backend="eager")(x), code(x))


def test_where_gradients_are_recorded_all_is_run(ran: Counter[str]) -> None:
    with twice_a_kind():
        traced(Stack(), torch.randn(1, 4, 8), torch.randn(1, 6, 8))
    assert ran["linear"] == 3


def test_dynamo_is_as_it_was_afterwards() -> None:
    stock = torch._dynamo.utils.run_node
    with pytest.raises(ZeroDivisionError), twice_a_kind():
        assert torch._dynamo.utils.run_node is not stock
        raise ZeroDivisionError
    assert torch._dynamo.utils.run_node is stock


def placed(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Views that are told by their place in memory, not by that of their argument in it."""
    return tuple(row.as_strided((2,), (1,), 1) for row in x[:, 0])


def transformed(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    outside = torch.rand_like(y)
    inside = torch.vmap(lambda row: torch.rand_like(y) * 2, randomness="different")(x)
    return outside, inside, torch.func.jvp(torch.sin, (x,), (x,))[1], torch.sin(x)


def switched(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    query = x.reshape(3, 2, 2, 1).transpose(1, 2)
    found = []
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            found.append(nn.functional.scaled_dot_product_attention(query, query, query))
    with torch.device("meta"):
        found.append(torch.ones_like(x))
    with torch.device("cpu"):
        found.append(torch.ones_like(x))
    return tuple(found)


@pytest.mark.parametrize("code", [placed, transformed, switched])
@pytest.mark.parametrize("mode", ["inference", "no_grad"])
def test_code_that_is_not_told_by_its_arguments(code: Callable[..., Any], mode: str) -> None:
    with MODES[mode]():
        check(code, torch.randn(3, 4), torch.randn(3, 4))


def test_blocks_of_several_threads_may_overlap(ran: Counter[str]) -> None:
    """And a thread outside of them is left alone."""
    stock = torch._dynamo.utils.run_node
    first, second = twice_a_kind(), twice_a_kind()
    first.__enter__()
    other = threading.Thread(target=second.__enter__)
    other.start()
    other.join()
    first.__exit__(None, None, None)
    assert torch._dynamo.utils.run_node is not stock
    with torch.no_grad():
        traced(Stack(), torch.randn(1, 4, 8), torch.randn(1, 6, 8))
    assert ran["linear"] == 3
    second.__exit__(None, None, None)
    assert torch._dynamo.utils.run_node is stock


# Each makes a matrix of two; most are views, at places that differ from one to the next.
STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows": lambda v, w: v[1:],
    "last rows": lambda v, w: v[-2:],
    "half of the columns": lambda v, w: v[:, : v.shape[1] // 2 + 1],
    "every second": lambda v, w: v[:, ::2],
    "turned": lambda v, w: v.t(),
    "first of two": lambda v, w: v.chunk(2, dim=1)[0],
    "last of several": lambda v, w: v.split(1, dim=0)[-1],
    "widened": lambda v, w: v[:1].expand(3, -1),
    "picked": lambda v, w: v.unsqueeze(1).select(1, 0),
    "as integers": lambda v, w: v.contiguous().view(torch.int32).float(),
    "real part": lambda v, w: torch.complex(v, v).real,
    "joined": lambda v, w: torch.cat([v.reshape(-1), w.reshape(-1)])[None],
    "stacked": lambda v, w: torch.stack([v, v]).flatten(0, 1),
    "sum": lambda v, w: v + w.sum(),
    "product": lambda v, w: v @ v.t(),
    "normalised": lambda v, w: nn.functional.layer_norm(v, v.shape[1:]),
    "spread": lambda v, w: v.softmax(-1).double().float(),
    "written": lambda v, w: v.clone().add_(w.mean()),
    "filled": lambda v, w: torch.zeros_like(v).copy_(v),
    "chosen": lambda v, w: torch.where(v > 0, v, -v),
    "padded": lambda v, w: nn.functional.pad(v, (1, 0)),
    "itself": lambda v, w: v.contiguous(),
}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9)), min_size=4, max_size=24)
)
def test_random_programs_have_the_metadata_of_stock_dynamo(program: list[tuple[str, int, int]]) -> None:
    def code(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        values = [x, y, y[:, 1:]]
        for name, i, j in program:
            v, w = values[-1 - i % len(values)], values[-1 - j % len(values)]
            values.append(STEPS[name](v, w) if v.numel() else v)
        return tuple(values[3:])

    with torch.inference_mode():
        check(code, torch.randn(4, 6), torch.randn(3, 8))


def test_views_that_begin_where_an_extent_says_are_run_twice_a_kind(ran: Counter[str]) -> None:
    with torch.inference_mode(), twice_a_kind():
        traced(Slices(), torch.randn(1, 4, 8), torch.randn(5, 6, 16))
    assert (ran["chunk"], ran["cat"], ran["transpose"]) == (2, 2, 2)
