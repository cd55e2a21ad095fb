"""Private PyTorch API; what the modules beside this one, `_torch_...`, do not have is nowhere else.

Everything here was read in torch 2.11 to 2.14; where a name moved between those versions both spellings are tried.
Callers get plain values (strings, sympy expressions, integers), so no other module depends on Dynamo's internals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch
import torch._dynamo
import torch._inductor.config
from torch import fx
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.utils import graph_break_reasons
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.overrides import TorchFunctionMode as TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

tree_flatten = pytree.tree_flatten
WithoutFunctionModes = torch._C.DisableTorchFunction
tree_unflatten = pytree.tree_unflatten
tree_leaves = pytree.tree_leaves
tree_map_only = pytree.tree_map_only


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """What is done inside is not seen by any dispatch or function mode."""
    with _disable_current_modes(), WithoutFunctionModes():
        yield


CompileWrapper = getattr(torch, "_TorchCompileWrapper")  # noqa: B009 - private, kept in one place
OptimizedModule = torch._dynamo.eval_frame.OptimizedModule


# -- who is compiling -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class CompileSite:
    """On whose behalf a backend is being called. Nothing in it may be kept past that call.

    Attributes:
        wrapper: the object that one `torch.compile` call owns; None for a backend called by hand.
        module, module_name: the `nn.Module` whose method is being compiled and the local that holds it.
        values: the locals of the frame being compiled.
        resumes: the frame goes on after a graph break; its locals are not the user's arguments.
        returns: path in the user's result -> name of the graph node that is there; None when Dynamo's picture of the
            frame could not be read, or the frame does not return here.
        assigned: Dynamo's source of a module attribute -> name of the graph node that the frame has put there.
        times: graph node name -> how often its value leaves the frame.
        returned_inputs: names of graph inputs that leave it as they came.
        broken: why and at which line Dynamo broke the frame that this one resumes.
    """

    wrapper: Any | None = None
    module: torch.nn.Module | None = None
    module_name: str | None = None
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    resumes: bool = False
    returns: dict[tuple[Any, ...], str] | None = None
    assigned: dict[str, str] | None = None
    times: Counter[str] = dataclasses.field(default_factory=Counter)
    returned_inputs: set[str] = dataclasses.field(default_factory=set)
    broken: str | None = None


def compile_site() -> CompileSite:
    """Find the `torch.compile` call and the frame being compiled on the Python stack; Dynamo offers no other way."""
    site = CompileSite()
    frame = sys._getframe(1)
    output = None
    for _ in range(64):
        if frame is None:
            break
        owner = frame.f_locals.get("self")
        if site.wrapper is None and isinstance(owner, CompileWrapper):
            site.wrapper = owner
        if isinstance(owner, OutputGraph):
            output = owner
            if frame.f_code.co_name == "compile_subgraph":
                # A frame that cannot be read is treated like one of which nothing is known.
                with contextlib.suppress(Exception):
                    _read_results(output, bool(frame.f_locals["reason"].graph_break), site)
                break
        frame = frame.f_back  # type: ignore[assignment]
    if output is not None:
        code = output.root_tx.f_code
        site.values = dict(output.root_tx.f_locals)
        site.resumes = code.co_name.startswith("torch_dynamo_resume_in")
        if site.resumes:
            site.broken = _last_break(code.co_filename)
        # The module is `self`, or what a wrapper around it calls `fn`.
        for name in (*(code.co_varnames[:1] if code.co_argcount else ()), "fn"):
            if isinstance(site.values.get(name), torch.nn.Module):
                site.module, site.module_name = site.values[name], name
                break
    return site


_TORCH = os.path.dirname(torch.__file__) + os.sep


def users_line(stack: Sequence[traceback.FrameSummary]) -> str:
    """`file:line` of the innermost frame that is not PyTorch's, or of the innermost one."""
    frame = next((each for each in reversed(stack) if not each.filename.startswith(_TORCH)), stack[-1])
    return f"{frame.filename}:{frame.lineno}"


