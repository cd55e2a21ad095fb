"""Writes on states go behind the last reader of what they write.

Before, where the new keys of a layer go into the cache as soon as they are made::

    keys = aten.cat.default([new, old], 2)
    copy_ = aten.copy_.default(carry_keys, keys[:, :, :302])
    values = aten.cat.default([new_values, old_values], 2)
    out = aten.scaled_dot_product_attention(query, keys, values)

After, with nothing between what is made and what waits for it::

    keys = aten.cat.default([new, old], 2)
    values = aten.cat.default([new_values, old_values], 2)
    out = aten.scaled_dot_product_attention(query, keys, values)
    copy_ = aten.copy_.default(carry_keys, keys[:, :, :302])

So chains that end in one call are seen to do so (``parallel_branches``), and a call on the critical path does not wait
for a copy that nobody needs yet. What is written lives no longer than before, since its last reader comes first.

Why no byte moves: a write changes places only with calls that touch none of the bytes it writes, nor write any that it
reads (`Dependencies`).

Left alone: a write that another call depends on before the last reader, and one whose source has no later reader.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from cadence_fx.passes.base import PassContext, PassResult
from cadence_fx.passes.dependencies import Dependencies

__all__ = ["LateWrites"]


class LateWrites:
    """Moves copies into memory behind the other readers of what is copied."""

    name = "late_writes"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        if not any(map(_is_write, gm.graph.nodes)):
            return PassResult(gm, False)
        needs = Dependencies(gm.graph, ctx.facts_of(gm.graph), ctx.regions)
        moved = 0
        for call, node in enumerate(needs.calls):
            last = _last_reader(needs, call, node)
            if last is not None:
                needs.calls[last].append(node)
                moved += 1
        if moved:
            ctx.notes.append(f"{self.name}: {moved} writes stand behind the last reader of what they write")
        return PassResult(gm, bool(moved))


def _is_write(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.copy_.default and not node.users


def _last_reader(needs: Dependencies, call: int, node: fx.Node) -> int | None:
    """The call behind which a write goes; None where it stays."""
    if not _is_write(node):
        return None
    source = node.args[1]
    made = max(needs.sources.get(source, ()), default=None) if isinstance(source, fx.Node) else None
    if made is None:
        return None
    last = max((reader for reader in needs.after[made] if reader > call), default=None)
    if last is None or min(needs.after[call], default=len(needs.calls)) <= last:
        return None
    return last
