"""The ways of running the Token2Wav decoder that `bench.token2wav` compares, each around its own vendor object.

| name            | state                            | computation                                                    |
| --------------- | -------------------------------- | -------------------------------------------------------------- |
| B0              | as shipped                       | eager, the vendor's code untouched                             |
| S               | sized to the contract            | eager                                                          |
| R               | as shipped                       | one graph a solver step and an encoder chunk, captured by hand |
| Rc              | as shipped                       | one graph a chunk of the solver and the encoder, by hand       |
| SR              | sized to the contract            | as R                                                           |
| SRc-hand        | sized to the contract            | as Rc, by hand: the kernels as written, no carry               |
| SRc             | sized to the contract, carried   | `torch.compile(backend="cadence")`                             |
| reduce-overhead | as shipped                       | `torch.compile(mode="reduce-overhead")` on step and encoder    |
| cudagraphs      | as shipped                       | `torch.compile(backend="cudagraphs")` on step and encoder      |
| step-wrapper    | exact, allocated in each call    | vllm-omni 0.30.0: its own solver, one graph a step             |

The letters are those of the paper's Table 4. "By hand" means `ExactShapeReplay` around a plain callable.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import cadence_fx
from bench import vendor
from cadence_fx.adapters.token2wav import Token2WavStream
from cadence_fx.bytesops import digest
from cadence_fx.ledger import Ledger
from cadence_fx.lookup import program_of
from cadence_fx.passes import Choice
from cadence_fx.table import ReplayTable


class MelProbe:
    """Stands where the vocoder is while the segment before it is timed: keeps the mel frames, returns silence."""

    def __init__(self) -> None:
        self.mel: list[Tensor] = []
        self._silence: dict[int, Tensor] = {}

    def __call__(self, mel: Tensor, cache_source: Tensor) -> tuple[Tensor, Tensor]:
        self.mel.append(mel[:, :, cache_source.shape[2] // 480 :].clone())
        samples = mel.shape[2] * 480
        if samples not in self._silence:
            self._silence[samples] = mel.new_zeros(1, samples)
        return self._silence[samples], self._silence[samples][:, None]


class Subject:
    """One variant: the vendor's object, its primed state on the host, and what was put in front of its modules."""

    sized = False

    def __init__(self, sizes: vendor.Sizes, device: torch.device) -> None:
        self.token2wav = vendor.build_token2wav(sizes, device)
        self.vocoder, self.probe = self.token2wav.hift, MelProbe()
        self.replays: list[Replay] = []
        self.stream = self._bind()
        self._primed: tuple[dict[str, Tensor], ...] = ()

    def _bind(self) -> Token2WavStream | None:
        return Token2WavStream(self.token2wav) if self.sized else None

    def prime(self) -> None:
        vendor.start_turn(self.token2wav)
        caches = self.token2wav.stream_cache, self.token2wav.hift_cache_dict
        self._primed = tuple({name: value.to("cpu", copy=True) for name, value in cache.items()} for cache in caches)
        self.token2wav.stream_cache = None

    def install(self) -> None:
        """Puts graphs or compiled code in front of the vendor's modules; after priming, whose shape occurs once."""

    def time_solver(self) -> Timed:
        """Puts a clock around the solver with its retention, or without where the vendor has that outside."""
        device = self.token2wav.cache[3].device
        if self.stream is not None:
            self.stream.flow = timed = Timed(self.stream.flow, device)
        else:
            decoder = self.token2wav.flow.decoder
            decoder.forward_chunk = timed = Timed(decoder.forward_chunk, device)
        return timed

    def reset(self) -> None:
        """A new turn: the primed caches, copied from the host."""
        device = self.token2wav.cache[3].device
        self.token2wav.stream_cache = None
        self.token2wav.stream_cache, self.token2wav.hift_cache_dict = (
            {name: value.to(device, copy=True) for name, value in cache.items()} for cache in self._primed
        )

    def __call__(self, tokens: list[int]) -> Any:
        return self.token2wav.stream(tokens, None, return_waveform=True)

    def state_digest(self) -> str:
        """SHA-256 of what the next call of the solver and the conformer reads."""
        return digest(*vendor.live_state(self.token2wav, self.token2wav.n_timesteps))

    def notes(self) -> list[str]:
        """What the passes did to the solver's class of a full window."""
        return []

    def misses(self) -> dict[str, int]:
        """Calls since the seal that did not replay, by reason, and captures that came too late."""
        found = Counter(self.stream.eager_calls if self.stream is not None and self.replays else {})
        del found["priming"]
        for replay in self.replays:
            found.update(replay.ledger.misses)
            found["late capture"] += replay.ledger.late_captures
        return dict(+found)

    def seal(self) -> None:
        """From now on every capture and every miss counts."""
        for replay in self.replays:
            replay.ledger.misses.clear()
            for table in replay.tables:
                table.sealed = True
            replay.watch()

    def host_us(self) -> dict[str, dict[str, float]]:
        """Host microseconds by replayed callable."""
        return {replay.ledger.name: figures for replay in self.replays if (figures := replay.host_us())}

    def forget_times(self) -> None:
        """Host times are of the calls from now on."""
        for replay in self.replays:
            replay.forget_times()

    def _hand(self, fn: Callable[..., Any], name: str) -> Replay:
        """`fn` captured by hand."""
        replay = cadence_fx.ExactShapeReplay(fn, name=name, frozen=True)
        self.replays.append(Replay(replay, replay.ledger, lambda: list(replay._tables.values())))
        return self.replays[-1]


