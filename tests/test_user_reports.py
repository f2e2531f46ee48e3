"""Inputs with exact expected values, from what users of such operators reported; ids carry the report's number.

Unless said otherwise: block size 16, head size 64, one head, scale 1. K = 0 makes every logit 0, so the output is the mean of
the visible V.
"""

import math

import pytest
import torch
from helpers import decode, make_chunk, page, poisoned, prefix

D = 64
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
pytestmark = pytest.mark.every_backend


def constant(values, heads=1, dtype=torch.float32):
    """[L, heads, D] whose token i is values[i] all along."""
    return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1).expand(-1, heads, D).to(dtype).contiguous()


def zeros(n, heads=1, dtype=torch.float32):
    return torch.zeros(n, heads, D, dtype=dtype)


def run_decode(backend, values, length=None, dtype=torch.float32, keys=None, query=None, **options):
    v = constant(values, dtype=dtype)
    paged = page([zeros(len(values), dtype=dtype) if keys is None else keys], [v], 16)
    query = zeros(1, dtype=dtype) if query is None else query
    return decode(backend, query, paged, [len(values) if length is None else length], 1.0, **options)


def run_prefix(backend, values, queries, keys=None, query=None, dtype=torch.float32, **options):
    """The last `queries` tokens of a sequence with these values."""
    context = len(values) - queries
    k = zeros(len(values), dtype=dtype) if keys is None else keys
    q = zeros(queries, dtype=dtype) if query is None else query
    chunk = make_chunk([q], [k], [constant(values, dtype=dtype)], [context], 16)
    return prefix(backend, chunk, 1.0, **options)


def value_of(out):
    """The one number that a [T, 1, D] output holds per token."""
    assert (out == out[..., :1]).all()
    return out[:, 0, 0].tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_R1a_nothing_beyond_the_end_is_read(backend, dtype, junk):
    paged = page([zeros(1, dtype=dtype)], [constant([1.0], dtype=dtype)], 16)
    for cache in (paged.key_cache, paged.value_cache):
        cache.copy_(torch.where(cache.isnan(), torch.tensor(junk, dtype=dtype), cache))
    assert value_of(decode(backend, zeros(1, dtype=dtype), paged, [1], 1.0)) == [1.0]
    out, lse = run_prefix(backend, [1.0], 1, dtype=dtype)
    assert value_of(out) == [1.0] and lse.item() == 0.0


def test_R2_alibi_bias_of_the_last_token_is_zero(backend):
    slopes = torch.tensor([math.log(2)])
    out, exp_sums, max_logits = run_decode(backend, [0, 1, 2], version="v2", alibi_slopes=slopes)
    assert value_of(out) == pytest.approx([10 / 7], rel=1e-6)
    assert max_logits[0, 0, 0].item() == 0.0 and exp_sums[0, 0, 0].item() == pytest.approx(1.75)
    assert value_of(run_decode(backend, [0, 1, 2], alibi_slopes=slopes)) == pytest.approx([10 / 7], rel=1e-6)
    out, lse = run_prefix(backend, [0, 1, 2], 1, alibi_slopes=slopes)
    assert value_of(out) == pytest.approx([10 / 7], rel=1e-6) and lse.item() == pytest.approx(0.559616, rel=1e-5)


def test_R4_new_keys_follow_the_context(backend):
    out, _ = run_prefix(backend, [0.0] * 16 + [1.0], 1, alibi_slopes=torch.tensor([math.log(2)]))
    assert value_of(out) == pytest.approx([0.5000038], rel=1e-6)


def test_R5_the_window_counts_the_token_itself(backend):
    assert value_of(run_prefix(backend, [0, 1, 2, 3, 4], 1, sliding_window=2)[0]) == [3.5]


@pytest.mark.parametrize("window", [None, 0, -1, 5, 100])
def test_R5d_window_off(backend, window):
    assert value_of(run_prefix(backend, [0, 1, 2, 3, 4], 1, sliding_window=window)[0]) == [2.0]


def test_R8_very_low_logits(backend):
    keys = torch.full((4, 1, D), -1e5 / D)
    query = torch.ones(1, 1, D)
    assert value_of(run_decode(backend, [0, 1, 2, 3], keys=keys, query=query)) == pytest.approx([1.5])
    out, lse = run_prefix(backend, [0, 1, 2, 3], 1, keys=keys, query=query)
    assert value_of(out) == pytest.approx([1.5]) and lse.item() == pytest.approx(-99998.6137, abs=0.05)


def test_R9_masks_come_after_the_cap(backend):
    out, _ = run_prefix(backend, [0, 1000], 2, logits_soft_cap=1.0)
    assert value_of(out) == [0.0, 500.0]


def test_R10b_alibi_comes_after_the_cap(backend):
    out, lse = run_prefix(backend, [1, 0], 1, logits_soft_cap=1.0, alibi_slopes=torch.tensor([1.0]))
    assert value_of(out) == pytest.approx([0.268941], rel=1e-5) and lse.item() == pytest.approx(0.313262, rel=1e-5)


def test_R11a_sink(backend):
    out, lse = run_prefix(backend, [1.0], 1, sinks=torch.tensor([0.0]))
    assert value_of(out) == [0.5] and lse.item() == pytest.approx(0.693147, rel=1e-6)


