"""Token2Wav from its `flow.yaml`: what a deployment of it reaches and weighs, before there is any module.

The vocoder is not in that file: it is made with its own defaults, which are the released values.
"""

from __future__ import annotations

from cadence_fx.adapters.config import Config, chosen
from cadence_fx.adapters.readers import Options, Reader
from cadence_fx.adapters.token2wav_geometry import Geometry, Reach
from cadence_fx.deployment import FRAMES, Deployment, Outside, PlannedCallable
from cadence_fx.errors import ContractError
from cadence_fx.footprint import Footprint

# Literals of the vendor's code: solver rows and frames of its workspaces, and the lengths of its tables.
_STOCK_STEPS, _STOCK_FRAMES, _NOISE_FRAMES, _POSITIONS = 16, 1000, 30000, 9999
_OVERLAP = 8  # mel frames that the vocoder keeps of the chunk before
_SAMPLES = 480  # of audio in a mel frame
_CFG = 2  # rows of a batch with classifier-free guidance
# Operators of one call, as traced: the flow decoder's, and in a solver step, and in a layer of that; the encoder's, and
# in a block; the vocoders'.
_FLOW, _STEP, _LAYER, _ENCODER, _BLOCK, _VOCODER, _BOUNDED, _FINAL = 25, 80, 122, 84, 97, 1243, 5622, 1397
# The causal vocoder, as released.
_REACH = Reach(block=16, f0_left=8, f0_right=3, history=31, right=5, samples=_SAMPLES, harmonics=9)
OPTIONS: dict[str, int | str | tuple[int, ...]] = {
    "prompt": 302, "steps": 10, "hop": 25, "retained": 100, "flush": (), "package": "stepaudio2",
}  # fmt: skip
_PACKAGES = ("stepaudio2", "minicpmo-utils")


def geometry(config: Config, options: Options) -> Geometry:
    """The clocks of a deployment."""
    package = chosen("package", options["package"], _PACKAGES)
    found = Geometry(
        prompt=options["prompt"],
        steps=options["steps"],
        rate=config.whole("flow.encoder.up_stride", 2),
        lookahead=config.whole("flow.encoder.pre_lookahead_len", 3),
        retained=options["retained"],
        hop=options["hop"],
        flush=options["flush"],
        two_rates=package == "minicpmo-utils",
    )
    if found.refusal is not None:  # served all the same, with a conformer that runs eager
        what = f"plan a prompt of at least the {found.retained} frames that are retained: {found.refusal.detail}"
        raise ContractError(what, field="prompt")
    return found


def flow(config: Config, numbers: Geometry) -> PlannedCallable:
    """The flow decoder: two carries, four workspaces, and the noise it starts from."""
    depth = config.whole("flow.decoder.estimator.depth", 16)
    heads = config.whole("flow.decoder.estimator.num_heads", 8)
    keys = 2 * config.whole("flow.decoder.estimator.head_dim", 64)
    channels = 2 * config.whole("flow.decoder.estimator.hidden_size", 512)
    mel = config.whole("flow.output_size", 80)
    contract = numbers.flow_contract()
    frames, window = contract.envelope("workspace"), numbers.window
    rows, stock = (depth, _CFG, heads), _STOCK_STEPS
    regions = {
        "att_cache": Footprint(("solver", *rows, "frame", keys), stock=(stock, *rows, window, keys)),
        "cnn_cache": Footprint(("solver", depth, _CFG, channels, "frame"), stock=(stock, depth, _CFG, channels, 2)),
        "workspace": Footprint(("solver", *rows, "frame", keys), stock=(stock, *rows, _STOCK_FRAMES, keys)),
        "step_workspace": Footprint((*rows, "frame", keys), stock=(*rows, _STOCK_FRAMES, keys)),
        "cnn_workspace": Footprint(("solver", depth, _CFG, channels, "frame"),
                                   stock=(stock, depth, _CFG, channels, 2)),
        "cnn_step_workspace": Footprint((depth, _CFG, channels, "frame"), stock=(depth, _CFG, channels, 2)),
    }  # fmt: skip
    noise = Footprint((1, mel, FRAMES), stock=(1, mel, _NOISE_FRAMES))
    return PlannedCallable(
        "token2wav.flow",
        contract,
        regions=regions,
        inputs={name: Footprint((1, mel, "frame")) for name in ("mu", "cond")} | {"spks": Footprint((1, mel))},
        outside=(Outside("noise", stride=0, start=frames, bound=frames, footprint=noise, shared=True),),
        operators=_FLOW + numbers.steps * (_STEP + _LAYER * depth),
    )


