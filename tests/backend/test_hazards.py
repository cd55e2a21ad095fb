"""Code that stops other recorders, in its usual spellings: exact, replayed after warm-up, and nothing missed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cadence_fx
from cadence_fx import Clock, Contract, KeepLast, Region
from cadence_fx.errors import CadenceError, NotServed, WrongModule
from tests.backend.test_host_side import CONTRACT, Play
from tests.harness import compile_with, counts
from tests.toys import C, DoubleAttention

MODES = [torch.no_grad, torch.inference_mode]


class Base(DoubleAttention):
    def state(self) -> dict[str, object]:
        """Numbers that calls leave on the module."""
        return {k: v for k, v in vars(self).items() if isinstance(v, int) and not k.startswith("_")}


def table(rows: int, device: torch.device | None = None) -> Tensor:
    return torch.sin(torch.arange(rows * C, dtype=torch.float64, device=device)).view(1, rows, C)


class BuiltOnce(Base):
    def __init__(self) -> None:
        super().__init__()
        self.pe: Any = None

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        rows = cache.size(1) + x.size(1)
        if self.pe is None or self.pe.size(1) < rows:
            self.pe = table(8, x.device)
        return self.attend(x + self.pe[:, rows - 2 : rows], cache)


class BuiltLonger(Base):
    """Rebuilt whenever it is too short."""

    def __init__(self) -> None:
        super().__init__()
        self.pe: Any = None

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        rows = cache.size(1) + x.size(1)
        if self.pe is None or self.pe.size(1) < rows:
            self.pe = table(rows, x.device)
        return self.attend(x + self.pe[:, rows - 2 : rows], cache)


class RegisteredLate(Base):
    pe: Tensor

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        if not hasattr(self, "pe"):
            self.register_buffer("pe", table(8, x.device))
        return self.attend(x + self.pe[:, : x.size(1)], cache)


class Rebinds(Base):
    """A counter in a tensor, a new one in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = torch.zeros((), dtype=torch.int64)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        self.steps = self.steps + 1
        return self.attend(x * self.steps, cache)


class CountsInPlace(Base):
    def __init__(self) -> None:
        super().__init__()
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.pe: Tensor
        self.register_buffer("pe", table(100))

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.pe[:, self.steps + torch.arange(2, device=x.device)]
        self.steps += 2
        return self.attend(x + rows, cache)


class Number(Base):
    def __init__(self) -> None:
        super().__init__()
        self.t = 0
        self.pe: Tensor
        self.register_buffer("pe", table(100))


class Counts(Number):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        self.t += x.shape[1]
        return self.attend(x, cache)


class Slices(Number):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.pe[:, self.t : self.t + x.shape[1]]
        self.t += x.shape[1]
        return self.attend(x, cache)


class BuiltOnceSliced(Base):
    """A table built in the first call, read where a counter says."""

    def __init__(self) -> None:
        super().__init__()
        self.t = 0
        self.pe: Any = None

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        if self.pe is None:
            self.pe = table(100, x.device)
        x = x + self.pe[:, self.t : self.t + 2]
        self.t += 2
        return self.attend(x, cache)


class Turns(Number):
    """A position in a ring."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        at = (self.t * 2) % 8
        self.t += 1
        return self.attend(x + self.pe[:, at : at + 2] * self.pe.narrow(1, at, 2), cache)


class Ranges(Number):
    """Positions made of the counter, gathered from a table."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        at = torch.arange(self.t, self.t + 2, device=x.device)
        self.t += 2
        return self.attend(x + self.pe[:, at], cache)


class Branches(Number):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        if self.t == 0:
            x = x * 2
        self.t += 1
        return self.attend(x, cache)


class Dropouts(Base):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Sequential(
            nn.Dropout(0.3), nn.Dropout(0.0), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2), nn.Dropout1d(0.2)
        )
        self.inplace = nn.Dropout(0.3, inplace=True)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return self.attend(self.inplace(self.drop(x) * 2), cache)


