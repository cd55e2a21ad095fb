"""One call of a module as an aten graph, traced from Python itself, at given sizes or with sizes as symbols.

Unlike a Dynamo graph it needs no guards, no recompilation and no declaration, and it is one graph or none: code whose
Python depends on the values of tensors cannot be traced. Like `_torch`, this module touches private PyTorch API, of
torch 2.11 to 2.14.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from cadence_fx._torch import as_expr

_TORCH = str(Path(torch.__file__).parent)
_OURS = Path(__file__).parent
_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_RECORDS = "record_stack_traces" in inspect.signature(make_fx).parameters
_STACKS: dict[str, Any] = {"record_stack_traces": True} if _RECORDS else {}


class NotTraced(Exception):
    """A call that is no single graph; ``where`` is the user's line, if one is known."""

    def __init__(self, problem: str, where: str | None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.where = where


@dataclasses.dataclass(frozen=True, slots=True)
class TracedCall:
    """A graph with a placeholder for each tensor that was given.

    Attributes:
        results: what each value that was returned is: a node of the graph, or None where it is no tensor.
        same: for each value, the number of the given tensor that it is itself, if it is one.
        sizes: for each value, its shape as sympy expressions.
        symbols: (number of the given tensor, axis) -> the symbol of that size, where it was left open.
        guards: relations between the symbols that the trace holds under.
    """

    gm: fx.GraphModule
    results: tuple[fx.Node | None, ...]
    same: tuple[int | None, ...]
    sizes: tuple[tuple[sympy.Expr, ...] | None, ...]
    symbols: dict[tuple[int, int], sympy.Expr]
    guards: tuple[sympy.Expr, ...]


def trace_call(
    run: Callable[..., Sequence[Any]],
    tensors: Sequence[torch.Tensor],
    open_axes: Sequence[Collection[int]] = (),
) -> TracedCall:
    """Trace ``run(*tensors)``, nothing decomposed, mutation kept.

    Args:
        run: returns a flat sequence of tensors and others; only metadata of ``tensors`` is used.
        open_axes: for each tensor, the axes whose sizes are symbols; none of any if left out.

    Raises:
        NotTraced: the code reads a value of a tensor, or cannot be run on tensors without data.
    """
    shape_env = ShapeEnv(duck_shape=False, specialize_zero_one=False) if open_axes else None
    results: list[Any] = []
    given: list[Any] = []

    def watched(*values: Any) -> list[Any]:
        fx._symbolic_trace._is_fx_tracing_flag = False  # as in `to_static_aten`
        given[:] = values
        results[:] = run(*values)
        return [value if isinstance(value, torch.Tensor) else None for value in results]

    try:
        with torch.no_grad(), tracing(None), FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True) as mode:
            if shape_env is None:
                fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in tensors]
            else:
                fakes = [
                    _opened(mode, tensor, axes, f"t{i}")
                    for i, (tensor, axes) in enumerate(zip(tensors, open_axes, strict=True))
                ]
            gm: fx.GraphModule = make_fx(watched, pre_dispatch=True, **_STACKS)(*fakes)
    except Exception as error:
        raise NotTraced(_first_line(error), raised_at(error)) from error
    (out,) = gm.graph.output_node().args
    nodes = tuple(node if isinstance(node, fx.Node) else None for node in out)  # type: ignore[union-attr]
    identities = {id(value): i for i, value in enumerate(given)}
    return TracedCall(
        gm,
        nodes,
        tuple(identities.get(id(value)) if isinstance(value, torch.Tensor) else None for value in results),
        tuple(_shape(value) for value in results),
        {
            (i, axis): as_expr(fake.shape[axis])
            for i, (fake, axes) in enumerate(zip(fakes, open_axes, strict=False))
            for axis in axes
        },
        tuple(sympy.sympify(guard.expr) for guard in shape_env.guards) if shape_env is not None else (),
    )


def _opened(mode: FakeTensorMode, tensor: torch.Tensor, axes: Collection[int], name: str) -> FakeTensor:
    sizes = [DimDynamic.DYNAMIC if axis in axes else DimDynamic.STATIC for axis in range(tensor.dim())]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(name))


def _shape(value: Any) -> tuple[sympy.Expr, ...] | None:
    return tuple(as_expr(size) for size in value.shape) if isinstance(value, torch.Tensor) else None


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def raised_at(error: BaseException) -> str | None:
    """`file:line` of the innermost frame of an error that is neither PyTorch's nor this project's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


def line_of(node: fx.Node) -> str | None:
    """`file:line` of the innermost line of the user's code that made a node; None if it was not kept."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    users = [(file, line) for file, line in frames if _is_users(file)]
    return f"{users[-1][0]}:{users[-1][1]}" if users else None


def _is_users(file: str) -> bool:
    return not file.startswith((_TORCH, "<")) and Path(file).parent != _OURS
