"""Moshi and Mimi from their configurations (`config.json` of the language model, and the codec's), and a fork of both.

Every state has one extent. In the fork, convolutions have no past in a stream's first call, and so two.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from cadence_fx.adapters.config import Config
from cadence_fx.adapters.readers import Options, Reader
from cadence_fx.clock import Clock
from cadence_fx.contract import Contract, Region
from cadence_fx.deployment import FRAMES, Deployment, Outside, PlannedCallable
from cadence_fx.errors import ContractFileError
from cadence_fx.footprint import Footprint
from cadence_fx.retention import KeepLast, Pinned, Ring

# Operators of a call, as traced: of each half of the codec, and of each of its codebooks; of the language model, and of
# each layer of its depth transformer for 8 codes; of a layer of any other transformer, in the codec and in the model.
_ENCODE, _ENCODED, _DECODE, _DECODED, _LM, _DEPTH, _CODEC_LAYER, _LM_LAYER = 107, 16, 133, 4, 524, 773, 123, 128
_HEARD = 8  # codebooks that come in with a frame, and that are decoded of one
Past = tuple[str, int, int, int]  # name, channels, frames that are kept, frames a call brings at this place


def _codec(config: Config) -> tuple[int, list[int], int]:
    """Channels of the first layer, strides from samples to the transformers' frames, and the hidden size."""
    filters = config.whole("seanet.n_filters", 64)
    ratios = config.wholes("seanet.ratios", (8, 6, 5, 4), most=16)
    return filters, list(reversed(ratios)), config.whole("seanet.dimension", 512)


def _encoder_pasts(config: Config, frame: int) -> Iterator[Past]:
    """What the encoder's convolutions keep: the effective kernel without the stride (`conv.py` of the vendor)."""
    filters, strides, dimension = _codec(config)
    residual = config.whole("seanet.residual_kernel_size", 3)
    yield "conv_in", config.whole("seanet.channels", 1), config.whole("seanet.kernel_size", 7) - 1, frame
    for number, stride in enumerate(strides):
        yield f"residual.{number}", filters, residual - 1, frame
        yield f"down.{number}", filters, stride, frame
        filters, frame = 2 * filters, frame // stride
    yield "conv_out", filters, config.whole("seanet.last_kernel_size", 3) - 1, frame
    yield "resample", dimension, _resampling(config), frame


def _decoder_pasts(config: Config, frame: int) -> Iterator[Past]:
    """What the decoder's convolutions keep, and the tails of its transposed ones."""
    filters, strides, dimension = _codec(config)
    residual = config.whole("seanet.residual_kernel_size", 3)
    frame //= prod(strides)
    filters *= 2 ** len(strides)
    yield "resample", dimension, _resampling(config), frame
    yield "conv_in", dimension, config.whole("seanet.kernel_size", 7) - 1, frame
    for number, stride in enumerate(reversed(strides)):
        filters, frame = filters // 2, frame * stride
        yield f"up.{number}", filters, stride, frame
        yield f"residual.{number}", filters, residual - 1, frame
    yield "conv_out", filters, config.whole("seanet.last_kernel_size", 3) - 1, frame


def _samples(config: Config) -> int:
    """Samples of a frame of codes: 1,920."""
    return config.times("sample_rate", 24000, "frame_rate", 12.5)


def _resampling(config: Config) -> int:
    """Frames of the transformers in one frame of codes: 2. The resampling convolution keeps as many."""
    samples, hop = _samples(config), prod(_codec(config)[1])
    if samples % hop:
        raise ContractFileError(config.source, f"a frame of {samples} samples is no multiple of {hop}",
                                field="seanet.ratios")  # fmt: skip
    return samples // hop


def _rings(config: Config, name: str) -> tuple[int, tuple[int, ...], int]:
    """Layers, heads and width of the codec's transformers, and how far they look back."""
    layers, heads = config.whole(f"{name}.num_layers", 8), config.whole(f"{name}.num_heads", 8)
    width = config.part(f"{name}.d_model", 512, f"{name}.num_heads", 8)
    return layers, (heads, width), config.whole(f"{name}.context", 250)


