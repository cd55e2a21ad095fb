"""Results of small products in memory that is cleared ahead: which, where, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from cadence_fx.errors import NotCapturable
from cadence_fx.passes import ClearedProducts, PassContext, VerifyCapturable, cleared_products, run_passes
from cadence_fx.passes.graphs import GraphFacts
from tests.passes.toolbox import listing, trace

X, W, B = torch.randn(2, 3, 8), torch.randn(8, 8), torch.randn(8)


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield


def rewritten(function: Callable[..., object], *examples: Tensor) -> tuple[fx.GraphModule, PassContext]:
    ctx = PassContext()
    return run_passes(trace(function, *examples), ctx, [ClearedProducts(lambda tensor: True)]), ctx


def chain(length: int) -> Callable[[Tensor, Tensor, Tensor], list[Tensor]]:
    def function(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        for _ in range(length):
            x = torch.nn.functional.linear(x, w, b).tanh()
        return [x]

    return function


def by_rows(x: Tensor, w: Tensor, b: Tensor, length: int) -> Tensor:
    """The chain, with what a linear is on such arguments."""
    for _ in range(length):
        x = torch.addmm(b, x.view(-1, 8), w.t()).view(2, 3, 8).tanh()
    return x


def test_the_graph_before_and_after() -> None:
    gm, ctx = rewritten(chain(4), X, W, B)
    text = listing(gm)
    assert text.count("aten.addmm.out") == 4 and "aten.linear" not in text
    assert text.count("aten.zero_.default") == 1
    assert "aten.as_strided.default(_cleared_0, [6, 8], [8, 1], 0)" in text
    assert "aten.as_strided.default(_cleared_0, [6, 8], [8, 1], 144)" in text
    assert ctx.notes == ["cleared_products: 4 products in 1 groups of cleared memory"]
    assert [memory.data_ptr() for memory in ctx.cleared] == [gm.get_buffer("_cleared_0").data_ptr()]
    assert torch.equal(gm(X, W, B)[0], by_rows(X, W, B, 4))


@pytest.mark.parametrize("length", [4, 5, 6, 7, 8, 13])
def test_a_product_finds_zeros_where_it_puts_its_result(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleared_products, "_SLOTS", 2)
    gm, _ = rewritten(chain(length), X, W, B)
    found: list[bool] = []

    class Watching(fx.Interpreter):
        def call_function(self, target, args, kwargs):  # type: ignore[no-untyped-def]
            if "out" in kwargs:
                found.append(not bool(kwargs["out"].any()))
            return super().call_function(target, args, kwargs)

    for buffer in gm.buffers():
        buffer.fill_(float("nan"))
    for _ in range(2):
        (result,) = Watching(gm).run(X, W, B)
        assert torch.equal(result, by_rows(X, W, B, length))
    assert found == [True] * 2 * length


def test_a_result_that_is_used_for_long_stays_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleared_products, "_SLOTS", 2)

    def function(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        first = torch.nn.functional.linear(x, w, b)
        return [first + chain(6)(first, w, b)[0]]

    gm, ctx = rewritten(function, X, W, B)
    assert listing(gm).count("aten.linear.default") == 1
    assert "6 products" in ctx.notes[0]
    expected = torch.addmm(B, X.view(-1, 8), W.t()).view(2, 3, 8)
    assert torch.equal(gm(X, W, B)[0], expected + by_rows(expected, W, B, 6))


def test_a_result_that_leaves_stays_where_it_was() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        return [*chain(4)(x, w, b), torch.nn.functional.linear(x, w, b)[0]]

    gm, _ = rewritten(function, X, W, B)
    assert listing(gm).count("aten.linear.default") == 1


@pytest.mark.parametrize(
    "examples",
    [
        (X.double(), W.double(), B.double()),
        (X.transpose(0, 1), W, B),
        (X, W.t(), B),
        (torch.randn(2, 2, 3, 8), W, B),
        (torch.randn(2**16, 8), W, B),
    ],
    ids=["dtype", "strided input", "strided weight", "four dimensions", "large"],
)
def test_what_is_left_alone(examples: tuple[Tensor, ...]) -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        return [torch.nn.functional.linear(x, w, b) + k for k in range(5)]

    gm, ctx = rewritten(function, *examples)
    assert not ctx.notes and not ctx.cleared and "addmm" not in listing(gm)


def test_a_wide_product_a_product_without_bias_and_one_on_the_host() -> None:
    def wide(x: Tensor, w: Tensor) -> list[Tensor]:
        return [torch.nn.functional.linear(x, w) + k for k in range(5)]

    assert not rewritten(wide, X, W)[1].notes
    tall = torch.randn(16, 8)
    assert not rewritten(
        lambda x, w, b: [torch.nn.functional.linear(x, w, b) + k for k in range(5)], X, tall, tall[:, 0]
    )[1].notes
    ctx = PassContext()
    run_passes(trace(chain(5), X, W, B), ctx, [ClearedProducts()])
    assert not ctx.notes


def test_cleared_memory_is_what_a_recording_may_write() -> None:
    ctx = PassContext()
    run_passes(trace(chain(4), X, W, B), ctx, [ClearedProducts(lambda tensor: True), VerifyCapturable()])
    assert ctx.notes
    ctx.cleared.clear()
    with pytest.raises(NotCapturable, match="undeclared_write"):
        run_passes(rewritten(chain(4), X, W, B)[0], ctx, [VerifyCapturable()])


def test_views_of_results_are_known_to_be_views_of_the_cleared_memory() -> None:
    def heads(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        for _ in range(4):
            x = torch.nn.functional.linear(x, w, b).reshape(2, 3, 2, 4).transpose(1, 2).reshape(2, 3, 8) * 2
        return [x]

    gm, _ = rewritten(heads, X, W, B)
    facts = GraphFacts(gm.graph)
    (buffer,) = gm.graph.find_nodes(op="get_attr")
    for product in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.out):
        (flat,) = [user for user in product.users if user.target is torch.ops.aten.view.default]
        (split,) = flat.users
        assert facts.aliases(split, buffer)


def test_classes_share_the_memory() -> None:
    one, two = rewritten(chain(4), X, W, B)[1], rewritten(chain(5), X, W, B)[1]
    assert one.cleared[0] is two.cleared[0]