def _last_break(filename: str, begins: str | None = None) -> str | None:
    """Why and at which line Dynamo last broke a graph in a file, or the one that begins with a code of it."""
    for reason in reversed(graph_break_reasons):
        stack = reason.user_stack
        if not stack:
            continue
        where = (stack[-1].filename, None) if begins is None else (stack[0].filename, stack[0].name)
        if where == (filename, begins):
            return f"{reason.reason.splitlines()[0]} at {users_line(stack)}"
    return None


def running_modules() -> Iterator[tuple[torch.nn.Module, str]]:
    """The modules whose methods are running, innermost first, each with a place: that at which Dynamo has broken the
    method's graph, or else the line that is running. They call what is being compiled, and are run as they are."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, torch.nn.Module) and not code.co_filename.startswith(_TORCH):
            broken = _last_break(code.co_filename, code.co_name)
            yield owner, broken or f"in {code.co_name} at {code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back


def _read_results(output: OutputGraph, breaks: bool, site: CompileSite) -> None:
    """What leaves the frame, and where to. Dynamo gives two equal results one graph output, so the graph cannot
    tell."""
    effects, frame = output.side_effects, output.root_tx
    results = [(path, node) for value in frame.stack for path, node in _tensor_nodes(value, ())]
    leaving = [node for _, node in results]
    if breaks:  # the frame goes on elsewhere with its locals
        leaving += [node for value in frame.symbolic_locals.values() for _, node in _tensor_nodes(value, ())]
    else:
        site.returns = {path: node.name for path, node in results}
    site.assigned = {}
    for owner, attributes in effects.store_attr_mutations.items():
        for name, value in attributes.items():
            nodes = [node for _, node in _tensor_nodes(value, ())]
            leaving += nodes
            if len(nodes) == 1 and owner.source is not None:
                source = owner.source.name
                site.assigned[f"{source() if callable(source) else source}.{name}"] = nodes[0].name
    shown = {id(value) for value in frame.stack}
    for value in effects.id_to_variable.values():
        if _contents(value) is not None and effects.is_modified(value) and id(value) not in shown:
            leaving += [node for _, node in _tensor_nodes(value, ()) if node not in leaving]
    site.returned_inputs = {node.name for node in leaving if node.op == "placeholder"}
    site.times = Counter(node.name for node in leaving)


def _contents(variable: Any) -> list[tuple[Any, Any]] | None:
    """Keys and elements of a list, tuple or dict in Dynamo's picture of it."""
    items = getattr(variable, "items", None)
    if isinstance(items, dict):
        return [(getattr(getattr(key, "vt", key), "value", str(key)), value) for key, value in items.items()]
    return list(enumerate(items)) if isinstance(items, (list, tuple)) else None


def _tensor_nodes(variable: Any, path: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], fx.Node]]:
    """Graph nodes of the tensors in Dynamo's picture of a value, each with its path in it."""
    variable = variable.realize() if hasattr(variable, "realize") else variable
    node = getattr(getattr(variable, "proxy", None), "node", None)
    if isinstance(node, fx.Node):
        return [(path, node)]
    found = []
    for key, value in (_contents(variable) or []) if len(path) < 16 else []:
        found += _tensor_nodes(value, (*path, key))
    return found


def compile_wrapper_of(compiled: Any) -> Any | None:
    """The object that one `torch.compile` call owns, from what that call returned (or from a module compiled in
    place)."""
    return next((layer for layer in compile_layers(compiled) if isinstance(layer, CompileWrapper)), None)


