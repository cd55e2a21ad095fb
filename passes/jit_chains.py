"""Opt-in: a chain of exactly rounded additions and multiplications becomes one kernel.

Before::

    mul = aten.mul.Tensor(layer_norm, scale)       # [2, 50, 512] and [2, 1, 512]
    add = aten.add.Tensor(mul, shift)

After::

    float_chain = cadence_fx.float_chain(
        [layer_norm, scale, shift], "t0 = __fmul_rn(a0, a1)\\nt1 = __fadd_rn(t0, a2)", [25600, 512, 1]
    )

The kernel is ATen's own elementwise kernel around this function, compiled by PyTorch's jiterator. It is no kernel of
eager aten, so the pass has to be asked for, and it concerns graphs of CUDA devices alone.

Why no byte moves: a float32 sum, difference or product is rounded once, to nearest, in eager and here: ``__fadd_rn``
and its like are never contracted to a fused multiply-add, and neither compilation flushes denormals to zero. Numbers of
the host become the float that eager makes of them, bit by bit. On these devices every NaN that arithmetic gives has the
same bits. The result has the strides that the last operator of the chain gave it. What is between is used by the
chain alone.

What is taken: ``add``, ``sub``, ``rsub``, ``mul``, ``neg`` and squares, in any order, with broadcasting.

Left alone: other dtypes, which round after each operator in another way; divisions, which eager turns into products
with the reciprocal where the divisor is a number; ``alpha`` other than one, which eager's kernel does contract; numbers
with which an operator is an identity up to zeros and NaNs (``x * 1``, ``x + 0``), since a compiler might drop it; a
negation at the end of a chain, for the sign of its NaNs; chains with more than eight inputs; operands that are written
before the end of the chain; chains whose result would have other strides.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import isfinite
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from cadence_fx._torch import pointwise_kernel
from cadence_fx._units import counted
from cadence_fx.passes.base import PassContext, PassResult
from cadence_fx.passes.graphs import bound_args, location, output_node, tensor_val
from cadence_fx.passes.homes import Homes
from cadence_fx.passes.strides import elementwise_strides, same_strides

__all__ = ["JitChains"]

aten = torch.ops.aten
_MOST_INPUTS = 8  # the jiterator's limit
_MOST_OPERATORS = 64

# Operator -> intrinsic and the names of its operands, in the order of the intrinsic.
_EXACT: dict[Any, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys([aten.add.Tensor, aten.add.Scalar], ("__fadd_rn", ("self", "other"))),
    **dict.fromkeys(
        [aten.sub.Tensor, aten.sub.Scalar, aten.subtract.Tensor, aten.subtract.Scalar],
        ("__fsub_rn", ("self", "other")),
    ),
    **dict.fromkeys([aten.rsub.Tensor, aten.rsub.Scalar], ("__fsub_rn", ("other", "self"))),
    **dict.fromkeys(
        [aten.mul.Tensor, aten.mul.Scalar, aten.multiply.Tensor, aten.multiply.Scalar],
        ("__fmul_rn", ("self", "other")),
    ),
    aten.neg.default: ("-", ("self",)),
    aten.pow.Tensor_Scalar: ("__fmul_rn", ("self", "self")),  # squares alone: eager computes them so
}


@cache
def _kernel(program: str, inputs: int) -> Any:
    return pointwise_kernel(cuda_source(program, inputs))


def cuda_source(program: str, inputs: int) -> str:
    """The function of one element, in CUDA, of a program on ``inputs`` operands."""
    parameters = ", ".join(f"T a{index}" for index in range(inputs))
    lines = program.splitlines()
    body = " ".join(f"T {line};" for line in lines)
    return f"template <typename T> T float_chain({parameters}) {{ {body} return {lines[-1].split()[0]}; }}"


def _launch(inputs: Sequence[torch.Tensor], program: str, stride: Sequence[int]) -> torch.Tensor:
    result: torch.Tensor = _kernel(program, len(inputs))(*inputs)
    if same_strides(result.shape, result.stride(), stride):
        return result.as_strided(result.shape, stride)
    return result.new_empty_strided(result.shape, stride).copy_(result)  # a release with another rule for strides


def _traced(inputs: Sequence[torch.Tensor], program: str, stride: Sequence[int]) -> torch.Tensor:
    return inputs[0].new_empty_strided(torch.broadcast_shapes(*[given.shape for given in inputs]), stride)


# The namespace keeps the operator for as long as this object lives.
_LIBRARY = torch.library.Library("cadence_fx", "DEF")
_LIBRARY.define("float_chain(Tensor[] inputs, str program, int[] stride) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
_LIBRARY.impl("float_chain", _launch, "CUDA")
torch.library.register_fake("cadence_fx::float_chain", _traced, lib=_LIBRARY)


@dataclass(frozen=True, slots=True)
class _Operation:
    """One operator: an intrinsic on nodes and on numbers, which are the bits of floats."""

    intrinsic: str
    operands: tuple[fx.Node | int, ...]

    @property
    def nodes(self) -> list[fx.Node]:
        return [operand for operand in self.operands if isinstance(operand, fx.Node)]


class JitChains:
    """Finds the chains from their ends, and takes in what comes before as long as nobody else needs it."""

    name = "jit_chains"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        chains = _Chains(gm.graph, ctx)
        for node in reversed(list(gm.graph.nodes)):
            chains.end_at(node)
        if chains.kernels:
            ctx.notes.append(f"{self.name}: {chains.operators} operators are {counted(chains.kernels, 'kernel')} now")
        if chains.refused:
            ctx.notes.append(f"{self.name}: {len(chains.refused)} chains end early, such as at {chains.refused[0]}")
        return PassResult(gm, bool(chains.kernels))


class _Chains:
    def __init__(self, graph: fx.Graph, ctx: PassContext) -> None:
        self._graph = graph
        self._facts = ctx.facts_of(graph)
        self._homes = Homes(graph, self._facts, ctx)
        self._results = set(output_node(graph).all_input_nodes)
        self._operations = {node: found for node in graph.nodes if (found := _operation(node)) is not None}
        self.kernels = 0
        self.operators = 0
        self.refused: list[str] = []

    def end_at(self, root: fx.Node) -> None:
        """Replace the longest chain that ends at ``root``, if there is one."""
        if root not in self._operations or self._operations[root].intrinsic == "-":
            return
        members = {root}
        waiting: list[tuple[int, fx.Node]] = []
        self._wait(root, waiting)
        while waiting and len(members) < _MOST_OPERATORS:
            _, node = heapq.heappop(waiting)
            if node in members or not self._may_join(node, members):
                continue
            problem = self._problem(node, root, members)
            if problem is not None:
                self.refused.append(f"{node.name}, {location(node)}: {problem}")
                continue
            members.add(node)
            self._wait(node, waiting)
        if len(members) > 1:
            self._replace(root, members)

    def _wait(self, node: fx.Node, waiting: list[tuple[int, fx.Node]]) -> None:
        """Put what ``node`` computes with in line, latest first, so that all users of a node come before it."""
        for operand in self._operations[node].nodes:
            if operand in self._operations:
                heapq.heappush(waiting, (-self._facts.order[operand], operand))

    def _may_join(self, node: fx.Node, members: set[fx.Node]) -> bool:
        return node not in self._results and all(user in members for user in node.users)

    def _problem(self, node: fx.Node, root: fx.Node, members: set[fx.Node]) -> str | None:
        """Why ``node`` cannot be computed where ``root`` is."""
        start, end = self._facts.order[node], self._facts.order[root]
        for operand in self._operations[node].nodes:
            if self._homes.written_between(operand, start, end):
                return f"{operand.name} is written before {root.name}"
        inputs = self._inputs(root, members | {node})
        if len(inputs) > _MOST_INPUTS:
            return f"{len(inputs)} inputs, where a kernel takes {_MOST_INPUTS}"
        val = tensor_val(root)
        operands = [(tensor_val(given).shape, tensor_val(given).stride()) for given in inputs]
        if not same_strides(val.shape, elementwise_strides(val.shape, operands), val.stride()):
            return f"{root.name} would have other strides"
        return None

    def _inputs(self, root: fx.Node, members: set[fx.Node]) -> list[fx.Node]:
        """What a chain reads, in order of use. Those laid out like its result come first: they decide its layout."""
        ordered = sorted(members, key=self._facts.order.__getitem__)
        inputs = dict.fromkeys(n for member in ordered for n in self._operations[member].nodes if n not in members)
        want = tensor_val(root)

        def differs(node: fx.Node) -> bool:
            val = tensor_val(node)
            return val.shape != want.shape or not same_strides(want.shape, val.stride(), want.stride())

        return sorted(inputs, key=differs)

    def _replace(self, root: fx.Node, members: set[fx.Node]) -> None:
        inputs = self._inputs(root, members)
        ordered = sorted(members, key=self._facts.order.__getitem__)
        val = tensor_val(root)
        program = _program([(node, self._operations[node]) for node in ordered], inputs)
        with self._graph.inserting_before(root):
            chain = self._graph.call_function(
                torch.ops.cadence_fx.float_chain.default, (inputs, program, list(val.stride()))
            )
        chain.meta.update(root.meta)
        root.replace_all_uses_with(chain)
        for node in reversed(ordered):
            del self._operations[node]
            self._graph.erase_node(node)
        self.kernels += 1
        self.operators += len(members)


def _program(operations: Sequence[tuple[fx.Node, _Operation]], inputs: Sequence[fx.Node]) -> str:
    """A line an operator, such as ``t1 = __fadd_rn(t0, a2)``. Equal chains have equal programs."""
    names: dict[fx.Node, str] = {node: f"a{index}" for index, node in enumerate(inputs)}
    lines = []
    for index, (node, operation) in enumerate(operations):
        operands = [names[o] if isinstance(o, fx.Node) else f"__int_as_float({o:#x})" for o in operation.operands]
        names[node] = f"t{index}"
        lines.append(f"t{index} = {operation.intrinsic}({', '.join(operands)})")
    return "\n".join(lines)


def _operation(node: fx.Node) -> _Operation | None:
    """``node`` as a part of a chain; None where its bytes would not be certain."""
    if node.op != "call_function" or node.target not in _EXACT or torch.version.hip is not None:
        return None
    if not _is_plain_float(node) or tensor_val(node).requires_grad or not tensor_val(node).numel():
        return None
    intrinsic, names = _EXACT[node.target]
    values = bound_args(node)
    if not _is_number(values.get("alpha", 1), 1) or not _is_number(values.get("exponent", 2), 2):
        return None
    operands: list[fx.Node | int] = []
    for name in names:
        value = values[name]
        if isinstance(value, fx.Node):
            if not _is_plain_float(value) or tensor_val(value).device != tensor_val(node).device:
                return None
            operands.append(value)
        else:
            bits = _bits(value)
            if bits is None or not _changes(intrinsic, bits):
                return None
            operands.append(bits)
    return _Operation(intrinsic, tuple(operands))


def _is_number(value: Any, wanted: int) -> bool:
    return type(value) in (int, float) and value == wanted


def _is_plain_float(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return (
        isinstance(val, torch.Tensor)
        and val.dtype is torch.float32
        and val.device.type == "cuda"
        and val.layout is torch.strided
        and not val.is_neg()
    )


def _bits(number: Any) -> int | None:
    """The bits of the float that eager makes of a number: a double or a 64-bit integer, rounded to nearest."""
    wide = {float: np.float64, int: np.int64}.get(type(number))
    if wide is None or (wide is np.int64 and not -(2**63) <= number < 2**63):
        return None
    with np.errstate(over="ignore"):
        return int(wide(number).astype(np.float32).view(np.uint32))


def _changes(intrinsic: str, bits: int) -> bool:
    """Whether the operator does more with this number than to pass on the other operand, or a constant."""
    number = float(np.uint32(bits).view(np.float32))
    return isfinite(number) and number not in ((0.0, 1.0, -1.0) if intrinsic == "__fmul_rn" else (0.0,))
