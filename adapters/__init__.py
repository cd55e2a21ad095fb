"""Declarations for released model families, one module each; this package alone may name models."""

from cadence_fx.adapters.base import Adapter, Binding, Replaced, call, compiler
from cadence_fx.adapters.families import Family, Release, families, register_family, unregister_family
from cadence_fx.adapters.front import Bound, BoundReport, bind, unbind
from cadence_fx.adapters.registry import contract_for, hazards_for, register, unregister

__all__ = [
    "Adapter",
    "Binding",
    "Bound",
    "BoundReport",
    "Family",
    "Release",
    "Replaced",
    "bind",
    "call",
    "compiler",
    "contract_for",
    "families",
    "hazards_for",
    "register",
    "register_family",
    "unbind",
    "unregister",
    "unregister_family",
]
