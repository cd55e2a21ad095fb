"""The numbers of a Token2Wav deployment, and the contracts that follow from them (paper section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cadence_fx.clock import Clock
from cadence_fx.contract import Contract, Input, Region
from cadence_fx.errors import CatalogTooWide, ContractError
from cadence_fx.retention import KeepLast, Pinned, PromptPlusLast, Retention

# Fresh tokens of a call that ends a turn: 5 to 25 while look-ahead remains, 1 to 28 in the last call of all.
FLUSH_TOKENS = tuple(range(1, 29))


class Refusal(NamedTuple):
    """Why a callable is not captured: the word that its calls are counted under, and the arithmetic."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Geometry:
    """The numbers of one deployment and one prompt.

    prompt: mel frames of the prompt (P), 0 as long as there is none; steps: solver steps a call (T); rate: mel frames a
    token; lookahead: tokens that a call presents and does not consume; retained: frames kept beside the prompt, a
    literal in the vendor's `stream`; hop: fresh tokens a call; flush: fresh-token counts of calls that end a turn, to
    be specialised as well (sizes not named run eager and are counted); two_rates: whether the conformer's two caches
    are trimmed apart, each at its own rate (`minicpmo-utils`), or packed together; trimmed: whether they are at all
    (not by Lychee-FD); capacity: frames of the vendor's solver buffers; positions: frames of its table of relative
    positions.

    Raises ContractError for a prompt that is not whole tokens, or too long for the vendor's own solver buffers.
    """

    prompt: int
    steps: int
    rate: int = 2
    lookahead: int = 3
    retained: int = 100
    hop: int = 25
    flush: tuple[int, ...] = ()
    two_rates: bool = False
    trimmed: bool = True
    capacity: int = 1000
    positions: int = 5000

    def __post_init__(self) -> None:
        longest = self.capacity - self.retained - max(FLUSH_TOKENS) * self.rate
        if self.prompt % self.rate or not 0 <= self.prompt <= longest:
            raise ContractError(
                f"a prompt of {self.prompt} frames cannot be declared: it must be whole tokens of {self.rate} frames, "
                f"and leave room in the vendor's buffers of {self.capacity} for {self.retained} that are retained and "
                f"the {max(FLUSH_TOKENS) * self.rate} of a last call, so {longest} at most",
                field="prompt",
            )

    @property
    def window(self) -> int:
        """Mel frames attended once the window is full: 402 as released."""
        return self.prompt + self.retained

    @property
    def chunk_frames(self) -> tuple[int, ...]:
        """Mel frames that a declared call brings to the vocoder, the normal call first."""
        frames = [self.hop * self.rate, *(tokens * self.rate for tokens in self.flush)]
        return tuple(dict.fromkeys(frames))

    @property
    def refusal(self) -> Refusal | None:
        """Why the conformer is not captured, if it is not; the flow decoder and the vocoder are in any case."""
        if not self.trimmed:
            try:
                arithmetic = self.conformer_contract().width().arithmetic
                self.conformer_contract().catalog()
            except CatalogTooWide as error:
                arithmetic = str(error)
            return Refusal(
                "unbounded conformer",
                f"its caches are never trimmed: from {self.prompt} frames on they grow by {self.hop * self.rate} in "
                f"each call, until the table of {self.positions:,} positions ends. {arithmetic}",
            )
        if not self.two_rates and self.prompt < self.retained:
            return Refusal(
                "short prompt",
                f"the vendor's trim of the packed axis keeps {self.prompt} + {self.retained} frames of two copies of "
                f"(L / {self.rate}) tokens: with a prompt below {self.retained} frames the first "
                f"{self.window // self.rate} of what is left are no span of the old and the new ones",
            )
        return None

    def fresh(self, tokens: int, last_chunk: bool) -> int:
        """Tokens consumed by a call that presents `tokens` of them: the last call of a turn has no look-ahead."""
        return tokens if last_chunk else tokens - self.lookahead

    def declares(self, tokens: int, last_chunk: bool) -> bool:
        """The admission predicate: whether calls that present `tokens` tokens are in the catalog."""
        fresh = self.fresh(tokens, last_chunk)
        return fresh in self.flush or (fresh == self.hop and not last_chunk)

    def _clocks(self) -> tuple[Clock, Clock]:
        token = Clock("token", self.hop, lookahead=self.lookahead, flush=self.flush)
        return token, Clock("frame", of="token", rate=self.rate)

    def _max_classes(self) -> int:
        return (3 + self.retained // (self.rate * self.hop)) * (1 + len(self.flush))

    def flow_contract(self) -> Contract:
        """`FlowStep`: two carries and the four workspaces they are made in, over (solver step, frame)."""
        attended = PromptPlusLast(self.prompt, self.retained, order="prepend")
        rows = ("solver", "frame")
        carried = (
            Region("att_cache", argument="att_cache", result=2, axis=(0, 4), clock=rows, start=self.prompt,
                   retention=attended),
            Region("cnn_cache", argument="cnn_cache", result=1, axis=(0, 4), clock=rows, retention=Pinned(2)),
        )  # fmt: skip
        scratch = (
            Region("workspace", attribute="decoder.att_cache_buffer", axis=(0, 4), clock=rows, retention=attended,
                   lifetime="unit"),
            Region("step_workspace", attribute="decoder.estimator.att_cache_buffer", axis=3, clock="frame",
                   retention=attended, lifetime="operator"),
            Region("cnn_workspace", attribute="decoder.cnn_cache_buffer", axis=(0, 4), clock=rows, retention=Pinned(2),
                   lifetime="unit"),
            Region("cnn_step_workspace", attribute="decoder.estimator.cnn_cache_buffer", axis=3, clock="frame",
                   retention=Pinned(2), lifetime="operator"),
        )  # fmt: skip
        return Contract(
            (*self._clocks(), Clock("solver", period=self.steps)),
            carried + scratch,
            inputs=(Input("mu", axis=2, clock="frame"), Input("cond", axis=2, clock="frame")),
            name="token2wav.flow",
            max_classes=self._max_classes(),
        )

    def conformer_contract(self, last_chunk: bool = False) -> Contract:
        """`ConformerStep`: caches at both rates; trimmed together, the token-rate one keeps its first frames only."""
        of_tokens: Retention
        if self.trimmed:
            attended: Retention = PromptPlusLast(self.prompt, self.retained)
            first, last = (self.prompt, self.retained) if self.two_rates else (self.window, 0)
            of_tokens = PromptPlusLast(first // self.rate, last // self.rate)
        else:
            each = self.hop * self.rate  # the last extent that a whole call still fits behind
            last = self.prompt + (self.positions - self.prompt) // each * each - each
            attended, of_tokens = KeepLast(last), KeepLast(last // self.rate)
        carried = (
            Region("cnn_cache", argument="cnn_cache", result=1, axis=2, clock="token", retention=Pinned(6)),
            Region("token_cache", argument="token_cache", result=2, axis=3, clock="token",
                   start=self.prompt // self.rate, retention=of_tokens),
            Region("mel_cache", argument="mel_cache", result=3, axis=3, clock="frame", start=self.prompt,
                   retention=attended),
        )  # fmt: skip
        return Contract(
            self._clocks(),
            carried,
            inputs=(Input("token", axis=1, clock="token", offset=0 if last_chunk else self.lookahead),),
            name="token2wav.conformer.last" if last_chunk else "token2wav.conformer",
            max_classes=self._max_classes() if self.trimmed else 64,
        )

    def vocoder_contract(self, overlap: int) -> Contract:
        """`VocoderStep` after `overlap` mel frames of the chunk before: 8, or 0 in the first call of a turn.

        The overlap itself is the vendor's: its `stream` cuts mel frames, excitation and speech from what the vocoder
        returns, and joins them to the next chunk.
        """
        return Contract(
            self._clocks(),
            inputs=(Input("mel", axis=2, clock="frame", offset=overlap),),
            name="token2wav.vocoder" if overlap else "token2wav.vocoder.first",
        )


@dataclass(frozen=True, slots=True)
class Reach:
    """How far the causal vocoder sees, in mel frames; read off the vendor's `BoundedVocoder`.

    block: frames a pass; f0_left, f0_right: what the pitch predictor sees beside a frame; history: what the decoder
    sees before one; right: what it sees after one; samples: samples a frame; harmonics: of the excitation.

    Raises ContractError when the two histories do not begin at the same frame: the caches would then have offsets of
    their own.
    """

    block: int
    f0_left: int
    f0_right: int
    history: int
    right: int
    samples: int
    harmonics: int

    def __post_init__(self) -> None:
        if self.history < self.f0_left:
            raise ContractError(
                f"the decoder's history of {self.history} frames must cover the {self.f0_left} of the pitch predictor",
                field="history",
            )

    @property
    def source(self) -> int:
        """Frames of excitation kept: 36 as released."""
        return self.history + self.right

    @property
    def mel(self) -> int:
        """Mel frames kept: 39 as released."""
        return self.source + self.f0_right

    def declares(self, held: int, frames: int) -> bool:
        """Whether a pass over `frames` new frames, with `held` in the cache, has its excitation's size declared."""
        return held == self.mel or (held == 0 and frames > self.f0_right)

    def contract(self, geometry: Geometry, *, joined: bool) -> Contract:
        """`BoundedStep` with full caches, or (not `joined`) with empty ones, which a turn's first call meets."""
        token, frame = geometry._clocks()
        regions: tuple[Region, ...] = ()
        late = 0
        if joined:
            regions = (
                Region("mel_cache", argument="mel_cache", result=1, axis=2, clock="frame", start=self.mel,
                       retention=KeepLast(self.mel)),
                Region("source", argument="source", result=2, axis=2, clock="frame", growth=self.samples,
                       start=self.source * self.samples, retention=KeepLast(self.source * self.samples)),
                Region("phase", argument="phase", result=3, axis=2, clock="frame", retention=Pinned(self.harmonics)),
            )  # fmt: skip
        else:
            flush = tuple(tokens for tokens in geometry.flush if tokens * geometry.rate > self.f0_right)
            token, late = Clock("token", geometry.hop, flush=flush), self.f0_right
        noise = Input("noise", axis=1, clock="frame", rate=self.samples, offset=-late * self.samples)
        return Contract(
            (token, frame),
            regions,
            inputs=(Input("mel", axis=2, clock="frame"), noise),
            name="token2wav.bounded" if joined else "token2wav.bounded.first",
        )

    def final_contract(self, geometry: Geometry) -> Contract:
        """`FinalStep`: what is held when a stream ends, full caches or those of a turn of one short call."""
        short = (frames for frames in geometry.chunk_frames if self.f0_right < frames < self.mel)
        late = -self.f0_right * self.samples
        return Contract(
            (Clock("held", self.mel, flush=tuple(short)),),
            inputs=(
                Input("mel_cache", axis=2, clock="held"),
                Input("source", axis=2, clock="held", rate=self.samples, offset=late),
            ),
            name="token2wav.bounded.final",
        )
