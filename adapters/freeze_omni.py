"""Freeze-Omni's speech decoder: the TiCodec generator over windows of tokens, as its repository has it (3e17af4).

A language model draws 40 tokens a second of audio, and `llm2TTS.run` decodes them a window at a time, 600 samples a
token. The generator keeps no state and is not causal: a window holds, around the tokens that it adds, `padding` tokens
on either side, whose samples are cut off. Left context is therefore computed again in every window, and has to be: a
token reaches 13 tokens far, the padding is 10, so a generator that carried its past would give other samples.

So the contract has no region. What varies is the size of one argument, and it takes few values: a sentence's first
window has chunk + padding tokens, all others chunk + 2 * padding, and a session's first sentence has chunks of 20, the
others of 40: windows of 30 and 40, of 50 and 60, a class each. What is left when a sentence ends, its *tail*, is of any
size below the longest window.

Left outside: the token window, which the vendor's loop cuts, and its buffer of audio, which ends wherever a quiet place
is found and has no bound. All windows of a sentence run under one autocast to bfloat16, which the vendor's loop enters
and which keeps casts of the weights; a class has casts of its own, and is of the mode that it was captured in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cadence_fx.adapters.base import Binding, Replaced, call, compiler
from cadence_fx.clock import Clock
from cadence_fx.contract import Contract, Input
from cadence_fx.errors import ContractError

__all__ = ["ADAPTER", "FreezeOmniStream", "WindowStep", "Windows", "released"]


@dataclass(frozen=True, slots=True)
class Windows:
    """How a session's tokens are cut, and which sizes of windows that gives.

    chunks: tokens that a window adds, one number for each kind of sentence; padding: tokens on either side, none on the
    left of a sentence's first window; tails: whether what a sentence leaves is declared, too.
    """

    chunks: tuple[int, ...] = (20, 40)
    padding: int = 10
    tails: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each window that is declared, the longest first."""
        found = {chunk + sides * self.padding for chunk in self.chunks for sides in (1, 2)}
        return tuple(sorted(found | set(range(1, max(found)) if self.tails else ()), reverse=True))

    def contract(self) -> Contract:
        """One clock, which a call advances by the size of its window; a class for each.

        Nothing follows it from call to call, so all its lengths but the longest are flushes of turns without a state.
        """
        longest, *others = self.sizes
        return Contract([Clock("window", longest, flush=others)], inputs=[Input("codes", axis=1, clock="window")])


class WindowStep(nn.Module):
    """A window to samples, by the vendor's own modules: (1, 1, 600 * n), of the autocast's dtype.

    codes (1, n, code groups) int64; speaker (1, 1, global tokens) int64, the same in every call of a session.
    """

    def __init__(self, vqvae: Any, windows: Windows) -> None:
        super().__init__()
        self.vqvae, self.windows = vqvae, windows

    def forward(self, codes: Tensor, speaker: Tensor) -> Tensor:
        samples: Tensor = type(self.vqvae).forward(self.vqvae, codes, speaker)
        return samples


