"""Cats of cats are one, repeated rows are read in place, and values are computed where they are concatenated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cadence_fx.extremes import plant_extremes
from cadence_fx.passes import PassContext, VerifyCapturable, WriteParts, run_passes
from tests.passes.test_jit_chains import one_nan, trace_on_device
from tests.passes.toolbox import assert_same_bytes, flat_outputs, listing, trace

X, CACHE, Y = torch.randn(2, 5, 3), torch.randn(2, 3, 2), torch.randn(2, 5, 3)


class OnHost(fx.Interpreter):
    """Runs a graph of a device on the host."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(target, args, {**kwargs, **({"device": "cpu"} if "device" in kwargs else {})})


def rewrite(
    function: Callable[..., object], *examples: Tensor, host: bool = False, notes: list[str] | None = None
) -> fx.GraphModule:
    """The graph of a device, or of the host, rewritten and compared on extreme data; strides are compared too."""
    ctx = PassContext()
    gm = trace(function, *examples) if host else trace_on_device(function, *examples)
    rewritten = run_passes(gm, ctx, [WriteParts(), VerifyCapturable()])
    for seed in range(2):
        inputs = [example.clone() for example in examples]
        for value in inputs:
            plant_extremes(value, seed)
        with torch.no_grad():
            want = flat_outputs(function(*[value.clone() for value in inputs]))
            got = flat_outputs(OnHost(rewritten).run(*[value.clone() for value in inputs]))
        assert_same_bytes(got, want) if host else assert_same_bytes(one_nan(got), one_nan(want))
        assert [value.stride() for value in got] == [value.stride() for value in want]
    if notes is not None:
        notes += ctx.notes
    return rewritten


def operators(gm: fx.GraphModule) -> list[str]:
    return [node.target.__name__ for node in gm.graph.nodes if node.op == "call_function"]


