"""The Freeze-Omni adapter on a device, small: windows under one autocast, after eager calls whose casts it keeps."""

from __future__ import annotations

import pytest
import torch

import cadence_fx
from bench import vendor
from bench.vendor import freeze_omni
from cadence_fx.adapters.freeze_omni import FreezeOmniStream
from cadence_fx.bytesops import bytes_equal

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


@torch.no_grad()
def test_a_session_under_one_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # other tests may have initialised CUDA without it
    sizes = vendor.SMALL_TICODEC
    reference, codec = (vendor.build_generator(sizes, DEVICE) for _ in range(2))
    windows = list(freeze_omni.session((75, 50, 230, 9, 160), sizes, DEVICE))
    stream = FreezeOmniStream(codec, backend=cadence_fx.cadence)
    with cadence_fx.deterministic(warn_only=True):
        with torch.autocast("cuda", torch.bfloat16):
            expected = [window.decode(reference) for window in windows]
            if not all(bytes_equal(window.decode(reference), e) for window, e in zip(windows, expected, strict=True)):
                pytest.skip("eager does not repeat itself on this device")
            windows[-1].decode(codec)  # casts of its weights are kept from here
            stream.warm_up(cadence_fx.warm_up)
            actual = [window.decode(codec) for window in windows]
        with torch.autocast("cuda", torch.bfloat16):  # its casts are new
            again = [window.decode(codec) for window in windows]
    for number, made in enumerate(zip(expected, actual, again, strict=True)):
        assert bytes_equal(*made[:2]) and bytes_equal(*made[::2]), f"window {number}"
    report = cadence_fx.report(stream.step)
    declared = sum(window.codes.shape[1] in stream.windows.sizes for window in windows)
    assert (report["replays"], report["misses"], report["late_captures"]) == (2 * declared, {}, 0)
