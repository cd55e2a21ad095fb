"""What warm-up should come to, from the contract and the example call alone.

Classes are the catalog's entries. Bytes are the paper's equation (6): for each class the arguments that are copied in,
which are all tensors but the declared states, and each state's and workspace's storage once. Capture times are only
ordered: a class with more bytes in flight should not be captured faster than one with fewer.

A module that computes with the strides of a state has further classes for an entry, one for each layout that the
stream shows; so has a second warm-up in another mode. They are counted beside: no declaration tells them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from cadence_fx import paths
from cadence_fx._torch import tree_leaves
from cadence_fx.binding import declared_path
from cadence_fx.catalog import CatalogEntry
from cadence_fx.contract import Contract, Region


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """Bytes, by name.

    Attributes:
        staging: of the copied arguments, by catalog entry.
        flight: what a call of an entry meets: its states before retention, and its arguments.
        carries: of each declared state, all its instances.
        workspaces: of each declared workspace, at its envelope or, where its extent never moves, at that.
        inference: whether it is for inference mode, whose states have storage of their own.
    """

    staging: dict[str, int]
    flight: dict[str, int]
    carries: dict[str, int]
    workspaces: dict[str, int]
    inference: bool


def predict(contract: Contract, arguments: Mapping[str, Any], module: torch.nn.Module | None) -> Prediction:
    """What a warm-up with this example call should come to; nothing is run.

    Args:
        arguments: of the example call, by parameter.
        module: where attributes are.
    """
    states = [r for r in contract.regions if r.persistent and r.mutability == "carry"]
    scratch = [r for r in contract.regions if not r.persistent]
    leaves = {r.name: [*_leaves(r, arguments, module)] for r in contract.regions}
    own = {id(leaf) for r in states if r.argument is not None for leaf in leaves[r.name]}
    staged = [leaf for leaf in tree_leaves(dict(arguments)) if isinstance(leaf, torch.Tensor) and id(leaf) not in own]
    staging, flight = {}, {}
    for entry in contract.catalog():
        sizes = _sizes(contract, entry, arguments)
        brought = sum(_bytes(leaf, sizes.get(id(leaf), {})) for leaf in staged)
        staging[str(entry)] = brought
        flight[str(entry)] = brought + sum(_raw(r, entry, leaf) for r in states for leaf in leaves[r.name])
    return Prediction(
        staging,
        flight,
        {r.name: sum(_storage(r, leaf, r.bound) for leaf in leaves[r.name]) for r in states},
        {r.name: sum(_storage(r, leaf, _frames(contract, r)) for leaf in leaves[r.name]) for r in scratch},
        torch.is_inference_mode_enabled(),
    )


def _frames(contract: Contract, workspace: Region) -> int:
    """The envelope, but where the extent never moves: frames in flight are in another workspace then."""
    return workspace.bound if workspace.retention.fixed else contract.envelope(workspace)


def _leaves(region: Region, arguments: Mapping[str, Any], module: torch.nn.Module | None) -> Iterator[torch.Tensor]:
    """The tensors at a region's declared place."""
    root: Any = arguments if region.argument is not None else module
    for path in paths.expand(root, declared_path(region)):
        leaf = paths.get(root, path)
        if isinstance(leaf, torch.Tensor):
            yield leaf


def _sizes(contract: Contract, entry: CatalogEntry, arguments: Mapping[str, Any]) -> dict[int, dict[int, int]]:
    """By identity of an argument, the sizes that an entry's advance gives its axes."""
    found: dict[int, dict[int, int]] = {}
    for declared in contract.inputs:
        period = contract.clock(declared.clock).period
        size = declared.size(period if period is not None else entry.advance_of(declared.clock))
        for path in paths.expand(arguments, paths.parse(declared.argument)):
            leaf = paths.get(arguments, path)
            if isinstance(leaf, torch.Tensor):
                found.setdefault(id(leaf), {})[declared.axis % leaf.dim()] = size
    return found


def _bytes(tensor: torch.Tensor, sizes: Mapping[int, int]) -> int:
    """Bytes of a tensor whose axes have other sizes."""
    return math.prod(sizes.get(axis, size) for axis, size in enumerate(tensor.shape)) * tensor.element_size()


def _raw(region: Region, entry: CatalogEntry, leaf: torch.Tensor) -> int:
    """Bytes of a state and of what a call adds to it."""
    if region.frame_axis is None or region.frame_clock is None:
        return leaf.nbytes
    frames = entry.extent_of(region.name) + region.added(entry.advance_of(region.frame_clock))
    return _bytes(leaf, {region.frame_axis % leaf.dim(): frames})


def _storage(region: Region, leaf: torch.Tensor, frames: int) -> int:
    """Bytes of one instance's storage; an empty one has an element."""
    sizes = {} if region.frame_axis is None else {region.frame_axis % leaf.dim(): frames}
    return max(leaf.element_size(), _bytes(leaf, sizes))
