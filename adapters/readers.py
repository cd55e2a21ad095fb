"""Released families whose configuration files `cadence plan --family` reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from cadence_fx.adapters.config import Config, options
from cadence_fx.deployment import Deployment
from cadence_fx.errors import ContractError, unknown_name

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reader:
    """How one family's configuration becomes a deployment.

    * ``about``: one line, which files it reads among others.
    * ``options``: what a deployment decides and no file says, with the released values.
    * ``read``: configuration and options to a deployment.
    """

    about: str
    options: Mapping[str, int | str | tuple[int, ...]]
    read: Callable[[Config, Options], Deployment]


# Name -> "module:attribute" of its `Reader`, imported when it is asked for.
READERS = {
    "token2wav": "cadence_fx.adapters.token2wav_config:READER",
    "lychee-fd": "cadence_fx.adapters.token2wav_config:UNTRIMMED",
    "minicpm-o": "cadence_fx.adapters.minicpmo_config:READER",
    "moshi": "cadence_fx.adapters.moshi_config:READER",
    "personaplex": "cadence_fx.adapters.moshi_config:FORK",
    "freeze-omni": "cadence_fx.adapters.freeze_omni_config:READER",
}
EXAMPLE = "minicpm-o"  # with a callable of every kind


def reader(name: str) -> Reader:
    """The family of that name; ContractError, with the nearest one, when there is none."""
    if name not in READERS:
        raise ContractError(unknown_name("family", name, list(READERS)), field="family")
    module, _, attribute = READERS[name].partition(":")
    found: Reader = getattr(import_module(module), attribute)
    return found


def deployment(
    name: str, config: Mapping[str, Any] | None = None, given: Mapping[str, str] | None = None, *,
    source: str = "configuration",
) -> Deployment:  # fmt: skip
    """The deployment that a family's configuration describes.

    Args:
        config: what its files hold, together; fields that are missing have the released values.
        given: options as text.
        source: named in errors, usually the files.

    Raises:
        ContractError, ContractFileError: an unknown family, option or field, or a value that makes no sense.
    """
    how = reader(name)
    numbers = Config(config or {}, source)
    found = how.read(numbers, options(given or {}, how.options))
    numbers.check()
    return found
