"""Rewrites that were measured to change bytes on a device, at the shapes of the flow decoder's blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import fx

from tests.backend.test_tempting_rewrites import REWRITES, check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda rewrite: rewrite.__name__)
def test_certificate_decides(rewrite: Callable[[fx.Graph], int], monkeypatch: pytest.MonkeyPatch) -> None:
    check(rewrite, monkeypatch, "cuda", width=512, n=50)
