"""`cadence plan` as a user sees it: its outputs word for word, its exit codes, and mistakes in one line."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline

from cadence_fx.cli import output
from cadence_fx.cli.main import main

DECODER = """\
name = "decoder"

[[clocks]]
name = "frame"
stride = 50
lookahead = 6
flush = [10]

[[clocks]]
name = "solver"
period = 10

[[regions]]
name = "cache"
argument = "cache"
result = 1
axis = [0, 2]
clock = ["solver", "frame"]
start = 302
retention = { policy = "PromptPlusLast", prompt = 302, last = 100 }

[[regions]]
name = "work"
attribute = "work"
axis = 0
clock = "frame"
retention = { policy = "KeepLast", n = 402 }
lifetime = "unit"

[[inputs]]
argument = "x"
axis = 1
clock = "frame"

[plan]
weights = "600 MiB"
operators = 14290

[plan.regions.cache]
shape = ["solver", 32, "frame", 1024]
stock = [16, 32, 1000, 1024]

[plan.regions.work]
shape = ["frame", 512]
stock = [1000, 512]

[plan.inputs.x]
shape = [1, "frame", 80]
"""

MODULE = """\
import torch
from cadence_fx import Clock, Contract, KeepLast, Region, declare

class Decoder(torch.nn.Module):
    def forward(self, x, cache):
        return x, torch.cat([cache, x], 1)[:, -6:]

REGION = Region("cache", argument="cache", result=1, axis=1, clock="frame", retention=KeepLast(6))
CALLED = []

def example():
    CALLED.append(1)
    module = declare(Decoder(), Contract([Clock("frame", 2)], [REGION], name="found"))
    return module, (torch.zeros(1, 2, 8), torch.zeros(1, 0, 8))

def undeclared():
    return Decoder(), (torch.zeros(1, 2, 8), torch.zeros(1, 0, 8))

def nothing():
    return None

def fails():
    raise RuntimeError("no checkpoint\\nhere")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "decoder.toml").write_text(DECODER)
    (tmp_path / "wide.toml").write_text(DECODER.replace("stride = 50", "stride = 1").replace("flush = [10]\n", ""))
    (tmp_path / "mine_to_plan.py").write_text(MODULE)
    yield tmp_path
    sys.modules.pop("mine_to_plan", None)


def told(words: str, capsys: pytest.CaptureFixture[str], code: int) -> str:
    assert main(words.split()) == code
    captured = capsys.readouterr()
    assert not (captured.err if code != 2 else captured.out)
    return captured.err if code == 2 else captured.out


def test_a_contract_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_expected_inline(
        told("plan decoder.toml --device-memory 80GiB", capsys, 0),
        """\
plan of decoder: 1 callable

decoder: captured, 6 classes of 64 allowed
  clock frame: 50 a call, look-ahead 6, flush 10
  clock solver: 10 ticks inside every call
  classes 6 of 64 allowed: cache: ceil((402 - 302) / 50) + 1 = 3; x 2 advances (stride and flush) = 6
  region  mode     stride  W    extents        envelope  K  bytes      stock    over   verdict
  cache   grows    50      100  302, 352, 402  458       3  502.5 MiB  2.0 GiB  3.98x  captured
  work    scratch  50      0    402            458       1  916.0 KiB  2.0 MiB  2.18x  pinned
  K of cache: ceil((402 - 302) / 50) + 1 = 3
  staged  bytes a call  in all classes
  x       15.6 KiB      56.2 KiB
  replay holds 503.4 MiB: 56.2 KiB staged, 503.4 MiB of regions
  capture about 55 s (14,290 operators a call)

  total                  declared   stock
  classes                6
  staging                56.2 KiB
  weights                600.0 MiB  600.0 MiB
  state of a session     502.5 MiB  2.0 GiB
  resident, one session  1.1 GiB    2.5 GiB
  sessions in 80.0 GiB   161        40
  capture, estimated     55 s
  note: activations are in no configuration and are not counted
""",
    )


