"""What an adapter is: the declarations for one model family, found by the class of the module being compiled, and the
binding of a vendor's object to steps that have them."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from cadence_fx._torch import is_untraced, with_own_code
from cadence_fx.contract import Contract
from cadence_fx.errors import AlreadyBound, ContractError
from cadence_fx.hazard import Hazard
from cadence_fx.ledger import log

Compile = Callable[[nn.Module, Contract], Callable[..., Any]]


@runtime_checkable
class Adapter(Protocol):
    """Declares the clocks and regions of modules it knows.

    An adapter's module must not import the model's package: it reads the numbers off the objects that it is given.
    """

    @property
    def classes(self) -> tuple[str, ...]:
        """Qualified names (``package.module.Class``) of the module classes this adapter can declare."""

    def contract(self, module: nn.Module) -> Contract | None:
        """The contract of this module, or None when its configuration has no bounded state to declare."""


class Binding(Protocol):
    """A vendor's object whose own methods reach compiled steps, until `unbind`.

    What a family's adapter returns for an object, and what `bind` wraps. While it exists the object itself is used as
    before, by whoever holds it; calls that are not declared run the vendor's code and are counted in `eager_calls`, by
    reason.
    """

    eager_calls: Counter[str]

    def warm_up(self, verb: Callable[..., Any], *more: Any, **options: Any) -> Any:
        """`verb(step, *arguments)` for each compiled step, with the arguments of a first call and in the modes that
        calls run in. Options say what is served: prompts, streams in a batch. Open streams are left as they are."""

    def compiled(self) -> Mapping[str, Callable[..., Any]]:
        """The compiled steps that there are, by name."""

    def contracts(self) -> Mapping[str, Contract]:
        """Their contracts, by the same names."""

    def refused(self) -> Mapping[str, str]:
        """Callables that are declared and not captured, by name, with the arithmetic that says why."""
        return {}

    def unbind(self) -> None:
        """Gives the object its own code, buffers and attributes back, bit for bit. A stream that is open goes on."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy of the vendor's object would reach the steps, and so the weights and states, of the first one."""
        raise TypeError(
            "an object that is bound is neither copied nor pickled: its captured graphs belong to it. Copy it after "
            "`unbind`, and bind the copy"
        )


class Replaced:
    """Methods of a vendor's objects that are others while bound; `release` leaves each object's attributes as they
    were."""

    def __init__(self) -> None:
        self._owners: list[tuple[Any, str]] = []

    def put(self, owner: Any, **methods: Callable[..., Any]) -> None:
        """Puts methods on an object itself, in front of those of its class. If it raises, all of this are as they were.

        Raises:
            AlreadyBound: one of them is a binding's.
            ContractError: one of them is somebody else's, whom calls would no longer reach.
        """
        for name in methods:
            if name not in vars(owner):
                continue
            self.release()
            if Binding in type(getattr(vars(owner)[name], "__self__", None)).__mro__:
                raise AlreadyBound(type(owner).__name__)
            raise ContractError(
                f"this object has a {name!r} of its own in front of its class's, which calls would no longer reach: "
                "take it off, and put it back after binding",
                field=type(owner).__name__,
            )
        for name, method in methods.items():
            setattr(owner, name, method)
            self._owners.append((owner, name))

    def release(self) -> None:
        while self._owners:
            owner, name = self._owners.pop()
            vars(owner).pop(name, None)


UNTRACED = "not traceable"


def replays(backend: Any) -> bool:
    """Whether steps that are compiled with a backend are replayed by this project's engine."""
    return backend == "cadence" or getattr(backend, "__module__", None) == "cadence_fx.backend"


@runtime_checkable
class Advises(Protocol):
    """An adapter that knows hazards of its modules which no example call shows."""

    def hazards(self, module: nn.Module) -> Sequence[Hazard]:
        """The hazards of this module."""


def compiler(backend: str | Callable[..., Any] | None, passes: Any, dynamic: bool | None = None) -> Compile:
    """What makes a callable of a step and its contract: `torch.compile` with the backend, or nothing at all.

    Dynamo counts its graphs by code object, up to `recompile_limit`, and gives up a code object for good once it could
    not follow it to its end. So each step has a code object of its own, which others of its class do not use up, and is
    followed whole or not at all: see `call`.
    """

    def compiled(step: nn.Module, contract: Contract) -> Callable[..., Any]:
        if backend is None:
            return step
        shipped: Any = type(step).forward
        step.forward = types.MethodType(with_own_code(shipped), step)
        options: dict[str, Any] = {"contract": contract}
        if passes is not None:
            options["passes"] = passes
        return torch.compile(step, backend=backend, fullgraph=True, dynamic=dynamic, options=options)

    return compiled


def call(step: Callable[..., Any], given: Sequence[Any], otherwise: Callable[[], Any], counts: Counter[str]) -> Any:
    """`step(*given)`; where Dynamo cannot follow that call (the code raises, say, or it has as many graphs as it may
    have), `otherwise()`, the vendor's code, counted as "not traceable"."""
    try:
        return step(*given)
    except Exception as error:
        if not is_untraced(error):
            raise
        if not counts[UNTRACED]:
            log.warning("a call runs the vendor's code: Dynamo cannot follow it: %s", str(error).partition("\n")[0])
        counts[UNTRACED] += 1
    return otherwise()  # outside of the handler: what it raises is the vendor's, and has no context
