"""Contract files: what is written reads back equal, and whatever is wrong is refused by name."""

from __future__ import annotations

import json
import tomllib
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadence_fx.clock import Clock
from cadence_fx.contract import Contract, Input, Region
from cadence_fx.errors import ContractFileError
from cadence_fx.retention import KeepLast, Pinned, PromptPlusLast, Ring
from cadence_fx.serialize import MAX_BYTES, dumps, from_dict, load, loads, to_dict

DECODER = Contract(
    [Clock("tokens", 25, lookahead=3, flush=[5, 28]), Clock("mel", of="tokens", rate=2), Clock("step", period=10)],
    [
        Region(
            "cache",
            argument="cache['att']",
            result="1['att']",
            axis=(0, -2),
            clock=("step", "mel"),
            start=302,
            retention=PromptPlusLast(302, 100, "prepend"),
        ),
        Region("half", attribute="layers.*.half", axis=1, clock="mel", growth=Fraction(1, 2), retention=KeepLast(80)),
    ],
    inputs=[Input("mel", axis=2, clock="mel", offset=6)],
    name="a decoder",
    max_classes=32,
)

TEXT = """\
name = "a decoder"
max_classes = 32

[[clocks]]
name = "tokens"
stride = 25
lookahead = 3
flush = [5, 28]

[[clocks]]
name = "mel"
of = "tokens"
rate = 2

[[clocks]]
name = "step"
period = 10

[[regions]]
name = "cache"
argument = "cache['att']"
result = "1['att']"
axis = [0, -2]
clock = ["step", "mel"]
start = 302
retention = { policy = "PromptPlusLast", prompt = 302, last = 100, order = "prepend" }

[[regions]]
name = "half"
attribute = "layers.*.half"
axis = 1
clock = "mel"
start = 0
growth = "1/2"
retention = { policy = "KeepLast", n = 80 }

[[inputs]]
argument = "mel"
axis = 2
clock = "mel"
offset = 6
"""


def test_the_toml_text() -> None:
    assert dumps(DECODER) == TEXT
    assert loads(TEXT) == DECODER


def test_both_formats_hold_the_same_data() -> None:
    assert json.loads(dumps(DECODER, "json")) == tomllib.loads(TEXT) == to_dict(DECODER)
    assert from_dict(to_dict(DECODER)) == loads(dumps(DECODER, "json"), "json") == DECODER


TEXTS = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=8)
KEYS = st.text(st.characters(categories=["L", "N", "P"], exclude_characters="[]"), max_size=4)
POLICIES = st.one_of(
    st.builds(KeepLast, st.integers(1, 10**30), st.sampled_from(["append", "prepend"])),
    st.builds(PromptPlusLast, st.integers(0, 9), st.integers(1, 9), st.sampled_from(["append", "prepend"])),
    st.builds(Pinned, st.integers(1, 9)),
    st.builds(Ring, st.integers(1, 9)),
)


@st.composite
def contracts(draw: st.DrawFn) -> Contract:
    base = Clock(
        "frames",
        draw(st.integers(1, 50)) * 12,
        lookahead=draw(st.integers(0, 5)),
        flush=[ticks * 12 for ticks in draw(st.lists(st.integers(1, 50), max_size=3))],
    )
    # Every advance is a multiple of 12, so that these ratios give whole numbers.
    ratios: st.SearchStrategy[int | Fraction] = st.sampled_from([1, 2, Fraction(1, 2), Fraction(3, 4), Fraction(5, 12)])
    clocks = [base, Clock("mel", of="frames", rate=draw(ratios)), Clock("p", period=4)]
    names = draw(st.lists(TEXTS.filter(lambda text: text.isprintable()), unique=True, max_size=3))
    places = [f"s[{number}][{draw(KEYS)!r}]" for number in range(len(names))]
    regions = [
        Region(
            name,
            argument=places[number] if number % 2 else None,
            attribute=None if number % 2 else places[number],
            result=draw(st.sampled_from([None, number, f"out.*.k[{number}]"])),
            axis=draw(st.sampled_from([(0, 1), (-1, -2), (2, 0)])),
            clock=("p", "frames"),
            growth=draw(ratios),
            retention=draw(POLICIES),
            lifetime=draw(st.sampled_from(["operator", "unit", "turn", "session", "process"])),
            placement=draw(st.sampled_from([None, "cuda:0"])),
        )
        for number, name in enumerate(names)
    ]
    inputs = [
        Input("x", axis=axis, clock="mel" if axis == 0 else "p", offset=draw(st.integers(0, 9))) for axis in (0, 1)
    ]
    inputs.append(Input("y", axis=-1, clock="frames"))
    return Contract(clocks, regions, inputs=inputs, name=draw(st.none() | TEXTS.filter(str.isprintable)))