def test_what_cannot_be_captured_and_what_it_takes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_expected_inline(
        told("plan wide.toml", capsys, 1),
        """\
plan of decoder: 1 callable

decoder: too wide, cache: 101 extents, and 64 classes are allowed
  clock frame: 1 a call, look-ahead 6
  clock solver: 10 ticks inside every call
  classes 101 of 64 allowed: cache: ceil((402 - 302) / 1) + 1 = 101
  region  mode     stride  W    extents            envelope  K    bytes      stock    over   verdict
  cache   grows    1       100  302, 303, ... 402  409       101  502.5 MiB  2.0 GiB  3.98x  too wide
  work    scratch  1       0    402                409       1    818.0 KiB  2.0 MiB  2.44x  pinned
  K of cache: ceil((402 - 302) / 1) + 1 = 101
  staged  bytes a call  in all classes
  x       320 B         31.6 KiB
  cache: 101 extents, and 64 classes are allowed; it takes a stride of at least 2 frames, or a window of at most 63 frames, or max_classes = 101

  total                  declared   stock
  classes                0
  staging                0 B
  weights                600.0 MiB  600.0 MiB
  state of a session     2.0 GiB    2.0 GiB
  resident, one session  2.5 GiB    2.5 GiB
  note: activations are in no configuration and are not counted
  note: callables that are not captured run eager, and their regions count as shipped
""",  # noqa: E501
    )
    assert "captured, 101 classes of 101 allowed" in told("plan wide.toml --max-classes 101", capsys, 0)


def test_the_released_family_of_the_paper(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "window.json").write_text('{"text_window_high_tokens": 8000, "text_window_low_tokens": 6000}')
    text = told("plan --family minicpm-o window.json --set steps=5", capsys, 1)
    assert_expected_inline(
        "\n".join(line for line in text.splitlines() if line[:1] not in (" ", "")),
        """\
plan of minicpm-o: 6 callables
backbone: too wide, kv_cache: 2,001 extents, and 64 classes are allowed
speech_token_decoder: traffic-dependent, kv_cache: query lengths follow traffic: 1 of 2 chunks computed again, each 3 to 7 text tokens and up to 25 of speech
token2wav.conformer: captured, 3 classes of 5 allowed
token2wav.flow: captured, 3 classes of 5 allowed
token2wav.vocoder.first: pinned, one class
token2wav.vocoder: pinned, one class""",  # noqa: E501
    )


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report: dict[str, Any] = json.loads(told("plan decoder.toml wide.toml --json --device-memory 80GiB", capsys, 1))
    assert report["capturable"] is False
    narrow, wide = report["callables"]
    assert [narrow["name"], wide["name"]] == ["decoder", "decoder (2)"]
    assert wide["verdict"] == "too wide" and wide["remedy"].startswith("a stride of at least 2 frames")
    assert_expected_inline(
        json.dumps(narrow["regions"][0], indent=1),
        """\
{
 "name": "cache",
 "place": "cache",
 "clock": "solver x frame",
 "mode": "grows",
 "stride": 50,
 "window": 100,
 "start": 302,
 "attended": 402,
 "envelope": 458,
 "classes": 3,
 "arithmetic": "ceil((402 - 302) / 50) + 1 = 3",
 "bytes": 526909440,
 "stock_bytes": 2097152000,
 "over_reservation": 3.98,
 "shared": false,
 "verdict": "captured",
 "reason": "3 extents",
 "remedy": ""
}""",
    )
    totals = report["totals"]
    assert totals["classes"] == 6 and totals["weights_bytes"] == 2 * 600 << 20
    assert totals["peak_bytes"] == totals["shared_bytes"] + totals["session_bytes"]
    assert totals["sessions"] == ((80 << 30) - totals["shared_bytes"]) // totals["session_bytes"]


def test_the_list_of_families(capsys: pytest.CaptureFixture[str]) -> None:
    rows = told("plan --families", capsys, 0).splitlines()
    assert [row.split()[0] for row in rows] == [
        "family", "token2wav", "lychee-fd", "minicpm-o", "moshi", "personaplex", "freeze-omni",
    ]  # fmt: skip
    assert "prompt=302 steps=10 hop=25" in rows[1]


