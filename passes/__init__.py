"""Rewrites of static aten graphs. The only part of the backend that may name operators."""

from cadence_fx.passes.base import HostPart, Pass, PassContext, PassResult, Premise, RegionSlot
from cadence_fx.passes.batch_copies import BatchCopies
from cadence_fx.passes.fold_host_constants import FoldHostConstants
from cadence_fx.passes.hoist_host_reads import HoistHostReads
from cadence_fx.passes.jit_chains import JitChains
from cadence_fx.passes.merge_common import MergeCommon
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
from cadence_fx.passes.write_parts import WriteParts

__all__ = [
    "BatchCopies",
    "Contradicted",
    "FoldHostConstants",
    "HoistHostReads",
    "HostPart",
    "JitChains",
    "MergeCommon",
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
    "WriteParts",
    "default_passes",
    "prove_retention",
    "prove_retentions",
    "register_pass",
    "run_passes",
    "stage_reads",
]
