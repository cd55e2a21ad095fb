"""PersonaPlex's codec: Mimi, in the streaming code of a fork of an older `moshi` (NVIDIA/personaplex, 0.1.0).

A frame is that of `adapters.moshi`, and so are the two callables, encoding and decoding, the transformers and their
rings. The convolutions keep their past in another way: each call joins it to what comes and puts a slice of the joined
tensor in its place, and before the first frame there is none. So the first frame of a stream, and after a reset, is a
signature of its own: padding is added on the left, and there is no tail to add. Each callable has two classes.

Where a convolution looks no further back than its stride, and in every residual sum, what is left over is empty.
Joining nothing to a frame moves no byte, so a step begins without it and leaves an empty tensor, as the vendor does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cadence_fx.adapters import moshi
from cadence_fx.adapters.moshi_state import Family, Field, layers_of, ring_fields
from cadence_fx.contract import Contract
from cadence_fx.retention import Pinned

__all__ = ["ADAPTER", "DecodeStep", "EncodeStep", "PersonaMimiStream"]

PERSONAPLEX = Family("PersonaPlex", ("0.1.0",), mark="set_streaming_state_inplace")
CONTIGUOUS = torch.contiguous_format
CONVOLUTIONS = {"RawStreamingConv1d": "previous", "RawStreamingConvTranspose1d": "partial"}


def kept_by(convolution: Any) -> int:
    """Frames that a convolution keeps of its input, or a transposed one of its output."""
    return int((convolution.kernel_size[0] - 1) * convolution.dilation[0] + 1 - convolution.stride[0])


def is_alike(value: Tensor, shaped: Tensor) -> bool:
    """Whether a state has the strides of a tensor of its own, at the address of one."""
    return value.stride() == shaped.stride() and value.data_ptr() % 16 == 0


def batch_of(transformer: Any) -> int | None:
    """The streams that a transformer has rings for, None when it does not stream."""
    state = transformer.layers[0].self_attn._streaming_state
    return None if state is None else int(state.kv_cache.cache.shape[1])


def fields(module: Any) -> Iterator[Field]:
    """What a module keeps between two frames, for `moshi_state.regions`. Offsets are of all streams together."""
    kind = type(module).__name__
    if kind in CONVOLUTIONS and (size := kept_by(module)):
        yield CONVOLUTIONS[kind], 2, Pinned(size)
    elif kind == "StreamingMultiheadAttention":
        yield from ring_fields(module, 1)
    elif kind == "StreamingTransformer":
        yield "offset", 0, Pinned(1)


class _Rebinding(moshi.Step):
    """A half of the codec.

    Attributes:
        first: whether it is at the first frame of a stream.
    """

    def __init__(self, mimi: Any, batch: int, codebooks: int) -> None:
        super().__init__(mimi, batch, codebooks)
        self.first = False
        like = next(mimi.parameters()).detach()
        self._past: list[tuple[str, Any, str, Tensor]] = []  # name, layer, field, what has the shape of it
        self._padded: list[tuple[str, Any, int]] = []  # name, layer, frames of padding
        for name, layer in mimi.named_modules():
            kind = type(layer).__name__
            if name.partition(".")[0] not in self.parts:
                continue
            if kind in CONVOLUTIONS:
                channels = layer.in_channels if kind == "RawStreamingConv1d" else layer.out_channels
                self._past.append((name, layer, CONVOLUTIONS[kind], like.new_zeros(batch, channels, kept_by(layer))))
            elif kind == "SEANetResnetBlock":
                nothing = like.new_zeros(batch, layer.block[-1].conv.conv.out_channels, 0)
                self._past += [(f"{name}.add", layer.add, field, nothing) for field in ("previous_x", "previous_y")]
            elif kind == "StreamingConv1d":
                self._padded.append((name, layer, layer._padding_total))

    @property
    def fields(self) -> Callable[[Any], Iterable[Field]]:
        return fields

    def forward(self, given: Tensor) -> Tensor:
        # What `meets` has found is said once more, in terms that Dynamo need not guard.
        for name, _, padding in self._padded:
            self._state_at(name).padding_to_add = padding if self.first else 0
        for name, _, field, shaped in self._past:
            if self.first or not shaped.shape[-1]:
                setattr(self._state_at(name), field, None)
        result: Tensor = super().forward(given)
        for name, _, field, shaped in self._past:
            state = self._state_at(name)
            # A tail is read in sums alone, element by element, and a past is only moved: no stride changes a byte.
            kept = getattr(state, field)
            setattr(state, field, kept.clone(memory_format=CONTIGUOUS) if shaped.shape[-1] else shaped)
        return result

    def _state_at(self, name: str) -> Any:
        """The state of a layer, by the way to it that the contract names: Dynamo takes the first that it meets."""
        layer = self.mimi
        for step in name.split("."):
            layer = getattr(layer, step)
        return layer._streaming_state

    def meets(self) -> bool:
        """Sets `first` as the states of the stream are, and says whether they are declared: before the first frame or
        after whole ones. After half a frame more is left over."""
        past = [getattr(layer._streaming_state, field) for _, layer, field, _ in self._past]
        self.first = all(value is None for value in past)
        if self.first:
            return all(layer._streaming_state.padding_to_add == padding for _, layer, padding in self._padded)
        for value, (_, _, _, shaped) in zip(past, self._past, strict=True):
            if value.shape != shaped.shape if value is not None else shaped.shape[-1]:
                return False
        return not any(layer._streaming_state.padding_to_add for _, layer, _ in self._padded)

    def settle(self) -> None:
        """Gives each state memory and strides of its own: the vendor's eager code keeps slices of what it has joined.

        Before the first frame there is nothing, which the engine takes for a state that is missing. What stands there
        instead is forgotten by the step before it is read.
        """
        for _, layer, field, shaped in self._past:
            state = layer._streaming_state
            if self.first:
                setattr(state, field, shaped)
            elif (value := getattr(state, field)) is not None and not is_alike(value, shaped):
                setattr(state, field, value.clone(memory_format=CONTIGUOUS))

    def forget(self) -> None:
        """Takes back what `settle` has put where there is nothing, when a first frame has failed."""
        for _, layer, field, shaped in self._past if self.first and self.streams() else ():
            if getattr(layer._streaming_state, field) is shaped:
                setattr(layer._streaming_state, field, None)


class EncodeStep(_Rebinding, moshi.EncodeStep):
    """Samples (batch, 1, 1920) to codes (batch, codebooks, 1) int64, by the vendor's own modules."""


