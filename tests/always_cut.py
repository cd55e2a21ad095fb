"""Streaming modules whose states are full after one call: their extents do not say how much a call adds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.unprepared import C, attend


class Context(nn.Module):
    """The left context of a convolution, of 3 frames, in an attribute.

    Args:
        way: how frames come to be: as they are, computed, more or fewer of them, put in front, without the newest.
        start: frames at the start.
    """

    def __init__(self, way: str = "tanh", start: int = 3) -> None:
        super().__init__()
        self.way, self.state = way, torch.zeros(1, C, start)

    def forward(self, x: Tensor) -> Tensor:
        fresh = {"up": x.repeat_interleave(2, -1), "down": x[..., ::2], "plain": x}.get(self.way, x.tanh())
        joined = torch.cat([fresh, self.state] if self.way == "prepend" else [self.state, fresh], -1)
        seen = joined[..., :-2] if self.way == "ahead" else joined
        self.state = seen[..., :3] if self.way == "prepend" else seen[..., -3:]
        return joined.mean(-1)


class InPlace(nn.Module):
    """The same, written in place and kept channel last."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(1, 3, C))

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.state.transpose(1, 2), x.tanh()], -1)  # type: ignore[operator]
        self.state.copy_(joined[..., -3:].transpose(1, 2))  # type: ignore[operator]
        return joined.mean(-1)


class Strided(nn.Module):
    """Causal convolutions of stride 2, each with what it needs of the chunk before."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv1d(C, C, 4, stride=2) for _ in range(3))
        self.left = [torch.zeros(1, C, 2) for _ in range(3)]

    def forward(self, x: Tensor) -> Tensor:
        for i, convolution in enumerate(self.convolutions):
            joined = torch.cat([self.left[i], x], -1)
            self.left[i], x = joined[..., -2:], convolution(joined).relu()
        return x


class Spectrum(nn.Module):
    """A short-time Fourier transform: windows of 8 samples, 4 apart."""

    def __init__(self) -> None:
        super().__init__()
        self.left = torch.zeros(1, 4)

    def forward(self, samples: Tensor) -> Tensor:
        joined = torch.cat([self.left, samples], -1)
        self.left = joined[..., -4:]
        return torch.fft.rfft(joined.unfold(-1, 8, 4)).abs()


class DelayLine(nn.Module):
    """Each channel is delayed by a frame more than the one before, the last by one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.long, self.short = torch.zeros(1, C, 5), torch.zeros(1, C, 1)

    def forward(self, x: Tensor) -> Tensor:
        long, short = torch.cat([self.long, x], -1), torch.cat([self.short, x], -1)
        self.long, self.short = long[..., x.size(-1) :], short[..., x.size(-1) :]
        return long[..., : x.size(-1)] + short[..., : x.size(-1)]


class Sinks(nn.Module):
    """Keys and values in an object: the first two frames, which attention rests on, and the last four."""

    def __init__(self) -> None:
        super().__init__()
        self.maps, self.caches = nn.Linear(C, 2 * C), {"k": torch.zeros(1, 2, C), "v": torch.zeros(1, 2, C)}

    def forward(self, x: Tensor) -> Tensor:
        k, v = (
            torch.cat([self.caches[name], new], 1) for name, new in zip("kv", self.maps(x).chunk(2, -1), strict=True)
        )
        self.caches = {name: torch.cat([raw[:, :2], raw[:, -4:]], 1) for name, raw in (("k", k), ("v", v))}
        return F.scaled_dot_product_attention(x, k, v)


class TwoStreams(nn.Module):
    """Samples and tokens, both cut in every call; the text at half its rate."""

    def __init__(self) -> None:
        super().__init__()
        self.heard, self.said = torch.zeros(1, 3, C), torch.zeros(1, 1, C)

    def forward(self, audio: Tensor, text: Tensor) -> Tensor:
        heard, said = torch.cat([self.heard, audio.sin()], 1), torch.cat([self.said, text[:, ::2].cos()], 1)
        self.heard, self.said = heard[:, -3:], said[:, -1:]
        return attend(text, heard) + attend(text, said)


class Summary(nn.Module):
    """A window of frames, and a token for each call, which no size of an argument says."""

    def __init__(self) -> None:
        super().__init__()
        self.frames, self.tokens = torch.zeros(1, 3, C), torch.zeros(1, 2, C)

    def forward(self, x: Tensor) -> Tensor:
        frames, tokens = torch.cat([self.frames, x], 1), torch.cat([self.tokens, x.mean(1, keepdim=True)], 1)
        self.frames, self.tokens = frames[:, -3:], tokens[:, -2:]
        return attend(x, frames) + attend(x, tokens)


class Pairs(nn.Module):
    """What any two frames of a chunk have in common: not as many more in a chunk twice as long."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(1, 4, C)

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.triu_indices(x.size(1), x.size(1), 1)
        joined = torch.cat([self.state, x[:, left] * x[:, right]], 1)
        self.state = joined[:, -4:]
        return attend(x, joined)


# -- of which nothing tells how much a call adds -----------------------------------------------------------------------


class Unsure(nn.Module):
    """One state of 3 frames, in its own attribute."""

    def __init__(self, start: int = 3) -> None:
        super().__init__()
        self.state = torch.zeros(1, start, C)

    def forward(self, x: Tensor) -> Tensor:
        y = attend(x, self.state) if self.state.size(1) else x
        self.state = self.following(x)
        return y

    def following(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Dropped(Unsure):
    """The old state is dropped whole."""

    def following(self, x: Tensor) -> Tensor:
        return x.tanh()[:, -3:]


class Reworked(Unsure):
    """What is cut was computed from old and fresh frames together."""

    def following(self, x: Tensor) -> Tensor:
        return torch.cat([self.state, x], 1).tanh()[:, -3:]


class OneByOne(Unsure):
    """Frames go in one at a time, and one goes out for each."""

    def following(self, x: Tensor) -> Tensor:
        state = self.state
        for at in range(x.size(1)):
            state = torch.cat([state, x[:, at : at + 1]], 1)[:, -3:]
        return state


class Counted(Unsure):
    """A resampler: Python's phase brings one frame less in every sixth call."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = 0

    def following(self, x: Tensor) -> Tensor:
        self.phase = (self.phase + 1) % 6
        return torch.cat([self.state, x[:, int(self.phase == 0) :]], 1)[:, -3:]


class Phase(Unsure):
    """The same with a phase that is a tensor, and a state that keeps old frames."""

    phase: Tensor

    def __init__(self) -> None:
        super().__init__(12)
        self.register_buffer("phase", torch.zeros(1, dtype=torch.long))

    def following(self, x: Tensor) -> Tensor:
        self.phase.add_(1).remainder_(6)
        return torch.cat([self.state, x[:, int(self.phase.item() == 0) :]], 1)[:, -12:]


class Overlap(nn.Module):
    """A transposed convolution, whose overlap is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.state = nn.ConvTranspose1d(C, C, 6, stride=3, bias=False), torch.zeros(1, C, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x.transpose(1, 2))
        y[..., :3] += self.state
        self.state = y[..., -3:]
        return y[..., :-3]


class Levels(nn.Module):
    """A moving average of frames."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, 1, C))

    def forward(self, x: Tensor) -> Any:
        self.mean.lerp_(x.mean(1, keepdim=True), 0.1)  # type: ignore[operator]
        return x - self.mean  # type: ignore[operator]
