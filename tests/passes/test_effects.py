"""What schemas and tags tell of an operator besides its results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cadence_fx.passes.effects import all_known, draws, is_collective, keeps_own_randomness, only_gathers, reads_value
from tests.passes.toolbox import trace

X = torch.randn(2, 4)
# Backward operators take the mask of their forward, and quantised layers of old never draw: nothing is trained in them.
KNOWN = {"quantized_lstm", "quantized_gru", "miopen_rnn_backward", "lstm_mps_backward", "_cudnn_rnn_backward"}


def drawing(gm: torch.fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if draws(node)]


def test_every_operator_that_is_given_a_generator_or_a_dropout_is_tagged() -> None:
    """`draws` rests on the tag; an operator without it would be replayed with the numbers of its capture."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::") or not hasattr(torch.ops.aten, packet):
            continue
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        names = {argument.name for argument in op._schema.arguments}
        random = names & {"generator", "dropout", "dropout_p"} or "rand" in packet
        if random and torch.Tag.nondeterministic_seeded not in op.tags and not overload.endswith("out"):
            found.append(packet)
    assert "quantized_lstm" in found  # the search itself works
    assert [p for p in found if p not in KNOWN and not ("attention" in p and p.endswith("backward"))] == []


@pytest.mark.parametrize(
    "function",
    [
        torch.rand_like,
        lambda x: F.dropout(x, 0.5, True),
        lambda x: torch.bernoulli(x.sigmoid()),
        lambda x: torch.bernoulli(x, 0.0),
        lambda x: x.clone().uniform_(),
        lambda x: torch.multinomial(x.softmax(1), 1),
        lambda x: F.rrelu(x, training=True),
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
    ],
)
def test_what_draws(function: object) -> None:
    assert len(drawing(trace(lambda x: (function(x),), X))) == 1  # type: ignore[operator]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, 0.5, False),
        lambda x: F.dropout(x, 0.0, True),
        lambda x: F.rrelu(x, training=False),
        lambda x: F.scaled_dot_product_attention(x, x, x),
    ],
)
def test_what_is_switched_off_does_not_draw(function: object) -> None:
    before = torch.get_rng_state()
    function(X)  # type: ignore[operator]
    assert torch.equal(before, torch.get_rng_state())
    assert drawing(trace(lambda x: (function(x),), X)) == []  # type: ignore[operator]


def test_a_dead_draw_stays_in_the_graph() -> None:
    """Its only effect is on the generator, and a later draw shows it."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        torch.rand(3)
        F.dropout(x, 0.5, True)
        return (x + 1,)

    assert len(drawing(trace(function, X))) == 2


def test_recurrent_layers_with_dropout_keep_their_own_randomness() -> None:
    layer = torch.nn.LSTM(4, 4, num_layers=2, dropout=0.5)

    def run(x: Tensor) -> tuple[Tensor, ...]:
        return (layer(x)[0],)

    for training in (True, False):
        layer.train(training)
        with torch.no_grad():
            gm = trace(run, X)
        assert any(map(keeps_own_randomness, gm.graph.nodes)) == training


def test_reads_and_collectives() -> None:
    aten = torch.ops.aten
    assert reads_value(aten._local_scalar_dense.default) and reads_value(aten.nonzero.default)
    assert not reads_value(aten.add.Tensor)
    assert not is_collective(aten.add.Tensor)
    pytest.importorskip("torch.distributed._functional_collectives")
    assert is_collective(torch.ops._c10d_functional.all_reduce.default)


def test_operators_of_others_are_not_known() -> None:
    assert all_known(trace(lambda x: (x.chunk(2)[0],), X).graph)
    graph = torch.fx.Graph()
    graph.call_function(torch.relu, (graph.placeholder("x"),))
    assert not all_known(graph)


def test_indexing_reads_no_value_unless_with_a_mask() -> None:
    aten = torch.ops.aten
    x, index = torch.ones(3), torch.tensor([0, 2])
    assert only_gathers(aten.index.Tensor, (x, [None, index]))
    assert not only_gathers(aten.index.Tensor, (x, [None, index > 0]))
    assert not only_gathers(aten.nonzero.default, (x,))