class DecodeStep(_Rebinding, moshi.DecodeStep):
    """Codes (batch, codebooks, 1) int64 to samples (batch, 1, 1920), by the vendor's own modules."""


class PersonaMimiStream(moshi.MimiStream):
    """PersonaPlex's `MimiModel`, bound as `moshi.MimiStream` binds that of `moshi`; used as before.

    `streaming`, `reset_streaming`, `get_streaming_state`, `set_streaming_state`, `save_streaming_state` and
    `set_streaming_state_inplace` are the vendor's code on the vendor's state objects. A state that is neither before
    its first frame nor after whole frames runs the vendor's code, counted in `eager_calls` as "undeclared state".

    Args, Raises: as for `moshi.MimiStream`.
    """

    FAMILY = PERSONAPLEX
    STEPS = (EncodeStep, DecodeStep)

    @torch.no_grad()
    def warm_up(self, verb: Callable[..., Any], batch: int = 1) -> list[Any]:
        """`verb(step, argument)` for both steps before and after a first frame, as `cadence_fx.warm_up` asks for;
        returns what each returned.

        It takes the states of a stream of its own, as many as in the one that is open, which goes on where it is, or
        `batch` if there is none.
        """
        mimi = self.mimi
        batch = batch_of(mimi.encoder_transformer.transformer) or batch
        shipped = [(layer, layer._streaming_state) for layer in layers_of(mimi)]
        mimi._start_streaming(batch)
        try:
            self._graphs.turn_off(mimi._streaming_state)
            with self._meanwhile():
                return [self._warm_up(verb, kind, batch) for kind in self.STEPS for _ in (True, False)]
        finally:
            for layer, state in shipped:
                layer._streaming_state = state

    def _warm_up(self, verb: Callable[..., Any], kind: type[moshi.Step], batch: int) -> Any:
        step: Any = self._step(kind, batch, self.mimi.num_codebooks)
        step.meets()
        step.settle()
        result = super()._warm_up(verb, kind, batch)
        if step.first:
            step(step.example().to(dtype=step.dtype, device=step.device))  # eager: states as after a first frame
        return result

    def _run(self, step: Any, given: Tensor) -> Tensor:
        try:
            step.settle()
            return super()._run(step, given)
        except BaseException:
            step.forget()
            raise

    def _serving(self, kind: type[moshi.Step], state: Any, given: Tensor) -> moshi.Step | str:
        batch = batch_of(getattr(self.mimi, kind.parts[1]).transformer)
        step: Any = self._step(kind, batch, self.mimi.num_codebooks) if batch is not None else None
        if step is None or not step.streams():
            return "detached layers"
        return step.refuses(given) or (step if step.meets() else "undeclared state")  # type: ignore[no-any-return]


class _PersonaMimi:
    """Adapter of the steps; the vendor's own classes have no forward of one frame."""

    classes = tuple(f"{kind.__module__}.{kind.__name__}" for kind in (EncodeStep, DecodeStep))

    def contract(self, module: nn.Module) -> Contract | None:
        return module.contract() if isinstance(module, _Rebinding) else None


ADAPTER = _PersonaMimi()
