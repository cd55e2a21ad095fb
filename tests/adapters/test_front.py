"""The front door: what `bind` accepts, what it returns, and that `unbind` leaves no byte and no name behind."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from bench import vendor
from bench.vendor.token2wav import PROMPT
from cadence_fx import adapters
from cadence_fx.adapters import Bound, Family, Release
from cadence_fx.bytesops import digest
from cadence_fx.errors import AlreadyBound, ContractError, NotBound, UnknownFamily, VendorMismatch
from tests.adapters.pair import uncompiled

pytestmark = pytest.mark.filterwarnings("ignore:.*Disabling autocast")

TOKEN2WAV = replace(vendor.SMALL, depth=1, blocks=1, vocoder_kernels=(11,), vocoder_dilations=(1,), vocoder=8)
MIMI = replace(vendor.SMALL_MIMI, layers=1)


def speak(token2wav: Any, calls: int = 2) -> list[Any]:
    """Samples of a few calls of an open stream."""
    torch.manual_seed(0)
    return [token2wav.stream(tokens, PROMPT) for tokens in vendor.build_tokens(calls, 28)]


def code(mimi: Any, calls: int = 2) -> list[Any]:
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return [mimi.decode(mimi.encode(torch.randn(1, 1, 1920, generator=draw))) for _ in range(calls)]


def talk(gen: Any, calls: int = 3) -> list[Any]:
    torch.manual_seed(0)
    with torch.no_grad():
        return [gen.step(torch.full((1, 8, 1), number)) for number in range(calls)]


def opened(build: Callable[[], Any]) -> Callable[[], Any]:
    def start() -> Any:
        given = build()
        given.streaming_forever(1)
        return given

    return start


def primed(package: vendor.Package) -> Callable[[], Any]:
    def start() -> Any:
        token2wav = uncompiled(vendor.build_token2wav(TOKEN2WAV, package=package))
        vendor.start_turn(token2wav)
        speak(token2wav, 1)
        return token2wav

    return start


def lychee() -> Any:
    token2wav = vendor.build_lychee(TOKEN2WAV)
    token2wav.set_stream_cache(PROMPT)
    speak(token2wav, 1)
    return token2wav


def needs(package: vendor.Package) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not vendor.available(package), reason=f"{package.distribution} is not installed")


CASES = [
    pytest.param("token2wav", primed(vendor.STEPAUDIO2), speak, marks=needs(vendor.STEPAUDIO2), id="0.1.1"),
    pytest.param(
        "token2wav-causal", primed(vendor.MINICPMO_UTILS), speak, marks=needs(vendor.MINICPMO_UTILS), id="1.0.7"
    ),
    pytest.param("lychee-fd", lychee, speak, marks=needs(vendor.STEPAUDIO2), id="lychee-fd"),
    pytest.param("mimi", opened(lambda: vendor.build_mimi(MIMI)), code, marks=needs(vendor.MOSHI), id="mimi"),
    pytest.param(
        "moshi", opened(lambda: vendor.build_lm_gen(vendor.SMALL_MOSHI)), talk, marks=needs(vendor.MOSHI), id="moshi"
    ),
]


def parts(given: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """An object, the modules in its attributes, and the state objects of these."""
    yield name, given
    if isinstance(given, nn.Module):
        for path, module in given.named_modules():
            yield f"{name}.{path}", module
            if (state := getattr(module, "_streaming_state", None)) is not None:
                yield f"{name}.{path}._streaming_state", state
    else:
        for key, value in vars(given).items():
            if isinstance(value, nn.Module) or key == "bounded_vocoder":
                yield from parts(value, f"{name}.{key}")


def fingerprint(given: Any) -> dict[str, Any]:
    """All that an object is: classes, names of attributes, methods in front of those of classes, numbers, bytes."""
    found: dict[str, Any] = {}
    for name, part in parts(given):
        found[name] = type(part)
        for key, value in vars(part).items():
            groups = value.items() if isinstance(value, dict) else enumerate(value) if type(value) is tuple else ()
            for inner, each in [("", value), *groups]:
                where = f"{name}.{key}[{inner}]"
                if isinstance(each, torch.Tensor):
                    made = each.is_inference() if key in ("_buffers", "_parameters") else None
                    found[where] = (each.shape, each.dtype, made, digest(each))
                elif isinstance(each, types.MethodType):
                    found[where] = each
                else:
                    found[where] = (type(each), each if isinstance(each, (int, float, str, bool)) else None)
    return found


@pytest.mark.parametrize("family, build, use", CASES)
def test_unbind_gives_the_vendors_object_back_bit_for_bit(
    family: str, build: Callable[[], Any], use: Callable[..., list[Any]]
) -> None:
    given, reference = build(), build()
    before = fingerprint(given)
    bound = adapters.bind(given, backend=None)
    assert bound.family == family and fingerprint(given) != before
    bound.unbind()
    after = fingerprint(given)
    assert after.keys() == before.keys()
    assert {name for name in before if before[name] != after[name]} == set()

    bound = adapters.bind(given, backend=None)
    outputs = [use(reference), use(bound)]
    adapters.unbind(bound)
    outputs[0] += use(reference)
    outputs[1] += use(bound)  # still the object
    for theirs, ours in zip(*outputs, strict=True):
        same = torch.equal(theirs, ours) if isinstance(theirs, torch.Tensor) else theirs == ours
        assert same


@needs(vendor.MOSHI)
def test_what_bind_returns_is_used_as_the_object() -> None:
    mimi = vendor.build_mimi(MIMI)
    bound: Any = adapters.bind(mimi)
    assert all(isinstance(bound, kind) for kind in (type(mimi), nn.Module, Bound))
    holder: Any = nn.ModuleList()
    holder.append(bound)
    assert holder[0] is bound
    assert (bound.family, bound.release, bound.vendor) == ("mimi", "moshi 0.2.13", mimi)
    assert "encode" in dir(bound) and repr(bound) == "<bound MimiModel of moshi 0.2.13>"
    bound.note = 1
    assert mimi.note == 1
    del bound.note
    assert not hasattr(mimi, "note")
    assert bound.contracts() == {}
    reports = bound.warm_up(batch=1)
    assert [report["classes"] for report in reports] == [1, 1]
    with bound.streaming(1):
        spoken = code(bound, 4)
    reference = vendor.build_mimi(MIMI)
    with reference.streaming(1):
        assert all(torch.equal(*pair) for pair in zip(spoken, code(reference, 4), strict=True))
    with torch.no_grad():
        bound.encode(torch.zeros(1, 1, 1920))
    found = bound.report()
    assert found.eager_calls == {"not streaming": 1} and not found.refused
    assert list(found.steps) == ["EncodeStep[batch=1, codebooks=4]", "DecodeStep[batch=1, codebooks=4]"]
    assert list(bound.contracts()) == list(found.steps)
    assert [row["replays"] for row in found.as_dict()["steps"].values()] == [4, 4]
    assert str(found).startswith("mimi: 2 steps; calls of the vendor's code: not streaming 1\nEncodeStep")
    adapters.unbind(bound)
    for verb in (bound.report, bound.warm_up, bound.contracts, bound.unbind):
        with pytest.raises(NotBound, match="has been unbound"):
            verb()
    assert repr(bound) == "<unbound MimiModel of moshi 0.2.13>"


@needs(vendor.MOSHI)
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "dropped"])
def test_the_vendors_object_is_unbound_by_itself(kept: bool) -> None:
    mimi = vendor.build_mimi(MIMI)
    before = dict(vars(mimi))
    bound = adapters.bind(mimi, backend=None)
    assert "encode" in vars(mimi)
    if not kept:
        del bound
        gc.collect()
    adapters.unbind(mimi)
    assert vars(mimi) == before
    with pytest.raises(NotBound, match="was given a MimiModel"):
        adapters.unbind(mimi)
    if kept:
        with pytest.raises(NotBound, match="has been unbound"):
            bound.report()
    again = weakref.ref(adapters.bind(mimi, backend=None))
    adapters.unbind(mimi)
    gc.collect()
    assert again() is None  # nothing holds what was unbound


@needs(vendor.MOSHI)
def test_an_object_is_bound_once() -> None:
    mimi = vendor.build_mimi(MIMI)
    bound = adapters.bind(mimi, backend=None)
    assert bound.warm_up(batch=2) == []  # nothing to capture
    for given in (mimi, bound):
        with pytest.raises(AlreadyBound, match="this MimiModel is bound already"):
            adapters.bind(given)
    adapters.unbind(bound)
    adapters.bind(mimi, backend=None).unbind()


@needs(vendor.STEPAUDIO2)
@pytest.mark.parametrize("where", ["flow.inference_chunk", "hift.forward"])
def test_a_bind_that_fails_half_way_changes_nothing(where: str) -> None:
    token2wav = vendor.build_token2wav(TOKEN2WAV)
    owner, _, method = where.partition(".")
    setattr(getattr(token2wav, owner), method, lambda *given: None)
    before = fingerprint(token2wav)
    with pytest.raises(ContractError, match="of its own in front"):
        adapters.bind(token2wav)
    assert fingerprint(token2wav) == before
    delattr(getattr(token2wav, owner), method)
    token2wav.cache = vendor.build_prompt(replace(TOKEN2WAV, prompt_frames=846)).as_cache()
    before = fingerprint(token2wav)
    with pytest.raises(ContractError, match="846 frames"):
        adapters.bind(token2wav)
    assert fingerprint(token2wav) == before


@needs(vendor.MOSHI)
def test_options_that_a_family_does_not_have_are_named() -> None:
    with pytest.raises(ContractError, match=r"field 'mimi'.*'flush'"):
        adapters.bind(vendor.build_mimi(MIMI), flush=(9,))


def test_a_class_of_no_family_is_an_error_with_the_nearest_one() -> None:
    class MimiModell:
        pass

    with pytest.raises(UnknownFamily, match=r"Did you mean a MimiModel, of 'mimi'") as caught:
        adapters.bind(MimiModell())
    lines = str(caught.value).splitlines()
    assert "  token2wav: token2wav.Token2wav" in lines and max(map(len, lines[1:])) <= 100
    with pytest.raises(UnknownFamily, match="^found the class '.*MimiModell' itself, and bind.. takes an object"):
        adapters.bind(MimiModell)
    with pytest.raises(UnknownFamily, match="'builtins.int'"):
        adapters.bind(3)
    with pytest.raises(NotBound, match="was given a int"):
        adapters.unbind(3)


@needs(vendor.MOSHI)
def test_another_version_is_an_error_that_names_the_tested_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    mimi = vendor.build_mimi(MIMI)
    monkeypatch.setattr(sys.modules["moshi"], "__version__", "0.3.0")
    with pytest.raises(VendorMismatch, match=r"for moshi 0\.2\.13 \(mimi\): its version is 0\.3\.0") as caught:
        adapters.bind(mimi)
    assert "encode" not in vars(mimi) and caught.value.reason == "vendor_mismatch"


@needs(vendor.STEPAUDIO2)
def test_an_object_without_what_is_bound_is_an_error_that_names_it() -> None:
    token2wav = vendor.build_token2wav(TOKEN2WAV)
    del token2wav.n_timesteps
    with pytest.raises(VendorMismatch, match=r"for stepaudio2-minicpmo 0\.1\.1 \(token2wav\): no 'n_timesteps'"):
        adapters.bind(token2wav)


@needs(vendor.STEPAUDIO2)
def test_versions_are_read_off_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    token2wav = vendor.build_token2wav(TOKEN2WAV)
    monkeypatch.delattr(sys.modules["stepaudio2"], "__version__")
    subclass = type("Mine", (type(token2wav),), {"__module__": "__main__"})
    token2wav.__class__ = subclass
    bound = adapters.bind(token2wav, backend=None)
    assert (bound.family, bound.release) == ("token2wav", "stepaudio2-minicpmo 0.1.1")
    bound.unbind()
    monkeypatch.setattr(sys.modules["stepaudio2"], "__path__", [])
    with pytest.raises(VendorMismatch, match="its version is unknown"):
        adapters.bind(token2wav)


class Echo:
    """A model of nobody's, whose `say` a binding replaces."""

    def say(self, word: str) -> str:
        return word


