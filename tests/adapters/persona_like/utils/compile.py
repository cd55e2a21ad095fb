"""The switches that the adapters ask for. Nothing is compiled here, and no graph is captured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any


def no_compile() -> AbstractContextManager[None]:
    return nullcontext()


class Graphed:
    """A function that a graph could be captured of, on a GPU."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.disable, self.warmup_steps = function, True, 1

    def reset(self, warmup_steps: int = 0) -> None:
        self.warmup_steps = warmup_steps

    def __call__(self, *args: Any) -> Any:
        if not self.disable:
            raise RuntimeError("a graph would hold addresses of states")
        return self.function(*args)
