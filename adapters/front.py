"""The front door: `bind` a vendor's object of any family, use it as before, `unbind` it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cadence_fx.adapters.base import Binding, replays
from cadence_fx.adapters.families import Family, Release, family_of
from cadence_fx.backend import cadence
from cadence_fx.contract import Contract
from cadence_fx.errors import AlreadyBound, ContractError, NotBound
from cadence_fx.report import Report, report
from cadence_fx.warmup import warm_up

__all__ = ["Bound", "BoundReport", "bind", "unbind"]


@dataclass(frozen=True, slots=True)
class BoundReport:
    """What happened to a bound object so far: a report for each compiled step, what the planner refused, with its
    arithmetic, and the calls that ran the vendor's code, by reason."""

    family: str
    steps: Mapping[str, Report] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    eager_calls: Mapping[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """All figures, as plain containers."""
        return {
            "family": self.family,
            "steps": {name: each.as_dict() for name, each in self.steps.items()},
            "refused": dict(self.refused),
            "eager_calls": dict(self.eager_calls),
        }

    def __str__(self) -> str:
        calls = ", ".join(f"{why} {count}" for why, count in self.eager_calls.items())
        lines = [f"{self.family}: {len(self.steps)} steps; calls of the vendor's code: {calls or 'none'}"]
        lines += [f"  {name} is not captured: {why}" for name, why in self.refused.items()]
        return "\n".join([*lines, *(str(each) for each in self.steps.values())])


class Bound:
    """A vendor's object that is bound; used exactly as the object.

    All attributes but the ones below are the object's, to read, to set and to delete, and `isinstance` takes it for
    one; so is the object itself, which others may hold and go on using. After `unbind` it still is the object, on
    the vendor's own code.
    """

    __slots__ = ("_binding", "_captures", "_family", "_release", "_vendor", "__weakref__")

    def __init__(self, vendor: Any, family: Family, release: Release, binding: Binding, captures: bool) -> None:
        given = {"_vendor": vendor, "_family": family, "_release": release, "_binding": binding, "_captures": captures}
        for name, value in given.items():
            object.__setattr__(self, name, value)

    @property
    def family(self) -> str:
        """Name of the family."""
        return self._family.name

    @property
    def release(self) -> str:
        """The tested release that the object is of."""
        return str(self._release)

    @property
    def vendor(self) -> Any:
        """The vendor's object."""
        return self._vendor

    @property
    def binding(self) -> Any:
        """What the family's adapter made, with what is particular to its family (docs/adapters.md)."""
        return self._open("binding")

    def warm_up(self, **options: Any) -> list[Report]:
        """Capture every class of every step before traffic; open streams are left as they are.

        Args:
            options: what is served, as the family has it: `prompts`, `batch`.

        Returns:
            The reports of the steps; [], with nothing done, when they are not compiled by this engine.
        """
        binding = self._open("warm_up")
        if not self._captures:
            return []
        found = binding.warm_up(warm_up, **options)
        return [each for each in (found if isinstance(found, list) else [found]) if isinstance(each, Report)]

    def report(self) -> BoundReport:
        """What happened so far."""
        binding = self._open("report")
        steps = binding.compiled() if self._captures else {}
        return BoundReport(
            self.family,
            {name: report(step) for name, step in steps.items()},
            binding.refused(),
            dict(binding.eager_calls),
        )

    def contracts(self) -> dict[str, Contract]:
        """The contract of each step that there is."""
        return dict(self._open("contracts").contracts())

    def unbind(self) -> None:
        """As `unbind(self)`."""
        binding = self._open("unbind")
        binding.unbind()
        object.__setattr__(self, "_binding", None)
        with contextlib.suppress(TypeError):
            _objects.pop(self._vendor, None)

    def _open(self, verb: str) -> Binding:
        if self._binding is None:
            raise NotBound(verb, f"a {type(self._vendor).__name__} that has been unbound")
        return self._binding  # type: ignore[no-any-return]

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._vendor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vendor, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a bound object is neither copied nor pickled: its captured graphs belong to it. Copy its `vendor` after "
            "`unbind`, and bind the copy"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._vendor, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._vendor, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._vendor)})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._vendor(*args, **kwargs)

    def __repr__(self) -> str:
        state = "unbound" if self._binding is None else "bound"
        return f"<{state} {type(self._vendor).__name__} of {self._release}>"


OWN = frozenset(name for name in vars(Bound) if not name.startswith("_"))


def bind(
    obj: Any, *, backend: str | Callable[..., Any] | None = "cadence", passes: Any = None, **options: Any
) -> Bound:
    """Let a vendor's object run in captured steps; found by its class, and used exactly as before.

    Args:
        obj: the vendor's object, or an object of a subclass of its class.
        backend: what `torch.compile` gets for the steps; None runs them uncompiled, which shows what the steps alone
            change.
        passes: which passes rewrite the steps, as `options={"passes": ...}` has it; None for the default ones.
        options: of the family's adapter, such as `flush` for Token2Wav.

    Returns:
        What is used in the object's place, with `warm_up`, `report`, `contracts` and `unbind` besides. The object is
        bound in place, so whoever holds it need not be told.

    Raises:
        UnknownFamily: no family binds this class.
        VendorMismatch: the package's version was not tested, or the object lacks what is bound.
        AlreadyBound: the object is bound.
        ContractError: it is built in a way that is not declared, or an option is unknown.
    """
    if type(obj) is Bound:
        raise AlreadyBound(type(obj.vendor).__name__)
    family, release = family_of(obj)
    if taken := sorted(name for name in OWN if hasattr(obj, name)):
        raise ContractError(f"the object has a {taken[0]!r} of its own, which bind() would hide", field=family.name)
    engine = replays(backend)
    try:
        binding = family.bind(obj, backend=cadence if engine else backend, passes=passes, **options)
    except TypeError as error:
        if "unexpected keyword argument" in str(error):
            raise ContractError(f"an option that the family does not have: {error}", field=family.name) from error
        raise
    bound = Bound(obj, family, release, binding, engine)
    with contextlib.suppress(TypeError):  # an object that has no hash or takes no weak reference is not found again
        _objects[obj] = weakref.ref(binding), weakref.ref(bound)
    return bound


# The vendors' objects that are bound. What `bind` returns may be dropped; the object's own methods hold the binding.
_objects: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Binding], weakref.ref[Bound]]] = weakref.WeakKeyDictionary()


def unbind(bound: Any) -> None:
    """Undo a `bind`: the vendor's code, buffers and attributes are as before, bit for bit, and open streams go on.

    Args:
        bound: what `bind` returned, or the vendor's object that it was given.

    Raises:
        NotBound: it is neither, or has been unbound.
    """
    if type(bound) is Bound:
        bound.unbind()
        return
    try:
        references = _objects.pop(bound)
    except (KeyError, TypeError):
        raise NotBound("unbind", f"a {type(bound).__name__}") from None
    binding, front = (reference() for reference in references)
    if isinstance(front, Bound):
        front.unbind()
    elif binding is not None:
        binding.unbind()
