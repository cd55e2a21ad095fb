"""A recording in parts: CUDA graphs captured one after another, and operators between them that run eager.

A class without breaks has one part. Where one is cut, what has been captured so far is launched at once, since an
operator may need real values (indices, say), and the operator runs on them; the next part reads what it has made. All
parts share a memory pool, so what one leaves there the next ones find, as long as they are launched in turn.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cadence_fx.eager_breaks import Breaks, Step

Capturing = Callable[[torch.cuda.CUDAGraph], contextlib.AbstractContextManager[Any]]


class Parts:
    """The parts of one recording.

    Args:
        new: makes a graph.
        capturing: what a graph is captured in.

    Attributes:
        graphs: in the order in which they are launched.
        steps: what runs between each and the next one.
    """

    def __init__(self, new: Callable[[], torch.cuda.CUDAGraph], capturing: Capturing) -> None:
        self._new, self._capturing = new, capturing
        self._open = contextlib.ExitStack()
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.steps: list[Step] = []

    def record(self, run: Callable[[], Sequence[Any]], breaks: Breaks | None) -> Sequence[Any]:
        """Capture one execution; returns its outputs."""
        if breaks is not None:
            breaks.cut = self._cut
        try:
            self._begin()
            outputs = run()
        except BaseException:
            self._open.__exit__(*sys.exc_info())
            raise
        finally:
            if breaks is not None:
                breaks.cut = None
        self._open.close()
        return outputs

    def _begin(self) -> None:
        graph = self._new()
        self.graphs.append(graph)
        self._open = contextlib.ExitStack()
        self._open.enter_context(self._capturing(graph))

    def _cut(self, run: Callable[[], Any]) -> Any:
        self._open.close()
        self.graphs[-1].replay()
        made = run()
        self.steps.append(Step(run, made))
        self._begin()
        return made

    def launcher(self) -> Callable[[], None]:
        """What launches all parts in turn."""
        if not self.steps:
            return self.graphs[0].replay
        first, *others = [graph.replay for graph in self.graphs]
        turns = list(zip(self.steps, others, strict=True))

        def launch() -> None:
            first()
            for step, replay in turns:
                step()
                replay()

        return launch
