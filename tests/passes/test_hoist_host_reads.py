"""What an operator checks on the host is checked once; `istft` keeps its bytes in every variant."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from cadence_fx.errors import NotCapturable
from cadence_fx.passes import HoistHostReads, PassContext, VerifyCapturable, run_passes
from tests.passes.toolbox import assert_same_bytes, flat_outputs, listing, trace

WINDOW = torch.hann_window(16)


def spectrum(x: Tensor, window: Tensor, onesided: bool = True) -> Tensor:
    return torch.stft(x, 16, 4, window.numel(), window, return_complex=True, onesided=onesided)


SPEC = spectrum(torch.randn(2, 100), WINDOW)


def hoist(function: Callable[..., object], *examples: Tensor) -> tuple[torch.fx.GraphModule, PassContext]:
    """The function with its last argument at a fixed address."""
    gm = trace(function, *examples)
    last = gm.graph.find_nodes(op="placeholder")[-1].name
    ctx = PassContext(frozen_inputs=frozenset({last}) if len(examples) > 1 else frozenset())
    return run_passes(gm, ctx, [HoistHostReads()]), ctx


def operators(gm: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def test_istft_becomes_what_it_executes() -> None:
    gm, ctx = hoist(lambda spec, window: (torch.istft(spec, 16, 4, window=window),), SPEC, WINDOW)
    assert_expected_inline(
        listing(gm),
        """\
def forward(self, spec_1, window_1):
    view_as_real_default = aten.view_as_real.default(spec_1)
    transpose_int = aten.transpose.int(view_as_real_default, 1, 2)
    view_as_complex_default = aten.view_as_complex.default(transpose_int)
    _fft_c2r_default = aten._fft_c2r.default(view_as_complex_default, [2], 2, 16)
    view_default = aten.view.default(window_1, [1, 1, 16])
    mul_tensor = aten.mul.Tensor(_fft_c2r_default, view_default)
    unfold_backward_default = aten.unfold_backward.default(mul_tensor, [2, 116], 1, 16, 4)
    pow_tensor_scalar = aten.pow.Tensor_Scalar(window_1, 2)
    expand_default = aten.expand.default(pow_tensor_scalar, [1, 26, 16])
    unfold_backward_default_1 = aten.unfold_backward.default(expand_default, [1, 116], 1, 16, 4)
    slice_tensor = aten.slice.Tensor(unfold_backward_default, 1, 8, -8)
    slice_tensor_1 = aten.slice.Tensor(unfold_backward_default_1, 1, 8, -8)
    div_tensor = aten.div.Tensor(slice_tensor, slice_tensor_1)
    return (div_tensor,)""",
    )
    (premise,) = ctx.premises
    assert_expected_inline(
        listing(premise.graph).replace(", dtype = torch.bool, layout = torch.strided, device = device(type='cpu')", ""),
        """\
