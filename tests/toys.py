"""Toy streaming modules: one of each way released decoders keep state.

Each output really depends on the state (attention, linear layers, convolution). How a module is declared and driven is
in ``streams``.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

B, C, T = 2, 8, 3  # batch, channels, solver steps


class Toy(nn.Module):
    """Two projections and an attention over frames: the arithmetic that reads a state of shape (B, L, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(C, C), nn.Linear(C, C)

    def attend(self, x: Tensor, frames: Tensor) -> Tensor:
        weights = torch.softmax(self.query(x) @ frames.transpose(1, 2) / C**0.5, -1)
        return torch.tanh(weights @ frames)


class DoubleAttention(nn.Module):
    """Attention over a cache of the last six frames, in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(C, C, dtype=torch.float64)

    def attend(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.cat([cache, self.key(x)], 1)
        return torch.softmax(x @ frames.transpose(1, 2), -1) @ frames, frames[:, -6:]


class AppendLast(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        raw = torch.cat([cache, self.key(x)], 1)
        return self.attend(x, raw), raw[:, -9:]


class PrependLast(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        raw = torch.cat([self.key(x), cache], 1)
        return F.scaled_dot_product_attention(self.query(x), raw, raw), raw[:, :9]


class PromptAppend(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cache = torch.cat([cache, self.key(x)], 1)
        y = self.attend(x, cache)
        if cache.size(1) > 6 + 7:
            cache = torch.cat([cache[:, :6], cache[:, -7:]], 1)
        return y, cache


class PromptPrepend(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cache = torch.cat([self.key(x), cache], 1)
        y = self.attend(x, cache)
        if cache.size(1) > 6 + 7:
            cache = torch.cat([cache[:, :6], cache[:, -7:]], 1)
        return y, cache


class Rebound(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.hist = torch.ones(B, C, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.hist = torch.cat([self.hist, self.key(x).transpose(1, 2)], 2)[..., -8:]
        return self.attend(x, self.hist.transpose(1, 2))


class BufferShift(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.hist: Tensor
        self.register_buffer("hist", torch.ones(B, 8, C))

    def forward(self, x: Tensor) -> Tensor:
        raw = torch.cat([self.hist, self.key(x)], 1)
        self.hist.copy_(raw[:, x.size(1) :])
        return self.attend(x, raw) + self.attend(x, self.hist)


class LayerList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(Toy() for _ in range(3))

    def forward(self, x: Tensor, caches: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        kept = []
        for layer, cache in zip(self.layers, caches, strict=True):
            raw = torch.cat([cache, layer.key(x)], 1)
            x = x + layer.attend(x, raw)
            kept.append(raw[:, -7:])
        return x, kept


class NestedDict(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(C, C, 3)

    def forward(self, x: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        left = torch.cat([state["conv"], x.transpose(1, 2)], 2)
        h = torch.relu(self.conv(left)).transpose(1, 2)
        k = torch.cat([state["att"]["k"], self.key(h)], 1)
        v = torch.cat([state["att"]["v"], torch.sigmoid(h)], 1)
        y = F.scaled_dot_product_attention(self.query(h), k, v)
        return y, {"conv": left[:, :, -2:], "att": {"k": k[:, -6:], "v": v[:, -6:]}}


class ConvContext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(C, C, 5) / 6)

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat([context, x], -1)
        return F.gelu(F.conv1d(joined, self.weight)), joined[..., -4:]


class RingByIndex(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.ring: Tensor
        self.position: Tensor
        self.register_buffer("ring", torch.ones(B, 7, C))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        index = (self.position + torch.arange(x.size(1), device=x.device)) % 7
        self.ring.index_copy_(1, index, self.key(x))
        self.position.add_(x.size(1))
        return self.attend(x, self.ring)


class GrowThenPinned(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        kept = torch.cat([cache, self.key(x)], 1)[:, :8]
        return self.attend(x, kept), kept


class ZeroStart(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        raw = torch.cat([cache, self.key(x)], 1)
        return self.attend(x, raw), raw[:, -5:]


class ViewState(Toy):
    """The state handed out is a transposed view, and the next call reads it through those strides."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        frames = cache.transpose(1, 2)
        raw = torch.cat([frames, self.key(x)], 1)
        return self.attend(x, raw) + self.attend(x, frames), raw[:, -8:].transpose(1, 2)


class ReadsState(Toy):
    """Reductions straight over the state: in which order they sum depends on its strides, which a slice leaves odd."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        raw = torch.cat([cache, self.key(x)], 1)
        return self.attend(x, raw) + cache.mean((0, 1)) * cache.sum(), raw[:, -9:]


class TwoClocks(Toy):
    """Tokens at one rate, frames at twice that rate; the token state outlives a turn."""

    def forward(self, x: Tensor, tokens: Tensor, frames: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens = torch.cat([tokens, self.key(x)], 1)
        up = torch.repeat_interleave(self.attend(x, tokens), 2, 1)
        frames = torch.cat([frames, up], 1)
        return self.attend(up, frames), tokens[:, -11:], frames[:, -23:]


class Duplex(Toy):
    """Two base clocks: what is heard and what is said; what is said may end a turn early."""

    def forward(self, heard: Tensor, said: Tensor, ear: Tensor, mouth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ear = torch.cat([ear, self.key(heard)], 1)
        mouth = torch.cat([mouth, self.attend(said, ear)], 1)
        return self.attend(said, mouth), ear[:, -6:], mouth[:, -5:]


class SolverStack(Toy):
    """Euler steps inside one call; row t of the state is the cache that step t reads."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        kept = []
        for t in range(T):
            raw = torch.cat([cache[t], self.key(x)], 1)
            x = x + self.attend(x, raw) / T
            kept.append(raw[:, -8:])
        return x, torch.stack(kept)


class SolverWorkspace(Toy):
    """As released decoders do it: each step writes rows of an over-sized buffer, and views of it go out as state."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Tensor
        self.register_buffer("work", torch.zeros(T, B, 20, C), persistent=False)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        for t in range(T):
            raw = torch.cat([self.key(x), cache[t]], 1)
            self.work[t, :, : raw.size(1)] = raw
            x = x + self.attend(x, raw) / T
        cache = self.work[:, :, : cache.size(2) + x.size(1)]
        if cache.size(2) > 4 + 6:
            cache = torch.cat([cache[:, :, :4], cache[:, :, -6:]], 2)
        return x, cache


class PartialFlush(Toy):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        raw = torch.cat([cache, self.key(x)], 1)
        return self.attend(x, raw), raw[:, -10:]


class Block(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.hist = torch.ones(B, 1, C)

    def forward(self, x: Tensor) -> Tensor:
        self.hist = torch.cat([self.hist, self.key(x)], 1)[:, -6:]
        return x + self.attend(x, self.hist)


class LayerAttributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
