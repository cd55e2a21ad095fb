"""The returned state becomes writes on the carry: golden graphs, hazards, and equal bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from cadence_fx.errors import PassFailed
from cadence_fx.passes import PassContext, ReinplaceRetention, run_passes
from tests.passes.toolbox import assert_same_bytes, context, flat_outputs, listing, run_on_carries, slot, trace

Function = Callable[..., object]
X, CACHE = (1, 2, 3), (1, 6, 3)


def rewrite(
    function: Function, *shapes: tuple[int, ...], states: dict[str, int], axis: int = 1
) -> tuple[torch.fx.GraphModule, PassContext]:
    """The rewritten graph, after its bytes were found equal to eager on several inputs."""
    gm = trace(function, *[torch.randn(shape) for shape in shapes])
    ctx = context(gm, *[slot(gm, name, output, axis) for name, output in states.items()])
    rewritten = run_passes(gm, ctx, [ReinplaceRetention()])
    for _ in range(4):
        inputs = [torch.randn(shape) for shape in shapes]
        want = flat_outputs(function(*[value.clone() for value in inputs]))
        assert_same_bytes(run_on_carries(rewritten, ctx, inputs), want)
    return rewritten, ctx


def ops(gm: torch.fx.GraphModule) -> list[str]:
    return [node.target.__name__ for node in gm.graph.nodes if node.op == "call_function"]


def test_append_writes_the_new_frames_alone() -> None:
    """Retained frames that already are in place vanish, and so does the cat."""

    def grow(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        return x + 1, torch.cat([cache, x], 1)

    gm, ctx = rewrite(grow, X, CACHE, states={"cache_1": 1})
    assert ctx.regions[0].destination == "carry_0"
    assert_expected_inline(
        listing(gm),
        """\
def forward(self, x_1, cache_1, carry_0):
    slice_tensor = aten.slice.Tensor(carry_0, 1, 6, 8)
    copy__default = aten.copy_.default(slice_tensor, x_1)
    add = aten.add.Tensor(x_1, 1)
    return (add, carry_0)""",
    )


def test_shift_moves_in_steps_of_its_distance() -> None:
    def keep_last(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        return x + 1, torch.cat([cache, x], 1)[:, -6:]

    gm, _ = rewrite(keep_last, X, CACHE, states={"cache_1": 1})
    assert_expected_inline(
        listing(gm),
        """\
def forward(self, x_1, cache_1, carry_0):
    add = aten.add.Tensor(x_1, 1)
    slice_tensor = aten.slice.Tensor(carry_0, 1, 0, 2)
    slice_tensor_1 = aten.slice.Tensor(cache_1, 1, 2, 4)
    copy__default = aten.copy_.default(slice_tensor, slice_tensor_1)
    slice_tensor_2 = aten.slice.Tensor(carry_0, 1, 2, 4)
    slice_tensor_3 = aten.slice.Tensor(cache_1, 1, 4, 6)
    copy__default_1 = aten.copy_.default(slice_tensor_2, slice_tensor_3)
    slice_tensor_4 = aten.slice.Tensor(carry_0, 1, 4, 6)
    copy__default_2 = aten.copy_.default(slice_tensor_4, x_1)
    return (add, carry_0)""",
    )


def test_prepend_moves_the_last_frames_first() -> None:
    def keep_first(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        return x + 1, torch.cat([x, cache], 1)[:, :6]

    gm, _ = rewrite(keep_first, X, CACHE, states={"cache_1": 1})
    assert_expected_inline(
        listing(gm),
        """\
