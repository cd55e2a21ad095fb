"""Rewrites of static aten graphs. The only part of the backend that may name operators."""

from cadence_fx.passes.base import HostPart, Pass, PassContext, PassResult, Premise, RegionSlot
from cadence_fx.passes.elide_copies import ElideCopies
from cadence_fx.passes.fold_host_constants import FoldHostConstants
from cadence_fx.passes.forward_stores import ForwardStores
from cadence_fx.passes.hoist_host_reads import HoistHostReads
from cadence_fx.passes.pipeline import default_passes, register_pass, run_passes
from cadence_fx.passes.provenance import (
    Contradicted,
    Proved,
    Unproved,
    Verdict,
    prove_retention,
    prove_retentions,
)
from cadence_fx.passes.reinplace_retention import ReinplaceRetention
from cadence_fx.passes.split_host import SplitHost
from cadence_fx.passes.stage_reads import stage_reads
from cadence_fx.passes.verify_capturable import VerifyCapturable

__all__ = [
    "Contradicted",
    "ElideCopies",
    "FoldHostConstants",
    "ForwardStores",
    "HoistHostReads",
    "HostPart",
    "Pass",
    "PassContext",
    "PassResult",
    "Premise",
    "Proved",
    "RegionSlot",
    "ReinplaceRetention",
    "SplitHost",
    "Unproved",
    "Verdict",
    "VerifyCapturable",
    "default_passes",
    "prove_retention",
    "prove_retentions",
    "register_pass",
    "run_passes",
    "stage_reads",
]