def test_sum_is_computed_in_the_input_of_a_convolution() -> None:
    def step(x: Tensor, cache: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        joined = torch.cat([cache, (x + y).transpose(1, 2)], 2)
        return joined * 2, torch.slice_copy(joined, 2, -2)

    notes: list[str] = []
    gm = rewrite(step, X, CACHE, Y, notes=notes)
    assert_expected_inline(
        listing(gm),
        """\
def forward(self, x_1, cache_1, y_1):
    empty_strided_default = aten.empty_strided.default([2, 3, 7], [21, 7, 1], dtype = torch.float32, device = device(type='cuda', index=0))
    slice_tensor_1 = aten.slice.Tensor(empty_strided_default, 2, 2, 7)
    permute_default = aten.permute.default(slice_tensor_1, [0, 2, 1])
    add_out = aten.add.out(x_1, y_1, out = permute_default)
    slice_tensor = aten.slice.Tensor(empty_strided_default, 2, 0, 2)
    copy__default = aten.copy_.default(slice_tensor, cache_1)
    mul = aten.mul.Tensor(empty_strided_default, 2)
    slice_copy = aten.slice_copy.Tensor(empty_strided_default, 2, -2)
    return (mul, slice_copy)""",  # noqa: E501
    )
    assert notes == ["write_parts: 1 values are computed where they are concatenated"]


def test_all_parts_are_computed() -> None:
    gm = rewrite(lambda x, y: (torch.cat([torch.cos(x), torch.sin(x), x * y], -1) + 1,), X, Y)
    assert "cat.default" not in operators(gm) and "copy_.default" not in operators(gm)
    assert [name for name in operators(gm) if name.endswith("out")] == ["cos.out", "sin.out", "mul.out"]


def test_numbers_and_options_go_along() -> None:
    def parts(x: Tensor) -> tuple[Tensor, ...]:
        gelu = torch.nn.functional.gelu(x, approximate="tanh")
        return (torch.cat([x * 1.7, torch.add(x, x, alpha=2), gelu, torch.nn.functional.leaky_relu(x, 0.1)], 1),)

    assert operators(rewrite(parts, X)).count("slice.Tensor") == 4


def test_permutations_of_any_kind() -> None:
    def parts(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        turned = torch.tanh(x).permute(2, 0, 1).transpose(0, -1)
        return (torch.cat([turned, (x * y).permute(-2, 0, 2)], 2),)

    assert "cat.default" not in operators(rewrite(parts, X, Y))


def test_cat_of_cats_is_one() -> None:
    def nested(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat([torch.cat([torch.cat([x, y], 1), x], -2), y], 1),)

    for host in (True, False):
        gm = rewrite(nested, X, Y, host=host)
        assert operators(gm) == ["cat.default"]
        assert [node.name for node in gm.graph.nodes if node.target is torch.ops.aten.cat.default] == ["cat_2"]


def test_cat_along_another_axis_or_used_elsewhere_stays() -> None:
    assert operators(rewrite(lambda x, y: (torch.cat([torch.cat([x, y], 0)] * 2, 1),), X, Y)).count("cat.default") == 2
    assert operators(rewrite(lambda x, y: (torch.cat([torch.cat([x, y], 2), y], 2), y), X, Y)) == ["cat.default"]

    def shared(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        inner = torch.cat([x, y], 1)
        return torch.cat([inner, y], 1), inner * 2

    assert operators(rewrite(shared, X, Y)).count("cat.default") == 2


def test_repeated_row_is_read_in_place() -> None:
    def batch(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat([x[:1].repeat(2, 1, 1), y, x[0, :1].repeat(2, 5, 1)], 1),)

    gm = rewrite(batch, X, Y, host=True)
    assert "repeat.default" not in operators(gm) and operators(gm).count("expand.default") == 2


def test_repeat_of_more_than_a_row_stays() -> None:
    gm = rewrite(lambda x, y: (torch.cat([x.repeat(1, 2, 1), y], 1),), X, Y, host=True)
    assert operators(gm) == ["repeat.default", "cat.default"]


def test_memory_format_decides() -> None:
    """A cat of channels-last tensors is channels last, one with any other part is not; strides stay."""
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)

    def images(x: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat([torch.cat([x, x], 1), torch.cat([x, x.contiguous()], 1)], 1),)

    rewrite(images, x, host=True)
    rewrite(lambda x: (torch.cat([x, x.narrow(1, 0, 1).repeat(1, 3, 1, 1)], 1),), x, host=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, z: (lambda s: (torch.cat([y, s], 1), s * 2))(x + y),
        lambda x, y, z: (lambda s: (torch.cat([y, s], 1), s))(x + y),
        lambda x, y, z: (lambda s: (torch.cat([s, s], 1),))(x + y),
        lambda x, y, z: (lambda s: (s.add_(1), torch.cat([y, s], 1))[1:])(x + y),
        lambda x, y, z: (torch.cat([y, torch.softmax(x, 1)], 1),),
        lambda x, y, z: (torch.cat([y, z, x + y], 1),),
        lambda x, y, z: (torch.cat([torch.cat([y, z], 1) * 1, (x + y).narrow(1, 0, 2), y], 1), y),
        lambda x, y, z: (torch.cat([torch.cat([z, y], 0), x + y]),),
    ],
)
def test_what_cannot_be_written_in_place(function: Callable[..., object]) -> None:
    names = operators(rewrite(function, X, Y, X.clone()))
    assert "cat.default" in names and "empty_strided.default" not in names or "add.out" not in names


def test_values_on_the_host_are_computed_as_they_were() -> None:
    gm = rewrite(lambda x, y: (torch.cat([y, x + y], 1),), X, Y, host=True)
    assert operators(gm) == ["add.Tensor", "cat.default"]


def test_part_written_in_between() -> None:
    def write(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        buffer = torch.zeros_like(x)
        inner = torch.cat([buffer, y], 1)
        row = buffer.narrow(0, 0, 1).repeat(2, 1, 1)
        buffer.add_(x)
        return (torch.cat([inner, row, buffer], 1),)

    assert operators(rewrite(write, X, Y)).count("cat.default") == 2


def test_memory_that_is_filled_when_fresh() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        gm = rewrite(lambda x, y: (torch.cat([y, x + y], 1),), X, Y)
    finally:
        torch.use_deterministic_algorithms(False)
    assert operators(gm) == ["add.Tensor", "cat.default"]


Step = tuple[str, int, int, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(["cat", "cat", "add", "tanh", "turn", "repeat", "write", "slice"]),
        *[st.integers(0, 7)] * 3,
    ),
    min_size=1,
    max_size=10,
)


def random_program(plan: list[Step]) -> Callable[..., tuple[Tensor, ...]]:
    def run(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        values = [x.clone(), y]
        for name, i, j, axis in plan:
            v, w = values[-1 - i % len(values)], values[-1 - j % len(values)]
            axis %= 3
            if name == "cat":
                sizes = [[s for d, s in enumerate(u.shape) if d != axis] for u in (v, w)]
                values.append(torch.cat([v, w] if sizes[0] == sizes[1] and v.shape[axis] < 20 else [v], axis))
            elif name == "add":
                values.append(v + w if v.shape == w.shape else v + 1)
            elif name == "write":
                values[0].mul_(0.5)
            else:
                step: dict[str, Callable[[], Tensor]] = {
                    "tanh": lambda v=v: torch.tanh(v),  # type: ignore[misc]
                    "turn": lambda v=v, axis=axis: v.transpose(axis, axis - 1),  # type: ignore[misc]
                    "repeat": lambda v=v, axis=axis: v.narrow(axis, 0, 1).repeat(
                        *(2 if d == axis else 1 for d in range(3))
                    ),  # type: ignore[misc]
                    "slice": lambda v=v, axis=axis: v.narrow(axis, v.shape[axis] // 2, 1),  # type: ignore[misc]
                }
                values.append(step[name]())
        return values[-1], values[-2], values[-1] * 2

    return run


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(plan=steps, host=st.booleans())
def test_random_programs(plan: list[Step], host: bool) -> None:
    rewrite(random_program(plan), torch.randn(2, 2, 3), torch.randn(2, 2, 3), host=host)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["add", "mul", "sub", "mish", "silu", "gelu", "tanh", "sigmoid", "elu", "exp", "sin", "cos"]
)
@pytest.mark.parametrize("frames", [1, 3, 50])
def test_bytes_and_kernels_on_a_device(name: str, frames: int) -> None:
    """As many kernels as before, none of them a cat; the bytes of every operator do not depend on where it writes."""
    functional: Any = {**vars(torch), **{n: getattr(torch.nn.functional, n) for n in ("mish", "silu", "gelu", "elu")}}

    def step(x: Tensor, cache: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        value = functional[name](x, y) if name in ("add", "mul", "sub") else functional[name](x)
        return (torch.cat([cache, value.transpose(1, 2)], 2),)

    inputs = [torch.randn(2, frames, 512), torch.randn(2, 512, 2), torch.randn(2, frames, 512)]
    inputs = [value.cuda() for value in inputs]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        gm = make_fx(step, pre_dispatch=True)(*[mode.from_tensor(value) for value in inputs])
    rewritten = run_passes(gm, PassContext(), [WriteParts()])
    assert ("cat.default" in operators(rewritten)) == (frames < 2)
    for seed in range(3):
        with torch.no_grad():
            assert_same_bytes(flat_outputs(rewritten(*inputs)), flat_outputs(step(*inputs)))
        for at, value in enumerate(inputs):
            plant_extremes(value, seed + at)
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        rewritten(*inputs)
        torch.cuda.synchronize()
    launches = [event for event in profile.events() if event.device_type.name == "CUDA"]
    assert len(launches) == 2, [event.name for event in launches]
