"""A frame of PersonaPlex (80 ms): its codec and its language model, from the checkout that CADENCE_PERSONAPLEX names.

| variant | what it is |
| ------- | ---------- |
| eager   | the vendor's code with its CUDA graphs off |
| vendor  | with the CUDA graphs that the vendor captures by hand: the codec's transformers and the language model's |
| cadence | both objects bound, the backend's three replays |
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import cadence_fx
from bench.family import EAGER, OURS, VENDOR, Family
from bench.family_moshi import Moshi
from bench.vendor import personaplex
from cadence_fx.adapters.personaplex import PersonaMimiStream
from cadence_fx.adapters.personaplex_lm import PersonaDialogueStream


class PersonaPlex(Moshi):
    """Moshi's frame; of the 16 codes that are drawn, the first eight are spoken."""

    def build(self, device: torch.device, small: bool) -> tuple[Any, Any]:
        if small:
            sizes = dataclasses.replace(personaplex.SMALL_PERSONA_MIMI, bins=personaplex.SMALL_PERSONA.bins)
            return personaplex.build_mimi(sizes, device), personaplex.build_lm_gen(personaplex.SMALL_PERSONA, device)
        return personaplex.build_mimi(device=device), personaplex.build_lm_gen(device=device)

    def bind(self) -> tuple[PersonaMimiStream, PersonaDialogueStream]:
        backend = cadence_fx.cadence
        return PersonaMimiStream(self.mimi, backend=backend), PersonaDialogueStream(self.gen, backend=backend)


# Under these flags PyTorch's replicate padding on CUDA breaks Dynamo's graph.
FAMILY = Family(PersonaPlex, (EAGER, VENDOR, OURS), deterministic=False)
