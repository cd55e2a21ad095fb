"""A contract as text for people: clocks, regions and the width of the catalog."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cadence_fx._width import region_arithmetic

if TYPE_CHECKING:
    from cadence_fx._region import Region
    from cadence_fx.contract import Contract


def aligned(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """``rows`` as lines with columns padded to their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [(indent + "  ".join(map(str.ljust, row, widths))).rstrip() for row in rows]


def contract_table(contract: Contract) -> str:
    """Several lines: each clock, each region with its extents, each input, and the width with its arithmetic."""
    lines = [f"contract {contract.name or '(unnamed)'}", "clocks"]
    lines += [f"  {clock.describe()}" for clock in contract.clocks]
    if contract.regions:
        lines.append("regions")
        head = ("name", "place", "retention", "lifetime", "stride", "W", "A", "envelope", "K")
        lines += aligned([head, *(_region_row(contract, region) for region in contract.regions)])
    if contract.inputs:
        lines.append("inputs")
        lines += [f"  {entry.describe()}" for entry in contract.inputs]
    width = contract.width()
    count = f"{'' if width.exact else 'at most '}{width.classes:,}"
    lines.append(f"classes: {count} of {contract.max_classes:,} allowed: {width.arithmetic}")
    return "\n".join(lines)


def _region_row(contract: Contract, region: Region) -> tuple[str, ...]:
    stride = contract.frame_stride(region)
    return (
        region.name,
        region.accessor,
        region.retention.describe(),
        region.lifetime,
        str(region.added(stride)),
        f"{region.bound} - {region.start} = {region.bound - region.start}",
        str(region.bound),
        str(contract.envelope(region)),
        region_arithmetic(region, stride) if region.persistent else "scratch",
    )
