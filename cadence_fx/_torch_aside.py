"""What Dynamo would do with a call, found out beside its caches: which compiled code serves it, or a trace of its own.

Like `_torch`, this module touches private PyTorch API, of torch 2.11 to 2.14.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo import config, eval_frame, pgo
from torch._dynamo.cache_size import _has_same_id_matched_objs
from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.types import ConvertFrameReturn

from cadence_fx._torch import compile_layers, compile_wrapper_of, original_of, users_line, with_own_code
from cadence_fx._units import counted

_GRAPH = "__compiled_fn"


def function_of(compiled: Any) -> tuple[types.FunctionType, Any] | None:
    """The Python function that Dynamo compiles for a compiled callable, and what it is bound to; None for others."""
    original = original_of(compiled)
    target = original.forward if isinstance(original, torch.nn.Module) else original
    function, owner = getattr(target, "__func__", target), getattr(target, "__self__", None)
    return (function, owner) if isinstance(function, types.FunctionType) else None


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """What Dynamo has for a call.

    Attributes:
        served: compiled code for it, which begins with a graph.
        limit: in words, the limit that keeps Dynamo from compiling a code for it; None where none does.
        off: in words, what keeps Dynamo from compiling anything; None where nothing does.
        given_up: Dynamo compiles nothing more of the code, or skips it, for what it has met in an earlier call.
        raises: Dynamo raises where ``limit`` or ``off`` is in the way, and does not run the code as it is.
    """

    served: bool
    limit: str | None = None
    off: str | None = None
    given_up: bool = False
    raises: bool = False


def standing(compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Standing:
    """What Dynamo has for this very call, and whether it would compile a code for it. Nothing is run but guards.

    Raises:
        TypeError: the call does not fit the signature.
    """
    found = function_of(compiled)
    if found is None:
        return Standing(False)
    function, owner = found
    given = inspect.signature(function).bind(*(() if owner is None else (owner,)), *args, **kwargs)
    given.apply_defaults()
    local = dict(given.arguments)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            local[name] = cell.cell_contents
    wrapper, stance = compile_wrapper_of(compiled), eval_frame._stance.stance
    off = f"torch.compiler.set_stance({stance!r})"
    for entry in _debug_get_cache_entry_list(function.__code__):
        if _compiler(entry.backend) is wrapper and entry.guard_manager.check(local):
            begins = any(name.startswith(_GRAPH) for name in entry.code.co_names)
            return Standing(begins, off=off if stance == "force_eager" else None)
    if stance in ("force_eager", "eager_on_recompile", "fail_on_recompile"):
        return Standing(False, off=off, raises=stance == "fail_on_recompile")
    if config.disable:
        return Standing(False, off="torch._dynamo.config.disable is set")
    limit = _limit(compiled, function, local)
    if limit is not None:
        return Standing(False, limit, raises=_is_one_graph(compiled) or config.fail_on_recompile_limit_hit)
    return Standing(False, given_up=not _compiles(function, owner, args, kwargs))


def _limit(compiled: Any, function: types.FunctionType, local: dict[str, Any]) -> str | None:
    """The limit at which the compiled codes of a function are, by Dynamo's own count (`torch._dynamo.cache_size`).

    Since torch 2.13 a `torch.compile` call can have a limit, and a region that counts for itself, of its own.
    """
    layers = list(compile_layers(compiled))
    region = next((r for layer in layers if (r := getattr(layer, "_isolate_recompiles_id", None)) is not None), -1)
    own = next((n for layer in layers if (n := getattr(layer, "_recompile_limit", None)) is not None), None)
    entries = _debug_get_cache_entry_list(function.__code__)
    frame: Any = types.SimpleNamespace(f_locals=local)
    alike = [
        entry
        for entry in entries
        if getattr(entry, "isolate_recompiles_id", -1) == region and _has_same_id_matched_objs(frame, entry)
    ]
    frames = {entry.compile_id.frame_id for entry in entries if entry.compile_id is not None}
    tried = [FRAME_COMPILE_COUNTER[each] for each in frames if each is not None]
    counts = {
        "accumulated_recompile_limit": (max(len(entries), *tried, 0), config.accumulated_recompile_limit),
        "recompile_limit": (len(alike), config.recompile_limit if own is None else own),
    }
    for name, (count, most) in counts.items():
        if count >= most:
            code = function.__code__
            where = f"{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
            return f"Dynamo has compiled {where} {counted(count, 'time')}, and {name} is {most}"
    return None


def _is_one_graph(compiled: Any) -> bool:
    """Whether `torch.compile` was called with `fullgraph=True`."""
    return any(getattr(layer, "_one_graph", False) for layer in compile_layers(compiled))


class _Begun(BaseException):
    """The user's code was about to run."""


