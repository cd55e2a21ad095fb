"""Token2Wav, the speech decoder of MiniCPM-o 4.5, Lychee-FD and Step-Audio 2, in both packages that publish it:
`stepaudio2-minicpmo` 0.1.1 and `minicpmo-utils` 1.0.7.

Each call turns 28 speech tokens, of which the last 3 are look-ahead, into 50 mel frames and one second of audio. Three
callables are declared here (paper section 3.1), and a call in the middle of a turn is one replay of each:

* `ConformerStep`: tokens to the flow decoder's conditioning, with two attention caches, one at each rate.
* `FlowStep`: conditioning to mel frames by T solver steps of a DiT, each step with its own attention cache.
* the vocoder, mel frames to samples: `VocoderStep` (HiFT, which draws noise) in the first package, `BoundedStep` and
  `FinalStep` (causal, with caches and a phase) in the second.

Every number is read off the vendor's objects or given in `Geometry`; extents, workspaces and class counts follow
from the contract. `Token2WavStream` binds all of it to a vendor `Token2wav` object: the vendor's own `stream` runs as
shipped and reaches the steps through the methods of its models that touch state.

Two habits of the released code decide the declarations. The DiT *prepends*, so the policy "first P and last 100" keeps
the newest P frames and the last 100 of the prompt. And the conformer packs its token-rate caches twice over to match
the mel-rate length. The first package trims the packed axis: from P >= 100 on, what is read of it afterwards is the
first (P + 100) / 2 tokens, which never change again. The second trims each rate by itself. Both are part of the bytes,
so both are kept.
"""

from __future__ import annotations

import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from cadence_fx.adapters.base import compiler
from cadence_fx.adapters.token2wav_bounded import BoundedBinding, BoundedStep, FinalStep
from cadence_fx.adapters.token2wav_geometry import FLUSH_TOKENS, Geometry, Reach
from cadence_fx.adapters.token2wav_steps import ConformerStep, FlowStep, Sliced, Workspaces, vendor_graphs
from cadence_fx.adapters.token2wav_vocoder import VocoderBinding, VocoderStep
from cadence_fx.contract import Contract
from cadence_fx.errors import ContractError
from cadence_fx.hazard import Hazard

__all__ = [
    "ADAPTER",
    "FLUSH_TOKENS",
    "BoundedStep",
    "ConformerStep",
    "FinalStep",
    "FlowStep",
    "Geometry",
    "Reach",
    "Token2WavStream",
    "VocoderStep",
]

SILENCE_TOKEN = 4218  # what the first package pads a prompt's look-ahead with; the second repeats the prompt's start

State = dict[str, Tensor]


