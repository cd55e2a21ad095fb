"""Moshi's codec, Mimi, as `moshi` 0.2.13 publishes it.

A frame is 80 ms: 1,920 samples in or out, two frames of the transformers, one of codes. The vendor keeps each layer's
state in an object on the layer, `_streaming_state`, writes it in place and never changes a shape, so every call is one
signature. Two callables are declared here, in the place of the four CUDA graphs that the vendor captures by hand and
of what runs eager between them:

* `EncodeStep`: samples to codes, through convolutions with a past each, a transformer with a ring of keys and values in
  each layer, and the quantizer;
* `DecodeStep`: codes to samples, the same way back, through transposed convolutions with a tail each.

Three habits of the released code decide the declarations. A ring holds exactly as many frames as attention looks back,
and a call's two frames overwrite the two oldest *before* attention, so the first of them sees one frame less; a ring
that is larger would give other bytes, and the ring is declared as it is. Masks of which streams of a batch advance are
tensors on every layer, which users write and steps only read. And one tensor, which tells whether a padding that
repeats the first frame is still to come, is made anew by each call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from cadence_fx.adapters.base import Binding, Replaced, call, compiler
from cadence_fx.adapters.moshi_state import (
    MOSHI,
    Field,
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
)
from cadence_fx.clock import Clock
from cadence_fx.contract import Contract
from cadence_fx.errors import ContractError

__all__ = ["ADAPTER", "DecodeStep", "EncodeStep", "MimiStream"]


class Step(nn.Module):
    """A half of the codec, for `batch` streams and `codebooks` codes a frame."""

    parts: tuple[str, ...] = ()  # the attributes of the vendor's model that hold the state of this half
    method = ""  # the vendor's

    def __init__(self, mimi: Any, batch: int, codebooks: int) -> None:
        super().__init__()
        self.mimi, self.batch, self.codebooks, self.placed = mimi, batch, codebooks, placed(mimi)
        self._layers = layers_of(*(getattr(mimi, part) for part in self.parts))
        self._uncompiled = uncompiled(mimi)

    @property
    def transformer(self) -> Any:
        """The one of this half."""
        return getattr(self.mimi, self.parts[1]).transformer

    @property
    def device(self) -> torch.device:
        """Where the codec is."""
        return next(self.mimi.parameters()).device  # type: ignore[no-any-return]

    @property
    def fields(self) -> Callable[[Any], Iterable[Field]]:
        """What a layer keeps, as `regions` has it."""
        return fields_of(self.batch)

    def contract(self) -> Contract:
        """One clock, at the rate of codes; every state has one extent."""
        mimi = self.mimi
        each = round(mimi.encoder_frame_rate / mimi.frame_rate)  # frames of the transformers in one of codes
        found = (regions(getattr(mimi, part), f"mimi.{part}", self.fields, each) for part in self.parts)
        return Contract([Clock("frame", 1)], list(chain.from_iterable(found)))

    @property
    def given(self) -> tuple[int, ...]:
        """The shape of a call's argument."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of a call's argument."""
        return self.placed[0]

    def refuses(self, given: Tensor) -> str | None:
        """Why an argument is not that of a declared frame, if it is not."""
        if given.shape != self.given:
            return "undeclared size"
        return None if given.dtype == self.dtype else "undeclared dtype"

    def example(self) -> Tensor:
        """A random argument of a call."""
        raise NotImplementedError

    def streams(self) -> bool:
        """Whether every layer of this half has a state: a layer may be detached from its model's streams."""
        return all(layer._streaming_state is not None for layer in self._layers)


class EncodeStep(Step):
    """Samples (batch, 1, 1920) to codes (batch, codebooks, 1) int64, by the vendor's own modules."""

    parts = ("encoder", "encoder_transformer", "downsample")
    method = "encode"

    @property
    def given(self) -> tuple[int, ...]:
        return self.batch, self.mimi.channels, round(self.mimi.sample_rate / self.mimi.frame_rate)

    def example(self) -> Tensor:
        return torch.randn(self.given, generator=_drawn())

    def forward(self, samples: Tensor) -> Tensor:
        count_from_zero(self.transformer)
        with self._uncompiled():
            (hidden,) = self.mimi.encoder_transformer(self.mimi.encoder(samples))
            codes: Tensor = self.mimi.quantizer.encode(self.mimi.downsample(hidden))
        return codes


