"""The two steps of Token2Wav that carry state up to the mel frames, and the solver's workspaces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from cadence_fx.adapters.base import Compile
from cadence_fx.adapters.token2wav_geometry import Geometry
from cadence_fx.contract import Contract
from cadence_fx.errors import ContractError
from cadence_fx.hazard import Hazard, hazard
from cadence_fx.parking import Awake, awake, park

State = dict[str, Tensor]


def trim(cache: Tensor, axis: int, prompt: int, retained: int) -> Tensor:
    """The vendor's retention: the first `prompt` and the last `retained` frames, once there are more than both.

    Spelled without the vendor's branch, so that one traced graph serves the filling window and the full one.
    """
    start = max(prompt, cache.shape[axis] - retained)
    return torch.cat([cache.narrow(axis, 0, prompt), cache.narrow(axis, start, cache.shape[axis] - start)], dim=axis)


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


# Mel frames of the chunks that the vendor captures graphs for (`_init_cuda_graph_chunk`) -> the most cached ones.
_VENDOR_GRAPHS = {30: 500, 48: 500, 96: 1000}


def vendor_graphs(step: FlowStep) -> Hazard:
    """Whether the vendor's own CUDA graphs (`scatter_cuda_graph`) can ever serve a declared call.

    They pad: a chunk of a captured size is computed with a cache filled up with zeros, under a mask.
    """
    estimator: Any = step.decoder.estimator
    captured = dict(getattr(estimator, "max_size_chunk", None) or _VENDOR_GRAPHS)
    declared = step.geometry.chunk_frames
    served = [frames for frames in declared if captured.get(frames, -1) >= step.prompt]
    code = type(estimator).forward_chunk.__code__
    line = f"{code.co_filename}:{code.co_firstlineno}"
    sizes, calls = (", ".join(map(str, sorted(given))) for given in (captured, declared))
    what = f"the vendor's CUDA graphs are for chunks of {sizes} frames; declared calls have {calls}"
    if not served:
        return hazard("vendor_graphs", f"{what}: they never fire", line)
    which = f"{what}: they can fire for {', '.join(map(str, served))}, padded with zeros"
    if not getattr(estimator, "use_cuda_graph", False):
        return hazard("vendor_graphs", f"{which}, and are switched off", line)
    return hazard("own_graph", f"{which}, and are switched on: call scatter_cuda_graph(False)", line)


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
        if self.geometry.two_rates:
            token_cache, mel_cache = self.unpack(packed)
            token_cache = trim(token_cache, 3, self.prompt // self.rate, self.retained // self.rate)
            mel_cache = trim(mel_cache, 3, self.prompt, self.retained)
        else:
            token_cache, mel_cache = self.unpack(trim(packed, 3, self.prompt, self.retained))
        return self.projection(h).transpose(1, 2).contiguous(), cnn_cache, token_cache, mel_cache

    def unpack(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """The two caches that the encoder reads out of the vendor's packed one; the rest of it is never read."""
        tokens = packed.shape[3] // self.rate
        return packed[: self.blocks, :, :, :tokens].contiguous(), packed[self.blocks :].clone()