class Token2WavStream:
    """A vendor `Token2wav` whose models run in contract-sized state; a drop-in for its `stream`.

    While bound, `token2wav.flow.setup_cache` and `.inference_chunk` are replaced by methods of this object, the
    vocoder's entry (`hift.forward`, or `bounded_vocoder.stream`) by one of its `vocoder`, and the solver workspaces
    are sized to the contract; everything else, `Token2wav.stream` included, is the vendor's code. The vendor's cache
    dictionaries keep their role and may be cloned and put back (a turn reset), but their tensors are the declared
    regions: `STATE` names those of the flow model. `unbind` undoes all of it.

    Args:
        token2wav: the vendor's object, its prompt prepared (`token2wav.cache`).
        backend: what `torch.compile` gets for the steps, "cadence" for this project's; None runs them uncompiled.
        flush: fresh-token counts beside the hop to specialise, of `FLUSH_TOKENS`.
        snapshot: where the primed state waits for the next turn; the host by default, to spare device memory.
        passes: which passes rewrite the steps, as `options={"passes": ...}` has it; None for the default ones.

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
        passes: Any = None,
    ) -> None:
        if token2wav.float16:
            raise ContractError("streaming in float16 is not declared; use float32", field="float16")
        flow = token2wav.flow
        if "inference_chunk" in vars(flow):
            raise ContractError("this decoder is bound already: unbind the other stream first", field="token2wav")
        self.token2wav, self.snapshot = token2wav, snapshot
        self._bounded = hasattr(token2wav, "bounded_vocoder")
        self._path, self._prompt = self._find_prompt()
        self.geometry = Geometry(
            self._prompt[3].shape[1], token2wav.n_timesteps, flow.up_rate, flow.pre_lookahead_len, flush=tuple(flush),
            two_rates=self._bounded,
        )  # fmt: skip
        self.plain_flow = FlowStep(flow.decoder, self.geometry)
        self.plain_conformer = {last: ConformerStep(flow, self.geometry, last_chunk=last) for last in (False, True)}
        compiled = compiler(backend, passes)
        self.flow = compiled(self.plain_flow, self.geometry.flow_contract())
        self.conformer = {
            last: compiled(step, self.geometry.conformer_contract(last)) for last, step in self.plain_conformer.items()
        }
        self.eager_calls: Counter[str] = Counter()
        binding = BoundedBinding if self._bounded else VocoderBinding
        # Thousands of convolutions' sizes as symbols take minutes to trace, and there are few of them.
        self.vocoder: Any = binding(
            token2wav, self.geometry, compiler(backend, passes, dynamic=False), self.eager_calls
        )
        self._workspaces, self._sliced = Workspaces(self.plain_flow), Sliced(self.plain_flow)
        self._primed: State = {}
        self._restore: Callable[..., State] | None = None
        self._vendor_setup = flow.setup_cache
        flow.setup_cache, flow.inference_chunk = self._setup_cache, self._inference_chunk
        # The second package wraps this method in a torch.compile of its own, whose guards would run in every call.
        encode = type(flow.encoder).forward_chunk
        unwrapped = getattr(encode, "_torchdynamo_orig_callable", encode)
        flow.encoder.forward_chunk = types.MethodType(unwrapped, flow.encoder)

    def _find_prompt(self) -> tuple[Any, tuple[Tensor, ...]]:
        """A name, and tokens, their number, speaker, mel and its length. The second package keeps prompts by path."""
        cache = self.token2wav.cache
        if not self._bounded:
            return None, cache
        path = self.token2wav._stream_prompt
        if path is None and len(cache or ()) != 1:
            raise ContractError("which prompt is bound? Call set_stream_cache(prompt) first", field="token2wav")
        path = next(iter(cache)) if path is None else path
        return path, cache[path]

    @torch.inference_mode()
    def prime(self) -> None:
        """Runs the prompt through the decoder, eagerly, and starts the first turn (counted under "priming")."""
        tokens, _, speaker, mel, _ = self._prompt
        padding = tokens[:, : self.geometry.lookahead]
        if not self._bounded:
            padding = torch.full_like(padding, SILENCE_TOKEN)
        primed = self._setup_cache(torch.cat([tokens, padding], dim=1), mel, speaker, self.geometry.steps)
        self._primed = {name: primed[name].to(self.snapshot) for name in self.STATE}
        self.reset()

    @torch.inference_mode()
    def reset(self) -> None:
        """Starts a turn from the primed state, with nothing for the vocoder to join on to."""
        self.token2wav.stream_cache = None  # the last turn's state is given up before the next one takes its place
        self.token2wav.stream_cache = self._begin(self._prompt[3].device)
        self.vocoder.start_turn()
        if self._bounded:
            self.token2wav._stream_prompt = self._path

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
        random. `prime` comes first. With `restore`, `cadence_fx.restore`, later turns begin in the carries themselves,
        and the solver's workspaces have memory only while a call runs eager: what else uses them then (the vendor's
        decoder called by hand, say) must `unbind` first.
        """
        geometry, mel, flow = self.geometry, self._prompt[3], self.token2wav.flow
        draw = torch.Generator().manual_seed(0)
        cnn, tokens, frames, *solver = (self._primed[name].to(mel.device, copy=True) for name in self.STATE)
        if restore is not None:
            self._workspaces.park()
        results = []
        for last in (False, True) if geometry.flush else (False,):
            presented = geometry.hop + (0 if last else geometry.lookahead)
            token = torch.randint(flow.vocab_size, (1, presented), dtype=torch.int32, generator=draw).to(mel.device)
            results.append(self._in_stream(verb, self.conformer[last], token, cnn, tokens, frames))
        mu = torch.randn(1, mel.shape[2], geometry.hop * geometry.rate, generator=draw).to(mel.device)
        speaker = self._speaker(self._prompt[2])
        results.append(self._in_stream(verb, self.flow, mu, speaker, torch.zeros_like(mu), *solver))
        results += [verb(step, *given) for step, given in self.vocoder.calls()]
        self._restore = restore
        return results

    def _in_stream(self, verb: Callable[..., Any], *arguments: Any) -> Any:
        """`verb(*arguments)` under the autocast of the vendor's `stream`: to float32 in the first package, which a CPU
        turns off with a warning, and none in the second."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*autocast", category=UserWarning)
            dtype = torch.float16 if self._bounded else torch.float32
            context = torch.amp.autocast(self._prompt[3].device.type, dtype=dtype, enabled=not self._bounded)
        with context:
            return verb(*arguments)

    def unbind(self) -> None:
        """Gives the vendor's object its own methods and workspaces back; its stream must be started again."""
        flow = self.token2wav.flow
        del flow.setup_cache, flow.inference_chunk, flow.encoder.forward_chunk
        self.vocoder.unbind()
        self._workspaces.release()
        self._sliced.release()
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
        with self._workspaces.awake():
            cache = self._vendor_setup(token, mel, spk, n_timesteps)
            tokens, frames = self.plain_conformer[False].unpack(cache["conformer_att_cache"])
            # The vendor's estimator caches are views of its workspaces, here exactly T rows of them.
            solver_cnn = cache["estimator_cnn_cache"].clone()
            solver_att = cache["estimator_att_cache"].clone(memory_format=torch.contiguous_format)
        return dict(
            zip(self.STATE, (cache["conformer_cnn_cache"], tokens, frames, solver_cnn, solver_att), strict=True)
        )

    @torch.inference_mode()
    def _inference_chunk(
        self, token: Tensor, spk: Tensor, cache: State, last_chunk: bool = False, n_timesteps: int = 10
    ) -> tuple[Tensor, State]:
        """In place of the flow model's `inference_chunk`: mel (1, channels, f) and the next state, already trimmed."""
        self._check(self.geometry.prompt, n_timesteps)
        if missing := [name for name in self.STATE if name not in cache]:
            raise ContractError(f"this cache was not made while bound, it has no {missing[0]}: start the stream again")
        flow, conformer = self.flow, self.conformer[last_chunk]
        memory: AbstractContextManager[Any] = nullcontext()
        if not self.geometry.declares(token.shape[1], last_chunk):
            self.eager_calls["undeclared size"] += 1
            flow, conformer = self.plain_flow, self.plain_conformer[last_chunk]
            memory = self._workspaces.awake()
        # Dynamo tells inference tensors from others and would compile again for the first call of a turn.
        token, cnn, tokens, frames, solver_cnn, solver_att = (
            given if given.is_inference() else given.clone() for given in (token, *(cache[name] for name in self.STATE))
        )
        mu, cnn, tokens, frames = conformer(token, cnn, tokens, frames)
        with memory:
            mel, solver_cnn, solver_att = flow(mu, self._speaker(spk), torch.zeros_like(mu), solver_cnn, solver_att)
        return mel, dict(zip(self.STATE, (cnn, tokens, frames, solver_cnn, solver_att), strict=True))


class _Token2Wav:
    """Adapter of the steps; the vendor's own classes have no forward that takes state."""

    classes = tuple(
        f"{kind.__module__}.{kind.__name__}" for kind in (FlowStep, ConformerStep, VocoderStep, BoundedStep, FinalStep)
    )

    def contract(self, module: nn.Module) -> Contract | None:
        match module:
            case ConformerStep():
                return module.geometry.conformer_contract(module.last_chunk)
            case FlowStep():
                return module.geometry.flow_contract()
            case VocoderStep():
                return module.geometry.vocoder_contract(module.overlap)
            case BoundedStep():
                return module.reach.contract(module.geometry, joined=module.joined)
            case FinalStep():
                return module.reach.final_contract(module.geometry)
        return None

    def hazards(self, module: nn.Module) -> Sequence[Hazard]:
        return [vendor_graphs(module)] if isinstance(module, FlowStep) else []


ADAPTER = _Token2Wav()
