"""From a branch for every call to what each has to wait for, when memory may be let go of, and how long it would take.

Waits are few: a branch that has waited for a call has waited for all before it on that branch, and for whatever those
had waited for. Memory of a value belongs to the branch it was made on, and may be used again there as soon as the host
lets go of it; so a value that another branch uses is held until its own branch has waited for that use. Where too much
would be held, a wait is added at a point where, by the estimate, it costs next to nothing.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch.fx as fx

from cadence_fx.passes.base import Branches, Step
from cadence_fx.passes.costs import CROSSING
from cadence_fx.passes.dependencies import Dependencies
from cadence_fx.passes.graphs import output_node, tensors_in

__all__ = ["Work", "plan_branches"]

_START = -1  # "the beginning of the graph", among places of calls
_NEVER = -2
_HELD = 8 << 20  # bytes of one branch that may be held for others before a wait is added where it costs little
_FAR_TOO_MUCH = 4  # times that, and it is added wherever it is


@dataclass(slots=True)
class _Value:
    """The memory of an alias class that is made and dropped inside the graph."""

    members: list[fx.Node]
    makers: list[int]  # calls
    bytes: int
    users: list[int]  # calls, makers among them
    last: int  # place, among all nodes, of the last one that takes any member


class Work:
    """What planning needs of a graph, whatever the branches."""

    def __init__(self, graph: fx.Graph, needs: Dependencies, durations: Sequence[float]) -> None:
        self.needs = needs
        self.durations = durations
        self.nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        self.serial = sum(durations)
        self.values = self._values(graph)

    def _values(self, graph: fx.Graph) -> list[_Value]:
        needs = self.needs
        place = {node: i for i, node in enumerate(self.nodes)}
        found: dict[fx.Node, _Value] = {}
        kept = {needs.memory_of(node) for node in output_node(graph).all_input_nodes}
        kept |= {needs.memory_of(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")}
        for node in self.nodes:
            owner = needs.memory_of(node)
            if owner in kept:
                continue
            if owner not in found:
                found[owner] = _Value([], [], 0, needs.touched.get(owner, []), 0)
            value = found[owner]
            value.members.append(node)
            value.last = max([value.last, place[node], *(place[user] for user in node.users)])
            if node in needs.index:
                storages = needs.facts.storages
                given = {storage for argument in node.all_input_nodes for storage in storages[argument]}
                made = dict(zip(storages[node], tensors_in(node.meta.get("val")), strict=True))
                fresh = {storage: tensor for storage, tensor in made.items() if storage not in given}
                if fresh or not made:
                    value.makers.append(needs.index[node])
                    value.bytes += sum(t.untyped_storage().nbytes() for t in fresh.values())
        return list(found.values())


def plan_branches(work: Work, branch: Sequence[int], held: int = _HELD) -> Branches:
    """Plan a run in which call ``i`` is on ``branch[i]``."""
    return _Planner(work, branch, held).run()


class _Planner:
    def __init__(self, work: Work, branch: Sequence[int], held: int) -> None:
        self.work, self.branch, self.limit = work, branch, held
        self.count = max(branch, default=0) + 1
        # known[a][b]: the last call of b that a has waited for.
        self.known = [[_NEVER] * self.count for _ in range(self.count)]
        self.known[0][0] = _START
        self.after: list[tuple[int, ...]] = []  # for each call, what its branch knew once it was launched
        self.launched: list[list[int]] = [[] for _ in range(self.count)]
        self.finished: list[list[float]] = [[] for _ in range(self.count)]  # of those, never decreasing
        self.free = [0.0] * self.count
        self.done = [0.0] * len(branch)
        # (home, user branch) -> heap of (call that has to be waited for, value)
        self.pending: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.open: dict[int, int] = {}  # value -> conditions left
        self.held = [0] * self.count  # bytes made on a branch that wait for others
        self.drops: list[fx.Node] = []

    def run(self) -> Branches:
        work, needs = self.work, self.work.needs
        ending: dict[int, list[int]] = {}
        for index, value in enumerate(work.values):
            ending.setdefault(value.last, []).append(index)
        steps = []
        for place, node in enumerate(work.nodes):
            call = needs.index.get(node)
            waits: list[int] = []
            where = self._home(node)
            if call is not None:
                waits = self._launch(call)
            names = tuple(None if wait == _START else needs.calls[wait] for wait in waits)
            steps.append(Step(node, where, names, tuple(self.drops)))
            self.drops = []
            for index in ending.get(place, ()):
                self._retire(index)
        joins = []
        for other in range(1, self.count):
            if self.launched[other] and self.launched[other][-1] > self.known[0][other]:
                joins.append(self.launched[other][-1])
        joins = [call for call in joins if not self._implied(call, joins)]
        end = max([self.free[0], *(self.done[call] + CROSSING for call in joins)])
        return Branches(
            self.count,
            tuple(steps),
            tuple(needs.calls[call] for call in joins),
            work.serial,
            end,
            frozenset(needs.views),
            {node: needs.memory_of(node) for node in needs.sources},
            frozenset(needs.written),
        )

    def _home(self, node: fx.Node) -> int:
        sources = self.work.needs.sources[node]
        return self.branch[sources[0]] if sources else 0

    def _implied(self, call: int, joins: list[int]) -> bool:
        return any(other != call and self.after[other][self.branch[call]] >= call for other in joins)

    # -- launching ----------------------------------------------------------------------------------------------------

    def _launch(self, call: int) -> list[int]:
        """Take the next call; returns what its branch waits for before it."""
        here, known = self.branch[call], self.known[self.branch[call]]
        waits: list[int] = []
        ready = self.free[here]
        latest: dict[int, int] = {}
        for earlier in self.work.needs.before[call]:
            there = self.branch[earlier]
            if there != here and earlier > known[there]:
                latest[there] = max(latest.get(there, earlier), earlier)
        for earlier in sorted(latest.values(), reverse=True):
            if earlier > known[self.branch[earlier]]:
                ready = max(ready, self.done[earlier])
                waits.append(self._wait(here, earlier, ready))
        if self.held[here] > self.limit:
            waits += self._relieve(here, ready)
            ready = max([ready, *(self.done[wait] for wait in waits)])
        if known[0] == _NEVER:  # nothing has tied this branch to the others yet
            waits.append(_START)
            known[0] = _START
        start = ready + (CROSSING if waits else 0.0)
        self.done[call] = self.free[here] = start + self.work.durations[call]
        known[here] = call
        self.after.append(tuple(known))
        self.launched[here].append(call)
        self.finished[here].append(self.done[call])
        return waits

    def _wait(self, here: int, earlier: int, ready: float) -> int:
        """Wait for a call, or for a later one of its branch that will be done by then as well."""
        there = self.branch[earlier]
        at = bisect_right(self.finished[there], ready) - 1
        chosen = max(earlier, self.launched[there][at]) if at >= 0 else earlier
        known = self.known[here]
        for which, call in enumerate(self.after[chosen]):
            known[which] = max(known[which], call)
        for there in range(self.count):
            self._settle(here, there)
        return chosen

    # -- memory -------------------------------------------------------------------------------------------------------

    def _retire(self, index: int) -> None:
        """The host has come past the last use of a value: drop it, or hold it until its home has waited for others."""
        value = self.work.values[index]
        conditions = 0
        homes = {self.branch[maker] for maker in value.makers} or {0}
        last: dict[int, int] = {}
        for user in value.users:
            last[self.branch[user]] = user
        for home in homes:
            for there, user in last.items():
                if there != home and user > self.known[home][there]:
                    heapq.heappush(self.pending.setdefault((home, there), []), (user, index))
                    self.held[home] += value.bytes
                    conditions += 1
        if conditions:
            self.open[index] = conditions
        else:
            self.drops += value.members

    def _settle(self, home: int, there: int) -> None:
        waiting = self.pending.get((home, there))
        while waiting and waiting[0][0] <= self.known[home][there]:
            _, index = heapq.heappop(waiting)
            value = self.work.values[index]
            self.held[home] -= value.bytes
            self.open[index] -= 1
            if not self.open[index]:
                del self.open[index]
                self.drops += value.members

    def _relieve(self, home: int, ready: float) -> list[int]:
        """Waits that let go of memory: of what will be done by then, or of the oldest where far too much is held."""
        waits = []
        for there in range(self.count):
            waiting = self.pending.get((home, there))
            if not waiting:
                continue
            at = bisect_right(self.finished[there], ready) - 1
            cheap = self.launched[there][at] if at >= 0 else _NEVER
            if waiting[0][0] <= cheap or self.held[home] > _FAR_TOO_MUCH * self.limit:
                waits.append(self._wait(home, waiting[0][0], ready))
        return waits
