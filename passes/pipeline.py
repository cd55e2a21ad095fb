"""The one ordered list of passes, and the runner that knows none of them by name."""

from __future__ import annotations

import copy
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence

import torch.fx as fx

from cadence_fx.errors import CadenceError, PassFailed
from cadence_fx.passes.base import Pass, PassContext
from cadence_fx.passes.elide_copies import ElideCopies
from cadence_fx.passes.fold_host_constants import FoldHostConstants
from cadence_fx.passes.forward_stores import ForwardStores
from cadence_fx.passes.hoist_host_reads import HoistHostReads
from cadence_fx.passes.reinplace_retention import ReinplaceRetention
from cadence_fx.passes.split_host import SplitHost
from cadence_fx.passes.verify_capturable import VerifyCapturable

__all__ = ["default_passes", "register_pass", "run_passes"]

log = logging.getLogger("cadence_fx.passes")
_registered: list[Pass] = []


def register_pass(pass_: Pass) -> Pass:
    """Add a pass to the default list. It runs before the rewrite of the states, in order of registration.

    Raises ``TypeError`` for an object that is not a pass and ``ValueError`` for a name already taken.
    """
    if not isinstance(pass_, Pass) or not callable(pass_):
        raise TypeError(f"a pass has a name and is called as pass_(gm, ctx); {pass_!r} is not one")
    if pass_.name in {known.name for known in default_passes()}:
        raise ValueError(f"a pass named {pass_.name!r} is already registered; choose another name")
    _registered.append(pass_)
    return pass_


def default_passes() -> list[Pass]:
    """The passes of every class, in the order in which they run."""
    return [
        *_registered,  # additions see the graph as it was traced, before any write on a carry exists
        HoistHostReads(),  # before constants are folded: what it opens reads some
        FoldHostConstants(),  # before the states are followed: what it leaves behind is constant and on the device
        SplitHost(),  # after the constants: what is left on the host changes from call to call
        ForwardStores(),  # before the states are followed: what they are made of is then closer at hand
        ElideCopies(),  # after the stores: some copies were made of memory that is gone
        ReinplaceRetention(),  # after whatever changes how a state is computed; its writes must stay behind the reads of the old
        VerifyCapturable(),  # last: it judges the graph that will be recorded
    ]


def run_passes(
    gm: fx.GraphModule, ctx: PassContext, passes: Sequence[Pass] | None = None, before: Sequence[str] = ()
) -> fx.GraphModule:
    """Run ``passes`` (the default list if None) on a copy of ``gm`` and return it, linted and recompiled.

    The graph is copied; tensors it refers to (weights, constants) are shared with ``gm``, since copies of those would
    live at other addresses and no longer follow the originals.

    A pass that fails raises ``PassFailed`` with the passes that ran before it, in an earlier run too (``before``); an
    error that already is one of the project's own (such as ``NotCapturable``) says more than that and goes through
    unchanged.
    """
    source, gm = gm, fx.GraphModule(gm, copy.deepcopy(gm.graph), type(gm).__name__)
    gm.meta.update(source.meta)
    done = list(before)
    for pass_ in default_passes() if passes is None else passes:
        earlier = (gm.code, _op_counts(gm)) if _debugging() else None
        started = time.perf_counter()
        try:
            if (requires := getattr(pass_, "requires", None)) is not None:
                requires(gm, ctx)
            result = pass_(gm, ctx)
            gm = result.graph_module
            if result.modified:
                gm.graph.lint()
                gm.recompile()
            if (ensures := getattr(pass_, "ensures", None)) is not None:
                ensures(gm, ctx)
        except CadenceError:
            raise
        except Exception as cause:
            raise PassFailed(pass_.name, done, cause) from cause
        done.append(pass_.name)
        if earlier is not None:
            _report(pass_.name, bool(result.modified), time.perf_counter() - started, earlier, gm)
    return gm


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
