"""A codec: frames of 24 samples, two frames of the transformers and `codebooks` codes each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.adapters.persona_like.streaming import (
    Holder,
    SEANetResnetBlock,
    State,
    StreamingConv1d,
    StreamingConvTranspose1d,
    StreamingModule,
    StreamingTransformer,
)
from tests.adapters.persona_like.utils.compile import Graphed

WIDTH, FILTERS, STRIDES = 16, 4, (3, 4)


class Convolutions(StreamingModule):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.model = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]


class Projected(StreamingModule):
    def __init__(self, layers: int, context: int) -> None:
        super().__init__()
        self.transformer = StreamingTransformer(WIDTH, 2, layers, context)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.transformer(x.transpose(1, 2)).transpose(1, 2)]


class Codebook(nn.Module):
    """Its table is computed where it is first read."""

    total: Tensor
    _embedding: Tensor | None

    def __init__(self, bins: int) -> None:
        super().__init__()
        self.register_buffer("total", torch.randn(bins, WIDTH))
        self.register_buffer("_embedding", None, persistent=False)

    @property
    def embedding(self) -> Tensor:
        if self._embedding is None:
            self.register_buffer("_embedding", self.total / 2, persistent=False)
        return self._embedding  # type: ignore[return-value]


class Level(nn.Module):
    def __init__(self, bins: int) -> None:
        super().__init__()
        self._codebook = Codebook(bins)


class Residual(nn.Module):
    """Each level codes what the one before has left."""

    def __init__(self, levels: int, bins: int) -> None:
        super().__init__()
        self.n_q, self.vq = levels, nn.Module()
        self.vq.layers = nn.ModuleList(Level(bins) for _ in range(levels))

    def _tables(self, count: int) -> list[Tensor]:
        levels: Any = self.vq.layers
        return [level._codebook.embedding for level in levels[:count]]

    def encode(self, x: Tensor) -> Tensor:
        rest, codes = x.transpose(1, 2), []
        for table in self._tables(self.n_q):
            codes.append(torch.cdist(rest, table[None]).argmin(2))
            rest = rest - table[codes[-1]]
        return torch.stack(codes, 1)

    def decode(self, codes: Tensor) -> Tensor:
        tables = self._tables(codes.shape[1])
        return sum(table[codes[:, i]] for i, table in enumerate(tables)).transpose(1, 2)  # type: ignore[union-attr]


class Quantizer(nn.Module):
    def __init__(self, levels: int, bins: int) -> None:
        super().__init__()
        self.rvq_first, self.rvq_rest = Residual(1, bins), Residual(levels - 1, bins)

    def encode(self, x: Tensor) -> Tensor:
        return torch.cat([self.rvq_first.encode(x), self.rvq_rest.encode(x)], 1)

    def decode(self, codes: Tensor) -> Tensor:
        return self.rvq_first.decode(codes[:, :1]) + self.rvq_rest.decode(codes[:, 1:])


class MimiModel(StreamingModule):
    sample_rate, frame_rate, encoder_frame_rate, channels = 300, 12.5, 25.0, 1
    resample_method = "conv"

    def __init__(self, layers: int = 1, context: int = 20, bins: int = 64, codebooks: int = 8) -> None:
        super().__init__()
        self.cardinality, (first, second) = bins, STRIDES
        self.encoder = Convolutions(
            StreamingConv1d(1, FILTERS, 7), SEANetResnetBlock(FILTERS), nn.ELU(),
            StreamingConv1d(FILTERS, 2 * FILTERS, 2 * first, first), SEANetResnetBlock(2 * FILTERS), nn.ELU(),
            StreamingConv1d(2 * FILTERS, WIDTH, 2 * second, second), nn.ELU(), StreamingConv1d(WIDTH, WIDTH, 3),
        )  # fmt: skip
        self.decoder = Convolutions(
            StreamingConv1d(WIDTH, WIDTH, 7), nn.ELU(), StreamingConvTranspose1d(WIDTH, 2 * FILTERS, second),
            SEANetResnetBlock(2 * FILTERS), nn.ELU(), StreamingConvTranspose1d(2 * FILTERS, FILTERS, first), nn.ELU(),
            StreamingConv1d(FILTERS, 1, 3),
        )  # fmt: skip
        self.encoder_transformer, self.decoder_transformer = Projected(layers, context), Projected(layers, context)
        self.downsample = Holder("conv", StreamingConv1d(WIDTH, WIDTH, 4, 2, repeats=True))
        self.upsample = Holder("convtr", StreamingConvTranspose1d(WIDTH, WIDTH, 2, groups=WIDTH))
        self.quantizer = Quantizer(codebooks, bins)

    def _init_streaming_state(self, batch: int) -> State:
        return State(graphed_tr_enc=Graphed(self.encoder_transformer), graphed_tr_dec=Graphed(self.decoder_transformer))

    @property
    def num_codebooks(self) -> int:
        return 1 + self.quantizer.rvq_rest.n_q

    def _latent(self, x: Tensor) -> Tensor:
        (hidden,) = self._streaming_state.graphed_tr_enc(self.encoder(x))
        return self.downsample(hidden)  # type: ignore[no-any-return]

    def encode(self, x: Tensor) -> Tensor:
        return self.quantizer.encode(self._latent(x))

    def encode_to_latent(self, x: Tensor, quantize: bool = True) -> Tensor:
        latent = self._latent(x)
        return self.quantizer.decode(self.quantizer.encode(latent)) if quantize else latent

    def decode(self, codes: Tensor) -> Tensor:
        (hidden,) = self._streaming_state.graphed_tr_dec(self.upsample(self.quantizer.decode(codes)))
        return self.decoder(hidden)  # type: ignore[no-any-return]
