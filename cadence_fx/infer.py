"""`infer`: the contract of a module, from one or two example calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cadence_fx import paths
from cadence_fx._torch import original_of
from cadence_fx._units import counted
from cadence_fx.assemble import Assembled, assemble
from cadence_fx.calls import Arguments, Live, Place, Slot
from cadence_fx.confirm import confirm
from cadence_fx.contract import Contract
from cadence_fx.deduce import AMBIGUOUS, OBSERVED, PROVED, Deduced, Undeclarable, deduce, flushed
from cadence_fx.errors import ContractError
from cadence_fx.growth import Growth, growths
from cadence_fx.inferred import Fact, Inferred
from cadence_fx.leaves import accessor, tensor_paths
from cadence_fx.pairs import Doubt, find_pairs
from cadence_fx.retention import KeepLast, Pinned, PromptPlusLast, Ring
from cadence_fx.walk import PATIENT, REPEATS, Walk, Walker

Example = Sequence[Any]


def infer(module: Callable[..., Any], *calls: Example) -> Inferred:
    """The contract of a streaming module, from the first call of a turn and, if given, the one that follows it.

    The module is called on copies of itself, whose weights are shared, never itself; the arguments are copied, too. The
    second call may be given what the first returned, which shows which result is which state, or have other sizes, as
    calls that end a turn do. Nothing is declared that was not checked: before a contract is returned, its stream is
    played with other data, and extents, catalog and what is kept are compared.

    Args:
        module: a module, or a function that keeps nothing.
        calls: one or two; each the positional arguments, or a pair of these and a dict of those that have names.

    Raises:
        ExampleFailed: a call raises, or the module cannot be copied.
        ContractError: there are no example calls, or more than two, or they are no sequences of arguments.
    """
    if not 1 <= len(calls) <= 2:
        raise ContractError(f"expected one or two example calls, found {len(calls)}", field="calls")
    live = Live(original_of(module))
    first, *others = (live.bind(*_split(call)) for call in calls)
    second = others[0] if others else None
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        return _Inference(live, first, second).run()


def _split(call: Example) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if not isinstance(call, (tuple, list)):
        raise ContractError(
            f"an example call is a tuple of arguments, found {type(call).__name__}; write (x,) for one argument",
            field="calls",
        )
    if (
        len(call) == 2
        and isinstance(call[0], (tuple, list))
        and isinstance(call[1], dict)
        and set(map(type, call[1])) <= {str}
    ):
        return call[0], call[1]
    return call, {}


class _Inference:
    """One run of `infer`."""

    def __init__(self, live: Live, first: Arguments, second: Arguments | None) -> None:
        self.live, self.first, self.second = live, first, second
        self.doubts: list[Doubt] = []

    def run(self) -> Inferred:
        pairs = find_pairs(self.live, self.first, self.second)
        self.doubts += pairs.doubts
        if pairs.not_traced is not None:
            told = f"cannot be traced ({pairs.not_traced.problem}); what is said of it was only observed"
            self.doubts.append(Doubt("the call", told, pairs.not_traced.where))
        later, flush = self._calls({slot.place for slot in pairs.slots})
        repeats = PATIENT if pairs.counts or pairs.not_traced is not None else REPEATS
        walk = Walker(self.live, pairs.slots, pairs.written, self.first, later, flush, repeats).walk()
        states: list[Deduced] = []
        problems: list[str] = []
        for slot in pairs.slots:
            try:
                states.append(deduce(walk, slot))
            except Undeclarable as error:
                known = slot.given or slot.result is None
                problems.append(f"{'' if known else f'if {_result(slot)} is its next state, '}{error}")
        problems += [self._frozen(state) for state in states if self.second is None and _is_frozen(state)]
        if not pairs.slots:
            problems.append("no state was found")
        if problems:
            return self._without(states, problems)
        if flush is not None:
            flush = self._flushes(states, walk, flush)
        grown = growths(self.live, states, pairs.written, self.first, later)
        try:
            made = assemble(states, grown, later, flush)
        except ContractError as error:
            return self._without(states, [f"what was found is no contract: {error}"])
        self.doubts += made.doubts
        has_flush = any(clock.flush for clock in made.contract.clocks)
        ends = flush if has_flush else None
        problem = confirm(made.contract, made.members, self.live, self.first, later, ends, repeats)
        if problem is not None:
            return self._without(states, [f"a check with other data failed: {problem}"])
        return self._with(made, grown, walk)

    def _calls(self, states: set[Place]) -> tuple[Arguments, Arguments | None]:
        """The call that follows a turn's first, and the call that ends a turn: a second example of other sizes."""
        if self.second is None:
            return self.first, None
        inputs = [path for path in tensor_paths(self.first) if Place("argument", path) not in states]
        try:
            sizes = [(paths.get(self.first, p).shape, paths.get(self.second, p).shape) for p in inputs]
        except (LookupError, AttributeError):
            return self.first, None
        if any(len(a) != len(b) for a, b in sizes):
            return self.first, None
        return (self.second, None) if all(a == b for a, b in sizes) else (self.first, self.second)

    def _flushes(self, states: list[Deduced], walk: Walk, flush: Arguments) -> Arguments | None:
        ended = [visit for visit in walk.visits if visit.flush]
        most = max(
            [state.added for state in states]
            + [state.retention.bound for state in states]
            + [size for path in tensor_paths(flush) for size in paths.get(flush, path).shape]
        )
        try:
            for state in states:
                state.flushed = flushed(state, ended, most)
        except Undeclarable as error:
            self.doubts.append(error.doubt)
            return None
        return flush

    def _without(self, states: Sequence[Deduced], problems: Sequence[str]) -> Inferred:
        facts = [fact for state in states for fact in _facts(str(state.slot.place), [state], None)]
        return Inferred(None, tuple(facts), tuple(map(str, self.doubts)), tuple(problems), "")

    def _with(self, made: Assembled, grown: Mapping[Place, Growth], walk: Walk) -> Inferred:
        facts: list[Fact] = []
        growing = {name for name, states in made.members.items() if states[0].added}
        for clock in made.contract.clocks:
            driver = made.drivers[clock.name]
            grows = any(region.clock == clock.name and region.name in growing for region in made.contract.regions)
            why = f"it counts {driver}" if driver else "the example call brings as many" if grows else "it counts calls"
            facts.append(Fact(clock.name, "stride", str(clock.stride), PROVED if driver else OBSERVED, why, None))
            if clock.flush:
                why = "the second call; other lengths were not seen"
                facts.append(Fact(clock.name, "flush", str(clock.flush[0]), OBSERVED, why, None))
        for name, states in made.members.items():
            facts += _facts(name, states, grown.get(states[0].slot.place))
        assumed = [
            f"{name}: lifetime 'turn' is assumed; what a new turn keeps shows in no turn"
            for name, states in made.members.items()
            if states[0].retention.bound > states[0].start
        ]
        if all(visit.flush is False for visit in walk.visits):
            assumed.append("no call that ends a turn was seen: flush lengths are not declared")
        checked = f"Checked: {self._checked(made.contract, walk)}."
        return Inferred(made.contract, tuple(facts), (*map(str, self.doubts), *assumed), (), checked)

    @staticmethod
    def _frozen(state: Deduced) -> str:
        why = "once full it would never take a frame again; a second example call tells whether it is a state"
        return str(Doubt(str(state.slot.place), f"ambiguous: {why}", state.line))

    @staticmethod
    def _checked(contract: Contract, walk: Walk) -> str:
        width = contract.width()
        calls = counted(len(walk.visits), "call")
        if walk.jumped:
            return f"{calls} with other data, about the start and the bound; {width} classes were not all met"
        every = "the one class" if width.classes == 1 else f"all {width.classes} classes"
        return f"{calls} with other data; extents, kept frames and {every} of the catalog agree"


