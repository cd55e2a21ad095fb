"""What a class of a plain callable has found in Python objects: looked at again before each of its launches.

A recording has the values of Python objects and the addresses of tensors that the callable reached by itself frozen in
it. When one of them is another, the class no longer is what the callable would do.
"""

from __future__ import annotations

from cadence_fx.python_state import PythonState


class Reached:
    """The Python state that a class was captured with, and where its tensors were. Keeps those tensors alive.

    Args:
        frozen: the user vouches for it all, and nothing is looked at.
    """

    def __init__(self, state: PythonState, frozen: bool) -> None:
        self._state = state
        self._frozen = frozen
        self._tensors = state.tensors

    def changed(self) -> str | None:
        """What is no longer as it was, in words: an attribute that was rebound, a tensor whose memory is another."""
        if self._frozen or self._state.is_same():
            return None
        return f"{self._state.changes()[0]} is another than in the capture"

    def needs_grad(self) -> bool:
        """Whether any of the tensors requires grad now."""
        return any(tensor.requires_grad for tensor in self._tensors)
