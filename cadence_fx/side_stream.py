"""The optional schedule rule (paper section 3, "An optional third rule"): synthesis on a stream of its own.

The caller's stream goes on with other work, the language model's next steps say, while the synthesis runs beside it.
Nothing uses this by itself: whether two loads that share a device gain by running at once depends on both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cadence_fx._torch import tree_leaves


class SideStream:
    """Calls `call` with its device's work on a stream of its own, behind what the caller's stream was given before.

    Args:
        call: a compiled callable, or any other.
        device: where it runs; without a stream to run on (a CPU) calls are made as they are.
    """

    def __init__(self, call: Callable[..., Any], device: torch.device | str = "cuda") -> None:
        self._call = call
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def __call__(self, *args: Any, **kwargs: Any) -> Pending:
        """Begin a call. Whatever it returns is on its way until `Pending.result`."""
        if self._stream is None:
            return Pending(self._call(*args, **kwargs), None)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            outputs = self._call(*args, **kwargs)
        # The caller may let go of them while the stream still reads them.
        _record((args, kwargs), self._stream)
        return Pending(outputs, self._stream.record_event())


class Pending:
    """What a call on a side stream will have returned."""

    def __init__(self, outputs: Any, done: torch.cuda.Event | None) -> None:
        self._outputs = outputs
        self._done = done

    def result(self) -> Any:
        """The outputs; the caller's stream waits for them, the host does not."""
        if self._done is not None:
            for device in {leaf.device for leaf in tree_leaves(self._outputs) if _is_on_gpu(leaf)}:
                stream = torch.cuda.current_stream(device)
                stream.wait_event(self._done)
                _record(self._outputs, stream)
        return self._outputs


def _is_on_gpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _record(values: Any, stream: torch.cuda.Stream) -> None:
    """The memory of these tensors is given to nobody else before the stream has come this far."""
    for leaf in tree_leaves(values):
        if _is_on_gpu(leaf) and leaf.device == stream.device:
            leaf.record_stream(stream)
