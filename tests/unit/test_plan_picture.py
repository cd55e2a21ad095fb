"""Pictures of plans: the same bytes each time, and what they show is what the plan says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cadence_fx.adapters.readers import deployment
from cadence_fx.deployment import Outside, PlannedCallable
from cadence_fx.errors import NoPicture
from cadence_fx.planner import plan

pytest.importorskip("matplotlib")


def test_a_picture_names_what_is_planned(tmp_path: Path) -> None:
    report = plan(deployment("minicpm-o"))
    for name in ("first.svg", "second.svg"):
        report.picture(tmp_path / name)
    text = (tmp_path / "first.svg").read_text()
    assert text == (tmp_path / "second.svg").read_text()
    assert text.startswith("<?xml") and len(text) < 150_000
    for words in ("backbone.kv_cache, bound 8,000", "2,001, too wide", "1, traffic-dependent", "3, captured",
                  "token2wav.flow.workspace", "extents over the calls of a turn"):  # fmt: skip
        assert words in text
    report.picture(tmp_path / "third.png")
    assert (tmp_path / "third.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["lychee-fd", "moshi"])
def test_state_without_a_bound_and_of_one_extent_can_be_drawn(name: str, tmp_path: Path) -> None:
    report = plan(deployment(name))
    report.picture(tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text()
    assert all(each.name in text for each in report.callables)


def test_the_picture_in_the_docs_shows_what_is_planned() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/plan.svg").read_text()
    for each in plan(deployment("minicpm-o")).callables:
        assert each.name in text and f" {each.classes:,}, {each.verdict.word}" in text


def test_a_plan_without_bytes_and_with_billions_of_classes_can_be_drawn(tmp_path: Path) -> None:
    report = plan(PlannedCallable("c", outside=(Outside("kv", stride=1, start=0, bound=10**12),)))
    report.picture(tmp_path / "plan.svg")
    assert "1,000,000,000,001, too wide" in (tmp_path / "plan.svg").read_text()


def test_what_cannot_be_drawn_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = plan(deployment("freeze-omni"))
    with pytest.raises(NoPicture, match=r"plan.pdf: a picture is a .png or .svg file"):
        report.picture(tmp_path / "plan.pdf")
    with pytest.raises(NoPicture, match="cannot be written"):
        report.picture(tmp_path / "absent" / "plan.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NoPicture, match="pip install matplotlib"):
        report.picture(tmp_path / "plan.svg")
