"""Token2Wav, the speech decoder of MiniCPM-o 4.5, Lychee-FD and Step-Audio 2 (`stepaudio2-minicpmo` 0.1.1).

Each call turns 28 speech tokens, of which the last 3 are look-ahead, into 50 mel frames and one second of audio. Two
callables carry bounded state and are declared here (paper section 3.1):

* `ConformerStep`: tokens to the flow decoder's conditioning, with two attention caches, one at each rate.
* `FlowStep`: conditioning to mel frames by T solver steps of a DiT, each step with its own attention cache.

Every number is read off the vendor's objects or given in `Geometry`; extents, workspaces and class counts follow
from the contract. `Token2WavStream` binds both to a vendor `Token2wav` object: the vendor's own `stream` runs as
shipped, the vocoder included, and reaches the two steps through the methods of its flow model that touch state.

Two habits of the released code decide the declarations. The DiT *prepends*, so the policy "first P and last 100" keeps
the newest P frames and the last 100 of the prompt. And the conformer packs its token-rate caches twice over to match
the mel-rate length, then trims the packed axis: from P >= 100 on, what is read of it afterwards is the first
(P + 100) / 2 tokens, which never change again. Both are part of the bytes, so both are kept.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cadence_fx.clock import Clock
from cadence_fx.contract import Contract, Input, Region
from cadence_fx.errors import ContractError
from cadence_fx.retention import Pinned, PromptPlusLast

# Fresh tokens of a call that ends a turn: 5 to 25 while look-ahead remains, 1 to 28 in the last call of all.
FLUSH_TOKENS = tuple(range(1, 29))
SILENCE_TOKEN = 4218  # what the vendor pads a prompt's look-ahead with

State = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The numbers of one deployment.

    prompt: mel frames of the prompt (P); steps: solver steps a call (T); rate: mel frames a token; lookahead: tokens
    that a call presents and does not consume; retained: frames kept beside the prompt, a literal in the vendor's
    `stream`; hop: fresh tokens a call; flush: fresh-token counts of calls that end a turn, to be specialised as well
    (sizes not named run eager and are counted).

    Raises ContractError for a prompt that the vendor's trim scrambles (below `retained`) or that is not whole tokens.
    """

    prompt: int
    steps: int
    rate: int = 2
    lookahead: int = 3
    retained: int = 100
    hop: int = 25
    flush: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.prompt % self.rate or self.prompt < self.retained:
            raise ContractError(
                f"a prompt of {self.prompt} frames cannot be declared: it must be whole tokens of {self.rate} frames, "
                f"and at least the {self.retained} frames that the decoder retains beside it",
                field="prompt",
            )

    @property
    def window(self) -> int:
        """Mel frames attended once the window is full: 402 as released."""
        return self.prompt + self.retained

    def fresh(self, tokens: int, last_chunk: bool) -> int:
        """Tokens consumed by a call that presents `tokens` of them: the last call of a turn has no look-ahead."""
        return tokens if last_chunk else tokens - self.lookahead

    def declares(self, tokens: int, last_chunk: bool) -> bool:
        """The admission predicate: whether calls that present `tokens` tokens are in the catalog."""
        fresh = self.fresh(tokens, last_chunk)
        return fresh in self.flush or (fresh == self.hop and not last_chunk)

    def _clocks(self) -> tuple[Clock, Clock]:
        token = Clock("token", self.hop, lookahead=self.lookahead, flush=self.flush)
        return token, Clock("frame", of="token", rate=self.rate)

    def _max_classes(self) -> int:
        return (3 + self.retained // (self.rate * self.hop)) * (1 + len(self.flush))

    def flow_contract(self) -> Contract:
        """`FlowStep`: a carry and two workspaces, over (solver step, frame)."""
        attended = PromptPlusLast(self.prompt, self.retained, order="prepend")
        rows = ("solver", "frame")
        carried = (
            Region("att_cache", argument="att_cache", result=2, axis=(0, 4), clock=rows, start=self.prompt,
                   retention=attended),
            Region("cnn_cache", argument="cnn_cache", result=1, axis=(0, 4), clock=rows, retention=Pinned(2)),
        )  # fmt: skip
        scratch = (
            Region("workspace", attribute="decoder.att_cache_buffer", axis=(0, 4), clock=rows, retention=attended,
                   lifetime="unit"),
            Region("step_workspace", attribute="decoder.estimator.att_cache_buffer", axis=3, clock="frame",
                   retention=attended, lifetime="operator"),
        )  # fmt: skip
        return Contract(
            (*self._clocks(), Clock("solver", period=self.steps)),
            carried + scratch,
            inputs=(Input("mu", axis=2, clock="frame"), Input("cond", axis=2, clock="frame")),
            name="token2wav.flow",
            max_classes=self._max_classes(),
        )

    def conformer_contract(self, last_chunk: bool = False) -> Contract:
        """`ConformerStep`: caches at both rates; the token-rate cache keeps its first frames and nothing later."""
        frozen = PromptPlusLast(self.window // self.rate, 0)
        attended = PromptPlusLast(self.prompt, self.retained)
        carried = (
            Region("cnn_cache", argument="cnn_cache", result=1, axis=2, clock="token", retention=Pinned(6)),
            Region("token_cache", argument="token_cache", result=2, axis=3, clock="token",
                   start=self.prompt // self.rate, retention=frozen),
            Region("mel_cache", argument="mel_cache", result=3, axis=3, clock="frame", start=self.prompt,
                   retention=attended),
        )  # fmt: skip
        return Contract(
            self._clocks(),
            carried,
            inputs=(Input("token", axis=1, clock="token", offset=0 if last_chunk else self.lookahead),),
            name="token2wav.conformer.last" if last_chunk else "token2wav.conformer",
            max_classes=self._max_classes(),
        )


def trim(cache: Tensor, axis: int, prompt: int, retained: int) -> Tensor:
    """The vendor's retention: the first `prompt` and the last `retained` frames, once there are more than both."""
    length = cache.shape[axis]
    if length <= prompt + retained:
        return cache
    return torch.cat([cache.narrow(axis, 0, prompt), cache.narrow(axis, length - retained, retained)], dim=axis)


class FlowStep(nn.Module):
    """The T-step flow decoder and its retention: (mel, cnn_cache, att_cache) of one call.

    mu, cond (1, channels, f); spks (1, channels); cnn_cache (T, depth, 2, 2 * hidden, 2);
    att_cache (T, depth, 2, heads, L, 2 * head_dim), CFG batch and K | V in the last axis.
    """

    def __init__(self, decoder: Any, geometry: Geometry) -> None:
        super().__init__()
        self.decoder = decoder
        self.geometry = geometry
        self.steps, self.prompt, self.retained = geometry.steps, geometry.prompt, geometry.retained

    def forward(
        self, mu: Tensor, spks: Tensor, cond: Tensor, cnn_cache: Tensor, att_cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        mel, cnn, att = self.decoder.forward_chunk(mu, spks, cond, self.steps, 1.0, cnn_cache, att_cache)
        # The vendor hands out its own workspaces, which the next call overwrites; a state must not alias them.
        return mel, cnn[: self.steps].clone(), trim(att[: self.steps], 4, self.prompt, self.retained).contiguous()


class ConformerStep(nn.Module):
    """The streaming encoder and its retention: (mu, cnn_cache, token_cache, mel_cache) of one call.

    token (1, n) int32; cnn_cache (1, width, 6); token_cache (blocks, 1, heads, L / 2, 2 * head_dim) at token rate;
    mel_cache (up blocks, 1, heads, L, 2 * head_dim) at mel rate; mu (1, channels, 2 * fresh tokens).
    """

    def __init__(self, flow: Any, geometry: Geometry, *, last_chunk: bool = False) -> None:
        super().__init__()
        self.embedding, self.encoder, self.projection = flow.input_embedding, flow.encoder, flow.encoder_proj
        self.geometry, self.last_chunk = geometry, last_chunk
        self.blocks, self.rate = len(flow.encoder.encoders), geometry.rate
        self.prompt, self.retained = geometry.prompt, geometry.retained

    def forward(
        self, token: Tensor, cnn_cache: Tensor, token_cache: Tensor, mel_cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        packed = torch.cat([token_cache.repeat(1, 1, 1, self.rate, 1), mel_cache], dim=0)
        h, cnn_cache, packed = self.encoder.forward_chunk(
            xs=self.embedding(token), last_chunk=self.last_chunk, cnn_cache=cnn_cache, att_cache=packed
        )
        token_cache, mel_cache = self.unpack(trim(packed, 3, self.prompt, self.retained))
        return self.projection(h).transpose(1, 2).contiguous(), cnn_cache, token_cache, mel_cache

    def unpack(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """The two caches that the encoder reads out of the vendor's packed one; the rest of it is never read."""
        tokens = packed.shape[3] // self.rate
        return packed[: self.blocks, :, :, :tokens].contiguous(), packed[self.blocks :].clone()


class Workspaces:
    """The vendor's four solver buffers, sized to the contract while bound.

    As shipped they hold 16 solver rows of 1,000 frames, whatever is attended. `release` puts buffers of the shipped
    shapes and bytes back; until then the shipped bytes wait on the host, if there were any but zeros.
    """

    def __init__(self, step: FlowStep) -> None:
        contract = step.geometry.flow_contract()
        decoder, estimator, first = step.decoder, step.decoder.estimator, step.decoder.estimator.blocks[0]
        depth, heads, width = len(estimator.blocks), first.attn.num_heads, 2 * first.attn.head_dim
        channels = first.conv.in_channels + first.conv.out_channels
        self._shipped: list[tuple[nn.Module, str, torch.Size, Tensor | None]] = []
        for owner, region, rows in ((decoder, "workspace", (step.steps,)), (estimator, "step_workspace", ())):
            frames = contract.envelope(region)
            self._replace(owner, "att_cache_buffer", (*rows, depth, 2, heads, frames, width))
            self._replace(owner, "cnn_cache_buffer", (*rows, depth, 2, channels, 2))

    def _replace(self, owner: nn.Module, name: str, shape: tuple[int, ...]) -> None:
        buffer = getattr(owner, name)
        like = buffer.new_empty(0)
        self._shipped.append((owner, name, buffer.shape, buffer.cpu() if bool(buffer.any()) else None))
        setattr(owner, name, None)
        del buffer  # two gigabytes as released: gone before the successor is allocated
        setattr(owner, name, like.new_zeros(shape))

    def release(self) -> None:
        while self._shipped:
            owner, name, shape, kept = self._shipped.pop()
            like = getattr(owner, name).new_empty(0)
            setattr(owner, name, None)
            setattr(owner, name, like.new_zeros(shape) if kept is None else kept.to(like.device))


class Token2WavStream:
    """A vendor `Token2wav` whose flow model runs in contract-sized state; a drop-in for its `stream`.

    While bound, `token2wav.flow.setup_cache` and `.inference_chunk` are replaced by methods of this object and the
    solver workspaces are sized to the contract; everything else, `Token2wav.stream` and the vocoder included, is the
    vendor's code. The vendor's cache dictionaries keep their role and may be cloned and put back (a turn reset), but
    their tensors are the declared regions: `STATE` names them. `unbind` undoes all of it.

    Args:
        token2wav: the vendor's object, its prompt prepared (`token2wav.cache`).
        backend: what `torch.compile` gets for both steps, "cadence" for this project's; None runs them uncompiled.
        flush: fresh-token counts beside the hop to specialise, of `FLUSH_TOKENS`.
        snapshot: where the primed state waits for the next turn; the host by default, to spare device memory.

    Raises:
        ContractError: the prompt cannot be declared, the object is bound already, or it is configured for float16.
    """

    STATE = ("conformer_cnn_cache", "conformer_token_cache", "conformer_att_cache", "estimator_cnn_cache",
             "estimator_att_cache")  # fmt: skip

    def __init__(
        self,
        token2wav: Any,
        *,
        backend: str | Callable[..., Any] | None = None,
        flush: Iterable[int] = (),
        snapshot: torch.device | str = "cpu",
    ) -> None:
        if token2wav.float16:
            raise ContractError("streaming in float16 fails in the decoder as released; use float32", field="float16")
        flow = token2wav.flow
        if "inference_chunk" in vars(flow):
            raise ContractError("this decoder is bound already: unbind the other stream first", field="token2wav")
        self.token2wav, self.snapshot = token2wav, snapshot
        self.geometry = Geometry(
            token2wav.cache[3].shape[1], token2wav.n_timesteps, flow.up_rate, flow.pre_lookahead_len, flush=tuple(flush)
        )
        self.plain_flow = FlowStep(flow.decoder, self.geometry)
        self.plain_conformer = {last: ConformerStep(flow, self.geometry, last_chunk=last) for last in (False, True)}
        self.flow, self.conformer = self._compiled(backend)
        self.eager_calls: Counter[str] = Counter()
        self._workspaces = Workspaces(self.plain_flow)
        self._primed: State = {}
        self._restore: Callable[..., State] | None = None
        self._vendor_setup = flow.setup_cache
        flow.setup_cache, flow.inference_chunk = self._setup_cache, self._inference_chunk

    def _compiled(self, backend: str | Callable[..., Any] | None) -> tuple[Callable[..., Any], dict[bool, Any]]:
        if backend is None:
            return self.plain_flow, dict(self.plain_conformer)

        def compiled(step: nn.Module, contract: Contract) -> Callable[..., Any]:
            options: dict[str, Any] = {"contract": contract}
            return torch.compile(step, backend=backend, options=options)

        conformer = {
            last: compiled(step, self.geometry.conformer_contract(last)) for last, step in self.plain_conformer.items()
        }
        return compiled(self.plain_flow, self.geometry.flow_contract()), conformer

    @torch.inference_mode()
    def prime(self) -> None:
        """Runs the prompt through the decoder, eagerly, and starts the first turn (counted under "priming")."""
        tokens, _, speaker, mel, _ = self.token2wav.cache
        padding = torch.full((1, self.geometry.lookahead), SILENCE_TOKEN, dtype=tokens.dtype, device=tokens.device)
        primed = self._setup_cache(torch.cat([tokens, padding], dim=1), mel, speaker, self.geometry.steps)
        self._primed = {name: primed[name].to(self.snapshot) for name in self.STATE}
        self.reset()

    @torch.inference_mode()
    def reset(self) -> None:
        """Starts a turn from the primed state, with nothing for the vocoder to join on to."""
        mel = self.token2wav.cache[3]
        self.token2wav.stream_cache = None  # the last turn's state is given up before the next one takes its place
        self.token2wav.stream_cache = self._begin(mel.device)
        self.token2wav.hift_cache_dict = {
            "mel": mel.new_zeros(1, mel.shape[2], 0),
            "source": mel.new_zeros(1, 1, 0),
            "speech": mel.new_zeros(1, 0),
        }

    def _begin(self, device: torch.device) -> State:
        """The primed state on the device: in the carries of the compiled steps where they exist, else as copies."""
        state = dict(self._primed)
        if self._restore is not None:
            conformer, flow = self.conformer[False], self.flow
            cnn, tokens, frames, solver_cnn, solver_att = (state[name] for name in self.STATE)
            placed = self._restore(conformer, cnn_cache=cnn, token_cache=tokens, mel_cache=frames)
            placed |= {
                f"flow.{k}": v for k, v in self._restore(flow, cnn_cache=solver_cnn, att_cache=solver_att).items()
            }
            state = dict(zip(self.STATE, placed.values(), strict=True))
        return {name: value if value.device == device else value.to(device) for name, value in state.items()}

    def stream(self, tokens: list[int], last_chunk: bool = False, return_waveform: bool = True) -> Any:
        """One call of the vendor's `stream`: float32 samples (1, n), or 16-bit PCM bytes without `return_waveform`."""
        return self.token2wav.stream(tokens, None, last_chunk=last_chunk, return_waveform=return_waveform)

    @torch.inference_mode()
    def warm_up(self, verb: Callable[..., Any], restore: Callable[..., State] | None = None) -> list[Any]:
        """`verb(step, *arguments)` for each compiled step, in the modes that calls run in; returns what each returned.

        The arguments are those of a turn's first call, as `cadence_fx.warm_up` asks for; tokens and conditioning are
        random. `prime` comes first. With `restore`, `cadence_fx.restore`, later turns begin in the carries themselves.
        """
        geometry, mel, flow = self.geometry, self.token2wav.cache[3], self.token2wav.flow
        draw = torch.Generator().manual_seed(0)
        cnn, tokens, frames, *solver = (self._primed[name].to(mel.device, copy=True) for name in self.STATE)
        results = []
        for last in (False, True) if geometry.flush else (False,):
            presented = geometry.hop + (0 if last else geometry.lookahead)
            token = torch.randint(flow.vocab_size, (1, presented), dtype=torch.int32, generator=draw).to(mel.device)
            results.append(self._in_stream(verb, self.conformer[last], token, cnn, tokens, frames))
        mu = torch.randn(1, mel.shape[2], geometry.hop * geometry.rate, generator=draw).to(mel.device)
        speaker = self._speaker(self.token2wav.cache[2])
        results.append(self._in_stream(verb, self.flow, mu, speaker, torch.zeros_like(mu), *solver))
        self._restore = restore
        return results

    def _in_stream(self, verb: Callable[..., Any], *arguments: Any) -> Any:
        """`verb(*arguments)` under the autocast of the vendor's `stream`, which torch turns off with a warning."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*autocast", category=UserWarning)
            context = torch.amp.autocast(self.token2wav.cache[3].device.type, dtype=torch.float32)
        with context:
            return verb(*arguments)

    def unbind(self) -> None:
        """Gives the vendor's object its own methods and workspaces back; its stream must be started again."""
        flow = self.token2wav.flow
        del flow.setup_cache, flow.inference_chunk
        self._workspaces.release()
        self.token2wav.stream_cache = None

    def _check(self, prompt: int, steps: int) -> None:
        if (prompt, steps) != (self.geometry.prompt, self.geometry.steps):
            raise ContractError(
                f"bound for a prompt of {self.geometry.prompt} frames and {self.geometry.steps} solver steps, given "
                f"{prompt} and {steps}: unbind, and bind again",
                field="prompt",
            )

    def _speaker(self, speaker: Tensor) -> Tensor:
        return self.token2wav.flow.spk_embed_affine_layer(nn.functional.normalize(speaker, dim=1))

    @torch.inference_mode()
    def _setup_cache(self, token: Tensor, mel: Tensor, spk: Tensor, n_timesteps: int = 10) -> State:
        """In place of the flow model's `setup_cache`: the same prompt pass, its result as declared regions."""
        self._check(mel.shape[1], n_timesteps)
        self.eager_calls["priming"] += 1
        cache = self._vendor_setup(token, mel, spk, n_timesteps)
        tokens, frames = self.plain_conformer[False].unpack(cache["conformer_att_cache"])
        # The vendor's estimator caches are views of its workspaces, here exactly T rows of them.
        return dict(zip(self.STATE, (cache["conformer_cnn_cache"], tokens, frames,
                                     cache["estimator_cnn_cache"].clone(),
                                     cache["estimator_att_cache"].clone(memory_format=torch.contiguous_format)),
                        strict=True))  # fmt: skip

    @torch.inference_mode()
    def _inference_chunk(
        self, token: Tensor, spk: Tensor, cache: State, last_chunk: bool = False, n_timesteps: int = 10
    ) -> tuple[Tensor, State]:
        """In place of the flow model's `inference_chunk`: mel (1, channels, f) and the next state, already trimmed."""
        self._check(self.geometry.prompt, n_timesteps)
        if missing := [name for name in self.STATE if name not in cache]:
            raise ContractError(f"this cache was not made while bound, it has no {missing[0]}: start the stream again")
        flow, conformer = self.flow, self.conformer[last_chunk]
        if not self.geometry.declares(token.shape[1], last_chunk):
            self.eager_calls["undeclared size"] += 1
            flow, conformer = self.plain_flow, self.plain_conformer[last_chunk]
        # Dynamo tells inference tensors from others and would compile again for the first call of a turn.
        token, cnn, tokens, frames, solver_cnn, solver_att = (
            given if given.is_inference() else given.clone() for given in (token, *(cache[name] for name in self.STATE))
        )
        mu, cnn, tokens, frames = conformer(token, cnn, tokens, frames)
        mel, solver_cnn, solver_att = flow(mu, self._speaker(spk), torch.zeros_like(mu), solver_cnn, solver_att)
        return mel, dict(zip(self.STATE, (cnn, tokens, frames, solver_cnn, solver_att), strict=True))


class _Token2Wav:
    """Adapter of the two steps; the vendor's own classes have no forward that takes state."""

    classes = tuple(f"{__name__}.{kind.__name__}" for kind in (FlowStep, ConformerStep))

    def contract(self, module: nn.Module) -> Contract | None:
        if isinstance(module, ConformerStep):
            return module.geometry.conformer_contract(module.last_chunk)
        return module.geometry.flow_contract() if isinstance(module, FlowStep) else None


ADAPTER = _Token2Wav()
