"""A stand-in for the TiCodec generator of Freeze-Omni, which is on no index: written for this project.

It has the released architecture at any size, names of parameters included, so that a checkout's weights can be loaded
(`tests/adapters/test_freeze_omni.py` compares the bytes where there is one); it is called as the vendor's, and has the
habits that an adapter meets there: no state, a constant made from a Python number in each call, sums that are made in
place, and a configuration in attributes. Weight norm is folded, as the vendor's loader leaves it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, GLOBAL_WIDTH = 512, 128  # of a token's embedding and of the speaker's, at any size
SLOPE = 0.1


class Codebook(nn.Module):
    """A table of embeddings."""

    def __init__(self, codes: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(codes, width)

    def look_up(self, codes: Tensor) -> Tensor:
        found: Tensor = self.embedding(codes.squeeze(-1))
        return found


class Quantizer(nn.Module):
    """Tokens to embeddings: one codebook for the windows, one for each of a speaker's global tokens."""

    def __init__(self, h: Any) -> None:
        super().__init__()
        each = GLOBAL_WIDTH // h.global_code_num
        self.quantizer_modules = nn.ModuleList([Codebook(h.n_codes, WIDTH)])
        self.quantizer_modules_globaltokens = nn.ModuleList(Codebook(h.n_codes, each) for _ in range(h.global_code_num))

    @staticmethod
    def _embed(books: Any, codes: Tensor) -> Tensor:
        parts = [book.look_up(column) for book, column in zip(books, codes.split(1, 2), strict=True)]
        total = torch.tensor(0.0, device=codes.device) + torch.cat(parts, -1)
        return total.transpose(1, 2)

    def embed(self, codes: Tensor) -> Tensor:
        """Codes (batch, n, 1) to embeddings (batch, 512, n)."""
        return self._embed(self.quantizer_modules, codes)

    def embed_gst(self, codes: Tensor) -> Tensor:
        """Global tokens (batch, 1, count) to an embedding (batch, 128, 1)."""
        return self._embed(self.quantizer_modules_globaltokens, codes)


class ResidualBlock(nn.Module):
    """Pairs of convolutions around sums, the first of each pair dilated."""

    def __init__(self, width: int, kernel: int, dilations: list[int]) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(
            nn.Conv1d(width, width, kernel, dilation=d, padding=(kernel - 1) * d // 2) for d in dilations
        )
        self.convs2 = nn.ModuleList(nn.Conv1d(width, width, kernel, padding=(kernel - 1) // 2) for _ in dilations)

    def forward(self, x: Tensor) -> Tensor:
        for dilated, plain in zip(self.convs1, self.convs2, strict=True):
            x = plain(F.leaky_relu(dilated(F.leaky_relu(x, SLOPE)), SLOPE)) + x
        return x


class Generator(nn.Module):
    """Embeddings (batch, 512, n) to samples (batch, 1, n * product of the rates)."""

    def __init__(self, h: Any) -> None:
        super().__init__()
        width, kinds = (
            h.upsample_initial_channel,
            list(zip(h.resblock_kernel_sizes, h.resblock_dilation_sizes, strict=True)),
        )
        self.conv_pre = nn.Conv1d(WIDTH, width, 7, padding=3)
        self.ups, self.resblocks = nn.ModuleList(), nn.ModuleList()
        for rate, kernel in zip(h.upsample_rates, h.upsample_kernel_sizes, strict=True):
            width //= 2
            self.ups.append(nn.ConvTranspose1d(2 * width, width, kernel, rate, padding=(kernel - rate) // 2))
            self.resblocks.extend(ResidualBlock(width, size, dilations) for size, dilations in kinds)
        self.conv_post = nn.Conv1d(width, 1, 7, padding=3)
        self.branches = len(kinds)

    def forward(self, x: Tensor, speaker: Tensor) -> Tensor:
        x = self.conv_pre(x)
        blocks = iter(self.resblocks)
        for up in self.ups:
            x = up(F.leaky_relu(x, SLOPE))
            total = next(blocks)(x)
            for _ in range(self.branches - 1):
                total += next(blocks)(x)
            x = total / self.branches
            if x.shape[1] == speaker.shape[1]:
                x += speaker[..., None].repeat(1, 1, x.shape[2])
        return torch.tanh(self.conv_post(F.leaky_relu(x, SLOPE)))


class VQVAE(nn.Module):
    """What `llm2TTS` calls with a window of tokens: codes (1, n, 1) int64 and global tokens (1, 1, count) int64."""

    def __init__(self, h: Any) -> None:
        super().__init__()
        self.h = h
        self.quantizer, self.generator = Quantizer(h), Generator(h)

    def forward(self, x: Tensor, global_style_token: Tensor) -> Tensor:
        speaker = self.quantizer.embed_gst(global_style_token).squeeze(-1)
        samples: Tensor = self.generator(self.quantizer.embed(x), speaker)
        return samples
