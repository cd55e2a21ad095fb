"""Retention policies against a list of frame numbers that is concatenated and sliced."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from cadence_fx.errors import ContractError
from cadence_fx.retention import KeepLast, Order, Pinned, PromptPlusLast, Retention, Ring, Span

ORDERS: st.SearchStrategy[Order] = st.sampled_from(("append", "prepend"))


def frames_after(policy: KeepLast | PromptPlusLast, old: int, new: int) -> list[tuple[str, int]]:
    """The state after a call, as code would make it: a list of (source, frame)."""
    stored = [("old", frame) for frame in range(old)]
    fresh = [("new", frame) for frame in range(new)]
    raw = stored + fresh if policy.order == "append" else fresh + stored
    if isinstance(policy, KeepLast):
        return raw[-policy.n :] if policy.order == "append" else raw[: policy.n]
    if len(raw) <= policy.prompt + policy.last:
        return raw
    return raw[: policy.prompt] + raw[len(raw) - policy.last :]


def expand(spans: tuple[Span, ...]) -> list[tuple[str, int]]:
    return [(span.source, frame) for span in spans for frame in range(span.start, span.stop)]


POLICIES = st.one_of(
    st.builds(KeepLast, st.integers(1, 12), ORDERS),
    st.tuples(st.integers(0, 8), st.integers(0, 8), ORDERS)
    .filter(lambda drawn: drawn[0] + drawn[1] > 0)
    .map(lambda drawn: PromptPlusLast(drawn[0], drawn[1], drawn[2])),
)


@given(POLICIES, st.integers(0, 20), st.integers(0, 20))
def test_survivors_are_what_cat_and_slice_keep(policy: KeepLast | PromptPlusLast, old: int, new: int) -> None:
    spans = policy.survivors(old, new)
    assert expand(spans) == frames_after(policy, old, new)
    assert sum(map(len, spans)) == policy.attended(old + new)
    assert all(len(span) > 0 for span in spans)
    for left, right in pairwise(spans):  # neighbours that continue each other are one span
        assert (left.source, left.stop) != (right.source, right.start)


@given(POLICIES, st.integers(0, 40))
def test_the_expression_agrees_with_the_number(policy: Retention, raw: int) -> None:
    symbol = sympy.Symbol("raw", integer=True, nonnegative=True)
    assert policy.attended_expr(symbol).subs(symbol, raw) == policy.attended(raw)
    assert policy.attended_expr(symbol) == sympy.Min(symbol, policy.bound)


def test_prepend_keeps_the_newest_at_the_head() -> None:
    assert KeepLast(3, "prepend").survivors(3, 2) == (Span("new", 0, 2), Span("old", 0, 1))
    assert KeepLast(3, "append").survivors(3, 2) == (Span("old", 2, 3), Span("new", 0, 2))


def test_prompt_plus_last_splits_by_memory_in_both_orders() -> None:
    assert PromptPlusLast(302, 100).survivors(402, 50) == (
        Span("old", 0, 302),
        Span("old", 352, 402),
        Span("new", 0, 50),
    )
    assert PromptPlusLast(302, 100, "prepend").survivors(402, 50) == (
        Span("new", 0, 50),
        Span("old", 0, 252),
        Span("old", 302, 402),
    )
    assert PromptPlusLast(4, 0).survivors(4, 2) == (Span("old", 0, 4),)
    assert PromptPlusLast(0, 4).survivors(4, 2) == KeepLast(4).survivors(4, 2)


@pytest.mark.parametrize("policy", [Pinned(6), Ring(6)])
def test_fixed_policies_never_move(policy: Retention) -> None:
    assert policy.bound == policy.attended(0) == policy.attended(1000) == 6
    assert policy.attended_expr(sympy.Symbol("x")) == 6
    assert policy.fixed and policy.order is None


def test_pinned_is_all_new_and_ring_declares_no_order() -> None:
    assert Pinned(6).survivors(6, 50) == (Span("new", 0, 6),)
    assert Ring(6).survivors(6, 1) is None
    assert Ring(6).in_place and not Pinned(6).in_place


def test_descriptions_read_as_words() -> None:
    assert KeepLast(8).describe() == "last 8, appended"
    assert KeepLast(8, "prepend").describe() == "last 8, prepended"
    assert PromptPlusLast(302, 100).describe() == "first 302 and last 100, appended"
    assert Pinned(6).describe() == "pinned at 6"
    assert Ring(4).describe() == "ring of 4, written in place"
    assert str(Span("old", 1, 3)) == "old[1:3]"


KEEP: Any = KeepLast  # for arguments that a type checker would refuse first
PROMPT: Any = PromptPlusLast


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: KEEP(0), "retention.n"),
        (lambda: KEEP(-2), "retention.n"),
        (lambda: KEEP(True), "retention.n"),
        (lambda: KEEP(2.0), "retention.n"),
        (lambda: KEEP(2, "sideways"), "retention.order"),
        (lambda: PROMPT(0, 0), "retention.last"),
        (lambda: PROMPT(-1, 2), "retention.prompt"),
        (lambda: PROMPT(1, "2"), "retention.last"),
        (lambda: PROMPT(1, 2, "newest"), "retention.order"),
        (lambda: Pinned(0), "retention.n"),
        (lambda: Ring(0), "retention.n"),
    ],
)
def test_a_wrong_policy_names_its_field(build: Callable[[], object], field: str) -> None:
    with pytest.raises(ContractError) as caught:
        build()
    assert caught.value.field == field