def test_an_example_call_is_run_when_it_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = told("plan --example mine_to_plan:example", capsys, 0)
    assert "found: captured, 4 classes of 64 allowed" in text and "  x       64 B          256 B" in text
    report = json.loads(told("plan --example mine_to_plan:example --json", capsys, 0))
    assert report["callables"][0]["regions"][0]["bytes"] == 6 * 8 * 4
    import mine_to_plan  # type: ignore[import-not-found]

    assert len(mine_to_plan.CALLED) == 2


def test_a_picture(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    told("plan decoder.toml --picture plan.svg", capsys, 0)
    assert "decoder.cache, bound 402" in (folder / "plan.svg").read_text()


@pytest.mark.parametrize(
    "words, message",
    [
        ("plan", "name a contract file, a --family or an --example (see 'cadence plan --help')"),
        ("plan decoder.tml", "decoder.tml: expected a .toml, a .json, a .yaml, a .yml file"),
        ("plan --family minicpm", "field 'family': there is no family 'minicpm' (known: 'token2wav', 'lychee-fd', "
         "'minicpm-o', 'moshi', 'personaplex', 'freeze-omni'); did you mean 'minicpm-o'?"),
        ("plan --family moshi --example a:b", "--family and --example exclude each other"),
        ("plan decoder.toml --set a=1", "--set is for the options of a --family"),
        ("plan --family token2wav --set steps", "--set takes OPTION=VALUE, found 'steps'"),
        ("plan --family token2wav --set steps=1 --set steps=2", "--set gives 'steps' twice"),
        ("plan --family moshi a.json b.json", "b.json: the field 'dim' has another value in a file before it"),
        ("plan decoder.toml --device-memory lots", "--device-memory: expected a size such as 80GiB, found 'lots'"),
        ("plan decoder.toml --max-classes 0", "field 'max_classes': expected at least 1, found 0"),
        ("plan decoder.toml --max-classes x",
         "argument --max-classes: invalid int value: 'x' (see 'cadence plan --help')"),
        ("plan decoder.toml --picture plan.gif", "plan.gif: a picture is a .png or .svg file"),
        ("plan --example mine_to_plan", "expected MODULE:OBJECT, found 'mine_to_plan'"),
        ("plan --example absent_module:f",
         "absent_module cannot be imported: ModuleNotFoundError: No module named 'absent_module'"),
        ("plan --example mine_to_plan:exampl",
         "mine_to_plan: there is no attribute 'exampl'; did you mean 'example'?"),
        ("plan --example mine_to_plan:fails",
         "mine_to_plan:fails raises RuntimeError: no checkpoint here ({folder}/mine_to_plan.py:23)"),
        ("plan --example mine_to_plan:nothing",
         "mine_to_plan:nothing must return (module, args) or (module, args, kwargs), found NoneType"),
        ("plan --example mine_to_plan:undeclared", "field 'contract': no contract is declared for a Decoder; write one "
         "into a file, or use cadence_fx.declare"),
        ("plan decoder.toml --example mine_to_plan:example",
         "decoder.toml: has a table 'plan', and the example gives the bytes, too; drop one of them"),
    ],
)  # fmt: skip
def test_mistakes(words: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.json").write_text('{"dim": 64}')
    (folder / "b.json").write_text('{"dim": 128}')
    assert told(words, capsys, 2) == f"error: {message}\n".replace("{folder}", str(folder))


def test_the_commands_in_the_docs_print_what_they_show(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/plan.md").read_text()
    (contract,) = re.findall(r"```toml\n(.+?)```", page, re.DOTALL)
    (folder / "decoder.toml").write_text(contract)
    blocks = re.findall(r"```console\n\$ cadence (.+?)\n(.+?)```", page, re.DOTALL)
    assert len(blocks) == 3
    for words, shown in blocks:
        main(shlex.split(words))
        assert capsys.readouterr().out == shown


def test_no_file_is_executed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "flow.yaml").write_text("flow: !!python/object/apply:pathlib.Path.touch [ran]")
    assert "could not determine a constructor" in told("plan --family token2wav flow.yaml", capsys, 2)
    assert not (folder / "ran").exists()


def test_verdicts_have_colours_on_a_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "painted", lambda stream: True)
    assert "\x1b[31mtoo wide\x1b[0m" in told("plan wide.toml", capsys, 1)
