"""Modules of which no contract can be inferred, or only a part of one."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from tests.unprepared import C, attend


class GrowsForever(nn.Module):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cache = torch.cat([cache, x.tanh()], 1)
        return attend(x, cache), cache


class LimitedPositions(nn.Module):
    """Grows until a table of positions is at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(1, 300, C))

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cache = torch.cat([cache, x.tanh()], 1)
        return attend(x, cache + self.table[:, : cache.size(1)]), cache  # type: ignore[index]


class LateCut(nn.Module):
    """The window is far longer than anyone would play a stream for."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cache = torch.cat([cache, x.tanh()], 1)[:, -2500:]
        return attend(x, cache), cache


class DataDependent(nn.Module):
    """Frames that are quiet are not kept."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cache = torch.cat([cache, x[:, x[0, :, 0] > 0].tanh()], 1)
        return attend(x, cache), cache[:, -6:]


class HostRead(nn.Module):
    """Python decides by a value; the state is none the less kept as in any window."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat([cache, x.tanh()], 1)
        y = attend(x, seen)
        if float(y.mean()) > 0:
            y = -y
        return y, seen[:, -6:]


class Sawtooth(nn.Module):
    """The window is cut by half whenever it is full."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat([cache, x.tanh()], 1)
        return attend(x, seen), seen[:, -4:] if seen.size(1) > 8 else seen


class Symmetric(nn.Module):
    """Nothing in one call tells which of two arguments is the state."""

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([a, b], 1)
        return attend(a, both), both[:, -6:]


class Computed(nn.Module):
    """Nothing in one call tells that the result is the next state."""

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return x + hidden, torch.tanh(hidden + x.mean(1, keepdim=True))


class Lazy(nn.Module):
    cache: Any = None

    def forward(self, x: Tensor) -> Tensor:
        seen = x.tanh() if self.cache is None else torch.cat([self.cache, x.tanh()], 1)
        self.cache = seen[:, -6:]
        return attend(x, seen)


class PythonPosition(nn.Module):
    """A ring whose position is a number of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ring", torch.zeros(1, 6, C))
        self.at = 0

    def forward(self, x: Tensor) -> Tensor:
        self.ring[:, self.at : self.at + 2] = x.tanh()  # type: ignore[operator]
        self.at = (self.at + 2) % 6
        return attend(x, self.ring)  # type: ignore[arg-type]


class WholeNumber(nn.Module):
    """A counter without an axis."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        self.count.add_(1)  # type: ignore[operator]
        seen = torch.cat([cache, x.tanh()], 1)
        return attend(x, seen) * self.count, seen[:, -6:]  # type: ignore[operator]


class Appended(nn.Module):
    """The caller's own list is changed."""

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        seen = torch.cat([state["cache"], x.tanh()], 1)
        state["cache"] = seen[:, -6:]
        return attend(x, seen)


class Sharing(nn.Module):
    """The state handed out is a view of a buffer that the next call writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("work", torch.zeros(1, 20, C))

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        size = cache.size(1) + x.size(1)
        self.work[:, :size] = torch.cat([cache, x.tanh()], 1)  # type: ignore[operator]
        seen = self.work[:, :size]  # type: ignore[index]
        return attend(x, seen), seen[:, -6:]


class EveryThird(nn.Module):
    """Keeps what no retention policy says."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat([cache, x.tanh()], 1)
        return attend(x, seen), seen[:, ::2] if seen.size(1) > 8 else seen


class Conditioned(nn.Module):
    """No state: what is returned begins with an argument that the caller makes anew."""

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        return torch.cat([prompt, x.tanh()], 1)[:, -6:]


class NothingAtFirst(nn.Module):
    def forward(self, x: Tensor, cache: Tensor | None = None) -> tuple[Tensor, Tensor]:
        seen = x.tanh() if cache is None else torch.cat([cache, x.tanh()], 1)
        return attend(x, seen), seen[:, -6:]


class Reversed(nn.Module):
    """The fresh frames go in backwards, which no policy speaks of."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat([cache, x.flip(1)], 1)
        return attend(x, seen), seen[:, -6:]


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.zeros(C + 1, C)


class InDeque(nn.Module):
    """Frames in a deque, one by one, beside a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.line = deque([torch.zeros(1, C)] * 3, maxlen=3)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        self.line.extend(x.unbind(1))
        seen = torch.cat([cache, x.tanh()], 1)
        return attend(x, seen) + torch.stack(list(self.line)).mean(0), seen[:, -6:]


class WrittenParameter(nn.Module):
    """The state is a parameter: its memory is the user's own, which copies share."""

    def __init__(self, *, rebound: bool) -> None:
        super().__init__()
        self.rebound, self.state = rebound, nn.Parameter(torch.zeros(1, 3, C), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.state, x], 1)
        if self.rebound:
            self.state.data = joined[:, -3:]
        else:
            self.state.copy_(joined[:, -3:])
        return joined.mean(1)
