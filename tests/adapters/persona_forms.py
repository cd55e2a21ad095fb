"""What the PersonaPlex adapters are tested on: a checkout of the vendor's code, and a small module of the same habits.

The first form runs where the environment variable CADENCE_PERSONAPLEX names a checkout of NVIDIA/personaplex.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from bench import vendor
from bench.vendor import personaplex
from tests.adapters.persona_like import streaming
from tests.adapters.persona_like.models import codec, lm


@dataclass(frozen=True)
class Form:
    """How to build the two models, always with equal weights, and what their sizes are."""

    name: str
    build_mimi: Callable[[], Any]
    build_lm_gen: Callable[..., Any]
    samples: int
    codebooks: int  # that come in with a frame of a dialogue
    card: int
    streaming: Callable[[], types.ModuleType]  # the module that saves and loads states


def _checkout_mimi() -> Any:
    return personaplex.build_mimi(replace(personaplex.SMALL_PERSONA_MIMI, layers=1))


def _checkout_lm_gen(device: torch.device | str = "cpu", **options: Any) -> Any:
    return personaplex.build_lm_gen(personaplex.SMALL_PERSONA, device, audio_silence_frame_cnt=2, **options)


def _small_mimi() -> Any:
    torch.manual_seed(0)
    return codec.MimiModel().eval()


def _small_lm_gen(device: torch.device | str = "cpu", **options: Any) -> Any:
    torch.manual_seed(0)
    return lm.LMGen(lm.LMModel().eval().to(device), **options)


CHECKOUT = Form(
    "checkout", _checkout_mimi, _checkout_lm_gen, 1920, 8, 2048,
    lambda: vendor.load("modules.streaming", vendor.PERSONAPLEX),
)  # fmt: skip
SMALL = Form("small", _small_mimi, _small_lm_gen, 24, 3, 64, lambda: streaming)
FORMS = [
    pytest.param(
        CHECKOUT,
        id="checkout",
        marks=pytest.mark.skipif(
            not vendor.available(vendor.PERSONAPLEX), reason="CADENCE_PERSONAPLEX names no checkout"
        ),
    ),
    pytest.param(SMALL, id="small"),
]
