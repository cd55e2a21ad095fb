"""Rewrites of static aten graphs. The only part of the backend that may name operators."""

from cadence_fx.passes.base import (
    Branches,
    HostPart,
    Pass,
    PassContext,
    PassResult,
    Premise,
    RegionSlot,
    SlowPart,
    Step,
)
from cadence_fx.passes.batch_copies import BatchCopies
from cadence_fx.passes.captured import CapturedGraph, CapturedNode, Edit, EditContext
from cadence_fx.passes.clear_once import ClearOnce
from cadence_fx.passes.cleared_products import ClearedProducts
from cadence_fx.passes.constant_writes import ConstantWrites
from cadence_fx.passes.drop_scalings import DropScalings
from cadence_fx.passes.elide_copies import ElideCopies
from cadence_fx.passes.fold_host_constants import FoldHostConstants
from cadence_fx.passes.forward_stores import ForwardStores
from cadence_fx.passes.hoist_host_reads import HoistHostReads
from cadence_fx.passes.hoist_slow import HoistSlow
from cadence_fx.passes.jit_chains import JitChains
from cadence_fx.passes.keep_conversions import KeepConversions
from cadence_fx.passes.late_writes import LateWrites
from cadence_fx.passes.merge_common import MergeCommon
from cadence_fx.passes.parallel_branches import ParallelBranches
from cadence_fx.passes.pipeline import (
    Choice,
    default_passes,
    is_needed,
    optional_passes,
    register_pass,
    run_passes,
    select_edits,
    select_passes,
)
from cadence_fx.passes.provenance import (
    Contradicted,
    Proved,
    Unproved,
    Verdict,
    prove_retention,
    prove_retentions,
)
from cadence_fx.passes.reinplace_retention import ReinplaceRetention
from cadence_fx.passes.spell_casts import SpellCasts
from cadence_fx.passes.split_host import SplitHost
from cadence_fx.passes.stage_reads import stage_reads
from cadence_fx.passes.verify_capturable import VerifyCapturable
from cadence_fx.passes.write_parts import WriteParts

__all__ = [
    "CapturedGraph",
    "CapturedNode",
    "Choice",
    "ClearOnce",
    "ConstantWrites",
    "ClearedProducts",
    "Branches",
    "BatchCopies",
    "Contradicted",
    "DropScalings",
    "Edit",
    "EditContext",
    "ElideCopies",
    "FoldHostConstants",
    "ForwardStores",
    "HoistHostReads",
    "HoistSlow",
    "HostPart",
    "KeepConversions",
    "JitChains",
    "LateWrites",
    "MergeCommon",
    "ParallelBranches",
    "Pass",
    "PassContext",
    "PassResult",
    "Premise",
    "Proved",
    "RegionSlot",
    "ReinplaceRetention",
    "SlowPart",
    "SpellCasts",
    "SplitHost",
    "Step",
    "Unproved",
    "Verdict",
    "VerifyCapturable",
    "WriteParts",
    "default_passes",
    "is_needed",
    "optional_passes",
    "prove_retention",
    "prove_retentions",
    "register_pass",
    "run_passes",
    "select_edits",
    "select_passes",
    "stage_reads",
]