class DecodeStep(Step):
    """Codes (batch, codebooks, 1) int64 to samples (batch, 1, 1920), by the vendor's own modules."""

    parts = ("decoder", "decoder_transformer", "upsample")
    method = "decode"

    @property
    def dtype(self) -> torch.dtype:
        return torch.int64

    @property
    def given(self) -> tuple[int, ...]:
        return self.batch, self.codebooks, 1

    def example(self) -> Tensor:
        return torch.randint(self.mimi.cardinality, self.given, generator=_drawn())

    def forward(self, codes: Tensor) -> Tensor:
        count_from_zero(self.transformer)
        with self._uncompiled():
            (hidden,) = self.mimi.decoder_transformer(self.mimi.upsample(self.mimi.quantizer.decode(codes)))
            samples: Tensor = self.mimi.decoder(hidden)
        return samples


def _drawn() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class MimiStream(Binding):
    """A vendor's `MimiModel` whose `encode` and `decode` of one frame are compiled steps; used as before.

    While bound, `encode`, `decode` and `encode_to_latent` are methods of this object, and the graphs that the vendor
    captures by hand are off: they hold addresses of states that the steps may move. `streaming`, `reset_streaming`,
    `set_exec_mask` and `get_streaming_state` are the vendor's code on the vendor's state objects, and
    `set_streaming_state` may exchange these between calls. All other calls (whole recordings, several frames at once,
    `encode_to_latent`) run the vendor's code, counted in `eager_calls`. `unbind` undoes all of it.

    Steps are made for each number of streams in a batch and of codebooks in use, when it is first met.

    Args:
        mimi: the vendor's object.
        backend: what `torch.compile` gets for the steps, "cadence" for this project's; None runs them uncompiled.
        passes: which passes rewrite the steps, as `options={"passes": ...}` has it; None for the default ones.

    Raises:
        ContractError: the object is of another class or version, is bound already, or is built in another way than
            the released codec.
    """

    FAMILY = MOSHI
    STEPS: tuple[type[Step], type[Step]] = (EncodeStep, DecodeStep)

    def __init__(self, mimi: Any, *, backend: str | Callable[..., Any] | None = None, passes: Any = None) -> None:
        check(mimi, "MimiModel", self.FAMILY)
        both = mimi.encoder_transformer is not None and mimi.decoder_transformer is not None
        if not both or mimi.resample_method != "conv" or mimi.encoder_frame_rate == mimi.frame_rate:
            raise ContractError("only a codec with two transformers and learnt resampling is declared", field="mimi")
        check_attention(mimi, "MimiModel")
        self.mimi = mimi
        self.eager_calls: Counter[str] = Counter()
        self.plain: dict[tuple[type[Step], int, int], Step] = {}
        self.steps: dict[Step, Callable[..., Any]] = {}
        self._compiled = compiler(backend, passes, dynamic=False)
        self._tables: dict[Any, Tensor] = {}  # of codebooks, where the steps read them
        self._graphs, self._uncompiled, self._replaced = HandWrittenGraphs(), uncompiled(mimi), Replaced()
        self._replaced.put(mimi, encode=self._encode, decode=self._decode, encode_to_latent=self._encode_to_latent)

    @torch.no_grad()
    def warm_up(self, verb: Callable[..., Any], batch: int = 1) -> list[Any]:
        """`verb(step, argument)` for both steps, as `cadence_fx.warm_up` asks for; returns what each returned.

        It takes the states of the stream that is open, and its batch, or opens one of `batch` streams meanwhile.
        """
        mimi = self.mimi
        with self._meanwhile(), nullcontext() if mimi.is_streaming else mimi.streaming(batch):
            state, results = mimi._streaming_state, []
            self._graphs.turn_off(state)
            for kind in self.STEPS:
                results.append(self._warm_up(verb, kind, state.batch_size))
        return results

    def _warm_up(self, verb: Callable[..., Any], kind: type[Step], batch: int) -> Any:
        step = self._step(kind, batch, self.mimi.num_codebooks)
        self._make_tables()
        return verb(self.steps[step], step.example().to(dtype=step.dtype, device=step.device))

    def _step(self, kind: type[Step], batch: int, codebooks: int) -> Step:
        """The plain step; the compiled one is in `steps`. Those of weights of another dtype or device are given up."""
        key = kind, batch, codebooks
        step = self.plain.get(key)
        if step is None or step.placed != placed(self.mimi):
            self.steps.pop(step, None)  # type: ignore[arg-type]
            step = self.plain[key] = kind(self.mimi, batch, codebooks)
            self.steps[step] = self._compiled(step, step.contract())
        return step

    @property
    def _codebooks(self) -> list[Any]:
        both = (self.mimi.quantizer.rvq_first, self.mimi.quantizer.rvq_rest)
        return [layer._codebook for each in both for layer in each.vq.layers[: each.n_q]]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _make_tables(self) -> None:
        """Every table that the steps read, which the vendor makes where it is first read, in the middle of a call; one
        that is made anew goes where the last one was."""
        for codebook in self._codebooks:
            if codebook._embedding is not None and self._tables.get(codebook) is codebook._embedding:
                continue
            table = codebook.embedding
            kept = self._tables.setdefault(codebook, table)
            if kept.is_inference() or (kept.dtype, kept.device) != (table.dtype, table.device):
                self._tables[codebook] = table
            elif kept is not table:
                codebook._embedding = kept.copy_(table)

    @contextmanager
    def _meanwhile(self) -> Iterator[None]:
        """Tables that are made meanwhile are the vendor's to make, of the weights that there are when it first does."""
        fresh = [codebook for codebook in self._codebooks if codebook._embedding is None]
        try:
            yield
        finally:
            for codebook in fresh:
                codebook._embedding = None

    def _encode(self, x: Tensor) -> Tensor:
        """In place of `MimiModel.encode`: samples (batch, 1, n) to codes (batch, codebooks, n / 1920)."""
        return self._call(self.STEPS[0], x)

    def _decode(self, codes: Tensor) -> Tensor:
        """In place of `MimiModel.decode`: codes (batch, codebooks, n) to samples (batch, 1, 1920 * n)."""
        return self._call(self.STEPS[1], codes)

    def _encode_to_latent(self, x: Tensor, quantize: bool = True) -> Tensor:
        """In place of `MimiModel.encode_to_latent`: the vendor's code, without its graphs."""
        self._graphs.turn_off(self.mimi._streaming_state)
        self.eager_calls["latent"] += 1
        with self._uncompiled():
            return type(self.mimi).encode_to_latent(self.mimi, x, quantize)  # type: ignore[no-any-return]

    def _call(self, kind: type[Step], given: Tensor) -> Tensor:
        state = self.mimi._streaming_state
        self._graphs.turn_off(state)
        step = "not streaming" if state is None else self._serving(kind, state, given)
        if isinstance(step, str):
            self.eager_calls[step] += 1
            return self._shipped(kind, given)
        self._make_tables()
        result: Tensor = call(self._run, (step, given), lambda: self._shipped(kind, given), self.eager_calls)
        return result

    def _run(self, step: Step, given: Tensor) -> Tensor:
        with counted(counters(step.transformer)):
            return self.steps[step](canonical(given))  # type: ignore[no-any-return]

    def _shipped(self, kind: type[Step], given: Tensor) -> Tensor:
        """The vendor's code."""
        with self._uncompiled():
            return getattr(type(self.mimi), kind.method)(self.mimi, given)  # type: ignore[no-any-return]

    def _serving(self, kind: type[Step], state: Any, given: Tensor) -> Step | str:
        """The step that a call of an open stream is, or why it is none."""
        step = self._step(kind, state.batch_size, self.mimi.num_codebooks)
        return step.refuses(given) or (step if step.streams() else "detached layers")

    def compiled(self) -> dict[str, Callable[..., Any]]:
        return {name: self.steps[step] for name, step in self._named().items()}

    def contracts(self) -> dict[str, Contract]:
        return {name: step.contract() for name, step in self._named().items()}

    def _named(self) -> dict[str, Any]:
        named = self.plain.items()
        return {f"{kind.__name__}[batch={batch}, codebooks={n}]": step for (kind, batch, n), step in named}

    def unbind(self) -> None:
        """Gives the object its own methods back, as it was. A stream that is open goes on where it is."""
        self._replaced.release()
        self._graphs.release()
        self.plain, self.steps, self._tables = {}, {}, {}


class _Mimi:
    """Adapter of the steps; the vendor's own classes have no forward of one frame."""

    classes = tuple(f"{kind.__module__}.{kind.__name__}" for kind in (EncodeStep, DecodeStep))

    def contract(self, module: nn.Module) -> Contract | None:
        return module.contract() if isinstance(module, Step) else None


ADAPTER = _Mimi()


def released() -> dict[str, Contract]:
    """The contracts of the released codec for one stream, from the vendor's modules without memory behind them."""
    loaders = import_module("moshi.models.loaders")
    with torch.device("meta"):
        mimi = loaders.get_mimi(None, device="meta", num_codebooks=8)
    return {kind.__name__: kind(mimi, 1, mimi.num_codebooks).contract() for kind in (EncodeStep, DecodeStep)}
