"""From a Dynamo graph to a static aten graph: traced once for each distinct operation, copied for all of its like.

A model repeats a few kinds of layers many times over, and tracing a layer costs a hundred times what copying its nodes
costs. What PyTorch's tracer makes of one node is decided by the node's target, by its plain arguments and by the
metadata of its tensors. So the tracer runs for the first node of each such kind, what it has appended is kept as a
pattern, and the pattern is appended for the others. Whatever is not plainly a function of that (a switch of a mode, a
constant, a draw from the host, a change of a tensor's own metadata, a subclass) goes through the tracer every time.

Like `_torch`, this module touches private PyTorch API, of torch 2.11 to 2.14.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import _ProxyTensor, get_proxy_mode, get_proxy_slot, make_fx, set_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

_OpOverload: Any = type(torch.ops.aten.copy_.default)
_TELLING = {torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Methods and functions that append nothing to the graph because they only read metadata.
_READS = {"size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size",
          "is_floating_point", "is_complex", "is_contiguous", "get_device"}  # fmt: skip
_PLAIN = (bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(...))


def to_static_aten(gm: fx.GraphModule, arguments: Sequence[Any], *, patterns: bool = True) -> fx.GraphModule:
    """Re-trace a Dynamo graph at concrete sizes to pre-dispatch aten, nothing decomposed, mutation kept.

    Runs outside Dynamo's tracing context: inside it the trace would add guards to the graph being compiled.

    Args:
        arguments: one value a placeholder: tensors (only their metadata is used), ints, floats, bools.
        patterns: copy what repeats instead of tracing all of it; the graph is the same.
    """
    with (
        tracing(None),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        fx.traceback.preserve_node_meta(),  # keeps the user's file and line on every aten node
        _use_lazy_graph_module(True),
    ):
        fakes = [mode.from_tensor(a, static_shapes=True) if isinstance(a, torch.Tensor) else a for a in arguments]
        symbolic = any(isinstance(a, (torch.SymInt, torch.SymFloat, torch.SymBool)) for a in arguments)
        interpreter = _Copier(gm, mode) if patterns and not symbolic else fx.Interpreter(gm)

        def run(*values: Any) -> Any:
            # The tracer marks the whole process as tracing, and Dynamo refuses calls of compiled code in any thread
            # while it is; nothing that runs here asks for the mark.
            fx._symbolic_trace._is_fx_tracing_flag = False
            return interpreter.run(*values)

        try:
            traced: fx.GraphModule = make_fx(run, pre_dispatch=True)(*fakes)
        except _Restrided:
            return to_static_aten(gm, arguments, patterns=False)
    return traced


def lazy_module(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph whose Python code is made when it is first called. Look `forward` up for each call."""
    return _LazyGraphModule(root, graph, type(root).__name__)


class Unlike(Exception):
    """A node is not told by its target, its plain arguments and the metadata of its tensors."""


class _Restrided(Exception):
    """A tensor's own metadata is changed: traced values that are shared with the graph would change with it."""


@dataclasses.dataclass(slots=True)
class _Described:
    """What decides what an operator makes of a tensor, where it is in its memory apart."""

    tensor: torch.Tensor
    storage: torch.UntypedStorage
    home: int
    offset: int
    metadata: tuple[Any, ...]

    def all(self) -> tuple[Any, ...]:
        return self.home, self.offset, self.metadata


@dataclasses.dataclass(frozen=True, slots=True)
class _Slot:
    """In a pattern, instead of a node or tensor: an input's, or one of the pattern's own, by number."""

    of_input: bool
    number: int


@dataclasses.dataclass(slots=True)
class _Value:
    """A traced tensor of a pattern: its geometry, and whose memory it has: of an input, of a value before it, its own.

    `offset` is that from where the one whose memory it is begins.
    """

    home: _Slot | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    inference: bool


@dataclasses.dataclass(slots=True)
class _Step:
    """A node of a pattern. Nodes among the arguments are `_Slot`s; `value` is its traced value, tensors as numbers."""

    target: Any
    args: Any
    kwargs: Any
    name: str
    value: Any


