"""The certificate on more than one input: eager against itself and against the class, on data made for the purpose.

What a rewrite or a capture gets wrong may not show on the data that happened to come first: zeros in a fresh cache,
say. So a class is compared on its own data, on random data of the same ranges, and on data with NaNs and infinities.
Arguments that are no floats and arguments bound by pointer (weights) keep their values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cadence_fx import certify
from cadence_fx.extremes import is_varied, plant_extremes, redraw
from cadence_fx.plan import Plan, Split
from cadence_fx.reach import Reach
from cadence_fx.recorder import Recording

_KINDS: tuple[tuple[str, Callable[[torch.Tensor, int], None]], ...] = (
    ("random inputs of the same ranges", redraw),
    ("inputs with extreme values", plant_extremes),
)


class Trials:
    """What eager gives on the other inputs of a class, to hold a recording against.

    Every comparison starts from and ends with the bytes and generators that `snapshot` has saved.

    Args:
        plan: the class.
        args: its static arguments.
        names: what the user calls each argument.

    Attributes:
        strays: an input around whose elements the computation looks, where a copy has other bytes; None without one.
        notes: which inputs the class is compared on and which not.
        unrepeated: the kinds of input on which eager was found not to repeat, while nothing says which operator it is.
    """

    def __init__(self, plan: Plan, args: Sequence[Any], names: Sequence[str], snapshot: certify.Snapshot) -> None:
        self._plan, self._args, self._snapshot = plan, args, snapshot
        self._expected: list[tuple[int, certify.Outcome]] = []
        self.strays: str | None = None
        self.unrepeated: list[int] = []
        self.notes: list[str] = []
        self._varied = self._choose(names)
        for kind in range(len(_KINDS)) if self._varied else ():
            self._expect(kind)
        self._settle()
        plan.compared = 1 + len(self._expected)

    def differs(self, recording: Recording) -> str | None:
        """What first differs between a recording and eager on these inputs, in words; None when every byte is equal."""
        try:
            for kind, expected in list(self._expected):
                self._vary(kind)
                outcome = certify.run_recording(self._plan, self._args, recording, self._snapshot)
                wrong = outcome.differs_from(expected) if isinstance(outcome, certify.Outcome) else None
                if wrong is not None and self._repeats(kind, expected):
                    return f"{wrong} on {_KINDS[kind][0]}"
        finally:
            self._settle()
        return None

    def split(self, kind: int | None) -> Split | None:
        """How to run the computation in parts, by what does not repeat on one kind of input; None: on its own data."""
        if self._plan.split is None or self._plan.tape is not None:
            return None

        def start() -> None:
            if kind is not None:
                self._vary(kind)
            else:
                self._snapshot.restore()

        try:
            start()
            return self._plan.split(self._args, start)
        finally:
            self._settle()

    def _choose(self, names: Sequence[str]) -> list[torch.Tensor]:
        """The inputs whose values may be others. They are noted when they are not all of the floats among them."""
        candidates = [(names[i], self._args[i]) for i in self._plan.staged]
        candidates += [(names[use.index], use.carry.view(use.extent)) for use in self._plan.regions]
        if not candidates:
            return []
        reach = Reach([tensor for _, tensor in candidates])
        with reach:
            self._plan.reference(*self._args)
        self._snapshot.restore()
        self.strays = next((name for i, (name, _) in enumerate(candidates) if reach.strays(i)), None)
        kept = [name for i, (name, tensor) in enumerate(candidates) if is_varied(tensor) and reach.decides(i)]
        if kept:
            self.notes.append(f"not varied in the certificate, since values decide what is done: {', '.join(kept)}")
        return [tensor for i, (_, tensor) in enumerate(candidates) if is_varied(tensor) and not reach.decides(i)]

    def _vary(self, kind: int) -> None:
        self._snapshot.restore()
        self._turn(kind)
        for seed, tensor in enumerate(self._varied):
            _KINDS[kind][1](tensor, seed)

    def _expect(self, kind: int) -> None:
        """Run eager on one kind of input. One on which it raises compares nothing."""
        outcome = self._eager(kind)
        if isinstance(outcome, str):
            self._skip(kind, outcome)
        else:
            self._expected.append((kind, outcome))

    def _eager(self, kind: int) -> certify.Outcome | str:
        """What eager gives on one kind of input, or what it raises."""
        try:
            self._vary(kind)
            return certify.run_reference(self._plan, self._args, self._snapshot)[1]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return f"eager raises {type(error).__name__}"

    def _repeats(self, kind: int, expected: certify.Outcome) -> bool:
        """Whether eager does on an input on which a recording does not: asked for only then, since a run of eager is
        what a certificate costs. One on which it does not repeat compares nothing."""
        again = self._eager(kind)
        wrong = again if isinstance(again, str) else expected.differs_from(again)
        if wrong is None:
            return True
        self._expected = [each for each in self._expected if each[0] != kind]
        self._plan.compared -= 1
        if self._plan.tape is None and not isinstance(again, str):
            self.unrepeated.append(kind)
        self._skip(kind, wrong if isinstance(again, str) else f"eager does not repeat {wrong}")
        return False

    def _turn(self, kind: int | None) -> None:
        """What operators that do not repeat have made on this input is what they make on it."""
        if self._plan.tape is not None:
            self._plan.tape.turn = kind

    def _skip(self, kind: int, problem: str) -> None:
        self.notes.append(f"not compared on {_KINDS[kind][0]}: {problem}")

    def _settle(self) -> None:
        """Everything is as it was, and workspaces, which nobody saves, hold what the class's own data leaves there."""
        self._snapshot.restore()
        self._turn(None)
        if self._varied and set(self._plan.written) - set(self._plan.mutated):
            self._plan.reference(*self._args)
            self._snapshot.restore()
