"""What the codec and the language model of `moshi` have in common: how their layers keep state, and what is in the way.

The vendor keeps each layer's state in an object on the layer, `_streaming_state`, writes it in place and never changes
a shape. What the host counts there (`offset_cpu`) decides nothing in a layer whose weights are the same for each frame.
"""

from __future__ import annotations

import contextlib
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from cadence_fx.contract import Region
from cadence_fx.errors import AlreadyBound, ContractError
from cadence_fx.retention import Pinned, Retention, Ring

VERSIONS = ("0.2.13",)


def check(given: Any, expected: str, methods: Iterable[str]) -> None:
    """Raises ContractError unless an object is of a class and version that is declared here, and not bound yet."""
    package = type(given).__module__.partition(".")[0]
    version = getattr(sys.modules.get(package), "__version__", None)
    if expected not in {kind.__name__ for kind in type(given).__mro__} or version not in VERSIONS:
        found = f"{type(given).__qualname__} of {package} {version or 'without a version'}"
        raise ContractError(
            f"expected the {expected} of moshi {' or '.join(VERSIONS)}, found a {found}", field=expected
        )
    if not vars(given).keys().isdisjoint(methods):
        raise AlreadyBound(expected)


def check_attention(root: nn.Module, expected: str) -> None:
    """Raises ContractError unless all attention under a module has a ring of its own and one set of weights."""
    for module in root.modules():
        if type(module).__name__ == "StreamingMultiheadAttention" and (
            module.weights_per_step or module.cross_attention or not module.context
        ):
            raise ContractError("only self-attention with a context and one set of weights is declared", field=expected)


def uncompiled(given: Any) -> Callable[[], AbstractContextManager[None]]:
    """The vendor's own switch for its package: inside, the two functions that it has Inductor compile (rotary positions
    and norms, on a GPU, unless NO_TORCH_COMPILE was set when it was imported) run the eager kernels that bytes are
    compared with."""
    package = type(given).__module__.partition(".")[0]
    return sys.modules[f"{package}.utils.compile"].no_compile  # type: ignore[no-any-return]


def layers_of(*parts: nn.Module) -> tuple[Any, ...]:
    """The modules that keep a state while they stream."""
    return tuple(module for part in parts for module in part.modules() if hasattr(module, "_streaming_state"))


def regions(root: nn.Module, prefix: str, batch: int, each: int = 1) -> Iterator[Region]:
    """The states under a module that is found at `prefix`, for `batch` streams; a call brings `each` frames.

    A `*` in a region's name stands for layers that are declared alike.
    """
    told: set[str] = set()

    def region(name: str, field: str, axis: int, retention: Retention, *, alike: bool = True) -> Iterator[Region]:
        where = re.sub(r"\.\d+(?=\.|$)", ".*", name) if alike else name
        if f"{where}.{field}" not in told:
            told.add(f"{where}.{field}")
            yield Region(
                f"{where.partition('.')[2]}.{field}", attribute=f"{where}._streaming_state.{field}", axis=axis,
                clock="frame", growth=each if isinstance(retention, Ring) else 1, retention=retention,
            )  # fmt: skip

    for name, module in root.named_modules(prefix=prefix):
        kind = type(module).__name__
        if kind == "StreamingConv1d" and (past := module._effective_kernel_size - module._stride):
            yield from region(name, "previous", 2, Pinned(past), alike=False)
            if module.pad_mode == "replicate":
                yield from region(name, "first", 0, Pinned(batch))
        elif kind == "StreamingConvTranspose1d" and (tail := module._kernel_size - module._stride):
            yield from region(name, "partial", 2, Pinned(tail), alike=False)
        elif kind == "StreamingMultiheadAttention":
            yield from region(name, "kv_cache.cache", 3, Ring(module.context))
            yield from region(name, "kv_cache.end_offset", 0, Pinned(batch))
            yield from region(name, "offset", 0, Pinned(batch))
        elif kind == "StreamingTransformer":
            yield from region(name, "offsets", 0, Pinned(batch))
        else:
            continue
        yield from region(name, "exec_mask", 0, Pinned(batch))


def count_from_zero(transformer: Any) -> None:
    """Sets the frame counters that the host keeps for a transformer's layers to zero, in the step itself: Dynamo would
    compile again for each of their values."""
    for layer in transformer.layers:
        layer._streaming_state.offset_cpu = 0
        layer.self_attn._streaming_state.offset_cpu = 0


@contextlib.contextmanager
def counted(states: Sequence[Any]) -> Iterator[None]:
    """Around a step that counts from zero: the host's counters go on from what they were."""
    before = [state.offset_cpu for state in states]
    for state in states:
        state.offset_cpu = 0
    try:
        yield
    finally:
        for state, frames in zip(states, before, strict=True):
            state.offset_cpu += frames


def counters(transformer: Any) -> list[Any]:
    """The state objects of a transformer that have such a counter."""
    return [each._streaming_state for layer in transformer.layers for each in (layer, layer.self_attn)]


def canonical(given: Tensor) -> Tensor:
    """The argument where and as an allocator would have put it: a slice of a recording has strides that say nothing and
    change with the recording, and may begin anywhere."""
    if given.is_contiguous() and given.data_ptr() % 16 == 0:
        return given.view(-1).view(given.shape)
    return given.clone(memory_format=torch.contiguous_format)


class HandWrittenGraphs:
    """The CUDA graphs that the vendor captures by hand, off until `release`: they hold addresses of states that a
    compiled step may move. The one that writes masks stays, since nobody moves these."""

    def __init__(self) -> None:
        self._shipped: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def turn_off(self, state: Any) -> None:
        """Those of the stream that is open: another one may have been put in since the last call."""
        for name, graph in vars(state).items() if state is not None else ():
            if name.startswith("graphed_") and graph is not None and graph not in self._shipped:
                self._shipped[graph] = graph.disable
                graph.disable = True

    def release(self) -> None:
        for graph, shipped in self._shipped.items():
            graph.disable = shipped
            graph.reset(graph.warmup_steps)  # what it had captured was at addresses of before
        self._shipped.clear()
