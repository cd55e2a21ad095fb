"""The TiCodec generator of Freeze-Omni around random weights, and the windows of tokens that its sessions decode.

The code is the vendor's where CADENCE_FREEZE_OMNI names a clone of its repository (`is_vendors`), and otherwise the
stand-in of this project; equal sizes and seeds give both equal weights. `type(built).__module__` says which it is.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.vendor import ticodec_stand_in
from bench.vendor.packages import FREEZE_OMNI, available, load


@dataclass(frozen=True, slots=True)
class TicodecSizes:
    """Values of the codec's `model.json`. The defaults are the released ones; `SMALL_TICODEC` fits a CPU core.

    A stage of 128 channels, the width of the speaker's embedding, is where that is added: `initial` keeps one.
    """

    initial: int = 512
    rates: tuple[int, ...] = (8, 5, 5, 3)  # 600 samples a token, which the vendor's windowing counts on
    kernels: tuple[int, ...] = (16, 11, 11, 5)
    residual: tuple[int, ...] = (3, 7, 11)
    dilations: tuple[int, int, int] = (1, 3, 5)
    codes: int = 1024
    global_tokens: tuple[int, ...] = (473, 975, 419, 219, 565, 121, 550, 616)

    def config(self) -> dict[str, Any]:
        """The entries that the vendor's constructors read."""
        return {
            "resblock": "1", "upsample_rates": list(self.rates), "upsample_kernel_sizes": list(self.kernels),
            "upsample_initial_channel": self.initial, "resblock_kernel_sizes": list(self.residual),
            "resblock_dilation_sizes": [list(self.dilations) for _ in self.residual], "n_code_groups": 1,
            "residul_layer": 1, "n_codes": self.codes, "codebook_loss_lambda": 1.0, "commitment_loss_lambda": 0.25,
            "global_code_num": len(self.global_tokens), "global_feature_conv": [128, 64, 128, 3, 1],
            "global_tokens": list(self.global_tokens),
        }  # fmt: skip


TICODEC = TicodecSizes()
SMALL_TICODEC = TicodecSizes(initial=256, residual=(3, 5), codes=64, global_tokens=(47, 9, 41, 21, 56, 12, 55, 61))
SAMPLES = prod(TICODEC.rates)  # a token
PADDING = 10  # tokens that a window has on either side of what it adds
FIRST_CHUNK, CHUNK = 20, 40  # tokens that a window adds, in a session's first sentence and in the others


def is_vendors() -> bool:
    """Whether `build_generator` takes the vendor's code: a checkout is configured."""
    return available(FREEZE_OMNI)


def build_generator(
    sizes: TicodecSizes = TICODEC, device: torch.device | str = "cpu", seed: int = 0, *, stand_in: bool | None = None
) -> Any:
    """`VQVAE` with its weight norm removed, as the vendor's `llm2TTS` keeps it in `codec_model.vqvae`.

    Weights are drawn so that a signal keeps its size on the way, in the order of their names.

    Args:
        stand_in: whether to build the stand-in; by default where no checkout is configured.
    """
    if stand_in is None:
        stand_in = not is_vendors()
    config = sizes.config()
    vqvae = ticodec_stand_in.VQVAE(types.SimpleNamespace(**config)) if stand_in else _from_checkout(config)
    draw = torch.Generator().manual_seed(seed)
    named = dict(vqvae.generator.named_parameters(prefix="generator"))
    named |= dict(vqvae.quantizer.named_parameters(prefix="quantizer"))
    with torch.no_grad():
        for name in sorted(named):
            drawn = torch.randn(named[name].shape, generator=draw)
            named[name].copy_(drawn * _scale(name, named[name], sizes))
    return vqvae.to(device).eval()


def _scale(name: str, weight: Tensor, sizes: TicodecSizes) -> float:
    if weight.dim() < 3:
        return 0.05 if name.endswith("bias") else 1.0
    inputs = weight[0].numel()
    if ".ups." in name:  # of a transposed convolution, a kernel of whose outputs sees each `rate`-th of its inputs
        inputs = weight[:, 0].numel() // sizes.rates[int(name.split(".")[2])]
    return (0.2 if ".conv_post." in name else 1.2) / inputs**0.5  # tanh comes next