class Louder(adapters.Binding):
    def __init__(self, echo: Echo, *, backend: Any = None, passes: Any = None) -> None:
        self.echo = echo
        echo.say = lambda word: word.upper()  # type: ignore[method-assign]

    def unbind(self) -> None:
        del self.echo.say


def test_a_family_of_ones_own_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "__version__", "1.0", raising=False)
    family = Family("echo", "none", ("test_front.Echo",), (Release("echo", "a", packaged=False),), Louder)
    adapters.register_family(family)
    try:
        assert family in adapters.families() and family.contracts() == {}
        with pytest.raises(ContractError, match="there is a family 'echo'"):
            adapters.register_family(family)
        bound = adapters.bind(Echo())
        assert bound.say("a") == "A" and bound.release == "echo@a"
        bound.unbind()
        assert bound.say("a") == "a"
    finally:
        adapters.unregister_family("echo")
    with pytest.raises(ContractError, match="no family 'echo'"):
        adapters.unregister_family("echo")
    with pytest.raises(UnknownFamily):
        adapters.bind(Echo())


def test_the_table_of_families_is_complete() -> None:
    for family in adapters.families():
        assert family.classes and family.releases and family.shared + family.modules and family.models
        assert isinstance(family.adapter, str)
        module, _, name = family.adapter.partition(":")
        assert adapters.Binding in getattr(import_module(module), name).__mro__


