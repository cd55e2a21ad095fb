"""The one ordered list of passes, and the runner that knows none of them by name."""

from __future__ import annotations

import copy
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch.fx as fx

from cadence_fx._torch_modes import modes_kept
from cadence_fx._torch_retrace import lazy_module
from cadence_fx.errors import CadenceError, PassFailed, unknown_name
from cadence_fx.passes.base import Pass, PassContext, PassResult
from cadence_fx.passes.batch_copies import BatchCopies
from cadence_fx.passes.captured import Edit
from cadence_fx.passes.clear_once import ClearOnce
from cadence_fx.passes.cleared_products import ClearedProducts
from cadence_fx.passes.constant_writes import ConstantWrites
from cadence_fx.passes.drop_scalings import DropScalings
from cadence_fx.passes.elide_copies import ElideCopies
from cadence_fx.passes.fold_host_constants import FoldHostConstants
from cadence_fx.passes.forward_stores import ForwardStores
from cadence_fx.passes.graphs import SharedFacts, output_node
from cadence_fx.passes.hoist_host_reads import HoistHostReads
from cadence_fx.passes.hoist_slow import HoistSlow
from cadence_fx.passes.jit_chains import JitChains
from cadence_fx.passes.keep_conversions import KeepConversions
from cadence_fx.passes.late_writes import LateWrites
from cadence_fx.passes.merge_common import MergeCommon
from cadence_fx.passes.parallel_branches import ParallelBranches
from cadence_fx.passes.reinplace_retention import ReinplaceRetention
from cadence_fx.passes.spell_casts import SpellCasts
from cadence_fx.passes.split_host import SplitHost
from cadence_fx.passes.verify_capturable import VerifyCapturable
from cadence_fx.passes.write_parts import WriteParts

__all__ = [
    "Choice",
    "default_passes",
    "is_needed",
    "optional_passes",
    "register_pass",
    "run_passes",
    "select_edits",
    "select_passes",
]

# Which passes run: None for the default ones, names for exactly those, or a mapping that turns some on and some off.
Choice = Mapping[str, bool] | Iterable[str] | None

log = logging.getLogger("cadence_fx.passes")
_registered: list[Pass] = []


def register_pass(pass_: Pass) -> Pass:
    """Add a pass to the default list. It runs before the rewrite of the states, in order of registration.

    Raises ``TypeError`` for an object that is not a pass and ``ValueError`` for a name already taken.
    """
    if not isinstance(pass_, Pass) or not callable(pass_):
        raise TypeError(f"a pass has a name and is called as pass_(gm, ctx); {pass_!r} is not one")
    if pass_.name in {known.name for known in _all()}:
        raise ValueError(f"a pass named {pass_.name!r} is already registered; choose another name")
    _registered.append(pass_)
    return pass_


# Without these a class is not in the form that is recorded; the others can be left out, one by one.
_NEEDED = {kind.name for kind in (HoistHostReads, FoldHostConstants, SplitHost, ReinplaceRetention, VerifyCapturable)}
_OPTIONAL = {JitChains.name, WriteParts.name}  # left out unless they are asked for


def _all() -> list[Pass]:
    """Every pass, in the order in which they run."""
    return [
        *_registered,  # additions see the graph as it was traced, before any write on a carry exists
        HoistHostReads(),  # before constants are folded: what it opens reads some
        FoldHostConstants(),  # before the states are followed: what it leaves behind is constant and on the device
        SplitHost(),  # after the constants: what is left on the host changes from call to call
        ConstantWrites(),  # before constants are merged and kept, which memory that is written never is
        MergeCommon(),  # before the states are written in place: nothing is written yet that the code does not write
        ForwardStores(),  # before the states are followed: what they are made of is then closer at hand
        ElideCopies(),  # after the stores: some copies were made of memory that is gone
        ReinplaceRetention(),  # after whatever changes how a state is computed; its writes stay behind reads of the old
        SpellCasts(),  # just before they are kept; what follows states has no use for them
        HoistSlow(),  # after what follows states, which goes by constants; it writes nothing
        JitChains(),  # after the writes on states, which are no part of a chain; before results are put elsewhere
        WriteParts(),  # after the states have been followed through the cats
        BatchCopies(),  # after the passes that add copies
        ClearedProducts(),  # after whatever decides which products there are and how long their results live
        LateWrites(),  # after the states are written, and before branches are planned
        VerifyCapturable(),  # after every rewrite: it judges the graph that will be recorded
        ParallelBranches(),  # last: it plans the run of that graph, and changes no operator
    ]


def _edits() -> list[Edit]:
    """Every edit of captured graphs, in the order in which they are made."""
    return [KeepConversions(), ClearOnce(), DropScalings()]


def default_passes() -> list[Pass]:
    """The passes of every class for which nothing else is chosen, in the order in which they run."""
    return [pass_ for pass_ in _all() if pass_.name not in _OPTIONAL]


def optional_passes() -> list[Pass]:
    """The passes that run only where they are asked for."""
    return [pass_ for pass_ in _all() if pass_.name in _OPTIONAL]


def is_needed(pass_: Pass) -> bool:
    """Whether a class cannot be recorded without the pass. Others can be left out, and are where they fail."""
    return pass_.name in _NEEDED


def select_passes(choice: Choice = None) -> list[Pass]:
    """The passes of a choice, in the order in which they run; the needed ones are always among them.

    Args:
        choice: None for the default ones; names for exactly those (an empty list replays the kernels as they are); a
            mapping from names to whether they run, the others as by default.

    Raises:
        TypeError: not a choice.
        ValueError: no pass has such a name, or one is left out that is needed.
    """
    wanted = _wanted(choice)
    return [pass_ for pass_ in _all() if wanted[pass_.name] or is_needed(pass_)]


