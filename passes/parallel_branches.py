"""Work that does not wait for one another runs on several branches of the device, where that pays.

Before, one row::

    q = linear(x, wq); k = linear(x, wk); v = linear(x, wv)
    out = attention(q, k, v)
    copy_(cache, k); y = linear(out, wo)

After, the same operators on the same values, with the branch of each in ``node.meta["branch"]``::

    0:  q ─────────── attention ── y
    1:  k ───────────┘   │
    2:  v ───────────┘   │
    3:      copy_(cache, k) ···· waited for at the end, or by the next that touches the cache

Why no byte moves: every operator runs as it did, on the same arguments. What reads a value waits for what makes it,
and of two calls that touch the same bytes of memory, one of them writing, the later in the graph waits for the earlier
(`Dependencies`); memory that another branch still uses is not given to anybody (`branch_plan`). Whatever draws a
number stays on the main branch, in order.

What is moved: calls whose results nobody needs for long (a *drain*: copies into states and caches), calls whose
arguments have been there for long (*ahead*), and chains beside one another that end in one call (*arms*). A wait costs
its branch 1.75 us, done or not, so a chain leaves the main branch only if it saves more than that; each kind is kept
only if the estimate for the whole graph gets better by it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import Callable

import torch.fx as fx

from cadence_fx.passes.base import Branches, PassContext, PassResult
from cadence_fx.passes.branch_plan import Work, plan_branches
from cadence_fx.passes.costs import CROSSING, duration
from cadence_fx.passes.dependencies import Dependencies, foreign
from cadence_fx.passes.graphs import location

__all__ = ["ParallelBranches", "assign", "branch_work"]

MAIN, DRAIN, AHEAD, ARMS = 0, 1, 2, (3, 4)
_SLACK = 40.0  # us between a call and its use, besides its own time, for it to be off the critical path
_FAR = 100.0  # us between fork and join, beyond what the arm takes four times, for which it would keep a branch idle
# us that a call takes for it to run late or early beside others. Measured: copies of a megabyte beside an attention on
# few multiprocessors made that twice as slow, and saved a few us each.
_LEAST_APART = 20.0
_LEAST_GAIN = 5.0  # us by which a chain has to shorten the way to its join; kernels beside others are slower, too
# us that a kind has to save for the whole graph. What computes needs a workspace of its libraries on each stream.
_LEAST_SAVED = {"drain": 2.0, "ahead": 20.0, "arms": 10.0}


class ParallelBranches:
    """Plans the branches of a graph; see the module. ``duration(node)`` estimates microseconds."""

    name = "parallel_branches"

    def __init__(self, duration: Callable[[fx.Node], float] = duration) -> None:
        self._duration = duration

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        ctx.branches = None
        for node in gm.graph.nodes:
            node.meta.pop("branch", None)
            if foreign(node):
                where = location(node) or "no line kept"
                ctx.notes.append(f"{self.name}: one branch, since what {node.name} touches is not known ({where})")
                return PassResult(gm, False)
        work = branch_work(gm, ctx, self._duration)
        branches, moved = assign(work)
        if branches is None:
            ctx.notes.append(f"{self.name}: one branch, {work.serial:.0f} us by the estimate")
            return PassResult(gm, False)
        for step in branches.steps:
            step.node.meta["branch"] = step.branch
        waits = sum(len(step.waits) for step in branches.steps) + len(branches.joins)
        ctx.branches = branches
        ctx.notes.append(
            f"{self.name}: {moved} of {len(work.durations)} calls on {branches.count - 1} more branches, {waits} waits;"
            f" by the estimate {branches.serial:.0f} us in one row, {branches.branched:.0f} us on these, "
            f"{longest_path(work):.0f} us at the least"
        )
        return PassResult(gm, False)


def branch_work(gm: fx.GraphModule, ctx: PassContext, duration: Callable[[fx.Node], float] = duration) -> Work:
    """What the choice of branches works on."""
    needs = Dependencies(gm.graph, ctx.facts_of(gm.graph), ctx.regions)
    return Work(gm.graph, needs, [duration(call) for call in needs.calls])


def longest_path(work: Work) -> float:
    """Microseconds that no number of branches could save, waits not counted."""
    return max(_ends(work), default=0.0)


def assign(work: Work) -> tuple[Branches | None, int]:
    """The best plan found and how many calls it takes off the main branch; no plan where one row is as good."""
    branch = [MAIN] * len(work.durations)
    best, best_branch = None, branch
    time = work.serial
    slack = _slack(work)
    for kind, move in (("drain", _drain), ("ahead", _ahead), ("arms", _arms)):
        tried = list(best_branch)
        move(work, tried, slack)
        if tried == best_branch:
            continue
        plan = plan_branches(work, _numbered(tried))
        if plan.branched < time - _LEAST_SAVED[kind]:
            best, best_branch, time = plan, tried, plan.branched
    return best, sum(where != MAIN for where in best_branch)


def _numbered(branch: list[int]) -> list[int]:
    """Branches counted from 0 without gaps."""
    number = {used: i for i, used in enumerate(sorted({MAIN, *branch}))}
    return [number[where] for where in branch]


def _ends(work: Work) -> list[float]:
    """When each call would end if nothing but what it needs held it up."""
    done: list[float] = []
    for call, needed in enumerate(work.needs.before):
        done.append(work.durations[call] + max((done[earlier] for earlier in needed), default=0.0))
    return done


def _slack(work: Work) -> list[float]:
    """How much later each call could end without a longer critical path, on any number of branches."""
    needs, durations = work.needs, work.durations
    done = _ends(work)
    left = [0.0] * len(done)
    for call in reversed(range(len(done))):
        left[call] = max((left[user] + durations[user] for user in needs.after[call]), default=0.0)
    whole = max(done, default=0.0)
    return [whole - end - rest for end, rest in zip(done, left, strict=True)]


def _drain(work: Work, branch: list[int], slack: list[float]) -> None:
    """Move what is needed late.

    From the end, in microseconds of main work still to come: a call may go where its branch, which runs in order too,
    can begin it late enough to be done for all that need it, and it is ready for long by then.
    """
    needs, durations = work.needs, work.durations
    remaining = 0.0  # main work after the call at hand
    begins = [0.0] * len(branch)  # main work still to come when a main call begins
    deadline = 0.0  # when the branch has to be done with the call at hand, for the ones moved so far
    joined: set[int] = set()
    for call in reversed(range(len(branch))):
        staying = [user for user in needs.after[call] if branch[user] == MAIN]
        free = not needs.pinned[call] and slack[call] > _SLACK
        first = min(staying, default=None)
        needed = max((begins[user] for user in staying), default=0.0)
        latest = max(deadline, needed + CROSSING) + durations[call]
        price = 0.0 if first is None or first in joined else CROSSING
        pays = durations[call] > price + _LEAST_APART or any(branch[user] == DRAIN for user in needs.after[call])
        if branch[call] == MAIN and free and pays and remaining - latest > _SLACK:
            branch[call] = DRAIN
            deadline = latest
            if first is not None:
                joined.add(first)
            continue
        if branch[call] == MAIN:
            remaining += durations[call]
            begins[call] = remaining


def _ahead(work: Work, branch: list[int], slack: list[float]) -> None:
    """Move what can begin early: from the start, the same with what a call needs in the place of what needs it."""
    needs, durations = work.needs, work.durations
    elapsed = 0.0  # main work before the call at hand
    done = [0.0] * len(branch)
    free = 0.0
    for call in range(len(branch)):
        if branch[call] != MAIN:
            done[call] = elapsed  # not before, and in all likelihood not much later
            continue
        ready = 0.0
        for earlier in needs.before[call]:
            ready = max(ready, done[earlier] + (0.0 if branch[earlier] == AHEAD else CROSSING))
        end = max(free, ready) + durations[call]
        free_to_go = not needs.pinned[call] and slack[call] > _SLACK
        if free_to_go and elapsed - end - CROSSING > _SLACK:
            branch[call] = AHEAD
            free = done[call] = end
        else:
            elapsed += durations[call]
            done[call] = elapsed
    for call in reversed(range(len(branch))):  # what only main calls use must be worth waiting for
        small = durations[call] < 2 * CROSSING + _LEAST_APART
        if branch[call] == AHEAD and small and all(branch[user] != AHEAD for user in needs.after[call]):
            branch[call] = MAIN


def _arms(work: Work, branch: list[int], slack: list[float]) -> None:
    """Move chains that run beside others to one join; the longest of them stays."""
    _Arms(work, branch).move()


class _Arms:
    """Chains that end in one call, their join, and that nothing else on the main branch needs before it."""

    def __init__(self, work: Work, branch: list[int]) -> None:
        self.work, self.branch = work, branch
        after, count = work.needs.after, len(branch)
        self.main = _Sums([d if branch[i] == MAIN else 0.0 for i, d in enumerate(work.durations)])
        self.ends: list[list[int]] = [[] for _ in range(count + 1)]  # for each call, those that it is the first to need
        for call in range(count):
            if branch[call] == MAIN:
                self.ends[next((user for user in after[call] if branch[user] == MAIN), count)].append(call)
        self.booked: dict[int, list[tuple[int, int]]] = {arm: [] for arm in ARMS}

    def move(self) -> None:
        """Outer joins first: what has moved as a whole is not taken apart."""
        for join in reversed(range(len(self.ends))):
            if join == len(self.branch) or self.branch[join] == MAIN:
                ends = [end for end in self.ends[join] if self.branch[end] == MAIN]
                if len(ends) > 1:
                    self._divide(join, [_Arm(self, end, join) for end in ends])

    def _divide(self, join: int, growing: list[_Arm]) -> None:
        """Move all arms of a join but the longest, as far as it pays."""
        arms: list[_Arm] = []
        while len(growing) > 1:  # side by side, so that the longest, which may be all there is, is not followed
            done = {id(arm) for arm in growing if not arm.grow()}
            arms += [arm for arm in growing if id(arm) in done]
            growing = [arm for arm in growing if id(arm) not in done]
        arms.sort(key=lambda arm: arm.cost)
        if not growing:
            arms.pop()
        load = dict.fromkeys(ARMS, 0.0)
        for arm in arms:
            whole = self.main.between(arm.fork + 1, join)
            if not arm.calls or arm.cost <= _LEAST_GAIN + CROSSING or whole > _FAR + 4 * arm.cost:
                continue
            for where in sorted(ARMS, key=lambda which: load[which]):
                rest = max(0.0, whole - arm.cost)
                after = max(rest, load[where] + arm.cost + CROSSING) + CROSSING
                if whole - after <= _LEAST_GAIN:
                    break
                if self._book(where, min(arm.calls), join):
                    load[where] += arm.cost
                    for call in arm.calls:
                        self.branch[call] = where
                        self.main.add(call, -self.work.durations[call])
                    break

    def _book(self, where: int, first: int, join: int) -> bool:
        """Take a branch for calls from one place to another; arms of one join may share it, others may not."""
        booked = self.booked[where]
        at = bisect_right(booked, (join, 0)) - 1
        while at >= 0 and booked[at][1] > first:  # they end in the order in which they begin
            if booked[at][1] != join:
                return False
            at -= 1
        insort(booked, (first, join))
        return True


class _Arm:
    """One chain, found from its end: what only it needs before the join belongs to it."""

    def __init__(self, arms: _Arms, end: int, join: int) -> None:
        self._needs, self._durations, self._branch = arms.work.needs, arms.work.durations, arms.branch
        self._join = join
        self._open = [-end]  # a heap, latest first: whoever needs a call is decided on before it is
        self.calls: set[int] = set()
        self.cost = 0.0
        self.fork = -1  # the last call of the main branch that it needs

    def grow(self) -> bool:
        """Decide on one more call; False when there is none."""
        if not self._open:
            return False
        call = -heapq.heappop(self._open)
        while self._open and self._open[0] == -call:
            heapq.heappop(self._open)
        if self._is_own(call):
            self.calls.add(call)
            self.cost += self._durations[call]
            for earlier in self._needs.before[call]:
                if self._branch[earlier] == MAIN:
                    heapq.heappush(self._open, -earlier)
        else:
            self.fork = max(self.fork, call)
        return True

    def _is_own(self, call: int) -> bool:
        if self._needs.pinned[call]:
            return False
        users = self._needs.after[call]
        return all(user >= self._join or user in self.calls or self._branch[user] != MAIN for user in users)


class _Sums:
    """Sums over stretches of a list whose entries change (a Fenwick tree)."""

    def __init__(self, values: list[float]) -> None:
        self._tree = [0.0] * (len(values) + 1)
        for place, value in enumerate(values):
            self.add(place, value)

    def add(self, place: int, value: float) -> None:
        place += 1
        while place < len(self._tree):
            self._tree[place] += value
            place += place & -place

    def between(self, first: int, end: int) -> float:
        """The sum over ``first <= place < end``."""
        return self._before(end) - self._before(first)

    def _before(self, place: int) -> float:
        total = 0.0
        while place > 0:
            total += self._tree[place]
            place -= place & -place
        return total
