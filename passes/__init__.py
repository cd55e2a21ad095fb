"""Rewrites of static aten graphs. The only part of the backend that may name operators."""

from cadence_fx.passes.base import Pass, PassContext, PassResult, RegionSlot
from cadence_fx.passes.pipeline import default_passes, register_pass, run_passes
from cadence_fx.passes.reinplace_retention import ReinplaceRetention

__all__ = [
    "Pass",
    "PassContext",
    "PassResult",
    "RegionSlot",
    "ReinplaceRetention",
    "default_passes",
    "register_pass",
    "run_passes",
]
