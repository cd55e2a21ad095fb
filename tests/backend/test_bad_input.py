"""A wrong declaration is an error from ``warm_up`` that names what is wrong."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cadence_fx
from cadence_fx.clock import Clock
from cadence_fx.contract import Contract, Input
from cadence_fx.errors import (
    AxisOutOfRange,
    CadenceError,
    ContractError,
    NotCompiled,
    RetentionMismatch,
    UnexplainedSize,
    UnknownArgument,
    UnusedClock,
    WrongModule,
)
from cadence_fx.retention import KeepLast, PromptPlusLast, Retention
from tests.harness import BACKEND, assert_same, compile_with, counts
from tests.streams import BY_NAME, kept
from tests.toys import AppendLast, B, C

FRAMES = Clock("frames", 3)


@pytest.fixture(autouse=True)
def _serving() -> None:
    torch.set_grad_enabled(False)


def refused(module: Any, contract: Any, *args: Any) -> CadenceError:
    """The error that compiling and warming up gives."""
    with pytest.raises(CadenceError) as caught:
        cadence_fx.warm_up(compile_with(module, contract), *args)
    return caught.value


def untyped(value: Any) -> Any:
    """A value that a type checker would refuse where it is used."""
    return value


def append_args(frames: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(B, 3, C), torch.randn(B, frames, C)


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: Clock("frames", -3), "stride"),
        (lambda: Clock("frames", untyped(2.5)), "stride"),
        (lambda: Clock("frames", True), "stride"),
        (lambda: KeepLast(-1), ""),
        (lambda: KeepLast(untyped("8")), ""),
        (lambda: PromptPlusLast(0, 0), ""),
        (lambda: kept("cache", 1, 9, KeepLast(8)), "start"),
        (lambda: kept("cache", 1, 2, untyped(8)), "retention"),
        (lambda: kept("cache", "1", 2, KeepLast(8)), "axis"),
        (lambda: Contract((FRAMES,), untyped({"cache": KeepLast(8)})), "regions"),
        (lambda: Contract((FRAMES,), (kept("cache", 1, 2, KeepLast(8), clock="frame"),)), "clock"),
        (lambda: Contract((Clock("a", 3), Clock("b", of="a", rate=-1)), ()), "rate"),
        (lambda: Contract((FRAMES, FRAMES), (kept("cache", 1, 2, KeepLast(8)),)), "clocks"),
    ],
)
def test_a_number_or_type_that_cannot_be(build: Any, field: str) -> None:
    with pytest.raises(ContractError) as caught:
        build()
    assert caught.value.field and field in caught.value.field


def test_a_clock_no_size_depends_on() -> None:
    with pytest.raises(UnusedClock, match="'idle'"):
        Contract((FRAMES, Clock("idle", 2)), (kept("cache", 1, 2, KeepLast(8)),))


@pytest.mark.parametrize("options", [{"contract": {"clocks": []}}, {"contrat": BY_NAME["AppendLast"].contract}])
def test_options_that_are_no_contract(options: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match="contract"):
        cadence_fx.warm_up(torch.compile(AppendLast(), backend=BACKEND, options=options), *append_args())


def test_no_contract_at_all() -> None:
    """Nothing says what is state: every call is eager, with that reason."""
    module = AppendLast()
    eager, step = copy.deepcopy(module), torch.compile(module, backend=BACKEND)
    (x, ours), calls = append_args(), 5
    theirs = ours
    for i in range(calls):
        (y, ours), (z, theirs) = step(x, ours), eager(x, theirs)
        assert_same(y, z, f"call {i}")
        assert_same(ours, theirs, f"state {i}")
    assert counts(step)["misses"] == {"no_contract": calls}


def test_verbs_on_something_else() -> None:
    for verb in (cadence_fx.warm_up, cadence_fx.report):
        with pytest.raises(NotCompiled, match="AppendLast"):
            verb(AppendLast())
    with pytest.raises(NotCompiled, match="AppendLast"), cadence_fx.audit(AppendLast()):
        pass


def test_an_argument_that_does_not_exist() -> None:
    region = kept("cache", 1, 2, KeepLast(9), argument="cahce")
    error = refused(AppendLast(), Contract((FRAMES,), (region,)), *append_args())
    assert isinstance(error, UnknownArgument)
    assert "'cahce'" in str(error) and "did you mean 'cache'" in str(error)


def test_an_input_that_does_not_exist() -> None:
    contract = Contract((FRAMES,), BY_NAME["AppendLast"].contract.regions, inputs=(Input("z", axis=1, clock="frames"),))
    assert isinstance(refused(AppendLast(), contract, *append_args()), UnknownArgument)


@pytest.mark.parametrize("axis", [3, -4])
def test_an_axis_out_of_range(axis: int) -> None:
    error = refused(AppendLast(), Contract((FRAMES,), (kept("cache", axis, 2, KeepLast(9)),)), *append_args())
    assert isinstance(error, AxisOutOfRange)
    assert error.axis == axis and error.shape == (B, 2, C)


def test_a_contract_for_another_module() -> None:
    error = refused(AppendLast(), BY_NAME["LayerAttributes"].contract, *append_args())
    assert isinstance(error, (WrongModule, UnknownArgument))
    assert "layers" in str(error)


def test_a_size_no_clock_explains() -> None:
    def f(x: Tensor, cache: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return x * mask.sum(), torch.cat([cache, x], 1)[:, -9:]

    mask = torch.randn(7)
    torch._dynamo.mark_dynamic(mask, 0)
    error = refused(f, BY_NAME["AppendLast"].contract, *append_args(), mask)
    assert isinstance(error, UnexplainedSize)
    assert error.accessor == "mask" and error.axis == 0


def test_a_state_that_was_not_declared() -> None:
    """The values grow with the keys, but only the keys are declared: the code fails at the second declared extent."""

    def f(x: Tensor, cache: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = torch.cat([cache, x], 1), torch.cat([values, x.tanh()], 1)
        return torch.softmax(x @ k.transpose(1, 2), -1) @ v, k[:, -9:], v[:, -9:]

    error = refused(f, BY_NAME["AppendLast"].contract, *append_args(), torch.randn(B, 2, C))
    assert isinstance(error, ContractError)
    assert "values" in str(error)


def test_a_start_state_of_another_extent() -> None:
    error = refused(AppendLast(), BY_NAME["AppendLast"].contract, *append_args(frames=4))
    assert isinstance(error, ContractError)
    assert "cache" in str(error) and "4" in str(error)


class Keeps(nn.Module):
    """Appends or prepends and keeps a slice: what the code says, against what is declared."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self.code = code

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        pieces = [x.tanh(), cache] if self.code.startswith("prepend") else [cache, x.tanh()]
        raw = torch.cat(pieces, 1)
        y = x + raw.sum(1, keepdim=True)
        if self.code == "append 6 then zeros":
            return y, F.pad(raw[:, -6:], (0, 0, 2, 0))
        return y, {"prepend": raw[:, :8], "append oldest": raw[:, :8], "append 6": raw[:, -6:]}[self.code]


@pytest.mark.parametrize(
    ("code", "declared", "shown"),
    [
        ("prepend", KeepLast(8), "append"),
        ("append oldest", KeepLast(8), "last 8"),
        ("append 6", KeepLast(8), "last 8"),
        ("append 6 then zeros", KeepLast(8), "last 8"),
        ("append oldest", PromptPlusLast(4, 4), "4"),
        ("prepend", PromptPlusLast(4, 4, "prepend"), "4"),
    ],
)
def test_a_retention_the_code_contradicts(code: str, declared: Retention, shown: str) -> None:
    error = refused(Keeps(code), Contract((FRAMES,), (kept("cache", 1, 5, declared),)), *append_args(frames=5))
    assert isinstance(error, RetentionMismatch)
    assert error.region == "cache"
    assert shown in str(error.declared) and str(error.found) and str(error.found) in str(error)
    assert str(error.declared) != str(error.found)
