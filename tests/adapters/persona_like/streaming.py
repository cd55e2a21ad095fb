"""Layers that keep state in an object of their own, `_streaming_state`, while they stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.adapters.persona_like.utils.compile import Graphed


class State:
    """Fields, and what a reset sets them to: a tensor is filled with it, another value is replaced."""

    def __init__(self, starts: dict[str, Any] | None = None, **fields: Any) -> None:
        self._starts = starts or {}
        for name, value in fields.items():
            setattr(self, name, value)

    def reset(self) -> None:
        for name, start in self._starts.items():
            value = getattr(self, name)
            if isinstance(value, Tensor) and start is not None:
                value.fill_(start)
            elif isinstance(value, State):
                value.reset()
            else:
                setattr(self, name, start)


class StreamingModule(nn.Module):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._streaming_state: Any = None
        self._propagates = True

    def set_streaming_propagate(self, propagates: bool) -> None:
        self._propagates = propagates

    def _init_streaming_state(self, batch: int) -> State:
        return State()

    @property
    def is_streaming(self) -> bool:
        return self._streaming_state is not None

    def _layers(self) -> Iterator[tuple[str, StreamingModule]]:
        """This module and those under it, but what is behind one that does not pass streaming on."""
        behind: list[str] = []
        for name, layer in self.named_modules():
            if not any(name.startswith(prefix) for prefix in behind) and isinstance(layer, StreamingModule):
                if not layer._propagates:
                    behind.append(name)
                else:
                    yield name, layer

    def _start_streaming(self, batch: int) -> None:
        for _, layer in self._layers():
            layer._streaming_state = layer._init_streaming_state(batch)

    streaming_forever = _start_streaming

    def _stop_streaming(self) -> None:
        for _, layer in self._layers():
            layer._streaming_state = None

    @contextlib.contextmanager
    def streaming(self, batch: int) -> Iterator[None]:
        self._start_streaming(batch)
        try:
            yield
        finally:
            self._stop_streaming()

    def reset_streaming(self) -> None:
        for _, layer in self._layers():
            layer._streaming_state.reset()

    def get_streaming_state(self) -> dict[str, Any]:
        return {name: layer._streaming_state for name, layer in self._layers()}

    def set_streaming_state(self, states: dict[str, Any]) -> None:
        for name, layer in self._layers():
            layer._streaming_state = states[name]

    def _values(self) -> Iterator[tuple[str, Any, str]]:
        """Name, owner and field of everything in a state but functions."""
        for name, layer in self._layers():
            owners = [(name, layer._streaming_state)]
            for prefix, owner in owners:
                for field, value in list(vars(owner).items()):
                    if isinstance(value, State):
                        owners.append((f"{prefix}.{field}", value))
                    elif field != "_starts" and not isinstance(value, Graphed):
                        yield f"{prefix}.{field}", owner, field

    def save_streaming_state(self, path: str, metadata: str) -> None:
        values = {name: getattr(owner, field) for name, owner, field in self._values()}
        torch.save({name: value for name, value in values.items() if isinstance(value, Tensor)}, path)
        torch.save({name: value for name, value in values.items() if not isinstance(value, Tensor)}, metadata)

    def set_streaming_state_inplace(self, saved: dict[str, Any]) -> None:
        for name, owner, field in self._values():
            if isinstance(now := getattr(owner, field), Tensor):
                now.copy_(saved[name])
            else:
                setattr(owner, field, saved[name])


def load_streaming_state(path: str, metadata: str) -> dict[str, Any]:
    return {**torch.load(path), **torch.load(metadata)}


class RawStreamingConv1d(StreamingModule, nn.Conv1d):
    def _init_streaming_state(self, batch: int) -> State:
        return State({"previous": None}, previous=None)

    def forward(self, x: Tensor) -> Tensor:
        state, (stride,) = self._streaming_state, self.stride
        if state is None:
            return super().forward(x)
        joined = x if state.previous is None else torch.cat([state.previous, x], 2)
        reach = self.dilation[0] * (self.kernel_size[0] - 1) + 1
        frames = max(0, (joined.shape[2] - reach) // stride + 1)
        state.previous = joined[:, :, frames * stride :]
        if not frames:
            return x.new_empty(len(x), self.out_channels, 0)
        return super().forward(joined[:, :, : (frames - 1) * stride + reach])


class RawStreamingConvTranspose1d(StreamingModule, nn.ConvTranspose1d):
    def _init_streaming_state(self, batch: int) -> State:
        return State({"partial": None}, partial=None)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        state, tail = self._streaming_state, self.kernel_size[0] - self.stride[0]
        y = super().forward(x)
        if state is None:
            return y
        if (partial := state.partial) is not None:
            y[:, :, : partial.shape[2]] += partial if self.bias is None else partial - self.bias[:, None]
        split = y.shape[2] - tail
        state.partial = y[:, :, split:]
        return y[:, :, :split]


class Holder(nn.Module):
    """A layer under the name that the weights of normed ones have."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        super().__init__()
        self._name = name
        self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self._name)(x)  # type: ignore[no-any-return]