@contextlib.contextmanager
def _unrun(code: types.CodeType) -> Iterator[None]:
    """Ends what is done inside with `_Begun`, as soon as this code itself would be run in this thread."""

    def watch(frame: types.FrameType, event: str, argument: Any) -> None:
        if frame.f_code is code:
            raise _Begun

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)


def _compiles(function: types.FunctionType, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether Dynamo asks for a compiled code when this function is called. It is not run, and nothing is compiled.

    What Dynamo has noted of a code, to skip it or to compile no more of it, can only be seen in what it does.
    """

    def ask(frame: Any, *_: Any) -> ConvertFrameReturn:
        if frame.f_code is function.__code__:
            raise Told(True)
        return ConvertFrameReturn(apply_to_code=False)

    callback: Any = ask
    try:
        with _unrun(function.__code__):
            before = set_eval_frame(callback)
            try:
                function(*(() if owner is None else (owner,)), *args, **kwargs)
            finally:
                set_eval_frame(before)
    except Told:
        return True
    except _Begun:
        return False
    return False


class GivenUp(LookupError):
    """Dynamo runs a code as it is, whatever it has compiled of it."""

    def __init__(self) -> None:
        super().__init__("Dynamo has given this code up in an earlier call")


def answer_of(compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The answer of whoever raises `Told` in a call that compiled code serves.

    Raises:
        GivenUp, LookupError: nobody does; the user's code is not run.
    """
    found = function_of(compiled)
    assert found is not None  # or the call is not served
    try:
        with _unrun(found[0].__code__):
            compiled(*args, **kwargs)
    except Told as told:
        return told.answer
    except _Begun:
        raise GivenUp from None
    raise LookupError("the call ended before its first graph")


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
    twin = with_own_code(function)
    target = twin if owner is None else types.MethodType(twin, owner)

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        raise Told(receive(gm, tuple(map(_as_called, example_inputs))))

    dynamic = getattr(compile_wrapper_of(compiled), "dynamic", None)
    # Under fullgraph=True Dynamo traces reads of a tensor's value, which break the graph elsewhere.
    step = torch.compile(target, backend=backend, dynamic=dynamic, fullgraph=_is_one_graph(compiled))
    with _history_kept(), torch._dynamo.error_on_graph_break(True):
        try:
            with _unrun(twin.__code__):
                step(*args, **kwargs)
        except Told as told:
            return told.answer
        except _Begun:
            raise LookupError("Dynamo does not look into this code") from None
        except TorchDynamoException as error:
            raise LookupError(_where(error)) from error
    raise LookupError("the call reaches no operator of PyTorch's")


def broken_at(compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why and where Dynamo breaks the graph of a call; None where it does not."""
    try:
        trace_aside(compiled, args, kwargs, lambda gm, flat: None)
    except LookupError as error:
        return str(error)
    return None


def _as_called(value: Any) -> Any:
    """A number as the call has it, where Dynamo has made a symbol of it."""
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value


def _where(error: TorchDynamoException) -> str:
    """The first line of what Dynamo says, and the user's line."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    stack = getattr(error, "real_stack", None)
    return f"{first} at {users_line(stack)}" if stack else first


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
