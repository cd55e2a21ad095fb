"""What the adapters declare by hand is found by inference, on the vendors' own code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bench import vendor
from cadence_fx import Inferred, PromptPlusLast, Region, Ring, infer
from cadence_fx.adapters.moshi import DecodeStep, EncodeStep
from cadence_fx.adapters.registry import contract_for
from cadence_fx.adapters.token2wav import Token2WavStream
from tests.unprepared import same


def declared(found: Inferred, step: Any) -> Any:
    """What the adapter declares of the places that were found; both contracts of one turn without its end."""
    contract = contract_for(step)
    assert contract is not None and found.contract is not None, found
    places = {region.place for region in found.contract.regions}
    return replace(contract, regions=[region for region in contract.regions if region.place in places], inputs=())


@pytest.mark.parametrize("package", [vendor.STEPAUDIO2, vendor.MINICPMO_UTILS], ids=["stepaudio2", "minicpmo"])
def test_token2wav(package: vendor.Package) -> None:
    if not vendor.available(package):
        pytest.skip("the vendor's package is not installed")
    stream = Token2WavStream(vendor.build_token2wav(vendor.TINY, package=package))
    stream.prime()
    geometry, state = stream.geometry, {name: value.clone() for name, value in stream._primed.items()}
    cnn, tokens, frames, solver_cnn, solver_att = (state[name] for name in stream.STATE)
    prompt = PromptPlusLast(geometry.prompt, geometry.retained)

    step = stream.plain_conformer[False]
    token = torch.randint(0, 6561, (1, geometry.hop + geometry.lookahead), dtype=torch.int32)
    first = (token, cnn, tokens, frames)
    with torch.no_grad():
        second = (token.flip(1), *step(*(value.clone() for value in first))[1:])
    found = infer(step, first, second)
    assert found.contract is not None, found
    assert found.contract.region("mel_cache").retention == prompt
    assert {region.name for region in found.contract.regions} == {"cnn_cache", "token_cache", "mel_cache"}
    assert same(found.contract, declared(found, step)) is None

    if package == vendor.MINICPMO_UTILS:
        return  # the flow decoder is the same code in both
    mu = torch.randn(1, 16, geometry.hop * geometry.rate)
    found = infer(stream.plain_flow, (mu, torch.randn(1, 16), torch.zeros_like(mu), solver_cnn, solver_att))
    assert found.contract is not None, found
    (region,) = found.contract.regions  # cnn_cache is computed anew, so that one call cannot show it
    assert region.retention == replace(prompt, order="prepend")
    assert any(text.startswith("cnn_cache: ") for text in found.ambiguous)
    assert sum("scratch, if that is always so" in text for text in found.ambiguous) == 4  # the vendor's workspaces
    assert same(found.contract, declared(found, stream.plain_flow)) is None


def attribute(region: Region) -> str:
    """Of the only layer."""
    return str(region.attribute).replace(".*", ".0")


@pytest.mark.skipif(not vendor.available(vendor.MOSHI), reason="the vendor's package is not installed")
@pytest.mark.parametrize("kind", [EncodeStep, DecodeStep])
def test_mimi(kind: type[Any]) -> None:
    mimi = vendor.build_mimi(replace(vendor.SMALL_MIMI, layers=1)).eval()
    with torch.no_grad(), mimi.streaming(1):
        step = kind(mimi, 1, mimi.num_codebooks)
        found = infer(step, (step.example(),))
        assert found.contract is not None, found
        contract = contract_for(step)
        assert contract is not None
        mine = {attribute(region): region for region in found.contract.regions}
        left_out = {text.partition(":")[0].removeprefix("self.") for text in found.ambiguous}
        for region in contract.regions:
            name = attribute(region)
            if isinstance(region.retention, Ring):
                assert (mine[name].retention, mine[name].axis) == (region.retention, region.axis)
            elif name in mine:
                assert mine[name].retention.bound == region.bound or mine[name].axis != region.axis
            else:  # masks that users write, a flag that settles in the first call, a position that nothing reads
                assert name in left_out or name.endswith(("exec_mask", "first")), name
        convolutions = [r for r in found.contract.regions if r.name.endswith("previous")]
        strides = {r.added(found.contract.frame_stride(r)) for r in convolutions if not r.retention.fixed}
        assert strides <= {2, 16, 96, 480, 1920} and len(strides) > 2  # frames of each layer's own rate