def compile_layers(compiled: Any) -> Iterator[Any]:
    """What Dynamo has put around a compiled callable: its context, and each callback down to the backend."""
    if isinstance(compiled, torch.nn.Module) and not isinstance(compiled, OptimizedModule):
        compiled = compiled._compiled_call_impl
    contexts = []
    if isinstance(compiled, OptimizedModule):
        contexts.append(compiled.dynamo_ctx)
    closure = getattr(getattr(compiled, "__func__", compiled), "__closure__", None) or ()
    for cell in closure:
        with contextlib.suppress(ValueError):
            if hasattr(cell.cell_contents, "callback"):
                contexts.append(cell.cell_contents)
    for context in contexts:
        yield context
        inner = context.callback
        while inner is not None:
            yield inner
            inner = getattr(inner, "_torchdynamo_orig_backend", None) or getattr(
                inner, "_torchdynamo_orig_callable", None
            )


_OWNER = "cadence_fx.program"


def owner_of(wrapper: Any | None) -> Any | None:
    """What `own` has put on a `torch.compile` call."""
    options = wrapper.kwargs.get("options") if wrapper is not None else None
    return options.get(_OWNER) if options else None


def own(wrapper: Any, owner: Any) -> None:
    """Tie an object to one `torch.compile` call.

    Dynamo compares these calls by value and lets two equal ones (two modules of one class under equal contracts)
    share compiled code. The owner becomes part of what it compares, so each call gets its own.
    """
    wrapper.kwargs = {**wrapper.kwargs, "options": {**(wrapper.kwargs.get("options") or {}), _OWNER: owner}}


def user_options(options: Any) -> dict[str, Any]:
    """The options a user gave, without what `own` has added."""
    return {k: v for k, v in (options or {}).items() if k != _OWNER}


def original_of(compiled: Any) -> Any:
    """The user's module or function under a `torch.compile` result."""
    if isinstance(compiled, OptimizedModule):
        return compiled._orig_mod
    return getattr(compiled, "_torchdynamo_orig_callable", compiled)


def module_of(original: Any) -> torch.nn.Module | None:
    """The module that was compiled, or whose method was."""
    owner = original if isinstance(original, torch.nn.Module) else getattr(original, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else None


# -- what Dynamo knows about a graph ----------------------------------------------------------------------------------


def source_name(placeholder: fx.Node) -> str | None:
    """Dynamo's name of where a placeholder comes from, such as `L['cache'].size()[1]`."""
    source = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        argument = placeholder.meta.get("grapharg")
        source = argument.source if argument is not None else None
    if source is None:
        return None
    name = source.name
    name = name() if callable(name) else name
    return name.removeprefix(_NUMPY).removesuffix(")") if name.startswith(_NUMPY) else name


_NUMPY = "___from_numpy("


def is_from_numpy(placeholder: fx.Node) -> bool:
    """Whether Dynamo makes this input anew in every call, out of a numpy value."""
    argument = placeholder.meta.get("grapharg")
    source = getattr(placeholder, "_dynamo_source", None) or (argument.source if argument is not None else None)
    return type(source).__name__ == "NumpyTensorSource"


def is_random_source(placeholder: fx.Node) -> bool:
    """Whether Dynamo feeds this placeholder from the host's `random` module."""
    argument = placeholder.meta.get("grapharg")
    source = getattr(placeholder, "_dynamo_source", None) or (argument.source if argument is not None else None)
    return type(source).__name__ == "RandomValueSource"


def as_expr(value: Any) -> sympy.Expr:
    """An int or SymInt as a sympy expression over Dynamo's symbols."""
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(value)


def example_value(node: fx.Node) -> Any:
    """The fake tensor, SymInt or constant Dynamo computed for a node, or None."""
    return node.meta.get("example_value")


def current_guards() -> tuple[tuple[sympy.Expr, ...], dict[sympy.Symbol, tuple[int | None, int | None]]]:
    """Guards and value ranges of the symbols of the graph being compiled.

    Returns:
        (guards, ranges): boolean expressions that must hold, and per symbol (lower, upper), None where unbounded.
    """
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None or context.fake_mode.shape_env is None:
        return (), {}
    env = context.fake_mode.shape_env
    ranges: dict[sympy.Symbol, tuple[int | None, int | None]] = {}
    for symbol, bounds in env.var_to_range.items():
        lower = int(bounds.lower) if bounds.lower.is_Integer else None
        upper = int(bounds.upper) if bounds.upper.is_Integer else None
        ranges[symbol] = (lower, upper)
    return tuple(guard.expr for guard in env.guards), ranges


def run_composite(operator: Any, *args: Any) -> Any:
    """Run PyTorch's own composite kernel of an aten operator, whatever modes and keys its arguments have.

    A decomposition in Python that the operator may have besides is another computation than eager's.
    """
    return operator._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)