class StreamingConv1d(StreamingModule):
    """Pads once, on the left, before the first frame: with zeros, or with that frame."""

    def __init__(self, inner: int, outer: int, kernel: int, stride: int = 1, repeats: bool = False) -> None:
        super().__init__()
        self.mode = "replicate" if repeats else "constant"
        self.conv = Holder("conv", RawStreamingConv1d(inner, outer, kernel, stride, bias=not repeats))
        self._padding_total = kernel - stride

    def _init_streaming_state(self, batch: int) -> State:
        return State({"padding_to_add": self._padding_total}, padding_to_add=self._padding_total)

    def forward(self, x: Tensor) -> Tensor:
        state = self._streaming_state
        pad = self._padding_total if state is None else state.padding_to_add
        if pad:
            x = F.pad(x, (pad, 0), self.mode)
            if state is not None:
                state.padding_to_add = 0
        return self.conv(x)  # type: ignore[no-any-return]


class StreamingConvTranspose1d(StreamingModule):
    def __init__(self, inner: int, outer: int, stride: int, groups: int = 1) -> None:
        super().__init__()
        raw = RawStreamingConvTranspose1d(inner, outer, 2 * stride, stride, groups=groups, bias=groups == 1)
        self.convtr, self._stride = Holder("convtr", raw), stride

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.convtr(x)
        return y if self.is_streaming else y[:, :, : y.shape[2] - self._stride]


class StreamingAdd(StreamingModule):
    def _init_streaming_state(self, batch: int) -> State:
        return State({"previous_x": None, "previous_y": None}, previous_x=None, previous_y=None)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        state = self._streaming_state
        if state is None:
            return x + y
        if state.previous_x is not None:
            x, y = torch.cat([state.previous_x, x], 2), torch.cat([state.previous_y, y], 2)
        both = min(x.shape[2], y.shape[2])
        state.previous_x, state.previous_y = x[:, :, both:], y[:, :, both:]
        return x[:, :, :both] + y[:, :, :both]


class SEANetResnetBlock(StreamingModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.block = nn.Sequential(nn.ELU(), StreamingConv1d(width, half, 3), nn.ELU(), StreamingConv1d(half, width, 1))
        self.add = StreamingAdd()

    def forward(self, x: Tensor) -> Tensor:
        return self.add(x, self.block(x))  # type: ignore[no-any-return]


class StreamingMultiheadAttention(StreamingModule):
    """Over a ring of its own past; with `steps`, other weights for each frame of a short sequence."""

    def __init__(self, width: int, heads: int, context: int | None, steps: int = 0) -> None:
        super().__init__()
        self.heads, self.context, self.weights_per_step = heads, context, steps
        self.inner = nn.Parameter(torch.randn(max(steps, 1), 3 * width, width) / width**0.5)
        self.outer = nn.Parameter(torch.randn(max(steps, 1), width, width) / width**0.5)

    def _init_streaming_state(self, batch: int) -> State:
        size, width = self.context or self.weights_per_step, self.inner.shape[2]
        like = self.inner.detach()
        ring = State(
            {"end_offset": 0},
            cache=like.new_zeros(2, batch, self.heads, size, width // self.heads),
            end_offset=torch.zeros(1, dtype=torch.int64, device=like.device),
        )
        offset = torch.zeros(1, dtype=torch.int64, device=like.device)
        return State({"kv_cache": 0, "offset": 0, "offset_cpu": 0}, kv_cache=ring, offset=offset, offset_cpu=0)

    def forward(self, x: Tensor) -> Tensor:
        state, (batch, frames, width) = self._streaming_state, x.shape
        which = state.offset_cpu if self.weights_per_step else 0
        parts = F.linear(x, self.inner[which]).view(batch, frames, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        now = state.offset + torch.arange(frames, device=x.device)
        ring, size = state.kv_cache, state.kv_cache.cache.shape[3]
        ring.cache.index_copy_(3, (ring.end_offset + torch.arange(frames, device=x.device)) % size, parts[1:])
        ring.end_offset.add_(frames)
        last = ring.end_offset - 1
        at = last - (last - torch.arange(size, device=x.device)) % size  # the frame that each place of the ring holds
        seen = (at >= 0) & (at <= now[:, None])
        if self.context:
            seen = seen & (now[:, None] - at < self.context)
        y = F.scaled_dot_product_attention(parts[0], ring.cache[0], ring.cache[1], seen)
        state.offset.add_(frames)
        state.offset_cpu += frames
        return F.linear(y.transpose(1, 2).reshape(batch, frames, width), self.outer[which])


class Layer(StreamingModule):
    def __init__(self, width: int, heads: int, context: int | None, steps: int) -> None:
        super().__init__()
        self.norm, self.steps = nn.LayerNorm(width), steps
        self.self_attn = StreamingMultiheadAttention(width, heads, context, steps)
        self.feed = nn.ModuleList(nn.Linear(width, width) for _ in range(max(steps, 1)))

    def _init_streaming_state(self, batch: int) -> State:
        return State({"offset_cpu": 0}, offset_cpu=0)

    def forward(self, x: Tensor) -> Tensor:
        state = self._streaming_state
        x = x + self.self_attn(self.norm(x))
        x = x + F.silu(self.feed[state.offset_cpu if self.steps else 0](x))
        state.offset_cpu += x.shape[1]
        return x


class StreamingTransformer(StreamingModule):
    """For streams alone."""

    def __init__(self, width: int, heads: int, layers: int, context: int | None, steps: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, heads, context, steps) for _ in range(layers))

    def _init_streaming_state(self, batch: int) -> State:
        device = next(self.parameters()).device
        return State({"offset": 0}, offset=torch.zeros(1, dtype=torch.int64, device=device))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        if self._streaming_state is not None:
            self._streaming_state.offset.add_(x.shape[1])
        return x