@given(contracts(), st.sampled_from(["toml", "json"]))
def test_round_trip(contract: Contract, format: str) -> None:
    again = loads(dumps(contract, format), format)
    assert again == contract
    assert hash(again) == hash(contract)
    assert dumps(again, format) == dumps(contract, format)


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_files_by_suffix(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"contract{suffix}"
    DECODER.save(path)
    assert Contract.load(path) == Contract.load(str(path)) == DECODER
    assert path.read_bytes().endswith(b"\n") and b"\r" not in path.read_bytes()


@pytest.mark.parametrize("name", ["contract.yaml", "contract"])
def test_other_suffixes_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ContractFileError, match="expected toml or json"):
        DECODER.save(tmp_path / name)
    with pytest.raises(ContractFileError, match="expected toml or json"):
        Contract.load(tmp_path / name)
    assert not (tmp_path / name).exists()


def changed(old: str, new: str) -> str:
    assert old in TEXT
    return TEXT.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        (changed("stride =", "strid ="), "clocks[0].strid", "did you mean 'stride'?"),
        (changed("start =", "strat ="), "regions[0].strat", "did you mean 'start'?"),
        (changed("max_classes", "max_class"), "max_class", "did you mean 'max_classes'?"),
        (changed("max_classes", "zzz"), "zzz", "known: clocks, regions"),
        (changed("start =", "_frame ="), "regions[0]._frame", "not a field"),
        (changed("[[inputs]]", "[[input]]"), "input", "did you mean 'inputs'?"),
        (changed("prompt =", "promt ="), "regions[0].retention.promt", "did you mean 'prompt'?"),
        (changed("PromptPlusLast", "PromptAndLast"), "regions[0].retention.policy", "did you mean 'PromptPlusLast'?"),
        (changed('policy = "PromptPlusLast", ', ""), "regions[0].retention.policy", "found None"),
        (changed('policy = "PromptPlusLast"', "policy = 3"), "regions[0].retention.policy", "found 3"),
        (changed(", last = 100", ""), "regions[0].retention.last", "missing"),
        (changed("prompt = 302", "prompt = -1"), "regions[0].retention.prompt", "at least 0"),
        (changed("stride = 25", "stride = 0"), "clocks[0].stride", "at least 1"),
        (changed("stride = 25", 'stride = "25"'), "clocks[0].stride", "whole number"),
        (changed("stride = 25", "stride = nan"), "clocks[0].stride", "whole number"),
        (changed("start = 302", "start = 500"), "regions[0].start", "above the bound"),
        (changed("start = 302", "start = 2026-01-01"), "regions[0].start", "whole number"),
        (changed('"1/2"', '"1/0"'), "regions[1].growth", "ratio"),
        (changed('"1/2"', '"__import__"'), "regions[1].growth", "ratio"),
        (changed('"1/2"', "0.5"), "regions[1].growth", "Fraction"),
        (changed('argument = "mel"\n', ""), "inputs[0].argument", "missing"),
        (changed('clock = "mel"', 'clock = "mell"'), "clock", "did you mean 'mel'?"),
        ("clocks = 3", "clocks", "list of tables"),
        ("clocks = [3]", "clocks[0]", "expected a table"),
        ('name = "a"', "clocks", "at least one clock"),
        ("", "clocks", "at least one clock"),
    ],
)
def test_a_wrong_file_is_named_with_its_field(tmp_path: Path, text: str, field: str, words: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ContractFileError) as caught:
        load(path)
    assert caught.value.field == field
    assert caught.value.path == str(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def damaged(draw: st.DrawFn) -> dict[str, Any]:
    """The decoder's record with one value, at any depth, replaced by something else."""
    record: dict[str, Any] = json.loads(dumps(DECODER, "json"))
    inside: Any = record
    while True:
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        key = draw(st.sampled_from(keys))
        if not isinstance(inside[key], (dict, list)) or draw(st.booleans()):
            inside[key] = draw(JUNK)
            return record
        inside = inside[key]


@given(damaged())
def test_damaged_records_never_raise_anything_else(record: dict[str, Any]) -> None:
    try:
        contract = from_dict(record)
    except ContractFileError as error:
        assert error.field
    else:
        assert from_dict(to_dict(contract)) == contract


@pytest.mark.parametrize(
    ("text", "format"),
    [
        ("[[clocks", "toml"),
        ("a = 1\na = 2", "toml"),
        ("{", "json"),
        ("[1, 2]", "json"),
        ("null", "json"),
        ('{"clocks": [], "clocks": []}', "json"),
        ("[" * 100_000, "json"),
        ("a = " + "[" * 100_000, "toml"),
        ('{"max_classes": ' + "9" * 10_000 + "}", "json"),
    ],
)
def test_malformed_text_is_refused(text: str, format: str) -> None:
    with pytest.raises(ContractFileError):
        loads(text, format)


def test_unreadable_and_huge_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractFileError, match="cannot be read"):
        load(tmp_path / "absent.toml")
    (tmp_path / "bytes.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(ContractFileError, match="cannot be read"):
        load(tmp_path / "bytes.toml")
    (tmp_path / "huge.toml").write_text(TEXT + "#" * MAX_BYTES)
    with pytest.raises(ContractFileError, match="larger than 1,048,576 bytes"):
        load(tmp_path / "huge.toml")
    with pytest.raises(ContractFileError, match="expected toml or json"):
        loads("", "yaml")