class DropsNothing(Base):
    """In training mode, with a probability of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)
        self.attention = nn.MultiheadAttention(C, 2, dropout=0.0, batch_first=True, dtype=torch.float64)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return self.attend(self.drop(self.attention(x, x, x)[0]), cache)


class Parametrised(Base):
    def __init__(self) -> None:
        super().__init__()
        new, old = torch.nn.utils.parametrizations, torch.nn.utils
        with pytest.warns(FutureWarning):
            self.conv = old.weight_norm(nn.Conv1d(C, C, 1, dtype=torch.float64))
        self.layers = nn.Sequential(
            new.weight_norm(nn.Linear(C, C, dtype=torch.float64)),
            new.spectral_norm(nn.Linear(C, C, dtype=torch.float64)),
            old.spectral_norm(nn.Linear(C, C, dtype=torch.float64)),
        )

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return self.attend(self.layers(self.conv(x.transpose(1, 2)).transpose(1, 2)), cache)


class Orthogonal(Base):
    """Its matrix exponential copies from the host in the midst of its kernel, on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.utils.parametrizations.orthogonal(nn.Linear(C, C, dtype=torch.float64))

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return self.attend(self.layer(x), cache)


class NumpyValues(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = np.float64(0.5)
        self.shift: Any = np.int64(2)
        self.eighth: Any = np.float32(0.125)
        self.ramp = np.arange(C, dtype=np.float64)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return self.attend(x * self.scale + self.shift * self.eighth + torch.from_numpy(self.ramp).to(x.device), cache)


class MadeInside(Base):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        here: dict[str, Any] = {"device": x.device, "dtype": x.dtype}
        x = x + torch.tensor(0.5, **here) + torch.zeros(C, **here) + torch.arange(C, **here)
        return self.attend(x * torch.tensor([0.5] * C, **here) + torch.full((C,), 2.0, **here), cache)


ABSORBED = [
    BuiltOnce, BuiltLonger, RegisteredLate, Rebinds, CountsInPlace, Counts, Slices, BuiltOnceSliced, Turns, Ranges,
    Branches, Dropouts, Parametrised, Orthogonal, NumpyValues, MadeInside,
]  # fmt: skip


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("module", ABSORBED, ids=lambda module: module.__name__)
@pytest.mark.filterwarnings("ignore:dropout")
def test_absorbed(module: type[Base], mode: type) -> None:
    """Two turns: what the first builds, the second finds; and every call is a replay."""
    with mode():
        play = Play(module().eval())
        assert play.module.state() == play.eager.state()
        for turn in range(2):
            if turn:
                play.cache = play.noise()
                play.twin = play.cache.clone()
            play.call(6)
            assert play.module.state() == play.eager.state()
        assert play.missed() == {} and play.late() == 0
        assert counts(play.step)["replays"] == 12


def test_training_mode_that_drops_nothing() -> None:
    torch.set_grad_enabled(False)
    play = Play(DropsNothing().train())
    play.call(8)
    assert play.missed() == {} and play.late() == 0


def test_weights_of_a_parametrisation_are_read_in_every_call() -> None:
    torch.set_grad_enabled(False)
    play = Play(Parametrised().eval())
    play.call(3)
    play.both(lambda m: m.conv.weight_g.mul_(1.5))
    play.both(lambda m: m.layers[0].parametrizations.weight.original0.mul_(0.5))
    play.call(3)
    assert play.missed() == {}


class Multiplies(Number):
    """The counter takes part in the arithmetic: no view, no range."""

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        self.t += 2
        return self.attend(x * self.t, cache)


def test_counter_that_is_computed_with_runs_eager_and_is_counted() -> None:
    torch.set_grad_enabled(False)
    play = Play(Multiplies())
    play.call(12)
    missed = play.missed()
    assert missed.keys() == {"scalar"} and missed["scalar"] >= 6
    assert any("self.t" in detail for detail in counts(play.step)["details"]["scalar"])


class NumpySize(Base):
    def __init__(self) -> None:
        super().__init__()
        self.parts: Any = np.prod([2, 2])

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return self.attend(x.view(1, 2, self.parts, 2).view(1, 2, C), cache)


class NumpyFactor(Base):
    def __init__(self) -> None:
        super().__init__()
        self.up: Any = np.prod([2, 2])

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        y = nn.functional.interpolate(x, scale_factor=1 / self.up, mode="linear")
        return self.attend(x + y.sum(), cache)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_numpy_number_as_a_size_is_refused_by_name(mode: type) -> None:
    with mode():
        play = Play(NumpySize())
        play.call(4)
        details = counts(play.step)["details"]
        assert set(play.missed()) <= {"not_traceable", "sealed"} and sum(play.missed().values()) == 4
        assert any("self.parts holds numpy values" in detail for detail in details["not_traceable"])
        with pytest.raises(CadenceError, match=r"Numpy numbers, .*: self\.up"):
            cadence_fx.warm_up(compile_with(NumpyFactor(), CONTRACT), Play.noise(), Play.noise())


class ReadsCounter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.steps = torch.zeros(1, dtype=torch.int64)
        self.pe = table(100)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        at = int(self.steps.item())  # the line
        return self.attend(x + self.pe[:, at : at + 2], cache)


class SeedsInside(Base):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(device=x.device).manual_seed(3)
        return self.attend(x + torch.randn(C, generator=generator, dtype=x.dtype), cache)


@pytest.mark.parametrize("module, line", [(ReadsCounter, "at = int(self.steps.item())"), (SeedsInside, "")])
def test_what_breaks_the_graph_is_named_with_its_line(module: type[Base], line: str) -> None:
    torch.set_grad_enabled(False)
    with pytest.raises(NotServed, match=r"Dynamo breaks the graph: .*test_hazards\.py:\d+") as caught:
        cadence_fx.warm_up(compile_with(module(), CONTRACT), Play.noise(), Play.noise())
    number = int(str(caught.value).split("test_hazards.py:")[1].split(";")[0].split(".")[0])
    with open(__file__) as source:
        assert line in source.readlines()[number - 1]


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


class Loops(nn.Module):
    """A break in a loop: Dynamo gives the whole method up, and compiles what it calls by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.hist = Half(), torch.zeros(1, 2, C)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(2):
            x = self.inner(x)
            x = x / float(x.sum())  # the line
        self.hist = torch.cat([self.hist, x], 1)[:, -6:]
        return x + self.hist.sum(), torch.cat([cache, x], 1)[:, -6:]


def kept(**place: Any) -> Region:
    return Region(next(iter(place.values())), axis=1, clock="frame", start=2, retention=KeepLast(6), **place)


HIST, CACHE = kept(attribute="hist"), kept(argument="cache", result=1)


@pytest.mark.parametrize("regions, error", [([HIST], WrongModule), ([HIST, CACHE], WrongModule), ([CACHE], NotServed)])
def test_a_module_that_dynamo_gives_up_is_not_blamed_on_its_contract(
    regions: list[Region], error: type[CadenceError]
) -> None:
    torch.set_grad_enabled(False)
    torch._dynamo.reset()
    contract, given = Contract([Clock("frame", 2)], regions), (torch.randn(1, 2, C), torch.randn(1, 2, C))
    with pytest.raises(error, match=r"breaks the graph.*test_hazards\.py:\d+") as caught:
        cadence_fx.warm_up(compile_with(Loops(), contract), *given)
    number = int(str(caught.value).split("test_hazards.py:")[1].split(")")[0].split(".")[0])
    with open(__file__) as source:
        assert "x / float(x.sum())  # the line" in source.readlines()[number - 1]
    if error is WrongModule:  # without a warm-up, the line that is running is told
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"hist of Loops.*in forward at .*test_hazards\.py:\d+"):
            compile_with(Loops(), contract)(*given)


def test_a_warm_up_that_dynamo_compiles_nothing_for() -> None:
    torch.set_grad_enabled(False)
    step = compile_with(BuiltOnce(), CONTRACT)
    with torch.compiler.set_stance("force_eager"), pytest.raises(NotServed, match="force_eager") as caught:
        cadence_fx.warm_up(step, Play.noise(), Play.noise())
    assert caught.value.reason == "dynamo_off"
    cadence_fx.warm_up(step, Play.noise(), Play.noise())
