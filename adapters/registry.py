"""Which adapter declares which module class.

Classes are keyed by qualified name, so that looking one up imports neither the model's package nor an adapter that is
not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from torch import nn

from cadence_fx.adapters.base import Adapter, Advises
from cadence_fx.contract import Contract
from cadence_fx.errors import ContractError
from cadence_fx.hazard import Hazard

# Class name -> "module:attribute" of its adapter, imported at the first look-up.
_BUILT_IN = {
    f"cadence_fx.adapters.{name}": "cadence_fx.adapters.token2wav:ADAPTER"
    for name in (
        "token2wav_steps.FlowStep",
        "token2wav_steps.ConformerStep",
        "token2wav_vocoder.VocoderStep",
        "token2wav_bounded.BoundedStep",
        "token2wav_bounded.FinalStep",
    )
}
_BUILT_IN |= {
    "cadence_fx.adapters.moshi.EncodeStep": "cadence_fx.adapters.moshi:ADAPTER",
    "cadence_fx.adapters.moshi.DecodeStep": "cadence_fx.adapters.moshi:ADAPTER",
    "cadence_fx.adapters.moshi_lm.DialogueStep": "cadence_fx.adapters.moshi_lm:ADAPTER",
    "cadence_fx.adapters.personaplex.EncodeStep": "cadence_fx.adapters.personaplex:ADAPTER",
    "cadence_fx.adapters.personaplex.DecodeStep": "cadence_fx.adapters.personaplex:ADAPTER",
    "cadence_fx.adapters.personaplex_lm.DialogueStep": "cadence_fx.adapters.personaplex_lm:ADAPTER",
}
_BUILT_IN |= {"cadence_fx.adapters.freeze_omni.WindowStep": "cadence_fx.adapters.freeze_omni:ADAPTER"}
_adapters: dict[str, Adapter | str] = dict(_BUILT_IN)


def register(adapter: Adapter) -> None:
    """Adds an adapter for the classes that it names.

    Raises:
        ContractError: another adapter already declares one of the classes.
    """
    for name in adapter.classes:
        if name in _adapters and _adapters[name] is not adapter:
            raise ContractError(f"two adapters declare {name}; unregister the first to replace it", field="classes")
    _adapters.update(dict.fromkeys(adapter.classes, adapter))


def unregister(adapter: Adapter) -> None:
    """Takes an adapter's classes out again; classes that ship with the package fall back to theirs."""
    for name in [name for name, known in _adapters.items() if known is adapter]:
        del _adapters[name]
        if name in _BUILT_IN:
            _adapters[name] = _BUILT_IN[name]


def contract_for(module: nn.Module) -> Contract | None:
    """The contract that an adapter declares for this module's class or a base class of it; None when there is none."""
    adapter = _adapter_of(module)
    return adapter.contract(module) if adapter is not None else None


def hazards_for(module: nn.Module) -> Sequence[Hazard]:
    """What the adapter of a module's class knows of it beforehand; nothing where there is none, or it knows nothing."""
    adapter = _adapter_of(module)
    return adapter.hazards(module) if isinstance(adapter, Advises) else ()


def _adapter_of(module: nn.Module) -> Adapter | None:
    for kind in type(module).__mro__:
        name = f"{kind.__module__}.{kind.__qualname__}"
        found = _adapters.get(name)
        if isinstance(found, str):
            path, _, attribute = found.partition(":")
            found = _adapters[name] = getattr(import_module(path), attribute)
        if found is not None:
            return found
    return None