def forward(self, x_1, cache_1, carry_0):
    add = aten.add.Tensor(x_1, 1)
    slice_tensor = aten.slice.Tensor(carry_0, 1, 4, 6)
    slice_tensor_1 = aten.slice.Tensor(cache_1, 1, 2, 4)
    copy__default = aten.copy_.default(slice_tensor, slice_tensor_1)
    slice_tensor_2 = aten.slice.Tensor(carry_0, 1, 2, 4)
    slice_tensor_3 = aten.slice.Tensor(cache_1, 1, 0, 2)
    copy__default_1 = aten.copy_.default(slice_tensor_2, slice_tensor_3)
    slice_tensor_4 = aten.slice.Tensor(carry_0, 1, 0, 2)
    copy__default_2 = aten.copy_.default(slice_tensor_4, x_1)
    return (add, carry_0)""",
    )


def test_raw_extent_that_is_read_anyway_is_the_source() -> None:
    """Attention reads the cat, so it exists; one copy from it beats moving frames over each other."""

    def attend(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        raw = torch.cat([cache, x], 1)
        return torch.softmax(x @ raw.transpose(1, 2), -1) @ raw, raw[:, -6:]

    gm, ctx = rewrite(attend, X, CACHE, states={"cache_1": 1})
    assert ops(gm)[:3] == ["cat.default", "slice.Tensor", "copy_.default"] and ops(gm).count("copy_.default") == 1
    assert "needs anyway" in ctx.notes[0]


def test_filled_buffer_is_followed_write_by_write() -> None:
    def buffer(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        kept = torch.zeros_like(cache)
        kept[:, :3] = cache[:, 2:5]
        kept[:, 4:] = x
        return x + 1, kept

    gm, _ = rewrite(buffer, X, CACHE, states={"cache_1": 1})
    assert_expected_inline(
        listing(gm),
        """\
