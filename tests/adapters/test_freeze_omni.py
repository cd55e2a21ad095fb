"""The Freeze-Omni adapter on small random weights: every byte of every window, and of the audio that is made of them.

Tests run in two forms: on the vendor's own code where CADENCE_FREEZE_OMNI names a clone of its repository, and on
the stand-in of `bench.vendor` everywhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import cadence_fx
from bench import vendor
from bench.vendor import freeze_omni, ticodec_stand_in
from bench.vendor.freeze_omni import Window
from cadence_fx.adapters import contract_for
from cadence_fx.adapters.freeze_omni import FreezeOmniStream, Windows, released
from cadence_fx.errors import ContractError
from tests.harness import BACKEND, assert_same

needs_checkout = pytest.mark.skipif(
    not freeze_omni.is_vendors(), reason="CADENCE_FREEZE_OMNI names no clone of VITA-MLLM/Freeze-Omni"
)
FORMS = [pytest.param(True, id="stand-in"), pytest.param(False, id="checkout", marks=needs_checkout)]

SIZES = replace(vendor.SMALL_TICODEC, residual=(3,))
# Tokens of the sentences of a session: shorter than a window, that end with one, whose tail has the size of one; long.
SENTENCES = (75, 9, 50, 20, 130, 110, 1, 300, 49, 60, 90, 150, 59, 320, 190, 233)


@pytest.fixture(autouse=True)
def _serving() -> Iterator[None]:
    with torch.no_grad():
        yield


def autocast() -> torch.autocast:
    """What the vendor's `run` opens around a sentence, on a CPU."""
    return torch.autocast("cpu", torch.bfloat16)


class Pair:
    """The vendor's codec and a bound one, with equal weights; each window compares samples and what is spoken."""

    def __init__(self, stand_in: bool, **options: Any) -> None:
        self.reference, self.bound = (freeze_omni.build_generator(SIZES, stand_in=stand_in) for _ in range(2))
        self.stream = FreezeOmniStream(self.bound, backend=BACKEND, **options)
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.sizes: Counter[int] = Counter()
        self.before: Counter[str] = Counter()

    def warm_up(self) -> Pair:
        self.stream.warm_up(cadence_fx.warm_up)
        self.begin()
        return self

    def begin(self) -> None:
        self.before = self._counts()
        self.stream.eager_calls.clear()
        self.sizes.clear()
        self.kept.clear()

    def _counts(self) -> Counter[str]:
        row = cadence_fx.report(self.stream.step).as_dict()
        return Counter(row["misses"]) + Counter(replays=row["replays"], late=row["late_captures"])

    def since(self) -> Counter[str]:
        """Replays, late captures and misses since `begin`."""
        return self._counts() - self.before

    def window(self, window: Window) -> tuple[Tensor, Tensor]:
        what = f"window {self.sizes.total()} of {window.codes.shape[1]} tokens"
        self.sizes[window.codes.shape[1]] += 1
        expected, actual = (window.decode(codec) for codec in (self.reference, self.bound))
        assert_same(actual, expected, what)
        assert actual.stride() == expected.stride(), what
        self.kept.append((actual, expected))
        return window.spoken(actual), window.spoken(expected)

    def windows(self, windows: Iterable[Window]) -> None:
        """Compares each, and at the end all of their audio again."""
        spoken = [self.window(window) for window in windows]
        actual, expected = (torch.cat(parts, -1) for parts in zip(*spoken, strict=True))
        assert_same(actual, expected, "the audio")
        for number, (actual, expected) in enumerate(self.kept):
            assert_same(actual, expected, f"window {number}, read at the end")

    def check_counts(self) -> None:
        """Every window of a declared size was replayed, every other one ran the vendor's code, and nothing missed."""
        declared = sum(count for size, count in self.sizes.items() if size in self.stream.windows.sizes)
        assert self.since() == Counter(replays=declared)
        assert self.stream.eager_calls == Counter({"undeclared size": self.sizes.total() - declared})


@pytest.fixture(params=FORMS)
def pair(request: pytest.FixtureRequest) -> Pair:
    """A codec that is warmed up."""
    return Pair(request.param).warm_up()


def test_a_session_has_the_vendors_bytes(pair: Pair) -> None:
    heard = []
    with autocast():
        pair.windows(freeze_omni.session(SENTENCES, SIZES))
    assert pair.sizes.total() > 50 and {30, 40, 50, 60} < pair.sizes.keys()
    for samples, _ in pair.kept:
        assert samples.dtype == torch.bfloat16
        heard.append(tuple(samples[0, 0, ::997].tolist()))
        assert samples.float().std() > 0.05
    assert len(set(heard)) == len(heard)  # the weights let the tokens through
    pair.check_counts()


