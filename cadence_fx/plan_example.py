"""A plan from a module and one example call: the tensors themselves say what they weigh.

Nothing is computed: the call is traced on tensors without memory, to count its operators.
"""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from cadence_fx import paths
from cadence_fx.contract import Contract
from cadence_fx.deployment import Deployment, PlannedCallable
from cadence_fx.errors import ContractError, UnknownArgument
from cadence_fx.footprint import ITEM_BYTES, Footprint, region_axes

_OWN = ("torch", "cadence_fx")


def from_example(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, contract: Contract | None
) -> Deployment:
    """What a module's callable reaches and weighs, from the arguments of a first call of a turn.

    Weights are the module's parameters. A state that none of the tensors is stays unweighed. Where the call cannot be
    traced, the plan has everything but its operators, and a note that says at which line tracing ended.

    Raises:
        ContractError: the example is no module and arguments that fit it, or contradicts the contract.
    """
    if not isinstance(module, torch.nn.Module):
        raise ContractError(f"expected a torch.nn.Module, found {type(module).__name__}", field="example")
    if contract is None:
        raise ContractError(f"no contract is declared for a {type(module).__name__}; write one into a file, "
                            "or use cadence_fx.declare", field="contract")  # fmt: skip
    try:
        bound = inspect.signature(module.forward).bind(*args, **(kwargs or {})).arguments
    except TypeError as error:
        raise ContractError(f"the example call does not fit the module: {error}", field="example") from error
    regions = {}
    for region in contract.regions:
        root: Any = bound if region.argument is not None else module
        leaves = [paths.get(root, path) for path in paths.expand(root, paths.parse(region.accessor))]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            known = list(bound) if region.argument is not None else [name for name, _ in module.named_buffers()]
            raise UnknownArgument(region.accessor, known, region=region.name,
                                  field="argument" if region.argument is not None else "attribute")  # fmt: skip
        regions[region.name] = _footprint(tensors, region_axes(region))
    states = {paths.parse(r.argument)[0] for r in contract.regions if r.argument is not None}
    inputs = {}
    for name, value in bound.items():
        if isinstance(value, torch.Tensor) and name not in states:
            axes = {entry.axis: entry.clock for entry in contract.inputs if entry.argument == name}
            inputs[name] = _footprint([value], axes)
    operators, problem = count_operators(module, args, kwargs or {})
    name = contract.name or type(module).__name__
    planned = PlannedCallable(name, contract, regions=regions, inputs=inputs, operators=operators)
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    return Deployment(name, (planned,), weights=weights, notes=(problem,) if problem else ())


def _footprint(tensors: Sequence[torch.Tensor], axes: Mapping[int, str]) -> Footprint:
    first = tensors[0]
    if any(each.dtype != first.dtype or each.dim() != first.dim() for each in tensors):
        raise ContractError("the elements of a `*` differ in dtype or rank; declare a region for each", field="example")
    dtype = str(first.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise ContractError(f"tensors of {dtype} are not planned", field="example")
    shape: list[int | str] = list(first.shape)
    for axis, clock in axes.items():
        if not -first.dim() <= axis < first.dim():
            raise ContractError(f"axis {axis} is declared, and the example has {first.dim()}", field="example")
        shape[axis] = clock
    return Footprint(tuple(shape), dtype, instances=len(tensors))


def count_operators(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[int | None, str | None]:
    """Calls of operators in one call, or why they cannot be counted, with the user's line.

    The module is left as it is: a copy of it is traced, with tensors without memory in the place of its parameters and
    buffers.
    """
    own = dict(chain(module.named_parameters(), module.named_buffers()))
    try:
        traced = copy.deepcopy(module, {id(tensor): tensor for tensor in own.values()})
        with torch.no_grad():
            graph = make_fx(lambda *given: functional_call(traced, *given), tracing_mode="fake",
                            _allow_non_fake_inputs=True)(own, tuple(args), dict(kwargs)).graph  # fmt: skip
    except Exception as error:  # copying and tracing run the user's code, which may raise anything
        lines = [frame for frame in traceback.extract_tb(error.__traceback__) if not _ours(frame.filename)]
        where = f"{lines[-1].filename}:{lines[-1].lineno}" if lines else "an unknown line"
        message = (str(error).splitlines() or [""])[0][:160]
        return None, (f"the call cannot be traced, at {where}: {type(error).__name__}: {message}; classes and bytes "
                      "are planned all the same, capture times are not")  # fmt: skip
    return sum(node.op == "call_function" for node in graph.nodes) or 1, None


def _ours(filename: str) -> bool:
    return any(f"/{package}/" in filename.replace("\\", "/") for package in _OWN)
