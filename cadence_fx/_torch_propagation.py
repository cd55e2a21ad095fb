"""Dynamo's propagation of shapes, twice for each kind of node.

While Dynamo follows a callable it runs every operator on tensors without data, to know what comes of it. Where sizes
are symbols that takes milliseconds, and a model repeats a few kinds of operators many times over. What an operator
makes of its arguments is decided by the operator, its plain arguments and the metadata of its tensors; so for all but
the first two of a kind the result is built from what these gave. Whatever is not plainly a function of that (an
operator of somebody else's, a write, an argument that requires grad, a size that depends on data) is run every time.

Like `_torch`, this module touches private PyTorch API, of torch 2.11 to 2.14.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from cadence_fx._torch_retrace import Unlike, is_pytorchs, told_by
from cadence_fx._torch_switches import ambient_state
from cadence_fx.locks import new_lock


@contextlib.contextmanager
def twice_a_kind() -> Iterator[None]:
    """Let Dynamo propagate shapes through the first two operators of each kind alone, in the thread that is in here."""
    with _lock:
        if not _within.threads:
            _within.stock, torch._dynamo.utils.run_node = torch._dynamo.utils.run_node, _run_node
        _within.threads += 1
    outer, _here.known = _here.known, {}
    try:
        yield
    finally:
        _here.known = outer
        with _lock:
            _within.threads -= 1
            if not _within.threads:
                torch._dynamo.utils.run_node = _within.stock


class _Here(threading.local):
    """What is known in this thread; None outside of `twice_a_kind`."""

    known: dict[FakeTensorMode, _Kinds] | None = None


@dataclasses.dataclass
class _Within:
    """How many blocks Dynamo's own function is replaced for, in all threads, and what it was before the first."""

    threads: int = 0
    stock: Callable[..., Any] = torch._dynamo.utils.run_node


_here, _within, _lock = _Here(), _Within(), new_lock()


def _run_node(tracer: Any, node: fx.Node, args: Any, kwargs: Any, nnmodule: Any) -> Any:
    """In place of Dynamo's function of this name."""
    stock = _within.stock
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if _here.known is None or mode is None or _is_watched() or not _is_function(node):
        return stock(tracer, node, args, kwargs, nnmodule)
    if mode not in _here.known:
        _here.known.clear()  # of another compilation, whose symbols mean something else
        _here.known[mode] = _Kinds(mode)
    return _here.known[mode].run(node, args, kwargs, lambda: stock(tracer, node, args, kwargs, nnmodule))