def _result(slot: Slot) -> str:
    return f"result {accessor(slot.result or ())}"


def _is_frozen(state: Deduced) -> bool:
    """Whether what looks like a state of an argument takes no fresh frame any more, and may be no state at all."""
    policy = state.retention
    return (
        state.slot.result is not None
        and isinstance(policy, PromptPlusLast)
        and (policy.last == 0 and policy.order == "append" or policy.prompt == 0 and policy.order == "prepend")
    )


def _facts(name: str, states: Sequence[Deduced], growth: Growth | None) -> list[Fact]:
    """The facts of a region, from the state of which least is sure."""
    rank = {AMBIGUOUS: 0, OBSERVED: 1, PROVED: 2}
    state = min(states, key=lambda each: rank[each.confidence])
    slot, policy, line = state.slot, state.retention, state.line
    proved = all(each.slot.proved and (each.slot.given or each.slot.result is None) for each in states)
    paired = PROVED if proved else OBSERVED
    why = ""
    if not proved and slot.result is not None:
        why = "the second call was given it" if slot.given else "it holds frames of it, and fresh ones"
    where = "the same place" if slot.result is None else _result(slot)
    facts = [
        Fact(name, "next state", where, paired, why, line),
        Fact(
            name,
            "axis",
            str(state.axis),
            state.axis_confidence,
            "any would do" if state.axis_confidence == AMBIGUOUS else "",
            line,
        ),
        Fact(name, "start", str(state.start), OBSERVED, "as in the example", None),
    ]
    if growth is not None:
        until = f", up to {counted(growth.until, 'frame')} in all" if growth.until is not None else ""
        facts.append(Fact(name, "growth", f"{state.added} a call", PROVED, f"{growth}{until}", line))
    elif state.added:
        why = "a graph joins as many with those before, and then cuts" if state.joined is not None else ""
        facts.append(Fact(name, "growth", f"{state.added} a call", state.axis_confidence, why, line))
    bound = (
        state.confidence
        if isinstance(policy, (KeepLast, PromptPlusLast)) and state.confidence != AMBIGUOUS
        else OBSERVED
    )
    facts.append(Fact(name, "bound", str(policy.bound), bound, "", line))
    facts.append(Fact(name, "retention", policy.describe(), state.confidence, state.why, line))
    if isinstance(policy, (Pinned, Ring)):
        return facts
    facts.append(Fact(name, "order", str(policy.order), state.confidence, "", line))
    return facts