def test_the_front_door_imports_no_vendor_and_no_adapter() -> None:
    code = (
        "import sys; from cadence_fx import adapters; assert adapters.families();"
        "assert not {'moshi', 'stepaudio2'} & sys.modules.keys();"
        "assert not [name for name in sys.modules if name.startswith('cadence_fx.adapters.token2wav')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_bound_object_is_neither_copied_nor_pickled() -> None:
    bound = adapters.bind(vendor.build_mimi(MIMI), backend=None)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="Copy its `vendor` after `unbind`"):
            copied(bound)
    for copied in (copy.deepcopy, pickle.dumps):  # the copy's methods would be those of the first one
        with pytest.raises(TypeError, match="Copy it after `unbind`"):
            copied(bound.vendor)
    bound.unbind()
    assert code(copy.deepcopy(bound.vendor), 1)


@needs(vendor.MOSHI)
def test_a_subclass_is_bound_unless_a_method_of_its_own_would_be_passed_over() -> None:
    mimi, gen = vendor.build_mimi(MIMI), vendor.build_lm_gen(vendor.SMALL_MOSHI)

    class Named(type(mimi)):  # type: ignore[misc]
        note = "mine"

    class Louder(Named):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return super().encode(2 * x)  # type: ignore[no-any-return]

    class Talker(type(gen)):  # type: ignore[misc]
        def _step(self, *given: Any) -> Any:
            return super()._step(*given)

    mimi.__class__, gen.__class__ = Louder, Talker
    with pytest.raises(VendorMismatch, match=r"moshi 0\.2\.13 \(mimi\): a 'encode' that is not the vendor's"):
        adapters.bind(mimi)
    assert "encode" not in vars(mimi)
    mimi.__class__ = Named
    for given, reference, use in (
        (mimi, vendor.build_mimi(MIMI), code),
        (gen, vendor.build_lm_gen(vendor.SMALL_MOSHI), talk),
    ):
        bound = adapters.bind(given, backend=None)
        for each in (given, reference):
            each.streaming_forever(1)
        for theirs, ours in zip(use(reference), use(bound), strict=True):
            assert torch.equal(theirs, ours) if theirs is not None else ours is None
        assert not bound.report().eager_calls
        bound.unbind()


@needs(vendor.MOSHI)
def test_a_method_of_somebody_elses_is_not_taken_for_a_binding() -> None:
    mimi = vendor.build_mimi(MIMI)
    mimi.decode = lambda codes: codes
    with pytest.raises(ContractError, match="a 'decode' of its own in front"):
        adapters.bind(mimi)
    assert "encode" not in vars(mimi)
    del mimi.decode
    bound = adapters.bind(mimi, backend=None)
    del mimi.encode  # whoever takes a method off gets the vendor's
    adapters.unbind(bound)
    assert not {"encode", "decode", "encode_to_latent"} & vars(mimi).keys()
