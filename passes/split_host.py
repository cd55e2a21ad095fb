"""What a graph of a device computes on the host stays on the host, and runs there before each launch.

Before::

    to = aten.to.device(window, cuda)             # window is on the host: a copy that no recorder can capture
    mul = aten.mul.Tensor(x, to)
    add_ = aten.add_.Tensor(steps, 1)             # a counter on the host: recorded, it would stand still

After::

    _resident_0 = self._resident_0                # on the device; filled before a launch where ``window`` has changed
    mul = aten.mul.Tensor(x, _resident_0)

and `HostPart`, the graph of the host: ``add_ = aten.add_.Tensor(steps, 1); return (window,)``.

Why no byte moves: both parts run the operators of the graph in its order, each where it ran before, and the copy into a
resident is the copy that the graph would make. No operator of the host's part reads anything of the device's, so it may
run first. A number that a kernel takes by value from a tensor on the host stays what it was when recorded: the engine
compares it before each launch, and a call with another one runs eager.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
import torch.fx as fx

from cadence_fx._units import counted
from cadence_fx.errors import NotCapturable
from cadence_fx.passes.base import HostPart, PassContext, PassResult
from cadence_fx.passes.constants import VARIES
from cadence_fx.passes.graphs import (
    OpOverload,
    add_tensor,
    bound_args,
    is_impure,
    location,
    output_node,
    tensors_in,
)
from cadence_fx.passes.movement import INDEXED, TRANSFERS
from cadence_fx.passes.subgraph import ancestors, cut_out

__all__ = ["SplitHost"]

aten = torch.ops.aten


def _on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


class SplitHost:
    """Takes the host's part out of a graph that runs on a device. ``on_host(tensor)`` says what is on the host."""

    name = "split_host"

    def __init__(self, on_host: Callable[[torch.Tensor], bool] = _on_cpu) -> None:
        self._on_host = on_host

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        split = _Split(gm, ctx, self._on_host)
        if not split.needed:
            return PassResult(gm, False)
        ctx.host = split.carry_out()
        ctx.notes.append(
            f"{self.name}: {counted(len(ctx.host.residents), 'value')} to the device, {len(ctx.host.held)} held, "
            f"{len(ctx.host.outputs)} from the host"
        )
        return PassResult(gm, True)


