"""`cadence doctor` and `cadence explain` on modules and reports that a user names."""

from __future__ import annotations

import importlib
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cadence_fx.cli.main import main
from cadence_fx.cli.named import CALL, EXAMPLE, current_folder, named

MODULE = """
import sys
import torch
import cadence_fx as cadence


class Decoder(torch.nn.Module):
    def __init__(self, reads=False):
        super().__init__()
        self.reads, self.key = reads, torch.nn.Linear(4, 4)

    def forward(self, x, cache):
        raw = torch.cat([cache, self.key(x)], 1)
        y = raw.sum(1)
        if self.reads:
            y = y * y.sum().item()
        return y, raw[:, -6:]


last = cadence.KeepLast(6)
contract = cadence.Contract(
    [cadence.Clock("frame", 2)],
    [cadence.Region("cache", argument="cache", result=1, axis=1, clock="frame", start=2, retention=last)],
    inputs=[cadence.Input("x", axis=1, clock="frame")],
)


def clean():
    return Decoder(), (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))


def reading():
    return Decoder(True), [torch.zeros(1, 2, 4)], {"cache": torch.zeros(1, 2, 4)}


def broken():
    raise KeyError("weights")


def quits():
    raise SystemExit(0)


def leaves():
    def call(x):
        print("going")
        sys.exit(3)

    return call, (torch.zeros(1),)


def loud():
    print("loading")
    return lambda x: print("called"), (torch.zeros(1),)


class Odd(BaseException):
    pass


def odd():
    raise Odd("base")


def nothing():
    return 3


class Risky:
    value = property(lambda self: 1 / 0)


decoder, risky = Decoder(), Risky()
given = decoder, (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
listed = [*given]
unnamed = *given, (1,)


def odd_call():
    return torch.zeros(1, 3, 4), torch.zeros(1, 2, 4)


def good_call():
    return (torch.zeros(1, 2, 4),), {"cache": torch.zeros(1, 4, 4)}


step = torch.compile(Decoder(), backend=cadence.cadence, options={"contract": contract})


def warm():
    with torch.no_grad():
        cadence.warm_up(step, torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
"""
BROKEN = MODULE.splitlines().index('    raise KeyError("weights")') + 1


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "served.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("served", None)


def run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(line.split())
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_doctor_of_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("doctor", capsys)
    titles = ["versions", "supported", "device", "determinism", "dynamo"]
    assert code == 0 and [line.split(":")[0] for line in out.splitlines()] == titles


