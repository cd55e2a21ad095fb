"""docs/adapters.md: its tables are what the adapters make, the two lines of each family run, and adapters are short."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import cadence_fx
from bench import contracts, vendor
from bench.vendor import personaplex
from cadence_fx import adapters
from cadence_fx.adapters import front

PAGE = contracts.PAGE.read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.+?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
LONGEST = 314  # executable lines of the paper's longest adapter

needs_moshi = pytest.mark.skipif(not vendor.available(vendor.MOSHI), reason="moshi is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:.*autocast")


@needs_moshi
def test_the_tables_are_what_the_adapters_make() -> None:
    assert contracts.written(PAGE, contracts.tables(PAGE)) == PAGE, "run python -m bench.contracts --write"
    assert PAGE.count("| refused |") == 1 and "ceil((2,451 - 151) / 25) + 1 = 93, and 64 are allowed" in PAGE
    for family in adapters.families():
        assert f"\n| {family.name} | {family.models} |" in PAGE
        assert f"\n| {family.name} | `" in PAGE


def test_no_adapter_is_longer_than_the_papers() -> None:
    for family in adapters.families():
        own = sum(map(contracts.lines_of, family.modules))
        assert own <= LONGEST, f"{family.name}: {own} executable lines of its own"
        assert all(contracts.lines_of(module) <= LONGEST for module in family.shared)
    counted = {module for family in adapters.families() for module in (*family.modules, *family.shared)}
    common = {"__init__", "base", "families", "front", "registry", "readers"}
    modules = {path.stem for path in (contracts.ROOT / "adapters").glob("*.py")}
    assert counted == {
        name for name in modules - common if not name.endswith("config")
    }  # those read files, and bind nothing


def test_lines_are_those_on_which_a_statement_begins() -> None:
    source = '"""Text."""\n# comment\nx = [\n    1,\n]\ndef f():\n    """More."""\n    if x:\n        return x\n'
    assert contracts.executable_lines(source) == 4


def test_a_page_without_marks_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no"):
        contracts.written("# Families", "table")


def test_the_adapter_from_scratch_has_less_than_sixty_lines() -> None:
    (block,) = [each for each in re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL) if "(adapters.Binding)" in each]
    assert len([line for line in block.splitlines() if line.strip()]) < 60


OBJECTS: dict[str, tuple[vendor.Package, Callable[[], dict[str, Any]]]] = {
    "Token2Wav: MiniCPM-o 4.5, Step-Audio 2": (
        vendor.STEPAUDIO2,
        lambda: {"token2wav": vendor.build_token2wav(vendor.TINY)},
    ),
    "Lychee-FD": (vendor.STEPAUDIO2, lambda: {"token2wav": vendor.build_lychee(vendor.TINY)}),
    "Moshi and its codec, Mimi": (
        vendor.MOSHI,
        lambda: {"mimi": vendor.build_mimi(vendor.SMALL_MIMI), "lm_gen": vendor.build_lm_gen(vendor.SMALL_MOSHI)},
    ),
    "PersonaPlex": (
        vendor.PERSONAPLEX,
        lambda: {
            "mimi": personaplex.build_mimi(personaplex.SMALL_PERSONA_MIMI),
            "lm_gen": personaplex.build_lm_gen(personaplex.SMALL_PERSONA),
        },
    ),
    "Freeze-Omni": (vendor.FREEZE_OMNI, lambda: {"tts": vendor.build_generator(vendor.SMALL_TICODEC)}),
}


@pytest.mark.parametrize("title", OBJECTS)
def test_the_two_lines_of_a_family_run_as_they_stand(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On small objects; the captures themselves are tested elsewhere, and only counted here."""
    package, build = OBJECTS[title]
    if not vendor.available(package):
        pytest.skip(f"{package.distribution} is not available")
    warmed: list[Any] = []
    monkeypatch.setattr(front, "warm_up", lambda step, *given: warmed.append(step))
    (lines,) = re.findall(r"```py\n(.+?)```", SECTIONS[title], re.DOTALL)
    assert len(lines.splitlines()) == 2
    names: dict[str, Any] = {"cadence_fx": cadence_fx, "adapters": adapters, **build()}
    exec(lines, names)
    bound = [each for each in names.values() if type(each) is adapters.Bound]
    assert set().union(*(each.binding.compiled().values() for each in bound)) == set(warmed)
    for each in bound:
        adapters.unbind(each)
