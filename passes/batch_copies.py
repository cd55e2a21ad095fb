"""Small copies that stand together become one kernel.

Before, one for each state of a stack of layers::

    copy_ = aten.copy_.default(carry_0, new_0)             # [1, 512, 2]
    copy__1 = aten.copy_.default(carry_1, new_1)
    copy__2 = aten.copy_.default(carry_2, new_2)

After::

    _foreach_copy_ = aten._foreach_copy_.default([carry_0, carry_1, carry_2], [new_0, new_1, new_2])

Why no byte moves: each copy is between tensors of one dtype, whose elements the kernel loads and stores as they are,
and none of them touches memory that another one of the same kernel writes. Nothing but views stands between them, so
nothing sees that the first of them comes later.

Left alone: copies that convert, or are of other dtypes (the kernel computes 16-bit floats as 32-bit ones, and may give
a NaN other bits); memory that is not dense, or not laid out alike on both sides, which PyTorch would copy one by one;
copies of more than 16,384 elements, which one block of threads would carry out; copies on the host; copies whose result
is used.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from cadence_fx._units import counted
from cadence_fx.passes.base import PassContext, PassResult
from cadence_fx.passes.graphs import GraphFacts, bound_args, is_impure
from cadence_fx.passes.homes import Homes

__all__ = ["BatchCopies"]

aten = torch.ops.aten
_MOST_ELEMENTS = 16_384
_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)


class BatchCopies:
    """Collects copies until something that computes, or a copy that depends on one of them, comes."""

    name = "batch_copies"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        facts = ctx.facts_of(gm.graph)
        homes = Homes(gm.graph, facts, ctx)
        runs: list[list[fx.Node]] = [[]]
        for node in gm.graph.nodes:
            if node.op in ("placeholder", "get_attr") or _is_view(node, facts):
                continue
            batch = runs[-1]
            if not _is_small_copy(node):
                runs.append([])
            elif batch and not (_alike(batch[0], node) and all(_independent(other, node, homes) for other in batch)):
                runs.append([node])
            else:
                batch.append(node)
        runs = [batch for batch in runs if len(batch) > 1]
        for batch in runs:
            _join(gm.graph, batch)
        if runs:
            ctx.notes.append(f"{self.name}: {sum(map(len, runs))} copies are {counted(len(runs), 'kernel')} now")
        return PassResult(gm, bool(runs))


def _join(graph: fx.Graph, batch: list[fx.Node]) -> None:
    targets, sources = zip(*(_ends(node) for node in batch), strict=True)
    with graph.inserting_after(batch[-1]):
        joined = graph.call_function(aten._foreach_copy_.default, (list(targets), list(sources)))
    joined.meta = {name: value for name, value in batch[-1].meta.items() if name != "val"}
    for node in batch:
        graph.erase_node(node)


def _ends(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    values = bound_args(node)
    return values["self"], values["src"]


def _is_small_copy(node: fx.Node) -> bool:
    """Whether the fast path of the batched copy takes ``node``."""
    if node.target is not aten.copy_.default or node.users:
        return False
    target, source = (end.meta["val"] for end in _ends(node))
    return (
        target.dtype is source.dtype
        and target.dtype in _DTYPES
        and target.device == source.device
        and target.device.type == "cuda"
        and target.layout is source.layout is torch.strided
        and not (target.is_neg() or source.is_neg())
        and target.shape == source.shape
        and target.stride() == source.stride()
        and 0 < target.numel() <= _MOST_ELEMENTS
        and _is_dense(target)
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a stretch of memory, each place once, in whatever order."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _alike(left: fx.Node, right: fx.Node) -> bool:
    a, b = _ends(left)[0].meta["val"], _ends(right)[0].meta["val"]
    return a.dtype is b.dtype and a.device == b.device


def _independent(left: fx.Node, right: fx.Node, homes: Homes) -> bool:
    """Whether neither of two copies writes what the other one reads or writes."""
    (to, source), (other_to, other_source) = _ends(left), _ends(right)
    return not any(
        _overlap(one, other, homes) for one, other in ((to, other_to), (to, other_source), (source, other_to))
    )


def _overlap(left: fx.Node, right: fx.Node, homes: Homes) -> bool:
    if homes.home(left) is not homes.home(right):
        return False
    a, b = left.meta["val"], right.meta["val"]
    if not GraphFacts.same_memory(a, b):
        return True  # one memory under two names: where they lie in it is not known
    first, second = sorted((t.storage_offset() * t.element_size(), t.nbytes) for t in (a, b))
    return first[0] + first[1] > second[0]


def _is_view(node: fx.Node, facts: GraphFacts) -> bool:
    """Whether ``node`` computes nothing: a view of memory that was there before."""
    return not is_impure(node) and any(facts.aliases(node, source) for source in node.all_input_nodes)
