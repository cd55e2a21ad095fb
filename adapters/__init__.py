"""Declarations for released model families, one module each; this package alone may name models."""

from cadence_fx.adapters.base import Adapter
from cadence_fx.adapters.registry import contract_for, hazards_for, register, unregister

__all__ = ["Adapter", "contract_for", "hazards_for", "register", "unregister"]
