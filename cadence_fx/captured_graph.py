"""A captured CUDA graph, open for edits before it is instantiated (`passes/captured` says what an edit may do with it).

Access is through the CUDA driver's Python bindings, which PyTorch's CUDA wheels come with, and through a graph that
PyTorch keeps (`torch.cuda.CUDAGraph(keep_graph=True)`). Where either is missing, or a graph has edges of another kind
than plain ones, `Unavailable` says so and the graph is used as it was captured.
"""

from __future__ import annotations

import ctypes
import heapq
import importlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from cadence_fx.passes.captured import CapturedNode, Pointer


class Unavailable(RuntimeError):
    """This graph cannot be edited, and why."""


def _driver() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise Unavailable(f"the CUDA driver's Python bindings are not installed ({error})") from error


def _checked(result: tuple[Any, ...], what: str) -> Any:
    """The values of a driver call; raises when it failed."""
    if int(result[0]):
        raise Unavailable(f"{what}: {result[0].name}")
    return result[1] if len(result) == 2 else result[1:]


class DriverGraph:
    """The graph of a capture that has ended.

    Raises:
        Unavailable: see the module.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._driver = _driver()
        try:
            self._raw = self._driver.CUgraph(graph.raw_cuda_graph())
        except (AttributeError, RuntimeError) as error:
            raise Unavailable(f"PyTorch gives no access to the graph ({error})") from error
        self._layouts: dict[int, list[int]] = {}
        handles = self._listed(self._driver.cuGraphGetNodes, self._raw, "nodes")
        edges = self._edges()
        index = {int(handle): i for i, handle in enumerate(handles)}
        self._after: list[set[int]] = [set() for _ in handles]
        self._before: list[set[int]] = [set() for _ in handles]
        for source, target in edges:
            self._after[index[source]].add(index[target])
            self._before[index[target]].add(index[source])
        self._handles = handles
        self._gone: set[int] = set()
        self._read = [self._read_node(handle) for handle in handles]
        self._index = {id(node): i for i, node in enumerate(self._read)}
        self.nodes = [self._read[i] for i in self._serial()]

    # -- reading ------------------------------------------------------------------------------------------------------

    def _listed(self, call: Callable[..., Any], subject: Any, what: str) -> list[Any]:
        _, count = _checked(call(subject, 0), what)
        found, _ = _checked(call(subject, count), what)
        return list(found)[:count]

    def _edges(self) -> Iterator[tuple[int, int]]:
        call = self._driver.cuGraphGetEdges
        count = _checked(call(self._raw, 0), "edges")[-1]
        if not count:
            return
        sources, targets, data, _ = _checked(call(self._raw, count), "edges")
        for source, target, kind in zip(sources, targets, data, strict=False):
            if kind.from_port or kind.to_port or kind.type:
                raise Unavailable("the graph has edges that let a kernel start before another one ends")
            yield int(source), int(target)

    def _read_node(self, handle: Any) -> CapturedNode:
        driver = self._driver
        kind = _checked(driver.cuGraphNodeGetType(handle), "node")
        if kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET:
            params = _checked(driver.cuGraphMemsetNodeGetParams(handle), "memset")
            nbytes = params.width * params.elementSize * max(1, params.height)
            simple = params.height <= 1
            return CapturedNode(
                "memset" if simple else "other", address=int(params.dst), nbytes=nbytes, value=params.value
            )
        if kind != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            return CapturedNode("other")
        params = _checked(driver.cuGraphKernelNodeGetParams(handle), "kernel")
        function = self._function(params)
        name = _checked(driver.cuFuncGetName(function), "name")
        launch = (
            params.gridDimX,
            params.gridDimY,
            params.gridDimZ,
            params.blockDimX,
            params.blockDimY,
            params.blockDimZ,
        )
        return CapturedNode("kernel", name.decode(), launch, tuple(self._params(function, params)))

    def _function(self, params: Any) -> Any:
        if int(params.func):
            return params.func
        return _checked(self._driver.cuKernelGetFunction(params.kern), "function")

    def _params(self, function: Any, params: Any) -> Iterator[bytes]:
        sizes = self._layouts.get(int(function))
        if sizes is None:
            sizes = self._layouts[int(function)] = list(self._sizes(function))
        table = int(params.kernelParams or 0)
        for index, size in enumerate(sizes if table else ()):
            yield ctypes.string_at(ctypes.c_uint64.from_address(table + 8 * index).value, size)

    def _sizes(self, function: Any) -> Iterator[int]:
        index = 0
        while not int((result := self._driver.cuFuncGetParamInfo(function, index))[0]):
            yield result[2]
            index += 1

    def _serial(self) -> list[int]:
        """Node numbers in an order that respects every edge, as near to that of the capture as possible."""
        waiting = [len(before) for before in self._before]
        ready = [i for i, count in enumerate(waiting) if not count]
        heapq.heapify(ready)
        order = []
        while ready:
            node = heapq.heappop(ready)
            order.append(node)
            for following in self._after[node]:
                waiting[following] -= 1
                if not waiting[following]:
                    heapq.heappush(ready, following)
        return order

    # -- what an edit may do ------------------------------------------------------------------------------------------

    def before(self, node: CapturedNode) -> Sequence[CapturedNode]:
        return [self._read[i] for i in self._before[self._index[id(node)]]]

    def after(self, node: CapturedNode) -> Sequence[CapturedNode]:
        return [self._read[i] for i in self._after[self._index[id(node)]]]

    def repoint(self, node: CapturedNode, changes: Mapping[Pointer, int]) -> None:
        handle = self._handles[self._index[id(node)]]
        params, _keep = self._altered(handle, changes)
        _checked(self._driver.cuGraphKernelNodeSetParams(handle, params), "parameters")

    def _altered(self, handle: Any, changes: Mapping[Pointer, int]) -> tuple[Any, list[Any]]:
        """The parameters of a kernel node as they are now, with other addresses; and what has to stay alive with
        them."""
        params = _checked(self._driver.cuGraphKernelNodeGetParams(handle), "kernel")
        raws = list(self._params(self._function(params), params))
        buffers = [ctypes.create_string_buffer(raw, len(raw)) for raw in raws]
        for (index, offset), address in changes.items():
            ctypes.memmove(ctypes.addressof(buffers[index]) + offset, address.to_bytes(8, "little"), 8)
        table = (ctypes.c_uint64 * len(buffers))(*map(ctypes.addressof, buffers))
        params.kernelParams = ctypes.addressof(table)
        return params, [table, *buffers]

    def remove(self, node: CapturedNode) -> None:
        number = self._index[id(node)]
        self._gone.add(number)
        before, after = self._before[number], self._after[number]
        _checked(self._driver.cuGraphDestroyNode(self._handles[number]), "removal")
        added = [(i, j) for i in before for j in after if j not in self._after[i]]
        for i in before:
            self._after[i].discard(number)
        for j in after:
            self._before[j].discard(number)
        for i, j in added:
            self._after[i].add(j)
            self._before[j].add(i)
        self._connect([(self._handles[i], self._handles[j]) for i, j in added])

    def _connect(self, edges: Sequence[tuple[Any, Any]]) -> None:
        if edges:
            sources, targets = map(list, zip(*edges, strict=True))
            call = self._driver.cuGraphAddDependencies
            _checked((*call(self._raw, sources, targets, None, len(edges)), None), "edges")

    def clear_first(self, memory: torch.Tensor) -> None:
        driver = self._driver
        params = driver.CUDA_MEMSET_NODE_PARAMS()
        params.dst, params.value, params.elementSize = memory.data_ptr(), 0, 1
        params.width, params.height, params.pitch = memory.nbytes, 1, 0
        context = _checked(driver.cuCtxGetCurrent(), "context")
        roots = [h for i, h in enumerate(self._handles) if i not in self._gone and not self._before[i]]
        added = _checked(driver.cuGraphAddMemsetNode(self._raw, None, 0, params, context), "memset")
        self._connect([(added, root) for root in roots])

    def alone(self, nodes: Sequence[CapturedNode], changes: Sequence[Mapping[Pointer, int]]) -> Callable[[], None]:
        driver = self._driver
        graph = _checked(driver.cuGraphCreate(0), "graph")
        last: list[Any] = []
        for node, change in zip(nodes, changes, strict=True):
            handle = self._handles[self._index[id(node)]]
            params, _keep = self._altered(handle, change)
            last = [_checked(driver.cuGraphAddKernelNode(graph, last or None, len(last), params), "kernel")]
        executable = _checked(driver.cuGraphInstantiate(graph, 0), "instantiation")
        driver.cuGraphDestroy(graph)

        def launch() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            _checked((*driver.cuGraphLaunch(executable, stream), None), "launch")

        weakref.finalize(launch, driver.cuGraphExecDestroy, executable)
        return launch
