"""Moshi's language model, as `moshi` 0.2.13 publishes it: one frame of a dialogue, from the user's codes to Moshi's.

A frame runs the main transformer once, draws a text token, runs the depth transformer once for each code of Moshi's, a
draw each, and puts all of them into a ring of three frames that undoes the delays between codebooks. The vendor
captures two graphs by hand and runs the rest eager; `DialogueStep` is all of it, with the vendor's own `_step`.

The depth transformer's own clock runs within a frame: its rings are made and dropped inside every call, so nothing of
them is declared. Everything else has one extent. Draws are from the device's generator, in the vendor's order.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from cadence_fx.adapters.base import Binding, Replaced, call, compiler
from cadence_fx.adapters.moshi_state import (
    MOSHI,
    HandWrittenGraphs,
    canonical,
    check,
    check_attention,
    count_from_zero,
    counted,
    counters,
    fields_of,
    layers_of,
    placed,
    regions,
    uncompiled,
    vendor_class,
)
from cadence_fx.clock import Clock
from cadence_fx.contract import Contract, Region
from cadence_fx.errors import ContractError
from cadence_fx.retention import Pinned, Retention, Ring

__all__ = ["ADAPTER", "DialogueStep", "DialogueStream"]

Frame = tuple[Tensor, Tensor]


class DepthStep(nn.Module):
    """The vendor's `depformer_step`: text tokens (batch,) and hidden (batch, 1, dim) to codes (batch, codebooks).

    Where given (batch, codebooks) is provided (batch, codebooks), the next code is drawn after it instead of the drawn
    one. The vendor opens a stream of the depth transformer in each call, by way of an `ExitStack`, which Dynamo cannot
    follow; the states are made by the vendor's modules here, too.
    """

    def __init__(self, gen: Any, batch: int) -> None:
        super().__init__()
        self.gen, self.batch = gen, batch
        self._layers = layers_of(gen.lm_model.depformer)
        self._sample = sys.modules[vendor_class(gen).__module__].sample_token  # type: ignore[attr-defined]

    def forward(
        self, token: Tensor, hidden: Tensor, given: Tensor | None = None, provided: Tensor | None = None
    ) -> Tensor:
        gen, codes = self.gen, []
        for layer in self._layers:
            layer._streaming_state = layer._init_streaming_state(self.batch)
        try:
            for number in range(gen.lm_model.dep_q):
                logits = gen.lm_model.forward_depformer(number, token[:, None, None], hidden)
                token = self._sample(logits.float(), gen.use_sampling, gen.temp, gen.top_k)[:, 0, 0]
                codes.append(token)
                if given is not None and provided is not None:
                    token = torch.where(provided[:, number], given[:, number], token)
        finally:
            for layer in self._layers:
                layer._streaming_state = None
        return torch.stack(codes, dim=1)


class DialogueStep(nn.Module):
    """The vendor's `LMGen._step` for `batch` streams: the user's codes (batch, codebooks, 1) int64 to the tokens of a
    frame (batch, 1 + codebooks, 1), text first, and the main transformer's output (batch, 1, dim).

    In the first frames of a stream the vendor has nothing to say and returns None; here those tokens are computed, too.
    """

    def __init__(self, gen: Any, batch: int) -> None:
        super().__init__()
        self.gen, self.batch, self.placed = gen, batch, placed(gen.lm_model)
        self.depth = DepthStep(gen, batch)
        self._layers = layers_of(gen.lm_model.transformer)
        self._uncompiled = uncompiled(gen)

    def streams(self) -> bool:
        """Whether every layer of the main transformer has a state."""
        return all(layer._streaming_state is not None for layer in self._layers)

    @property
    def codebooks(self) -> int:
        """Codes that come in with a frame."""
        lm = self.gen.lm_model
        return int(lm.num_codebooks - lm.dep_q - 1)

    def contract(self) -> Contract:
        """One clock, at the rate of codes; every state has one extent."""
        own: dict[str, tuple[int, Retention]] = {
            "cache": (2, Ring(self.gen.max_delay + 2)),
            "offsets": (0, Pinned(self.batch)),
            "exec_mask": (0, Pinned(self.batch)),
            "initial": (0, Pinned(1)),
        }
        dialogue = [
            Region(name, attribute=f"gen._streaming_state.{name}", axis=axis, clock="frame", retention=retention)
            for name, (axis, retention) in own.items()
        ]
        main = regions(self.gen.lm_model.transformer, "gen.lm_model.transformer", fields_of(self.batch))
        return Contract([Clock("frame", 1)], [*dialogue, *main])

    def example(self) -> tuple[Tensor, ...]:
        """Arguments of a call; the codes are random."""
        lm = self.gen.lm_model
        codes = torch.randint(lm.card, (self.batch, self.codebooks, 1), generator=torch.Generator().manual_seed(0))
        return (codes.to(lm.device),)

    def forward(self, codes: Tensor) -> Frame:
        gen = self.gen
        state = gen._streaming_state
        count_from_zero(gen.lm_model.transformer)
        state.offset_cpu = gen.max_delay  # from which on the vendor returns what it has computed
        shipped, state.graphed_depth = state.graphed_depth, self.depth
        try:
            with self._uncompiled():
                tokens, hidden = type(gen)._step(gen, codes)
        finally:
            state.graphed_depth = shipped
        state.offset_cpu = 1
        return tokens, hidden


class DialogueStream(Binding):
    """A vendor's `LMGen` whose `step` is one compiled step; used as before.

    While bound, `_step`, which the vendor's `step` and `step_with_extra_heads` call, is a method of this object, and
    the graphs that the vendor captures by hand are off. `streaming`, `reset_streaming`, `set_exec_mask` and the
    exchange of states are the vendor's. Frames that need the host in their middle (hooks, replaced tokens, `check`) and
    conditions run the vendor's code, counted in `eager_calls`. `unbind` undoes all of it.

    Args:
        gen: the vendor's object.
        backend, passes: as for `MimiStream`.

    Raises:
        ContractError: the object is of another class or version, is bound already, has no depth transformer, uses
            classifier-free guidance, or its main transformer attends to more than its own past.
    """

    FAMILY = MOSHI
    STEP: type[DialogueStep] = DialogueStep
    METHODS: dict[str, str] = {"_step": "_step"}  # of the vendor's object -> which of this one is in its place

    def __init__(self, gen: Any, *, backend: str | Callable[..., Any] | None = None, passes: Any = None) -> None:
        check(gen, "LMGen", self.FAMILY)
        if gen.lm_model.depformer is None or getattr(gen, "cfg_coef", 1.0) != 1.0:
            raise ContractError("only a model with a depth transformer, without guidance, is declared", field="gen")
        check_attention(gen.lm_model.transformer, "LMGen")
        self.gen = gen
        self.eager_calls: Counter[str] = Counter()
        self.plain: dict[int, DialogueStep] = {}
        self.steps: dict[DialogueStep, Callable[..., Any]] = {}
        self._compiled = compiler(backend, passes, dynamic=False)
        self._graphs, self._uncompiled, self._replaced = HandWrittenGraphs(), uncompiled(gen), Replaced()
        self._replaced.put(gen, **{name: getattr(self, own) for name, own in self.METHODS.items()})

    @torch.no_grad()
    def warm_up(self, verb: Callable[..., Any], batch: int = 1) -> Any:
        """`verb(step, codes)`, as `cadence_fx.warm_up` asks for; returns what that returned.

        It takes the states of the stream that is open, and its batch, or opens one of `batch` streams meanwhile.
        """
        gen = self.gen
        with nullcontext() if gen.is_streaming else gen.streaming(batch):
            state = gen._streaming_state
            self._graphs.turn_off(state)
            step = self._step_of(state.cache.shape[0])
            return verb(self.steps[step], *step.example())

    def _step_of(self, batch: int) -> DialogueStep:
        """The plain step; the compiled one is in `steps`. Those of weights of another dtype or device are given up."""
        step = self.plain.get(batch)
        if step is None or step.placed != placed(self.gen.lm_model):
            self.steps.pop(step, None)  # type: ignore[arg-type]
            step = self.plain[batch] = self.STEP(self.gen, batch)
            self.steps[step] = self._compiled(step, step.contract())
        return step

    def _undeclared(self, codes: Tensor, replaced: Tensor | None) -> str | None:
        """Why a call is not a declared frame, if it is not."""
        gen = self.gen
        state = gen._streaming_state
        if state is None:
            return "not streaming"
        if replaced is not None or gen.check or gen.on_text_hook or gen.on_text_logits_hook or gen.on_audio_hook:
            return "host in the middle"
        if state.condition_sum is not None or state.condition_cross is not None or gen.cfg_coef != 1.0:
            return "conditions"
        step = self._step_of(state.batch_size)
        if not step.streams():
            return "detached layers"
        enough = codes.dim() == 3 and codes.shape[1] >= step.codebooks and codes.dtype == torch.int64
        return None if enough and codes.shape[::2] == (state.batch_size, 1) else "undeclared size"

    @torch.no_grad()
    def _step(self, input_tokens: Tensor, depformer_replace_tokens: Tensor | None = None) -> Frame | None:
        """In place of `LMGen._step`."""
        gen = self.gen
        state = gen._streaming_state
        self._graphs.turn_off(state)
        if (reason := self._undeclared(input_tokens, depformer_replace_tokens)) is not None:
            self.eager_calls[reason] += 1
            return self._shipped("_step", input_tokens, depformer_replace_tokens)  # type: ignore[no-any-return]
        step = self._step_of(state.batch_size)
        found: Frame | None = call(
            self._run, (step, input_tokens), lambda: self._shipped("_step", input_tokens), self.eager_calls
        )
        return found

    def _run(self, step: DialogueStep, input_tokens: Tensor) -> Frame | None:
        gen = self.gen
        state = gen._streaming_state
        with counted([state, *counters(gen.lm_model.transformer)]):
            tokens, hidden = self.steps[step](canonical(input_tokens[:, : step.codebooks]))
        speaks = gen.support_out_of_sync or state.offset_cpu > gen.max_delay
        return (tokens, hidden) if speaks else None

    def _shipped(self, method: str, *given: Any) -> Any:
        """The vendor's code."""
        with self._uncompiled():
            return getattr(type(self.gen), method)(self.gen, *given)

    def compiled(self) -> dict[str, Callable[..., Any]]:
        return {self._name(step): compiled for step, compiled in self.steps.items()}

    def contracts(self) -> dict[str, Contract]:
        return {self._name(step): step.contract() for step in self.steps}

    @staticmethod
    def _name(step: DialogueStep) -> str:
        return f"{type(step).__name__}[batch={step.batch}]"

    def unbind(self) -> None:
        """Gives the object its own methods back, as it was. A stream that is open goes on where it is."""
        self._replaced.release()
        self._graphs.release()
        self.plain, self.steps = {}, {}


class _Dialogue:
    """Adapter of the step; the vendor's own class has no forward of one frame."""

    classes = (f"{DialogueStep.__module__}.{DialogueStep.__name__}",)

    def contract(self, module: nn.Module) -> Contract | None:
        return module.contract() if isinstance(module, DialogueStep) else None


ADAPTER = _Dialogue()


def released() -> dict[str, Contract]:
    """The contract of the released 7B model for one stream, from the vendor's modules without memory behind them."""
    loaders, models = import_module("moshi.models.loaders"), import_module("moshi.models.lm")
    with torch.device("meta"):
        model = models.LMModel(device="meta", dtype=torch.bfloat16, **loaders._lm_kwargs)
    return {DialogueStep.__name__: DialogueStep(models.LMGen(model.eval()), 1).contract()}