def test_two_sessions_take_turns_on_one_object(pair: Pair) -> None:
    first, second = (freeze_omni.session(SENTENCES[seed::2], SIZES, seed=seed) for seed in (0, 1))
    with autocast():
        pair.windows(window for both in zip_longest(first, second) for window in both if window is not None)
    assert pair.sizes.total() > 50
    pair.check_counts()


def test_each_sentence_opens_an_autocast_of_its_own_and_weights_are_edited_between_them(pair: Pair) -> None:
    """Eager keeps casts of the weights until the context is left: the next sentence has casts of what they are then."""
    for seed in range(3):
        with autocast():
            pair.windows(freeze_omni.session((35, 65), SIZES, seed=seed))
        for codec in (pair.reference, pair.bound):
            codec.generator.conv_pre.weight.mul_(-1)
            codec.quantizer.quantizer_modules_globaltokens[3].embedding.weight.add_(0.5)
        pair.check_counts()


def test_other_calls_run_the_vendors_code_and_are_counted(pair: Pair) -> None:
    """Under no autocast, of no declared size, for several streams at once."""
    windows = list(freeze_omni.session((75, 50), SIZES))
    pair.windows(windows)
    assert pair.sizes == Counter({40: 2, 30: 1, 25: 1, 50: 1, 20: 1})
    assert all(samples.dtype == torch.float32 for samples, _ in pair.kept)
    assert pair.since() == Counter(mode=4) and pair.stream.eager_calls == {"undeclared size": 2}
    pair.begin()
    with autocast():
        pair.windows([windows[0], replace(windows[0], codes=windows[0].codes.repeat(1, 3, 1))])
        codes, speakers = windows[0].codes.repeat(2, 1, 1), torch.tensor([[[5] * 8], [[6] * 8]])
        assert_same(pair.bound(codes, speakers), pair.reference(codes, speakers), "a batch")
        codes, speakers = codes[:1], speakers[:1]
        assert_same(pair.bound(codes, speakers), pair.reference(codes, speakers), "another speaker")
    assert pair.since() == Counter(replays=2) and pair.stream.eager_calls == {"undeclared size": 2}


@pytest.mark.parametrize("stand_in", FORMS)
def test_a_warm_up_in_the_middle_of_a_session_takes_no_casts_of_it(stand_in: bool) -> None:
    pair = Pair(stand_in, chunks=(20,))
    windows = list(freeze_omni.session((130,), SIZES))
    with autocast():
        for codec in (pair.reference, pair.bound):
            Window(windows[0].codes[:, :7], 0, 0).decode(codec)  # casts of its weights are kept from here
        pair.warm_up()
        pair.windows(windows)
    assert pair.stream.eager_calls == {"undeclared size": 1}
    with autocast():
        pair.windows(windows)
    pair.check_counts()


@pytest.mark.parametrize("stand_in", FORMS)
def test_tails_can_be_declared(stand_in: bool) -> None:
    pair = Pair(stand_in, chunks=(2, 3), padding=1, tails=True).warm_up()
    assert pair.stream.windows.sizes == (5, 4, 3, 2, 1)
    with autocast():
        for length in range(1, 15):
            for chunk in (2, 3):
                pair.windows(freeze_omni.windows(range(length), chunk, padding=1))
    assert pair.sizes.keys() == {1, 2, 3, 4, 5} and not pair.stream.eager_calls
    pair.check_counts()


@needs_checkout
def test_the_vendors_own_loop_speaks_the_same() -> None:
    """`llm2TTS.run`, with the context that it opens, its windows and its buffer of audio, which waits for a place that
    is quieter than a threshold: everywhere, nowhere, somewhere."""
    pair, draw, segments = Pair(stand_in=False).warm_up(), torch.Generator().manual_seed(3), 0
    for length, chunk, quiet in ((75, 20, 9.0), (9, 40, 0.7), (50, 40, 9.0), (230, 40, 0.0), (160, 40, 0.75)):
        tokens = torch.randint(SIZES.codes, (length,), generator=draw).tolist()
        speakers = (freeze_omni.build_llm2tts(codec, tokens) for codec in (pair.reference, pair.bound))
        expected, actual = (list(each.run(torch.zeros(1), 2, None, chunk, seg_threshold=quiet)) for each in speakers)
        for theirs, ours in zip(expected, actual, strict=True):
            assert_same(ours, theirs, f"segment {segments}")
            segments += 1
        assert sum(each.shape[2] for each in actual) == freeze_omni.SAMPLES * length
        pair.sizes.update(window.codes.shape[1] for window in freeze_omni.windows(tokens, chunk))
    assert pair.sizes.total() > segments > 5
    pair.check_counts()


