"""Comparison of bytes: what torch.equal gets wrong, and where a difference is."""

from __future__ import annotations

import hashlib

import pytest
import torch

from cadence_fx.bytesops import as_integers, bytes_equal, digest, fingerprint, first_difference

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
]


def test_zero_and_minus_zero_differ_and_one_nan_equals_itself() -> None:
    zero, minus, nan = torch.tensor([0.0]), torch.tensor([-0.0]), torch.tensor([float("nan")])
    assert torch.equal(zero, minus) and not bytes_equal(zero, minus)
    assert not torch.equal(nan, nan) and bytes_equal(nan, nan)


def test_nan_payloads_differ() -> None:
    one, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert bool(torch.isnan(one) & torch.isnan(other)) and not bytes_equal(one, other)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.complex128])
def test_every_dtype_sees_one_changed_element(dtype: torch.dtype) -> None:
    left = torch.arange(12).reshape(3, 4).to(dtype)
    right = left.clone()
    assert bytes_equal(left, right)
    right[2, 1] = 0 if dtype is torch.bool else 77
    assert not bytes_equal(left, right)
    index, ranges, count = first_difference(left, right) or ((), (), 0)
    assert (index, ranges, count) == ((2, 1), ((2, 2), (1, 1)), 1)


def test_strides_do_not_matter_and_shape_and_dtype_do() -> None:
    x = torch.randn(3, 4)
    assert bytes_equal(x.t(), x.t().contiguous())
    assert not bytes_equal(x, x.reshape(4, 3))
    assert not bytes_equal(torch.zeros(2, dtype=torch.int32), torch.zeros(2))


def test_the_range_covers_every_difference() -> None:
    left, right = torch.zeros(2, 9, 3), torch.zeros(2, 9, 3)
    right[0, 4:7, 1] = 1
    right[1, 5, 2] = 1
    index, ranges, count = first_difference(left, right) or ((), (), 0)
    assert index == (0, 4, 1) and ranges == ((0, 1), (4, 6), (1, 2)) and count == 4
    assert first_difference(left, left) is None


def test_conjugated_and_negated_views() -> None:
    z = torch.randn(4, dtype=torch.complex64)
    assert bytes_equal(z.conj(), z.conj().resolve_conj())
    assert not bytes_equal(z.conj(), z)
    assert bytes_equal(z.conj().imag, (-z.imag))


def test_digest_is_of_the_row_major_bytes() -> None:
    x = torch.randn(3, 5)
    assert digest(x) == hashlib.sha256(x.numpy().tobytes()).hexdigest()
    assert digest(x.t()) == digest(x.t().contiguous()) != digest(x)
    assert digest(x, x) != digest(x)


def test_as_integers_shares_memory() -> None:
    x = torch.zeros(2)
    as_integers(x)[0] = 0x3F800000
    assert x.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64])
def test_a_fingerprint_sees_one_element_and_an_exchange(dtype: torch.dtype) -> None:
    x = torch.zeros(3, 700_000).to(dtype)
    x[1, 5] = 1
    before = fingerprint(x)
    assert fingerprint(x.clone()) == before == fingerprint(x.t().contiguous().t())
    for row, column in ((0, 0), (2, 699_999)):
        x[row, column] = 1
        assert fingerprint(x) != before
        x[row, column] = 0
    x[1, 5], x[1, 6] = 0, 1
    assert fingerprint(x) != before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_fingerprint_sees_signs(dtype: torch.dtype) -> None:
    x = torch.randn(4096).to(dtype)
    assert fingerprint(x) != fingerprint(-x)
    assert fingerprint(torch.empty(0)) == 0


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized_and_sparse_tensors_are_compared_by_what_they_consist_of() -> None:
    x = torch.eye(3)
    one, other = (torch.quantize_per_tensor(x, scale, 0, torch.qint8) for scale in (0.1, 0.2))
    assert bytes_equal(one, one.clone()) and not bytes_equal(one, other)
    assert bytes_equal(x.to_sparse(), x.to_sparse()) and not bytes_equal(x.to_sparse(), x.to_sparse_csr())
    assert not bytes_equal(x.to_sparse(), (x * 2).to_sparse()) and not bytes_equal(x, x.to_sparse())
    assert bytes_equal(x.to("meta"), x.to("meta")) and not bytes_equal(x.to("meta"), x)
    assert digest(one) != digest(other) and digest(x.to_sparse()) == digest(x.to_sparse())
    with pytest.raises(TypeError, match="qint8"):
        as_integers(one)
