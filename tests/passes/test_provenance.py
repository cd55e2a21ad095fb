"""Proof of retention: what is proved, what is contradicted and where, and what cannot be told before the call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cadence_fx.passes import Contradicted, Proved, Unproved, Verdict, prove_retention, prove_retentions
from cadence_fx.retention import KeepLast, Pinned, PromptPlusLast, Retention, Ring, Span
from tests.passes.toolbox import slot, trace

X, CACHE = torch.randn(2, 2, 4), torch.randn(2, 6, 4)
LAST = KeepLast(6)


def verdict(
    function: Callable[..., object],
    retention: Retention = LAST,
    *,
    output: int | None = 0,
    examples: tuple[Tensor, ...] = (X, CACHE),
) -> Verdict:
    gm = trace(function, *examples)
    return prove_retention(gm, slot(gm, "cache_1", output, 1, retention=retention, advance=2))


def test_keep_last() -> None:
    found = verdict(lambda x, cache: (torch.cat([cache, x], 1)[:, -6:],))
    assert found == Proved((Span("old", 2, 6), Span("new", 0, 2)))


def test_prompt_plus_last_is_told_from_keep_last() -> None:
    """Equal shapes in every call, other bytes from the first overflow on."""
    found = verdict(lambda x, cache: (torch.cat([cache, x], 1)[:, -6:],), PromptPlusLast(2, 4))
    assert isinstance(found, Contradicted)
    assert found.declared == (Span("old", 0, 2), Span("old", 4, 6), Span("new", 0, 2))
    assert found.found == (Span("old", 2, 6), Span("new", 0, 2))
    assert found.position == 0


def test_first_position_that_differs_is_named() -> None:
    found = verdict(lambda x, cache: (torch.cat([cache[:, 2:5], cache[:, :1], x], 1),))
    assert isinstance(found, Contradicted) and found.position == 3


def test_wrong_extent_is_contradicted() -> None:
    found = verdict(lambda x, cache: (torch.cat([cache, x], 1)[:, -5:],))
    assert isinstance(found, Contradicted)
    found = verdict(lambda x, cache: (torch.cat([cache, x], 1)[:, 2:7],))
    assert isinstance(found, Contradicted) and found.position == 5


def test_fresh_frames_in_the_wrong_order() -> None:
    found = verdict(lambda x, cache: (torch.cat([cache, x.flip(1)], 1)[:, -6:],))
    assert isinstance(found, Contradicted) and found.position == 4


def test_stale_fresh_frame() -> None:
    """Of two fresh frames the older is kept, where the newer is declared."""
    found = verdict(lambda x, cache: (x[:, :1],), KeepLast(1), examples=(X, CACHE[:, :1]))
    assert isinstance(found, Unproved) and "another fresh frame" in found.reason


def test_dimension_of_the_same_size_that_counts_no_frames() -> None:
    """Keys and values are stacked in a dimension of size two, as there are two fresh frames."""

    def values(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        ahead = torch.cat([x, x], 1) * 2  # four frames, two of them look-ahead
        both = torch.stack([ahead + 1, ahead - 1]) * 3
        return (torch.cat([cache, both[1][:, :2]], 1)[:, -6:],)

    assert not isinstance(verdict(values), Contradicted)


def test_computed_frames_are_fresh() -> None:
    def project(x: Tensor, cache: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat([cache, F.linear(x, weight) + cache.mean(1, keepdim=True)], 1)[:, -6:],)

    assert isinstance(verdict(project, examples=(X, CACHE, torch.randn(4, 4))), Proved)


def test_order_is_contradicted_though_fresh_frames_read_the_state() -> None:
    """The fresh frames might be anything, the old ones are surely not where the policy has them."""

    def prepend(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat([x + cache.mean(1, keepdim=True), cache], 1)[:, :6],)

    found = verdict(prepend)
    assert isinstance(found, Contradicted) and found.position == 2


def test_heads_that_change_places_are_no_frame() -> None:
    def swap_channels(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        raw = torch.cat([cache, x], 1)[:, -6:]
        return (torch.cat([raw[..., 2:], raw[..., :2]], -1),)

    found = verdict(swap_channels)
    assert isinstance(found, Unproved) and "no whole frame" in found.reason


def test_frame_of_old_and_new_bytes() -> None:
    def blend(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        raw = torch.cat([cache, x], 1)
        return (torch.cat([raw[:, -6:, :2], raw[:, :6, 2:]], -1),)

    found = verdict(blend)
    assert isinstance(found, Unproved) and found.node.startswith("cat")


def test_arithmetic_on_kept_frames_is_not_movement() -> None:
    """``cache * 1`` may be the same bytes and may not (a NaN's payload, say): nothing is claimed."""
    found = verdict(lambda x, cache: (torch.cat([cache * 1, x], 1)[:, -6:],))
    assert found == Unproved("computes what the policy says is kept", "mul", "aten.mul.Tensor", found.location)  # type: ignore[union-attr]


def test_dtype_round_trip_is_not_movement() -> None:
    found = verdict(lambda x, cache: (torch.cat([cache.half().float(), x], 1)[:, -6:],))
    assert isinstance(found, Unproved)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_movement_outside_training_alone(training: bool) -> None:
    found = verdict(lambda x, cache: (F.dropout(torch.cat([cache, x], 1)[:, -6:], 0.5, training),))
    assert isinstance(found, Unproved if training else Proved)


def test_index_known_in_the_call_alone() -> None:
    def ring(x: Tensor, cache: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        return (cache.index_copy(1, position, x),)

    found = verdict(ring, examples=(X, CACHE, torch.tensor([0, 1])))
    assert isinstance(found, Unproved)
    assert found.operator == "aten.index_copy.default" and "only the call knows" in found.reason


def test_ring_written_in_place() -> None:
    def ring(x: Tensor, cache: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        cache.index_copy_(1, position, x)
        return (x + 1,)

    found = verdict(ring, Ring(6), output=None, examples=(X, CACHE, torch.tensor([0, 1])))
    assert isinstance(found, Unproved)


def test_ring_written_at_fixed_places_has_nothing_to_contradict() -> None:
    def ring(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        cache[:, 2:4] = x
        return (x + 1,)

    assert verdict(ring, Ring(6), output=None) == Proved((Span("old", 0, 2), Span("new", 0, 2), Span("old", 4, 6)))


def test_embedding_by_runtime_index_is_fresh() -> None:
    """The index chooses among weights, none of them state."""

    def embed(x: Tensor, cache: Tensor, table: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat([cache, table[tokens]], 1)[:, -6:],)

    examples = (X, CACHE, torch.randn(9, 4), torch.zeros(2, 2, dtype=torch.int64))
    assert isinstance(verdict(embed, examples=examples), Proved)


def test_choice_by_mask_is_open() -> None:
    found = verdict(lambda x, cache: (torch.where(cache > 0, cache, torch.cat([cache, x], 1)[:, -6:]),))
    assert isinstance(found, Unproved)


def test_state_shifted_in_place() -> None:
    def shift(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        cache[:, :4] = cache[:, 2:].clone()
        cache[:, 4:] = x
        return (x + 1,)

    assert isinstance(verdict(shift, output=None), Proved)


def test_state_shifted_over_itself_in_the_wrong_order() -> None:
    """Frame by frame from the end, every frame becomes the last one: only running the writes tells."""

    def smear(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        for at in reversed(range(4)):
            cache[:, at] = cache[:, at + 1]
        return (cache,)

    found = verdict(smear)
    assert isinstance(found, Contradicted)
    assert found.found[0] == Span("old", 4, 5)


def test_arithmetic_in_place_on_kept_frames() -> None:
    def decay(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        kept = torch.cat([cache, x], 1)[:, -6:]
        kept[:, 1].mul_(0.5)
        return (kept,)

    found = verdict(decay)
    assert isinstance(found, Unproved) and found.node.startswith("mul")


def test_write_after_the_state_was_taken_counts() -> None:
    """The returned tensor shares memory with what is written later."""

    def late(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        raw = torch.cat([cache, x], 1)
        kept = raw[:, -6:]
        raw[:, 2] = 0
        return (kept,)

    found = verdict(late)
    assert isinstance(found, Contradicted) and found.position == 0


def test_expanded_and_gathered_by_constants() -> None:
    def gather(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        raw = torch.cat([cache, x], 1)
        index = torch.arange(2, 8).view(1, 6, 1).expand(2, 6, 4)
        return (raw.gather(1, index),)

    assert isinstance(verdict(gather), Proved)


def test_pinned_may_hold_anything_of_its_extent() -> None:
    assert isinstance(verdict(lambda x, cache: (cache * 0.5 + x.mean(),), Pinned(6)), Proved)
    found = verdict(lambda x, cache: (torch.cat([cache, x], 1),), Pinned(6))
    assert isinstance(found, Contradicted) and found.position == 6


def test_empty_state() -> None:
    found = verdict(lambda x, cache: (torch.cat([cache, x], 1),), examples=(X, CACHE[:, :0]))
    assert found == Proved((Span("new", 0, 2),))


def test_slots_of_one_graph_are_independent() -> None:
    def two(x: Tensor, cache: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        return torch.cat([cache, x], 1)[:, -6:], torch.cat([cache, x], 1)[:, -6:]

    gm = trace(two, X, CACHE, CACHE)
    slots = [
        slot(gm, "cache_1", 0, 1, retention=LAST, advance=2),
        slot(gm, "other_1", 1, 1, retention=LAST, advance=2),
    ]
    first, second = prove_retentions(gm, slots)
    assert isinstance(first, Proved)
    assert isinstance(second, Contradicted)  # it keeps the frames of the other state
