"""What README.md shows can be run as it stands, and the demo it leads with finds no differing byte."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

import cadence_fx as cadence
from bench import demo_vad
from bench.models import silero

pytestmark = pytest.mark.skipif(
    "cadence" not in torch.compiler.list_backends(), reason="the backend is named, which takes an installed entry point"
)

README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.fixture
def readme_example(tmp_path: Path) -> Path:
    blocks = re.findall(r"```python\n(.+?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 1
    path = tmp_path / "readme_example.py"
    path.write_text(blocks[0])
    return path


def test_the_example_replays_every_call_and_equals_eager(readme_example: Path) -> None:
    names = runpy.run_path(str(readme_example))
    assert len(names["contract"].catalog()) == 9
    counts = cadence.report(names["step"]).as_dict()
    assert (counts["classes"], counts["replays"], counts["misses"]) == (9, 100, {})

    torch.manual_seed(1)
    eager, cache, expected = names["Decoder"](), torch.zeros(1, 0, 64), torch.zeros(1, 0, 64)
    for chunk in torch.randn(20, 1, 4, 64):
        with torch.no_grad():
            y, cache = names["step"](chunk, cache)
            wanted, expected = eager(chunk, expected)
        assert torch.equal(y.view(torch.int32), wanted.view(torch.int32))
        assert torch.equal(cache.view(torch.int32), expected.view(torch.int32))


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    assert links and not [link for link in links if not (README.parent / link).exists()]


@pytest.mark.skipif(silero.wheel_file("silero_vad.jit") is None, reason="the silero-vad wheel is not installed")
def test_the_demo_finds_no_differing_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo_vad.main(["--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "777 of 777 tensors" in printed and "259 of 259 chunks equal in every byte" in printed
    assert (tmp_path / "vad.png").stat().st_size > 10_000
