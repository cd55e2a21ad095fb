"""Freeze-Omni from `model.json` of its codec and `server.json`: the windows that the codec's generator is given.

The generator keeps nothing: each window is computed again with some tokens on either side, fewer in a sentence's first.
"""

from __future__ import annotations

from math import prod

from cadence_fx.adapters.config import Config
from cadence_fx.adapters.readers import Options, Reader
from cadence_fx.deployment import FRAMES, Deployment, Outside, PlannedCallable
from cadence_fx.footprint import Footprint


def _windows(name: str, chunk: int, overlap: int, width: int) -> PlannedCallable:
    bound = overlap + chunk + overlap
    kept = Footprint((1, width, FRAMES), stock=(1, width, bound))
    window = Outside("window", stride=chunk, start=chunk + overlap, bound=bound, footprint=kept)
    return PlannedCallable(name, outside=(window,))


def _read(config: Config, options: Options) -> Deployment:
    first = config.whole("decoder_first_chunk_size", 20)
    later = config.whole("decoder_chunk_size", 40)
    overlap = config.whole("decoder_chunk_overlap_size", 10)
    width = config.whole("upsample_initial_channel", 512)
    samples = prod(config.wholes("upsample_rates", (8, 5, 5, 3)))
    longest = overlap + later + overlap - 1
    tail = Outside("window", stride=1, start=longest, bound=longest, footprint=Footprint((1, width, FRAMES)),
                   traffic=f"the 1 to {longest} tokens that are left when a sentence ends")  # fmt: skip
    chunk, layers = options["encoder_chunk"], options["encoder_layers"]
    bound = chunk * options["encoder_left_chunks"]
    rows = (layers, 2, 1, options["encoder_heads"])
    keys = Outside("kv_cache", stride=chunk, start=0, bound=bound,
                   footprint=Footprint((*rows, FRAMES, 64), stock=(*rows, bound, 64)))  # fmt: skip
    return Deployment(
        "freeze-omni",
        (
            _windows("generator.first_sentence", first, overlap, width),
            _windows("generator", later, overlap, width),
            PlannedCallable("generator.tail", outside=(tail,)),
            PlannedCallable("audio_encoder", outside=(keys,)),
        ),
        notes=(f"a token is {samples} samples; a window of {overlap + later + overlap} tokens gives {later} of them",),
    )


READER = Reader(
    "Freeze-Omni, from the codec's model.json and server.json",
    {"encoder_chunk": 4, "encoder_left_chunks": 16, "encoder_layers": 24, "encoder_heads": 16},
    _read,
)