class Timed:
    """A callable that keeps the milliseconds of each call, by a clock synchronised before and after."""

    def __init__(self, call: Callable[..., Any], device: torch.device) -> None:
        self.call, self._device = call, device
        self.ms: list[float] = []
        self.wrapped: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._synchronize()
        with self.wrapped():
            start = time.perf_counter()
            result = self.call(*args, **kwargs)
            self._synchronize()
        self.ms.append((time.perf_counter() - start) * 1e3)
        return result


class Replay:
    """A replayed callable, with the host time of each of its calls and of the launch inside it."""

    def __init__(self, call: Callable[..., Any], ledger: Ledger, tables: Callable[[], list[ReplayTable]]) -> None:
        self.call, self.ledger, self._tables = call, ledger, tables
        self.times: list[float] = []
        self.launches: list[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter_ns()
        result = self.call(*args, **kwargs)
        self.times.append((time.perf_counter_ns() - start) / 1e3)
        return result

    @property
    def tables(self) -> list[ReplayTable]:
        return self._tables()

    def watch(self) -> None:
        """From now on, time the launch of every class captured so far."""
        self.forget_times()
        for recording in {
            id(e.recording): e.recording for table in self.tables for e in table.classes.values()
        }.values():
            recording.launch = self._timed(recording.launch)  # type: ignore[method-assign]

    def forget_times(self) -> None:
        self.times.clear()
        self.launches.clear()
        self.ledger.latencies_us.clear()

    def _timed(self, launch: Callable[[], Any]) -> Callable[[], Any]:
        def timed() -> Any:
            start = time.perf_counter_ns()
            outputs = launch()
            self.launches.append((time.perf_counter_ns() - start) / 1e3)
            return outputs

        return timed

    def host_us(self) -> dict[str, float]:
        """Medians over calls: the launch itself; the rest of the engine's call; the rest of the whole call.

        The rest of the whole call includes, under `torch.compile`, Dynamo's guards.
        """
        if not (len(self.times) == len(self.launches) == len(self.ledger.latencies_us)):
            return {}  # a call that did not replay has no launch to take off
        engine = [total - launch for total, launch in zip(self.ledger.latencies_us, self.launches, strict=True)]
        whole = [total - launch for total, launch in zip(self.times, self.launches, strict=True)]
        named = {"launch": self.launches, "engine_beyond_launch": engine, "call_beyond_launch": whole}
        return {name: round(statistics.median(values), 1) for name, values in named.items() if values}


def _compiled(step: Any) -> Any:
    """The compiled callable under the clocks around it."""
    while isinstance(step, (Replay, Timed)):
        step = step.call
    return step


def _resident_frequencies(device: torch.device) -> None:
    """Keeps the solver's frequency table on the device: as shipped, every step computes it on the host and copies it.

    A capture by hand cannot hold that copy. The table is computed by the vendor's own expression, on the host.
    """
    embedder = vendor.load("cosyvoice2.flow.decoder_dit").TimestepEmbedder
    tables: dict[int, Tensor] = {}

    def timestep_embedding(t: Tensor, dim: int, max_period: int = 10000) -> Tensor:
        half = dim // 2
        if dim not in tables:
            tables[dim] = torch.exp(-math.log(max_period) * torch.arange(start=0, end=half) / half).to(device, t.dtype)
        angles = t[:, None] * tables[dim][None]
        return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)

    embedder.timestep_embedding = staticmethod(timestep_embedding)


def _detached(fn: Callable[..., Any], decoder: Any) -> Callable[..., Any]:
    """`fn` with results that do not alias the solver's workspaces: certifying a class runs it several times."""

    def call(**given: Any) -> tuple[Tensor, ...]:
        owned = {buffer.untyped_storage().data_ptr() for buffer in (decoder.cnn_cache_buffer, decoder.att_cache_buffer)}
        results = fn(**given)
        return tuple(out.clone() if out.untyped_storage().data_ptr() in owned else out for out in results)

    return call


class Sized(Subject):
    sized = True


class StepReplay(Subject):
    """Graphs at the step clock."""

    def install(self) -> None:
        flow = self.token2wav.flow
        _resident_frequencies(self.token2wav.cache[3].device)
        for module, name in ((flow.decoder.estimator, "solver step"), (flow.encoder, "encoder")):
            module.forward_chunk = self._hand(module.forward_chunk, name)


class SizedStepReplay(StepReplay):
    sized = True