@dataclasses.dataclass(slots=True)
class _Pattern:
    """What the tracer appends for a node of a kind.

    Attributes:
        values: the traced tensors of its nodes.
        result: of the node; tensors are `_Slot`s, of an input or of a value.
        nodes_of: number of a value -> number of the node that holds it.
        renamed: number of an input that is written in place -> the node that stands for it from then on.
        anywhere: it does not matter where in their memory the inputs are.
    """

    steps: list[_Step]
    values: list[_Value]
    result: Any
    nodes_of: dict[int, int]
    renamed: dict[int, int]
    anywhere: bool


class _Copier(fx.Interpreter):
    """Runs a Dynamo graph under the tracer, and appends patterns where it can."""

    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(gm)
        self._mode = mode
        self._patterns: dict[Any, _Pattern | None] = {}
        self._described: dict[int, _Described] = {}  # by the identity of a tensor, which is held: nobody else gets it
        self._tracer: Any = None
        self._plain = contextlib.ExitStack()  # no modes are on while patterns are appended
        self._is_plain = False

    def run(self, *args: Any) -> Any:  # type: ignore[override]
        proxy_mode = get_proxy_mode()
        assert proxy_mode is not None
        self._tracer = proxy_mode.tracer
        with self._plain:
            return super().run(*args)

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("call_function", "call_method"):
            if n.op != "placeholder":
                self._trace_on()
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        tensors: list[Any] = []
        try:
            if n.op == "call_function" and not is_pytorchs(n.target):
                raise Unlike
            told = told_by([args, kwargs], tensors, lambda tensor: self._describe(tensor).metadata)
            key: Any = (n.op, n.target, told, self._sharing(tensors))
            pattern = self._patterns.get(key, _UNKNOWN)
            if not isinstance(pattern, _Pattern):  # perhaps it matters where in their memory the tensors are
                key = (*key, tuple(self._describe(tensor).offset for tensor in tensors))
                pattern = self._patterns.get(key, _UNKNOWN)
        except (Unlike, TypeError):
            key, pattern = None, None
        if isinstance(pattern, _Pattern):
            with contextlib.suppress(Unlike):
                return self._append(pattern, n, tensors)
        self._trace_on()
        if key is not None and pattern is not None:
            result, pattern = self._record(n, tensors)
            self._patterns[key[:-1] if pattern is not None and pattern.anywhere else key] = pattern
            return result
        result = self._traced(n)
        self._described.clear()
        return result

    # -- the modes ----------------------------------------------------------------------------------------------------

    def _trace_on(self) -> None:
        """Put the tracer's modes back."""
        if self._is_plain:
            self._is_plain = False
            self._plain.close()

    def _trace_off(self) -> None:
        if not self._is_plain:
            self._plain.enter_context(_disable_current_modes())
            self._plain.enter_context(torch._C.DisableTorchFunction())
            self._is_plain = True

    # -- kinds --------------------------------------------------------------------------------------------------------

    def _describe(self, tensor: Any) -> _Described:
        known = self._described.get(id(tensor))
        if known is not None:
            return known
        if type(tensor) is not FakeTensor or tensor.constant is not None:
            raise Unlike
        with torch._C.DisableTorchFunction():  # the tracer's mode would look at every attribute that is read
            if tensor.layout is not torch.strided:
                raise Unlike
            slot = get_proxy_slot(tensor, self._tracer, None)
            if slot is None or slot.constant is not None or tensor.is_conj() or tensor.is_neg():
                raise Unlike
            storage = tensor.untyped_storage()
            metadata = (
                tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad,
                tensor.is_leaf, tensor.is_inference(), isinstance(tensor, torch.nn.Parameter),
            )  # fmt: skip
            found = _Described(tensor, storage, storage._cdata, int(tensor.storage_offset()), metadata)
        self._described[id(tensor)] = found
        return found

    def _sharing(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """Which of the tensors are one, or have one storage."""
        if len(tensors) < 2:
            return ()
        objects = [id(tensor) for tensor in tensors]
        homes = [self._describe(tensor).home for tensor in tensors]
        return tuple(map(objects.index, objects)), tuple(map(homes.index, homes))

    # -- the first of a kind ------------------------------------------------------------------------------------------

    def _traced(self, n: fx.Node) -> Any:
        """Run a node under the tracer."""
        last = self._last()
        result = super().run_node(n)
        if last is self._last() and not _only_reads(n):
            self._patterns.clear()  # nobody knows what it has done
        for node in _after(last):
            if not _is_aten(node):
                self._patterns.clear()  # a mode may be another one from here on
            elif torch.Tag.inplace_view in getattr(node.target, "tags", ()):
                raise _Restrided
        return result

    def _last(self) -> fx.Node:
        last: fx.Node = self._tracer.graph._root.prev
        return last

    def _record(self, n: fx.Node, tensors: list[Any]) -> tuple[Any, _Pattern | None]:
        before = [self._describe(tensor) for tensor in tensors]
        slots = [self._node_of(tensor) for tensor in tensors]
        last = self._last()
        result = self._traced(n)
        for tensor in tensors:
            self._described.pop(id(tensor), None)
        try:
            after = map(self._describe, tensors)
            if any(old.all() != new.all() for old, new in zip(before, after, strict=True)):
                raise Unlike
            return result, self._pattern(n, tensors, slots, list(_after(last)), result)
        except Unlike:
            return result, None

    def _pattern(
        self, n: fx.Node, tensors: list[Any], slots: list[fx.Node], nodes: list[fx.Node], result: Any
    ) -> _Pattern:
        if not nodes and not _only_reads(n):
            raise Unlike
        numbers = {node: _Slot(False, i) for i, node in enumerate(nodes)}
        inputs = {node: _Slot(True, i) for i, node in reversed([*enumerate(slots)])}
        homes: dict[int, tuple[_Slot, int, torch.dtype]] = {}
        for i, tensor in reversed([*enumerate(tensors)]):
            found = self._describe(tensor)
            homes[found.home] = (_Slot(True, i), found.offset, tensor.dtype)
        # Several views of one memory, and memory that is read as of another type, are copied where they were seen.
        apart = len({id(tensor) for tensor in tensors}) == len(homes)
        picks = not nodes and n.target is operator.getitem  # one of several, wherever they are
        anywhere = picks or (apart and _told_by_geometry(nodes))
        values: list[_Value] = []
        nodes_of: dict[int, int] = {}
        kept: list[Any] = []

        def slot(node: fx.Node) -> Any:
            found = numbers.get(node) or inputs.get(node)
            if found is None:
                raise Unlike  # a constant, or something that an earlier node has left
            return found

        def value(val: Any, number: int) -> Any:
            if isinstance(val, torch.Tensor):
                nonlocal anywhere
                values.append(_value(val, homes, len(values)))
                anywhere = anywhere and homes[val.untyped_storage()._cdata][2] == val.dtype
                nodes_of[len(values) - 1] = number
                kept.append(val)
                return _Slot(False, len(values) - 1)
            if isinstance(val, (list, tuple)):
                return type(val)(value(item, number) for item in val)
            if isinstance(val, (*_PLAIN, float)):
                return val
            raise Unlike

        steps = []
        for number, node in enumerate(nodes):
            if not _is_aten(node) or _is_telling(node):
                raise Unlike
            if not all(n in numbers or n in inputs for n in node.all_input_nodes):
                raise Unlike
            args, kwargs = fx.map_arg((node.args, node.kwargs), slot)
            steps.append(_Step(node.target, args, kwargs, _stem(node.name), value(node.meta.get("val"), number)))
        ids = {id(tensor): i for i, tensor in reversed([*enumerate(tensors)])}
        by_node = {nodes_of[i]: i for i in range(len(values)) if isinstance(steps[nodes_of[i]].value, _Slot)}

        def outcome(out: Any) -> Any:
            if isinstance(out, torch.Tensor):
                if id(out) in ids:
                    return _Slot(True, ids[id(out)])
                number = by_node.get(nodes.index(node) if (node := self._node_of(out)) in numbers else -1)
                if number is None or self._geometry(out) != self._geometry(kept[number]):
                    raise Unlike
                return _Slot(False, number)
            if isinstance(out, torch.Size):
                return out
            if isinstance(out, (list, tuple)):
                made = [outcome(item) for item in out]
                return type(out)(*made) if hasattr(out, "_fields") else type(out)(made)
            if isinstance(out, (*_PLAIN, float)):
                return out
            raise Unlike

        renamed = {}
        for i, (tensor, old) in enumerate(zip(tensors, slots, strict=True)):
            node = self._node_of(tensor)
            if node is not old:
                if node not in numbers:
                    raise Unlike
                renamed[i] = numbers[node].number
        return _Pattern(steps, values, outcome(result), nodes_of, renamed, anywhere)

    def _geometry(self, tensor: Any) -> tuple[Any, ...]:
        if type(tensor) is not FakeTensor or tensor.constant is not None or tensor.requires_grad:
            raise Unlike
        with torch._C.DisableTorchFunction():
            return (tensor.untyped_storage()._cdata, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(),
                    tensor.dtype, tensor.device, tensor.is_inference(), tensor.is_conj(), tensor.is_neg())  # fmt: skip

    def _node_of(self, tensor: Any) -> fx.Node:
        slot = get_proxy_slot(tensor, self._tracer, None)
        if slot is None or slot.constant is not None:
            raise Unlike
        node: fx.Node = slot.proxy.node
        return node

    # -- all others ---------------------------------------------------------------------------------------------------

    def _append(self, pattern: _Pattern, n: fx.Node, tensors: list[Any]) -> Any:
        """Append a pattern's nodes and return what the node returns."""
        if not pattern.steps:
            return _filled(pattern.result, tensors, [])
        self._trace_off()
        graph, tracer = self._tracer.graph, self._tracer
        slots = [self._node_of(tensor) for tensor in tensors]
        values: list[Any] = []
        begins: list[int] = []
        for each in pattern.values:
            home, begin = None, 0
            if each.home is not None:
                number = each.home.number
                home = tensors[number] if each.home.of_input else values[number]
                begin = each.offset + (self._describe(home).offset if each.home.of_input else begins[number])
            values.append(self._fake(each, home, begin))
            begins.append(begin)
        meta = {key: n.meta[key] for key in ("stack_trace", "nn_module_stack", "source_fn_stack") if key in n.meta}
        nodes: list[fx.Node] = []

        def node_at(slot: Any) -> Any:
            return slots[slot.number] if slot.of_input else nodes[slot.number]

        for step in pattern.steps:
            args, kwargs = _mapped(step.args, node_at), _mapped(step.kwargs, node_at)
            node = graph.create_node("call_function", step.target, args, kwargs, name=step.name)
            node.meta.update(meta)
            node.meta["val"] = _filled(step.value, tensors, values)
            nodes.append(node)
        for number, home_of in pattern.nodes_of.items():
            if isinstance(pattern.steps[home_of].value, _Slot):
                set_proxy_slot(values[number], tracer, _ProxyTensor(fx.Proxy(nodes[home_of], tracer), None))
        for number, by in pattern.renamed.items():
            set_proxy_slot(tensors[number], tracer, _ProxyTensor(fx.Proxy(nodes[by], tracer), None))
        return _filled(pattern.result, tensors, values)

    def _fake(self, value: _Value, home: Any, begin: int) -> Any:
        as_it_is = value.inference == torch.is_inference_mode_enabled()
        with contextlib.nullcontext() if as_it_is else torch.inference_mode(value.inference):
            if home is None:
                memory = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
            else:
                memory = torch.empty(0, dtype=value.dtype, device="meta")
                memory.set_(home.untyped_storage(), begin, value.shape, value.stride)
            return FakeTensor(self._mode, memory, value.device)


_UNKNOWN = object()


def _value(val: Any, homes: dict[int, tuple[_Slot, int, torch.dtype]], number: int) -> _Value:
    """The description of a traced tensor; it becomes the home of those that share its memory later."""
    if type(val) is not FakeTensor or val.constant is not None:
        raise Unlike
    with torch._C.DisableTorchFunction():
        if val.layout is not torch.strided or val.requires_grad or val.is_conj() or val.is_neg():
            raise Unlike
        storage, offset = val.untyped_storage(), int(val.storage_offset())
        shape, stride = tuple(val.shape), val.stride()
        home, begin, _ = homes.setdefault(storage._cdata, (_Slot(False, number), offset, val.dtype))
        if home != _Slot(False, number):
            return _Value(home, shape, stride, offset - begin, val.dtype, val.device, val.is_inference())
        span = 0 if 0 in shape else 1 + sum((s - 1) * t for s, t in zip(shape, stride, strict=True))
        if offset or storage.nbytes() != span * val.dtype.itemsize:
            raise Unlike  # a part of memory that no node shows
        return _Value(None, shape, stride, 0, val.dtype, val.device, val.is_inference())


def _told_by_geometry(nodes: Sequence[fx.Node]) -> bool:
    """Whether no operator takes or tells a position in memory."""
    schemas = [node.target._schema for node in nodes if isinstance(node.target, _OpOverload)]
    return bool(nodes) and not any(a.name == "storage_offset" for schema in schemas for a in schema.arguments)


def _after(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes of a graph behind one of its nodes."""
    while (node := node.next).op != "root":
        yield node


def _is_aten(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    target: Any = node.target
    return target is operator.getitem or (isinstance(target, _OpOverload) and target.namespace == "aten")


def _is_telling(node: fx.Node) -> bool:
    """Whether an operator does what its result does not show, or what the metadata of its arguments does not tell."""
    return any(tag in _TELLING for tag in getattr(node.target, "tags", ()))


def _only_reads(n: fx.Node) -> bool:
    """Whether a node that has appended nothing could not have done anything else either."""
    if n.op == "call_method":
        return n.target in _READS
    return n.target is getattr or getattr(n.target, "__module__", None) == "_operator"


def told_by(value: Any, tensors: list[Any], metadata: Callable[[Any], Any]) -> Any:
    """What decides about an argument of an operator; its tensors are collected in order.

    Args:
        metadata: what decides about a tensor, or about a size that is a symbol.

    Raises:
        Unlike: something else does.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return metadata(value)
    if isinstance(value, (list, tuple)):
        return type(value), *[told_by(item, tensors, metadata) for item in value]
    if isinstance(value, dict):
        return dict, *[(name, told_by(item, tensors, metadata)) for name, item in value.items()]
    if isinstance(value, slice):
        return slice, *[told_by(part, tensors, metadata) for part in (value.start, value.stop, value.step)]
    if isinstance(value, float):
        return float, value.hex()
    if isinstance(value, _PLAIN):
        return type(value), value
    return metadata(value)


def is_pytorchs(target: Any) -> bool:
    """Whether a function is PyTorch's or Python's own: anybody else's may be another one in its next call."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target).partition(".")[0] in ("aten", "prims")
    if not isinstance(target, (types.FunctionType, types.BuiltinFunctionType, type)):
        return False
    return (target.__module__ or "torch").partition(".")[0] in ("torch", "_operator", "builtins", "math")


_NUMBER = re.compile(r"_\d+$")


def _stem(name: str) -> str:
    """A node's name without its number, from which the graph makes the name of the next one."""
    return _NUMBER.sub("", name)


def _mapped(value: Any, node_at: Callable[[_Slot], fx.Node]) -> Any:
    if isinstance(value, _Slot):
        return node_at(value)
    if isinstance(value, dict):
        return {key: _mapped(item, node_at) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_mapped(item, node_at) for item in value)
    if isinstance(value, list):
        return [_mapped(item, node_at) for item in value]
    return value


def _filled(value: Any, tensors: Sequence[Any], values: Sequence[Any]) -> Any:
    """A value of a pattern with the tensors in their places."""
    if isinstance(value, _Slot):
        return tensors[value.number] if value.of_input else values[value.number]
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, (list, tuple)):
        made = [_filled(item, tensors, values) for item in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value