def select_edits(choice: Choice = None) -> list[Edit]:
    """The edits of captured graphs among a choice, as ``select_passes`` has it, in the order in which they are made."""
    wanted = _wanted(choice)
    return [edit for edit in _edits() if wanted[edit.name]]


def _wanted(choice: Choice) -> dict[str, bool]:
    """Which passes and edits a choice turns on."""
    if isinstance(choice, str) or not isinstance(choice, (Mapping, Iterable, type(None))):
        raise TypeError(f"expected a list of names, or a dict of name: bool, found {choice!r}")
    names = [*(pass_.name for pass_ in _all()), *(edit.name for edit in _edits())]
    wanted = {name: name not in _OPTIONAL for name in names}
    if isinstance(choice, Mapping):
        given = dict(choice)
    else:
        given = dict.fromkeys(choice or (), True)
        wanted = wanted if choice is None else dict.fromkeys(names, False)
    for name, on in given.items():
        if name not in wanted:
            raise ValueError(unknown_name("pass", name, names))
        if not isinstance(on, bool):
            raise TypeError(f"{name!r} is True or False, found {on!r}")
        if not on and name in _NEEDED:
            raise ValueError(f"{name!r} cannot be left out: it brings a class into the form that is recorded")
    return wanted | given


def run_passes(
    gm: fx.GraphModule, ctx: PassContext, passes: Sequence[Pass] | None = None, before: Sequence[str] = ()
) -> fx.GraphModule:
    """Run ``passes`` (the default list if None) on a copy of ``gm`` and return it. Its code is made when it first runs.

    The graph is copied; tensors it refers to (weights, constants) are shared with ``gm``, since copies of those would
    live at other addresses and no longer follow the originals.

    A pass that fails raises ``PassFailed`` with the passes that ran before it, in an earlier run too (``before``); an
    error that already is one of the project's own (such as ``NotCapturable``) says more than that and goes through
    unchanged. A pass has failed, too, that leaves the graph with other inputs or another number of results, or a
    global mode changed behind it; the modes are put back in every case.
    """
    source, gm = gm, lazy_module(gm, copy.deepcopy(gm.graph))
    gm.meta.update(source.meta)
    done = list(before)
    ctx.shared = SharedFacts()
    for pass_ in default_passes() if passes is None else passes:
        earlier = (gm.code, _op_counts(gm)) if _debugging() else None
        started = time.perf_counter()
        try:
            with modes_kept():
                result = _run_pass(pass_, gm, ctx)
            gm = result.graph_module
            if result.modified or _is_foreign(pass_):
                ctx.shared.forget()
        except CadenceError:
            raise
        except Exception as cause:
            raise PassFailed(pass_.name, done, cause) from cause
        done.append(pass_.name)
        if earlier is not None:
            _report(pass_.name, bool(result.modified), time.perf_counter() - started, earlier, gm)
    ctx.shared = None  # nobody tells of changes from here on
    return gm


def _run_pass(pass_: Pass, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
    """Run one pass on a graph and look at what it has made of it."""
    inputs, results = _interface(gm)
    if (requires := getattr(pass_, "requires", None)) is not None:
        requires(gm, ctx)
    result = pass_(gm, ctx)
    if result.modified:
        ctx.modified.append(pass_.name)
        if _is_checked(pass_):
            result.graph_module.graph.lint()
        result.graph_module.recompile()
    found, made = _interface(result.graph_module)
    if made != results:
        raise ValueError(f"the graph returns {made}, and returned {results}")
    if is_needed(pass_):  # the rewrite of the states appends their destinations
        found = found[: len(inputs)]
    if found != inputs:
        raise ValueError(f"the graph takes {', '.join(found)}, and took {', '.join(inputs)}")
    if (ensures := getattr(pass_, "ensures", None)) is not None:
        ensures(result.graph_module, ctx)
    return result


def _interface(gm: fx.GraphModule) -> tuple[list[str], str]:
    """The names of the inputs of a graph, and what it returns, in words."""
    results = output_node(gm.graph).args[0]
    made = f"a list of {len(results)}" if isinstance(results, (list, tuple)) else "no list"
    return [node.name for node in gm.graph.find_nodes(op="placeholder")], made


def _is_checked(pass_: Pass) -> bool:
    """Whether the graph is linted after a pass: those of this package break none, as its tests see to."""
    return _is_foreign(pass_) or _debugging() or "PYTEST_VERSION" in os.environ


def _is_foreign(pass_: Pass) -> bool:
    return not type(pass_).__module__.startswith(__package__)


def _debugging() -> bool:
    return bool(os.environ.get("CADENCE_DEBUG_PASSES")) or log.isEnabledFor(logging.DEBUG)


def _op_counts(gm: fx.GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in gm.graph.nodes if node.op == "call_function")


def _report(name: str, modified: bool, seconds: float, before: tuple[str, Counter[str]], gm: fx.GraphModule) -> None:
    code, counts = before
    if not modified:
        text = f"{name}: unchanged ({seconds * 1e3:.1f} ms)"
    else:
        now = _op_counts(gm)
        changes = {op: now[op] - counts[op] for op in sorted(now | counts) if now[op] != counts[op]}
        diff = ", ".join(f"{op} {change:+d}" for op, change in changes.items()) or "same operators"
        text = f"{name}: {diff} ({seconds * 1e3:.1f} ms)\n--- before{code}\n--- after{gm.code}"
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s", text)
    else:  # the switch asks for the text by itself, so it shows even where nobody has set up logging
        print(text, file=sys.stderr)
