"""Casts that autocast makes of weights are operators, and then kept; bytes stay, also when weights are written."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.nn import functional as F

import cadence_fx
from cadence_fx.passes import HoistSlow, PassContext, PassResult, SpellCasts, VerifyCapturable, run_passes
from tests.harness import assert_same, compile_with, counts
from tests.passes.toolbox import assert_same_bytes, flat_outputs, keep, listing, trace

X, W, B = torch.randn(2, 4, 9), torch.randn(6, 4, 3), torch.randn(6)


def autocast(dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    return torch.autocast("cpu", dtype)


def spelled(function: Callable[..., object], *examples: Tensor) -> tuple[torch.fx.GraphModule, PassContext]:
    """Traced and rewritten under the mode that is on, with every argument but the first at a fixed address."""
    gm = trace(function, *examples)
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    ctx = PassContext(frozen_inputs=frozenset(names[1:]), keep=keep)
    return run_passes(gm, ctx, [SpellCasts(), HoistSlow(), VerifyCapturable()]), ctx


def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (F.conv1d(F.leaky_relu(F.conv1d(x, weight, bias, padding=1)[:, :4]), weight, bias),)


def test_a_weight_is_cast_once_for_all_that_read_it() -> None:
    with autocast():
        gm, ctx = spelled(convolve, X, W, B)
    assert_expected_inline(
        listing(gm),
        """\
def forward(self, x_1, weight_1, bias_1):
    _kept_0 = self._kept_0
    _kept_1 = self._kept_1
    conv1d = aten.conv1d.default(x_1, _kept_0, _kept_1, [1], [1])
    slice_1 = aten.slice.Tensor(conv1d, 1, 0, 4)
    leaky_relu = aten.leaky_relu.default(slice_1)
    conv1d_1 = aten.conv1d.default(leaky_relu, _kept_0, _kept_1)
    return (conv1d_1,)""",
    )
    assert ctx.slow is not None
    assert_expected_inline(
        listing(ctx.slow.graph),
        """\
def forward(self, weight_1, bias_1):
    _to_copy_default = aten._to_copy.default(weight_1, dtype = torch.bfloat16)
    _kept_0 = self._kept_0
    _fill = cadence_fx_passes_hoist_slow__fill(_kept_0, _to_copy_default)
    _to_copy_default_1 = aten._to_copy.default(bias_1, dtype = torch.bfloat16)
    _kept_1 = self._kept_1
    _fill_1 = cadence_fx_passes_hoist_slow__fill(_kept_1, _to_copy_default_1)
    return ()""",
    )
    assert ctx.notes[0] == "spell_casts: 2 casts of slow values are operators now"
    given = [X, W.clone(), B.clone()]
    for kind in (0.0, -0.0, float("nan"), float("inf"), 1e-42):
        with autocast():
            ctx.slow.graph(*given[1:])
            assert_same_bytes(flat_outputs(gm(*given)), flat_outputs(convolve(*given)))
        for tensor in given[1:]:
            tensor.mul_(-1.5).view(-1)[0] = kind


OPERATORS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "conv1d": (F.conv1d, (X, W, B)),
    "conv1d same": (lambda x, w: F.conv1d(x, w, padding="same"), (X, W)),
    "conv2d": (F.conv2d, (X[None], torch.randn(3, 2, 2, 2))),
    "conv3d": (F.conv3d, (X[None, None], torch.randn(3, 1, 2, 2, 2))),
    "conv_transpose1d": (F.conv_transpose1d, (X, torch.randn(4, 5, 3))),
    "conv_transpose2d": (F.conv_transpose2d, (X[None], torch.randn(2, 3, 2, 2))),
    "conv_transpose3d": (F.conv_transpose3d, (X[None, None], torch.randn(1, 3, 2, 2, 2))),
    "linear": (F.linear, (X, torch.randn(5, 9), torch.randn(5))),
    "matmul": (lambda x, w: x @ w.t(), (X, torch.randn(5, 9))),
    "mm": (lambda x, w: torch.mm(x[0], w), (X, torch.randn(9, 3))),
    "bmm": (torch.bmm, (X, torch.randn(2, 9, 3))),
    "addmm": (lambda x, w, b: torch.addmm(b, x[0], w), (X, torch.randn(9, 3), torch.randn(4, 3))),
    "baddbmm": (lambda x, w, b: torch.baddbmm(b, x, w), (X, torch.randn(2, 9, 3), torch.randn(2, 4, 3))),
    "addbmm": (lambda x, w, b: torch.addbmm(b, x, w), (X, torch.randn(2, 9, 3), torch.randn(4, 3))),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator(name: str, dtype: torch.dtype) -> None:
    function, examples = OPERATORS[name]
    with autocast(dtype):
        expected = function(*examples)
        gm, ctx = spelled(lambda *given: (function(*given),), *examples)
        assert ctx.slow is not None and {kept.dtype for kept in ctx.slow.residents} == {dtype}
        ctx.slow.graph(*examples[1:])
        assert_same_bytes(flat_outputs(gm(*examples)), [expected])


def test_what_is_not_cast_stays() -> None:
    double = X.double(), W.double()

    def disabled(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", enabled=False):
            return (F.conv1d(x, weight),)

    def unchanged(function: Callable[..., object], *examples: Tensor, fixed: bool = True) -> bool:
        gm = trace(function, *examples)
        ctx = PassContext(frozen_inputs=frozenset({"weight_1"} if fixed else ()), keep=keep)
        return not SpellCasts()(gm, ctx).modified

    def plain(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (F.conv1d(x, weight),)

    assert unchanged(plain, X, W)
    with autocast():
        assert not unchanged(plain, X, W)
        assert unchanged(plain, X, W, fixed=False)  # it comes with the call
        assert unchanged(plain, X.bfloat16(), W.bfloat16())
        assert unchanged(plain, *double)
        assert unchanged(disabled, X, W)
        assert unchanged(lambda x, weight: (x + weight,), X, X)
        gm = trace(plain, X, W)
        assert SpellCasts()(gm, PassContext(frozen_inputs=frozenset({"weight_1"}))) == PassResult(gm, False)


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.conv(x))


def test_a_program_keeps_the_casts_and_sees_writes() -> None:
    module = Step()
    reference = copy.deepcopy(module)
    contract = cadence_fx.Contract(
        [cadence_fx.Clock("frame", 9, flush=[5])], inputs=[cadence_fx.Input("x", axis=2, clock="frame")]
    )
    step = compile_with(module, contract)
    with torch.no_grad():
        with autocast():
            cadence_fx.warm_up(step, X)
        for _ in range(3):
            with autocast():
                for size in (9, 5, 9):
                    x = X[..., :size].contiguous()
                    assert_same(step(x), reference(x), f"{size} frames")
            for each in (module, reference):
                each.conv.weight.mul_(1.5)
    assert counts(step)["bytes"]["measured_kept"] == 2 * sum(weight.numel() for weight in module.parameters())
    assert not counts(step)["misses"] and counts(step)["replays"] == 9
