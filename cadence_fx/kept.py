"""Values that are computed once and kept: memory that several classes share, and whether it is still right.

What depends on weights alone is the same in every call until a weight is written. A class is recorded with kept memory
in the place of such values. Before a launch the weights they come from are looked at: are they the tensors that they
were, has PyTorch counted a write on one of them, has a small one on the host other bytes? If so, the values are
computed anew, by eager operators on the stream of the call.

Classes of one program that compute the same value keep it in the same memory, and each looks at the weights for itself.
Whenever one computes, all others look too: what they find changed, they compute before their next launch, and where
they find nothing changed, what has just been computed is what they had.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cadence_fx._torch import uncached_casts
from cadence_fx.ledger import log
from cadence_fx.passes import SlowPart
from cadence_fx.plan import Miss
from cadence_fx.residents import Watch

# Launches in a row before each of which an input was written, after which nothing is computed in advance from it.
_RESTLESS = 4


class Keep:
    """The kept memory of one program, by the mode in which a value is computed and what computes it.

    Attributes:
        users: the kept values of each class that has been captured.
    """

    def __init__(self) -> None:
        self._tensors: weakref.WeakValueDictionary[Any, torch.Tensor] = weakref.WeakValueDictionary()
        self.users: weakref.WeakSet[KeptValues] = weakref.WeakSet()

    def in_mode(self, mode: Any) -> Callable[[str, torch.Tensor], torch.Tensor]:
        """What `PassContext.keep` takes: memory for a value of this name, as large as a traced tensor."""

        def memory(name: str, like: torch.Tensor) -> torch.Tensor:
            known = self._tensors.get((mode, name))
            if known is None:
                with torch.inference_mode(False):  # what depends on it in turn goes by its count of writes
                    known = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
                self._tensors[mode, name] = known
            return known

        return memory


class KeptValues:
    """The kept values of one class.

    Args:
        part: what computes them.
        indices: of its inputs among the class's arguments.
        names: what the user calls each of these.
        keep: where their memory is from.
        restless: names of inputs that are written before every call; this adds to them.
    """

    def __init__(
        self, part: SlowPart, indices: Sequence[int], names: Sequence[str], keep: Keep, restless: set[str]
    ) -> None:
        self._part = part
        self._keep = keep
        self._indices = list(indices)
        self._names = list(names)
        self._restless = restless
        self._streak = 0
        self._given: tuple[torch.Tensor, ...] = ()
        self._arrange()

    @property
    def residents(self) -> Sequence[torch.Tensor]:
        """The memory; other classes may have some of it too."""
        return self._part.residents

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return sum(t.numel() * t.element_size() for t in self._part.residents)

    def bind(self, args: Sequence[Any]) -> str | None:
        """Take the inputs and compute the values; or why they cannot be kept."""
        self._take(args)
        if self._watch.blind:
            return "an input was made in inference mode, where nobody counts writes"
        try:
            self._compute()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def enter(self, args: Sequence[Any]) -> Miss | None:
        """Make sure that the values are those of the inputs as they are now; or why the recording may not be launched.

        A lasting reason is one for which the class has to be captured anew.
        """
        if all(map(operator.is_, self._pick(args), self._given)):
            if not self._watch.changed():
                self._streak = 0
                return None
            self._streak += bool(self._watch.written())
        else:  # other tensors at the same addresses, which count writes for themselves
            self._take(args)
        if self._streak >= _RESTLESS:
            names = self._named(self._watch.written())
            self._restless.update(names)
            return _restless(names)
        try:
            self._compute()
        except Exception as error:  # what eager raises, it raises where the user expects it
            self.forget()
            log.warning("computing kept values failed", exc_info=True)
            return Miss("kept_value", f"{type(error).__name__} while values of written weights were computed")
        return None

    def foresee(self, args: Sequence[Any]) -> Miss | None:
        """What `enter` would answer, without looking away from anything; that computing would fail is not foreseen."""
        if not all(map(operator.is_, self._pick(args), self._given)):
            return _restless([]) if self._streak >= _RESTLESS else None
        written = self._watch.would_change()
        return _restless(self._named(written)) if written and self._streak + 1 >= _RESTLESS else None

    def _named(self, tensors: Sequence[torch.Tensor]) -> list[str]:
        return [name for name, t in zip(self._names, self._given, strict=False) if any(t is w for w in tensors)]

    def forget(self) -> None:
        """Compute the values anew before the next launch."""
        self._watch.forget()

    def moved(self, places: Mapping[int, int]) -> KeptValues:
        """The same values for the same class, called with arguments in another order."""
        other = copy.copy(self)
        other._indices = [places[i] for i in self._indices]
        other._arrange()
        self._keep.users.add(other)
        return other

    def _arrange(self) -> None:
        # One of them twice, so that a single one comes as a tuple too.
        several = [*self._indices, *self._indices[:1]]
        self._pick: Callable[[Sequence[Any]], tuple[torch.Tensor, ...]] = (
            operator.itemgetter(*several) if several else lambda args: ()
        )

    def _take(self, args: Sequence[Any]) -> None:
        self._given = self._pick(args)
        # As long as a storage lives, no other one gets its address.
        self._memory = [tensor.untyped_storage() for tensor in self._given]
        self._watch = Watch(self._given, by_version=True)

    def _look(self) -> None:
        """Others are about to compute: find now what has changed since the values were right."""
        if self._watch.changed():
            self._watch.forget()

    def _compute(self) -> None:
        for other in self._keep.users:
            if other is not self:
                other._look()
        self._keep.users.add(self)
        with uncached_casts():
            self._part.graph.forward(*self._given[:-1])


def _restless(names: Sequence[str]) -> Miss:
    what = f"{', '.join(names)}: written before each of {_RESTLESS} calls in a row"
    return Miss("restless_value", what, lasting=True)
