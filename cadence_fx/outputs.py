"""Turning a class's raw outputs into what the user may keep.

A launched CUDA graph writes its outputs to the same memory every time. What the user gets must survive the next
launch, keep the strides eager gives, keep the aliasing between outputs that eager gives, and alias an input where
eager's output does.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cadence_fx.layout import layout_of, same_geometry_copy
from cadence_fx.plan import Plan, RegionUse
from cadence_fx.signature import SCALARS, is_plain

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]  # size, stride, storage offset


@dataclasses.dataclass(slots=True)
class OutputRule:
    """How one output is made.

    Kinds: "constant" (a non-tensor, the same for the whole class), "fresh" (own memory), "shared" (a view of memory
    that several outputs share: `group`), "itself" (the caller's own argument `index`, as an operator that writes in
    place returns it), "argument" (a view of that argument), "region" (the new state).
    """

    kind: str
    value: Any = None
    index: int = -1
    geometry: Geometry | None = None
    region: RegionUse | None = None
    dense: bool = True


def derive_rules(plan: Plan, static_args: Sequence[Any], outputs: Sequence[Any]) -> list[OutputRule]:
    """Read the rules off one run of the stock computation on `static_args`."""
    for use in plan.regions:
        if use.output is not None:
            use.next_layout = layout_of(outputs[use.output])
    memory = {
        a.untyped_storage().data_ptr(): i
        for i, a in enumerate(static_args)
        if isinstance(a, torch.Tensor) and a.numel()
    }
    by_output = {use.output: use for use in plan.regions if use.output is not None}
    homes: dict[int, list[int]] = {}
    for i, out in enumerate(outputs):
        if isinstance(out, torch.Tensor) and out.numel():
            homes.setdefault(out.untyped_storage().data_ptr(), []).append(i)
    moving = {use.index for use in plan.regions if use.output is not None}
    rules: list[OutputRule] = []
    for i, out in enumerate(outputs):
        if i in by_output:
            rules.append(OutputRule("region", region=by_output[i]))
        elif not isinstance(out, torch.Tensor):
            rules.append(OutputRule("constant", value=out))
        else:
            geometry: Geometry = (tuple(out.shape), tuple(out.stride()), int(out.storage_offset()))
            home = out.untyped_storage().data_ptr() if out.numel() else -1
            source = memory.get(home)
            if source is not None and out is static_args[source] and source not in moving:
                rules.append(OutputRule("itself", index=source))
            elif source is not None and source not in moving:
                base = static_args[source]
                geometry = (geometry[0], geometry[1], int(out.storage_offset() - base.storage_offset()))
                rules.append(OutputRule("argument", index=source, geometry=geometry))
            elif source is None and len([j for j in homes.get(home, []) if j not in by_output]) > 1:
                rules.append(OutputRule("shared", index=home, geometry=geometry))
            else:
                rules.append(OutputRule("fresh", geometry=geometry, dense=_dense(out)))
    return rules


def unusual(static_args: Sequence[Any], outputs: Sequence[Any]) -> str | None:
    """An output that is no plain tensor, lazily conjugated, or an argument's memory as another dtype, if there is
    one."""
    homes = {a.untyped_storage().data_ptr(): a for a in static_args if isinstance(a, torch.Tensor) and a.numel()}
    for i, out in enumerate(outputs):
        if isinstance(out, torch.Tensor) and not is_plain(out):
            return f"output {i} has layout {out.layout} and {out.dtype} on {out.device}"
        if isinstance(out, torch.Tensor) and out.numel():
            base = homes.get(out.untyped_storage().data_ptr())
            if out.is_conj() or out.is_neg() or (base is not None and base.dtype != out.dtype):
                return f"output {i} is a view of other memory as {out.dtype}"
    return None


def opaque(outputs: Sequence[Any]) -> str | None:
    """A result that a launch cannot make anew, if there is one: an object that may hold tensors, or change."""
    for i, out in enumerate(outputs):
        if not isinstance(out, (torch.Tensor, torch.Size, np.generic, enum.Enum, *SCALARS)):
            return f"result {i} is of type {type(out).__name__}"
    return None


def _dense(tensor: torch.Tensor) -> bool:
    """Whether `clone` keeps the strides: non-overlapping and without holes."""
    return tensor.clone().stride() == tensor.stride()


def hand_out(rules: Sequence[OutputRule], raw: Sequence[Any], args: Sequence[Any], static: bool) -> list[Any]:
    """The user's outputs of one launch.

    Args:
        raw: outputs of the launch.
        args: the caller's own arguments.
        static: whether `raw` is memory that the next launch overwrites.
    """
    results: list[Any] = []
    groups: dict[int, torch.Tensor] = {}
    for rule, out in zip(rules, raw, strict=True):
        kind = rule.kind
        if kind == "fresh":
            results.append(_copy(out, rule) if static else out)
        elif kind == "region":
            assert rule.region is not None
            use = rule.region
            results.append(use.carry.hand_out(use.next_extent, layout=use.next_layout, shared=use.shared))
        elif kind == "constant":
            results.append(rule.value if static else out)
        elif kind == "itself":
            results.append(args[rule.index])
        elif kind == "argument":
            assert rule.geometry is not None
            base = args[rule.index]
            size, stride, offset = rule.geometry
            same = tuple(base.shape) == size and base.stride() == stride and offset == 0
            results.append(base.detach() if same else base.as_strided(size, stride, base.storage_offset() + offset))
        elif not static:
            results.append(out)
        else:
            assert rule.geometry is not None
            home = out.untyped_storage().data_ptr()
            if home not in groups:
                groups[home] = out.as_strided((out.untyped_storage().nbytes() // out.element_size(),), (1,), 0).clone()
            results.append(groups[home].as_strided(*rule.geometry))
    return results


def _copy(out: torch.Tensor, rule: OutputRule) -> torch.Tensor:
    return out.clone() if rule.dense else same_geometry_copy(out)
