"""Reads of memory are served from where the bytes were made: golden graphs, refusals, and equal bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cadence_fx.passes import ForwardStores, PassContext, run_passes
from tests.passes.toolbox import assert_same_bytes, flat_outputs, listing, trace

Function = Callable[..., object]
X, WORK = (2, 4), (4, 2, 4)


def rewrite(
    function: Function, *shapes: tuple[int, ...], scratch: tuple[str, ...] = ("work_1",)
) -> torch.fx.GraphModule:
    """The rewritten graph, after its bytes were found equal to eager, whatever is left in the workspaces."""
    gm = trace(function, *[torch.randn(shape) for shape in shapes])
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    rewritten = run_passes(gm, PassContext(scratch_inputs=frozenset(scratch)), [ForwardStores()])
    for _ in range(3):
        inputs = [torch.randn(shape) for shape in shapes]
        want = flat_outputs(function(*[value.clone() for value in inputs]))
        given = [torch.randn_like(v) if name in scratch else v for name, v in zip(names, inputs, strict=True)]
        with torch.no_grad():
            assert_same_bytes(flat_outputs(rewritten(*given)), want)
    return rewritten


def ops(gm: torch.fx.GraphModule) -> list[str]:
    return [node.target.__name__ for node in gm.graph.nodes if node.op == "call_function"]


def test_row_of_a_workspace() -> None:
    def through(x: Tensor, work: Tensor) -> tuple[Tensor, ...]:
        work[1].copy_(x * 2)
        return (torch.relu(work[1]),)

    assert_expected_inline(
        listing(rewrite(through, X, WORK)),
        """\
def forward(self, x_1, work_1):
    mul = aten.mul.Tensor(x_1, 2)
    relu = aten.relu.default(mul)
    return (relu,)""",
    )


def test_part_of_what_was_stored() -> None:
    """A slice of the row, seen through a transpose, becomes the same view of the value."""

    def through(x: Tensor, work: Tensor) -> tuple[Tensor, ...]:
        work[1].copy_(x * 2)
        return (torch.relu(work.transpose(1, 2)[1, 1:]),)

    assert_expected_inline(
        listing(rewrite(through, X, WORK)),
        """\
