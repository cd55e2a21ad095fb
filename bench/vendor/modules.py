"""The vendor's modules around random weights."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch

from bench.vendor.packages import MINICPMO_UTILS, STEPAUDIO2, Package, load
from bench.vendor.sizes import RELEASED, Sizes

SAMPLE_RATE = 24_000


class TorchOn:
    """A vendor module's `torch` while tensors that it makes from nothing are to be on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, data: Any, **options: Any) -> torch.Tensor:
        return torch.tensor(data, **{**options, "device": self._device})

    def zeros(self, *shape: Any, **options: Any) -> torch.Tensor:
        return torch.zeros(*shape, **{**options, "device": self._device})

    def rand(self, *shape: Any, **options: Any) -> torch.Tensor:
        return torch.rand(*shape, **{**options, "device": self._device})


@contextlib.contextmanager
def _without_memory(*modules: types.ModuleType) -> Iterator[None]:
    """Constructors that make workspaces or tables, gigabytes at any width, make them without memory behind them."""
    for module in modules:
        module.torch = TorchOn(torch.device("meta"))  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in modules:
            module.torch = torch  # type: ignore[attr-defined]


def build_flow(
    sizes: Sizes = RELEASED, device: torch.device | str = "cpu", seed: int = 0, package: Package = STEPAUDIO2
) -> Any:
    """`CausalMaskedDiffWithXvec` with the vendor's workspaces: 16 solver rows of 1,000 frames, at any width."""
    dit = load("cosyvoice2.flow.decoder_dit", package)
    matching = load("cosyvoice2.flow.flow_matching", package)
    encoders = load("cosyvoice2.transformer.upsample_encoder_v2", package)
    flows = load("cosyvoice2.flow.flow", package)
    torch.manual_seed(seed)
    with _without_memory(dit, matching):
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


def build_vocoder(
    sizes: Sizes = RELEASED, device: torch.device | str = "cpu", seed: int = 1, package: Package = STEPAUDIO2
) -> Any:
    """`HiFTGenerator`: 480 samples a mel frame at every width."""
    hifigan = load("flashcosyvoice.modules.hifigan", package)
    torch.manual_seed(seed)
    predictor = hifigan.ConvRNNF0Predictor(in_channels=sizes.mel, cond_channels=sizes.vocoder)
    vocoder = hifigan.HiFTGenerator(
        in_channels=sizes.mel, base_channels=sizes.vocoder, f0_predictor=predictor, **_residuals(sizes)
    )
    return vocoder.to(device).eval()


def _residuals(sizes: Sizes) -> dict[str, Any]:
    """Arguments of both vocoders for their residual blocks."""
    kernels, dilations = sizes.vocoder_kernels, list(sizes.vocoder_dilations)
    return {
        "resblock_kernel_sizes": list(kernels),
        "resblock_dilation_sizes": [dilations for _ in kernels],
        "source_resblock_kernel_sizes": [7, 7, 11],
        "source_resblock_dilation_sizes": [dilations] * 3,
    }


def build_causal_vocoder(sizes: Sizes = RELEASED, device: torch.device | str = "cpu", seed: int = 1) -> Any:
    """`CausalHiFTGenerator` as CosyVoice3 configures it, its noise tables on the host as shipped."""
    generator = load("causal_vocoder.generator", MINICPMO_UTILS)
    predictors = load("causal_vocoder.f0_predictor", MINICPMO_UTILS)
    torch.manual_seed(seed)
    predictor = predictors.CausalConvRNNF0Predictor(in_channels=sizes.mel, cond_channels=sizes.vocoder)
    with _without_memory(generator):
        vocoder = generator.CausalHiFTGenerator(
            in_channels=sizes.mel, base_channels=sizes.vocoder, nb_harmonics=8, sampling_rate=SAMPLE_RATE,
            nsf_alpha=0.1, nsf_sigma=0.003, nsf_voiced_threshold=10, upsample_rates=[8, 5, 3],
            upsample_kernel_sizes=[16, 11, 7], istft_params={"n_fft": 16, "hop_len": 4},
            lrelu_slope=0.1, audio_limit=0.99, conv_pre_look_right=4, f0_predictor=predictor, **_residuals(sizes),
        )  # fmt: skip
    source, rows = vocoder.m_source, SAMPLE_RATE * sizes.noise_seconds
    source.l_sin_gen.rand_ini = torch.rand(1, 9)
    source.l_sin_gen.rand_ini[:, 0] = 0
    source.l_sin_gen.sine_waves, source.uv = torch.rand(1, rows, 9), torch.rand(1, rows, 1)
    return vocoder.float().to(device).eval()
