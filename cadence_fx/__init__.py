"""Exact replay for streaming models: a `torch.compile` backend driven by a contract of clocks and retention."""

from cadence_fx.audit import audit as audit
from cadence_fx.backend import cadence as cadence
from cadence_fx.backend import declare as declare
from cadence_fx.catalog import Catalog as Catalog
from cadence_fx.catalog import CatalogEntry as CatalogEntry
from cadence_fx.clock import Clock as Clock
from cadence_fx.contract import Contract as Contract
from cadence_fx.contract import Input as Input
from cadence_fx.contract import Region as Region
from cadence_fx.determinism import deterministic as deterministic
from cadence_fx.doctor import Diagnosis as Diagnosis
from cadence_fx.doctor import doctor as doctor
from cadence_fx.errors import AuditMismatch as AuditMismatch
from cadence_fx.errors import AxisOutOfRange as AxisOutOfRange
from cadence_fx.errors import CadenceError as CadenceError
from cadence_fx.errors import CatalogMismatch as CatalogMismatch
from cadence_fx.errors import CatalogTooWide as CatalogTooWide
from cadence_fx.errors import ContractError as ContractError
from cadence_fx.errors import ContractFileError as ContractFileError
from cadence_fx.errors import ExampleFailed as ExampleFailed
from cadence_fx.errors import NotCapturable as NotCapturable
from cadence_fx.errors import NotCompiled as NotCompiled
from cadence_fx.errors import NotServed as NotServed
from cadence_fx.errors import PassFailed as PassFailed
from cadence_fx.errors import RetentionMismatch as RetentionMismatch
from cadence_fx.errors import SetTooLate as SetTooLate
from cadence_fx.errors import StaleState as StaleState
from cadence_fx.errors import UnexplainedSize as UnexplainedSize
from cadence_fx.errors import UnknownArgument as UnknownArgument
from cadence_fx.errors import UnknownState as UnknownState
from cadence_fx.errors import UnusedClock as UnusedClock
from cadence_fx.errors import WrongModule as WrongModule
from cadence_fx.explain import Explanation as Explanation
from cadence_fx.explain import explain as explain
from cadence_fx.hazard import Hazard as Hazard
from cadence_fx.infer import infer as infer
from cadence_fx.inferred import Inferred as Inferred
from cadence_fx.plan_report import PlanReport as PlanReport
from cadence_fx.planner import plan as plan
from cadence_fx.refresh import refresh as refresh
from cadence_fx.replay import ExactShapeReplay as ExactShapeReplay
from cadence_fx.report import Report as Report
from cadence_fx.report import report as report
from cadence_fx.restore import restore as restore
from cadence_fx.retention import KeepLast as KeepLast
from cadence_fx.retention import Pinned as Pinned
from cadence_fx.retention import PromptPlusLast as PromptPlusLast
from cadence_fx.retention import Ring as Ring
from cadence_fx.side_stream import SideStream as SideStream
from cadence_fx.switch import disabled as disabled
from cadence_fx.warmup import warm_up as warm_up

__all__ = [
    "AuditMismatch",
    "AxisOutOfRange",
    "CadenceError",
    "Catalog",
    "CatalogEntry",
    "CatalogMismatch",
    "CatalogTooWide",
    "Clock",
    "Contract",
    "ContractError",
    "ContractFileError",
    "Diagnosis",
    "ExactShapeReplay",
    "ExampleFailed",
    "Explanation",
    "Hazard",
    "Inferred",
    "Input",
    "KeepLast",
    "NotCapturable",
    "NotCompiled",
    "NotServed",
    "PassFailed",
    "Pinned",
    "PlanReport",
    "PromptPlusLast",
    "Region",
    "Report",
    "RetentionMismatch",
    "Ring",
    "SetTooLate",
    "SideStream",
    "StaleState",
    "UnexplainedSize",
    "UnknownArgument",
    "UnknownState",
    "UnusedClock",
    "WrongModule",
    "audit",
    "declare",
    "deterministic",
    "disabled",
    "doctor",
    "explain",
    "infer",
    "plan",
    "refresh",
    "report",
    "restore",
    "warm_up",
]
