"""What Dynamo would do with a call, found out beside its caches: which compiled code serves it, or a trace of its own.

Like `_torch`, this module touches private PyTorch API, of torch 2.11 to 2.14.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._dynamo import pgo
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.exc import TorchDynamoException

from cadence_fx._torch import compile_wrapper_of, original_of

_GRAPH = "__compiled_fn"


def function_of(compiled: Any) -> tuple[types.FunctionType, Any] | None:
    """The Python function that Dynamo compiles for a compiled callable, and what it is bound to; None for others."""
    original = original_of(compiled)
    target = original.forward if isinstance(original, torch.nn.Module) else original
    function, owner = getattr(target, "__func__", target), getattr(target, "__self__", None)
    return (function, owner) if isinstance(function, types.FunctionType) else None


def is_served(compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether Dynamo has compiled code for this very call, which begins with a graph. Nothing is run but guards.

    Raises:
        TypeError: the call does not fit the signature.
    """
    found = function_of(compiled)
    if found is None:
        return False
    function, owner = found
    given = inspect.signature(function).bind(*(() if owner is None else (owner,)), *args, **kwargs)
    given.apply_defaults()
    local = dict(given.arguments)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            local[name] = cell.cell_contents
    wrapper = compile_wrapper_of(compiled)
    for entry in _debug_get_cache_entry_list(function.__code__):
        if _compiler(entry.backend) is wrapper and entry.guard_manager.check(local):
            return any(name.startswith(_GRAPH) for name in entry.code.co_names)
    return False


def _compiler(backend: Any) -> Any:
    """What a user gave to `torch.compile`, under what Dynamo has put around it."""
    names = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable")
    while (inner := next((found for name in names if (found := getattr(backend, name, None))), None)) is not None:
        backend = inner
    return backend


class Told(BaseException):
    """Ends a call where its answer is known. No `Exception`, which the code on the way may catch."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer


def trace_aside(
    compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any], receive: Callable[[fx.GraphModule, Any], Any]
) -> Any:
    """What `receive` makes of the graph that Dynamo would compile for a call, and of its flat arguments.

    A copy of the code is traced, in one graph or not at all, and nothing of it is run. What Dynamo remembers of sizes
    it has met is used and then as it was.

    Raises:
        LookupError: it cannot be traced in one graph; the message says where.
    """
    found = function_of(compiled)
    if found is None:
        raise LookupError("what was compiled is no Python function")
    function, owner = found
    twin = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    target = twin if owner is None else types.MethodType(twin, owner)

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        raise Told(receive(gm, tuple(map(_as_called, example_inputs))))

    dynamic = getattr(compile_wrapper_of(compiled), "dynamic", None)
    with _history_kept():
        try:
            torch.compile(target, backend=backend, dynamic=dynamic, fullgraph=True)(*args, **kwargs)
        except Told as told:
            return told.answer
        except TorchDynamoException as error:
            raise LookupError(_where(error)) from error
    raise LookupError("the call reaches no operator of PyTorch's")


def _as_called(value: Any) -> Any:
    """A number as the call has it, where Dynamo has made a symbol of it."""
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value


def _where(error: TorchDynamoException) -> str:
    """The first line of what Dynamo says, and the user's line."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    stack = getattr(error, "real_stack", None)
    return f"{first} at {stack[-1].filename}:{stack[-1].lineno}" if stack else first


@contextlib.contextmanager
def _history_kept() -> Iterator[None]:
    """By the sizes that a code has been called with Dynamo decides which of them become symbols."""
    state = pgo.get_code_state()
    saved = copy.deepcopy(dict(state))
    try:
        yield
    finally:
        state.clear()
        state.update(saved)
