"""Builds the released Token2Wav decoder (`stepaudio2-minicpmo` 0.1.1) with random weights, for tests and benchmarks.

The vendor's package imports its tokenizer, speaker model and audio loaders when it is imported, and pins everything
to CUDA. None of that is needed to run the decoder, so this module imports the vendor's own submodules without the
package's `__init__`, puts placeholder modules where an optional import is missing (only while importing), and, off
CUDA, gives the vendor's `token2wav` module a `torch` whose "cuda" means the device asked for. All code that runs is
the vendor's.

The vendor package is looked for on `sys.path`, then in `.vendor/` beside this folder.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import math
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo

PACKAGE = "stepaudio2"
_FALLBACK = Path(__file__).resolve().parents[1] / ".vendor"


def _get_window(name: str, length: int, fftbins: bool = True) -> np.ndarray:
    """scipy's periodic Hann window, the only one that the vocoder asks for."""
    if name != "hann" or not fftbins:
        raise ValueError(f"only the periodic hann window is available without scipy, not {name!r}")
    return np.asarray([0.5 - 0.5 * math.cos(2 * math.pi * i / length) for i in range(length)])


# What the vendor imports but the decoder never calls (get_window apart).
_OPTIONAL: dict[str, dict[str, Any]] = {
    "onnxruntime": {},
    "torchaudio": {},
    "torchaudio.compliance": {},
    "torchaudio.compliance.kaldi": {},
    "s3tokenizer": {},
    "hyperpyyaml": {"load_hyperpyyaml": None},
    "librosa": {},
    "librosa.filters": {"mel": None},
    "scipy": {},
    "scipy.signal": {"get_window": _get_window},
    "scipy.io": {},
    "scipy.io.wavfile": {"read": None},
}


def _package_folder() -> Path | None:
    for root in [*map(Path, sys.path), _FALLBACK]:
        if (root / PACKAGE / "token2wav.py").is_file():
            return root / PACKAGE
    return None


def available() -> bool:
    """Whether the vendor package and `einops`, which its DiT runs on, can be imported."""
    return _package_folder() is not None and importlib.util.find_spec("einops") is not None


@contextlib.contextmanager
def _placeholders() -> Iterator[None]:
    """Stand-ins for missing optional modules; gone from `sys.modules` afterwards, so that nobody else finds them."""
    roots = {name.partition(".")[0] for name in _OPTIONAL}
    missing = {root for root in roots if root not in sys.modules and importlib.util.find_spec(root) is None}
    added: list[str] = []
    for name, attributes in _OPTIONAL.items():
        if name.partition(".")[0] not in missing:
            continue
        module = types.ModuleType(name)
        module.__path__ = []
        module.__dict__.update(attributes)
        sys.modules[name] = module
        added.append(name)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


@contextlib.contextmanager
def _dynamo_config_kept() -> Iterator[None]:
    """The vendor's encoder sets two global Dynamo options when imported; a test run must not inherit them."""
    config = torch._dynamo.config
    kept = config.suppress_errors, config.cache_size_limit
    try:
        yield
    finally:
        config.suppress_errors, config.cache_size_limit = kept


def load(module: str) -> types.ModuleType:
    """Imports `stepaudio2.<module>` without running the package's `__init__`.

    Raises:
        ModuleNotFoundError: the vendor package is neither on `sys.path` nor in `.vendor/`.
    """
    folder = _package_folder()
    if folder is None:
        raise ModuleNotFoundError(f"{PACKAGE} is not importable: pip install --no-deps stepaudio2-minicpmo==0.1.1")
    if PACKAGE not in sys.modules:
        package = types.ModuleType(PACKAGE)
        package.__path__ = [str(folder)]
        sys.modules[PACKAGE] = package
    with _dynamo_config_kept(), _placeholders():
        return importlib.import_module(f"{PACKAGE}.{module}")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Constructor values of the decoder. The defaults are the released ones; `SMALL` fits two CPU cores."""

    mel: int = 80
    speaker: int = 192
    vocabulary: int = 6561
    depth: int = 16
    hidden: int = 512
    heads: int = 8
    head_dim: int = 64
    encoder: int = 512
    encoder_heads: int = 8
    encoder_units: int = 2048
    blocks: int = 6
    up_blocks: int = 4
    vocoder: int = 512
    prompt_frames: int = 302
    steps: int = 10
    weight_std: float = 0.02


RELEASED = Sizes()
SMALL = Sizes(
    mel=16, speaker=24, vocabulary=6561, depth=2, hidden=32, heads=2, head_dim=16, encoder=32, encoder_heads=2,
    encoder_units=48, blocks=2, up_blocks=1, vocoder=16, prompt_frames=104, steps=3, weight_std=0.3,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the vendor's `_prepare_prompt` yields: tokens (1, P/2) int32, mel (1, P, channels), speaker (1, width)."""

    tokens: torch.Tensor
    mel: torch.Tensor
    speaker: torch.Tensor

    def as_cache(self) -> tuple[torch.Tensor, ...]:
        """The tuple that the vendor keeps in `Token2wav.cache`."""
        token_length, mel_length = (torch.tensor([x.shape[1]], dtype=torch.int32) for x in (self.tokens, self.mel))
        return self.tokens, token_length, self.speaker, self.mel, mel_length


class _TorchOn:
    """A vendor module's `torch` while tensors that it makes from literals are to be on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, data: Any, **options: Any) -> torch.Tensor:
        return torch.tensor(data, **{**options, "device": self._device})

    def zeros(self, *shape: Any, **options: Any) -> torch.Tensor:
        return torch.zeros(*shape, **{**options, "device": self._device})


@contextlib.contextmanager
def _without_workspaces(*modules: types.ModuleType) -> Iterator[None]:
    """The vendor's constructors make their workspaces, two gigabytes at any width, without memory behind them."""
    for module in modules:
        module.torch = _TorchOn(torch.device("meta"))  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in modules:
            module.torch = torch  # type: ignore[attr-defined]


