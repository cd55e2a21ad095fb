"""The frame of the command line: help, exit codes, and mistakes of the user's in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from cadence_fx.cli import output
from cadence_fx.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_with_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: cadence {name}" in text
    assert f"examples:\n  cadence {name}" in text.replace("\n\n", "\n")


def test_the_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n  {name} " in text and import_module(COMMANDS[name]).HELP in text
    assert main([]) == 2  # a command is missing, so the help is no answer


@pytest.mark.parametrize(
    "words, told",
    [
        ("paln", "there is no command 'paln' (known: 'plan', 'infer', 'doctor', 'explain'); did you mean 'plan'?"),
        ("--json", "--json is not an option of cadence itself (see 'cadence --help')"),
        ("plan x.toml --no-such", "unrecognized arguments: --no-such (see 'cadence plan --help')"),
        ("plan absent.toml", "absent.toml: cannot be read: [Errno 2] No such file or directory: 'absent.toml'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    assert captured.err == f"error: {told}\n" and not captured.out


def test_as_a_module_and_as_a_script() -> None:
    done = subprocess.run([sys.executable, "-m", "cadence_fx", "nothing"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stderr.startswith("error: there is no command 'nothing'")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"cadence": f"{main.__module__}:{main.__name__}"}


@pytest.mark.parametrize(
    "redirected, code, told",
    [
        ("| head -c 0", 1, ""),  # a reader that has seen enough
        ("> /dev/full", 2, "error: the output cannot be written: No space left on device\n"),
        (">&-", 0, ""),
    ],
)
def test_an_output_that_nobody_can_read(redirected: str, code: int, told: str, tmp_path: Path) -> None:
    command = f"set -o pipefail; {sys.executable} -m cadence_fx plan --families {redirected}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", told)


def test_letters_that_the_terminal_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(
        '{"name": "\\u00e9", "clocks": [{"name": "frame", "stride": 2}],'
        ' "inputs": [{"argument": "x", "axis": 1, "clock": "frame"}]}'
    )
    words = [sys.executable, "-m", "cadence_fx", "plan", str(tmp_path / "c.json")]
    given: dict[str, Any] = {"capture_output": True, "cwd": ROOT, "env": {**os.environ, "PYTHONIOENCODING": "ascii"}}
    assert json.loads(subprocess.run([*words, "--json"], **given).stdout)["name"] == "é"
    assert subprocess.run(words, **given).stdout.startswith(b"plan of \\xe9: 1 callable\n")


class Terminal:
    def __init__(self, shows: bool) -> None:
        self.shows = shows

    def isatty(self) -> bool:
        return self.shows


@pytest.mark.parametrize(
    "shows, variables, expected",
    [
        (True, {}, "\x1b[31mno\x1b[0m"),
        (False, {}, "no"),
        (True, {"NO_COLOR": "1"}, "no"),
        (True, {"NO_COLOR": ""}, "\x1b[31mno\x1b[0m"),
        (True, {"TERM": "dumb"}, "no"),
    ],
)
def test_colours(shows: bool, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert output.paint("no", "red", Terminal(shows)) == expected  # type: ignore[arg-type]


def test_a_table_has_the_same_columns_with_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("region", "verdict", "why"), ("a", "captured", "3"), ("longer", "too wide", "2,001")]
    plain = output.table(rows, {"captured": "green"})
    assert plain == ["  region  verdict   why", "  a       captured  3", "  longer  too wide  2,001"]
    monkeypatch.setattr(output, "painted", lambda stream: True)
    coloured = output.table(rows, {"captured": "green"})
    assert coloured[1] == "  a       \x1b[32mcaptured\x1b[0m  3" and coloured[2] == plain[2]


def test_text_from_files_stays_one_short_line() -> None:
    assert output.one_line("a\nb\x1b[31m\tc") == "a b [31m c"
    assert len(output.one_line("x" * 10_000)) == 500
