"""Chains of exactly rounded arithmetic, found on graphs of fake CUDA tensors and computed on the host to compare."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cadence_fx.extremes import plant_extremes, redraw
from cadence_fx.passes import JitChains, MergeCommon, PassContext, VerifyCapturable, run_passes
from cadence_fx.passes.graphs import GraphFacts, erase_dead_code
from cadence_fx.passes.jit_chains import cuda_source
from cadence_fx.passes.strides import elementwise_strides, same_strides
from tests.passes.toolbox import assert_same_bytes, flat_outputs, listing

CHAIN = torch.ops.cadence_fx.float_chain.default
X, SCALE, SHIFT = torch.randn(2, 5, 4), torch.randn(2, 1, 4), torch.randn(2, 1, 4)


def trace_on_device(function: Callable[..., object], *examples: Tensor) -> fx.GraphModule:
    """As on a CUDA device, which need not be there: only shapes are computed."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fakes = [
            torch.empty_strided(e.shape, e.stride(), dtype=e.dtype, device="cuda" if e.is_floating_point() else "cpu")
            for e in examples
        ]
        return make_fx(function, pre_dispatch=True)(*fakes)


def evaluate(inputs: list[Tensor], program: str, stride: list[int]) -> Tensor:
    """A program with the arithmetic of numpy: every operator rounded to float32."""
    names: dict[str, Any] = {f"a{index}": value.detach().numpy() for index, value in enumerate(inputs)}
    intrinsics = {
        "__fadd_rn": np.add,
        "__fsub_rn": np.subtract,
        "__fmul_rn": np.multiply,
        "__int_as_float": lambda bits: np.uint32(bits).view(np.float32),
    }
    result = None
    with np.errstate(all="ignore"):
        for line in program.splitlines():
            name, expression = line.split(" = ")
            result = names[name] = eval(expression, intrinsics, names)
    made = np.asarray(result)
    assert made.dtype == np.float32
    return torch.empty_strided(made.shape, stride).copy_(torch.from_numpy(made))


class OnHost(fx.Interpreter):
    """Runs a graph of a device on the host, chains by ``evaluate``."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is CHAIN:
            return evaluate(*args)
        return super().call_function(target, args, kwargs)


def one_nan(values: list[Tensor]) -> list[Tensor]:
    """On the devices every NaN of an operator has the same bits; a host's keep those of an operand."""
    return [torch.where(value.isnan(), torch.nan, value) if value.is_floating_point() else value for value in values]


def fuse(function: Callable[..., object], *examples: Tensor, notes: list[str] | None = None) -> fx.GraphModule:
    """The rewritten graph, compared with the function on random and on extreme data."""
    ctx = PassContext()
    gm = trace_on_device(function, *examples)
    fused = run_passes(gm, ctx, [JitChains()])
    for seed in range(3):
        inputs = [example.clone() for example in examples]
        for at, value in enumerate(inputs):
            if value.is_floating_point():
                (redraw if seed == 1 else plant_extremes)(value, seed + at)
        with torch.no_grad():
            want = flat_outputs(function(*[value.clone() for value in inputs]))
            got = flat_outputs(OnHost(fused).run(*[value.clone() for value in inputs]))
        assert_same_bytes(one_nan(got), one_nan(want))
        for mine, theirs in zip(got, want, strict=True):
            assert same_strides(mine.shape, mine.stride(), theirs.stride())
    if notes is not None:
        notes += ctx.notes
    return fused


def operators(gm: fx.GraphModule) -> list[str]:
    return [node.target.__name__ for node in gm.graph.nodes if node.op == "call_function"]


def programs_of(gm: fx.GraphModule) -> list[str]:
    return [node.args[1] for node in gm.graph.nodes if node.target is CHAIN]