def forward(self, x_1, work_1):
    mul = aten.mul.Tensor(x_1, 2)
    slice_tensor = aten.slice.Tensor(mul, 1, 1, 4)
    permute_default = aten.permute.default(slice_tensor, [1, 0])
    relu = aten.relu.default(permute_default)
    return (relu,)""",
    )


def test_two_buffers_in_a_row() -> None:
    def through(x: Tensor, work: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        for t in range(2):
            rows[0].copy_(x + t)
            work[t].copy_(rows[0])
        return (work[0] * 2, work[1] * 3)

    gm = rewrite(through, X, WORK, (1, 2, 4), scratch=("work_1", "rows_1"))
    assert ops(gm) == ["add.Tensor", "add.Tensor", "mul.Tensor", "mul.Tensor"]


def test_buffer_made_in_the_graph() -> None:
    def through(x: Tensor) -> tuple[Tensor, ...]:
        buffer = torch.zeros(4, 2, 4)
        buffer[2] = x.exp()
        return (buffer[2].sum(0),)

    assert ops(rewrite(through, X, scratch=())) == ["exp.default", "sum.dim_IntList"]


def test_store_that_nobody_sees() -> None:
    def through(x: Tensor, work: Tensor) -> tuple[Tensor, ...]:
        work[0].zero_()
        work[:2].copy_(torch.stack([x, x]))
        return (work[:1] + work[1:2],)

    assert "zero_.default" not in ops(rewrite(through, X, WORK))


def test_store_that_is_covered_before_a_read_that_stays() -> None:
    def through(x: Tensor, work: Tensor) -> tuple[Tensor, ...]:
        work[0].fill_(3)
        work.copy_(x.expand(4, 2, 4) * 2)
        work[1].mul_(2)
        return (work.sum(0),)

    gm = rewrite(through, X, WORK)
    assert "fill_.Scalar" not in ops(gm) and "mul_.Tensor" in ops(gm)


def stays(function: Function, *shapes: tuple[int, ...], scratch: tuple[str, ...] = ("work_1",)) -> None:
    gm = trace(function, *[torch.randn(shape) for shape in shapes])
    before = gm.code
    assert rewrite(function, *shapes, scratch=scratch).code == before


def test_what_is_refused() -> None:
    def two_values(x: Tensor, work: Tensor) -> tuple[Tensor, ...]:
        work[0].copy_(x)
        work[1].copy_(x + 1)
        return (work[:2].sum(0),)

    def written_since(x: Tensor, work: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        work[0].copy_(y)
        y.add_(1)
        return (work[0] * 2, y)

    def overwritten_in_part(x: Tensor, work: Tensor) -> tuple[Tensor, ...]:
        work[0].copy_(x)
        work[0, 1].mul_(2)
        return (work[0] * 2,)

    def converts(x: Tensor, work: Tensor) -> tuple[Tensor, ...]:
        work[0].copy_(x.double())
        return (work[0] * 2,)

    def broadcasts(x: Tensor, work: Tensor) -> tuple[Tensor, ...]:
        work[0].copy_(x[0] * 2)
        return (work[0] * 2,)

    def other_strides(x: Tensor, work: Tensor) -> tuple[Tensor, ...]:
        work[0].copy_((x * 2).transpose(0, 1).reshape(4, 2).t().contiguous().t().contiguous().t())
        return (torch.relu(work[0]),)

    def leaves(x: Tensor, work: Tensor) -> tuple[Tensor, ...]:
        work[0].copy_(x * 2)
        return (work[0], work[0] * 2)

    def onto_itself(x: Tensor, work: Tensor) -> tuple[Tensor, ...]:
        work[0].copy_(x * 2)
        work[1].copy_(work[0])
        return (work[1] * 2,)

    for function in (two_values, written_since, overwritten_in_part, converts, broadcasts, other_strides, leaves):
        stays(function, X, WORK)
    rewrite(onto_itself, X, WORK)


def test_memory_that_others_see_stays() -> None:
    def through(x: Tensor, work: Tensor) -> tuple[Tensor, ...]:
        work[0].zero_()
        work[0].copy_(x * 2)
        return (work[0] * 2,)

    stays(through, X, WORK, scratch=())


def test_what_a_workspace_held_before_stays() -> None:
    """It means nothing, and is read all the same: behind a mask, say."""
    gm = trace(lambda x, work: (work[0] + x,), torch.randn(X), torch.randn(WORK))
    assert run_passes(gm, PassContext(scratch_inputs=frozenset({"work_1"})), [ForwardStores()]).code == gm.code


def test_alignment_decides() -> None:
    """Kernels are chosen by it: a view four bytes off is another argument."""

    def through(x: Tensor, work: Tensor) -> tuple[Tensor, ...]:
        work.copy_(x * 2)
        return (torch.relu(work[1:]),)

    def shifted(x: Tensor, work: Tensor) -> tuple[Tensor, ...]:
        work[1:].copy_(x * 2)
        return (torch.relu(work[1:]),)

    assert ops(rewrite(through, (9,), (9,))) == ["mul.Tensor", "slice.Tensor", "relu.default"]
    stays(shifted, (8,), (9,))


Step = tuple[str, int, int, int, int]


def perform(values: list[Tensor], buffers: list[Tensor], operation: str, i: int, j: int, m: int, n: int) -> None:
    """One operation on the square tensors at hand; the numbers are folded into what fits."""
    value, buffer = values[i % len(values)], buffers[j % len(buffers)]
    low = m % 4
    high = low + 1 + n % (4 - low)
    view = buffer.t() if n % 2 else buffer
    if operation == "store":
        view[low:high].copy_(value[low:high])
    elif operation == "store_all":
        view.copy_(value)
    elif operation == "fill":
        view[low:high].fill_(m)
    elif operation == "scale":
        view[low:high].mul_(0.5)
    elif operation == "change":
        value.add_(1)
    elif operation == "between":
        buffers[(j + 1 + i % 3) % len(buffers)].copy_(view)
    elif operation == "load":
        values.append(torch.nn.functional.pad(torch.relu(view[low:high]), (0, 0, low, 4 - high)))
    elif operation == "cat":
        values.append(torch.cat([view[:low], value[low:]]))
    elif operation == "multiply":
        values.append(view @ value)


numbers = st.integers(0, 7)
kinds = (
    "store",
    "store",
    "store_all",
    "store_all",
    "fill",
    "scale",
    "change",
    "between",
    "load",
    "load",
    "cat",
    "multiply",
)
steps = st.lists(st.tuples(st.sampled_from(kinds), numbers, numbers, numbers, numbers), max_size=14)


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(program=steps, results=st.tuples(numbers, numbers))
def test_random_programs(program: list[Step], results: tuple[int, int]) -> None:
    def run(x: Tensor, work: Tensor, seen: Tensor) -> tuple[Tensor, ...]:
        values, buffers = [x * 2, x + 1], [work, seen, torch.zeros_like(x), torch.ones_like(x)]
        work.zero_()
        for step in program:
            perform(values, buffers, *step)
        return tuple(values[-1 - which % len(values)] for which in results)

    def inputs() -> list[Tensor]:
        return [torch.randn(4, 4) for _ in range(3)]

    gm = trace(run, *inputs())
    ctx = PassContext(scratch_inputs=frozenset({"work_1"}))
    rewritten = run_passes(gm, ctx, [ForwardStores()])
    x, work, seen = inputs()
    seen_too = seen.clone()
    want = run(x.clone(), work.clone(), seen)
    with torch.no_grad():
        got = rewritten(x.clone(), torch.full_like(work, 7.0), seen_too)
    assert_same_bytes([*flat_outputs(got), seen_too], [*want, seen])
