"""Contract files with bytes: what is written is planned, and whatever is wrong is refused by its field."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cadence_fx._units import counted, parse_size, size_text
from cadence_fx._yaml import MAX_CHARACTERS, yaml_data
from cadence_fx.contract import Contract
from cadence_fx.errors import CadenceError, ContractError, ContractFileError
from cadence_fx.footprint import Footprint
from cadence_fx.planned import load_callable, read_table
from cadence_fx.planner import plan
from cadence_fx.serialize import MAX_BYTES

TEXT = """\
[[clocks]]
name = "frame"
stride = 2

[[clocks]]
name = "layer"
period = 3

[[regions]]
name = "cache"
argument = "cache"
axis = [0, -1]
clock = ["layer", "frame"]
retention = { policy = "KeepLast", n = 6 }

[[inputs]]
argument = "x"
axis = 1
clock = "frame"

[plan]
weights = "1.5 KiB"
operators = 100

[plan.regions.cache]
shape = ["layer", 5, "frame"]
dtype = "bfloat16"
stock = [8, 5, 100]
instances = 2

[plan.inputs.x]
shape = [1, "frame"]

[plan.inputs.scale]
shape = []
dtype = "float64"
"""


def changed(old: str, new: str) -> str:
    assert TEXT.count(old) == 1
    return TEXT.replace(old, new)


def written(folder: Path, text: str, name: str = "decoder.toml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def as_yaml(value: Any, indent: str = "") -> str:
    """Data as block YAML; JSON's scalars and flow lists are YAML, too."""
    if isinstance(value, dict):
        return "".join(f"{indent}{key}:{_below(item, indent)}" for key, item in value.items())
    return "".join(f"{indent}-\n{as_yaml(item, indent + '  ')}" for item in value)


def _below(item: Any, indent: str) -> str:
    nested = isinstance(item, dict) or (isinstance(item, list) and item and isinstance(item[0], dict))
    return f"\n{as_yaml(item, indent + '  ')}" if nested else f" {json.dumps(item)}\n"


@pytest.mark.parametrize("suffix", ["toml", "json", "yaml", "yml"])
def test_every_format_gives_the_same_plan(suffix: str, tmp_path: Path) -> None:
    data = tomllib.loads(TEXT)
    text = {"toml": TEXT, "json": json.dumps(data)}.get(suffix) or as_yaml(data)
    report = plan(written(tmp_path, text, f"decoder.{suffix}"))
    region = report.region("decoder", "cache")
    assert region.bytes == 3 * 5 * 6 * 2 * 2 and region.stock_bytes == 8 * 5 * 100 * 2 * 2
    assert report.weights == 1536 and report.callables[0].operators == 100
    assert report.staging_bytes == 4 * (2 * 4 + 8)


def test_serving_reads_the_same_file_without_its_plan(tmp_path: Path) -> None:
    path = written(tmp_path, TEXT)
    assert Contract.load(path) == load_callable(path).callables[0].contract


