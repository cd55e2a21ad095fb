"""Where copies wait: on the tensor's device while there is room, else on the host."""

from __future__ import annotations

import pytest
import torch

from cadence_fx import aside as module
from cadence_fx.aside import aside
from cadence_fx.bytesops import bytes_equal


def test_a_copy_is_private_and_keeps_bytes_and_strides() -> None:
    value = torch.tensor([[0.0, -0.0, float("nan")], [1.0, 2.0, 3.0]]).t()
    copy = aside(value)
    assert bytes_equal(copy, value) and copy.stride() == value.stride()
    value.zero_()
    assert copy[0, 1] == 1


def test_what_has_no_bytes_is_itself() -> None:
    meta = torch.empty(3, device="meta")
    assert aside(meta) is meta and aside(7) == 7 and aside(None) is None


def test_a_copy_does_not_require_grad() -> None:
    assert not aside(torch.ones(2, requires_grad=True)).requires_grad


@pytest.mark.gpu
def test_a_device_with_room_keeps_its_copies_and_a_full_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.randn(5, 7, device="cuda").t()
    here = aside(value)
    assert here.device == value.device and here.data_ptr() != value.data_ptr()
    assert bytes_equal(here, value) and here.stride() == value.stride()
    monkeypatch.setattr(module, "_SPARE", 1)
    there = aside(value)
    assert there.device.type == "cpu" and bytes_equal(there, here)
