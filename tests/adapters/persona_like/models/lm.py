"""A dialogue model: a text token, and codes of two voices, which both may be given or are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.adapters.persona_like.streaming import State, StreamingModule, StreamingTransformer
from tests.adapters.persona_like.utils.compile import Graphed

AUDIO_TOKENS_PER_STREAM = 3
DELAYS = (0, 0, 1, 1, 0, 1, 1)
UNKNOWN, NOBODY = -2, -1


def sample_token(logits: Tensor, use_sampling: bool, temp: float, top_k: int) -> Tensor:
    """Tokens (batch, 1, 1) of logits (batch, 1, 1, card), by a race of exponentials among the likeliest."""
    if not use_sampling:
        return logits.argmax(-1)
    likely, which = torch.softmax(logits / temp, -1).topk(top_k)
    won = (likely / torch.empty_like(likely).exponential_(1)).argmax(-1, keepdim=True)
    return which.gather(-1, won)[..., 0]


class Embedding(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return torch.where((tokens == NOBODY)[..., None], 0.0, super().forward(tokens.clamp(min=0)))


class LMModel(StreamingModule):
    def __init__(self, dim: int = 16, context: int = 12, card: int = 64, text: int = 40, layers: int = 1) -> None:
        super().__init__()
        self.n_q = self.dep_q = len(DELAYS) - 1
        self.dim, self.card, self.text_card, self.delays = dim, card, text, list(DELAYS)
        self.text_emb = Embedding(text + 1, dim)
        self.emb = nn.ModuleList(Embedding(card + 1, dim) for _ in range(self.n_q))
        self.transformer = StreamingTransformer(dim, 2, layers, context)
        self.text_linear = nn.Linear(dim, text)
        self.depformer = StreamingTransformer(dim, 2, 1, None, steps=self.dep_q)
        self.depformer.set_streaming_propagate(False)
        self.depformer_emb = nn.ModuleList([Embedding(text + 1, dim), *(Embedding(card + 1, dim) for _ in DELAYS[2:])])
        self.linears = nn.ModuleList(nn.Linear(dim, card) for _ in range(self.dep_q))

    @property
    def device(self) -> torch.device:
        return self.text_linear.weight.device

    @property
    def num_codebooks(self) -> int:
        return self.n_q + 1

    def _get_initial_token(self) -> Tensor:
        tokens = [self.text_card] + [self.card] * self.n_q
        return torch.tensor(tokens, device=self.device)[None, :, None]

    def embed_codes(self, tokens: Tensor) -> Tensor:
        total: Tensor = self.text_emb(tokens[:, 0])
        for number, table in enumerate(self.emb):
            total = total + table(tokens[:, 1 + number])
        return total

    def forward_embeddings(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden: Tensor = self.transformer(x)
        return hidden, self.text_linear(hidden)[:, None]

    def forward_codes(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.forward_embeddings(self.embed_codes(tokens))

    def forward_depformer(self, number: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        y = self.depformer(hidden + self.depformer_emb[number](tokens[:, 0]))
        return self.linears[number](y)[:, None]  # type: ignore[no-any-return]


class LMGen(StreamingModule):
    def __init__(
        self, lm_model: LMModel, use_sampling: bool = True, text_prompt_tokens: Sequence[int] = (), check: bool = False,
        report_loss: bool = False, return_logits: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.lm_model, self.use_sampling, self.text_prompt_tokens = lm_model, use_sampling, list(text_prompt_tokens)
        self.temp, self.temp_text, self.top_k, self.top_k_text = 0.8, 0.7, 25, 10
        self.check, self.report_loss, self.return_logits = check, report_loss, return_logits
        self.max_delay, self.zero_text_code = max(DELAYS), 3
        self._delays = torch.tensor(DELAYS, device=lm_model.device)

    def _init_streaming_state(self, batch: int) -> State:
        shape = batch, len(DELAYS), self.max_delay + 3
        device = self.lm_model.device
        return State(
            {"offset": 0, "provided": False},
            cache=torch.full(shape, UNKNOWN, device=device),
            provided=torch.zeros(shape, dtype=torch.bool, device=device),
            initial=self.lm_model._get_initial_token(),
            graphed_main=Graphed(self.lm_model.forward_codes),
            graphed_embeddings=Graphed(self.lm_model.forward_embeddings),
            graphed_depth=Graphed(self.depformer_step),
            offset=0,
        )

    def prepare_step_input(
        self, input_tokens: Tensor | None = None, moshi_tokens: Tensor | None = None, text_token: Any = None
    ) -> Any:
        state, last = self._streaming_state, 1 + AUDIO_TOKENS_PER_STREAM
        if state is None:
            raise RuntimeError("not streaming")
        width = state.cache.shape[2]
        for first, given in ((last, input_tokens), (1, moshi_tokens)):
            if given is None:
                continue
            if given.shape[1:] != (AUDIO_TOKENS_PER_STREAM, 1):
                raise ValueError(f"expected {AUDIO_TOKENS_PER_STREAM} codes, found {tuple(given.shape)}")
            for number in range(AUDIO_TOKENS_PER_STREAM):
                self._give(first + number, state.offset + DELAYS[first + number], given[:, number, 0])
        if text_token is not None:
            self._give(0, state.offset, text_token)
        for row, delay in enumerate(DELAYS):
            if state.offset <= delay:
                self._give(row, state.offset, state.initial[:, row, 0])
        if state.offset == 0:
            state.cache[:, :, 0] = state.initial[:, :, 0]
            state.offset = 1
            return None
        before, now = (state.offset - 1) % width, state.offset % width
        return (
            state.cache[:, :, before : before + 1], state.provided[:, :, now : now + 1],
            state.cache[:, :, now : now + 1], before, now,
        )  # fmt: skip

    def _give(self, row: int, offset: int, token: Any) -> None:
        state = self._streaming_state
        state.cache[:, row, offset % state.cache.shape[2]] = token
        state.provided[:, row, offset % state.cache.shape[2]] = True

    def process_transformer_output(
        self, hidden: Tensor, logits: Tensor, provided: Tensor, target: Tensor, before: int, now: int
    ) -> Tensor | None:
        state = self._streaming_state
        text = sample_token(logits.float(), self.use_sampling, self.temp_text, self.top_k_text)[:, 0, 0]
        told = torch.where(provided[:, 0, 0], target[:, 0, 0], text)
        codes = state.graphed_depth(told, hidden, target[:, 1:, 0], provided[:, 1:, 0])
        state.provided[:, :, before] = False
        drawn = torch.cat([text[:, None], codes], 1)
        state.cache[:, :, now] = torch.where(state.provided[:, :, now], state.cache[:, :, now], drawn)
        state.offset += 1
        if state.offset - 1 <= self.max_delay:
            return None
        at = (state.offset - 1 - self.max_delay + self._delays) % state.cache.shape[2]
        return state.cache.gather(2, at[None, :, None].expand(len(state.cache), -1, 1))  # type: ignore[no-any-return]

    def depformer_step(self, token: Tensor, hidden: Tensor, given: Tensor, provided: Tensor) -> Tensor:
        lm, codes = self.lm_model, []
        lm.depformer.set_streaming_propagate(True)
        with lm.depformer.streaming(len(token)):
            for number in range(lm.dep_q):
                logits = lm.forward_depformer(number, token[:, None, None], hidden)
                codes.append(sample_token(logits.float(), self.use_sampling, self.temp, self.top_k)[:, 0, 0])
                token = torch.where(provided[:, number], given[:, number], codes[-1])
        lm.depformer.set_streaming_propagate(False)
        return torch.stack(codes, 1)

    @torch.no_grad()
    def step(
        self, input_tokens: Tensor | None = None, moshi_tokens: Tensor | None = None, text_token: Any = None,
        return_embeddings: bool = False,
    ) -> Any:  # fmt: skip
        prepared = self.prepare_step_input(input_tokens, moshi_tokens, text_token)
        if prepared is None:
            return None
        tokens, *places = prepared
        if self.check and bool((tokens == UNKNOWN).any()):
            raise AssertionError("a token that nobody has given or drawn")
        embeddings = self.lm_model.embed_codes(tokens) if return_embeddings else None
        out = self.process_transformer_output(*self._streaming_state.graphed_main(tokens), *places)
        return (out, embeddings) if return_embeddings else out

    @torch.no_grad()
    def step_embeddings(self, embeddings: Tensor) -> Any:
        initial, last = self.lm_model._get_initial_token(), 1 + AUDIO_TOKENS_PER_STREAM
        given = initial[:, 1:last], initial[:, last:], self.zero_text_code
        prepared = self.prepare_step_input(*given) or self.prepare_step_input(*given)
        return self.process_transformer_output(*self._streaming_state.graphed_embeddings(embeddings), *prepared[1:])

    def step_system_prompts(self, mimi: Any) -> None:
        quiet = torch.full((1, AUDIO_TOKENS_PER_STREAM, 1), 7, device=self.lm_model.device)
        for text in (self.zero_text_code, *self.text_prompt_tokens, self.zero_text_code):
            self.step(quiet + 1, quiet, text)
