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

import contextlib
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cadence_fx.adapters.base import Binding, Replaced, call, compiler, replays
from cadence_fx.adapters.token2wav_bounded import BoundedBinding, BoundedStep, FinalStep
from cadence_fx.adapters.token2wav_geometry import FLUSH_TOKENS, Geometry, Reach
from cadence_fx.adapters.token2wav_prompts import NoPrompt, Prompts
from cadence_fx.adapters.token2wav_steps import (
    ConformerStep,
    FlowStep,
    Sliced,
    State,
    StepSet,
    Workspaces,
    shipped,
    vendor_graphs,
)
from cadence_fx.adapters.token2wav_vocoder import VocoderBinding, VocoderStep
from cadence_fx.contract import Contract
from cadence_fx.errors import ContractError
from cadence_fx.hazard import Hazard
from cadence_fx.ledger import log
from cadence_fx.restore import restore as restore_states

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


STEPS = 10  # solver steps of objects that do not say: Lychee-FD has the number in its code


class Token2WavStream(Binding):
    """A vendor `Token2wav` whose models run in contract-sized state; a drop-in for its `stream`.

    While bound, `token2wav.flow.setup_cache` and `.inference_chunk` are replaced by methods of this object, the
    vocoder's entry (`hift.forward`, or `bounded_vocoder.stream`) by one of its `vocoder`, and the solver workspaces
    are sized to the contracts; everything else, `Token2wav.stream` included, is the vendor's code. The vendor's cache
    dictionaries keep their role and may be cloned and put back (a turn reset, a rollback), but their tensors are the
    declared regions: `STATE` names those of the flow model. Several streams may keep theirs by reference: none holds
    memory of another's. `unbind` undoes all of it.

    The prompt is a clock: steps are made for each prompt length and number of solver steps when it is first met, with
    classes of its own. A dictionary that was made before binding is taken, at the price of a copy.

    Args:
        token2wav: the vendor's object.
        backend: what `torch.compile` gets for the steps, "cadence" for this project's; None runs them uncompiled.
        flush: fresh-token counts beside the hop to specialise, of `FLUSH_TOKENS`.
        snapshot: where the primed state waits for the next turn; the host by default, to spare device memory.
        passes: which passes rewrite the steps, as `options={"passes": ...}` has it; None for the default ones.

    Raises:
        ContractError: the prompt cannot be declared, or the object is configured for float16.
        AlreadyBound: the object is bound already.
    """

    STATE = ("conformer_cnn_cache", "conformer_token_cache", "conformer_att_cache", *StepSet.SOLVER)

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
        self.token2wav, self.snapshot = token2wav, snapshot
        self._bounded = hasattr(token2wav, "bounded_vocoder")
        self._unprompted = Geometry(
            0, getattr(token2wav, "n_timesteps", STEPS), flow.up_rate, flow.pre_lookahead_len, flush=tuple(flush),
            two_rates=self._bounded, trimmed=not hasattr(token2wav, "stream_lookahead_len"),
            capacity=flow.decoder.att_cache_buffer.shape[4], positions=flow.encoder.embed.pos_enc.pe.shape[1] // 2 + 1,
        )  # fmt: skip
        self.eager_calls: Counter[str] = Counter()
        self._compiled, self._engine = compiler(backend, passes), replays(backend)
        self._sets: dict[tuple[int, int], StepSet] = {}
        self._primed: dict[StepSet, tuple[Any, State]] = {}
        self._restore: Callable[..., State] | None = None
        self._prompts = Prompts(token2wav)
        self.steps: StepSet | None = None  # those of the prompt that `prime` has chosen, else of the first one
        with contextlib.ExitStack() as undo:
            replaced, self._vendor_setup = Replaced(), flow.setup_cache
            undo.callback(replaced.release)
            replaced.put(flow, setup_cache=self._setup_cache, inference_chunk=self._inference_chunk)
            if "forward_chunk" not in vars(flow.encoder):
                # The second package wraps this method in a torch.compile of its own: guards in every call.
                encode = type(flow.encoder).forward_chunk
                unwrapped = getattr(encode, "_torchdynamo_orig_callable", encode)
                replaced.put(flow.encoder, forward_chunk=types.MethodType(unwrapped, flow.encoder))
            binding = BoundedBinding if self._bounded else VocoderBinding
            # Thousands of convolutions' sizes as symbols take minutes to trace, and there are few of them.
            self.vocoder: Any = binding(
                token2wav, self._unprompted, compiler(backend, passes, dynamic=False), self.eager_calls
            )
            undo.callback(self.vocoder.unbind)
            self._workspaces = Workspaces(flow.decoder)
            undo.callback(self._workspaces.release)
            undo.callback(Sliced(flow.decoder).release)
            with contextlib.suppress(NoPrompt):
                steps = self._choose()
                if (open_stream := getattr(token2wav, "stream_cache", None)) is not None:
                    token2wav.stream_cache = steps.declared(open_stream)
            self._undo = undo.pop_all()

    def _choose(self, name: Any = None) -> StepSet:
        """Makes a prompt the one that `prime`, `reset` and `warm_up` are about."""
        self._prompts.choose(name)
        self.steps = self._steps_of(self._prompts.frames, self._unprompted.steps)
        return self.steps

    def _steps_of(self, prompt: int, steps: int) -> StepSet:
        """The steps for a prompt of so many frames; made, and the workspaces enlarged, when it is first met."""
        if (prompt, steps) not in self._sets:
            geometry = replace(self._unprompted, prompt=prompt, steps=steps)
            found = self._sets[prompt, steps] = StepSet(self.token2wav.flow, geometry, self._compiled)
            self._workspaces.fit(geometry)
            if found.refusal is not None:
                log.warning("token2wav.conformer: not captured: %s: %s", *found.refusal)
            self.steps = self.steps or found
        return self._sets[prompt, steps]

    @property
    def _active(self) -> StepSet:
        return self.steps or self._choose()

    @property
    def geometry(self) -> Geometry:
        """The numbers of the prompt that is spoken with."""
        return self._active.geometry

    @property
    def flow(self) -> Callable[..., Any]:
        """The compiled flow decoder of that prompt; benchmarks put theirs in its place."""
        return self._active.flow

    @flow.setter
    def flow(self, step: Callable[..., Any]) -> None:
        self._active.flow = step

    @property
    def conformer(self) -> dict[bool, Callable[..., Any]]:
        """Its compiled encoder, of calls that are and are not the last."""
        return self._active.conformer

    @property
    def plain_flow(self) -> FlowStep:
        return self._active.plain_flow

    @property
    def plain_conformer(self) -> dict[bool, nn.Module]:
        return self._active.plain_conformer

    @torch.inference_mode()
    def prime(self, prompt: Any = None) -> None:
        """Runs a prompt through the decoder, eagerly, and starts a turn (counted under "priming")."""
        self._primed.pop(self._choose(prompt), None)
        self.reset()

    def _primed_state(self) -> State:
        """The state behind the prompt, where `snapshot` says."""
        steps = self._active
        if steps in self._primed and self._primed[steps][0] is self._prompts.prompt:
            return self._primed[steps][1]
        primer = self._prompts.primer(self._unprompted.lookahead)
        primed = self._setup_cache(primer, self._prompts.mel, self._prompts.speaker, steps.geometry.steps)
        state = {name: primed[name].to(self.snapshot) for name in steps.state}
        self._primed[steps] = self._prompts.prompt, state
        return state

    @torch.inference_mode()
    def reset(self) -> None:
        """Starts a turn from the primed state, with nothing for the vocoder to join on to."""
        self.token2wav.stream_cache = None  # the last turn's state is given up before the next one takes its place
        self.token2wav.stream_cache = self._begin(self._prompts.mel.device)
        self._prompts.speak()
        self.vocoder.start_turn()

    def _begin(self, device: torch.device) -> State:
        """The primed state on the device: in the carries of the compiled steps where they exist, else as copies."""
        steps = self._active
        state = dict(self._primed_state())
        if self._restore is not None:
            places = [(steps.flow, dict(zip(steps.SOLVER, ("cnn_cache", "att_cache"), strict=True)))]
            if steps.refusal is None:
                names = ("cnn_cache", "token_cache", "mel_cache")
                places.append((steps.conformer[False], dict(zip(self.STATE[:3], names, strict=True))))
            for step, arguments in places:
                placed = self._restore(step, **{argument: state[name] for name, argument in arguments.items()})
                state |= {name: placed[argument] for name, argument in arguments.items()}
        return {name: value if value.device == device else value.to(device) for name, value in state.items()}

    def stream(self, tokens: list[int], last_chunk: bool = False, return_waveform: bool = True) -> Any:
        """One call of the vendor's `stream`: float32 samples (1, n), or 16-bit PCM bytes without `return_waveform`."""
        return self.token2wav.stream(tokens, None, last_chunk=last_chunk, return_waveform=return_waveform)

    @torch.inference_mode()
    def warm_up(
        self, verb: Callable[..., Any], restore: Callable[..., State] | None = None, *, prompts: Iterable[Any] = ()
    ) -> list[Any]:
        """`verb(step, *arguments)` for each compiled step, in the modes that calls run in; returns what each returned.

        The arguments are those of a turn's first call, as `cadence_fx.warm_up` asks for; tokens and conditioning are
        random. The steps are those of `prompts`, as the vendor's `set_stream_cache` takes them, or of the prompt that
        the object has. `restore` is `cadence_fx.restore`, unless given: with it, turns that `reset` begins do so in
        the carries themselves, and the solver's workspaces have memory only while a call runs eager: what else uses
        them then (the vendor's decoder called by hand, say) must `unbind` first.
        """
        restore = restore or (restore_states if self._engine else None)
        results: list[Any] = []
        done: set[StepSet] = set()
        prompts = list(prompts)
        for prompt in prompts:  # the workspaces have their size before anything is captured
            self._choose(prompt)
        for prompt in prompts or [None]:
            if prompt is not None or self._prompts.prompt is None:
                self._choose(prompt)
            if (steps := self._active) not in done:
                done.add(steps)
                results += self._warm_up(verb, steps, restore is not None)
        results += [verb(step, *given) for step, given in self.vocoder.calls()]
        self._restore = restore
        return results

    def _warm_up(self, verb: Callable[..., Any], steps: StepSet, parks: bool) -> list[Any]:
        geometry, mel, flow = steps.geometry, self._prompts.mel, self.token2wav.flow
        draw = torch.Generator().manual_seed(0)
        state = {name: value.to(mel.device, copy=True) for name, value in self._primed_state().items()}
        solver = [state.pop(name) for name in steps.SOLVER]
        if parks:
            self._workspaces.park()
        results = []
        for last in (False, True) if geometry.flush else (False,):
            presented = geometry.hop + (0 if last else geometry.lookahead)
            token = torch.randint(flow.vocab_size, (1, presented), dtype=torch.int32, generator=draw).to(mel.device)
            if steps.refusal is None:
                results.append(self._in_stream(verb, steps.conformer[last], token, *state.values()))
        mu = torch.randn(1, mel.shape[2], geometry.hop * geometry.rate, generator=draw).to(mel.device)
        speaker = self._speaker(self._prompts.speaker)
        results.append(self._in_stream(verb, steps.flow, mu, speaker, torch.zeros_like(mu), *solver))
        return results

    def _in_stream(self, verb: Callable[..., Any], *arguments: Any) -> Any:
        """`verb(*arguments)` under the autocast of the vendor's `stream`: to float32, which a CPU turns off with a
        warning, and none in the second package."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*autocast", category=UserWarning)
            dtype = torch.float16 if self._bounded else torch.float32
            context = torch.amp.autocast(self._prompts.mel.device.type, dtype=dtype, enabled=not self._bounded)
        with context:
            return verb(*arguments)

    def compiled(self) -> dict[str, Callable[..., Any]]:
        found = {name: step for steps in self._sets.values() for name, step in steps.compiled().items()}
        return found | {contract.name: step for contract, step in self.vocoder.declared()}

    def contracts(self) -> dict[str, Contract]:
        found = {name: each for steps in self._sets.values() for name, each in steps.contracts().items()}
        return found | {contract.name: contract for contract, _ in self.vocoder.declared()}

    def refused(self) -> dict[str, str]:
        """The conformers that the planner does not take, by their prompts."""
        return {
            steps.name(steps.geometry.conformer_contract()): steps.refusal.detail
            for steps in self._sets.values()
            if steps.refusal is not None
        }

    @torch.inference_mode()
    def unbind(self) -> None:
        """Gives the vendor's object its own methods and workspaces back. The stream that is open goes on; others, kept
        elsewhere, do with what `shipped` makes of theirs."""
        if getattr(self.token2wav, "stream_cache", None) is not None:
            self.token2wav.stream_cache = self.shipped(self.token2wav.stream_cache)
        self._undo.close()
        self._sets, self._primed, self.steps = {}, {}, None

    def shipped(self, cache: State) -> State:
        """A cache that was made while bound, as the vendor's own code reads it."""
        return shipped(cache, self._unprompted.rate, self._workspaces.rows)

    def _speaker(self, speaker: Tensor) -> Tensor:
        return self.token2wav.flow.spk_embed_affine_layer(nn.functional.normalize(speaker, dim=1))

    @torch.inference_mode()
    def _setup_cache(self, token: Tensor, mel: Tensor, spk: Tensor, n_timesteps: int = STEPS) -> State:
        """In place of the flow model's `setup_cache`: the same prompt pass, its result as declared regions."""
        steps = self._steps_of(mel.shape[1], n_timesteps)
        self.eager_calls["priming"] += 1
        with self._workspaces.awake():
            cache = self._vendor_setup(token, mel, spk, n_timesteps)
            # The vendor's estimator caches are views of its workspaces.
            cache |= {name: cache[name].clone(memory_format=torch.contiguous_format) for name in steps.SOLVER}
        return steps.declared(cache)

    @torch.inference_mode()
    def _inference_chunk(
        self, token: Tensor, spk: Tensor, cache: State, last_chunk: bool = False, n_timesteps: int = STEPS
    ) -> tuple[Tensor, State]:
        """In place of the flow model's `inference_chunk`: mel (1, channels, f) and the next state, already trimmed."""
        steps = self._steps_of(self._prompts.frames_of(spk) or self._active.geometry.prompt, n_timesteps)
        state = steps.declared(cache)
        flow, conformer = steps.flow, steps.conformer[last_chunk]
        memory: AbstractContextManager[Any] = nullcontext()
        if steps.refusal is not None:
            self.eager_calls[steps.refusal.reason] += 1
        if not steps.geometry.declares(token.shape[1], last_chunk):
            self.eager_calls["undeclared size"] += 1
            flow, conformer = steps.plain_flow, steps.plain_conformer[last_chunk]
            memory = self._workspaces.awake()
        # Dynamo tells inference tensors from others and would compile again for the first call of a turn.
        token, *given = (each if each.is_inference() else each.clone() for each in (token, *state.values()))
        tokens = token, *given[:-2]
        mu, *kept = call(conformer, tokens, lambda: steps.plain_conformer[last_chunk](*tokens), self.eager_calls)
        frames = mu, self._speaker(spk), torch.zeros_like(mu), *given[-2:]
        with memory:
            mel, *solver = call(flow, frames, lambda: self._solve(steps.plain_flow, frames), self.eager_calls)
        return mel, dict(zip(steps.state, (*kept, *solver), strict=True))

    def _solve(self, flow: FlowStep, frames: Sequence[Tensor]) -> Any:
        """The vendor's code, in its workspaces."""
        with self._workspaces.awake():
            return flow(*frames)


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
