"""The passes on a graph of a real device: host constants move there, and the bytes of a stream stay equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cadence_fx.passes import Proved, prove_retention, run_passes
from cadence_fx.retention import KeepLast
from tests.passes.toolbox import assert_same_bytes, context, listing, run_on_carries, slot, trace


def step(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
    position = torch.arange(2, device="cpu").to(x.device)
    raw = torch.cat([cache, x.index_select(1, position)], 1)
    return x * torch.tensor([1.0, 2.0, 3.0], device="cpu").to(x.device), raw[:, [2, 3, 4, 5, 6, 7]]


@pytest.mark.gpu
def test_stream_on_a_device() -> None:
    x, cache = torch.randn(2, 2, 3, device="cuda"), torch.randn(2, 6, 3, device="cuda")
    gm = trace(step, x, cache)
    region = slot(gm, "cache_1", 1, 1, retention=KeepLast(6), advance=2)
    assert isinstance(prove_retention(gm, region), Proved)
    ctx = context(gm, region)
    rewritten = run_passes(gm, ctx)  # which ends with the check that it can be captured
    assert "_folded_" in listing(rewritten) and "arange" not in listing(rewritten) and "host constants" in ctx.notes[0]
    for _ in range(4):
        want = step(x, cache.clone())
        got = run_on_carries(rewritten, ctx, [x, cache])
        assert_same_bytes(got, want)
        x, cache = torch.randn_like(x), got[1].clone()