class FreezeOmniStream(Binding):
    """A vendor's speech decoder whose windows of tokens run as a compiled step; used as before.

    While bound, the codec's `forward` is a method of this object. All else, `llm2TTS.run` with its windows and its
    audio buffer included, is the vendor's code. Windows of undeclared sizes run the vendor's code, too, counted in
    `eager_calls`: the tail of each sentence, unless `tails` declares them. `unbind` undoes all of it.

    Args:
        speech: the vendor's `llm2TTS`, its `codec_model` (`VqvaeTester`), or the codec itself (`VQVAE`).
        backend: what `torch.compile` gets for the step, "cadence" for this project's; None runs it uncompiled.
        passes: which passes rewrite the step, as `options={"passes": ...}` has it; None for the default ones.
        chunks, padding, tails: how the session cuts its tokens, as `Windows` has it; by default as released. Tails take
            56 classes more than the four windows.

    Raises:
        ContractError: the object is none of these, is bound already, or still has its weight norm.
    """

    def __init__(
        self,
        speech: Any,
        *,
        backend: str | Callable[..., Any] | None = None,
        passes: Any = None,
        chunks: tuple[int, ...] = (20, 40),
        padding: int = 10,
        tails: bool = False,
    ) -> None:
        self.vqvae = _codec(speech)
        self.windows = Windows(chunks, padding, tails)
        self.plain = WindowStep(self.vqvae, self.windows)
        self.step = compiler(backend, passes)(self.plain, self.windows.contract())
        self.eager_calls: Counter[str] = Counter()
        h = self.vqvae.h
        self._groups, self._speaker = h.n_code_groups * h.residul_layer, (1, 1, h.global_code_num)
        self._shapes = frozenset((1, size, self._groups) for size in self.windows.sizes)
        self._replaced = Replaced()
        self._replaced.put(self.vqvae, forward=self._forward)

    @torch.no_grad()
    def warm_up(self, verb: Callable[..., Any], *, dtype: torch.dtype | None = torch.bfloat16) -> list[Any]:
        """`verb(step, *arguments)` as `cadence_fx.warm_up` asks for; returns what it returned. Tokens are random.

        It runs in the modes of the vendor's `run`: no grad, and autocast of the codec's device to `dtype`; None for
        windows that are decoded without one.
        """
        h, draw = self.vqvae.h, torch.Generator().manual_seed(0)
        device = next(self.vqvae.generator.parameters()).device
        codes = torch.randint(h.n_codes, (1, self.windows.sizes[0], self._groups), generator=draw).to(device)
        speaker = torch.tensor(h.global_tokens, device=device).view(self._speaker)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            return [verb(self.step, codes, speaker)]

    def compiled(self) -> Mapping[str, Callable[..., Any]]:
        """The compiled step, by name."""
        return {"window": self.step}

    def contracts(self) -> Mapping[str, Contract]:
        """Its contract, by the same name."""
        return {"window": self.windows.contract()}

    def _forward(self, x: Tensor, global_style_token: Tensor) -> Tensor:
        """In place of the codec's `forward`: codes (batch, n, code groups) to samples (batch, 1, 600 * n)."""
        if x.shape not in self._shapes or global_style_token.shape != self._speaker:
            self.eager_calls["undeclared size"] += 1
            return self.plain(x, global_style_token)  # type: ignore[no-any-return]
        # A tail that follows right after a window is the end of it: its strides are the window's, and say nothing.
        own = x.clone(memory_format=torch.contiguous_format) if x.storage_offset() else x
        samples: Tensor = call(
            self.step, (own, global_style_token), lambda: self.plain(x, global_style_token), self.eager_calls
        )
        return samples

    def unbind(self) -> None:
        """Gives the codec its own method back."""
        self._replaced.release()


def _codec(speech: Any) -> Any:
    """The `VQVAE` of a vendor's object.

    Raises:
        ContractError: there is none, or none that can be bound.
    """
    tester = getattr(speech, "codec_model", speech)
    vqvae = getattr(tester, "vqvae", tester)
    if "VQVAE" not in {kind.__name__ for kind in type(vqvae).__mro__} or not all(
        hasattr(vqvae, name) for name in ("h", "quantizer", "generator")
    ):
        found = f"{type(speech).__module__}.{type(speech).__qualname__}"
        raise ContractError(
            f"expected llm2TTS, VqvaeTester or VQVAE of Freeze-Omni at 3e17af4, found {found}", field="speech"
        )
    if any(hasattr(module, "weight_g") for module in vqvae.generator.modules()):
        raise ContractError(
            "the generator computes its weights in every call: generator.remove_weight_norm(), as llm2TTS does",
            field="speech",
        )
    return vqvae


class _Ticodec:
    """Adapter of the step; the vendor's own class has a `forward` for windows of any size."""

    classes = (f"{WindowStep.__module__}.{WindowStep.__name__}",)

    def contract(self, module: nn.Module) -> Contract | None:
        return module.windows.contract() if isinstance(module, WindowStep) else None


def released() -> dict[str, Contract]:
    """The contracts at the released chunks: windows alone, and tails besides."""
    return {"window": Windows().contract(), "window and tails": Windows(tails=True).contract()}


ADAPTER = _Ticodec()
