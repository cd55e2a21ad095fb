"""Tracing toy functions as the lowering does, and running rewritten graphs on emulated carries."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.fx as fx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from cadence_fx.contract import Region
from cadence_fx.passes import PassContext, RegionSlot
from cadence_fx.retention import KeepLast, Retention


def trace(function: Callable[..., object], *examples: Tensor) -> fx.GraphModule:
    """A static pre-dispatch aten graph of ``function``, placeholders named after its arguments with ``_1``."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        # Copies, since one tensor given twice would be traced as one input.
        fakes = [mode.from_tensor(example.clone()) for example in examples]
        return make_fx(function, pre_dispatch=True)(*fakes)


def on_device(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with values that say they are on a CUDA device, which need not be there."""
    for node in gm.graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            if isinstance(value, FakeTensor):
                value.fake_device = torch.device("cuda", 0)
    return gm


def slot(
    gm: fx.GraphModule,
    placeholder: str,
    output: int | None,
    axis: int,
    *,
    retention: Retention | None = None,
    advance: int = 1,
) -> RegionSlot:
    """The slot of a state; extents are read from the graph."""
    nodes = {node.name: node for node in gm.graph.nodes}
    old = nodes[placeholder].meta["val"]
    results = nodes["output"].args[0]
    new = old if output is None else (results[output] if isinstance(results, (list, tuple)) else results).meta["val"]
    declared = Region(
        placeholder, argument=placeholder, axis=axis, clock="frames", retention=retention or KeepLast(1 << 20)
    )
    return RegionSlot(
        placeholder, declared, placeholder, placeholder, output, axis, old.shape[axis], new.shape[axis], advance
    )


def context(gm: fx.GraphModule, *slots: RegionSlot) -> PassContext:
    return PassContext(regions=slots)


def keep(name: str, like: Tensor) -> Tensor:
    """Memory for a value that is computed once."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)


def listing(gm: fx.GraphModule) -> str:
    """The graph's code, without what differs between releases of PyTorch and what only frees memory."""
    lines = [re.sub(r";.*", "", line) for line in gm.code.strip().splitlines()]
    lines[0] = re.sub(r"\) -> .*:", "):", lines[0])
    return "\n".join(lines).replace("torch.ops.aten.", "aten.")


def flat_outputs(result: object) -> list[Tensor]:
    return [value for value in (result if isinstance(result, (list, tuple)) else [result]) if isinstance(value, Tensor)]


def run_on_carries(gm: fx.GraphModule, ctx: PassContext, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs of a rewritten graph; each state and its destination are views of one flat buffer.

    The rest of each buffer is poisoned, so bytes that no write supplied do not pass for the right ones.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    values = dict(zip([node.name for node in placeholders], inputs, strict=False))
    for region in ctx.regions:
        if region.destination is None:
            continue
        old = values[region.placeholder]
        shape = next(node for node in placeholders if node.name == region.destination).meta["val"].shape
        carry = old.new_zeros(max(old.numel(), prod(shape)))
        carry.view(torch.uint8).fill_(0xA5)
        values[region.placeholder] = carry[: old.numel()].view(old.shape).copy_(old)
        values[region.destination] = carry[: prod(shape)].view(shape)
    with torch.no_grad():
        return flat_outputs(gm(*[values[node.name] for node in placeholders]))


def assert_same_bytes(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """Equal shapes, dtypes and bytes, compared as integers."""
    assert len(got) == len(want)
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype, f"output {index}: {a.shape} {a.dtype}, {b.shape} {b.dtype}"
        left, right = (t.detach().clone(memory_format=torch.contiguous_format).reshape(-1) for t in (a, b))
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)), f"output {index} differs in its bytes"