@needs_checkout
def test_two_loops_of_the_vendors_in_one_thread_end_each_others_autocast() -> None:
    """Each opens one that lasts until it is exhausted, and then leaves what it had found: the first to end turns the
    other's off, whose windows are float32 from there. Those run eager, as they would unbound."""
    pair = Pair(stand_in=False, chunks=(20,)).warm_up()

    def speak(codec: Any) -> list[Tensor]:
        with torch.autocast("cpu", enabled=False):  # puts back what they leave
            first, second = (
                freeze_omni.build_llm2tts(codec, range(n)).run(torch.zeros(1), 2, None, 20, seg_threshold=9.0)
                for n in (55, 64)
            )
            return [next(first), next(second), *first, *second]

    expected, actual = speak(pair.reference), speak(pair.bound)
    for number, (theirs, ours) in enumerate(zip(expected, actual, strict=True)):
        assert_same(ours, theirs, f"segment {number}")
    assert pair.since() == Counter(replays=3, mode=1)
    assert {each.dtype for each in expected} == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("stand_in", FORMS)
def test_unbinding_gives_the_object_back_as_shipped(stand_in: bool) -> None:
    reference, codec = (freeze_omni.build_generator(SIZES, stand_in=stand_in) for _ in range(2))
    attributes, weights = dict(vars(codec)), {name: weight.clone() for name, weight in codec.state_dict().items()}
    stream = FreezeOmniStream(SimpleNamespace(codec_model=SimpleNamespace(vqvae=codec)), backend=BACKEND, chunks=(4,))
    stream.warm_up(cadence_fx.warm_up)
    assert codec.forward == stream._forward
    stream.unbind()
    assert vars(codec) == attributes and codec.forward.__func__ is type(codec).forward
    for name, weight in weights.items():
        assert_same(codec.state_dict()[name], weight, name)
    window = next(freeze_omni.session((75,), SIZES))
    assert_same(window.decode(codec), window.decode(reference), "after unbinding")
    FreezeOmniStream(codec).unbind()


def test_what_cannot_be_bound_is_refused() -> None:
    codec = freeze_omni.build_generator(SIZES, stand_in=True)
    stream = FreezeOmniStream(SimpleNamespace(vqvae=codec))
    with pytest.raises(ContractError, match="bound already"):
        FreezeOmniStream(codec)
    stream.unbind()
    with pytest.raises(ContractError, match=r"VQVAE of Freeze-Omni at 3e17af4, found torch\.nn\.\S+\.Linear"):
        FreezeOmniStream(torch.nn.Linear(2, 2))
    torch.nn.utils.weight_norm(codec.generator.conv_pre)
    with pytest.raises(ContractError, match="remove_weight_norm"):
        FreezeOmniStream(codec)


def test_the_catalog_is_the_windows() -> None:
    """Each chunk is first + steady: 30 then 40, 50 then 60. Tails have all other sizes below the longest."""
    contracts = released()
    assert list(Windows().sizes) == [60, 50, 40, 30]
    assert {name: contract.width().classes for name, contract in contracts.items()} == {
        "window": 4,
        "window and tails": 60,
    }
    for contract in contracts.values():
        assert contract.width().exact and len(contract.catalog()) == contract.width().classes
    assert Windows(chunks=(40,)).sizes == (60, 50)  # as the repository's inference script has it
    stream = FreezeOmniStream(freeze_omni.build_generator(SIZES, stand_in=True))
    assert stream.contracts() == {"window": contract_for(stream.plain)} == {"window": contracts["window"]}
    assert stream.compiled() == {"window": stream.plain} and not stream.refused()


@needs_checkout
@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_the_stand_in_computes_what_the_vendors_code_computes(dtype: torch.dtype | None) -> None:
    theirs, ours = (freeze_omni.build_generator(vendor.SMALL_TICODEC, stand_in=form) for form in (False, True))
    named = dict(ours.named_parameters())
    assert named.keys() == {name for name, _ in theirs.named_parameters() if not name.startswith("encoder.")}
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        for window in freeze_omni.session((75, 50), vendor.SMALL_TICODEC):
            assert_same(window.decode(ours), window.decode(theirs), f"{window.codes.shape[1]} tokens")


def test_the_stand_in_has_the_released_size() -> None:
    with torch.device("meta"):
        built = ticodec_stand_in.VQVAE(SimpleNamespace(**vendor.TICODEC.config()))
    assert sum(weight.numel() for weight in built.generator.parameters()) == 15_369_857
    assert freeze_omni.SAMPLES == 600


@needs_checkout
def test_the_checkout_leaves_no_traces() -> None:
    code = (
        "import sys; path = list(sys.path); from bench.vendor import freeze_omni as f;"
        "f.build_llm2tts(f.build_generator(f.SMALL_TICODEC), []);"
        "assert sys.path == path;"
        "assert not {'models', 'web', 'bin', 'librosa', 'soundfile', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, env=os.environ)


def test_the_adapter_imports_no_vendor() -> None:
    code = "import sys, cadence_fx.adapters.freeze_omni; assert 'models' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