def conformer(config: Config, numbers: Geometry, *, trimmed: bool) -> PlannedCallable:
    """The encoder: caches at two rates, which one vendor's service trims and another's does not."""
    blocks = config.whole("flow.encoder.num_blocks", 6)
    up_blocks = config.whole("flow.encoder.num_up_blocks", 4)
    heads = config.whole("flow.encoder.attention_heads", 8)
    width = config.whole("flow.encoder.output_size", 512)
    keys = 2 * config.part("flow.encoder.output_size", 512, "flow.encoder.attention_heads", 8)
    window = numbers.window
    contract = numbers.conformer_contract()
    longest = 2 * numbers.flow_contract().envelope("workspace") - 1
    table = Footprint((1, FRAMES, width), stock=(1, _POSITIONS, width))
    positions = Outside("positions", stride=0, start=longest, bound=longest, footprint=table, shared=True)
    operators = _ENCODER + _BLOCK * (blocks + up_blocks)
    if not trimmed:
        tokens, frames = numbers.prompt // numbers.rate, numbers.prompt
        grown = (
            Outside("token_cache", stride=numbers.hop, start=tokens, bound=None,
                    footprint=Footprint((blocks, 1, heads, FRAMES, keys))),
            Outside("mel_cache", stride=numbers.hop * numbers.rate, start=frames, bound=None,
                    footprint=Footprint((up_blocks, 1, heads, FRAMES, keys))),
        )  # fmt: skip
        return PlannedCallable("token2wav.conformer", outside=(*grown, positions), operators=operators)
    return PlannedCallable(
        "token2wav.conformer",
        contract,
        regions={
            "cnn_cache": Footprint((1, width, "token"), stock=(1, width, 6)),
            # As shipped the two caches are one, at the rate of frames.
            "token_cache": Footprint((blocks, 1, heads, "token", keys), stock=(blocks, 1, heads, window, keys)),
            "mel_cache": Footprint((up_blocks, 1, heads, "frame", keys), stock=(up_blocks, 1, heads, window, keys)),
        },
        inputs={"token": Footprint((1, "token"), "int32")},
        outside=(positions,),
        operators=operators,
    )


def vocoder(config: Config, numbers: Geometry) -> tuple[PlannedCallable, ...]:
    """The vocoder, in a turn's first call and in all others, with what is kept between them."""
    mel, fresh = config.whole("flow.output_size", 80), numbers.hop * numbers.rate
    samples = _OVERLAP * _SAMPLES

    def kept(name: str, rows: tuple[int, ...], per_frame: int) -> Outside:
        bound = _OVERLAP * per_frame
        return Outside(name, stride=fresh * per_frame, start=0, bound=bound,
                       footprint=Footprint((*rows, FRAMES), stock=(*rows, bound)))  # fmt: skip

    tails = (kept("mel", (1, mel), 1), kept("source", (1, 1), _SAMPLES), kept("speech", (1,), _SAMPLES))
    first, later = (
        PlannedCallable(
            contract.name or "",
            contract,
            inputs={"mel": Footprint((1, mel, "frame")), "cache_source": Footprint((1, 1, source))},
            outside=outside,
            operators=_VOCODER,
        )
        for contract, source, outside in (
            (numbers.vocoder_contract(0), 0, ()),
            (numbers.vocoder_contract(_OVERLAP), samples, tails),
        )
    )
    return first, later


def bounded_vocoder(config: Config, numbers: Geometry) -> tuple[PlannedCallable, ...]:
    """The causal vocoder of the other package: a turn's first call, all others, and what is left at a stream's end."""
    mel, wide = config.whole("flow.output_size", 80), _REACH.harmonics
    phase = Footprint((1, 1, wide), "float64")
    caches = {
        "mel_cache": Footprint((1, mel, "frame"), stock=(1, mel, _REACH.mel)),
        "source": Footprint((1, 1, "frame"), stock=(1, 1, _REACH.source * _REACH.samples)),
        "phase": Footprint((1, 1, "frame"), "float64", stock=(1, 1, wide)),
    }
    fresh = {"mel": Footprint((1, mel, "frame")), "noise": Footprint((1, "frame", wide))}
    empty = {"mel_cache": Footprint((1, mel, 0)), "source": Footprint((1, 1, 0)), "phase": phase}
    held = {
        "mel_cache": Footprint((1, mel, "held")),
        "source": Footprint((1, 1, "held")),
        "phase": phase,
        "noise": Footprint((1, _REACH.f0_right * _REACH.samples, wide)),
    }
    first, later = (_REACH.contract(numbers, joined=joined) for joined in (False, True))
    final = _REACH.final_contract(numbers)
    return (
        PlannedCallable(first.name or "", first, inputs=fresh | empty, operators=_BOUNDED),
        PlannedCallable(later.name or "", later, regions=caches, inputs=fresh, operators=_BOUNDED),
        PlannedCallable(final.name or "", final, inputs=held, operators=_FINAL),
    )


def callables(config: Config, options: Options, *, trimmed: bool = True) -> tuple[PlannedCallable, ...]:
    """All callables of the decoder."""
    numbers = geometry(config, options)
    voices = (bounded_vocoder if numbers.two_rates else vocoder)(config, numbers)
    return (conformer(config, numbers, trimmed=trimmed), flow(config, numbers), *voices)


def _read(config: Config, options: Options) -> Deployment:
    return Deployment("token2wav", callables(config, options))


def _read_untrimmed(config: Config, options: Options) -> Deployment:
    note = "its service never trims the conformer's caches, which end with the response"
    return Deployment("lychee-fd", callables(config, options, trimmed=False), notes=(note,))


READER = Reader("Token2Wav of MiniCPM-o 4.5 and Step-Audio 2, from flow.yaml", OPTIONS, _read)
UNTRIMMED = Reader("Token2Wav as Lychee-FD serves it, from flow.yaml", OPTIONS, _read_untrimmed)
