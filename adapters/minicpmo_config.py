"""MiniCPM-o 4.5 from its `config.json` and window settings: backbone, speech-token decoder, and Token2Wav.

The backbone's cache grows by a token and, past the high watermark, is cut to the low one; the speech-token decoder
keeps a window of chunks and computes the older ones again, over as many positions as text and speech happened to have.
"""

from __future__ import annotations

from cadence_fx.adapters import token2wav_config
from cadence_fx.adapters.config import Config
from cadence_fx.adapters.readers import Options, Reader
from cadence_fx.deployment import FRAMES, Deployment, Outside, PlannedCallable
from cadence_fx.errors import ContractFileError
from cadence_fx.footprint import Footprint

_ATTENTION = ("sliding_recompute", "sliding_window", "full_attention")


def _window(config: Config, prefix: str) -> tuple[int, int]:
    high = config.whole(f"{prefix}_window_high_tokens", 8000)
    low = config.whole(f"{prefix}_window_low_tokens", 6000)
    if low > high:
        raise ContractFileError(config.source, f"the low watermark {low} is above the high one, {high}",
                                field=f"{prefix}_window_low_tokens")  # fmt: skip
    return low, high


def backbone(config: Config) -> PlannedCallable:
    """One token of the language model: the window of text, or the one of duplex where it is turned on."""
    layers = config.whole("num_hidden_layers", 36)
    heads = config.whole("num_key_value_heads", 8)
    width = config.whole("head_dim", 128)
    mode = config.choice("sliding_window_mode", "off", ("off", "basic", "context"))
    kept = Footprint((layers, 2, 1, heads, FRAMES, width), "bfloat16")
    if mode == "context":
        units = config.whole("context_max_units", 24)
        cache = Outside("kv_cache", stride=1, start=0, bound=None, footprint=kept,
                        traffic=f"units of any number of tokens, of which {units} are kept")  # fmt: skip
    else:
        low, high = _window(config, "basic" if mode == "basic" else "text")
        cache = Outside("kv_cache", stride=1, start=low, bound=high, drops=True, footprint=kept)
    return PlannedCallable("backbone", outside=(cache,))


def speech_decoder(config: Config) -> PlannedCallable:
    """A chunk of speech tokens. Its window counts chunks; what a chunk holds is up to text and sampling."""
    name = "tts_config"
    layers = config.whole(f"{name}.num_hidden_layers", 20)
    heads = config.whole(f"{name}.num_key_value_heads", 12)
    width = config.part(f"{name}.hidden_size", 768, f"{name}.num_attention_heads", 12)
    attention = config.choice(f"{name}.attention_type", "sliding_recompute", _ATTENTION)
    text = config.whole(f"{name}.streaming_text_chunk_max", 7)
    fewest = config.whole(f"{name}.streaming_text_chunk_min", 3)
    speech = config.whole(f"{name}.s3_stream_chunk_size", 25)
    rows = (layers, 2, 1, heads)
    if attention == "full_attention":
        cache = Outside("kv_cache", stride=1, start=0, bound=None, footprint=Footprint((*rows, FRAMES, width)))
    elif attention == "sliding_window":
        bound = config.whole(f"{name}.streaming_sliding_window_audio_window_size", 300)
        cache = Outside("kv_cache", stride=1, start=0, bound=bound, footprint=Footprint((*rows, FRAMES, width)))
    else:
        chunks = config.whole(f"{name}.window_size", 2)
        again = config.whole(f"{name}.recomputed_chunks", 1)
        cache = Outside(
            "kv_cache", stride=1, start=chunks, bound=chunks,
            footprint=Footprint((*rows, FRAMES, text + speech, width)),
            traffic=f"{again} of {chunks} chunks computed again, each {fewest} to {text} text tokens "
                    f"and up to {speech} of speech",
        )  # fmt: skip
    return PlannedCallable("speech_token_decoder", outside=(cache,))


def _read(config: Config, options: Options) -> Deployment:
    parts = (backbone(config), speech_decoder(config), *token2wav_config.callables(config, options))
    return Deployment("minicpm-o", parts)


READER = Reader(
    "MiniCPM-o 4.5, from config.json, the fields of StreamingWindowConfig and flow.yaml",
    token2wav_config.OPTIONS,
    _read,
)
