"""The report of a compiled callable: classes, replays, misses by reason, bytes predicted and measured, latencies."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from cadence_fx._table import aligned
from cadence_fx._units import counted
from cadence_fx.accounts import compare, staged
from cadence_fx.capture import ReplayClass
from cadence_fx.effects import DEVICE_RANDOM, PURE, REFUSED
from cadence_fx.ledger import PHASES
from cadence_fx.lookup import program_of
from cadence_fx.plan import Miss
from cadence_fx.program import Program
from cadence_fx.proofs import proof_facts, proof_lines
from cadence_fx.replay import ExactShapeReplay


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """A snapshot; `str()` is for people, `as_dict()` and `to_json()` for programs. Bytes are bytes, times as named."""

    facts: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """All figures, as plain containers."""
        return self.facts

    def to_json(self, *, indent: int | None = 2) -> str:
        """All figures as JSON."""
        return json.dumps(self.facts, indent=indent)

    def __getitem__(self, key: str) -> Any:
        return self.facts[key]

    def __str__(self) -> str:
        return _text(self.facts)


def report(compiled: Any) -> Report:
    """What happened to a compiled callable so far.

    Args:
        compiled: what `torch.compile(..., backend="cadence")` returned, or an `ExactShapeReplay`.

    Raises:
        NotCompiled: anything else.
    """
    if isinstance(compiled, ExactShapeReplay):
        return Report(
            _counts(compiled.ledger)
            | {"name": compiled.name, "classes": len(compiled.classes)}
            | _class_facts(compiled.classes, compiled.refused)
        )
    program = program_of(compiled, "report")
    classes = _distinct(c for _, table in program.graphs for c in table.classes.values())
    facts = _counts(program.ledger)
    facts |= {
        "name": program.name,
        "sealed": program.sealed,
        "graphs": len(program.graphs),
        "catalog": len(program.catalog),
        "classes": len(classes),
        "captured_entries": len(_captured_entries(program)),
        "retention": {f"{name} {a}->{b}": str(proof) for (name, a, b, _), proof in program.proofs.items()},
        "proof": proof_facts(program.contract, program.catalog, program.proofs.values(), program.audited_calls),
        "carries": {
            f"{key[0]} {carry.name}" if key[0] != carry.name else carry.name: carry.nbytes
            for key, carry in program.carries.items()
        },
        "bytes": _bytes(program, classes),
    }
    if program.prediction is not None:
        facts["prediction"] = compare(program.prediction, program, classes, _workspaces(program))
    return Report(
        facts | _class_facts(classes, [miss for _, table in program.graphs for miss in table.refused.values()])
    )


def _distinct(entries: Iterable[ReplayClass]) -> list[ReplayClass]:
    """Classes that several Dynamo graphs share, once each, with all their replays."""
    found: dict[int, ReplayClass] = {}
    for entry in entries:
        first = found.get(id(entry.recording))
        replays = entry.replays + (first.replays if first is not None else 0)
        found[id(entry.recording)] = dataclasses.replace(first or entry, replays=replays)
    return list(found.values())


def _counts(ledger: Any) -> dict[str, Any]:
    return {
        "replays": ledger.replays,
        "captures": ledger.captures,
        "late_captures": ledger.late_captures,
        "misses": dict(ledger.misses),
        "refusals": dict(ledger.refusals),
        "invalidations": dict(ledger.invalidations),
        "eager_operators": dict(ledger.eager_operators),
        "details": {reason: dict(seen) for reason, seen in ledger.details.items()},
        "adoptions": ledger.adoptions,
        "evacuations": ledger.evacuations,
        "capture_seconds": round(ledger.capture_seconds, 3),
        "seconds": {phase: round(ledger.seconds[phase], 3) for phase in PHASES if phase in ledger.seconds},
        "latency_us": ledger.quantiles_us(),
    }


def _class_facts(classes: list[ReplayClass], refused: Sequence[Miss]) -> dict[str, Any]:
    verdicts = Counter(c.effects.verdict for c in classes) + Counter({REFUSED: len(refused)})
    return {
        "effects": {verdict: verdicts[verdict] for verdict in (PURE, DEVICE_RANDOM, REFUSED)},
        "refused_classes": [{"effects": REFUSED, "reason": m.reason, "detail": m.detail} for m in refused],
        "class_table": [
            {
                "class": c.plan.label,
                "effects": c.effects.verdict,
                "draws": list(c.effects.draws),
                "replays": c.replays,
                "capture_seconds": round(c.capture_seconds, 3),
                "ready_seconds": round(c.ready_seconds, 3),
                "staging_bytes": c.staging_bytes,
                "pool_bytes": c.recording.nbytes,
                "kept_bytes": c.plan.kept.nbytes if c.plan.kept is not None else 0,
                "compared_inputs": c.plan.compared,
                "eager_operators": list(c.plan.eager),
                "notes": list(c.plan.notes),
            }
            for c in classes
        ],
    }


def _captured_entries(program: Program) -> set[str]:
    return {c.plan.label for _, table in program.graphs for c in table.classes.values()}


def _bytes(program: Program, classes: list[ReplayClass]) -> dict[str, int]:
    """The paper's equation (6): staged inputs of every class, plus each region's storage once, plus what is computed
    once and kept, which classes share. Predicted is what the contract and the example call of warm-up tell."""
    prediction = program.prediction
    kept = {id(t): t for c in classes if c.plan.kept is not None for t in c.plan.kept.residents}
    told = prediction.staging if prediction is not None else {}
    buffers = [staged(c) for c in classes]
    return {
        "predicted_staging": sum(told.get(c.plan.label, 0) for c in classes),
        "measured_staging": sum(each.arguments for each in buffers),
        "predicted_carries": sum(prediction.carries.values()) if prediction is not None else 0,
        "measured_carries": sum(c.flat.untyped_storage().nbytes() for c in program.carries.values())
        + sum(sum(each.states.values()) for each in buffers),
        "predicted_kept": sum(t.numel() * t.element_size() for t in kept.values()),
        "measured_kept": sum(t.untyped_storage().nbytes() for t in kept.values()),
        "workspaces": sum(_workspaces(program).values()),
        "pool": sum(c.recording.nbytes for c in classes),
    }


def _workspaces(program: Program) -> dict[str, int]:
    """Bytes of the module's tensors that are declared to mean nothing between calls."""
    found: dict[str, int] = {}
    for planner, _ in program.graphs:
        for entry in planner.binding.inputs:
            if entry.role == "fixed" and program.is_scratch(entry.origin):
                size = math.prod(int(extent) for extent in entry.sizes)
                found[entry.accessor] = size * planner.itemsize(entry.index)
    return found


