"""The two steps of Token2Wav that carry state up to the mel frames, and the solver's workspaces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from cadence_fx.adapters.token2wav_geometry import Geometry
from cadence_fx.hazard import Hazard, hazard
from cadence_fx.parking import Awake, awake, park


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


class Workspaces:
    """The vendor's four solver buffers, sized to the contract while bound.

    As shipped they hold 16 solver rows of 1,000 frames, whatever is attended. `release` puts buffers of the shipped
    shapes and bytes back; until then the shipped bytes wait on the host, if there were any but zeros. `park` gives
    their memory back between calls; whatever uses them then, other than the compiled step, does it inside `awake`.
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

    @property
    def _buffers(self) -> list[Tensor]:
        return [getattr(owner, name) for owner, name, _, _ in self._shipped]

    def park(self) -> None:
        park(self._buffers)

    def awake(self) -> AbstractContextManager[Awake]:
        return awake(self._buffers)

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

    def __init__(self, step: FlowStep) -> None:
        self._sequences = [block.conv.block for block in step.decoder.estimator.blocks]
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
