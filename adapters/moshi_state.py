"""What the codec and the language model of `moshi` have in common: how their layers keep state, and what is in the way.

The vendor keeps each layer's state in an object on the layer, `_streaming_state`, writes it in place and never changes
a shape. What the host counts there (`offset_cpu`) decides nothing in a layer whose weights are the same for each frame.
PersonaPlex, a fork of an older version, has the same objects on the same layers.
"""

from __future__ import annotations

import contextlib
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cadence_fx.contract import Region
from cadence_fx.errors import ContractError
from cadence_fx.retention import Pinned, Retention, Ring

Field = tuple[str, int, Retention]  # of a layer's state: its name, axis and retention


@dataclass(frozen=True, slots=True)
class Family:
    """A vendor's code: what it is called, the versions that are declared here, and what its modules all have."""

    name: str
    versions: tuple[str, ...]
    mark: str = "streaming"


MOSHI = Family("moshi", ("0.2.13",))


def vendor_class(given: Any) -> type:
    """The vendor's own class of a codec or a language model, which may be of a subclass."""
    kinds = [kind for kind in type(given).__mro__ if kind.__name__ in ("MimiModel", "LMGen")]
    return kinds[-1] if kinds else type(given)


def placed(module: nn.Module) -> tuple[torch.dtype, torch.device]:
    """Dtype and device of a module's weights, which `.to` may change between two calls."""
    first = next(module.parameters())
    return first.dtype, first.device


def check(given: Any, expected: str, family: Family = MOSHI) -> None:
    """Raises ContractError unless an object is of a class and version that is declared here."""
    package = _package_of(given)
    version = getattr(sys.modules.get(package), "__version__", None)
    named = vendor_class(given).__name__ == expected and hasattr(given, family.mark)
    if not named or version not in family.versions:
        found = f"{type(given).__qualname__} of {package} {version or 'without a version'}"
        wanted = f"{family.name} {' or '.join(family.versions)}"
        raise ContractError(f"expected the {expected} of {wanted}, found a {found}", field=expected)


def _package_of(given: Any) -> str:
    """The package of an object whose class is in `package.models.module`, or another as deep."""
    return vendor_class(given).__module__.rsplit(".", 2)[0]


def check_attention(root: nn.Module, expected: str) -> None:
    """Raises ContractError unless all attention under a module has a ring of its own and one set of weights."""
    for module in root.modules():
        if type(module).__name__ == "StreamingMultiheadAttention" and (
            module.weights_per_step or getattr(module, "cross_attention", False) or not module.context
        ):
            raise ContractError("only self-attention with a context and one set of weights is declared", field=expected)


def uncompiled(given: Any) -> Callable[[], AbstractContextManager[None]]:
    """The vendor's own switch for its package: inside, the two functions that it has Inductor compile (rotary positions
    and norms, on a GPU, unless NO_TORCH_COMPILE was set when it was imported) run the eager kernels that bytes are
    compared with."""
    return sys.modules[f"{_package_of(given)}.utils.compile"].no_compile  # type: ignore[no-any-return]


def layers_of(*parts: nn.Module) -> tuple[Any, ...]:
    """The modules that keep a state while they stream."""
    return tuple(module for part in parts for module in part.modules() if hasattr(module, "_streaming_state"))


def regions(root: nn.Module, prefix: str, fields: Callable[[Any], Iterable[Field]], each: int = 1) -> Iterator[Region]:
    """The states under a module that is found at `prefix`; a call brings `each` frames.

    Args:
        fields: what a module keeps. A `*` in a region's name stands for layers that are declared alike.
    """
    told: set[str] = set()
    for name, module in root.named_modules(prefix=prefix):
        # Convolutions have sizes of their own.
        where = name if "Conv" in type(module).__name__ else re.sub(r"\.\d+(?=\.|$)", ".*", name)
        for field, axis, retention in fields(module):
            if f"{where}.{field}" not in told:
                told.add(f"{where}.{field}")
                yield Region(
                    f"{where.partition('.')[2]}.{field}", attribute=f"{where}._streaming_state.{field}", axis=axis,
                    clock="frame", growth=each if isinstance(retention, Ring) else 1, retention=retention,
                )  # fmt: skip


def fields_of(batch: int) -> Callable[[Any], Iterator[Field]]:
    """What the modules of `moshi` keep for `batch` streams, for `regions`."""

    def fields(module: Any) -> Iterator[Field]:
        kind = type(module).__name__
        if kind == "StreamingConv1d" and (past := module._effective_kernel_size - module._stride):
            yield "previous", 2, Pinned(past)
            if module.pad_mode == "replicate":
                yield "first", 0, Pinned(batch)
        elif kind == "StreamingConvTranspose1d" and (tail := module._kernel_size - module._stride):
            yield "partial", 2, Pinned(tail)
        elif kind == "StreamingMultiheadAttention":
            yield from ring_fields(module, batch)
        elif kind == "StreamingTransformer":
            yield "offsets", 0, Pinned(batch)
        else:
            return
        yield "exec_mask", 0, Pinned(batch)

    return fields


def ring_fields(attention: Any, offsets: int) -> Iterator[Field]:
    """What attention keeps: a ring of keys and values, and `offsets` counts of frames."""
    yield "kv_cache.cache", 3, Ring(attention.context)
    yield "kv_cache.end_offset", 0, Pinned(offsets)
    yield "offset", 0, Pinned(offsets)


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