def test_modulation_is_one_kernel() -> None:
    notes: list[str] = []
    gm = fuse(lambda x, scale, shift: (x * (1 + scale) + shift,), X, SCALE, SHIFT, notes=notes)
    assert_expected_inline(
        listing(gm).replace(r"\n", " | "),
        """\
def forward(self, x_1, scale_1, shift_1):
    float_chain_default = torch.ops.cadence_fx.float_chain.default([x_1, scale_1, shift_1], 't0 = __fadd_rn(a1, __int_as_float(0x3f800000)) | t1 = __fmul_rn(a0, t0) | t2 = __fadd_rn(t1, a2)', [20, 4, 1])
    return (float_chain_default,)""",  # noqa: E501
    )
    assert notes == ["jit_chains: 3 operators are 1 kernel now"]
    val = next(node for node in gm.graph.nodes if node.target is CHAIN).meta["val"]
    assert val.shape == (2, 5, 4) and val.device.type == "cuda"


def test_source_of_a_kernel() -> None:
    assert_expected_inline(
        cuda_source("t0 = __fmul_rn(a0, __int_as_float(0x3fd9999a))\nt1 = __fadd_rn(t0, a1)", 2),
        "template <typename T> T float_chain(T a0, T a1) "
        "{ T t0 = __fmul_rn(a0, __int_as_float(0x3fd9999a)); T t1 = __fadd_rn(t0, a1); return t1; }",
    )


def test_solver_update_is_one_kernel() -> None:
    """With a step size that is a tensor without dimensions, and numbers that are no floats."""

    def update(x: Tensor, dt: Tensor, both: Tensor) -> tuple[Tensor, ...]:
        first, second = both.chunk(2)
        return (x + dt * (1.7 * first - 0.7 * second),)

    gm = fuse(update, torch.randn(1, 3, 4), torch.tensor(0.3), torch.randn(2, 3, 4))
    assert operators(gm) == ["chunk.default", "getitem", "getitem", "float_chain.default"]
    assert f"{np.float32(1.7).view(np.uint32):#x}" in programs_of(gm)[0]


