"""Products whose kernels add into their result get memory that has been cleared ahead.

A product that is split along its inner dimension adds its parts into the result, so the library clears the result
first, with a kernel of its own on the way of every such product. Before::

    y = aten.linear(x, weight, bias)

After, with two buffers used in turn::

    buffer = self._cleared_0
    zero_ = aten.zero_(buffer)                       # one for many products, away from where they are waited for
    ...
    out = aten.as_strided(buffer, [100, 512], [512, 1], 7 * 51200)
    addmm = aten.addmm.out(bias, view, t, out=out)   # what linear calls on such arguments
    y = aten.view(out, [2, 50, 512])

By itself this changes nothing but where results are: the edit ``drop_scalings`` takes the clearing kernels out of the
captured graph, where it finds them on this memory.

Why no byte moves: ``linear`` of a contiguous input with a bias is ``addmm`` of its rows, the same library call with the
same arguments; the memory of a result is cleared after the last use of what was there before, and nothing else writes
it before the product does.

Left alone: products on the host, of other dtypes than float32, without bias, with inputs that are not contiguous, with
more columns than inner dimension (the library does not split those), with large results, and those whose result is
still used when its memory would be due again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.fx as fx

from cadence_fx.passes.base import PassContext, PassResult
from cadence_fx.passes.graphs import GraphFacts, add_tensor, emit, output_node, tensor_val, trace_again

__all__ = ["ClearedProducts"]

aten = torch.ops.aten
_LARGEST = 2**18  # elements of a result; more are computed by enough blocks without splitting
_SLOTS = 64  # results in a buffer
_FEWEST = 4  # products for which a buffer pays


_memory: weakref.WeakValueDictionary[tuple[int, int, torch.dtype, torch.device], torch.Tensor] = (
    weakref.WeakValueDictionary()
)


@dataclass(frozen=True, slots=True)
class _Product:
    node: fx.Node
    position: int
    last_use: int


class ClearedProducts:
    """Puts results of small products into memory that is cleared for many of them at once.

    Args:
        on_device: whether a traced tensor is where libraries split products.
    """

    name = "cleared_products"

    def __init__(self, on_device: Callable[[torch.Tensor], bool] = lambda tensor: tensor.device.type == "cuda") -> None:
        self._on_device = on_device

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        graph = gm.graph
        facts = ctx.facts_of(graph)
        products = self._find(graph, facts)
        if len(products) < _FEWEST:
            return PassResult(gm, False)
        order = list(graph.nodes)
        slot = max(tensor_val(product.node).numel() for product in products)
        like = tensor_val(products[0].node)
        buffers: list[fx.Node] = []
        first = next(node for node in order if node.op != "placeholder")
        with graph.inserting_before(first):
            for which in range(min(2, -(-len(products) // _SLOTS))):
                memory = _shared(which, _SLOTS * slot, like)
                buffers.append(add_tensor(gm, "_cleared_", memory, like.new_empty(_SLOTS * slot)))
                ctx.cleared.append(memory)
                emit(graph, aten.zero_.default, buffers[-1], like=products[0].node)
        views = _views(facts, products)
        groups = [products[at : at + _SLOTS] for at in range(0, len(products), _SLOTS)]
        for number in range(2, len(groups)):
            with graph.inserting_after(order[max(product.last_use for product in groups[number - 2])]):
                emit(graph, aten.zero_.default, buffers[number % 2], like=groups[number][0].node)
        for number, group in enumerate(groups):
            for index, product in enumerate(group):
                _replace(graph, product.node, buffers[number % 2], index * slot)
                for view in views.get(product.node, ()):
                    trace_again(view)
        ctx.notes.append(f"{self.name}: {len(products)} products in {len(groups)} groups of cleared memory")
        return PassResult(gm, True)

    def _find(self, graph: fx.Graph, facts: GraphFacts) -> list[_Product]:
        last: dict[fx.Node, int] = {}
        for node, position in facts.order.items():
            for used in node.all_input_nodes:
                last[facts.alias_class(used)] = position
        leaving = {facts.alias_class(node) for node in output_node(graph).all_input_nodes}
        found = [
            _Product(node, position, last.get(facts.alias_class(node), position))
            for node, position in facts.order.items()
            if self._fits(node) and facts.alias_class(node) not in leaving
        ]
        due = [product.position for product in found]
        return [
            product
            for index, product in enumerate(found)
            if index + _SLOTS >= len(found) or product.last_use < due[index + _SLOTS]
        ]

    def _fits(self, node: fx.Node) -> bool:
        if node.op != "call_function" or node.target is not aten.linear.default or len(node.all_input_nodes) != 3:
            return False
        x, weight, bias = map(tensor_val, node.all_input_nodes)
        result = tensor_val(node)
        return (
            all(self._on_device(each) and each.dtype == torch.float32 for each in (x, weight, bias))
            and result.dtype == torch.float32
            and x.dim() in (2, 3)
            and x.is_contiguous()
            and weight.is_contiguous()
            and bias.is_contiguous()
            and weight.shape[1] >= weight.shape[0]
            and 0 < result.numel() <= _LARGEST
        )


def _views(facts: GraphFacts, products: list[_Product]) -> dict[fx.Node, list[fx.Node]]:
    """What shares the memory of each product, in order."""
    of = {facts.alias_class(product.node): product.node for product in products}
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in facts.order:
        product = of.get(facts.alias_class(node))
        if product is not None and product is not node:
            found.setdefault(product, []).append(node)
    return found


def _shared(which: int, numel: int, like: torch.Tensor) -> torch.Tensor:
    """Memory that all classes of a device use, one launch after the other: nothing in it outlives a launch."""
    key = (which, numel, like.dtype, like.device)
    memory = _memory.get(key)
    if memory is None:
        memory = _memory[key] = torch.zeros(numel, dtype=like.dtype, device=like.device)
    return memory


def _replace(graph: fx.Graph, node: fx.Node, buffer: fx.Node, offset: int) -> None:
    x, weight, bias = node.all_input_nodes
    rows, columns = tensor_val(node).numel() // tensor_val(node).shape[-1], tensor_val(node).shape[-1]
    with graph.inserting_before(node):
        flat = emit(graph, aten.view.default, x, [rows, tensor_val(x).shape[-1]], like=node)
        turned = emit(graph, aten.t.default, weight, like=node)
        out = emit(graph, aten.as_strided.default, buffer, [rows, columns], [columns, 1], offset, like=node)
        product = graph.call_function(aten.addmm.out, (bias, flat, turned), {"out": out})
        product.meta.update(node.meta, val=out.meta["val"])
        result = emit(graph, aten.view.default, product, list(tensor_val(node).shape), like=node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