def test_R12_empty_rows_in_a_batch(backend):
    keys, values = [torch.randn(n, 1, D) for n in (5, 0, 7)], [torch.randn(n, 1, D) for n in (5, 0, 7)]
    query = torch.randn(3, 1, D)
    out, exp_sums, max_logits = decode(backend, query, page(keys, values, 16), [5, 0, 7], 1.0, version="v2")
    assert (out[1] == 0).all() and (exp_sums[1] == 0).all() and (max_logits[1] == -math.inf).all()
    for s in (0, 2):
        alone = decode(backend, query[s : s + 1], page([keys[s]], [values[s]], 16), [len(keys[s])], 1.0)
        assert torch.equal(alone[0], out[s])


def test_R15b_many_partitions_for_a_short_sequence(backend):
    partitions = 6145
    query, keys, values = torch.randn(1, 1, D), torch.randn(600, 1, D), torch.randn(600, 1, D)
    paged = page([keys], [values], 16)
    out, exp_sums, max_logits = decode(backend, query, paged, [600], 0.125, version="v2", max_seq_len=(partitions - 1) * 512)
    torch.testing.assert_close(out, decode(backend, query, paged, [600], 0.125), rtol=1e-6, atol=1e-7)
    assert (exp_sums[0, 0, 2:] == 0).all() and (max_logits[0, 0, 2:] == -math.inf).all()


@pytest.mark.parametrize("heads, kv_heads", [(28, 4), (24, 4), (71, 1), (64, 4), (40, 8), (7, 1)])
def test_R19_query_heads_of_a_group_are_neighbours(backend, heads, kv_heads):
    values = torch.arange(kv_heads, dtype=torch.float32).view(1, -1, 1).expand(3, -1, D).contiguous()
    paged = page([torch.zeros(3, kv_heads, D)], [values], 16)
    expected = (torch.arange(heads) // (heads // kv_heads)).float().view(1, -1, 1).expand(1, -1, D)
    torch.testing.assert_close(decode(backend, torch.zeros(1, heads, D), paged, [3], 1.0), expected)
    chunk = make_chunk([torch.zeros(1, heads, D)], [torch.zeros(3, kv_heads, D)], [values], [2], 16)
    torch.testing.assert_close(prefix(backend, chunk, 1.0)[0], expected)


def test_R19b_query_heads_that_do_not_divide(backend):
    paged = page([torch.zeros(3, 2, D)], [torch.zeros(3, 2, D)], 16)
    with pytest.raises(ValueError, match="query has 7 heads"):
        decode(backend, torch.zeros(1, 7, D), paged, [3], 1.0)


def test_R24c_too_few_partitions(backend):
    paged = page([zeros(1)], [zeros(1)], 16)
    buffers = poisoned((1, 1, 1)), poisoned((1, 1, 1)), poisoned((1, 1, 1, D))
    with pytest.raises(ValueError, match="max_logits has 1 partitions"):
        backend.paged_attention_v2(
            zeros(1),
            *buffers,
            zeros(1),
            paged.key_cache,
            paged.value_cache,
            1,
            1.0,
            paged.block_tables,
            torch.tensor([1]),
            16,
            513,
        )


def test_R25_the_causal_mask_is_offset_by_the_context(backend):
    out, lse = run_prefix(backend, [0, 1, 2, 3, 4], 2)
    assert value_of(out) == [1.5, 2.0]
    assert lse[0].tolist() == pytest.approx([math.log(4), math.log(5)])


@pytest.mark.parametrize("padding", [-1, 2**31 - 1])
def test_R33_ids_beyond_the_length_are_not_looked_at(backend, padding):
    paged = page([zeros(17)], [constant(range(17))], 16, padding=4)
    paged.block_tables[0, 2:] = padding
    assert value_of(decode(backend, zeros(1), paged, [17], 1.0)) == pytest.approx([8.0])


@pytest.mark.cpu_only  # NaN rows on a GPU: test_device_errors.py
def test_context_wider_than_its_table_is_an_error(backend):
    """A table narrower than the context was capped, and the output wrong without a word."""
    chunk = make_chunk([zeros(2)], [zeros(40)], [zeros(40)], [38], 16)
    chunk.paged.block_tables = chunk.paged.block_tables[:, :2]
    with pytest.raises(ValueError, match=r"block_tables has 2 blocks.*context_lens\[0\] = 38"):
        prefix(backend, chunk, 1.0)


def test_R6_rows_whose_window_holds_no_context(backend):
    """Whole tiles of the context are masked for rows 16 and on."""
    out, lse = run_prefix(backend, list(range(128)), 64, sliding_window=16)
    assert value_of(out) == pytest.approx([position - 7.5 for position in range(64, 128)])
    assert lse[0].tolist() == pytest.approx([math.log(16)] * 64)


def test_R31_the_scale_given_is_the_scale_used(backend):
    """One key of logit ln 3 at scale 0.5, one of logit 0: V = 0 has weight 3/4."""
    keys, query = torch.zeros(2, 1, D), torch.zeros(1, 1, D)
    keys[0, 0, 0], query[0, 0, 0] = 2 * math.log(3), 1.0
    paged = page([keys], [constant([0, 1])], 16)
    assert value_of(decode(backend, query, paged, [2], 0.5)) == pytest.approx([0.25])
    chunk = make_chunk([query], [keys], [constant([0, 1])], [1], 16)
    out, lse = prefix(backend, chunk, 0.5)
    assert value_of(out) == pytest.approx([0.25]) and lse.item() == pytest.approx(math.log(4))


def test_R37_slopes_of_another_type_are_an_error(backend):
    slopes = torch.tensor([0.5], dtype=torch.float16)
    with pytest.raises(TypeError, match="alibi_slopes"):
        run_decode(backend, [0, 1], alibi_slopes=slopes)
    with pytest.raises(TypeError, match="alibi_slopes"):
        run_prefix(backend, [0, 1], 1, alibi_slopes=slopes)
