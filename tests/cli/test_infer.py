"""`cadence infer`: objects that the user names, forms of output, exit codes, mistakes in one line."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cadence_fx import Contract, KeepLast, infer
from cadence_fx.cli.main import main
from cadence_fx.serialize import loads

SOURCE = """
import torch
from torch import nn

class Decoder(nn.Module):
    def forward(self, x, cache):
        seen = torch.cat([cache, x.tanh()], 1)
        return seen.mean(1), seen[:, -6:]

class Growing(nn.Module):
    def forward(self, x, cache):
        seen = torch.cat([cache, x.tanh()], 1)
        return seen.mean(1), seen

class Reading(Decoder):
    def forward(self, x, cache):
        y, cache = super().forward(x, cache)
        return (y, cache) if y.sum().item() > 0 else (-y, cache)

def broken():
    raise OSError("no weights\\nhere")

decoder = Decoder()
first = torch.ones(1, 2, 4), torch.ones(1, 0, 4)
wrong = torch.ones(1, 2, 4), torch.ones(1, 2, 5)

def second():
    return torch.ones(1, 2, 4), decoder(*first)[1]
"""
NAME = "streaming_module_of_a_user"
FIRST = ["--call", f"{NAME}:first"]


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / f"{NAME}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop(NAME, None)


@pytest.mark.parametrize("second", ["second", "second()"])
def test_a_contract_to_paste(second: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", f"{NAME}:decoder", *FIRST, "--call", f"{NAME}:{second}"]) == 0
    text = capsys.readouterr().out
    assert f"# proved ({NAME}.py:8): axis 1; growth 2 a call" in text
    space = {"cadence": sys.modules["cadence_fx"]}
    exec(text, space)
    assert space["contract"].region("cache").retention == KeepLast(6)  # type: ignore[attr-defined]


def test_toml_json_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["infer", f"{NAME}:Decoder()", *FIRST]
    assert main([*words, "--toml"]) == 0
    contract = loads(capsys.readouterr().out)
    assert contract.region("cache").retention == KeepLast(6)
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["contract"]["regions"][0]["name"] == "cache" and not found["problems"]
    assert main([*words, "-o", "found.toml"]) == 0
    assert capsys.readouterr().out == "found.toml: 1 region, 4 classes\n"
    assert Contract.load(tmp_path / "found.toml") == contract


def test_no_contract_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", f"{NAME}:Growing()", *FIRST]) == 1
    assert "cache: unbounded: it grows by 2 frames a call" in capsys.readouterr().out
    assert main(["infer", f"{NAME}:Growing()", *FIRST, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["contract"] is None


def test_what_cannot_be_traced_is_said_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", f"{NAME}:Reading()", *FIRST, "--call", f"{NAME}:second()"]) == 0
    text = capsys.readouterr().out
    assert "the call: cannot be traced" in text and f"{NAME}.py:18" in text and "KeepLast(6)" in text


@pytest.mark.parametrize(
    "words, told",
    [
        (["nothing", *FIRST], "expected MODULE:OBJECT, found 'nothing'"),
        (["no_such_module:x", *FIRST], "no_such_module cannot be imported: ModuleNotFoundError"),
        ([f"{NAME}:decodr", *FIRST], "there is no attribute 'decodr'"),
        ([f"{NAME}:decoder", "--call", f"{NAME}:secnd"], "there is no attribute 'secnd'; did you mean 'second'?"),
        ([f"{NAME}:first", *FIRST], "cannot be called, found tuple"),
        ([f"{NAME}:Decoder", *FIRST], f"is a class: name an object of it, such as '{NAME}:Decoder()'"),
        ([f"{NAME}:decoder", "--call", f"{NAME}:decoder"], "name a function that returns the arguments as a tuple"),
        ([f"{NAME}:broken()", *FIRST], "raises OSError: no weights here"),
        ([f"{NAME}:decoder", "--call", f"{NAME}:wrong"], "the call raised RuntimeError: Sizes of tensors must match"),
        ([f"{NAME}:decoder", *FIRST * 3], "expected one or two example calls, found 3"),
        ([f"{NAME}:decoder", *FIRST, "-o", "x.yaml"], "x.yaml: a contract is written to .toml or .json"),
        ([f"{NAME}:decoder", *FIRST, "-o", "no/such/x.toml"], "cannot be written: No such file or directory"),
        ([f"{NAME}:decoder"], "the following arguments are required: --call"),
    ],
)
def test_mistakes(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", *words]) == 2
    captured = capsys.readouterr()
    assert told in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_the_verb_and_the_command_find_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", f"{NAME}:decoder", *FIRST, "--json"]) == 0
    module = sys.modules[NAME]
    assert json.loads(capsys.readouterr().out) == infer(module.decoder, module.first).as_dict()


def test_the_page_shows_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/infer.md").read_text()
    code, _, call = re.findall(r"```python\n(.+?)```", page, re.DOTALL)[0].partition("decoder = Decoder()\n")
    assert call.startswith("found = cadence.infer(decoder, (torch.randn(1, 4, 8), torch.zeros(1, 4, 8)))\n")
    first = "model, first = Decoder(), (torch.randn(1, 4, 8), torch.zeros(1, 4, 8))\n"
    (tmp_path / "decoder.py").write_text(code + first)
    try:
        assert main(["infer", "decoder:model", "--call", "decoder:first"]) == 0
    finally:
        sys.modules.pop("decoder", None)
    printed = capsys.readouterr().out.splitlines()
    shown = re.findall(r"```text\n(.+?)```", page, re.DOTALL)[0].splitlines()
    for line, expected in zip(printed, shown, strict=False):
        start, cut, _ = expected.partition("...")
        assert line.startswith(start) if cut else line == expected