def forward(self, x_1, cache_1, carry_0):
    add = aten.add.Tensor(x_1, 1)
    slice_tensor = aten.slice.Tensor(carry_0, 1, 0, 2)
    slice_tensor_1 = aten.slice.Tensor(cache_1, 1, 2, 4)
    copy__default = aten.copy_.default(slice_tensor, slice_tensor_1)
    slice_tensor_2 = aten.slice.Tensor(carry_0, 1, 2, 3)
    slice_tensor_3 = aten.slice.Tensor(cache_1, 1, 4, 5)
    copy__default_1 = aten.copy_.default(slice_tensor_2, slice_tensor_3)
    slice_tensor_4 = aten.slice.Tensor(carry_0, 1, 3, 4)
    fill__scalar = aten.fill_.Scalar(slice_tensor_4, 0)
    slice_tensor_5 = aten.slice.Tensor(carry_0, 1, 4, 6)
    copy__default_2 = aten.copy_.default(slice_tensor_5, x_1)
    return (add, carry_0)""",
    )


def test_state_that_is_computed_is_copied_whole() -> None:
    gm, _ = rewrite(lambda x, cache: (x + 1, cache * 0.5), X, CACHE, states={"cache_1": 1})
    assert ops(gm) == ["add.Tensor", "mul.Tensor", "copy_.default"]


def test_unchanged_state_needs_no_write() -> None:
    gm, _ = rewrite(lambda x, cache: (x + 1, cache), X, CACHE, states={"cache_1": 1})
    assert ops(gm) == ["add.Tensor"]


def test_nested_chain_of_views_and_cats() -> None:
    def nested(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        raw = torch.cat([cache.transpose(1, 2), x.transpose(1, 2)], 2)
        head, tail = raw.split([3, 5], 2)
        raw = torch.cat([head[:, :, 1:], tail.clone()], 2).unsqueeze(0).squeeze(0)
        return x + 1, raw.transpose(1, 2)[:, 1:].contiguous()

    gm, _ = rewrite(nested, X, CACHE, states={"cache_1": 1})
    assert set(ops(gm)) == {"add.Tensor", "slice.Tensor", "copy_.default"}


@pytest.mark.parametrize("batch", [1, 2])
def test_rows_that_change_place_when_the_extent_grows(batch: int) -> None:
    """With a dimension before the axis, row 1 at extent 8 lies where row 1 at extent 6 does not."""

    def grow(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        return x + 1, torch.cat([cache, x], 1)

    gm, ctx = rewrite(grow, (batch, 2, 3), (batch, 6, 3), states={"cache_1": 1})
    assert ("clone.default" in ops(gm)) == (batch == 2)
    assert f"{0 if batch == 1 else 2 * 6 * 3 * 4} bytes of scratch" in ctx.notes[0]


def test_long_shift_goes_through_scratch() -> None:
    """Twenty steps of one frame would be twenty launches."""

    def keep_last(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        return x + 1, torch.cat([cache, x], 1)[:, 1:]

    gm, _ = rewrite(keep_last, (1, 1, 3), (1, 21, 3), states={"cache_1": 1})
    assert ops(gm).count("clone.default") == 1 and ops(gm).count("copy_.default") == 2


def test_halves_that_change_places() -> None:
    """Each write destroys the source of the other: one goes through scratch."""

    def swap(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        return x + 1, torch.cat([cache[:, 3:], cache[:, :3]], 1)

    gm, _ = rewrite(swap, X, CACHE, states={"cache_1": 1})
    assert ops(gm).count("clone.default") == 1


def test_states_that_change_places() -> None:
    """The writes of all states are one parallel assignment."""

    def exchange(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return x + 1, torch.cat([b[:, 2:], x], 1), torch.cat([a[:, 2:], x], 1)

    gm, _ = rewrite(exchange, X, CACHE, CACHE, states={"a_1": 1, "b_1": 2})
    assert "clone.default" in ops(gm)


def test_one_value_returned_for_two_states() -> None:
    def twice(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        kept = torch.cat([a, x], 1)[:, 2:]
        return x + 1, kept, kept

    _, ctx = rewrite(twice, X, CACHE, CACHE, states={"a_1": 1, "b_1": 2})
    assert [region.destination for region in ctx.regions] == ["carry_0", "carry_1"]


def test_many_layers() -> None:
    def layers(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        new = []
        for cache in (a, b, c):
            raw = torch.cat([cache, x], 1)
            x = x + raw.mean(1, keepdim=True)
            new.append(raw[:, -6:])
        return (x, *new)

    rewrite(layers, X, CACHE, CACHE, (1, 3, 3), states={"a_1": 1, "b_1": 2, "c_1": 3})


def test_returned_view_of_the_old_state_is_copied_out_first() -> None:
    """Otherwise the caller would see the new frames in it."""

    def leak(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        return cache[:, 1:4], cache.transpose(1, 2), torch.cat([cache, x], 1)[:, 2:]

    gm, _ = rewrite(leak, X, CACHE, states={"cache_1": 2})
    results = gm.graph.find_nodes(op="output")[0].args[0]
    assert [node.target.__name__ for node in results[:2]] == ["new_empty_strided.default", "clone.default"]
    assert [node.meta["val"].stride() for node in results[:2]] == [(18, 3, 1), (18, 1, 3)]  # as eager returns them


def test_dropout_outside_training_returns_a_view_of_the_old_state() -> None:
    """Its traced value has memory of its own, the real one has not."""

    def leak(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        kept = torch.nn.functional.dropout(torch.cat([cache, x], 1), 0.5, False)
        return torch.nn.functional.dropout(cache[:, 1:4], 0.5, False), kept[:, 2:]

    rewrite(leak, X, CACHE, states={"cache_1": 1})


def test_state_written_in_place_and_returned() -> None:
    """The placeholder itself is the new state, at the very place of the destination."""

    def in_place(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        cache[:, :2] = x
        return x + 1, cache

    gm, _ = rewrite(in_place, X, CACHE, states={"cache_1": 1})
    assert ops(gm).count("copy_.default") == 1


def test_state_read_before_it_is_written_in_place() -> None:
    """By the end of the graph the frames that were read are gone from the old state: the copy must stay."""

    def stale(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        kept = torch.cat([cache[:, 2:], x], 1)
        cache.mul_(2)
        return cache.sum() + x, kept

    gm, _ = rewrite(stale, X, CACHE, states={"cache_1": 1})
    assert "cat.default" in ops(gm)


def test_buffer_written_after_it_was_read() -> None:
    """The state holds what the buffer held before its second write."""

    def later(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        buffer = torch.zeros(1, 2, 3)
        buffer.copy_(x)
        kept = torch.cat([cache[:, 2:], buffer], 1)
        buffer.mul_(3)
        return buffer, kept

    rewrite(later, X, CACHE, states={"cache_1": 1})


def test_random_draws_and_writes_stay() -> None:
    """Nothing uses them, but the generator and the memory of others would notice."""

    def effects(x: Tensor, cache: Tensor, log: Tensor) -> tuple[Tensor, ...]:
        torch.rand_like(x)
        log.copy_(x)
        return x + 1, torch.cat([cache, x], 1)[:, 2:]

    gm = trace(effects, torch.randn(X), torch.randn(CACHE), torch.randn(X))
    rewritten = run_passes(gm, context(gm, slot(gm, "cache_1", 1, 1)), [ReinplaceRetention()])
    assert "rand_like.default" in ops(rewritten) and "copy_.default" in ops(rewritten)[:3]


def test_empty_state_at_the_start_of_a_stream() -> None:
    rewrite(lambda x, cache: (x + 1, torch.cat([cache, x], 1)), (2, 2, 3), (2, 0, 3), states={"cache_1": 1})


def test_negative_zero_and_nan_payloads_survive() -> None:
    def pad(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        return x + 1, torch.cat([torch.full_like(x, -0.0), cache[:, :4]], 1)

    gm, ctx = rewrite(pad, X, CACHE, states={"cache_1": 1})
    cache = torch.full(CACHE, 0x7FA12345, dtype=torch.int32).view(torch.float32)
    assert_same_bytes(run_on_carries(gm, ctx, [torch.zeros(X), cache]), pad(torch.zeros(X), cache))


def test_graph_without_states_is_left_alone() -> None:
    gm = trace(lambda x: (x + 1,), torch.randn(X))
    result = ReinplaceRetention()(gm, PassContext())
    assert not result.modified and result.graph_module is gm


def test_state_written_through_its_placeholder_is_left_alone() -> None:
    def in_place(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        cache[:, :2] = x
        return (x + 1,)

    gm = trace(in_place, torch.randn(X), torch.randn(CACHE))
    ctx = context(gm, slot(gm, "cache_1", None, 1))
    assert not ReinplaceRetention()(gm, ctx).modified and ctx.regions[0].destination is None


def test_second_run_changes_nothing() -> None:
    gm, ctx = rewrite(lambda x, cache: (x + 1, torch.cat([cache, x], 1)), X, CACHE, states={"cache_1": 1})
    assert not ReinplaceRetention()(gm, ctx).modified


def test_dtype_that_changes_is_refused() -> None:
    """One storage of one dtype cannot hold the old and the new state."""
    gm = trace(lambda x, cache: (x + 1, cache.double()), torch.randn(X), torch.randn(CACHE))
    with pytest.raises(PassFailed, match="comes in as torch.float32 .* goes out as torch.float64"):
        run_passes(gm, context(gm, slot(gm, "cache_1", 1, 1)), [ReinplaceRetention()])


def test_strides_that_storage_does_not_have_are_refused() -> None:
    """The kernels of the graph were chosen for strides that the carry will not show them."""
    gm = trace(lambda x, cache: (x + 1, torch.cat([cache, x], 1)), torch.randn(X), torch.randn(1, 3, 6).transpose(1, 2))
    with pytest.raises(PassFailed, match="not contiguous"):
        run_passes(gm, context(gm, slot(gm, "cache_1", 1, 1)), [ReinplaceRetention()])
