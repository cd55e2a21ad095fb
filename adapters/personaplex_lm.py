"""PersonaPlex's language model: one frame of a dialogue, in which any codes may be given and all others are drawn.

A frame is that of `adapters.moshi_lm`, with 16 codes drawn, the model's own and what the user may say next. What the
vendor counts on the host here decides what runs: `offset`, modulo the width of its ring of tokens (4 in the released
model), is where a frame reads and writes. So the ring would be met in as many signatures as it is wide. It is turned
instead: `DialogueStep` gathers its columns so that the vendor's code finds the frame at a fixed place, at an `offset`
equal to the width, and puts them back. Columns of integers are moved, and nothing is computed anew.

The other things that the host decides are decided before the step, by the vendor's own code (`prepare_step_input`):
which tokens a prompt forces, and the first frames, which begin with tokens that nobody has said. It writes the ring,
which the step reads. The first call of a stream computes nothing, and the next ones, as many as the delay, return None.

A prompt of a voice may also be given as embeddings, kept from an earlier session. They take the place of the embedded
tokens behind a flag on the device, so that one class serves prompts and dialogue, over one set of rings.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from cadence_fx.adapters import moshi_lm
from cadence_fx.adapters.base import call
from cadence_fx.adapters.moshi_state import canonical, count_from_zero, counted, counters, regions, vendor_class
from cadence_fx.adapters.personaplex import PERSONAPLEX, fields
from cadence_fx.clock import Clock
from cadence_fx.contract import Contract, Region
from cadence_fx.retention import Ring

__all__ = ["ADAPTER", "DialogueStep", "PersonaDialogueStream"]


class DialogueStep(moshi_lm.DialogueStep):
    """The vendor's `LMGen.step` for `batch` streams, to the tokens of a frame (batch, 1 + codes, 1) int64, text first.

    codes (batch, codebooks, 1) int64: the user's; columns (width,) int64: the ring's columns in the order of the step;
    embeddings (batch, 1, dim): in place of the embedded tokens where spoken (1,) bool is true.

    In the first frames of a stream the vendor returns None; here those tokens are computed, too.
    """

    def __init__(self, gen: Any, batch: int) -> None:
        super().__init__(gen, batch)
        like = next(gen.lm_model.parameters()).detach()
        order = torch.arange(self.width, device=like.device)
        self.columns = [(order + offset) % self.width for offset in range(self.width)]
        self.unspoken = like.new_zeros(batch, 1, gen.lm_model.dim), torch.tensor([False], device=like.device)
        self.spoken = torch.tensor([True], device=like.device)

    @property
    def codebooks(self) -> int:
        """Codes that come in with a frame."""
        return int(self.gen.lm_model.n_q - sys.modules[vendor_class(self.gen).__module__].AUDIO_TOKENS_PER_STREAM)

    @property
    def width(self) -> int:
        """Columns of the ring of tokens."""
        return int(self.gen.max_delay + 3)

    def contract(self) -> Contract:
        """One clock, at the rate of codes; every state has one extent."""
        tokens = [
            Region(name, attribute=f"gen._streaming_state.{name}", axis=2, clock="frame", retention=Ring(self.width))
            for name in ("cache", "provided")
        ]
        main = regions(self.gen.lm_model.transformer, "gen.lm_model.transformer", fields)
        return Contract([Clock("frame", 1)], [*tokens, *main])

    def example(self) -> tuple[Tensor, ...]:
        return (*super().example(), self.columns[0], *self.unspoken)

    def forward(self, codes: Tensor, columns: Tensor, embeddings: Tensor, spoken: Tensor) -> Tensor:  # type: ignore[override]
        gen, lm, kind = self.gen, self.gen.lm_model, type(self.gen)
        state = gen._streaming_state
        count_from_zero(lm.transformer)
        ring, provided, depth = state.cache, state.provided, state.graphed_depth
        state.cache, state.provided = ring.index_select(2, columns), provided.index_select(2, columns)
        state.offset, state.graphed_depth = self.width, self.depth  # a frame at the first column, behind the first ones
        try:
            with self._uncompiled():
                tokens, forced, target, *places = kind.prepare_step_input(gen, codes)
                hidden, logits = lm.forward_embeddings(torch.where(spoken, embeddings, lm.embed_codes(tokens)))
                out: Tensor = kind.process_transformer_output(gen, hidden, logits, forced, target, *places)
            ring.index_copy_(2, columns, state.cache)
            provided.index_copy_(2, columns, state.provided)
        finally:
            state.cache, state.provided, state.graphed_depth = ring, provided, depth
        return out


class PersonaDialogueStream(moshi_lm.DialogueStream):
    """PersonaPlex's `LMGen` whose `step` and `step_embeddings` are one compiled step; used as before.

    So are the prompts, which the vendor's own code (`step_system_prompts`) gives frame by frame. While bound, both are
    methods of this object, and the graphs that the vendor captures by hand are off. `streaming`, `reset_streaming` and
    the exchange, saving and restoring of states are the vendor's. Calls that need the host in their middle (`check`,
    losses), or more than tokens (logits, embeddings), run the vendor's code, counted in `eager_calls`, and so does the
    first call of a stream, which computes nothing. `unbind` undoes all of it.

    Args, Raises: as for `moshi_lm.DialogueStream`.
    """

    FAMILY = PERSONAPLEX
    STEP = DialogueStep
    METHODS = {"step": "_say", "step_embeddings": "_say_embeddings"}

    def _why_not(self, codes: Tensor | None) -> str | None:
        """Why a call is not a declared frame, if it is not."""
        gen = self.gen
        state = gen._streaming_state
        if state is None:
            return "not streaming"
        if gen.check or gen.report_loss or gen.return_logits:
            return "host in the middle"
        if state.offset == 0:
            return "first call"
        step = self._step_of(state.cache.shape[0])
        if not step.streams():
            return "detached layers"
        declared = codes is not None and codes.shape == (step.batch, step.codebooks, 1) and codes.dtype == torch.int64
        return None if declared else "undeclared size"

    @torch.no_grad()
    def _say(
        self,
        input_tokens: Tensor | None = None,
        moshi_tokens: Tensor | None = None,
        text_token: Any = None,
        return_embeddings: bool = False,
    ) -> Any:
        """In place of `LMGen.step`."""
        gen = self.gen
        self._graphs.turn_off(gen._streaming_state)
        reason = self._why_not(input_tokens) or ("embeddings" if return_embeddings else None)
        if reason is not None or input_tokens is None:
            self.eager_calls[str(reason)] += 1
            return self._shipped("step", input_tokens, moshi_tokens, text_token, return_embeddings)
        given = input_tokens, moshi_tokens, text_token
        return call(self._frame, given, lambda: self._shipped("step", *given), self.eager_calls)

    @torch.no_grad()
    def _say_embeddings(self, embeddings: Tensor) -> Any:
        """In place of `LMGen.step_embeddings`: a frame of a voice prompt, with initial tokens around it."""
        gen = self.gen
        state = gen._streaming_state
        self._graphs.turn_off(state)
        reason = "not streaming"
        if state is not None:
            step: Any = self._step_of(state.cache.shape[0])
            initial = gen.lm_model._get_initial_token().expand(step.batch, -1, -1)
            codes, others = initial[:, 1 : 1 + step.codebooks], initial[:, 1 + step.codebooks :]
            text = gen.zero_text_code
            if state.offset == 0:  # the call that computes nothing, which the vendor makes here, too
                type(gen).prepare_step_input(gen, codes, others, text)
            like = step.unspoken[0]
            declared = embeddings.shape == like.shape and embeddings.dtype == like.dtype
            reason = self._why_not(codes) or ("" if declared else "undeclared size")
            if not reason:
                given = codes, others, text, (canonical(embeddings), step.spoken)
                return call(self._frame, given, lambda: self._shipped("step_embeddings", embeddings), self.eager_calls)
        self.eager_calls[reason] += 1
        return self._shipped("step_embeddings", embeddings)

    def _frame(
        self, codes: Tensor, others: Tensor | None, text: Any, spoken: tuple[Tensor, Tensor] | None = None
    ) -> Tensor | None:
        gen = self.gen
        state = gen._streaming_state
        step: Any = self._step_of(state.cache.shape[0])
        offset = state.offset
        if others is not None or text is not None or offset <= gen.max_delay:
            type(gen).prepare_step_input(gen, None, others, text)
        try:
            with counted(counters(gen.lm_model.transformer)):
                columns = step.columns[offset % step.width]
                tokens: Tensor = self.steps[step](canonical(codes), columns, *(spoken or step.unspoken))
        finally:
            state.offset = offset
        state.offset += 1
        return tokens if offset > gen.max_delay else None


class _PersonaDialogue:
    """Adapter of the step; the vendor's own class has no forward of one frame."""

    classes = (f"{DialogueStep.__module__}.{DialogueStep.__name__}",)

    def contract(self, module: nn.Module) -> Contract | None:
        return module.contract() if isinstance(module, DialogueStep) else None


ADAPTER = _PersonaDialogue()
