"""The 16 kHz Silero voice-activity model as a streaming PyTorch module.

The weights are the released ones (the `silero-vad` wheel, `silero_vad/data/silero_vad_16k.safetensors`); the module is
written here so that both pieces of its state are arguments and results. A chunk of 512 samples goes through a
short-time Fourier transform written as a convolution, four convolutions and one LSTM cell, and gives one probability of
speech. What persists between chunks: the last 64 samples, which the next chunk is prefixed with, and the cell's (h, c).

The wheel is only looked up, never imported: importing it fixes the process's thread count.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

SAMPLE_RATE = 16_000
CHUNK = 512
CONTEXT = 64
STATE = 128
_BINS = 129  # of a 256-point transform


def wheel_file(name: str) -> Path | None:
    """The path of a data file of the installed `silero-vad` wheel, or None when the wheel is not installed."""
    spec = find_spec("silero_vad")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "data" / name
        if path.is_file():
            return path
    return None


class SileroVad(nn.Module):
    """Probability of speech in one chunk; parameter names are those of the released weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 2 * _BINS, 256, stride=128, bias=False)
        self.conv1 = nn.Conv1d(_BINS, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, STATE, 3, padding=1)
        self.lstm_cell = nn.LSTMCell(STATE, STATE)
        self.final_conv = nn.Conv1d(STATE, 1, 1)

    def forward(self, audio: Tensor, context: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One chunk.

        audio: (1, 512) samples in [-1, 1]; context: (1, 64), the samples before them; state: (2, 1, 128), the
        cell's h and c. Returns the probability (1, 1) and the context and state for the next chunk.
        """
        samples = torch.cat([context, audio], dim=1)
        padded = nn.functional.pad(samples, (0, CONTEXT), mode="reflect")
        spectrum = self.stft_conv(padded.unsqueeze(1))
        real, imaginary = spectrum[:, :_BINS], spectrum[:, _BINS:]
        features = torch.sqrt(real**2 + imaginary**2)
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            features = torch.relu(conv(features))
        hidden, cell = self.lstm_cell(features.squeeze(-1), (state[0], state[1]))
        logits = self.final_conv(torch.relu(hidden.unsqueeze(-1)))
        probability = torch.sigmoid(logits).squeeze(1).mean(dim=1, keepdim=True)
        return probability, samples[:, -CONTEXT:], torch.stack([hidden, cell])

    def initial_state(self) -> tuple[Tensor, Tensor]:
        """The context and state that a stream begins with: silence."""
        weight = self.final_conv.weight
        return weight.new_zeros(1, CONTEXT), weight.new_zeros(2, 1, STATE)


def load() -> SileroVad:
    """The model with the released safetensors weights, ready for inference. FileNotFoundError without the wheel."""
    model = SileroVad()
    model.load_state_dict(load_file(_required("silero_vad_16k.safetensors")), strict=True)
    return model.eval().requires_grad_(False)


def load_script() -> tuple[torch.jit.ScriptModule, SileroVad]:
    """The wheel's own TorchScript model, and our module with *its* weights, to be compared chunk by chunk.

    The script holds another training than the safetensors file (wheel 6.2.3), so the weights are taken from it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the wheel's model is TorchScript; there is no other form
        script = torch.jit.load(str(_required("silero_vad.jit"))).eval()
    tensors = dict(script.named_parameters()) | dict(script.named_buffers())
    model = SileroVad()
    model.load_state_dict({ours: tensors[theirs] for ours, theirs in _script_names().items()}, strict=True)
    return script, model.eval().requires_grad_(False)


def _script_names() -> dict[str, str]:
    """Our parameter names -> those of the script's 16 kHz half."""
    names = {"stft_conv.weight": "_model.stft.forward_basis_buffer"}
    for kind in ("weight", "bias"):
        names |= {f"conv{n + 1}.{kind}": f"_model.encoder.{n}.reparam_conv.{kind}" for n in range(4)}
        names |= {f"lstm_cell.{kind}_{side}": f"_model.decoder.rnn.{kind}_{side}" for side in ("ih", "hh")}
        names |= {f"final_conv.{kind}": f"_model.decoder.decoder.2.{kind}"}
    return names


def _required(name: str) -> Path:
    path = wheel_file(name)
    if path is None:
        raise FileNotFoundError(f"{name} comes with the silero-vad wheel: pip install --no-deps silero-vad==6.2.3")
    return path
