"""Which family an object of a vendor's belongs to: its class, the release it comes from, and what that must have.

`FAMILIES` is the one table to edit for a new family. Classes are told by qualified name, so that looking one up imports
neither a vendor's package nor an adapter that is not needed. Several vendors use one name (two packages install a
`stepaudio2`, a fork of `moshi` is imported as `moshi`), so a class alone decides nothing: the version does, and what
the object has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from operator import attrgetter
from pathlib import Path
from typing import Any

from cadence_fx.adapters.base import Binding
from cadence_fx.contract import Contract
from cadence_fx.errors import ContractError, UnknownFamily, VendorMismatch


@dataclass(frozen=True, slots=True)
class Release:
    """One published form of a vendor's code that a family was tested with.

    distribution, version: as on the package index; for code that is published as a repository alone (`packaged` is
    False) its name and commit, which nothing of the running code tells. has, lacks: attributes, by dotted path, that
    objects of this release have, and that those of others of the same name have instead.
    """

    distribution: str
    version: str
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    packaged: bool = True

    def __str__(self) -> str:
        return f"{self.distribution}{' ' if self.packaged else '@'}{self.version}"

    def problems(self, kind: type, given: Any, methods: tuple[str, ...], spelled: tuple[str, ...]) -> list[str]:
        """What tells an object, of a class of this name, from those of this release; nothing for one of them."""
        found = [f"no {name!r}" for name in (*methods, *self.has) if not _has(given, name)]
        found += [f"an unexpected {name!r}" for name in self.lacks if _has(given, name)]
        if self.packaged and (version := version_of(kind, self.distribution)) != self.version:
            found.insert(0, f"its version is {version or 'unknown'}")
        if self.packaged:
            found += [
                f"a {name!r} that is not the vendor's" for name in spelled if not _is_of_vendor(kind, given, name)
            ]
        return found


@dataclass(frozen=True, slots=True)
class Family:
    """How objects of one class are bound.

    name: of the family; models: the released models that it serves; classes: qualified names of the vendor's classes,
    without the top-level package, which vendors rename; methods: what an object must have in every release, by dotted
    path; spelled: methods that a step or a binding spells again, by dotted path, which must be the vendor's: one of a
    subclass would not be called; adapter: what binds one, called with the object and the options of `bind`, as
    "module:attribute" or as it is; released: a callable without arguments that gives the contracts of the released
    sizes, in the same form; modules: the adapter's own modules; shared: those that other families use, too.
    """

    name: str
    models: str
    classes: tuple[str, ...]
    releases: tuple[Release, ...]
    adapter: str | Callable[..., Binding]
    methods: tuple[str, ...] = ()
    spelled: tuple[str, ...] = ()
    released: str | Callable[[], dict[str, Contract]] | None = None
    modules: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    def bind(self, given: Any, **options: Any) -> Binding:
        """The binding of an object; imports the adapter."""
        binding: Binding = _loaded(self.adapter)(given, **options)
        return binding

    def contracts(self) -> dict[str, Contract]:
        """The contracts of the released sizes by name; {} when the family tells none."""
        return dict(_loaded(self.released)()) if self.released is not None else {}


_STREAMING = ("streaming", "streaming_forever", "reset_streaming", "set_streaming_state", "get_streaming_state")
_CODEC = ("encode", "decode", "_encode_to_unquantized_latent", "_to_framerate", "_to_encoder_framerate",
          "decode_latent")  # fmt: skip
_TOKEN2WAV = ("stream", "set_stream_cache", "flow.setup_cache", "flow.inference_chunk", "flow.encoder.forward_chunk",
              "flow.decoder.forward_chunk")  # fmt: skip
_SHARED = ("token2wav", "token2wav_prompts", "token2wav_steps", "token2wav_geometry", "token2wav_released")

FAMILIES: list[Family] = [
    Family(
        name="token2wav",
        models="MiniCPM-o 4.5, Step-Audio 2",
        classes=("token2wav.Token2wav",),
        methods=_TOKEN2WAV,
        spelled=("stream", "flow.inference_chunk"),
        releases=(
            Release("stepaudio2-minicpmo", "0.1.1", has=("n_timesteps", "hift.forward"), lacks=("bounded_vocoder",)),
        ),
        adapter="cadence_fx.adapters.token2wav:Token2WavStream",
        released="cadence_fx.adapters.token2wav_released:packed",
        modules=("token2wav_vocoder",),
        shared=_SHARED,
    ),
    Family(
        name="token2wav-causal",
        models="MiniCPM-o 4.5 with its causal vocoder",
        classes=("token2wav.Token2wav",),
        methods=_TOKEN2WAV,
        spelled=(
            "stream",
            "flow.inference_chunk",
            *(f"bounded_vocoder.{name}" for name in ("stream", "_process", "_source")),
        ),
        releases=(Release("minicpmo-utils", "1.0.7", has=("n_timesteps", "bounded_vocoder.stream")),),
        adapter="cadence_fx.adapters.token2wav:Token2WavStream",
        released="cadence_fx.adapters.token2wav_released:causal",
        modules=("token2wav_bounded",),
        shared=_SHARED,
    ),
    Family(
        name="lychee-fd",
        models="Lychee-FD",
        classes=("token2wav.Token2wav",),
        methods=_TOKEN2WAV,
        releases=(
            Release(
                "HITsz-TMG/Lychee-FD",
                "7bb1068",
                has=("stream_lookahead_len", "hift.forward"),
                lacks=("n_timesteps", "bounded_vocoder"),
                packaged=False,
            ),
        ),
        adapter="cadence_fx.adapters.token2wav:Token2WavStream",
        released="cadence_fx.adapters.token2wav_released:untrimmed",
        shared=(*_SHARED, "token2wav_vocoder"),
    ),
    Family(
        name="mimi",
        models="Moshi's codec",
        classes=("models.compression.MimiModel",),
        methods=("encode", "decode", "encode_to_latent", *_STREAMING),
        spelled=_CODEC,
        releases=(Release("moshi", "0.2.13"),),
        adapter="cadence_fx.adapters.moshi:MimiStream",
        released="cadence_fx.adapters.moshi:released",
        modules=("moshi",),
        shared=("moshi_state",),
    ),
    Family(
        name="moshi",
        models="Moshi",
        classes=("models.lm.LMGen",),
        methods=("step", "_step", "lm_model.forward_depformer", *_STREAMING),
        spelled=("depformer_step",),
        releases=(Release("moshi", "0.2.13"),),
        adapter="cadence_fx.adapters.moshi_lm:DialogueStream",
        released="cadence_fx.adapters.moshi_lm:released",
        modules=("moshi_lm",),
        shared=("moshi_state",),
    ),
    Family(
        name="personaplex-mimi",
        models="PersonaPlex's codec",
        classes=("models.compression.MimiModel",),
        methods=("encode", "decode", "set_streaming_state_inplace"),
        spelled=_CODEC,
        releases=(Release("moshi-personaplex", "0.1.0"),),
        adapter="cadence_fx.adapters.personaplex:PersonaMimiStream",
        modules=("personaplex",),
        shared=("moshi", "moshi_state"),
    ),
    Family(
        name="personaplex",
        models="PersonaPlex",
        classes=("models.lm.LMGen",),
        methods=("step", "step_embeddings", "set_streaming_state_inplace"),
        spelled=("step", "step_embeddings", "depformer_step", "lm_model.forward_codes"),
        releases=(Release("moshi-personaplex", "0.1.0"),),
        adapter="cadence_fx.adapters.personaplex_lm:PersonaDialogueStream",
        modules=("personaplex_lm",),
        shared=("moshi_lm", "moshi_state"),
    ),
    Family(
        name="freeze-omni",
        models="Freeze-Omni",
        classes=("decoder.llm2tts.llm2TTS", "ticodec.vqvae_tester.VqvaeTester", "ticodec.vqvae.VQVAE"),
        releases=(Release("VITA-MLLM/Freeze-Omni", "3e17af4", packaged=False),),
        adapter="cadence_fx.adapters.freeze_omni:FreezeOmniStream",
        released="cadence_fx.adapters.freeze_omni:released",
        modules=("freeze_omni",),
    ),
]


def families() -> tuple[Family, ...]:
    """The families that are known, built in and registered."""
    return tuple(FAMILIES)


def register_family(family: Family) -> None:
    """Adds a family of your own.

    Raises:
        ContractError: there is a family of this name.
    """
    if any(known.name == family.name for known in FAMILIES):
        raise ContractError(f"there is a family {family.name!r}; unregister it first to replace it", field="name")
    FAMILIES.append(family)


def unregister_family(name: str) -> None:
    """Takes a family out again.

    Raises:
        ContractError: there is none of this name.
    """
    found = [family for family in FAMILIES if family.name == name]
    if not found:
        raise ContractError(f"there is no family {name!r}", field="name")
    FAMILIES.remove(found[0])


def family_of(given: Any) -> tuple[Family, Release]:
    """The family of an object and the release it is of.

    Raises:
        UnknownFamily: its class, and every base class of it, is of no family.
        VendorMismatch: one is, but neither version nor methods are those of a tested release.
    """
    itself = isinstance(given, type)
    kind = given if itself else type(given)
    found = [] if itself else [(family, named) for family in FAMILIES for named in _named(kind, family)]
    if not found:
        raise UnknownFamily(_name(kind), {family.name: family.classes for family in FAMILIES}, itself=itself)
    problems = {}
    for family, named in found:
        for release in family.releases:
            wrong = release.problems(named, given, family.methods, family.spelled)
            if not wrong:
                return family, release
            problems[f"{release} ({family.name})"] = wrong
    raise VendorMismatch(_name(kind), problems)


def version_of(kind: type, distribution: str) -> str | None:
    """The version of the package that defines a class: what the package says of itself, else what was installed with
    its folder under the name of a distribution; None when neither tells."""
    package = sys.modules.get(kind.__module__.partition(".")[0])
    if isinstance(version := getattr(package, "__version__", None), str):
        return version
    for folder in getattr(package, "__path__", ()):
        for installed in metadata.distributions(name=distribution, path=[str(Path(folder).parent)]):
            return installed.version
    return None


def _named(kind: type, family: Family) -> Iterator[type]:
    """The class or the first base class of it that a family names."""
    for base in kind.__mro__:
        if any(f".{_name(base)}".endswith(f".{name}") for name in family.classes):
            yield base
            return


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _has(given: Any, path: str) -> bool:
    try:
        attrgetter(path)(given)
    except AttributeError:
        return False
    return True


def _is_of_vendor(kind: type, given: Any, path: str) -> bool:
    """Whether the class of the owner of a method has the one of the package that `kind` is of; True for none at all."""
    owner, _, name = path.rpartition(".")
    if owner and not _has(given, owner):
        return True
    method = getattr(type(attrgetter(owner)(given) if owner else given), name, None)
    package = kind.__module__.partition(".")[0]
    return method is None or getattr(method, "__module__", package).partition(".")[0] == package


def _loaded(given: Any) -> Callable[..., Any]:
    if isinstance(given, str):
        path, _, attribute = given.partition(":")
        return getattr(import_module(path), attribute)  # type: ignore[no-any-return]
    return given  # type: ignore[no-any-return]
