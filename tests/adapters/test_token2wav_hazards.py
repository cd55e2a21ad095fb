"""What the adapter knows of the vendor's own CUDA graphs: for which declared calls they could ever fire."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import cadence_fx
from bench import vendor
from cadence_fx.adapters import hazards_for
from cadence_fx.adapters.token2wav import FlowStep, Geometry

pytestmark = pytest.mark.skipif(not vendor.available(), reason="the vendor package is not installed")

ABOUT = "the vendor's CUDA graphs are for chunks of 30, 48, 96 frames; declared calls have "


@pytest.mark.parametrize(
    "prompt, flush, told",
    [
        (302, (), "50: they never fire"),
        (302, (7, 28), "14, 50, 56: they never fire"),
        (302, (15, 24), "30, 48, 50: they can fire for 30, 48, padded with zeros, and are switched off"),
        (502, (15, 24), "30, 48, 50: they never fire"),  # a prompt that is longer than what they are captured for
    ],
)
def test_whether_the_vendors_graphs_can_fire(prompt: int, flush: tuple[int, ...], told: str) -> None:
    step = FlowStep(vendor.build_flow(vendor.TINY).decoder, Geometry(prompt=prompt, steps=2, flush=flush))
    (found,) = hazards_for(step)
    assert (found.kind, found.what, found.stops) == ("vendor_graphs", ABOUT + told, False)
    assert found.line is not None and "decoder_dit.py:" in found.line
    step.decoder.estimator.use_cuda_graph = True
    (found,) = hazards_for(step)
    assert found.stops is ("never fire" not in told)


@torch.no_grad()
def test_the_doctor_on_the_released_code() -> None:
    """The frequency table of the time embedding is made on the host in every solver step; nothing stops a capture."""
    sizes = vendor.TINY
    step = FlowStep(vendor.build_flow(sizes).decoder, Geometry(prompt=sizes.prompt_frames, steps=sizes.steps))
    states = (
        torch.zeros(sizes.steps, sizes.depth, 2, 2 * sizes.hidden, 2),
        torch.zeros(sizes.steps, sizes.depth, 2, sizes.heads, sizes.prompt_frames, 2 * sizes.head_dim),
    )
    mel = torch.randn(1, sizes.mel, 50)
    found = cadence_fx.doctor(step, mel, torch.randn(1, sizes.mel), mel, *states)
    ours = {each.kind: each.line or "" for each in found.hazards if "decoder_dit.py" in (each.line or "")}
    assert set(ours) == {"host_constant", "vendor_graphs"} and not found.stops
    file, _, line = ours["host_constant"].rpartition(":")
    assert "arange" in Path(file).read_text().splitlines()[int(line) - 2]
