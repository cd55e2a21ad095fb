"""What users of MiniCPM-o do with a bound decoder: other prompts and solver steps, streams side by side, rollbacks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cadence_fx
from bench import vendor
from cadence_fx.adapters.token2wav import Geometry, Token2WavStream
from cadence_fx.bytesops import bytes_equal
from cadence_fx.errors import ContractError
from tests.adapters.pair import uncompiled

pytestmark = [
    pytest.mark.skipif(not vendor.available(), reason="the vendor package stepaudio2-minicpmo is not installed"),
    pytest.mark.skipif(not vendor.available(vendor.MINICPMO_UTILS), reason="minicpmo-utils is not installed"),
    pytest.mark.filterwarnings("ignore:.*Disabling autocast"),
]

SIZES = replace(vendor.SMALL, depth=1, blocks=1, vocoder_kernels=(11,), vocoder_dilations=(1,), vocoder=8)
BOTH = pytest.mark.parametrize("package", [vendor.STEPAUDIO2, vendor.MINICPMO_UTILS], ids=["0.1.1", "1.0.7"])
State = tuple[dict[str, Tensor], dict[str, Tensor]]


class Two:
    """The vendor's decoder and a bound one, driven through `set_stream_cache` and `stream` alone, any number of streams
    on each; a prompt is named by its frames. Every call compares samples and generator."""

    def __init__(
        self, package: vendor.Package, sizes: vendor.Sizes = SIZES, bound: bool = True, **options: Any
    ) -> None:
        self.sizes = sizes
        self.both = [uncompiled(vendor.build_token2wav(sizes, package=package)) for _ in range(2)]
        for token2wav in self.both:
            token2wav._prepare_prompt = self.prompt
            token2wav.cache = {} if isinstance(token2wav.cache, dict) else None
        self.options = options
        if bound:
            self.bind()
        self.calls = 0

    def bind(self) -> Token2WavStream:
        self.stream = Token2WavStream(self.both[1], **self.options)
        return self.stream

    def prompt(self, frames: str) -> tuple[Tensor, ...]:
        return vendor.build_prompt(replace(self.sizes, prompt_frames=int(frames)), seed=int(frames)).as_cache()

    def start(self, frames: int) -> None:
        for token2wav in self.both:
            token2wav.stream_cache, token2wav.hift_cache_dict = token2wav.set_stream_cache(str(frames))

    def call(self, count: int = 28, last_chunk: bool = False) -> None:
        tokens = vendor.build_tokens(1, count, self.sizes, seed=self.calls)[0]
        heard, generators = [], []
        for token2wav in self.both:
            torch.manual_seed(self.calls)
            heard.append(token2wav.stream(tokens, None, last_chunk=last_chunk, return_waveform=True))
            generators.append(torch.get_rng_state())
        assert heard[0].shape == heard[1].shape and heard[0].tobytes() == heard[1].tobytes(), f"call {self.calls}"
        assert torch.equal(*generators)
        self.calls += 1

    def saved(self) -> list[State]:
        """Clones of both dictionaries of both, as MiniCPM-o keeps them."""

        def cloned(cache: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: value.clone() for name, value in cache.items()}

        return [(cloned(each.stream_cache), cloned(each.hift_cache_dict)) for each in self.both]

    def restore(self, saved: list[State]) -> None:
        for each, caches in zip(self.both, saved, strict=True):
            each.stream_cache, each.hift_cache_dict = ({k: v.clone() for k, v in cache.items()} for cache in caches)


@BOTH
def test_sessions_of_other_prompts_on_one_object_have_the_vendors_bytes(package: vendor.Package) -> None:
    two = Two(package)
    for frames in (104, 40, 130, 98, 104):
        two.start(frames)
        for _ in range(4):
            two.call()
        two.call(9, last_chunk=True)
    assert [steps.geometry.prompt for steps in two.stream._sets.values()] == [104, 40, 130, 98]
    short = 10 if package == vendor.STEPAUDIO2 else 0  # the first package's trim scrambles a prompt below 100 frames
    assert two.stream.eager_calls["short prompt"] == short and two.stream.eager_calls["priming"] == 5
    assert len(two.stream.refused()) == (2 if short else 0)
    decoder = two.both[1].flow.decoder
    assert decoder.att_cache_buffer.shape[::4] == (3, 130 + 100 + 56)  # for the longest of them
    two.stream.unbind()
    for _ in range(2):
        two.start(98)
        two.call()


@BOTH
def test_a_session_of_fifty_calls_with_rollbacks_and_two_streams_has_the_vendors_bytes(package: vendor.Package) -> None:
    two = Two(package, flush=(9, 25))
    two.start(104)
    base = two.saved()
    streams = [base, base]
    for i in range(48):
        two.restore(streams[i % 2])
        before = two.saved()
        two.call()
        if i % 11 == 5:  # the last call is taken back, and said otherwise
            two.restore(before)
            two.call(12 if i % 2 else 28)
        streams[i % 2] = two.saved()
        if i % 14 == 13:
            two.call(9 + i % 3, last_chunk=True)
            streams[i % 2] = base
    assert two.calls >= 50 and two.stream.eager_calls["priming"] == 1


def test_compiled_prompts_that_are_warmed_up_replay_and_rollbacks_are_adopted() -> None:
    two = Two(vendor.STEPAUDIO2, replace(SIZES, steps=1), backend=cadence_fx.cadence)
    two.stream.vocoder.steps = two.stream.vocoder.plain  # compiled elsewhere
    two.stream.vocoder.calls = lambda: ()
    two.stream.warm_up(cadence_fx.warm_up, prompts=["104", "110"])
    assert all(getattr(each, "stream_cache", None) is None for each in two.both)
    for frames in (104, 110):
        two.start(frames)
        two.call()
        saved = two.saved()
        for _ in range(3):
            two.call()
        two.restore(saved)
        two.call()
    streams: list[list[State]] = []
    for _ in range(2):  # side by side: the vendor's dictionaries are cloned, ours kept by reference
        two.start(110)
        streams.append(two.saved()[:1] + [(two.both[1].stream_cache, two.both[1].hift_cache_dict)])
    for i in range(7):
        now = i % 3 % 2
        for each, caches in zip(two.both, streams[now], strict=True):
            each.stream_cache, each.hift_cache_dict = caches
        two.call()
        streams[now] = two.saved()[:1] + [(two.both[1].stream_cache, two.both[1].hift_cache_dict)]
    steps = {name: step for name, step in two.stream.compiled().items() if "prompt=" in name}
    assert len(steps) == 4
    for name, step in steps.items():
        row, replays = cadence_fx.report(step), 5 + 7 * ("prompt=110" in name)
        assert (row["replays"], row["misses"], row["late_captures"]) == (replays, {}, 0), name
    assert two.stream.eager_calls == {"priming": 6}


def test_solver_steps_may_change_between_calls_but_not_grow() -> None:
    two = Two(vendor.STEPAUDIO2)
    two.start(104)
    two.call()
    for token2wav in two.both:
        token2wav.n_timesteps = 2  # the first rows are those of two steps, too
    two.call()
    two.both[1].n_timesteps = 3
    with pytest.raises(ContractError, match="of fewer than 3 solver steps"):
        two.both[1].stream(vendor.build_tokens(1, 28)[0], None)
    for token2wav in two.both:
        token2wav.n_timesteps = 4
    two.start(104)
    two.call()
    assert [steps.geometry.steps for steps in two.stream._sets.values()] == [3, 2, 4]


@BOTH
@pytest.mark.parametrize("calls", [0, 1, 3])
def test_an_open_stream_goes_on_over_bind_and_unbind(package: vendor.Package, calls: int) -> None:
    two = Two(package, bound=False)
    two.start(104)
    kept = two.saved()
    for _ in range(calls):
        two.call()
    stream = two.bind()
    two.call()
    two.call(12)
    own = two.both[1]
    kept[1] = (stream.shipped(stream._active.declared(kept[1][0])), kept[1][1])
    stream.unbind()
    assert own.stream_cache.keys() == two.both[0].stream_cache.keys()
    for name, value in two.both[0].stream_cache.items():
        assert own.stream_cache[name].shape == value.shape, name
    two.call()
    two.restore(kept)  # one that the application had kept beside
    two.call()


def test_a_binding_without_a_prompt_says_what_to_do() -> None:
    two = Two(vendor.MINICPMO_UTILS)
    with pytest.raises(ContractError, match=r"warm_up\(prompts=\[prompt\]\)"):
        two.stream.warm_up(cadence_fx.warm_up)
    two.stream.prime("104")
    assert two.stream.geometry.prompt == 104
    with pytest.raises(ContractError, match="846 frames cannot be declared"):
        two.both[1].set_stream_cache("846")


@pytest.mark.parametrize("steps", [10, 5])
def test_ten_and_five_solver_steps_have_the_vendors_bytes(steps: int) -> None:
    contract = Geometry(prompt=302, steps=steps).flow_contract()
    assert contract.clock("solver").period == steps
    assert [entry.extent_of("att_cache") for entry in contract.catalog()] == [302, 352, 402]
    two = Two(vendor.STEPAUDIO2, replace(SIZES, steps=steps))
    two.start(104)
    for _ in range(3):
        two.call()
    assert two.both[1].flow.decoder.att_cache_buffer.shape[0] == steps


def test_a_cache_of_another_prompt_is_refused() -> None:
    two = Two(vendor.STEPAUDIO2)
    two.start(104)
    two.call()
    own = two.both[1]
    cache, own.cache = own.stream_cache, two.prompt("40")
    with pytest.raises(ContractError, match="another prompt"):
        own.stream(vendor.build_tokens(1, 28)[0], None)
    assert all(bytes_equal(own.stream_cache[name], value) for name, value in cache.items())
