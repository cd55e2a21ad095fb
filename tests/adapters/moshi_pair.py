"""What the tests of Moshi and of its codec share: the vendor's states, compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from tests.harness import assert_same


def state_of(module: Any) -> dict[str, Any]:
    """Every tensor and number in the vendor's state objects, by module and field."""
    found: dict[str, Any] = {}
    for name, state in module.get_streaming_state().items():
        fields = dict(vars(state))
        ring = vars(fields.pop("kv_cache", None) or SimpleNamespace())
        fields |= {f"kv_cache.{field}": value for field, value in ring.items()}
        found |= {f"{name}.{field}": value for field, value in fields.items() if isinstance(value, (Tensor, int))}
    return found


def assert_same_state(actual: Any, expected: Any, when: str) -> None:
    """Two streams are equally far, in every byte."""
    theirs, ours = state_of(expected), state_of(actual)
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        if isinstance(value, Tensor):
            assert_same(ours[name], value, f"{name} {when}")
        else:
            assert ours[name] == value, f"{name} {when}"
