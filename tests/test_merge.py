"""Merging two partial attention results by their logsumexp."""

import math

import pytest
import torch

pytestmark = [pytest.mark.needs("merge_attn_states"), pytest.mark.every_backend]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPSILON = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def reference(prefix_out, prefix_lse, suffix_out, suffix_lse):
    """In float64: the weights are exp(lse - logaddexp of both)."""
    prefix_lse, suffix_lse = prefix_lse.double(), suffix_lse.double()
    lse = torch.logaddexp(prefix_lse, suffix_lse)
    weights = [(part - lse).exp().T[:, :, None] for part in (prefix_lse, suffix_lse)]
    return weights[0] * prefix_out.double() + weights[1] * suffix_out.double(), lse


def merge(backend, prefix_out, prefix_lse, suffix_out, suffix_lse):
    out = torch.full_like(prefix_out, 7.0)
    lse = torch.full_like(prefix_lse, 7.0)
    backend.merge_attn_states(out, lse, prefix_out, prefix_lse, suffix_out, suffix_lse)
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 80), (33, 4, 128), (2, 2, 257)], ids=str)
def test_matches_float64(backend, dtype, shape):
    torch.manual_seed(0)
    prefix, suffix = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    prefix_lse, suffix_lse = 4 * torch.randn(shape[1], shape[0]), 4 * torch.randn(shape[1], shape[0])
    out, lse = merge(backend, prefix, prefix_lse, suffix, suffix_lse)
    expected_out, expected_lse = reference(prefix, prefix_lse, suffix, suffix_lse)
    bound = EPSILON[dtype] * expected_out.abs() + 4e-6 * torch.maximum(prefix.abs(), suffix.abs()).double()
    assert ((out.double() - expected_out).abs() <= bound).all()
    assert ((lse.double() - expected_lse).abs() <= 1e-5 * expected_lse.abs().clamp(min=1)).all()


def test_worked_example(backend):
    one, three = torch.ones(1, 1, 8), torch.full((1, 1, 8), 3.0)
    out, lse = merge(backend, one, torch.zeros(1, 1), three, torch.full((1, 1), math.log(3)))
    torch.testing.assert_close(out, torch.full((1, 1, 8), 2.5), rtol=1e-6, atol=0)
    torch.testing.assert_close(lse, torch.full((1, 1), math.log(4)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("empty", [-math.inf, math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("which", ["prefix", "suffix"])
def test_an_empty_part_is_not_read(backend, empty, dtype, which):
    """The other part comes through bit for bit, even when what the empty part holds is NaN."""
    torch.manual_seed(1)
    full, full_lse = torch.randn(4, 2, 72).to(dtype), torch.randn(2, 4)
    nothing, nothing_lse = torch.full((4, 2, 72), math.nan, dtype=dtype), torch.full((2, 4), empty)
    parts = [(nothing, nothing_lse), (full, full_lse)]
    if which == "suffix":
        parts.reverse()
    out, lse = merge(backend, *parts[0], *parts[1])
    assert torch.equal(out, full)
    assert torch.equal(lse, full_lse)


@pytest.mark.parametrize("prefix_lse", [-math.inf, math.inf])
@pytest.mark.parametrize("suffix_lse", [-math.inf, math.inf])
def test_two_empty_parts_are_an_empty_part(backend, prefix_lse, suffix_lse):
    nan = torch.full((3, 2, 40), math.nan)
    out, lse = merge(backend, nan, torch.full((2, 3), prefix_lse), nan.clone(), torch.full((2, 3), suffix_lse))
    assert torch.equal(out, torch.zeros(3, 2, 40))
    assert torch.equal(lse, torch.full((2, 3), -math.inf))


def test_empty_and_full_rows_side_by_side(backend):
    torch.manual_seed(2)
    prefix, suffix = torch.randn(6, 2, 16), torch.randn(6, 2, 16)
    prefix_lse, suffix_lse = torch.randn(2, 6), torch.randn(2, 6)
    prefix_lse[:, 1::3] = -math.inf
    suffix_lse[:, 2::3] = -math.inf
    out, lse = merge(backend, prefix, prefix_lse, suffix, suffix_lse)
    assert torch.equal(out[1::3], suffix[1::3])
    assert torch.equal(out[2::3], prefix[2::3])
    expected_out, expected_lse = reference(prefix, prefix_lse, suffix, suffix_lse)
    torch.testing.assert_close(out[0::3].double(), expected_out[0::3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_large_logsumexps_do_not_overflow(backend):
    prefix, suffix = torch.full((1, 2, 8), 1.0), torch.full((1, 2, 8), 2.0)
    out, lse = merge(backend, prefix, torch.tensor([[1e4], [-1e4]]), suffix, torch.tensor([[1e4], [-1e4 - 200]]))
    torch.testing.assert_close(out, torch.tensor([1.5, 1.0])[None, :, None].expand(1, 2, 8))
    torch.testing.assert_close(lse, torch.tensor([[1e4 + math.log(2)], [-1e4]]))


@pytest.mark.parametrize("target", ["prefix", "suffix"])
def test_in_place(backend, target):
    torch.manual_seed(3)
    prefix, suffix = torch.randn(9, 3, 48), torch.randn(9, 3, 48)
    prefix_lse, suffix_lse = torch.randn(3, 9), torch.randn(3, 9)
    expected, expected_lse = merge(backend, prefix, prefix_lse, suffix, suffix_lse)
    out, lse = (prefix, prefix_lse) if target == "prefix" else (suffix, suffix_lse)
    backend.merge_attn_states(out, lse, prefix, prefix_lse, suffix, suffix_lse)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_without_out_lse(backend):
    torch.manual_seed(4)
    prefix, suffix = torch.randn(5, 2, 32), torch.randn(5, 2, 32)
    prefix_lse, suffix_lse = torch.randn(2, 5), torch.randn(2, 5)
    expected, _ = merge(backend, prefix, prefix_lse, suffix, suffix_lse)
    out = torch.empty_like(prefix)
    backend.merge_attn_states(out, None, prefix, prefix_lse, suffix, suffix_lse)
    assert torch.equal(out, expected)


def test_strides_are_honoured_and_gaps_left_alone(backend):
    torch.manual_seed(5)
    tokens, heads, size = 7, 3, 24
    prefix = torch.randn(tokens, 2 * heads, size)[:, ::2]
    suffix = torch.randn(heads, tokens, size).transpose(0, 1)
    prefix_lse, suffix_lse = torch.randn(tokens, heads).T, torch.randn(heads, 2 * tokens)[:, ::2]
    expected, expected_lse = merge(
        backend, prefix.contiguous(), prefix_lse.contiguous(), suffix.contiguous(), suffix_lse.contiguous()
    )
    room, lse_room = torch.full((tokens, heads, 2 * size), 7.0), torch.full((tokens, heads, 2), 7.0)
    backend.merge_attn_states(room[..., ::2], lse_room[..., 0].T, prefix, prefix_lse, suffix, suffix_lse)
    assert torch.equal(room[..., ::2], expected)
    assert torch.equal(lse_room[..., 0].T, expected_lse)
    assert (room[..., 1::2] == 7).all()
    assert (lse_room[..., 1] == 7).all()


@pytest.mark.parametrize("shape", [(0, 2, 16), (3, 0, 16), (3, 2, 0)], ids=str)
def test_nothing_to_merge(backend, shape):
    out = torch.empty(shape)
    lse = torch.zeros(shape[1], shape[0])
    backend.merge_attn_states(out, None, torch.empty(shape), lse, torch.empty(shape), lse.clone())
