"""One class for each mistake. Every message says what was declared, what was found, and what to do.

Messages are built here, from the facts, so that the same mistake always reads the same. ``reason`` is a stable
snake_case word: it is what ledgers count and what callers may compare; the wording of a message may change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from cadence_fx._units import counted


def nearest_name(name: str, known: Sequence[str]) -> str | None:
    """The known name closest in spelling to ``name``, or None when nothing is close."""
    found = get_close_matches(name, known, n=1, cutoff=0.5)
    return found[0] if found else None


def unknown_name(kind: str, name: str, known: Sequence[str]) -> str:
    """The sentence for a name that is not among ``known``, with the nearest one suggested."""
    near = nearest_name(name, known)
    hint = f"; did you mean {near!r}?" if near else ""
    return f"there is no {kind} {name!r} (known: {', '.join(map(repr, known)) or 'none'}){hint}"


def unknown_path(field: str, accessor: str, known: Sequence[str]) -> str:
    """``argument 'cahce', but the compiled callable has 'cache'; did you mean 'cache'?``"""
    near = nearest_name(accessor, known)
    hint = f"; did you mean {near!r}?" if near else ""
    return f"{field} {accessor!r}, but the compiled callable has {', '.join(map(repr, known)) or 'none'}{hint}"


def _rebuild(cls: type[CadenceError], args: tuple[object, ...]) -> CadenceError:
    error = cls.__new__(cls)
    error.args = args
    return error


class CadenceError(Exception):
    """Base of every error of the project. ``reason`` is stable and safe to count or compare."""

    reason: str = "cadence_error"

    def __reduce__(self) -> tuple[object, ...]:
        # The constructors take facts, not the finished message, so the default reduction could not rebuild one.
        return _rebuild, (type(self), self.args), self.__dict__


class ContractError(CadenceError):
    """A declaration that is wrong in itself, or that the code contradicts."""

    reason = "bad_contract"

    def __init__(self, problem: str, *, field: str | None = None, region: str | None = None) -> None:
        self.problem = problem
        self.field = field
        self.region = region
        place = [f"region {region!r}"] if region is not None else []
        place += [f"field {field!r}"] if field is not None else []
        super().__init__(f"{', '.join(place)}: {problem}" if place else problem)


class UnknownArgument(ContractError):
    """A declared argument or attribute that the compiled callable does not have."""

    reason = "unknown_argument"

    def __init__(
        self, accessor: str, known: Sequence[str], *, field: str = "argument", region: str | None = None
    ) -> None:
        self.accessor = accessor
        self.known = tuple(known)
        super().__init__(
            f"the contract declares {unknown_path(field, accessor, known)}. "
            f"Correct the {field}, or remove the declaration.",
            field=field,
            region=region,
        )


class UnknownState(ContractError):
    """A state that is to be restored and that the contract does not declare as an argument."""

    reason = "unknown_state"

    def __init__(self, accessor: str, known: Sequence[str]) -> None:
        self.accessor = accessor
        self.known = tuple(known)
        found = ", ".join(map(repr, known)) or "none; a state that is an attribute is restored by setting the attribute"
        super().__init__(
            f"restore() was given {accessor!r}, and the states that the contract declares as arguments are: {found}",
            field=accessor,
        )


class AxisOutOfRange(ContractError):
    """A declared axis that the tensor does not have."""

    reason = "axis_out_of_range"

    def __init__(self, accessor: str, axis: int, shape: Sequence[object], *, region: str | None = None) -> None:
        self.accessor = accessor
        self.axis = axis
        self.shape = tuple(shape)
        rank = len(self.shape)
        super().__init__(
            f"axis {axis} is declared, but {accessor!r} has {counted(rank, 'dimension')} "
            f"({', '.join(map(str, self.shape))}). Declare an axis from {-rank} to {rank - 1}.",
            field="axis",
            region=region,
        )


class UnusedClock(ContractError):
    """A clock that no region and no input follows."""

    reason = "unused_clock"

    def __init__(self, clock: str) -> None:
        self.clock = clock
        super().__init__(
            f"clock {clock!r} is declared, but no region, input or derived clock in use follows it. "
            "Remove it, or name it in the region or input that it drives.",
            field="clocks",
        )


class UnexplainedSize(ContractError):
    """A size that varies between calls and that no declared clock accounts for."""

    reason = "unexplained_size"

    def __init__(
        self, accessor: str, axis: int, size: object, clocks: Sequence[str], *, location: str | None = None
    ) -> None:
        self.accessor = accessor
        self.axis = axis
        self.size = size
        self.location = location
        used = f" It is used at {location}." if location else ""
        super().__init__(
            f"axis {axis} of {accessor!r} has the size {size}, which none of the declared clocks "
            f"({', '.join(clocks) or 'none'}) explains.{used} Declare an Input or a Region for this axis, "
            "or pass a tensor of one fixed size.",
            field="inputs",
        )


class RetentionMismatch(ContractError):
    """The code keeps other frames than the declared policy says."""

    reason = "retention_mismatch"

    def __init__(
        self,
        region: str,
        declared: object,
        found: object,
        where: str | None = None,
        counterexample: str | None = None,
    ) -> None:
        self.declared = declared
        self.found = found
        self.where = where
        self.counterexample = counterexample
        at = f" at {where}" if where else ""
        first = f"; {counterexample}" if counterexample else ""
        super().__init__(
            f"the contract declares {declared}, but the code keeps {found}{at}{first}. "
            "Correct the declared retention (or its order), or the code.",
            field="retention",
            region=region,
        )


class WrongModule(ContractError):
    """A contract that was written for another module than the one being compiled, or whose module breaks the graph."""

    reason = "wrong_module"

    def __init__(self, contract: str, expected: str, found: str, *, broken: tuple[str, str] | None = None) -> None:
        """``broken``: the module that the contract does describe, which Dynamo runs as it is, and why and where."""
        self.contract = contract
        self.expected = expected
        self.found = found
        self.broken = broken
        problem = (
            f"the contract {contract!r} describes {expected}, but it was given {found}. "
            "Compile the module that the contract describes, or pass the contract of this one."
        )
        if broken is not None:
            problem = (
                f"the contract {contract!r} describes {expected} of {broken[0]}, which Dynamo does not compile: it "
                f"breaks the graph ({broken[1]}), and compiles {found} by itself. Move what breaks it out of the "
                "compiled callable; torch.compile(..., fullgraph=True) shows it in full."
            )
        super().__init__(problem, field="name")


class ContractFileError(ContractError):
    """A contract file that cannot be read, or that has a field which is not known."""

    reason = "bad_contract_file"

    def __init__(self, path: str, problem: str, *, field: str | None = None, region: str | None = None) -> None:
        self.path = path
        super().__init__(problem, field=field, region=region)
        self.args = (f"{path}: {self.args[0]}",)


class ExampleFailed(CadenceError):
    """`infer` was given a call that the module cannot make, or a module that it cannot copy."""

    reason = "example_failed"

    def __init__(self, problem: str, location: str | None) -> None:
        self.problem = problem
        self.location = location
        super().__init__(problem + (f" ({location})" if location else ""))


class CatalogTooWide(CadenceError):
    """More classes are reachable than the contract allows to capture."""

    reason = "catalog_too_wide"

    def __init__(self, width: int, limit: int, arithmetic: str, *, exact: bool = True) -> None:
        self.width = width
        self.limit = limit
        self.arithmetic = arithmetic
        count = counted(width, "class") if exact else f"more than {counted(limit, 'class')} (at most {width:,})"
        super().__init__(
            f"the contract reaches {count}, and max_classes allows {limit:,}: {arithmetic}. "
            "Use a stride closer to the window, declare fewer flush lengths, or raise max_classes."
        )


class CatalogMismatch(CadenceError):
    """The contract reaches points that no graph serves."""

    reason = "catalog_mismatch"

    def __init__(self, missing: Sequence[object]) -> None:
        self.missing = tuple(missing)
        super().__init__(
            f"the catalog and the graphs disagree: {len(self.missing)} reachable under the contract but served by no "
            f"graph, first: {self.missing[0]}. Correct the strides, extents or flush lengths that are declared."
        )


class NotServed(CadenceError):
    """A declared call that could only run eager during warm-up; ``reason`` is the word a miss is counted under."""

    reason = "not_served"

    def __init__(self, call: object, reason: str, detail: str) -> None:
        self.reason = reason
        super().__init__(f"the declared call {call} cannot be captured: {reason}{f': {detail}' if detail else ''}.")


class StaleState(CadenceError):
    """A state that an earlier call has already consumed was passed in again."""

    reason = "stale_state"

    def __init__(self, region: str) -> None:
        self.region = region
        super().__init__(
            f"the state passed for region {region!r} was consumed by an earlier call, and its memory now holds newer "
            "frames. Pass the state that the last call returned, or keep a clone before the call."
        )


class AuditMismatch(CadenceError):
    """A replayed call whose bytes are not the bytes of the stock computation."""

    reason = "audit_mismatch"

    def __init__(
        self, where: str, *, call: int, axis: int, start: int, stop: int, expected: bytes, actual: bytes
    ) -> None:
        """``where`` is a region or an output; ``start:stop`` the indices along ``axis`` that hold every difference."""
        self.where = where
        self.call = call
        self.axis = axis
        self.start = start
        self.stop = stop
        self.expected = expected
        self.actual = actual
        super().__init__(
            f"call {call}: {where} differs from eager within [{start}:{stop}] of axis {axis}; the first difference has "
            f"the bytes {expected.hex(' ')} in eager and {actual.hex(' ')} in the replay. "
            "Serve this class eagerly and report the mismatch: bytes must never differ."
        )


class NotCapturable(CadenceError):
    """A graph holds something that no recorder can capture; ``reason`` is the word that names it."""

    reason = "not_capturable"

    def __init__(self, reason: str, node: str, location: str | None = None) -> None:
        self.reason = reason
        self.node = node
        self.location = location
        at = f" at {location}" if location else ""
        super().__init__(
            f"node {node!r}{at} cannot be captured ({reason}). Move it out of the compiled callable, "
            "or leave this call to run eagerly."
        )


class NotCompiled(CadenceError):
    """A verb was given something that was not compiled with this backend."""

    reason = "not_compiled"

    def __init__(self, verb: str, found: object) -> None:
        self.verb = verb
        self.found_type = type(found).__name__
        super().__init__(
            f'{verb}() needs a callable compiled with torch.compile(..., backend="cadence"), and was given '
            f"{self.found_type}. Pass the compiled callable itself."
        )


class UnknownFamily(CadenceError):
    """An object of a class that no family of adapters binds."""

    reason = "unknown_family"

    def __init__(self, found: str, families: Mapping[str, Sequence[str]], *, itself: bool = False) -> None:
        """``families``: the classes that each family binds; ``itself``: the class was given, and no object of it."""
        self.found = found
        self.families = {name: tuple(classes) for name, classes in families.items()}
        names: dict[str, list[str]] = {}
        for name, classes in self.families.items():
            for each in classes:
                names.setdefault(each.rpartition(".")[2], []).append(repr(name))
        near = nearest_name(found.rpartition(".")[2], list(names))
        hint = f" Did you mean a {near}, of {' or '.join(names[near])}?" if near else ""
        given = f"found the class {found!r} itself, and bind() takes an object" if itself else (
            f"no family binds an object of the class {found!r}")  # fmt: skip
        known = [f"  {name}: {', '.join(classes)}" for name, classes in self.families.items()]
        lines = [f"{given}.{hint}", "Known classes, by family:" if known else "Known classes: none", *known]
        lines += [
            "Bind an object of one of these, register a family of your own (adapters.register_family),",
            "or declare a contract for the module that you compile (cadence_fx.declare).",
        ]
        super().__init__("\n".join(lines))


class VendorMismatch(CadenceError):
    """An object of a known class, in a version that was not tested or without what its family binds."""

    reason = "vendor_mismatch"

    def __init__(self, found: str, problems: Mapping[str, Sequence[str]]) -> None:
        """``problems``: what is wrong with the object, for each tested release of each family that has its class."""
        self.found = found
        self.problems = {release: tuple(wrong) for release, wrong in problems.items()}
        said = [f"  for {release}: {', '.join(wrong)}" for release, wrong in self.problems.items()]
        lines = [f"{found} is none of the tested releases:", *said, "Install one of these releases."]
        super().__init__("\n".join(lines))


class AlreadyBound(ContractError):
    """An object that is bound was to be bound again."""

    reason = "already_bound"

    def __init__(self, found: str) -> None:
        self.found = found
        super().__init__(f"this {found} is bound already: unbind it first, or go on with what bind() returned")


class NotBound(CadenceError):
    """Something else than what `bind` returned, or a binding that has been undone."""

    reason = "not_bound"

    def __init__(self, verb: str, found: str) -> None:
        self.verb = verb
        self.found = found
        super().__init__(
            f"{verb}() needs what bind() returned, as long as it is bound, or the object that is bound, and was given "
            f"{found}. Bind the object, and keep what bind() returns."
        )


class PassFailed(CadenceError):
    """A pass raised, broke what the graph takes and returns, or left a global mode changed; the passes that had run
    before it are named."""

    reason = "pass_failed"

    def __init__(self, name: str, before: Sequence[str], cause: BaseException) -> None:
        self.name = name
        self.before = tuple(before)
        super().__init__(
            f"the pass {name!r} failed: {type(cause).__name__}: {cause}. "
            f"Passes that had run before it: {', '.join(self.before) or 'none'}. "
            "The class is captured without it, or, where it is needed, without any rewrite."
        )


class SetTooLate(CadenceError):
    """`deterministic()` was entered after CUDA had been initialised without the cuBLAS setting that it needs."""

    reason = "set_too_late"

    def __init__(self, variable: str, wanted: str, found: str | None) -> None:
        self.variable = variable
        self.found = found
        super().__init__(
            f"CUDA is initialised already, and cuBLAS reads {variable} once, when it is first used; it is "
            f"{'not set' if found is None else repr(found)}. Enter deterministic() before the first use of a GPU, "
            f"or start the process with {variable}={wanted}."
        )


class WeightsWritten(CadenceError):
    """Warm-up ran code that writes a parameter too large to be put back."""

    reason = "weights_written"

    def __init__(self, names: Sequence[str], kept: int) -> None:
        self.names = tuple(names)
        super().__init__(
            f"the declared calls write {counted(len(self.names), 'parameter')}, first "
            f"{self.names[0]!r}, and warm_up puts back no more than {kept >> 20} MiB of parameters: their values are "
            "no longer those of before. Load the weights again, and keep what the code writes in a buffer, "
            "which is always put back, or declare it as a Region."
        )


class NoPicture(CadenceError):
    """A plan cannot be drawn into a file."""

    reason = "no_picture"

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        super().__init__(f"{path}: {problem}")
