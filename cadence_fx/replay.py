"""ExactShapeReplay: one captured class per exact signature of a plain callable, anything else eager (paper section
3.3).

The engine names no model, decoder or operator. It keys a call on its full signature, checks what must not have moved
by pointer, copies the other tensors into static buffers, launches, and hands out results that are safe to keep. A class
is admitted only after its certificate. `torch.compile(m, backend="cadence")` uses the same tables (`table`), with
states and graphs of its own (`graph.GraphPlanner`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cadence_fx._torch import WithoutFunctionModes, tree_flatten, tree_unflatten
from cadence_fx.capture import ReplayClass
from cadence_fx.ledger import Ledger
from cadence_fx.locks import Gate
from cadence_fx.plan import NEEDS_GRAD, Miss, Plan, Way
from cadence_fx.python_state import Place, PythonState, held
from cadence_fx.signature import fixed_key
from cadence_fx.table import ReplayTable


class FlatCall:
    """A plain callable with flat arguments and results: the leaves of one structure of arguments.

    The last result is the structure of the others: a class has one, whatever other classes return.
    """

    def __init__(self, fn: Callable[..., Any], spec: Any) -> None:
        self.fn = fn
        self._spec = spec

    def __call__(self, *leaves: Any) -> list[Any]:
        args, kwargs = tree_unflatten(list(leaves), self._spec)
        outputs, structure = tree_flatten(self.fn(*args, **kwargs))
        return [*outputs, structure]

    def watched(self, leaves: Sequence[Any]) -> tuple[list[Any], list[str]]:
        """The results, and what the callable has rebound in the containers that it was given, in words."""
        given = tree_unflatten(list(leaves), self._spec)
        with WithoutFunctionModes():  # what is asked of tensors here is not what the callable asks
            before = PythonState(given)
        outputs, structure = tree_flatten(self.fn(*given[0], **given[1]))
        with WithoutFunctionModes():
            found = before.changes()
        changes = [what.replace("self[0]", "args", 1).replace("self[1]", "kwargs", 1) for what in found]
        return [*outputs, structure], changes


class _Leaves(list[Any]):
    """The leaves of one call's arguments, with the arguments that they were found in."""

    def __init__(self, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(leaves)
        self.args = args
        self.kwargs = kwargs


class PlainPlanner:
    """Classes of a plain callable: no graph, no regions; what the callable does is recorded as it runs.

    Args:
        fixed, staged, generators: indices of aliased tensors, of the other ones, and of generators.
    """

    def __init__(
        self,
        call: FlatCall,
        fixed: list[int],
        staged: list[int],
        generators: list[int],
        name: str,
        frozen: bool,
    ) -> None:
        self._call = call
        self._fixed = fixed
        self._staged = staged
        self._generators = generators
        self._name = name
        self._frozen = frozen
        # Where generators live among the callable's attributes: replaced, they make another class.
        self._places: list[Place] = []

    def plan(self, args: Sequence[Any]) -> Plan | Miss:
        state = PythonState(self._call.fn)
        refused = self._refused(state)
        if refused is not None:
            return refused
        self._places = state.generators
        shapes = ", ".join(str(list(args[i].shape)) for i in self._staged)

        def stock(*leaves: Any) -> list[Any]:
            outputs, plan.altered = self._call.watched(leaves)
            return outputs

        # Nothing is known of what the callable writes: every aliased tensor counts as written.
        plan = Plan(
            [Way("as written", self._call)],
            stock,
            f"{self._name}({shapes})",
            self._fixed,
            self._staged,
            mutated=list(self._fixed),
            written=list(self._fixed),
            generators=[args[i] for i in self._generators],
            owner=self._call.fn,
            frozen=self._frozen,
        )
        return plan

    def _refused(self, state: PythonState) -> Miss | None:
        if state.opaque:
            what = f"it reaches {', '.join(state.opaque[:4])}, which trying it would advance"
            return Miss("opaque_state", f"{self._name}: {what}", lasting=True)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in state.tensors):
            return NEEDS_GRAD
        return None

    def foresee(self, args: Sequence[Any]) -> Miss | None:
        return self._refused(PythonState(self._call.fn))

    def key_part(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Aliased tensors are bound by pointer; their geometry is part of the signature all the same. Generators count
        by identity."""
        part: tuple[Any, ...] = tuple(fixed_key(args[i]) for i in self._fixed)
        return (*part, *(args[i] for i in self._generators), *map(held, self._places))

    def unknown(self, args: Sequence[Any]) -> Miss | None:
        return Miss("sealed", f"{self._name}: a signature that was not captured before the seal")

    def twin(self, plan: Plan, args: Sequence[Any]) -> None:
        return None

    def admitted(self, plan: Plan, args: Sequence[Any], entry: ReplayClass) -> None:
        pass

    def workspaces(self, args: Sequence[Any]) -> tuple[()]:
        return ()

    def run_eager(self, args: Sequence[Any]) -> list[Any]:
        """The user's callable on the user's own objects; its result is one leaf, without a structure."""
        assert isinstance(args, _Leaves)
        return [self._call.fn(*args.args, **args.kwargs), None]


class ExactShapeReplay:
    """Wrap a plain callable so that each exact signature replays one captured graph.

    For code that Dynamo cannot trace, and for measuring; `torch.compile(m, backend="cadence")` uses the same tables.

    Args:
        fn: any callable of tensors, scalars, generators and (nested) lists, tuples and dicts of them. On a GPU it must
            be capturable: no host reads, no allocation on other streams. Its first call may build what later ones use
            (a table, a buffer): that call runs eager. One that rebinds something in every call runs eager for good.
        aliased: the tensors among the arguments that are bound by pointer: never copied, and `fn` may write them. A
            call that brings another tensor in their place runs eager and drops the class.
        name: for messages and reports.
        max_classes: most signatures captured; further ones run eager, counted.
        frozen: the caller vouches that nothing `fn` reaches by itself (attributes, weights, closures) is rebound or
            moved from its first call on. Then it is not looked at in each call, which takes a microsecond or so for
            each module and tensor.

    Outputs are safe to keep, except views of aliased arguments, which are views of the caller's own memory as in eager.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        aliased: Sequence[torch.Tensor] = (),
        name: str | None = None,
        max_classes: int = 64,
        frozen: bool = False,
    ) -> None:
        self.fn = fn
        self.name: str = name or str(getattr(fn, "__name__", type(fn).__name__))
        self.ledger = Ledger(self.name)
        self._aliased = {id(t): t for t in aliased}
        self._max_classes = max_classes
        self._frozen = frozen
        self._tables: dict[Any, ReplayTable] = {}
        self._gate = Gate()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        key = _structure(leaves, spec)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = self._table(leaves, spec)
        *outputs, structure = table(_Leaves(leaves, args, kwargs))
        return outputs[0] if structure is None else tree_unflatten(outputs, structure)

    def table_for(self, *args: Any, **kwargs: Any) -> tuple[ReplayTable, list[Any]]:
        """The table that a call would go to, and the call's leaves. One that there is none of yet is not kept."""
        leaves, spec = tree_flatten((args, kwargs))
        table = self._tables.get(_structure(leaves, spec)) or self._table(leaves, spec)
        return table, _Leaves(leaves, args, kwargs)

    def _table(self, leaves: Sequence[Any], spec: Any) -> ReplayTable:
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        fixed = [i for i in tensors if id(leaves[i]) in self._aliased]
        staged = [i for i in tensors if i not in fixed]
        generators = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Generator)]
        scalars = [i for i in range(len(leaves)) if i not in {*tensors, *generators}]
        device = _device([*(leaves[i] for i in (*tensors, *generators)), *PythonState(self.fn).tensors])
        planner = PlainPlanner(FlatCall(self.fn, spec), fixed, staged, generators, self.name, self._frozen)
        names = [f"leaf {i}" for i in range(len(leaves))]
        roles: tuple[list[int], ...] = ([], staged, scalars, fixed)
        return ReplayTable(planner, roles, names, device, self.ledger, self._max_classes, self._gate)  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> ExactShapeReplay:
        """A copy starts afresh: classes are bound to the original's memory."""
        fn = copy.deepcopy(self.fn, memo)
        return ExactShapeReplay(fn, name=self.name, max_classes=self._max_classes, frozen=self._frozen)

    @property
    def classes(self) -> list[ReplayClass]:
        """The captured classes."""
        return [c for table in self._tables.values() for c in table.classes.values()]

    @property
    def refused(self) -> list[Miss]:
        """The signatures that were refused for good, and why."""
        return [miss for table in self._tables.values() for miss in table.refused.values()]

    def seal(self) -> None:
        """Count every later capture as a late one."""
        for table in self._tables.values():
            table.sealed = True

    def close(self) -> None:
        """Drop every class."""
        for table in self._tables.values():
            table.clear()


def _structure(leaves: Sequence[Any], spec: Any) -> Any:
    """What decides which table a call goes to: how its arguments nest, and what they are."""
    return spec, tuple(isinstance(leaf, (torch.Tensor, torch.Generator)) and type(leaf).__name__ for leaf in leaves)


def _device(values: Sequence[Any]) -> torch.device:
    """Where a callable of these runs: the first accelerator among them, or the CPU."""
    return next((value.device for value in values if value.device.type != "cpu"), torch.device("cpu"))
