"""Sharing a recording between two Dynamo graphs of the very same computation.

Dynamo may compile one piece of code again (a size became symbolic, a chunk of another length came by once) and from
then on send the declared calls to the new graph. At the same sizes both graphs trace to the same aten graph on the
same memory; then the class that exists is the class, and nothing is captured in traffic.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from cadence_fx.capture import ReplayClass
from cadence_fx.outputs import OutputRule
from cadence_fx.plan import Plan


def fingerprint(graph: fx.Graph, names: Sequence[str]) -> str | None:
    """SHA-256 of a traced graph with its inputs by name; None when it holds constants of its own or input names repeat.

    Args:
        names: what the user calls each placeholder, in order.
    """
    if len(set(names)) != len(names):
        return None
    sha = hashlib.sha256()
    numbers: dict[fx.Node, str] = {}
    placeholders = iter(names)
    for node in graph.nodes:
        if node.op == "get_attr":
            return None
        if node.op == "placeholder":
            numbers[node] = next(placeholders)
            val = node.meta.get("val")
            if isinstance(val, torch.Tensor):
                sha.update(f"{numbers[node]} {tuple(val.shape)} {val.stride()} {val.dtype}\n".encode())
            continue
        numbers[node] = f"%{len(numbers) - len(names)}"
        operands = fx.map_arg((node.args, node.kwargs), lambda n: f"<{numbers[n]}>")
        sha.update(f"{node.op} {node.target} {operands!r} {numbers[node]}\n".encode())
    return sha.hexdigest()


def in_terms_of(
    entry: ReplayClass, names: Sequence[str], plan: Plan, plan_names: Sequence[str], args: Sequence[Any]
) -> ReplayClass | None:
    """A captured class, with its argument indices changed from one graph's order to another's.

    Args:
        names: of the arguments of the graph it was captured from.
        plan, plan_names: of the graph that wants it.
        args: of the call at hand: what is fixed must be where it was captured.
    """
    index = {name: i for i, name in enumerate(plan_names)}
    moved = {i: index[name] for i, name in enumerate(names) if name in index}
    bound = {*entry.plan.fixed, *entry.plan.idle}
    if {moved.get(i) for i in bound} != set(plan.fixed) or {moved.get(i) for i in entry.plan.staged} != set(
        plan.staged
    ):
        return None
    if [use.carry for use in entry.plan.regions] != [use.carry for use in plan.regions]:
        return None
    if any(args[moved[i]].data_ptr() != entry.pointers[i] for i in entry.plan.fixed):
        return None
    pointers: list[int | None] = [None] * len(args)
    for i in entry.plan.fixed:
        pointers[moved[i]] = entry.pointers[i]
    by_carry = {id(use.carry): use for use in plan.regions}

    def rule(old: OutputRule) -> OutputRule:
        if old.kind in ("argument", "itself"):
            return dataclasses.replace(old, index=moved[old.index])
        if old.region is not None:
            return dataclasses.replace(old, region=by_carry[id(old.region.carry)])
        return old

    return dataclasses.replace(
        entry,
        plan=dataclasses.replace(
            plan,
            ways=entry.plan.ways,
            split=None,
            fixed=[moved[i] for i in entry.plan.fixed],
            idle=frozenset(moved[i] for i in entry.plan.idle),
            written=[moved[i] for i in entry.plan.written],
            staged=[moved[i] for i in entry.plan.staged],
            mutated=[moved[i] for i in entry.plan.mutated],
            host=entry.plan.host.moved(moved) if entry.plan.host is not None else None,
            kept=entry.plan.kept.moved(moved) if entry.plan.kept is not None else None,
            label=entry.plan.label,
            tape=entry.plan.tape,
            eager=entry.plan.eager,
        ),
        rules=[rule(r) for r in entry.rules],
        pointers=pointers,
        copy_back=[(moved[i], buffer) for i, buffer in entry.copy_back],
        returned=[use for use in plan.regions if use.returned],
        replays=0,
    )