def pointwise_kernel(code: str) -> Callable[..., torch.Tensor]:
    """A CUDA kernel that applies a function of one element to tensors that broadcast; compiled at its first launch."""
    return torch.cuda.jiterator._create_jit_fn(code)


def mark_dynamic(tensor: torch.Tensor, axis: int) -> None:
    """Ask Dynamo for a symbol on this axis; unlike `mark_dynamic` it does not raise when a branch narrows the range."""
    torch._dynamo.maybe_mark_dynamic(tensor, axis)


def copy_marks(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Give `target` the dynamic-axis marks a user has put on `source`; returns `target`."""
    for name, value in vars(source).items():
        if name.startswith("_dynamo_"):
            setattr(target, name, value)
    return target


def is_marked(tensor: Any, axis: int) -> bool:
    """Whether a user has asked for a symbol on this axis."""
    names = ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices", "_dynamo_unbacked_indices")
    return any(axis in getattr(tensor, name, ()) for name in names)


def asks_for_dynamic(compiled: Any) -> bool:
    """Whether `torch.compile` was called with `dynamic=True`."""
    return getattr(compile_wrapper_of(compiled), "dynamic", None) is True


def dynamo_flags(names: Iterable[str]) -> dict[str, Any]:
    """Dynamo's settings of these names, as they are; those that a release lacks are left out."""
    return {name: getattr(torch._dynamo.config, name) for name in names if hasattr(torch._dynamo.config, name)}


@contextlib.contextmanager
def patient_tracing() -> Iterator[None]:
    """Dynamo settings for warm-up: integer attributes become symbols (a call counter must not recompile every step),
    errors surface, every graph of the catalog may be compiled, and its code does not measure itself in every call."""
    settings: dict[str, Any] = {
        "record_runtime_overhead": False,
        "allow_unspec_int_on_nn_module": True,
        "suppress_errors": False,
        "recompile_limit": max(64, torch._dynamo.config.recompile_limit),
    }
    with torch._dynamo.config.patch({name: to for name, to in settings.items() if hasattr(torch._dynamo.config, name)}):
        yield


def _guard_numpy_anywhere() -> None:
    """Let guards on numpy values hold in inference mode, also in code that Dynamo compiles in traffic.

    Dynamo compiles outside inference mode and checks guards inside: the tensor that it makes of a numpy value for the
    check is of another kind in each, so such a guard fails as soon as it is made. The tensor is made for nothing else.
    """
    guards = torch._dynamo.guards
    convert = guards.from_numpy

    def from_numpy(a: Any) -> torch.Tensor:
        with torch.inference_mode(False):
            return convert(a)

    guards.from_numpy = from_numpy


_guard_numpy_anywhere()


# -- memory -----------------------------------------------------------------------------------------------------------

_pointers_equal: Callable[..., bool] | None = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def pointers_equal(tensors: Sequence[Any], pointers: list[int | None], indices: list[int]) -> bool:
    """Whether tensors[i].data_ptr() == pointers[i] for every i in indices; one native call where PyTorch has it."""
    if _pointers_equal is not None:
        return _pointers_equal(list(tensors), pointers, indices)
    return all(tensors[i].data_ptr() == pointers[i] for i in indices)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """targets[i].copy_(sources[i]) for all i; one call, and on a GPU one launch where dtypes and layouts allow."""
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets:
        torch._foreach_copy_(targets, sources)


_use_count: Callable[[int], int] = torch._C._storage_Use_Count


def storage_users(identity: int) -> int:
    """How many tensors use the storage with this `_cdata`, of which the caller holds one handle."""
    return _use_count(identity) - 1


def storage_identity(tensor: torch.Tensor) -> int:
    """What tells a tensor's storage from every other that is alive."""
    return tensor.untyped_storage()._cdata


def traced_view(target: Any, base: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What an operator that gives one view makes of a traced tensor.

    Dispatching to the tracer costs ten times what the view itself does, which decides the geometry. What else the
    tracer could add (a constant's value, a gradient's history) the tensor must not have.
    """
    if type(base) is not FakeTensor or base.constant is not None or base.requires_grad:
        return target(base, *args, **kwargs)  # type: ignore[no-any-return]
    with in_kernel_invocation_manager(base.fake_mode):
        seen = target(base, *args, **kwargs)
    return FakeTensor(base.fake_mode, seen, base.fake_device)


def tensor_owners(tensor: torch.Tensor) -> int:
    """How many tensors share this one's memory, itself included."""
    storage = tensor.untyped_storage()
    return storage_users(storage._cdata)


def another_storage(flat: torch.Tensor) -> torch.UntypedStorage:
    """A new storage object over the memory of a one-dimensional tensor, which it keeps alive."""
    return torch._C._from_dlpack(torch._C._to_dlpack(flat.view(torch.uint8))).untyped_storage()


def same_generator(left: torch.Generator, right: torch.Generator) -> bool:
    """Whether two objects are one generator; an operator that is intercepted gets another object for its own."""
    return left is right or left._cdata == right._cdata  # type: ignore[attr-defined]


def abandon_pool(device: torch.device, handle: tuple[int, int]) -> bool:
    """After a failed capture: the allocator no longer routes to this pool, nor counts that capture as a user of it.

    A capture that ended, or never began, has closed the pool itself; PyTorch then says that nothing is recorded to it,
    and its own count is right.

    Returns:
        Whether the capture had left the pool open. Then the allocator of pinned memory still has it open too, which
        nothing can close: no later capture may use the handle, and the graph must outlive the process's captures.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(index, handle)
    except RuntimeError:
        return False
    torch._C._cuda_releasePool(index, handle)
    return True


def current_raw_stream(device: torch.device) -> Callable[[], int]:
    """A quick reading of the handle of the stream that is current on a CUDA device in the calling thread."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    return functools.partial(torch._C._cuda_getCurrentRawStream, index)


@contextlib.contextmanager
def own_workspaces() -> Iterator[None]:
    """What cuBLAS needs inside a capture is allocated inside it, and used by no eager call afterwards.

    Its workspaces are kept per stream and can be cleared by anybody (Inductor does before its own captures): a
    recording that had been captured with one from outside would go on writing to memory that has another owner by then.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextlib.contextmanager
def uncached_casts() -> Iterator[None]:
    """Autocast casts each weight anew inside, and no cast made before or inside is used after it.

    What a capture casts lives in its pool and is computed by a launch only; what was cast before it is freed when the
    user's autocast context ends. Neither may be handed across the boundary.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
        torch.clear_autocast_cache()


def backend_error(error: BaseException) -> BaseException:
    """The exception a backend raised, out of Dynamo's wrapper around it."""
    if isinstance(error, torch._dynamo.exc.BackendCompilerFailed):
        return error.inner_exception
    return error


def with_own_code(function: types.FunctionType) -> types.FunctionType:
    """The same function with a code object of its own: Dynamo keeps what it has compiled, counts it, and gives a code
    up, by code object."""
    own = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def is_untraced(error: BaseException) -> bool:
    """Whether Dynamo says that it cannot follow a call that it must follow whole (`fullgraph`), or will not compile it
    once more (`recompile_limit`). Nothing of the call has run then."""
    exc = torch._dynamo.exc
    if isinstance(error, exc.BackendCompilerFailed):
        return False
    return isinstance(error, (exc.TorchDynamoException, exc.FailOnRecompileLimitHit))