def test_doctor_of_a_module(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run("doctor served:clean", capsys)
    assert code == 0 and out.splitlines()[-1] == "Decoder: no known hazards"
    code, out, _ = run("doctor served:reading", capsys)
    line = MODULE.splitlines().index("            y = y * y.sum().item()") + 1
    expected = f"""\
        Decoder: 1 hazard, of which 1 in the way of capture
          stops host_read: the host takes a number (item)
            at {tmp_path / "served.py"}:{line}
            remedy: compute on the device (torch.where with three arguments), or move it outside
        """
    assert code == 1 and out.endswith(textwrap.dedent(expected))
    code, out, _ = run("doctor served:reading --json", capsys)
    assert code == 1 and [each["kind"] for each in json.loads(out)["hazards"]] == ["host_read"]


def test_doctor_takes_a_contract_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with current_folder():
        named("served:contract").save(tmp_path / "decoder.toml")
    assert run("doctor served:clean --contract decoder.toml", capsys)[0] == 0


def test_explain_one_call(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run("doctor served:warm", capsys)  # an object that is no example: it is called, and that is all
    code, out, _ = run("explain served:step --call served:good_call", capsys)
    assert (code, out) == (0, "Decoder: replays class frame +2: cache 4 -> 6\n")
    code, out, _ = run("explain served:step --call served:odd_call", capsys)
    line = MODULE.splitlines().index("        raw = torch.cat([cache, self.key(x)], 1)") + 1
    expected = f"""\
        Decoder: runs eager: undeclared_size (signature match)
          why: axis 1 of x has 3; the contract allows [2] (used at {tmp_path / "served.py"}:{line})
          remedy: declare the size: an Input, a flush length; or cut chunks to the stride
          nearest class: frame +2: cache 2 -> 4
            x, axis 1: 2 was captured, 3 found
        """
    assert (code, out) == (1, textwrap.dedent(expected))
    code, out, _ = run("explain served:step --call served:odd_call --mode inference --json", capsys)
    assert code == 1 and json.loads(out)["differences"][-1]["field"] == "axis 1"


REPORT: dict[str, Any] = {
    "name": "Decoder",
    "replays": 40,
    "misses": {"stride": 2},
    "refusals": {},
    "invalidations": {"address": 1},
    "details": {"stride": {"x has stride (2, 1), and (4, 1) was captured": 2}, "address": {"self.key moved": 1}},
}


def test_explain_a_saved_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    code, out, _ = run("explain report.json", capsys)
    expected = """\
        Decoder: 40 replays
          miss stride: 2 (signature match)
            why: x has stride (2, 1), and (4, 1) was captured
            remedy: .contiguous(), or give warm-up a call with that layout
          invalidation address: 1 (address stability)
            why: self.key moved
            remedy: edit weights in place (copy_); warm up after loading
        """
    assert (code, out) == (1, textwrap.dedent(expected))
    code, out, _ = run("explain report.json --json", capsys)
    assert [row["reason"] for row in json.loads(out)["eager"]] == ["stride", "address"]
    (tmp_path / "report.json").write_text(json.dumps(REPORT | {"misses": {}}))
    assert run("explain report.json", capsys)[0] == 0


@pytest.mark.parametrize(
    "text, told",
    [
        ("[1, 2", "report.json: no JSON: Expecting ',' delimiter: line 1 column 6 (char 5)"),
        ("[" * 100_000, "report.json: no JSON: "),
        ("[1, 2]", "report.json: no report; save one with cadence_fx.report(step).to_json()"),
        ('{"replays": "40"}', "report.json: no report; save one with cadence_fx.report(step).to_json()"),
        (json.dumps(REPORT | {"misses": [3]}), "report.json: a report whose counts are damaged"),
        (json.dumps(REPORT | {"details": {"stride": 3}}), "report.json: a report whose counts are damaged"),
    ],
    ids=["cut short", "deep", "a list", "no counts", "damaged", "damaged details"],
)
def test_bad_reports(text: str, told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(text)
    code, out, err = run("explain report.json", capsys)
    assert code == 2 and not out and err.startswith(f"error: {told}") and err.count("\n") == 1


def test_what_the_users_code_prints_is_not_in_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("doctor served:loud --json", capsys)
    assert code == 0 and json.loads(out)["module"] == "<lambda>"
    assert err.splitlines()[0] == "loading" and set(err.splitlines()[1:]) == {"called"}


def test_code_that_ends_the_process_is_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("doctor served:leaves", capsys)
    told = "error: the code that was called ends the process: SystemExit: 3"
    assert code == 2 and not out and err.splitlines()[-1] == told


def test_a_file_without_an_end_is_no_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "report.json").symlink_to("/dev/zero")
    assert run("explain report.json", capsys) == (2, "", "error: report.json: larger than 64 MiB, so no report\n")


@pytest.mark.parametrize(
    "line, told",
    [
        ("doctor served", "expected MODULE:OBJECT, found 'served'"),
        ("doctor served:broken", f"served:broken raises KeyError: 'weights' ({{folder}}/served.py:{BROKEN})"),
        ("doctor served:quits", "served:quits raises SystemExit: 0 ("),
        ("doctor served:odd", "served:odd raises Odd: base ("),
        ("doctor served:nothing", f"served:nothing must return {EXAMPLE}, found int"),
        ("doctor served:contract", f"served:contract must return {EXAMPLE}, found Contract"),
        ("doctor served:unnamed", f"served:unnamed must return {EXAMPLE}, found (Decoder, tuple, tuple)"),
        ("doctor served:decoder", f"served:decoder is a module (Decoder): name a function that returns {EXAMPLE}"),
        ("doctor served:Decoder", f"served:Decoder is a class: name a function that returns {EXAMPLE}"),
        ("doctor served:claen", "served: there is no attribute 'claen'; did you mean 'clean'?"),
        ("doctor served:decoder.kye", "served: there is no attribute 'kye'; did you mean 'key'?"),
        ("doctor served:qqqq", "served: there is no attribute 'qqqq' (known: 'Decoder', 'Odd', 'Risky', "),
        ("doctor served:risky.value", "served: value raises ZeroDivisionError: "),
        ("doctor absent:thing", "absent cannot be imported: ModuleNotFoundError: No module named 'absent'"),
        ("doctor servd:clean", "servd cannot be imported: ModuleNotFoundError: No module named 'servd'; did you mean "
         "'served'?"),
        ("doctor served.py:clean", "served.py cannot be imported: ModuleNotFoundError: No module named 'served.py'; "
         "'served' is not a package; a module is written 'served'"),
        ("explain served:step --call served:nothing", f"served:nothing must return {CALL}, found int"),
        ("explain served:step --call served:odcall",
         "served: there is no attribute 'odcall'; did you mean 'odd_call'?"),
        ("explain served:step --call served:decoder",
         f"served:decoder is a module (Decoder): name a function that returns {CALL}"),
        ("explain served:clean --call served:odd_call", "explain() needs a callable compiled with torch.compile"),
        ("explain served:step", "--call is missing: served:step is explained for one call, and --call MODULE:OBJECT "
         "names its arguments, such as: cadence explain served:step --call served:odd_call\n"),
        ("explain served.json", "served.json: cannot be read: No such file or directory\n"),
    ],
)  # fmt: skip
def test_mistakes(line: str, told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(line, capsys)
    assert code == 2 and not out and err.startswith(f"error: {told}".replace("{folder}", str(tmp_path))), err


@pytest.mark.parametrize("name", ["clean()", "given", "listed"])
def test_an_example_is_a_function_or_what_one_returns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"doctor served:{name}", capsys)[0] == 0


def test_the_page_shows_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/doctor.md").read_text()
    found, step, *_ = re.findall(r"```python\n(.+?)```", page, re.DOTALL)
    shown = re.findall(r"```text\n(.+?)```", page, re.DOTALL)
    hazards, told = (block for block in shown if "cadence " not in block)
    module, _, _ = found.partition("with torch.no_grad():\n    found")
    example = "def example():\n    return Decoder(), (torch.randn(1, 2, 8), torch.randn(1, 2, 8))\n"
    (tmp_path / "decoder.py").write_text(module + example + "contract.save('decoder.toml')\n")
    try:
        assert run("doctor decoder:example", capsys)[0] == 1
        code, out, _ = run("doctor decoder:example --contract decoder.toml", capsys)
    finally:
        sys.modules.pop("decoder", None)
    assert code == 1 and out.replace(f"{tmp_path}/", "").endswith(hazards)
    (tmp_path / "explained.py").write_text(module + step)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        importlib.import_module("explained")
    finally:
        sys.modules.pop("explained", None)
    assert capsys.readouterr().out == told
