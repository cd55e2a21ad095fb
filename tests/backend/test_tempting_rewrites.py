"""Rewrites that are equal on paper and other bytes on some device: the certificate lets through what is equal here.

Which of them are differs between devices, shapes and library versions. So each test finds out first, on the rewritten
graph alone, and then holds the class to it: whatever is registered, calls give eager's bytes, and a rewrite that
changes them is dropped and reported.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import cadence_fx
from cadence_fx import Clock, Contract, KeepLast, Region
from cadence_fx.bytesops import bytes_equal
from cadence_fx.passes import PassContext, PassResult, pipeline, register_pass, run_passes
from cadence_fx.passes.graphs import bound_args, emit, tensor_val
from tests.harness import assert_same, compile_with
from tests.passes.toolbox import flat_outputs, trace

aten = torch.ops.aten


class Block(nn.Module):
    """A causal convolution with its cache, three projections of its result, a gate and another projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.gate = nn.Parameter(torch.randn(2, 1, width))

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, x.transpose(1, 2)], 2)
        y = self.conv(frames).transpose(1, 2)
        y = torch.tanh(self.q(y)) * torch.tanh(self.k(y)) + torch.sin(self.v(y))
        return torch.tanh(x + self.gate * y) + self.out(y), frames[:, :, -2:]


class Tempting:
    """A pass that replaces what it finds; ``found`` counts."""

    name = "tempting"

    def __init__(self, rewrite: Callable[[fx.Graph], int]) -> None:
        self.rewrite = rewrite
        self.found = 0

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        self.found = self.rewrite(gm.graph)
        return PassResult(gm, bool(self.found))


def replace(node: fx.Node, make: Callable[..., fx.Node]) -> None:
    graph = node.graph
    with graph.inserting_before(node):
        new = make(lambda target, *args: emit(graph, target, *args, like=node))
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def conv1d_as_channels_last_conv2d(graph: fx.Graph) -> int:
    nodes = graph.find_nodes(op="call_function", target=aten.conv1d.default)
    for node in nodes:
        x, weight, bias = node.args

        def make(call: Callable[..., fx.Node], x: Any = x, weight: Any = weight, bias: Any = bias) -> fx.Node:
            image = call(aten.contiguous.default, call(aten.unsqueeze.default, x, 2))
            image.kwargs = {"memory_format": torch.channels_last}
            image.meta["val"] = image.meta["val"].contiguous(memory_format=torch.channels_last)
            kernel = call(aten.unsqueeze.default, weight, 2)
            return call(aten.squeeze.dim, call(aten.conv2d.default, image, kernel, bias), 2)

        replace(node, make)
    return len(nodes)


def gate_as_addcmul(graph: fx.Graph) -> int:
    found = 0
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        x, product = node.args[:2]
        if isinstance(product, fx.Node) and product.target is aten.mul.Tensor:
            replace(node, lambda call, x=x, p=product: call(aten.addcmul.default, x, *p.args))  # type: ignore[misc]
            found += 1
    return found


def triples(graph: fx.Graph) -> list[list[fx.Node]]:
    """Three linears of one value."""
    by_input: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        by_input.setdefault(node.args[0], []).append(node)
    return [nodes[:3] for nodes in by_input.values() if len(nodes) >= 3]


def projections_as_one_linear(graph: fx.Graph) -> int:
    found = triples(graph)
    for nodes in found:
        with graph.inserting_before(nodes[0]):
            weight = emit(graph, aten.cat.default, [node.args[1] for node in nodes], like=nodes[0])
            bias = emit(graph, aten.cat.default, [node.args[2] for node in nodes], like=nodes[0])
            joined = emit(graph, aten.linear.default, nodes[0].args[0], weight, bias, like=nodes[0])
        width = tensor_val(nodes[0]).shape[-1]
        for at, node in enumerate(nodes):
            cut = (2, at * width, (at + 1) * width)
            replace(node, lambda call, j=joined, cut=cut: call(aten.slice.Tensor, j, *cut))  # type: ignore[misc]
    return len(found)