class _Split:
    """One graph being split."""

    def __init__(self, gm: fx.GraphModule, ctx: PassContext, on_host: Callable[[torch.Tensor], bool]) -> None:
        self.gm, self.ctx, self._on_host = gm, ctx, on_host
        self.facts = ctx.facts_of(gm.graph)
        self.leaving = {self.facts.alias_class(result) for result in output_node(gm.graph).all_input_nodes}
        self.host: set[fx.Node] = set()  # values made on the host, out of nothing but such values
        self.varying: set[fx.Node] = set()  # those that are not the same in every call
        for node in gm.graph.nodes:
            if node.op == "output" or not self._is_here(node) or not self.host.issuperset(node.all_input_nodes):
                continue
            self.host.add(node)
            fixed = not is_impure(node) and not self.facts.writes_to(node)
            if not fixed or not self.varying.isdisjoint(node.all_input_nodes):
                self.varying.add(node)
        inputs = [node for node in gm.graph.find_nodes(op="placeholder") if node.meta.get("val") is not None]
        self.writes = any(node.op == "placeholder" and self.facts.writes_to(node) for node in self.varying)
        # A graph of the host itself has no other part.
        self.needed = not all(map(self._is_here, inputs)) and any(
            node.op == "call_function" or any(user.op != "output" for user in node.users) for node in self.varying
        )

    def _is_here(self, node: fx.Node) -> bool:
        tensors = tensors_in(node.meta.get("val"))
        return bool(tensors) and all(map(self._on_host, tensors))

    def carry_out(self) -> HostPart:
        """Split; returns the host's part."""
        for node in self.varying:
            self._check(node)
        sent: list[tuple[fx.Node, torch.Tensor]] = []
        held: list[tuple[fx.Node, torch.Tensor, str]] = []
        outputs: list[tuple[int, fx.Node]] = []
        marks: dict[fx.Node, list[fx.Node]] = {}  # a value -> its users on the device
        for node in self.gm.graph.nodes:
            if node in self.varying or node.op == "output":
                continue
            for argument in node.all_input_nodes:
                if argument in self.varying:
                    marks.setdefault(argument, []).append(node)
        for source, users in marks.items():
            for user in users:
                self._replace(source, user, sent, held)
        self._take_outputs(outputs)
        computed = {node for node in self.varying if node.op == "call_function"}
        results = [entry[0] for entry in sent] + [entry[0] for entry in held] + [node for _, node in outputs]
        switches = {node for node in self.gm.graph.nodes if _is_switch(node)}
        graph, inputs = cut_out(self.gm, ancestors({*computed, *results}) | switches, results)
        for node in reversed([node for node in self.gm.graph.nodes if node in computed]):
            self.gm.graph.erase_node(node)
        return HostPart(
            graph,
            inputs,
            tuple(tensor for _, tensor in sent),
            tuple(tensor for _, tensor, _ in held),
            tuple(what for *_, what in held),
            tuple(index for index, _ in outputs),
            self.writes,
        )

    def _check(self, node: fx.Node) -> None:
        """Refuse what the host may not do on its own."""
        if node.op == "call_function" and node.target is not operator.getitem:
            if not isinstance(node.target, OpOverload) or node.target.namespace not in ("aten", "prims"):
                raise NotCapturable("opaque_call", node.name, location(node))
            if torch.Tag.nondeterministic_seeded in node.target.tags:
                raise NotCapturable("host_random", node.name, location(node))
            if torch.Tag.data_dependent_output in node.target.tags:
                raise NotCapturable("host_read", node.name, location(node))
        states = {name for slot in self.ctx.regions for name in (slot.placeholder, slot.destination)}
        if node.name in states:
            raise NotCapturable("host_state", node.name, location(node))
        outside = node.op == "get_attr" or (node.op == "placeholder" and node.name not in self.ctx.frozen_inputs)
        if outside and (writes := self.facts.writes_to(node)):
            raise NotCapturable("undeclared_write", writes[0].name, location(writes[0]))

    def _replace(
        self,
        source: fx.Node,
        user: fx.Node,
        sent: list[tuple[fx.Node, torch.Tensor]],
        held: list[tuple[fx.Node, torch.Tensor, str]],
    ) -> None:
        """Give ``user``, on the device, another tensor in the place of ``source``."""
        value: torch.Tensor = source.meta["val"]
        if user.target in TRANSFERS and user.target is not aten.copy_.default:
            like = user.meta["val"]
        elif self._is_index(source, user) or (user.target is aten.copy_.default and self._same_dtype(source, user)):
            target = user.args[0]
            assert isinstance(target, fx.Node)
            like = torch.empty_like(value, device=target.meta["val"].device)
        elif value.dim() == 0 and user.target not in TRANSFERS and not self._is_here(user):
            if self.writes:
                raise NotCapturable("host_value", user.name, location(user))
            number = torch.empty((), dtype=value.dtype)
            with self.gm.graph.inserting_before(user):
                node = add_tensor(self.gm, "_held_", number, value)
                node.meta[VARIES] = True
                user.replace_input_with(source, node)
            held.append((self._as_it_is_at(source, user), number, location(user) or user.name))
            return
        else:
            raise NotCapturable("host_copy", user.name, location(user))
        resident = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        with self.gm.graph.inserting_before(user):
            node = add_tensor(self.gm, "_resident_", resident, like)
            node.meta[VARIES] = True
            sent.append((self._as_it_is_at(source, user), resident))
            if user.target is aten.copy_.default or self._is_index(source, user):
                user.replace_input_with(source, node)
                return
            if self.facts.writes_to(user) or self.facts.alias_class(user) in self.leaving:
                fresh = self.gm.graph.call_function(aten.clone.default, (node,))
                fresh.meta = {**user.meta}
                node = fresh
        user.replace_all_uses_with(node)
        self.gm.graph.erase_node(user)

    def _as_it_is_at(self, source: fx.Node, user: fx.Node) -> fx.Node:
        """The value of ``source`` at ``user``: a copy where it is written afterwards."""
        if not self.facts.writes_to(source, after=self.facts.order[user]):
            return source
        with self.gm.graph.inserting_before(user):
            saved = self.gm.graph.call_function(aten.clone.default, (source,))
        saved.meta = {**source.meta}
        self.varying.add(saved)
        return saved

    def _take_outputs(self, outputs: list[tuple[int, fx.Node]]) -> None:
        last = output_node(self.gm.graph)
        results = list(last.args[0])  # type: ignore[arg-type]
        for index, result in enumerate(results):
            if isinstance(result, fx.Node) and result in self.varying and result.op != "placeholder":
                outputs.append((index, result))
                results[index] = None
        last.args = (tuple(results),)

    @staticmethod
    def _is_index(source: fx.Node, user: fx.Node) -> bool:
        """Whether ``user`` takes positions from ``source``; how many a mask has is for the host to read."""
        if user.target not in INDEXED or source.meta["val"].dtype in (torch.bool, torch.uint8):
            return False
        values = bound_args(user)
        return source in values["indices"] and source not in (values["self"], values.get("values"))

    @staticmethod
    def _same_dtype(source: fx.Node, user: fx.Node) -> bool:
        return user.args[1] is source and bool(source.meta["val"].dtype == user.meta["val"].dtype)


def _is_switch(node: fx.Node) -> bool:
    """Whether a call switches a mode (gradients, autocast), which holds for what both parts run."""
    return (
        node.op == "call_function" and not isinstance(node.target, OpOverload) and node.target is not operator.getitem
    )