def _is_watched() -> bool:
    """Whether anything but shapes is propagated: gradients, a transform of functions, a mode that is more than a
    switch."""
    return (
        torch.is_grad_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_function_stack() > 0
        or torch._C._len_torch_dispatch_stack() > 1  # that of the tensors without data is one
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Input:
    """A result that is an argument."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that an operator makes; `home` is the argument whose memory it has, `offset` where from there."""

    home: int | None
    offset: Any
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    inference: bool


class _Kinds:
    """What the first two nodes of each kind gave, in one compilation."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Any, Any] = {}

    def run(self, node: fx.Node, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        tensors: list[FakeTensor] = []
        kind = _kind(node, args, kwargs, tensors)
        known = self._known.get(kind, _UNKNOWN) if kind is not None else None
        if isinstance(known, _Twice):
            return self._filled(known.made, tensors)
        if known is None:
            return run()
        # The first and the second one are run. What is not told by the kind shows in the second at the latest.
        self._known[kind] = None
        before = [_version(tensor) for tensor in tensors]
        result = run()
        with contextlib.suppress(Exception):  # whatever is the matter with a result, it is there
            if _kind(node, args, kwargs, []) == kind and [_version(tensor) for tensor in tensors] == before:
                made = known if known is not _UNKNOWN else _taken_apart(result, tensors)
                if self._gives(made, result, tensors):
                    self._known[kind] = made if known is _UNKNOWN else _Twice(made)
        return result

    def _gives(self, made: Any, result: Any, tensors: list[FakeTensor]) -> bool:
        """Whether a result is what would be made of the arguments instead."""
        again = self._filled(made, tensors)
        return _geometry([*tensors, result]) == _geometry([*tensors, again])

    def _filled(self, value: Any, tensors: list[FakeTensor]) -> Any:
        if isinstance(value, _Input):
            return tensors[value.number]
        if isinstance(value, _Made):
            return self._made(value, tensors)
        return type(value)(self._filled(item, tensors) for item in value)

    def _made(self, value: _Made, tensors: list[FakeTensor]) -> FakeTensor:
        env = self._mode.shape_env
        # What a size must be for this was asked, and recorded, when the first of the kind were run.
        quiet = env.suppress_guards() if env is not None else contextlib.nullcontext()
        # A view of what was made outside inference mode was, too.
        as_it_was = torch.inference_mode(value.inference)
        with as_it_was, in_kernel_invocation_manager(self._mode), quiet:
            if value.home is None:
                memory = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
            else:
                home = tensors[value.home]
                memory = torch.empty(0, dtype=value.dtype, device="meta")
                memory.set_(home.untyped_storage(), home.storage_offset() + value.offset, value.shape, value.stride)
        with as_it_was:
            return FakeTensor(self._mode, memory, value.device)


_UNKNOWN = object()


@dataclasses.dataclass(frozen=True, slots=True)
class _Twice:
    """What two operators of a kind have given."""

    made: Any


def _kind(node: fx.Node, args: Any, kwargs: Any, tensors: list[FakeTensor]) -> Any:
    """What decides about the result of an operator; its tensors are collected in order. None where more does."""
    try:
        described = told_by((args, kwargs), tensors, _metadata)
        modes = tuple(ambient_state(kind) for kind in sorted({tensor.fake_device.type for tensor in tensors}))
        kind = (node.op, node.target, described, _sharing(tensors), modes)
        hash(kind)
    except (Unlike, TypeError):
        return None
    return kind if tensors else None


def _metadata(value: Any) -> Any:
    """What decides about a tensor without data, or about a size that is a symbol."""
    if isinstance(value, torch.SymInt):
        return torch.SymInt, value.node.expr
    if type(value) is not FakeTensor or value.constant is not None or value.layout is not torch.strided:
        raise Unlike
    if value.is_conj() or value.is_neg():
        raise Unlike
    return (_sizes(value.shape), _sizes(value.stride()), value.dtype, value.fake_device, value.requires_grad,
            value.is_inference(), isinstance(value, torch.nn.Parameter))  # fmt: skip


def _sharing(tensors: list[FakeTensor]) -> tuple[Any, ...]:
    """Which of the arguments are one, which have one memory, and where they are in it if several do."""
    if len(tensors) < 2:
        return ()
    objects, homes = [id(tensor) for tensor in tensors], [tensor.untyped_storage()._cdata for tensor in tensors]
    apart = len(set(homes)) == len(set(objects))
    places = () if apart else tuple(_offset(tensor) for tensor in tensors)
    return tuple(map(objects.index, objects)), tuple(map(homes.index, homes)), places


def _taken_apart(result: Any, tensors: list[FakeTensor]) -> Any:
    """A result as what is made of the arguments."""
    if type(result) in (tuple, list):
        return type(result)(_taken_apart(item, tensors) for item in result)
    for number, tensor in enumerate(tensors):
        if result is tensor:
            return _Input(number)
    if type(result) is not FakeTensor or result.layout is not torch.strided:
        raise Unlike
    homes = [tensor.untyped_storage()._cdata for tensor in tensors]
    home, offset = None, _offset(result)
    if result.untyped_storage()._cdata in homes:
        home = homes.index(result.untyped_storage()._cdata)
        if tensors[home].dtype != result.dtype:
            raise Unlike  # offsets are counted in elements
        offset = _distance(result, tensors[home])
    elif offset != 0:
        raise Unlike  # memory of its own begins where it does
    if result.requires_grad:
        raise Unlike
    return _Made(
        home, offset, tuple(result.shape), result.stride(), result.dtype, result.fake_device, result.is_inference()
    )


def _geometry(values: Sequence[Any]) -> list[Any]:
    """All that later operators can see of tensors without data, and which of them have one memory."""
    tensors: list[FakeTensor] = []
    described = told_by(values, tensors, _metadata)
    homes = [tensor.untyped_storage()._cdata for tensor in tensors]
    memory = [_sizes([tensor.untyped_storage().nbytes()]) for tensor in tensors]
    return [described, list(map(homes.index, homes)), memory, [_offset(tensor) for tensor in tensors]]


def _sizes(sizes: Iterable[Any]) -> tuple[Any, ...]:
    """Sizes that compare without being asked what they are; none of them may depend on data."""
    return tuple(size if isinstance(size, int) else _expression(size) for size in sizes)


def _expression(size: torch.SymInt) -> Any:
    if not size.node.has_hint():
        raise Unlike
    return size.node.expr


def _offset(tensor: torch.Tensor) -> Any:
    """Where a tensor begins in its memory: a number, or an expression that compares without being asked what it is."""
    offset: Any = tensor.storage_offset()
    return offset if isinstance(offset, int) else sympy.expand(_expression(offset))


def _distance(tensor: torch.Tensor, home: torch.Tensor) -> Any:
    """How far behind another one in one memory a tensor begins: a number, or a size that is a symbol."""
    expression = sympy.expand(_offset(tensor) - _offset(home))
    return int(expression) if expression.is_Integer else tensor.storage_offset() - home.storage_offset()


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_function(node: fx.Node) -> bool:
    """Whether a node is an operator whose result is all that it does, as far as its name tells."""
    if node.op == "call_method":
        return _is_plain_name(str(node.target))
    if node.op != "call_function" or "out" in node.kwargs or node.target in _OPERATORS:
        return False
    return is_pytorchs(node.target) and _is_plain_name(node.target.__name__)  # type: ignore[union-attr]


def _is_plain_name(name: str) -> bool:
    """Whether an operator of this name writes nothing, and takes its argument's place in memory as it finds it."""
    return not name.endswith("_") and "strided" not in name and name != "__setitem__"


_OPERATORS = {operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv}