class PackedConformer(nn.Module):
    """The streaming encoder by itself, (mu, cnn_cache, att_cache) of one call: for a conformer that is not captured.

    att_cache (blocks + up blocks, 1, heads, L, 2 * head_dim) as the vendor packs it. What is kept of it is left to the
    vendor's `stream`.
    """

    def __init__(self, flow: Any, *, last_chunk: bool = False) -> None:
        super().__init__()
        self.embedding, self.encoder, self.projection = flow.input_embedding, flow.encoder, flow.encoder_proj
        self.last_chunk = last_chunk

    def forward(self, token: Tensor, cnn_cache: Tensor, att_cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, cnn_cache, att_cache = self.encoder.forward_chunk(
            xs=self.embedding(token), last_chunk=self.last_chunk, cnn_cache=cnn_cache, att_cache=att_cache
        )
        return self.projection(h).transpose(1, 2).contiguous(), cnn_cache, att_cache


class StepSet:
    """The steps of one prompt length and number of solver steps, plain and compiled, and the names of their states.

    Where the planner refuses the conformer (`refusal`), it runs plain on the vendor's packed cache.
    """

    SOLVER = ("estimator_cnn_cache", "estimator_att_cache")

    def __init__(self, flow: Any, geometry: Geometry, compiled: Compile) -> None:
        self.geometry, self.refusal = geometry, geometry.refusal
        self.plain_flow = FlowStep(flow.decoder, geometry)
        self.flow = compiled(self.plain_flow, geometry.flow_contract())
        self.state: tuple[str, ...]
        self.plain_conformer: dict[bool, nn.Module]
        self.conformer: dict[bool, Callable[..., Any]]
        if self.refusal is not None:
            self.state = ("conformer_cnn_cache", "conformer_att_cache", *self.SOLVER)
            self.plain_conformer = {last: PackedConformer(flow, last_chunk=last) for last in (False, True)}
            self.conformer = dict(self.plain_conformer)
            return
        self.state = ("conformer_cnn_cache", "conformer_token_cache", "conformer_att_cache", *self.SOLVER)
        self.plain_conformer = {last: ConformerStep(flow, geometry, last_chunk=last) for last in (False, True)}
        self.conformer = {
            last: compiled(step, geometry.conformer_contract(last)) for last, step in self.plain_conformer.items()
        }

    def contracts(self) -> dict[str, Contract]:
        """Of the compiled steps; the conformer of last calls only when it is declared."""
        found = [self.geometry.flow_contract()]
        if self.refusal is None:
            found += [
                self.geometry.conformer_contract(last) for last in ((False, True) if self.geometry.flush else (False,))
            ]
        return {self.name(contract): contract for contract in found}

    def compiled(self) -> dict[str, Callable[..., Any]]:
        """The compiled steps, by the names of their contracts."""
        steps = [self.flow, self.conformer[False], self.conformer[True]]
        return dict(zip(self.contracts(), steps, strict=False))

    def name(self, contract: Contract) -> str:
        """What a contract, or a refused one, is called beside those of other prompts."""
        return f"{contract.name}[prompt={self.geometry.prompt}, steps={self.geometry.steps}]"

    def declared(self, cache: State) -> State:
        """A cache as the vendor's code makes it, in tensors of its own under this set's names; one that was made while
        bound is returned as it is."""
        state = dict(cache)
        if "conformer_token_cache" in self.state and "conformer_token_cache" not in state:
            conformer = self.plain_conformer[False]
            assert isinstance(conformer, ConformerStep)
            state["conformer_token_cache"], state["conformer_att_cache"] = conformer.unpack(
                cache["conformer_att_cache"]
            )
        steps = self.geometry.steps
        if state.keys() != set(self.state) or any(state[name].shape[0] < steps for name in self.SOLVER):
            raise ContractError(
                f"this cache is of another prompt, or of fewer than {steps} solver steps: start the stream again",
                field="stream_cache",
            )
        for name in self.SOLVER:
            if state[name].shape[0] > steps:  # rows that the vendor carries and never reads
                state[name] = state[name][:steps].clone(memory_format=torch.contiguous_format)
        return {name: state[name] for name in self.state}


def shipped(cache: State, rate: int, rows: int) -> State:
    """What the vendor's code goes on from: `StepSet.declared`, undone, with as many solver rows as its buffers have."""
    state = dict(cache)
    if (tokens := state.pop("conformer_token_cache", None)) is not None:
        state["conformer_att_cache"] = torch.cat([tokens.repeat(1, 1, 1, rate, 1), state["conformer_att_cache"]])
    for name in StepSet.SOLVER:
        missing = (rows - state[name].shape[0], *state[name].shape[1:])
        state[name] = torch.cat([state[name], state[name].new_zeros(missing)])
    return state


class Workspaces:
    """The vendor's four solver buffers, sized to the contracts while bound.

    As shipped they hold 16 solver rows of 1,000 frames, whatever is attended. `fit` sizes them for a set of steps, and
    never makes them smaller; `release` puts buffers of the shipped shapes and bytes back; until then the shipped bytes
    wait on the host, if there were any but zeros. `park` gives their memory back between calls; whatever uses them
    then, other than the compiled step, does it inside `awake`.
    """

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._shipped: list[tuple[nn.Module, str, torch.Size, Tensor | None]] = []
        self._fitted, self._parked = (0, 0), False

    @property
    def rows(self) -> int:
        """Solver rows of the buffers as shipped."""
        return next((shape[0] for _, _, shape, _ in self._shipped), self._decoder.att_cache_buffer.shape[0])

    @torch.inference_mode(False)
    def fit(self, geometry: Geometry) -> None:
        """Room for these steps, in tensors that calls in any mode may write."""
        rows, frames = geometry.steps, geometry.flow_contract().envelope("workspace")
        if rows <= self._fitted[0] and frames <= self._fitted[1]:
            return
        self._fitted = rows, frames = max(rows, self._fitted[0]), max(frames, self._fitted[1])
        decoder, estimator, first = self._decoder, self._decoder.estimator, self._decoder.estimator.blocks[0]
        depth, heads, width = len(estimator.blocks), first.attn.num_heads, 2 * first.attn.head_dim
        channels = first.conv.in_channels + first.conv.out_channels
        keep = not self._shipped
        for owner, axis in ((decoder, (rows,)), (estimator, ())):
            self._replace(owner, "att_cache_buffer", (*axis, depth, 2, heads, frames, width), keep)
            self._replace(owner, "cnn_cache_buffer", (*axis, depth, 2, channels, 2), keep)
        if self._parked:
            self.park()

    def _replace(self, owner: nn.Module, name: str, shape: tuple[int, ...], keep: bool) -> None:
        buffer = getattr(owner, name)
        like = buffer.new_empty(0)
        if keep:
            self._shipped.append((owner, name, buffer.shape, buffer.cpu() if bool(buffer.any()) else None))
        setattr(owner, name, None)
        del buffer  # two gigabytes as released: gone before the successor is allocated
        setattr(owner, name, like.new_zeros(shape))

    @property
    def _buffers(self) -> list[Tensor]:
        return [getattr(owner, name) for owner, name, _, _ in self._shipped]

    def park(self) -> None:
        self._parked = True
        park(self._buffers)

    def awake(self) -> AbstractContextManager[Awake]:
        return awake(self._buffers)

    @torch.inference_mode(False)
    def release(self) -> None:
        while self._shipped:
            owner, name, shape, kept = self._shipped.pop()
            like = getattr(owner, name).new_empty(0)
            setattr(owner, name, None)
            setattr(owner, name, like.new_zeros(shape) if kept is None else kept.to(like.device))


class Sliced:
    """The vendor's convolution blocks, which take slices of an `nn.Sequential` in every call, while bound.

    Such a slice is a new module. Dynamo follows how it is made, through all of `nn.Module.__init__`, in each of the
    hundreds of calls of a chunk, which is a quarter of its time; a loop over the same modules computes the same.
    """

    def __init__(self, decoder: Any) -> None:
        self._sequences = [block.conv.block for block in decoder.estimator.blocks]
        self._sequences = [each for each in self._sequences if type(each) is nn.Sequential]
        for each in self._sequences:
            each.__class__ = _Sequence

    def release(self) -> None:
        for each in self._sequences:
            each.__class__ = nn.Sequential


class _Sequence(nn.Sequential):
    def __getitem__(self, index: Any) -> Any:
        modules = list(self._modules.values())
        return functools.partial(_in_turn, modules[index]) if isinstance(index, slice) else modules[index]


def _in_turn(modules: Iterable[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x
