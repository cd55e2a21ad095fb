"""What the proof of retention found, for each region and class: the record that the report shows (paper section 4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch.fx as fx

from cadence_fx._table import aligned
from cadence_fx._units import counted
from cadence_fx.binding import Instance
from cadence_fx.catalog import Catalog, CatalogEntry
from cadence_fx.contract import Contract, Region
from cadence_fx.passes import RegionSlot
from cadence_fx.passes.graphs import location, output_node
from cadence_fx.passes.provenance import Contradicted, Proved, Verdict
from cadence_fx.retention import Span

Outcome = Literal["proved", "contradicted", "not provable"]
Shows = Literal["frames", "unchanged", "extent"]


@dataclasses.dataclass(frozen=True, slots=True)
class Proof:
    """One state in one class: what its graph keeps, against what is declared.

    Attributes:
        region, instance: the region, and which of its instances.
        extent, next_extent, added: frames before and after the call, and frames that it brings.
        shows: "frames" (each position of the next state is the declared frame), "unchanged" (the call only reads it)
            or "extent" (its size is the declared one: of a state that is replaced or written by index, the contract
            declares no more).
        declared, found: what survives, as spans of the old state and the new frames; None where it is not known.
        counterexample: the first frame that is another one than declared.
        reason, node, operator: why the proof ends, and where in the graph; of a ring, where the call chooses what it
            overwrites, which is not declared.
        where: the user's file and line.
    """

    region: str
    instance: str
    extent: int
    next_extent: int
    added: int
    verdict: Outcome
    shows: Shows
    declared: str | None = None
    found: str | None = None
    counterexample: str | None = None
    reason: str | None = None
    node: str | None = None
    operator: str | None = None
    where: str | None = None

    @property
    def key(self) -> tuple[str, int, int, int]:
        """Which state in which class."""
        return self.instance, self.extent, self.next_extent, self.added

    def __str__(self) -> str:
        if self.verdict == "contradicted":
            return f"contradicted: {self.counterexample}"
        if self.verdict == "proved":
            return "proved"
        at = f", {self.where}" if self.where else ""
        return f"not provable: {self.reason} (at {self.node}, {self.operator}{at})"


def proof_of(graph: fx.Graph, slot: RegionSlot, verdict: Verdict) -> Proof:
    """The record of a verdict."""
    policy = slot.declared.retention
    declared = policy.survivors(slot.extent, slot.advance)
    extent_only = policy.fixed or declared is None
    proof = Proof(
        region=slot.name,
        instance=slot.instance,
        extent=slot.extent,
        next_extent=slot.next_extent,
        added=slot.advance,
        verdict="proved",
        shows="extent" if extent_only else "frames",
        declared=spell_spans(declared) if declared is not None and not extent_only else None,
    )
    if isinstance(verdict, Proved):
        return dataclasses.replace(proof, found=None if extent_only else spell_spans(verdict.spans))
    if isinstance(verdict, Contradicted):
        outputs = output_node(graph).args[0]
        where = location(outputs[slot.output]) if slot.output is not None else None  # type: ignore[index,arg-type]
        return dataclasses.replace(
            proof,
            verdict="contradicted",
            declared=spell_spans(verdict.declared),
            found=spell_spans(verdict.found),
            counterexample=_counterexample(verdict),
            where=where,
        )
    return dataclasses.replace(
        proof,
        verdict="proved" if declared is None else "not provable",  # nothing but the extent is declared of a ring
        reason=verdict.reason,
        node=verdict.node,
        operator=verdict.operator,
        where=verdict.location,
    )


def unchanged(instance: Instance, extent: int, following: int, added: int, *, stays: bool) -> Proof:
    """The record of a state that a graph neither writes nor returns.

    Args:
        extent, following: before and after the call, as declared.
        stays: the frame that the graph is of leaves the state in its place. Else code outside of the graph decides
            what the next one is, such as one that exchanges two states.
    """
    region, policy = instance.region, instance.region.retention
    proof = Proof(region.name, instance.name, extent, following, added, verdict="proved", shows="unchanged")
    if not stays:
        why = "is only read here, and what the next state is, the graph does not say"
        shows: Shows = "extent" if policy.fixed else "frames"
        return dataclasses.replace(
            proof, verdict="not provable", shows=shows, reason=why, node=instance.name, operator="placeholder"
        )
    declared, old = policy.survivors(extent, added), (Span("old", 0, extent),) if extent else ()
    if policy.fixed or declared is None or declared == old:
        return proof
    differs = next(at for at in range(following + 1) if _frame(declared, at) != _frame(old, at))
    return dataclasses.replace(
        proof,
        verdict="contradicted",
        shows="frames",
        declared=spell_spans(declared),
        found=spell_spans(old),
        counterexample=_counterexample(Contradicted(declared, old, differs)),
    )


def proof_facts(
    contract: Contract | None, catalog: Catalog, proofs: Iterable[Proof], audited_calls: int
) -> list[dict[str, Any]]:
    """For each region that lasts: its reachable classes, how many are proved, and what is known of each.

    A class is the extents before and after a call and the frames that it brings; it is proved where it is for every
    instance. Those that no graph was made of (refused before, or not captured yet) are ``unseen``.
    """
    known = list(proofs)
    facts = []
    for region in contract.regions if contract is not None else ():
        if not region.persistent or region.mutability == "read_only":
            continue
        mine = [proof for proof in known if proof.region == region.name]
        reachable = {_class_of(region, entry) for entry in catalog}
        seen: dict[tuple[int, int, int], list[Proof]] = {}
        for proof in mine:
            seen.setdefault((proof.extent, proof.next_extent, proof.added), []).append(proof)
        proved = sum(all(p.verdict == "proved" for p in found) for key, found in seen.items() if key in reachable)
        facts.append(
            {
                "region": region.name,
                "classes": len(reachable),
                "proved": proved,
                "unseen": len(reachable - seen.keys()),
                "shows": mine[0].shows if mine else None,
                "held_by": _held_by(mine, audited_calls),
                "entries": [dataclasses.asdict(proof) for proof in mine],
            }
        )
    return facts


def _class_of(region: Region, entry: CatalogEntry) -> tuple[int, int, int]:
    ticks = entry.advance_of(region.frame_clock) if region.frame_clock is not None else 0
    return entry.extent_of(region.name), entry.next_of(region.name), region.added(ticks)


def _held_by(proofs: Sequence[Proof], audited_calls: int) -> str:
    """What vouches for the bytes of a region: the certificate of each class does, whatever could be proved."""
    if all(proof.verdict == "proved" and proof.shows != "extent" for proof in proofs) and proofs:
        return "proof and certificate"
    return f"certificate and audit of {counted(audited_calls, 'call')}" if audited_calls else "certificate only"


def proof_lines(facts: Sequence[dict[str, Any]]) -> list[str]:
    """The same as text: one line a region, and one for each class that is not proved."""
    rows = [("proof of", "classes", "proved", "shows", "bytes held by")]
    rows += [
        (f["region"], str(f["classes"]), str(f["proved"]), f["shows"] or "nothing yet", f["held_by"]) for f in facts
    ]
    lines = aligned(rows, indent="  ") if facts else []
    for fact in facts:
        if fact["unseen"]:
            lines.append(f"      {fact['region']}: no graph was made of {fact['unseen']} of its classes")
        lines += [
            f"      {proof.instance} {proof.extent}->{proof.next_extent}: {proof}"
            for proof in (Proof(**entry) for entry in fact["entries"])
            if proof.verdict != "proved"
        ]
    return lines


def _counterexample(verdict: Contradicted) -> str:
    at = verdict.position
    expected, kept = _frame(verdict.declared, at), _frame(verdict.found, at)
    return f"frame {at} of the next state is {kept}, and {expected} by the contract"


def _frame(spans: Sequence[Span], position: int) -> str:
    """``old[5]``: which frame is at a position of the next state."""
    for span in spans:
        if position < len(span):
            return f"{span.source}[{span.start + position}]"
        position -= len(span)
    return "none"


def spell_spans(spans: Sequence[Span]) -> str:
    """``old[3:8] + new[0:3]``."""
    return " + ".join(map(str, spans)) or "nothing"
