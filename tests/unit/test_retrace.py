"""The static graph that is copied from patterns is the one that is traced node by node."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from cadence_fx import _torch_retrace
from cadence_fx._torch_retrace import to_static_aten


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def described(gm: fx.GraphModule) -> list[Any]:
    """Everything of a graph that anybody reads: operators, operands, names, lines, geometry, who shares memory."""
    numbers = {node: i for i, node in enumerate(gm.graph.nodes)}
    homes: dict[int, int] = {}
    found = []
    for node in gm.graph.nodes:
        operands = fx.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")
        values = [
            (tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, t.device, t.requires_grad, t.is_inference(),
             type(t), t.untyped_storage().nbytes(), homes.setdefault(t.untyped_storage()._cdata, len(homes)))
            for t in tensors(node.meta.get("val"))
        ]  # fmt: skip
        kind = type(node.meta.get("val"))
        found.append((node.op, node.name, str(node.target), repr(operands), node.meta.get("stack_trace"), kind, values))
    return found


def dynamo_graph(code: Callable[..., Any], args: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]]:
    """The graph that Dynamo makes of a call, and its inputs."""
    found: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        found.append((gm, list(inputs)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(code, backend=backend, fullgraph=True, dynamic=False)(*args)
    return found[0]  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention, a convolution and a gated MLP, with a state written in place."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.gate = nn.Linear(width, 2 * width)
        self.batch = nn.BatchNorm1d(width)

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        split = [t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (q, k, v)]
        y = nn.functional.scaled_dot_product_attention(split[0], split[1], split[2])
        y = x + self.out(y.transpose(1, 2).flatten(2))
        cache[:, : y.shape[1]] = y
        y = y + self.batch(self.conv(y.transpose(1, 2))).transpose(1, 2)
        a, b = self.gate(y).split(y.shape[-1], -1)
        return torch.cat([y[:, :1], (y + a * torch.sigmoid(b))[:, 1:]], 1).mul_(0.5)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, x: Tensor, caches: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x, caches[i])
        return x


def shared(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """The same operator on one tensor twice, on two, and on two views of one memory."""
    z = x + y
    out = [x + x, x + y, x[:2] + x[1:3], x[:2] + y[1:3], z.add_(1), z[0].add_(z[1]), z + z]
    return tuple(torch.cat([o.reshape(-1), o.reshape(-1)]) for o in out)


def modes(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a = torch.sin(x) + y
    with torch.no_grad():
        b = torch.sin(x) + y
    with torch.enable_grad():
        c = torch.sin(x) + y
    return a, b, c


def constants(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    outs = []
    for n in (1, 2, 1, 1.0, True, -0.0, 0.0):
        t = torch.tensor(n)
        outs.append(x * n + t + torch.full((3,), 2.0).sum() + torch.zeros(4).add_(n)[0])
    return tuple(outs)


def restrided(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Metadata is changed in place: of these graphs nothing is copied."""
    a, b = x.clone(), y.clone()
    c = a.unsqueeze_(0) + 1
    d = b.unsqueeze_(0) + 1
    return c, d.t_() if d.dim() == 2 else d.squeeze_(0), a.sin(), b.sin()


def drawn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return tuple(nn.functional.dropout(x, 0.5) + torch.rand_like(y) + torch.randn(3, 1) for _ in range(3))


def picked(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    outs: list[Tensor] = []
    for _ in range(2):
        value, index = x.max(-1)
        outs += [value, index, x[index.clamp(max=1)], x.gather(1, index[:, None]), torch.where(x > y, x, y)]
        outs += [x.view(torch.int32), x.to(torch.float64), torch.view_as_real(torch.complex(x, y)), x.double().float()]
        outs += [x.expand(2, *x.shape).contiguous(), x.new_empty(3, 3).fill_(1), x.T.contiguous(), x.T.reshape(-1)]
    return tuple(outs)


FUNCTIONS = (shared, modes, constants, restrided, drawn, picked)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("code", FUNCTIONS)
def test_functions(code: Callable[..., Any], context: Any) -> None:
    args = torch.randn(3, 4), torch.randn(3, 4)
    with context():
        gm, inputs = dynamo_graph(code, args)
        assert described(to_static_aten(gm, inputs)) == described(to_static_aten(gm, inputs, patterns=False))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("casts", [False, True])
def test_layers(training: bool, casts: bool, context: Any) -> None:
    model = Stack().train(training)
    args = torch.randn(2, 5, 8), torch.zeros(6, 2, 9, 8)
    with context(), torch.autocast("cpu", torch.bfloat16, enabled=casts):
        gm, inputs = dynamo_graph(model, args)
        plain = described(to_static_aten(gm, inputs, patterns=False))
        assert described(to_static_aten(gm, inputs)) == plain


def test_a_layer_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack().eval()
    traced: list[fx.Node] = []
    trace = _torch_retrace._Copier._traced

    def counted(self: Any, n: fx.Node) -> Any:
        traced.append(n)
        return trace(self, n)

    monkeypatch.setattr(_torch_retrace._Copier, "_traced", counted)
    with torch.inference_mode():
        gm, inputs = dynamo_graph(model, (torch.randn(2, 5, 8), torch.zeros(6, 2, 9, 8)))
        to_static_aten(gm, inputs)
    calls = [node for node in gm.graph.nodes if node.op.startswith("call_")]
    assert len(traced) < len(calls) / 4


_calls = itertools.count()


@torch.compiler.allow_in_graph
def foreign(x: Tensor) -> Tensor:
    """Not PyTorch's: it may do something else each time."""
    return x + next(_calls)


def test_what_is_not_pytorchs_own_is_traced_each_time() -> None:
    def code(x: Tensor) -> tuple[Tensor, ...]:
        return foreign(x), foreign(x), foreign(x)

    gm, inputs = dynamo_graph(code, (torch.randn(3),))
    added = [node.args[1] for node in to_static_aten(gm, inputs).graph.nodes if node.op == "call_function"]
    assert len(set(added)) == 3
