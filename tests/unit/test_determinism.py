"""The pinned protocol: what it sets, that it puts everything back, and that it complains when it comes too late."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

import cadence_fx
from cadence_fx import deterministic
from cadence_fx._torch_switches import Determinism
from cadence_fx.determinism import VARIABLE
from cadence_fx.errors import CadenceError, SetTooLate


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    before = Determinism.now()
    yield
    before.apply()


def settings() -> tuple[Determinism, str | None]:
    return Determinism.now(), os.environ.get(VARIABLE)


def test_inside_everything_is_pinned_and_outside_it_is_as_before() -> None:
    torch.backends.cudnn.benchmark = True
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    before = settings()
    with deterministic():
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
        assert torch.backends.mkldnn.deterministic
        assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        assert os.environ[VARIABLE] == ":4096:8"
    assert settings() == before
    assert before[0].benchmark and not before[0].fill and not before[0].algorithms


def test_it_nests_and_survives_exceptions() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    outside = settings()
    with pytest.raises(ZeroDivisionError), deterministic(warn_only=True):
        torch.backends.cudnn.benchmark = True  # the user's own business
        middle = settings()
        with pytest.raises(KeyError), deterministic():
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert not torch.backends.cudnn.benchmark
            raise KeyError
        assert settings() == middle
        raise ZeroDivisionError
    assert settings() == outside


def test_as_a_decorator() -> None:
    @deterministic()
    def inside() -> bool:
        return torch.are_deterministic_algorithms_enabled()

    before = settings()
    assert inside() and inside()
    assert settings() == before


def test_an_operator_without_a_deterministic_algorithm_raises_or_warns() -> None:
    x, index = torch.zeros(3), torch.tensor([0, 0])

    def undetermined() -> torch.Tensor:
        return x.put_(index, torch.ones(2))

    with deterministic(), pytest.raises(RuntimeError, match="deterministic"):
        undetermined()
    with deterministic(warn_only=True), pytest.warns(UserWarning, match="deterministic"):
        undetermined()


@pytest.mark.parametrize("found", [None, ":4096:2"])
def test_too_late(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if found is not None:
        monkeypatch.setenv(VARIABLE, found)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    before = settings()
    with pytest.raises(SetTooLate) as caught, deterministic():
        raise AssertionError("entered")
    assert isinstance(caught.value, CadenceError) and caught.value.found == found
    assert VARIABLE in str(caught.value) and ":4096:8" in str(caught.value)
    assert settings() == before


@pytest.mark.parametrize("found", [":4096:8", ":16:8"])
def test_in_time_when_the_process_was_started_with_it(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, found)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with deterministic():
        assert os.environ[VARIABLE] == found
    assert os.environ[VARIABLE] == found


def test_a_setting_that_cublas_has_read_stays_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a second stretch in the same process would be taken for one that comes too late."""
    with deterministic():
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert os.environ[VARIABLE] == ":4096:8"
    with deterministic():
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_threads_whose_stretches_overlap_share_it_until_the_last_one_leaves() -> None:
    before = settings()
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with deterministic():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with deterministic():
        thread.start()
        assert entered.wait(10)
    assert torch.are_deterministic_algorithms_enabled() and os.environ[VARIABLE] == ":4096:8"
    leave.set()
    thread.join()
    assert settings() == before


def test_a_stream_under_the_protocol_and_outside_it() -> None:
    """The switches are part of the signature: a class captured outside does not serve a call inside."""
    replay = cadence_fx.ExactShapeReplay(lambda x: x * 2)
    x = torch.randn(3)
    replay(x)
    with deterministic():
        replay(x)
    assert len(replay.classes) == 2
