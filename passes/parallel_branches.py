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

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator

import torch.fx as fx

from cadence_fx.passes.base import Branches, PassContext, PassResult
from cadence_fx.passes.branch_plan import Work, plan_branches
from cadence_fx.passes.costs import CROSSING, duration
from cadence_fx.passes.dependencies import Dependencies, foreign
from cadence_fx.passes.graphs import location

__all__ = ["ParallelBranches", "assign", "branch_work"]

MAIN, DRAIN, AHEAD, ARMS = 0, 1, 2, (3, 4)
_SLACK = 40.0  # us between a call and its use, besides its own time, for it to be off the critical path
_FAR = 100.0  # us of main work after the first use of a value, beyond which a use says nothing of where chains join
_LEAST_GAIN = 2.0  # us by which a chain has to shorten the way to its join
_MOST_NEEDED = 64  # values of elsewhere that a chain may need
_LEAST_SAVED = 10.0  # us for the whole graph: below, it is not worth a stream and its library workspace


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
    needs = Dependencies(gm.graph, ctx.regions)
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
    for move in (_ahead, _drain, _arms):
        tried = list(best_branch)
        move(work, tried, slack)
        if tried == best_branch:
            continue
        plan = plan_branches(work, _numbered(tried))
        if plan.branched < time - _LEAST_SAVED:
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
        free = free and all(branch[user] in (MAIN, DRAIN) for user in needs.after[call])
        first = min(staying, default=None)
        needed = max((begins[user] for user in staying), default=0.0)
        latest = max(deadline, needed + CROSSING) + durations[call]
        price = 0.0 if first is None or first in joined else CROSSING
        pays = durations[call] > price or not staying
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
        ready = 0.0
        for earlier in needs.before[call]:
            ready = max(ready, done[earlier] + (CROSSING if branch[earlier] == MAIN else 0.0))
        end = max(free, ready) + durations[call]
        free_to_go = not needs.pinned[call] and slack[call] > _SLACK
        if free_to_go and elapsed - end - CROSSING > _SLACK:
            branch[call] = AHEAD
            free = done[call] = end
        else:
            elapsed += durations[call]
            done[call] = elapsed
    for call in reversed(range(len(branch))):  # what only main calls use must be worth waiting for
        small = durations[call] < 2 * CROSSING + _LEAST_GAIN
        if branch[call] == AHEAD and small and all(branch[user] != AHEAD for user in needs.after[call]):
            branch[call] = MAIN


def _arms(work: Work, branch: list[int], slack: list[float]) -> None:
    """Move chains that run beside others to one join; the longest of them stays."""
    _Arms(work, branch).move()


class _Arms:
    """The main calls as a tree: above each call the first that all ways from it come to, its join.

    Uses far behind the first are left out, since the main branch has come past the join by then.
    """

    def __init__(self, work: Work, branch: list[int]) -> None:
        self.work, self.branch = work, branch
        needs, count = work.needs, len(branch)
        self.main = _Sums([d if branch[i] == MAIN else 0.0 for i, d in enumerate(work.durations)])
        self.join = [count] * (count + 1)
        for call in reversed(range(count)):
            if branch[call] == MAIN:
                users = [user for user in needs.after[call] if branch[user] == MAIN]
                near = [user for user in users if self.main.between(users[0], user) <= _FAR]
                self.join[call] = self._meeting(near)
        self.kids: list[list[int]] = [[] for _ in range(count + 1)]
        self.cost = [*work.durations, 0.0]  # of a call and all below it
        self.fixed = [*needs.pinned, False]
        self.first = list(range(count + 1))
        # What a call and all below it need from elsewhere.
        self.outside: list[set[int]] = [set() for _ in range(count + 1)]
        for call in range(count):
            if branch[call] == MAIN:
                self._gather(call)
        self.booked: dict[int, list[tuple[int, int]]] = {arm: [] for arm in ARMS}

    def _meeting(self, users: list[int]) -> int:
        found = users[0] if users else len(self.branch)
        for user in users[1:]:
            while found != user:
                if found < user:
                    found = self.join[found]
                else:
                    user = self.join[user]
        return found

    def _gather(self, call: int) -> None:
        found = {earlier for earlier in self.work.needs.before[call] if self.branch[earlier] == MAIN}
        found = {
            earlier
            for earlier in found.union(*(self.outside[kid] for kid in self.kids[call]))
            if self.join[earlier] > call
        }
        if len(found) > _MOST_NEEDED:
            self.fixed[call] = True
            found = set(sorted(found)[-_MOST_NEEDED:])
        self.outside[call] = found
        join = self.join[call]
        self.kids[join].append(call)
        self.cost[join] += self.cost[call]
        self.fixed[join] = self.fixed[join] or self.fixed[call]
        self.first[join] = min(self.first[join], self.first[call])

    def move(self) -> None:
        """Outer joins first: what has moved as a whole is not taken apart."""
        for join in reversed(range(len(self.kids))):
            if len(self.kids[join]) > 1 and (join == len(self.branch) or self.branch[join] == MAIN):
                self._divide(join)

    def _divide(self, join: int) -> None:
        kids = self.kids[join]
        feeding: set[int] = set().union(*(self.outside[kid] for kid in kids))
        arms = sorted((kid for kid in kids if kid not in feeding), key=lambda kid: self.cost[kid])
        load = dict.fromkeys(ARMS, 0.0)
        for arm in arms[:-1]:
            if self.fixed[arm] or self.cost[arm] <= _LEAST_GAIN + CROSSING:
                continue
            fork = max(self.outside[arm], default=-1)
            whole = self.main.between(fork + 1, join)
            for where in sorted(ARMS, key=lambda which: load[which]):
                rest = max(0.0, whole - self.cost[arm])
                after = max(rest, load[where] + self.cost[arm] + CROSSING) + CROSSING
                if whole - after <= _LEAST_GAIN:
                    break
                calls = list(self._below(arm))
                if self._is_closed(calls, join) and self._book(where, self.first[arm], join):
                    load[where] += self.cost[arm]
                    for call in calls:
                        self.branch[call] = where
                        self.main.add(call, -self.work.durations[call])
                    break

    def _is_closed(self, calls: list[int], join: int) -> bool:
        """Whether no other main call takes anything of a chain before its join."""
        own = set(calls)
        users = (user for call in calls for user in self.work.needs.after[call])
        return all(user >= join or user in own or self.branch[user] != MAIN for user in users)

    def _below(self, call: int) -> Iterator[int]:
        pending = [call]
        while pending:
            found = pending.pop()
            yield found
            pending += self.kids[found]

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