def _from_checkout(config: dict[str, Any]) -> Any:
    """The vendor's object from its own constructors, which read two files."""
    models, tester = (load(f"decoder.ticodec.{module}", FREEZE_OMNI) for module in ("models", "vqvae_tester"))
    h = types.SimpleNamespace(**config)
    parts = {"generator": models.Generator(h), "quantizer": models.Quantizer(h), "encoder": models.Encoder(h)}
    with tempfile.TemporaryDirectory() as folder:
        described, weights = Path(folder, "model.json"), Path(folder, "final.pt")
        described.write_text(json.dumps(config))
        torch.save({name: part.state_dict() for name, part in parts.items()}, weights)
        vqvae = tester.VqvaeTester(described, weights).vqvae
    with contextlib.redirect_stdout(io.StringIO()):  # it says that it does
        vqvae.generator.remove_weight_norm()
        vqvae.encoder.remove_weight_norm()
    return vqvae


class TorchAt:
    """The vendor's `torch` while its autocast to "cuda" is to be one of another kind of device."""

    cuda = types.SimpleNamespace(is_bf16_supported=lambda: True)

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def autocast(self, device_type: str, dtype: torch.dtype) -> torch.autocast:
        return torch.autocast(self._device.type, dtype)


def build_llm2tts(vqvae: Any, tokens: Iterable[int]) -> Any:
    """The vendor's `llm2TTS` around a codec, its language model replaced by the tokens that this would draw.

    Its `run` is the vendor's own, and the codec may be on any device. Needs a checkout.
    """
    module: Any = load("decoder.llm2tts", FREEZE_OMNI)
    device = next(vqvae.parameters()).device
    if device.type != "cuda":
        module.torch = TorchAt(device)
    speaker = object.__new__(module.llm2TTS)
    speaker.codec_model = types.SimpleNamespace(vqvae=vqvae)
    speaker.model = types.SimpleNamespace(vocab_size=vqvae.h.n_codes)
    speaker.infer = lambda *_: (torch.tensor([[token]], device=device) for token in tokens)
    return speaker


@dataclass(frozen=True, slots=True)
class Window:
    """What is decoded at once: codes (1, n, 1) int64, and how many tokens on either side are for context alone."""

    codes: Tensor
    left: int
    right: int

    def decode(self, vqvae: Any) -> Tensor:
        """The vendor's call: samples (1, 1, 600 * n), speaker's tokens made on the host."""
        speaker = torch.tensor(vqvae.h.global_tokens, device=self.codes.device)
        samples: Tensor = vqvae(self.codes, speaker.unsqueeze(0).unsqueeze(0))
        return samples

    def spoken(self, samples: Tensor) -> Tensor:
        """Those of `decode` that the session goes on with."""
        return samples[:, :, self.left * SAMPLES : samples.shape[2] - self.right * SAMPLES]


def windows(
    tokens: Iterable[int], chunk: int, device: torch.device | str = "cpu", padding: int = PADDING
) -> Iterator[Window]:
    """The windows of a sentence, as `llm2TTS.run` cuts them: chunk + padding tokens, then chunk + 2 * padding of which
    it has seen 2 * padding before, then what is left, 1 to chunk + 2 * padding - 1 of them."""
    kept, left = torch.zeros(1, 0, dtype=torch.long, device=device), 0
    for token in tokens:
        kept = torch.cat([kept, torch.tensor([[token]], device=device)], dim=-1)
        if kept.shape[1] == left + chunk + padding:
            yield Window(kept.unsqueeze(-1), left, padding)
            left = padding
            kept = kept[:, -2 * padding :]
    if kept.shape[1]:
        yield Window(kept.unsqueeze(-1), left, 0)


def session(
    sentences: Iterable[int], sizes: TicodecSizes = TICODEC, device: torch.device | str = "cpu", seed: int = 1
) -> Iterator[Window]:
    """The windows of one session: sentences of so many random tokens each, in the released chunks."""
    draw = torch.Generator().manual_seed(seed)
    for number, length in enumerate(sentences):
        tokens = torch.randint(sizes.codes, (length,), generator=draw).tolist()
        yield from windows(tokens, CHUNK if number else FIRST_CHUNK, device)
