"""What the doctor finds in Mimi as it is shipped: the facts that the adapter works around, each at its line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import cadence_fx
from bench import vendor

pytestmark = pytest.mark.skipif(not vendor.available(vendor.MOSHI), reason="the package moshi is not installed")


class Encode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mimi = vendor.build_mimi(vendor.SMALL_MIMI)
        self.mimi.streaming_forever(1)

    def forward(self, pcm: Tensor) -> Tensor:
        return self.mimi.encode(pcm)  # type: ignore[no-any-return]


@torch.no_grad()
def test_the_released_codec() -> None:
    found = cadence_fx.doctor(Encode(), torch.randn(1, 1, 1920))
    told = {}
    for each in found.hazards:
        file, _, line = (each.line or "").rpartition(":")
        if "moshi" in file:
            told[each.kind, Path(file).name] = Path(file).read_text().splitlines()[int(line) - 1].strip()
    assert told["lazy_buffer", "core_vq.py"].startswith('self.register_buffer("_embedding"')
    assert "offset_cpu += " in told["counter", "transformer.py"]
    assert "first = " in told["undeclared_state", "conv.py"]  # the one tensor whose address moves
    assert told["own_graph", "compile.py"] == "with cuda.graph(self._graph):"
    assert not found.stops  # on a host its own graphs are not captured
