"""A captured graph without a GPU: kernels are Python functions on one flat memory, and a graph runs for real."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from cadence_fx.passes import CapturedNode

Run = Callable[[list[int]], None]


def read(address: int, count: int) -> torch.Tensor:
    """`count` floats at an address of the host."""
    import ctypes

    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)


def kernel(name: str, *params: int | bytes) -> CapturedNode:
    raws = tuple(p if isinstance(p, bytes) else p.to_bytes(8, "little") for p in params)
    return CapturedNode("kernel", name, (1, 1, 1, 1, 1, 1), raws)


class ToyGraph:
    """Nodes in a chain, or with the edges given; `semantics` says what a kernel does, by name."""

    def __init__(
        self,
        nodes: Sequence[CapturedNode],
        semantics: Mapping[str, Run],
        edges: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.nodes = list(nodes)
        self._semantics = semantics
        self._params = {id(node): list(node.params) for node in nodes}
        chain = [(i, i + 1) for i in range(len(nodes) - 1)]
        self._edges = {(id(nodes[i]), id(nodes[j])) for i, j in (chain if edges is None else edges)}
        self._live = {id(node): node for node in nodes}
        self._cleared: list[torch.Tensor] = []

    def before(self, node: CapturedNode) -> Sequence[CapturedNode]:
        return [self._live[i] for i, j in self._edges if j == id(node)]

    def after(self, node: CapturedNode) -> Sequence[CapturedNode]:
        return [self._live[j] for i, j in self._edges if i == id(node)]

    def repoint(self, node: CapturedNode, changes: Mapping[tuple[int, int], int]) -> None:
        self._params[id(node)] = self._altered(node, changes)

    def _altered(self, node: CapturedNode, changes: Mapping[tuple[int, int], int]) -> list[bytes]:
        raws = list(self._params[id(node)])
        for (index, offset), address in changes.items():
            raw = bytearray(raws[index])
            raw[offset : offset + 8] = address.to_bytes(8, "little")
            raws[index] = bytes(raw)
        return raws

    def remove(self, node: CapturedNode) -> None:
        before, after = self.before(node), self.after(node)
        self._edges = {edge for edge in self._edges if id(node) not in edge}
        self._edges |= {(id(a), id(b)) for a in before for b in after}
        del self._live[id(node)]

    def clear_first(self, memory: torch.Tensor) -> None:
        self._cleared.append(memory)

    def alone(
        self, nodes: Sequence[CapturedNode], changes: Sequence[Mapping[tuple[int, int], int]]
    ) -> Callable[[], None]:
        steps = [(node, self._altered(node, change)) for node, change in zip(nodes, changes, strict=True)]

        def launch() -> None:
            for node, raws in steps:
                self._execute(node, raws)

        return launch

    def _execute(self, node: CapturedNode, raws: Sequence[bytes]) -> None:
        if node.kind == "memset":
            read(node.address, node.nbytes // 4).zero_()
        else:
            self._semantics[node.name]([int.from_bytes(raw[:8], "little") for raw in raws])

    def names(self) -> list[str]:
        return [node.name or node.kind for node in self.nodes if id(node) in self._live]

    def launch(self) -> None:
        for memory in self._cleared:
            memory.zero_()
        for node in self.nodes:
            if id(node) in self._live:
                self._execute(node, self._params[id(node)])
