"""The contracts of Token2Wav as released, from numbers alone: a prompt of 302 frames and 10 solver steps."""

from __future__ import annotations

from cadence_fx.adapters.token2wav_geometry import Geometry, Reach
from cadence_fx.contract import Contract

PROMPT, STEPS = 302, 10
REACH = Reach(block=16, f0_left=8, f0_right=3, history=31, right=5, samples=480, harmonics=9)


def packed() -> dict[str, Contract]:
    """Those of MiniCPM-o 4.5 in `stepaudio2-minicpmo`."""
    geometry = Geometry(PROMPT, STEPS)
    return _named(*_solver(geometry), *(geometry.vocoder_contract(overlap) for overlap in (0, 8)))


def causal() -> dict[str, Contract]:
    """Those in `minicpmo-utils`."""
    geometry = Geometry(PROMPT, STEPS, two_rates=True)
    passes = (REACH.contract(geometry, joined=joined) for joined in (False, True))
    return _named(*_solver(geometry), *passes, REACH.final_contract(geometry))


def untrimmed() -> dict[str, Contract]:
    """Those of Lychee-FD; that of the conformer is refused."""
    geometry = Geometry(PROMPT, STEPS, trimmed=False)
    return _named(*_solver(geometry), *(geometry.vocoder_contract(overlap) for overlap in (0, 8)))


def _solver(geometry: Geometry) -> tuple[Contract, Contract]:
    return geometry.conformer_contract(), geometry.flow_contract()


def _named(*contracts: Contract) -> dict[str, Contract]:
    return {str(contract.name): contract for contract in contracts}