def test_equal_chains_share_a_kernel() -> None:
    def layers(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
        for _ in range(3):
            x = torch.layer_norm(x, [4]) * scale + shift
        return (x,)

    assert len(set(programs_of(fuse(layers, X, SCALE, SHIFT)))) == 1


def test_value_needed_elsewhere_ends_a_chain() -> None:
    def shared(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        y = x * scale
        return y + 2, torch.exp(y)

    assert operators(fuse(shared, X, SCALE)) == ["mul.Tensor", "add.Tensor", "exp.default"]
    both = fuse(lambda x, scale: (x * scale + 2, (x * scale)), X, SCALE)
    assert operators(both).count("float_chain.default") == 1


def test_value_used_twice_in_the_chain() -> None:
    def square(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        difference = x - y
        return (difference * difference + difference * 3,)

    gm = fuse(square, X, SCALE)
    assert operators(gm) == ["float_chain.default"] and programs_of(gm)[0].count("__fsub_rn") == 1


def test_result_leaves_and_goes_on() -> None:
    """What leaves the graph is still made, and the rest starts from it."""

    def shared(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        y = x * scale + 2
        return y, y * 3 - x

    assert operators(fuse(shared, X, SCALE)) == ["float_chain.default"] * 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (torch.add(x * y, x, alpha=2),),
        lambda x, y: (x * y / 3,),
        lambda x, y: ((x * y).double() * 2,),
        lambda x, y: (x * y * 1.0,),
        lambda x, y: (x * y + 0.0,),
        lambda x, y: (x * y - 0,),
        lambda x, y: (0 - x * y,),
        lambda x, y: (x * y * float("nan"),),
        lambda x, y: (x * y * True,),
        lambda x, y: (x * 1j,),
        lambda x, y: (-(x * y),),
        lambda x, y: ((x * y) ** 3,),
        lambda x, y: ((x * y).mul_(2),),
    ],
)
def test_what_is_not_exact_stays(function: Callable[..., object]) -> None:
    assert "float_chain.default" not in operators(fuse(function, X, SCALE))


def test_negation_inside_a_chain() -> None:
    gm = fuse(lambda x, y: (torch.neg(x) * y + torch.rsub(x, 2.5),), X, SCALE)
    assert operators(gm) == ["float_chain.default"] and "-(a0)" in programs_of(gm)[0]


def test_squares() -> None:
    gm = fuse(lambda x, a: (x + a * torch.sin(x * a) ** 2,), X, SCALE)
    assert operators(gm) == ["mul.Tensor", "sin.default", "float_chain.default"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32], ids=str)
def test_other_dtypes_stay(dtype: torch.dtype) -> None:
    gm = trace_on_device(lambda x: (x * 3 + 2,), torch.ones(2, 3, dtype=dtype))
    assert not JitChains()(gm, PassContext()).modified


def test_graphs_of_the_host_stay() -> None:
    from tests.passes.toolbox import trace

    assert not JitChains()(trace(lambda x: (x * 3 + 2,), X), PassContext()).modified


def test_operand_of_the_host_stays_outside() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        gm = make_fx(lambda x, s: (x * s + 2 - x,), pre_dispatch=True)(
            torch.empty(2, 3, device="cuda"), torch.empty((), device="cpu")
        )
    fused = run_passes(gm, PassContext(), [JitChains()])
    assert operators(fused) == ["mul.Tensor", "float_chain.default"]


def test_operand_written_before_the_end() -> None:
    def write(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first = x * y
        y.mul_(2)
        return (first + y,)

    notes: list[str] = []
    assert operators(fuse(write, X, SCALE, notes=notes)) == ["mul.Tensor", "mul_.Tensor", "add.Tensor"]
    assert "y_1 is written before add" in notes[0]


def test_operand_written_through_a_view() -> None:
    def write(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first = x * y
        y.select(0, 1).fill_(2.0)
        return (first + x,)

    assert "float_chain.default" not in operators(fuse(write, X, SCALE))


def test_more_than_eight_inputs() -> None:
    def total(*values: Tensor) -> tuple[Tensor, ...]:
        result = values[0]
        for value in values[1:]:
            result = result + value
        return (result,)

    notes: list[str] = []
    gm = fuse(total, *[torch.randn(2, 3) for _ in range(12)], notes=notes)
    assert operators(gm) == ["float_chain.default"] * 2
    assert max(len(node.args[0]) for node in gm.graph.nodes if node.target is CHAIN) == 8
    assert "9 inputs" in notes[-1]


def test_long_chain_of_few_inputs_is_cut() -> None:
    def powers(x: Tensor) -> tuple[Tensor, ...]:
        y = x
        for _ in range(100):
            y = y * x
        return (y,)

    gm = fuse(powers, torch.rand(3) + 0.5)
    assert operators(gm) == ["float_chain.default"] * 2


def test_result_with_other_strides_stays() -> None:
    """A product of a column and a row is contiguous; without it, the turned operand would decide."""
    notes: list[str] = []
    column, row, square = torch.randn(4, 1), torch.randn(1, 4), torch.randn(4, 4).t()
    gm = fuse(lambda a, b, z: (a * b + z,), column, row, square, notes=notes)
    assert operators(gm) == ["mul.Tensor", "add.Tensor"] and "add would have other strides" in notes[0]


def test_operands_laid_out_like_the_result_come_first() -> None:
    gm = fuse(lambda a, b, z: (a * z + b,), torch.randn(4, 1), torch.randn(4, 4), torch.randn(4, 4).t())
    assert operators(gm) == ["float_chain.default"]
    chain = next(node for node in gm.graph.nodes if node.target is CHAIN)
    assert [node.name for node in chain.args[0]] == ["z_1", "a_1", "b_1"] and chain.args[2] == [1, 4]


def test_can_be_captured_afterwards() -> None:
    gm = trace_on_device(lambda x, y: (x * y + 2,), X, SCALE)
    run_passes(gm, PassContext(), [JitChains(), VerifyCapturable()])


def test_chain_is_an_operator_without_effects() -> None:
    """One that nobody uses goes, and two equal ones are one."""

    def equal(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (torch.exp(x * y + 2) + torch.tanh(x * y + 2),)

    merged = fuse(equal, X, SCALE)
    assert operators(merged).count("float_chain.default") == 2
    assert operators(run_passes(merged, PassContext(), [MergeCommon()])).count("float_chain.default") == 1
    (first, second) = merged.graph.find_nodes(op="call_function", target=CHAIN)
    next(iter(second.users)).replace_input_with(second, first)
    assert erase_dead_code(merged.graph) == 1 and GraphFacts(merged.graph).alias_class(first) is first


# -- strides ----------------------------------------------------------------------------------------------------------

layouts = st.tuples(st.permutations(range(4)), st.tuples(*[st.booleans()] * 4), st.integers(0, 2))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(sizes=st.tuples(*[st.sampled_from([1, 2, 3])] * 4), operands=st.tuples(layouts, layouts, layouts))
def test_strides_are_those_of_a_kernel_with_three_operands(sizes: tuple[int, ...], operands: Any) -> None:
    """addcmul goes by the same iterator as any elementwise kernel."""
    given_ = []
    for order, single, dropped in operands:
        own = [1 if s else size for s, size in zip(single, sizes, strict=True)]
        turned = torch.randn([own[dim] for dim in order])
        value = turned.permute([order.index(dim) for dim in range(4)])
        while dropped and value.shape[0] == 1 and value.dim() > 1:
            value, dropped = value[0], dropped - 1
        given_.append(value)
    result = torch.addcmul(*given_)
    strides = elementwise_strides(result.shape, [(value.shape, value.stride()) for value in given_])
    assert same_strides(result.shape, strides, result.stride())


# -- random chains ----------------------------------------------------------------------------------------------------

steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "sub", "mul", "rsub", "neg", "exp", "turn", "write", "number"]),
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=14,
)
NUMBERS = (1.7, -0.7, 1, 2, 0.0, -0.0, 1e300, 2**40 + 1, 1e-42, -1.0)


def random_chain(plan: list[tuple[str, int, int]]) -> Callable[..., tuple[Tensor, ...]]:
    def run(x: Tensor, y: Tensor, z: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        values = [x * 2, y, z, s]
        for name, i, j in plan:
            v, w = values[-1 - i % len(values)], values[-1 - j % len(values)]
            if name == "write":
                values[0].mul_(0.5)
            elif name == "number":
                values.append([torch.add, torch.sub, torch.mul, torch.rsub][i % 4](v, NUMBERS[j]))  # type: ignore[operator]
            else:
                step: dict[str, Callable[[], Tensor]] = {
                    "add": lambda v=v, w=w: v + w,  # type: ignore[misc]
                    "sub": lambda v=v, w=w: v - w,  # type: ignore[misc]
                    "mul": lambda v=v, w=w: v * w,  # type: ignore[misc]
                    "rsub": lambda v=v, w=w: torch.rsub(v, w),  # type: ignore[misc]
                    "neg": lambda v=v: -v,  # type: ignore[misc]
                    "exp": lambda v=v: v.abs(),  # type: ignore[misc]
                    "turn": lambda v=v: v.transpose(-1, -2) if v.dim() > 1 and v.shape[-1] == v.shape[-2] else v,  # type: ignore[misc]
                }
                values.append(step[name]())
        return values[-1], values[-2]

    return run


def chain_examples() -> tuple[Tensor, ...]:
    return torch.randn(2, 3, 3), torch.randn(3, 3).t(), torch.randn(2, 1, 3), torch.tensor(0.5)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(plan=steps)
def test_random_chains(plan: list[tuple[str, int, int]]) -> None:
    fuse(random_chain(plan), *chain_examples())


# -- on a device ------------------------------------------------------------------------------------------------------


def assert_device_bytes(function: Callable[..., tuple[Tensor, ...]], *examples: Tensor) -> int:
    """Bytes and strides on the device, NaNs and denormals included; returns how many kernels are chains."""
    inputs = [example.cuda() for example in examples]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        gm = make_fx(function, pre_dispatch=True)(*[mode.from_tensor(value.clone()) for value in inputs])
    fused = run_passes(gm, PassContext(), [JitChains()])
    for seed in range(6):
        for at, value in enumerate(inputs):
            (redraw, plant_extremes)[seed % 2](value, seed + at)
        with torch.no_grad():
            want = [value.clone() for value in function(*[value.clone() for value in inputs])]
            got = flat_outputs(fused(*[value.clone() for value in inputs]))
        assert_same_bytes(got, want)
        for mine, theirs in zip(got, function(*[value.clone() for value in inputs]), strict=True):
            assert mine.stride() == theirs.stride()
    return operators(fused).count("float_chain.default")


@pytest.mark.gpu
@pytest.mark.parametrize("frames", [1, 50, 51, 1000])
def test_modulation_on_a_device(frames: int) -> None:
    x, row = torch.randn(2, frames, 512), torch.randn(2, 1, 512)
    assert assert_device_bytes(lambda x, a, b: (x * (1 + a) + b,), x, row, row.clone()) == 1
    assert assert_device_bytes(lambda x, g, y: (x + g * y,), x, row, x.clone()) == 1
    assert assert_device_bytes(lambda x, g, y: (x + g * y**2,), x, row, x.clone()) == 1
    assert (
        assert_device_bytes(lambda x, g, y: (x + g * y.transpose(1, 2),), x, row, x.transpose(1, 2).contiguous()) == 1
    )


@pytest.mark.gpu
def test_random_chains_on_a_device() -> None:
    generator = np.random.default_rng(1)
    names = ["add", "sub", "mul", "rsub", "neg", "number", "turn"]
    for _ in range(40):
        plan = [(str(generator.choice(names)), *generator.integers(0, 10, 2).tolist()) for _ in range(8)]
        assert_device_bytes(random_chain(plan), *chain_examples())


@pytest.mark.gpu
def test_every_pair_of_extreme_values() -> None:
    """All pairs of a set of floats, through each operator as the first and as the last of a chain."""
    from cadence_fx.extremes import large_patterns, small_patterns

    bits = [*small_patterns(torch.float32), *large_patterns(torch.float32)]
    values = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    values = torch.cat([values, torch.randn(8), torch.randn(8) * 1e-39, torch.randn(8) * 1e38]).cuda()
    x, y = values[:, None], values[None, :]
    exact: tuple[Callable[..., Tensor], ...] = (torch.add, torch.sub, torch.mul, torch.rsub)
    for first, last in itertools.product(exact, exact):
        for left, right in ((x, y), (y, x)):
            with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
                fakes = [mode.from_tensor(left), mode.from_tensor(right)]
                gm = make_fx(lambda a, b: (last(first(a, b), a), last(b, first(a, 1.7))), pre_dispatch=True)(*fakes)  # noqa: B023
            fused = run_passes(gm, PassContext(), [JitChains()])
            assert operators(fused) == ["float_chain.default"] * 2
            want = (last(first(left, right), left), last(right, first(left, 1.7)))
            assert_same_bytes(flat_outputs(fused(left, right)), want)


@pytest.mark.gpu
def test_chain_in_a_recorded_graph() -> None:
    function = lambda x, a, b: (x * a + b,)  # noqa: E731
    x, a, b = (torch.randn(2, 50, 512, device="cuda") for _ in range(3))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        gm = make_fx(function, pre_dispatch=True)(*[mode.from_tensor(v) for v in (x, a, b)])
    fused = run_passes(gm, PassContext(), [JitChains()])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        fused(x, a, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        (result,) = fused(x, a, b)
    for seed in range(3):
        plant_extremes(x, seed)
        graph.replay()
        assert_same_bytes([result], function(x, a, b))
