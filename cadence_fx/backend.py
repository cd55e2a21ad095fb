"""The `torch.compile` backend. Named by the `torch_dynamo_backends` entry point, so nothing has to be imported
first."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from cadence_fx._torch import CompileSite, compile_site
from cadence_fx.contract import Contract
from cadence_fx.errors import CadenceError, ContractError
from cadence_fx.program import Program

_declared: weakref.WeakKeyDictionary[torch.nn.Module, Contract] = weakref.WeakKeyDictionary()


def declare(module: torch.nn.Module, contract: Contract) -> torch.nn.Module:
    """Attach a contract to a module: `torch.compile(module, backend="cadence")` then needs no options.

    Raises:
        ContractError: not a module, or not a contract.
    """
    if not isinstance(module, torch.nn.Module):
        raise ContractError(f"declare() takes a torch.nn.Module, found {type(module).__name__}", field="module")
    if not isinstance(contract, Contract):
        raise ContractError(f"expected a Contract, found {contract!r}", field="contract")
    _declared[module] = contract
    return module


def cadence(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph: exact replay of the signatures its contract declares, eager for anything else.

    The contract comes from `options["contract"]`, from `declare(module, contract)`, or from the adapter registered
    for the module's class, in this order. A wrong declaration is raised by the compiled callable itself, so neither
    Dynamo's error suppression nor its wrapping of backend errors can hide it.

    Args:
        mode: accepted because `torch.compile` passes it on; there is only one.
    """
    site = compile_site()
    try:
        program = Program.of(site, options, contract_of(site, options))
        return program.compile(gm, site)
    except CadenceError as error:
        return _raising(error)


def contract_of(site: CompileSite, options: Mapping[str, Any] | None) -> Contract | None:
    """The contract that applies to a compile site, or None."""
    if options and options.get("contract") is not None:
        return options["contract"]  # type: ignore[no-any-return]
    return None if site.module is None else declared_contract(site.module)


def declared_contract(module: Any) -> Contract | None:
    """The contract tied to a module, or else its adapter's; None when there is none."""
    if not isinstance(module, torch.nn.Module):
        return None
    if module in _declared:
        return _declared[module]
    from cadence_fx.adapters import contract_for

    return contract_for(module)


def _raising(error: CadenceError) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        raise error

    return call


cadence.reset = Program.close_all  # type: ignore[attr-defined]  # Dynamo calls it from torch._dynamo.reset()