@pytest.mark.parametrize(
    "old, new, told",
    [
        ("[plan.inputs.x]", "[plan.input.x]", "field 'plan': 'input' is not a field; did you mean 'inputs'?"),
        ("instances = 2", "instance = 2", "did you mean 'instances'?"),
        ("instances = 2", "instances = 0", "field 'plan.regions.cache.instances': expected at least 1, found 0"),
        ("[plan.regions.cache]", "[plan.regions.cahce]", "there is no region 'cahce' (known: 'cache'); did you mean"),
        ('dtype = "bfloat16"', 'dtype = "bfloat61"', "did you mean 'bfloat16'?"),
        ('dtype = "bfloat16"', "dtype = 3", "there is no dtype '3'"),
        ('["layer", 5, "frame"]', '["layer", 5]', "axis 1: expected 'frame', found 5"),
        ('["layer", 5, "frame"]', '["frame", 5, "layer"]', "axis 0: expected 'layer', found 'frame'"),
        ('["layer", 5, "frame"]', '["layer", "frame", "frame"]', "axis 1: expected a number, found 'frame'"),
        ('["layer", 5, "frame"]', '["layer", 5.5, "frame"]', "expected a whole number, found 5.5"),
        ('["layer", 5, "frame"]', '["layer", -5, "frame"]', "expected at least 0, found -5"),
        ('["layer", 5, "frame"]', f'["layer", {1 << 62}0, "frame"]', "comes to more than 4,611,686,018,427,387,904"),
        ('["layer", 5, "frame"]', '"layer"', "expected sizes in a list"),
        ('["layer", 5, "frame"]', str([1] * 65), "at most 64 axes, found 65"),
        ("stock = [8, 5, 100]", 'stock = [8, 5, "frame"]', "what is allocated is a number, found 'frame'"),
        ('shape = [1, "frame"]', "shape = [1, 2]", "field 'plan.inputs.x.shape': axis 1: expected 'frame', found 2"),
        ('shape = [1, "frame"]', "", "field 'plan.inputs.x.shape': this field is missing"),
        ('weights = "1.5 KiB"', 'weights = "1.5 apples"', "field 'plan.weights': expected a size such as 80GiB"),
        ('weights = "1.5 KiB"', "weights = -3", "field 'plan.weights': expected at least 0, found -3"),
        ("operators = 100", "operators = 0", "expected at least 1, found 0"),
        ("stride = 2", "stride = 0", "expected at least 1, found 0"),
        ("stride = 2", "stride = 2.5", "expected a whole number, found 2.5"),
        ("stride = 2", "strid = 2", "did you mean 'stride'?"),
        ("period = 3", 'of = "frame"\nrate = "1/3"', "2 ticks of 'frame' at rate 1/3 are not a whole number"),
        ("period = 3", 'of = "frame"\nrate = "1/0"', "expected a ratio"),
        ("[plan]", "[plan]\n[plan]", "malformed TOML"),
    ],
)
def test_what_is_wrong_is_refused_by_its_field(old: str, new: str, told: str, tmp_path: Path) -> None:
    path = written(tmp_path, changed(old, new))
    with pytest.raises(ContractFileError) as error:
        plan(path)
    assert str(error.value).startswith(f"{path}: ") and told in str(error.value)


def leaves(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything in nested tables and lists."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(found for key, item in inner for found in leaves(item, (*path, key)))]


def replaced(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[path[0]] = replaced(data[path[0]], path[1:], value)
    return copy


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400)
anything = st.recursive(
    scalars, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3)
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_in_any_place_is_planned_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    """No other exception, whatever the file says; and whatever is planned can be told."""
    good = tomllib.loads(TEXT)
    for _ in range(2):
        good = replaced(good, data.draw(st.sampled_from(leaves(good))), data.draw(anything))
    try:
        report = plan(written(tmp_path, json.dumps(good), "any.json"))
    except CadenceError as error:
        assert len(str(error)) < 5000
        return
    assert str(report) and json.dumps(report.as_dict())


@pytest.mark.parametrize("value", ["3", "[]", '"text"', "null"])
def test_what_is_no_table_is_refused(value: str, tmp_path: Path) -> None:
    for name in ("a.json", "a.yaml"):
        with pytest.raises(ContractFileError, match="expected a table, found"):
            read_table(written(tmp_path, value, name))
    data = tomllib.loads(TEXT)
    for place in ("regions", "inputs"):
        data["plan"] = {place: json.loads(value)}
        with pytest.raises(ContractFileError, match=f"field 'plan.{place}': expected a table"):
            plan(written(tmp_path, json.dumps(data), "b.json"))


def test_other_huge_and_absent_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractFileError, match="expected a .toml, a .json, a .yaml, a .yml file"):
        read_table(tmp_path / "a.pickle")
    with pytest.raises(ContractFileError, match="cannot be read"):
        read_table(tmp_path / "absent.yaml")
    with pytest.raises(ContractFileError, match="cannot be read"):
        (tmp_path / "folder.json").mkdir()
        read_table(tmp_path / "folder.json")
    with pytest.raises(ContractFileError, match="larger than 1,048,576 bytes"):
        read_table(written(tmp_path, "#" * (MAX_BYTES + 1), "huge.toml"))
    with pytest.raises(ContractFileError, match="longer than 65,536 characters"):
        read_table(written(tmp_path, "#" * (MAX_CHARACTERS + 1), "long.yaml"))
    many = {"clocks": [{"flush": list(range(1, 2001))}], "regions": [{}] * 1000, "inputs": [{}]}
    with pytest.raises(ContractFileError, match="2,000 flush lengths for 1,001 regions and inputs"):
        plan(written(tmp_path, json.dumps(many), "many.json"))
    with pytest.raises(ContractFileError, match="malformed JSON"):
        read_table(written(tmp_path, "[" * 100_000, "deep.json"))