class StepWrapper(Subject):
    """The solver of vllm-omni 0.30.0 around the vendor's estimator, at exact shapes: its Euler loop, and its graphs at
    the step clock, which copy seven inputs in and three results out."""

    def install(self) -> None:
        omni, decoder = vendor.load("batched_token2wav", vendor.VLLM_OMNI), self.token2wav.flow.decoder
        without_vocoder = SimpleNamespace(**{**vars(self.token2wav), "hift": torch.nn.Identity()})
        solver = omni.BatchedToken2Wav(without_vocoder, cfm_graph_config={"enabled": True, "bucket_frames": 0})

        def forward_chunk(
            mu: Tensor, spks: Tensor, cond: Tensor, n_timesteps: int, temperature: float, cnn_cache: Tensor,
            att_cache: Tensor,
        ) -> Any:  # fmt: skip
            return solver._decode_cfm(mu, spks, cond, cnn_cache=cnn_cache, att_cache=att_cache)

        decoder.forward_chunk = forward_chunk


class ChunkReplay(Subject):
    """Graphs at the chunk clock."""

    def install(self) -> None:
        _resident_frequencies(self.token2wav.cache[3].device)
        flow, stream = self.token2wav.flow, self.stream
        if stream is None:
            flow.encoder.forward_chunk = self._hand(flow.encoder.forward_chunk, "encoder")
            flow.decoder.forward_chunk = _detached(self._hand(flow.decoder.forward_chunk, "solver"), flow.decoder)
        else:
            stream.flow = self._hand(stream.plain_flow, "solver")
            stream.conformer[False] = self._hand(stream.plain_conformer[False], "encoder")


class SizedChunkReplay(ChunkReplay):
    sized = True


class Cadence(Subject):
    """The backend, its classes rewritten by the passes of a choice."""

    sized = True
    passes: Choice = None

    def _bind(self) -> Token2WavStream:
        return Token2WavStream(self.token2wav, backend=cadence_fx.cadence, passes=self.passes)

    def install(self) -> None:
        assert self.stream is not None
        self.stream.prime()
        self.stream.warm_up(cadence_fx.warm_up, lambda step, **states: cadence_fx.restore(_compiled(step), **states))
        self.reset = self.stream.reset  # type: ignore[method-assign]  # from the host too, and into the carries
        self.stream.flow = self._program(self.stream.flow)
        self.stream.conformer[False] = self._program(self.stream.conformer[False])

    def notes(self) -> list[str]:
        assert self.stream is not None
        rows: list[dict[str, Any]] = cadence_fx.report(_compiled(self.stream.flow))["class_table"]
        return list(rows[-1]["notes"]) if rows else []

    def _program(self, step: Callable[..., Any]) -> Replay:
        program = program_of(step, "bench")
        self.replays.append(Replay(step, program.ledger, lambda: [table for _, table in program.graphs]))
        return self.replays[-1]


class Compiled(Subject):
    """`torch.compile` controls on the per-step estimator and the encoder."""

    options: dict[str, Any] = {}

    def install(self) -> None:
        flow = self.token2wav.flow
        flow.decoder.estimator.forward_chunk = torch.compile(
            flow.decoder.estimator.forward_chunk, dynamic=False, **self.options
        )
        encode = torch.compile(flow.encoder.forward_chunk, dynamic=False, **self.options)
        # Graph trees reuse output memory at the next run, and the encoder's outputs are state: keep copies.
        flow.encoder.forward_chunk = lambda **given: tuple(result.clone() for result in encode(**given))

    def __call__(self, tokens: list[int]) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return super().__call__(tokens)


class ReduceOverhead(Compiled):
    options = {"mode": "reduce-overhead"}


class CudaGraphs(Compiled):
    options = {"backend": "cudagraphs"}


VARIANTS: dict[str, type[Subject]] = {
    "B0": Subject,
    "S": Sized,
    "R": StepReplay,
    "Rc": ChunkReplay,
    "SR": SizedStepReplay,
    "SRc-hand": SizedChunkReplay,
    "SRc": Cadence,
    "reduce-overhead": ReduceOverhead,
    "cudagraphs": CudaGraphs,
    "step-wrapper": StepWrapper,
}


def variant(name: str) -> type[Subject]:
    """The class of a variant. `SRc/plain` replays eager's own kernels, `SRc/a,b` rewrites by these passes alone, and
    `SRc/+a,-b` by the default ones with `a` and without `b`.

    Raises:
        KeyError: there is none of this name.
    """
    base, _, chosen = name.partition("/")
    if not chosen:
        return VARIANTS[base]
    if VARIANTS[base] is not Cadence:
        raise KeyError(name)
    words = [] if chosen == "plain" else chosen.split(",")
    switched = {word[1:]: word[0] == "+" for word in words if word[0] in "+-"}
    return type("Chosen", (Cadence,), {"passes": switched or tuple(words)})


def chunks(sizes: vendor.Sizes, count: int, turn: int) -> Iterator[list[int]]:
    yield from vendor.build_tokens(count, 28, sizes, seed=100 + turn)
