"""Which writes go behind the last reader of their source, and which have to stay."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.fx as fx
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cadence_fx.passes import LateWrites, ParallelBranches, Pass, PassContext, run_passes
from tests.passes.test_parallel_branches import attention, attention_inputs
from tests.passes.toolbox import assert_same_bytes, flat_outputs, trace


def late(function: Callable[..., object], *examples: Tensor) -> tuple[fx.GraphModule, PassContext]:
    ctx = PassContext()
    with torch.no_grad():
        return run_passes(trace(function, *examples), ctx, [LateWrites()]), ctx


def operators(gm: fx.GraphModule) -> list[str]:
    names = [str(node.target).split(".")[1] for node in gm.graph.nodes if node.op == "call_function"]
    return [name for name in names if name not in ("slice", "select")]


def check(function: Callable[..., object], gm: fx.GraphModule, *examples: Tensor) -> None:
    """Outputs, and the arguments afterwards."""
    mine, theirs = ([example.clone() for example in examples] for _ in range(2))
    with torch.no_grad():
        assert_same_bytes([*flat_outputs(gm(*mine)), *mine], [*flat_outputs(function(*theirs)), *theirs])


X, CACHE = torch.randn(4, 3), torch.randn(6, 3)


def test_a_write_goes_behind_the_last_reader() -> None:
    def function(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        made = torch.exp(x)
        cache[:4].copy_(made)
        return (torch.sin(x) + made,)

    gm, ctx = late(function, X, CACHE)
    assert operators(gm) == ["exp", "sin", "add", "copy_"]
    assert ctx.notes == ["late_writes: 1 writes stand behind the last reader of what they write"]
    check(function, gm, X, CACHE)


def test_a_write_that_somebody_reads_first_stays() -> None:
    def function(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        made = torch.exp(x)
        cache[:4].copy_(made)
        return (torch.sin(cache[2:5]), torch.cos(made))

    gm, ctx = late(function, X, CACHE)
    assert operators(gm) == ["exp", "copy_", "sin", "cos"] and not ctx.notes
    check(function, gm, X, CACHE)


def test_a_read_of_other_bytes_does_not_hold_it() -> None:
    def function(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        made = torch.exp(x)
        cache[:4].copy_(made)
        return (torch.sin(cache[4:]), torch.cos(made))

    gm, _ = late(function, X, CACHE)
    assert operators(gm) == ["exp", "sin", "cos", "copy_"]
    check(function, gm, X, CACHE)


def test_a_source_that_is_written_holds_it() -> None:
    def function(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        made = torch.exp(x)
        cache[:4].copy_(made)
        made.add_(1)
        return (torch.cos(made),)

    gm, _ = late(function, X, CACHE)
    assert operators(gm) == ["exp", "copy_", "add_", "cos"]
    check(function, gm, X, CACHE)


def test_writes_in_order_stay_in_order() -> None:
    def function(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        made, other = torch.exp(x), torch.sin(x)
        cache[:4].copy_(made)
        cache[2:].copy_(other)
        return (made + other,)

    gm, _ = late(function, X, CACHE)
    check(function, gm, X, CACHE)


def test_projections_are_seen_to_end_in_one_attention() -> None:
    """With the copies of keys and values in front of it, nothing could run beside anything."""

    def layer(x: Tensor, weights: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (torch.nn.functional.linear(x, weights[i]) for i in range(3))
        keys = torch.cat([cache[0], k], 1)
        cache[0].copy_(keys[:, 3:])
        values = torch.cat([cache[1], v], 1)
        cache[1].copy_(values[:, 3:])
        return (torch.nn.functional.scaled_dot_product_attention(q, keys, values),)

    inputs = torch.randn(2, 3, 8), torch.randn(3, 8, 8), torch.randn(2, 2, 6, 8)
    plans = []
    choices: list[list[Pass]] = [[ParallelBranches()], [LateWrites(), ParallelBranches()]]
    for passes in choices:
        ctx = PassContext()
        with torch.no_grad():
            gm = run_passes(trace(layer, *inputs), ctx, passes)
        plans.append(ctx.branches)
        check(layer, gm, *inputs)
    before, after = plans
    assert after is not None and after.count == 3
    assert before is None or after.branched < before.branched


def test_attention_layers_give_the_same_bytes() -> None:
    def layers(x: Tensor, weights: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        return attention(x, weights, cache)

    gm, _ = late(layers, *attention_inputs())
    check(layers, gm, *attention_inputs())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)), max_size=14))
def test_random_programs(program: list[tuple[int, int, int, int]]) -> None:
    def function(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        values = [x[:3], x[1:]]
        for kind, first, second, at in program:
            a, b = values[first % len(values)], values[second % len(values)]
            if kind == 0:
                values.append(torch.sin(a) + b)
            elif kind == 1:
                cache[at : at + 3].copy_(a)
            elif kind == 2:
                values.append(cache[at : at + 3] * 2)
            elif kind == 3:
                values.append(a[:])
            elif len(values) > 2:
                values[-1].mul_(1.5 + second)
        return tuple(value + 0 for value in values[2:]) or (x + 0,)

    gm, _ = late(function, X, CACHE)
    check(function, gm, X, CACHE)