@pytest.mark.parametrize(
    "text, told",
    [
        ("a: !!python/object/apply:os.system [echo]", "could not determine a constructor"),
        ("a: !!python/name:os.system", "could not determine a constructor"),
        ("a: !apply:os.system [echo]", "could not determine a constructor"),
        ("a: &x [1]\nb: *x", "line 2: aliases are not read"),
        ("a: 1\na: 2", "the key 'a' is given twice"),
        ("1: 2", "expected text as a key, found 1"),
        ("? [a, b]\n: 2", "expected text as a key"),
        ("a: [1", "while parsing"),
        ("a: \x00", "special characters are not allowed"),
        ("[" * 5000, ""),
    ],
)
def test_hostile_yaml_is_refused_and_nothing_is_called(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ContractFileError) as error:
        read_table(written(tmp_path, text, "a.yaml"))
    assert "malformed YAML" in str(error.value) and told in str(error.value)


def test_yaml_without_its_reader_tells_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ContractError, match="pip install pyyaml"):
        read_table(written(tmp_path, "a: 1", "a.yaml"))


def test_tags_of_classes_are_read_as_tables() -> None:
    assert yaml_data("a: !new:os.system\n  b: [1, 2.5, yes]\n  c: !name:x.Y {}\n") == {
        "a": {"b": [1, 2.5, True], "c": {}}
    }


@pytest.mark.parametrize(
    "text, count",
    [("4096", 4096), ("80GiB", 80 << 30), ("1.5 KiB", 1536), ("1.5 GB", 1_500_000_000), ("0", 0), ("7 b", 7),
     ("0.1MiB", 104857)],
)  # fmt: skip
def test_sizes_are_read(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "-1", "1e9", "80 GiBs", "GiB", "1.5.2", "3iB", "٣", "9" * 31])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size such as 80GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    "count, text",
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (1100 << 30, "1,100.0 GiB")],
)
def test_sizes_are_told(count: int, text: str) -> None:
    assert size_text(count) == text


def test_a_footprint_weighs_the_product_of_its_sizes() -> None:
    footprint = Footprint((2, "a", 3, "b"), "int64", stock=(2, 9, 3, 9), instances=5)
    assert footprint.nbytes({1: 7, -1: 0}) == 0 and footprint.nbytes({1: 7, 3: 11}) == 2 * 7 * 3 * 11 * 8 * 5
    assert footprint.stock_bytes == 2 * 9 * 3 * 9 * 8 * 5 and Footprint(()).nbytes({}) == 4
    footprint.check({1: "a", -1: "b"})
    with pytest.raises(ContractError, match="axis 4 follows 'a', and the shape has 4 axes"):
        footprint.check({4: "a"})


@pytest.mark.parametrize(
    "count, noun, text",
    [(1, "class", "1 class"), (0, "class", "0 classes"), (2001, "frame", "2,001 frames"), (3, "axis", "3 axes")],
)
def test_what_is_counted_agrees_with_its_number(count: int, noun: str, text: str) -> None:
    assert counted(count, noun) == text
