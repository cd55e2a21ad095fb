"""Errors: stable reasons, the facts in the message and on the object, and survival of pickling."""

from __future__ import annotations

import copy
import pickle
import re

import pytest

from cadence_fx import errors
from cadence_fx.errors import CadenceError, ContractError

# One example of every class, with the words its message must hold: what was declared, found, and what to do.
EXAMPLES: list[tuple[CadenceError, str, list[str]]] = [
    (ContractError("too big", field="start", region="cache"), "bad_contract", ["cache", "start", "too big"]),
    (errors.UnknownState("cahe", ["cache"]), "unknown_state", ["'cahe'", "'cache'"]),
    (errors.UnknownState("hist", []), "unknown_state", ["setting the attribute"]),
    (errors.UnknownArgument("cahce", ["cache", "x"]), "unknown_argument", ["'cahce'", "did you mean 'cache'?", "'x'"]),
    (errors.AxisOutOfRange("cache", 4, (1, 8, 50)), "axis_out_of_range", ["axis 4", "3 dimensions", "-3 to 2"]),
    (errors.UnusedClock("frames"), "unused_clock", ["'frames'", "Remove it"]),
    (
        errors.UnexplainedSize("mask", 1, "s7", ["frames"], location="model.py:12"),
        "unexplained_size",
        ["axis 1", "'mask'", "s7", "frames", "model.py:12", "Declare"],
    ),
    (
        errors.RetentionMismatch("cache", "last 8, appended", "last 8, prepended", "model.py:9"),
        "retention_mismatch",
        ["'cache'", "last 8, appended", "last 8, prepended", "model.py:9", "Correct"],
    ),
    (errors.WrongModule("vocoder", "a Decoder", "a Linear"), "wrong_module", ["'vocoder'", "a Decoder", "a Linear"]),
    (errors.ContractFileError("a.toml", "no", field="strid"), "bad_contract_file", ["a.toml", "'strid'", "no"]),
    (
        errors.ExampleFailed("the call raised ValueError: no", "model.py:7"),
        "example_failed",
        ["ValueError: no", "model.py:7"],
    ),
    (
        errors.CatalogTooWide(2001, 64, "ceil(2,000 / 1) + 1 = 2,001"),
        "catalog_too_wide",
        ["2,001 classes", "64", "ceil(2,000 / 1) + 1", "max_classes"],
    ),
    (errors.CatalogTooWide(900, 64, "30 x 30", exact=False), "catalog_too_wide", ["more than 64", "at most 900"]),
    (errors.CatalogMismatch(["a", "b"]), "catalog_mismatch", ["2 reachable", "first: a", "flush lengths"]),
    (
        errors.WeightsWritten(["layers.0.weight"], 256 << 20),
        "weights_written",
        ["'layers.0.weight'", "256 MiB", "Load the weights again"],
    ),
    (
        errors.NotServed("frames +3: cache 2 -> 5", "requires_grad", "an input requires grad"),
        "requires_grad",
        ["frames +3: cache 2 -> 5", "requires_grad", "an input requires grad"],
    ),
    (errors.StaleState("cache"), "stale_state", ["'cache'", "clone"]),
    (
        errors.AuditMismatch(
            "region 'cache'", call=7, axis=2, start=3, stop=5, expected=b"\x00\x01", actual=b"\x00\x02"
        ),
        "audit_mismatch",
        ["call 7", "region 'cache'", "[3:5] of axis 2", "00 01", "00 02"],
    ),
    (errors.NotCapturable("reads_host", "item", "m.py:3"), "reads_host", ["'item'", "m.py:3", "reads_host"]),
    (
        errors.SetTooLate("CUBLAS_WORKSPACE_CONFIG", ":4096:8", None),
        "set_too_late",
        ["CUBLAS_WORKSPACE_CONFIG=:4096:8", "not set", "before the first use of a GPU"],
    ),
    (errors.NotCompiled("report", print), "not_compiled", ["report()", "torch.compile", "builtin_function"]),
    (
        errors.PassFailed("fold", ["prove", "lift"], ValueError("bad node")),
        "pass_failed",
        ["'fold'", "ValueError: bad node", "prove, lift"],
    ),
]

IDS = [type(error).__name__ for error, _, _ in EXAMPLES]


@pytest.mark.parametrize(("error", "reason", "words"), EXAMPLES, ids=IDS)
def test_reason_and_message(error: CadenceError, reason: str, words: list[str]) -> None:
    assert error.reason == reason
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", error.reason)
    for word in words:
        assert word in str(error)


def test_every_class_has_an_example_and_its_own_reason() -> None:
    classes = {
        found
        for found in vars(errors).values()
        if isinstance(found, type) and issubclass(found, CadenceError) and found is not CadenceError
    }
    assert classes == {type(error) for error, _, _ in EXAMPLES}
    assert len({found.reason for found in classes}) == len(classes)


@pytest.mark.parametrize(("error", "reason", "words"), EXAMPLES, ids=IDS)
def test_errors_survive_pickling_and_copying(error: CadenceError, reason: str, words: list[str]) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.reason == reason
        assert vars(again) == vars(error)


def test_contract_mistakes_are_one_family() -> None:
    family = [
        errors.UnknownArgument,
        errors.AxisOutOfRange,
        errors.UnusedClock,
        errors.UnexplainedSize,
        errors.RetentionMismatch,
        errors.WrongModule,
        errors.ContractFileError,
    ]
    assert all(issubclass(kind, ContractError) for kind in family)
    assert not issubclass(errors.CatalogTooWide, ContractError)


def test_nearest_name() -> None:
    assert errors.nearest_name("frame", ["frames", "step"]) == "frames"
    assert errors.nearest_name("zzz", ["frames", "step"]) is None
    assert errors.unknown_name("clock", "x", []) == "there is no clock 'x' (known: none)"
