"""What no recorder can replay is refused by name, with the node; the rest passes unchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cadence_fx.errors import NotCapturable
from cadence_fx.passes import PassContext, VerifyCapturable
from tests.passes.toolbox import context, slot, trace

X = torch.randn(2, 4)


def refusal(gm: torch.fx.GraphModule, ctx: PassContext | None = None, verify: VerifyCapturable | None = None) -> str:
    with pytest.raises(NotCapturable) as caught:
        (verify or VerifyCapturable())(gm, ctx or PassContext())
    assert caught.value.node in {node.name for node in gm.graph.nodes}
    return caught.value.reason


def accept(function: Callable[..., object], *examples: Tensor, ctx: PassContext | None = None) -> None:
    gm = trace(function, *examples)
    code = gm.code
    assert not VerifyCapturable()(gm, ctx or PassContext()).modified and gm.code == code


def built(*calls: tuple[object, ...]) -> torch.fx.GraphModule:
    """A graph of calls on one input ``x``, for operators that tracing itself would refuse."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, device="meta")
    last = x
    for target, *rest in calls:
        last = graph.call_function(target, (x, *rest))  # type: ignore[arg-type]
        last.meta["val"] = torch.empty(4, device="meta")
    graph.output((last,))
    return torch.fx.GraphModule({}, graph)


def test_plain_graph() -> None:
    accept(lambda x: (torch.softmax(x @ x.T, -1),), X)


@pytest.mark.parametrize(
    "operator",
    [
        torch.ops.aten.item.default,
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.is_nonzero.default,
    ],
    ids=str,
)
def test_value_read_by_the_host(operator: object) -> None:
    """The host would act on the value it saw when the graph was recorded."""
    assert refusal(built((operator,))) == "host_read"


def test_mask_as_index() -> None:
    """How many positions a mask has decides how much is written."""

    def masked(x: Tensor, mask: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        return (x.clone().index_put_((mask,), values),)

    assert refusal(trace(masked, X, torch.ones(2, dtype=torch.bool), X)) == "host_read"


def test_masked_fill_by_index_is_fine() -> None:
    def masked(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        y = x.clone()
        y[mask] = 0.0
        return (y,)

    accept(masked, X, torch.ones(2, dtype=torch.bool))


def test_size_that_is_still_a_symbol() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(lambda x: (x + 1,), tracing_mode="symbolic")(X)
    assert refusal(gm) == "symbolic_size"


def test_copy_from_the_host() -> None:
    """Recorded, it would read host memory that has long been given to somebody else."""
    verify = VerifyCapturable(lambda source, target: source.dtype == torch.int64 and target.dtype != torch.int64)
    assert refusal(trace(lambda x: (x + torch.arange(4).float(),), X), verify=verify) == "host_copy"
    assert refusal(trace(lambda x: (x[:, torch.arange(4)],), X), verify=verify) == "host_copy"


def test_copy_to_the_host() -> None:
    verify = VerifyCapturable(lambda source, target: source.dtype == torch.float64 and target.dtype != torch.float64)
    assert refusal(trace(lambda x: (x.double(),), X), verify=verify) == "host_read"


def in_place(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
    cache.view(-1)[:4].add_(x[0])
    return (x + 1,)


def test_write_on_an_input_nobody_declared() -> None:
    """Replays would write a staging copy, and the caller's tensor would stay as it is."""
    assert refusal(trace(in_place, X, X)) == "undeclared_write"


@pytest.mark.parametrize("declared", [False, True])
def test_other_memory_for_a_tensor(declared: bool) -> None:
    """A replay would leave the caller's tensor with the memory that it had."""

    def move(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        cache.set_(x * 2)  # type: ignore[call-overload]
        return (x + 1,)

    gm = trace(move, X, X)
    assert refusal(gm, context(gm, slot(gm, "cache_1", None, 1)) if declared else None) == "moves_memory"


def test_write_on_a_declared_state() -> None:
    gm = trace(in_place, X, X)
    accept(in_place, X, X, ctx=context(gm, slot(gm, "cache_1", None, 1)))


def test_write_on_a_buffer_at_a_fixed_address() -> None:
    accept(in_place, X, X, ctx=PassContext(frozen_inputs=frozenset({"cache_1"})))


def test_write_on_what_the_graph_made() -> None:
    accept(lambda x: (torch.zeros(2, 4).add_(x),), X)


def test_statistics_of_a_normalisation_are_writes() -> None:
    """The schema of batch_norm does not say so."""

    def normalise(x: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
        return (F.batch_norm(x, mean, var, training=True),)

    gm = trace(normalise, X, torch.zeros(4), torch.ones(4))
    assert refusal(gm) == "undeclared_write"
    accept(lambda x, m, v: (F.batch_norm(x, m, v),), X, torch.zeros(4), torch.ones(4))


@pytest.mark.parametrize("draw", [torch.rand_like, lambda x: F.dropout(x, 0.5, True), torch.bernoulli])
def test_random_numbers_of_the_device(draw: Callable[[Tensor], Tensor]) -> None:
    accept(lambda x: (draw(x.sigmoid()),), X)


def test_random_numbers_of_the_host_beside_a_device() -> None:
    """The launch would hold the numbers of its capture. `meta` stands for a device here."""
    gm = trace(lambda x: (x + 1, torch.rand(2)), X)
    accept(lambda x: (x + 1, torch.rand(2)), X)
    next(node for node in gm.graph.nodes if node.op == "placeholder").meta["val"] = torch.empty(2, 4, device="meta")
    assert refusal(gm) == "host_random"


def test_random_numbers_that_no_generator_gives() -> None:
    """Dropout between recurrent layers, on a device: the library has a state of its own."""
    layer = torch.nn.LSTM(4, 4, num_layers=2, dropout=0.5).train()
    gm = trace(lambda x: (layer(x)[0],), X)
    assert not VerifyCapturable()(gm, PassContext()).modified
    for node in gm.graph.nodes:
        if isinstance(value := node.meta.get("val"), Tensor):
            node.meta["val"] = value.to("meta")
    assert refusal(gm) == "draws_random"


def test_dropout_that_does_nothing() -> None:
    accept(lambda x: (F.dropout(x, 0.5, False), F.dropout(x, 0.0, True)), X)
    accept(lambda x: (F.scaled_dot_product_attention(x, x, x),), X)


def test_call_that_cannot_be_seen_into() -> None:
    assert refusal(built((torch.add, 1))) == "opaque_call"


def test_collective() -> None:
    pytest.importorskip("torch.distributed._functional_collectives")
    gm = built((torch.ops._c10d_functional.all_reduce.default, "sum", "0"))
    assert refusal(gm) == "collective"


def test_user_line_is_named() -> None:
    gm = built((torch.ops.aten.item.default,))
    next(n for n in gm.graph.nodes if n.op == "call_function").meta["stack_trace"] = (
        '  File "model.py", line 3, in step\n    if x.item() > 0:\n'
    )
    with pytest.raises(NotCapturable, match='File "model.py", line 3'):
        VerifyCapturable()(gm, PassContext())
