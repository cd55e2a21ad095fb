"""Rewrites of static aten graphs. The only part of the backend that may name operators."""

from cadence_fx.passes.base import Pass, PassContext, PassResult, RegionSlot
from cadence_fx.passes.pipeline import default_passes, register_pass, run_passes

__all__ = [
    "Pass",
    "PassContext",
    "PassResult",
    "RegionSlot",
    "default_passes",
    "register_pass",
    "run_passes",
]