def _half(config: Config, name: str, pasts: Iterator[Past], operators: int, *, empty: bool) -> PlannedCallable:
    """Half of the codec. ``empty``: a stream begins without the pasts of its convolutions."""
    regions, weighs = [], {}
    for where, channels, kept, fresh in pasts:
        if kept == 0:
            continue
        # A first call is padded by as much as the past holds, so that it is whole from then on.
        growth, start = (max(fresh, kept), 0) if empty else (fresh, kept)
        policy: KeepLast | Pinned = KeepLast(kept) if empty else Pinned(kept)
        regions.append(
            Region(where, attribute=where, axis=2, clock="frame", growth=growth, start=start, retention=policy)
        )
        weighs[where] = Footprint((1, channels, "frame"), stock=(1, channels, kept))
    layers, (heads, width), context = _rings(config, "transformer")
    regions.append(Region("ring", attribute="layers.*.ring", axis=3, clock="frame", growth=_resampling(config),
                          retention=Ring(context)))  # fmt: skip
    weighs["ring"] = Footprint((2, 1, heads, "frame", width), stock=(2, 1, heads, context, width), instances=layers)
    inputs = {"samples": Footprint((1, 1, _samples(config)))}
    if name == "mimi.decode":
        inputs = {"codes": Footprint((1, _HEARD, 1), "int64")}
    contract = Contract([Clock("frame", 1)], regions, name=name)
    return PlannedCallable(name, contract, regions=weighs, inputs=inputs,
                           operators=None if empty else operators + _CODEC_LAYER * layers)  # fmt: skip


def _dialogue(config: Config, *, said: int, margin: int) -> PlannedCallable:
    """A frame of the language model: its rings, the ring that undoes delays, and the depth transformer within."""
    layers, heads = config.whole("num_layers", 32), config.whole("num_heads", 32)
    width, context = config.part("dim", 4096, "num_heads", 32), config.whole("context", 3000)
    streams = config.whole("n_q", 16) + 1
    depth = config.whole("dep_q", said)
    span = max(config.wholes("delays", (0, 1), least=0, most=256)) + margin
    depth_heads, depth_layers = config.whole("depformer_num_heads", 16), config.whole("depformer_num_layers", 6)
    depth_width = config.part("depformer_dim", 1024, "depformer_num_heads", 16)
    rows = (2, 1, heads)
    regions = [
        Region("ring", attribute="layers.*.ring", axis=3, clock="frame", retention=Ring(context)),
        Region("cache", attribute="cache", axis=2, clock="frame", retention=Ring(span)),
    ]
    weighs = {
        "ring": Footprint((*rows, "frame", width), "bfloat16", stock=(*rows, context, width), instances=layers),
        "cache": Footprint((1, streams, "frame"), "int64", stock=(1, streams, span)),
    }
    ring = Footprint((2, 1, depth_heads, FRAMES, depth_width), "bfloat16",
                     stock=(2, 1, depth_heads, depth, depth_width), instances=depth_layers)  # fmt: skip
    return PlannedCallable(
        "lm.step",
        Contract([Clock("frame", 1)], regions, name="lm.step"),
        regions=weighs,
        inputs={"codes": Footprint((1, _HEARD, 1), "int64")},
        operators=_LM + _LM_LAYER * layers + _DEPTH * depth_layers if depth == 8 else None,
        outside=(Outside("depth_ring", stride=0, start=depth, bound=depth, footprint=ring, shared=True),),
    )


def _deployment(name: str, config: Config, *, said: int, margin: int, empty: bool) -> Deployment:
    samples = _samples(config)
    return Deployment(
        name,
        (
            _half(config, "mimi.encode", _encoder_pasts(config, samples), _ENCODE + _ENCODED * _HEARD, empty=empty),
            _half(config, "mimi.decode", _decoder_pasts(config, samples), _DECODE + _DECODED * _HEARD, empty=empty),
            _dialogue(config, said=said, margin=margin),
        ),
    )


def _read(config: Config, options: Options) -> Deployment:
    return _deployment("moshi", config, said=8, margin=2, empty=False)


def _read_fork(config: Config, options: Options) -> Deployment:
    return _deployment("personaplex", config, said=16, margin=3, empty=True)


READER = Reader("Moshi and its codec Mimi, from config.json and the codec's", {}, _read)
FORK = Reader("PersonaPlex, from config.json and the codec's", {}, _read_fork)