def forward(self, window_1):
    pow_tensor_scalar = aten.pow.Tensor_Scalar(window_1, 2)
    expand_default = aten.expand.default(pow_tensor_scalar, [1, 26, 16])
    unfold_backward_default_1 = aten.unfold_backward.default(expand_default, [1, 116], 1, 16, 4)
    slice_tensor_1 = aten.slice.Tensor(unfold_backward_default_1, 1, 8, -8)
    abs_default = aten.abs.default(slice_tensor_1)
    min_default = aten.min.default(abs_default)
    lt_scalar = aten.lt.Scalar(min_default, 1e-11)
    new_ones_default = aten.new_ones.default(lt_scalar, [])
    equal_default = aten.equal.default(lt_scalar, new_ones_default)
    return (equal_default,)""",
    )
    assert premise.inputs == ("window_1",) and not premise.expected
    assert premise.graph(WINDOW) == (False,) and premise.graph(torch.zeros(16)) == (True,)
    VerifyCapturable()(gm, ctx)


# A variant of the operator: its arguments, and the window's length.
VARIANTS: list[tuple[dict[str, object], int]] = [
    ({}, 16),
    ({"win_length": 12}, 12),
    ({"normalized": True}, 16),
    ({"length": 90}, 16),
    ({"length": 140}, 16),
    ({"center": False, "length": 50}, 16),
]


@pytest.mark.parametrize("options, length", VARIANTS, ids=lambda v: repr(v))
@pytest.mark.filterwarnings("ignore:The length of signal is shorter")
def test_variants_keep_their_bytes(options: dict[str, object], length: int) -> None:
    window = torch.hamming_window(length)

    def back(spec: Tensor, window: Tensor) -> tuple[Tensor, ...]:
        return (torch.istft(spec, 16, 4, window=window, **options),)  # type: ignore[arg-type]

    try:
        trace(back, SPEC, window)
    except RuntimeError as error:
        pytest.skip(f"this version of PyTorch cannot trace it, so such a call runs eager: {error}")
    for spec in (SPEC, SPEC[0], SPEC.transpose(1, 2).contiguous().transpose(1, 2), SPEC * float("nan"), SPEC * 0):
        gm, ctx = hoist(back, spec, window)
        assert "aten.istft.default" not in operators(gm) and len(ctx.premises) == 1
        assert_same_bytes(flat_outputs(gm(spec, window)), flat_outputs(back(spec, window)))


def test_complex_signal_keeps_its_bytes() -> None:
    spec = spectrum(torch.randn(2, 100), WINDOW, onesided=False)

    def back(spec: Tensor, window: Tensor) -> tuple[Tensor, ...]:
        signal = torch.istft(spec, 16, 4, window=window, onesided=False, return_complex=True)
        return (torch.view_as_real(signal),)

    gm, _ = hoist(back, spec, WINDOW)
    assert "aten.istft.default" not in operators(gm)
    assert_same_bytes(flat_outputs(gm(spec, WINDOW)), flat_outputs(back(spec, WINDOW)))


def test_stft_and_istft_in_double() -> None:
    x, window = torch.randn(1, 100, dtype=torch.float64), WINDOW.double()

    def there_and_back(x: Tensor, window: Tensor) -> tuple[Tensor, ...]:
        return (torch.istft(spectrum(x, window).conj().conj(), 16, 4, window=window),)

    gm, ctx = hoist(there_and_back, x, window)
    assert_same_bytes(flat_outputs(gm(x, window)), flat_outputs(there_and_back(x, window)))
    VerifyCapturable()(gm, ctx)


def test_constant_window_is_checked_when_the_graph_is_built() -> None:
    gm, ctx = hoist(lambda spec: (torch.istft(spec, 16, 4, window=torch.hann_window(16)),), SPEC)
    assert not ctx.premises and "aten.istft.default" not in operators(gm)
    want = torch.istft(SPEC, 16, 4, window=WINDOW)
    assert_same_bytes(flat_outputs(gm(SPEC)), [want])


@pytest.mark.filterwarnings("ignore:A window was not provided")
def test_no_window_at_all() -> None:
    gm, ctx = hoist(lambda spec: (torch.istft(spec, 16, 4),), SPEC)
    assert not ctx.premises and "aten.istft.default" not in operators(gm)
    assert_same_bytes(flat_outputs(gm(SPEC)), [torch.istft(SPEC, 16, 4)])


def test_window_worked_out_from_a_fixed_input() -> None:
    gm, ctx = hoist(lambda spec, w: (torch.istft(spec, 16, 4, window=w[:16].double().sqrt().float()),), SPEC, WINDOW)
    assert [p.inputs for p in ctx.premises] == [("w_1",)] and "aten.istft.default" not in operators(gm)


def refused(function: Callable[..., object], *examples: Tensor) -> None:
    gm, ctx = hoist(function, *examples)
    assert "aten.istft.default" in operators(gm) and not ctx.premises
    with pytest.raises(NotCapturable, match="host_read"):
        VerifyCapturable()(gm, ctx)


def test_window_that_fails_the_check() -> None:
    """Eager raises on every such call, and must be the one to do so."""
    refused(lambda spec: (torch.istft(spec, 16, 4, window=torch.zeros(16)),), SPEC)
    refused(lambda spec: (torch.istft(spec, 16, 4, window=torch.hann_window(16), center=False),), SPEC)


def test_window_from_the_call_itself() -> None:
    """Its check may come out otherwise in another call."""
    refused(lambda window, spec: (torch.istft(spec, 16, 4, window=window),), WINDOW, SPEC)
    refused(lambda spec, w: (torch.istft(spec, 16, 4, window=w * spec.abs().max()),), SPEC, WINDOW)


def test_window_that_the_graph_writes() -> None:
    def back(spec: Tensor, window: Tensor) -> tuple[Tensor, ...]:
        return (torch.istft(spec, 16, 4, window=window.mul_(0.5)),)

    refused(back, SPEC, WINDOW.clone())


def test_graph_without_such_operators_is_unchanged() -> None:
    gm = trace(lambda x: (torch.softmax(x, -1),), torch.randn(3))
    assert not HoistHostReads()(gm, PassContext()).modified