def _size(count: int) -> str:
    """Bytes with a unit that shows them."""
    for unit, width in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= width:
            return f"{count / width:.1f} {unit}"
    return f"{count} B"


def _prediction(facts: dict[str, Any]) -> str:
    """Predicted and measured, of what there is any of."""
    figures = [f"classes {facts['classes']['predicted']} and {facts['classes']['measured']}"]
    for name in ("staging", "carries", "workspaces"):
        predicted, measured = facts[name]["predicted"], facts[name]["measured"]
        figures += [f"{name} {_size(predicted)} and {_size(measured)}"] if predicted or measured else []
    others = facts["further_classes"]
    further = f", {counted(others, 'further class')} by layout or mode" if others else ""
    unread = f" (no graph reads {', '.join(facts['unread'])})" if facts["unread"] else ""
    return f"predicted and measured: {', '.join(figures)}{further}: {'held' if facts['held'] else 'NOT HELD'}{unread}"


def _text(facts: dict[str, Any]) -> str:
    lines = [
        f"{facts['name']}: {counted(facts['classes'], 'class')}"
        + (f" of a catalog of {facts['catalog']}" if facts.get("catalog") else "")
        + ("; every call runs eager" if not facts["classes"] and facts.get("sealed") else "")
        + (", sealed" if facts.get("sealed") else "")
    ]
    lines.append(
        f"  replays {facts['replays']}, captures {facts['captures']} "
        f"({facts['late_captures']} after the seal) in {facts['capture_seconds']:.1f} s"
    )
    if facts["seconds"]:
        spent = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in facts["seconds"].items())
        lines.append(f"  compiled in {sum(facts['seconds'].values()):.1f} s: {spent}")
    for what in ("misses", "refusals", "invalidations"):
        for reason, count in sorted(facts[what].items()):
            lines.append(f"  {what[:-1] if what != 'misses' else 'miss'} {reason}: {count}")
            lines += [f"      {detail}" for detail in list(facts["details"].get(reason, {}))[:3] if detail]
    for reason, count in sorted(facts["eager_operators"].items()):
        lines.append(f"  operator calls that ran eager inside replays, {reason}: {count}")
        lines += [
            f"      {what}" for what in dict.fromkeys(w for c in facts["class_table"] for w in c["eager_operators"])
        ]
    lines.append(f"  states adopted {facts['adoptions']}, evacuated {facts['evacuations']}")
    if facts.get("bytes"):
        figures = ", ".join(f"{name.replace('_', ' ')} {_size(count)}" for name, count in facts["bytes"].items())
        lines.append(f"  bytes: {figures}")
    if "prediction" in facts:
        lines.append(f"  {_prediction(facts['prediction'])}")
    if facts["latency_us"]:
        lines.append("  host time of a call (us): " + ", ".join(f"{k} {v:.1f}" for k, v in facts["latency_us"].items()))
    lines.append("  classes: " + ", ".join(f"{count} {verdict}" for verdict, count in facts["effects"].items()))
    rows = [("class", "effects", "replays", "capture s", "staging", "pool")]
    rows += [
        (
            c["class"],
            c["effects"],
            str(c["replays"]),
            f"{c['capture_seconds']:.2f}",
            _size(c["staging_bytes"]),
            _size(c["pool_bytes"]),
        )
        for c in facts["class_table"]
    ]
    lines += aligned(rows, indent="  ")
    compared = Counter(c["compared_inputs"] for c in facts["class_table"])
    if compared:
        each = ", ".join(f"{classes} on {counted(inputs, 'input')}" for inputs, classes in sorted(compared.items()))
        lines.append(f"  classes compared with eager: {each}")
    if facts.get("retention"):
        proved = sum(verdict == "proved" for verdict in facts["retention"].values())
        lines.append(f"  retention: {proved} of {len(facts['retention'])} proved")
        lines += proof_lines(facts["proof"])
    return "\n".join(lines)