def projections_as_baddbmm(graph: fx.Graph) -> int:
    found = triples(graph)
    for nodes in found:
        x = nodes[0].args[0]
        assert isinstance(x, fx.Node)
        rows, width = tensor_val(x).shape[:-1], tensor_val(x).shape[-1]
        like = nodes[0]
        with graph.inserting_before(like):
            flat = emit(graph, aten.reshape.default, x, [rows.numel(), width], like=like)
            batch = emit(graph, aten.expand.default, flat, [3, -1, -1], like=like)
            weights = emit(graph, aten.stack.default, [node.args[1] for node in nodes], like=like)
            turned = emit(graph, aten.transpose.int, weights, 1, 2, like=like)
            biases = emit(graph, aten.stack.default, [node.args[2] for node in nodes], like=like)
            added = emit(graph, aten.unsqueeze.default, biases, 1, like=like)
            joined = emit(graph, aten.baddbmm.default, added, batch, turned, like=like)
        for at, node in enumerate(nodes):

            def make(call: Callable[..., fx.Node], at: int = at, joined: fx.Node = joined, rows: Any = rows) -> fx.Node:
                return call(aten.view.default, call(aten.select.int, joined, 0, at), [*rows, -1])

            replace(node, make)
    return len(found)


def addmm_as_mm_and_bias(graph: fx.Graph) -> int:
    nodes = graph.find_nodes(op="call_function", target=aten.linear.default)
    for node in nodes:
        values = bound_args(node)

        def make(call: Callable[..., fx.Node], values: Any = values, node: fx.Node = node) -> fx.Node:
            shape = tensor_val(values["input"]).shape
            flat = call(aten.reshape.default, values["input"], [shape[:-1].numel(), shape[-1]])
            product = call(aten.mm.default, flat, call(aten.t.default, values["weight"]))
            return call(aten.view.default, call(aten.add.Tensor, product, values["bias"]), [*tensor_val(node).shape])

        replace(node, make)
    return len(nodes)


REWRITES = [
    conv1d_as_channels_last_conv2d,
    gate_as_addcmul,
    projections_as_one_linear,
    projections_as_baddbmm,
    addmm_as_mm_and_bias,
]


def changes_bytes(module: nn.Module, rewrite: Callable[[fx.Graph], int], x: Tensor, cache: Tensor) -> bool:
    """Whether the rewritten graph, run by itself, gives other bytes than the module."""
    values = dict(module.named_parameters())

    def run(x: Tensor, cache: Tensor, *parameters: Tensor) -> Any:
        return torch.func.functional_call(module, dict(zip(values, parameters, strict=True)), (x, cache))

    pass_ = Tempting(rewrite)
    inputs = [x, cache, *values.values()]
    rewritten = run_passes(trace(run, *inputs), PassContext(), [pass_])
    assert pass_.found, "the graph has what the rewrite is about"
    got, want = flat_outputs(rewritten(*inputs)), flat_outputs(module(x, cache))
    assert all(torch.allclose(a, b, rtol=1e-2, atol=1e-2) for a, b in zip(got, want, strict=True)), "a rewrite on paper"
    return not all(map(bytes_equal, got, want))


def check(rewrite: Callable[[fx.Graph], int], monkeypatch: pytest.MonkeyPatch, device: str, width: int, n: int) -> None:
    torch.set_grad_enabled(False)
    monkeypatch.setattr(pipeline, "_registered", [])
    module = Block(width).eval().to(device)
    eager = copy.deepcopy(module)

    def fresh() -> Tensor:
        return torch.randn(2, n, width, device=device)

    cache = torch.randn(2, width, 2, device=device)
    differs = changes_bytes(eager, rewrite, fresh(), cache)
    pass_ = Tempting(rewrite)
    register_pass(pass_)
    region = Region("cache", argument="cache", result=1, axis=2, clock="frame", start=2, retention=KeepLast(2))
    step = compile_with(module, Contract([Clock("frame", n)], [region]))
    cadence_fx.warm_up(step, fresh(), cache.clone())
    state, mine = cache.clone(), cache.clone()
    for call in range(4):
        x = fresh()
        want, state = eager(x, state)
        got, mine = step(x, mine)
        assert_same(got, want, f"call {call}, output")
        assert_same(mine, state, f"call {call}, state")
    report = cadence_fx.report(step)
    assert pass_.found
    if differs:
        notes = [note for row in report["class_table"] for note in row["notes"]]
        dropped = any("dropped" in note and "differs from eager" in note for note in notes)
        assert dropped or report["refusals"].get("certificate"), (notes, report["refusals"])


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda rewrite: rewrite.__name__)
def test_certificate_decides(rewrite: Callable[[fx.Graph], int], monkeypatch: pytest.MonkeyPatch) -> None:
    check(rewrite, monkeypatch, "cpu", width=16, n=5)