def build_flow(sizes: Sizes = RELEASED, device: torch.device | str = "cpu", seed: int = 0) -> Any:
    """`CausalMaskedDiffWithXvec` with the vendor's workspaces: 16 solver rows of 1,000 frames, at any width."""
    dit = load("cosyvoice2.flow.decoder_dit")
    matching = load("cosyvoice2.flow.flow_matching")
    encoders = load("cosyvoice2.transformer.upsample_encoder_v2")
    flows = load("cosyvoice2.flow.flow")
    torch.manual_seed(seed)
    with _without_workspaces(dit, matching):
        estimator = dit.DiT(
            in_channels=4 * sizes.mel, out_channels=sizes.mel, mlp_ratio=4.0, depth=sizes.depth,
            num_heads=sizes.heads, head_dim=sizes.head_dim, hidden_size=sizes.hidden,
        )  # fmt: skip
        decoder = matching.CausalConditionalCFM(estimator, inference_cfg_rate=0.7)
    # The shapes that the vendor hard-codes for the released width, here for any width.
    layer, convolution = (sizes.depth, 2, sizes.heads, 1000, 2 * sizes.head_dim), (sizes.depth, 2, 2 * sizes.hidden, 2)
    for owner, rows in ((decoder, (16,)), (estimator, ())):
        owner.att_cache_buffer = torch.zeros(*rows, *layer, device=device)
        owner.cnn_cache_buffer = torch.zeros(*rows, *convolution, device=device)
    for parameter in estimator.parameters():  # the vendor starts its gates at zero: every block would be an identity
        torch.nn.init.normal_(parameter, std=sizes.weight_std)
    encoder = encoders.UpsampleConformerEncoderV2(
        input_size=sizes.encoder, output_size=sizes.encoder, input_layer="linear", pre_lookahead_len=3,
        num_blocks=sizes.blocks, num_up_blocks=sizes.up_blocks, up_stride=2, up_scale_factor=2,
        attention_heads=sizes.encoder_heads, pos_enc_layer_type="rel_pos_espnet",
        selfattention_layer_type="rel_selfattn", key_bias=True, linear_units=sizes.encoder_units, dropout_rate=0.1,
        positional_dropout_rate=0.1, attention_dropout_rate=0.1, normalize_before=True,
    )  # fmt: skip
    flow = flows.CausalMaskedDiffWithXvec(
        input_size=sizes.encoder, output_size=sizes.mel, spk_embed_dim=sizes.speaker, vocab_size=sizes.vocabulary,
        encoder=encoder, decoder=decoder, output_type="mel",
    )  # fmt: skip
    return flow.to(device).eval()


def build_vocoder(sizes: Sizes = RELEASED, device: torch.device | str = "cpu", seed: int = 1) -> Any:
    """`HiFTGenerator`: 480 samples a mel frame at every width."""
    hifigan = load("flashcosyvoice.modules.hifigan")
    torch.manual_seed(seed)
    predictor = hifigan.ConvRNNF0Predictor(in_channels=sizes.mel, cond_channels=sizes.vocoder)
    vocoder = hifigan.HiFTGenerator(in_channels=sizes.mel, base_channels=sizes.vocoder, f0_predictor=predictor)
    return vocoder.to(device).eval()


def build_prompt(sizes: Sizes = RELEASED, device: torch.device | str = "cpu", seed: int = 2) -> Prompt:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, sizes.vocabulary, (1, sizes.prompt_frames // 2), generator=generator, dtype=torch.int32)
    mel = torch.randn(1, sizes.prompt_frames, sizes.mel, generator=generator)
    speaker = torch.randn(1, sizes.speaker, generator=generator)
    return Prompt(tokens.to(device), mel.to(device), speaker.to(device))


def build_tokens(calls: int, count: int, sizes: Sizes = RELEASED, seed: int = 3) -> list[list[int]]:
    """`calls` lists of `count` random speech tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, sizes.vocabulary, (calls, count), generator=generator).tolist()


def build_token2wav(sizes: Sizes = RELEASED, device: torch.device | str = "cpu", seed: int = 0) -> Any:
    """The vendor's `Token2wav` around random weights and a random prompt, without its checkpoint files.

    Its methods are the vendor's own; only the constructor, which reads files, is stepped around. The stream has not
    been started: call `start_turn`.
    """
    module = load("token2wav")
    device = torch.device(device)
    if device.type != "cuda":
        module.torch = _TorchOn(device)  # type: ignore[attr-defined]
    token2wav = object.__new__(module.Token2wav)
    token2wav.float16, token2wav.n_timesteps = False, sizes.steps
    token2wav.flow = build_flow(sizes, device, seed)
    token2wav.hift = build_vocoder(sizes, device, seed + 1)
    cache = build_prompt(sizes, device, seed + 2).as_cache()
    token2wav.cache = cache
    token2wav._prepare_prompt = lambda prompt_wav: cache
    token2wav.mel_cache_len = 8
    token2wav.source_cache_len = 8 * 480
    token2wav.speech_window = torch.from_numpy(np.hamming(2 * 8 * 480)).to(device)
    token2wav.hift_cache_dict = {}
    token2wav.stream_cache = None
    return token2wav


def start_turn(token2wav: Any) -> None:
    """Primes the vendor's stream through its own `set_stream_cache`, and assigns the result as its callers do."""
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the prompt's lengths
        token2wav.stream_cache, token2wav.hift_cache_dict = token2wav.set_stream_cache(None)
