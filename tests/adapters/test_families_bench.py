"""What `bench.families` makes of what its variants answer."""

from __future__ import annotations

from typing import Any

from bench.families import equal_ticks, ratios, table
from bench.remote import spread


def played(ticks: str, end: str) -> dict[str, Any]:
    return {"ticks": list(ticks), "end": end}


def test_ticks_are_equal_until_the_first_that_is_not() -> None:
    assert equal_ticks(played("abc", "x"), played("abc", "x")) == 4
    assert equal_ticks(played("abc", "x"), played("abc", "y")) == 3
    assert equal_ticks(played("abc", "x"), played("adc", "x")) == 1


def test_ratios_are_of_one_part_and_above_one_where_the_backend_is_faster() -> None:
    rows: dict[str, dict[str, Any]] = {
        "moshi step eager": {"median_ms": 30.0},
        "moshi step vendor": {"median_ms": 9.0},
        "moshi step cadence": {"median_ms": 10.0},
        "moshi frame eager": {"median_ms": 30.0},
        "moshi vendor-compiled": {"error": "no compiler"},
    }
    assert ratios(rows) == {"moshi step: eager/cadence": 3.0, "moshi step: vendor/cadence": 0.9}


def test_the_table_says_where_bytes_could_not_be_told_and_what_failed() -> None:
    row = {
        **spread([1.0, 2.0, 3.0]), "peak_mib": 0.0, "reserved_mib": 0.0, "warmup_s": 0.0, "misses": {},
        "ticks": 200, "ticks_equal": 70, "bytes_equal": None,
    }  # fmt: skip
    lines = table({"moshi step vendor": row, "moshi vendor-compiled": {"error": "no compiler"}}).splitlines()
    assert lines[1].split()[-5:] == ["70", "of", "200", "-", "none"]
    assert lines[2].split() == ["moshi", "vendor-compiled", "no", "compiler"]
