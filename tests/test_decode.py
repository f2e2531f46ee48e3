"""paged_attention_v1 and v2 against the oracle: every type, size and rule."""

import hypothesis.strategies as st
import oracle
import pytest
import torch
from helpers import decode, page, poisoned
from hypothesis import HealthCheck, given, settings

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
V1 = pytest.mark.needs("paged_attention_v1")


def make(lengths, heads, kv_heads, head_size, block_size, dtype, **options):
    """(query [S, H, D], pages) of random sequences."""
    query = torch.randn(len(lengths), heads, head_size).to(dtype)
    keys = [torch.randn(n, kv_heads, head_size).to(dtype) for n in lengths]
    values = [torch.randn(n, kv_heads, head_size).to(dtype) for n in lengths]
    return query, page(keys, values, block_size, **options)


def expected(query, paged, lengths, rules):
    return oracle.concatenate(
        [oracle.attend(query[s : s + 1], paged.keys[s], paged.values[s], rules, n - 1) for s, n in enumerate(lengths)]
    )


def check(backend, query, paged, lengths, rules=None, **options):
    rules = rules or oracle.Rules(query.shape[-1] ** -0.5)
    exact = expected(query, paged, lengths, rules)
    options = options | {"alibi_slopes": rules.slopes, **rules.sparse}
    oracle.assert_within_contract(decode(backend, query, paged, lengths, rules.scale, **options), exact)
    out, exp_sums, max_logits = decode(backend, query, paged, lengths, rules.scale, version="v2", **options)
    oracle.assert_within_contract(out, exact)
    for s, row in enumerate(exact.rows):
        for h, e in enumerate(row):
            maxima, sums = oracle.partition_states(e, max_logits.shape[2])
            bound = 1e-5 + 2.0**-21 * e.condition
            torch.testing.assert_close(max_logits[s, h].double(), torch.tensor(maxima).double(), rtol=1e-6, atol=bound)
            torch.testing.assert_close(exp_sums[s, h].double(), torch.tensor(sums).double(), rtol=1e-5 + bound, atol=0)
    return out


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (6, 1), (8, 2), (5, 5), (7, 1)])
def test_lengths(backend, dtype, heads, kv_heads):
    lengths = [0, 1, 15, 16, 17, 511, 512, 513, 1025]
    query, paged = make(lengths, heads, kv_heads, 64, 16, dtype)
    check(backend, query, paged, lengths)


@pytest.mark.parametrize("head_size", [8, 32, 64, 72, 80, 96, 112, 120, 128, 144, 160, 192, 256, 512, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_sizes(backend, head_size, dtype):
    lengths = [3, 70]
    query, paged = make(lengths, 4, 2, head_size, 16, dtype)
    check(backend, query, paged, lengths)


@pytest.mark.every_backend
def test_head_size_100_in_float32(backend):
    query, paged = make([35], 2, 1, 100, 16, torch.float32)
    check(backend, query, paged, [35])


@pytest.mark.every_backend
@pytest.mark.parametrize("block_size", [1, 5, 8, 16, 32, 64, 96, 128])
def test_block_sizes(backend, block_size):
    lengths = [1, 130, 600]
    for dtype in DTYPES:
        query, paged = make(lengths, 3, 1, 32, block_size, dtype)
        check(backend, query, paged, lengths)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 71])
def test_groups(backend, group):
    for dtype in DTYPES:
        query, paged = make([40], group, 1, 64, 16, dtype)
        check(backend, query, paged, [40])


@pytest.mark.every_backend
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_with_scales(backend, kv_cache_dtype, dtype):
    lengths = [5, 530]
    for scales in [(0.5, 2.0), (torch.tensor([0.25, 1.5]), torch.tensor([3.0, 0.125]))]:
        query, paged = make(lengths, 4, 2, 64, 16, dtype, kv_cache_dtype=kv_cache_dtype, k_scale=scales[0], v_scale=scales[1])
        check(backend, query, paged, lengths)


def test_one_element_scale_tensor_serves_every_kv_head(backend):
    query, paged = make([20], 4, 2, 32, 16, torch.float32, kv_cache_dtype="fp8", k_scale=0.5, v_scale=2.0)
    paged.k_scale, paged.v_scale = torch.tensor([0.5]), torch.tensor([2.0])
    check(backend, query, paged, [20])


def test_scales_of_a_cache_of_the_query_type_are_not_used(backend):
    query, paged = make([20], 4, 2, 32, 16, torch.float32)
    paged.k_scale = paged.v_scale = 3.0
    check(backend, query, paged, [20])


@pytest.mark.every_backend
def test_alibi(backend):
    lengths = [9, 700]
    query, paged = make(lengths, 6, 2, 64, 16, torch.float32)
    check(backend, query, paged, lengths, oracle.Rules(0.125, slopes=torch.tensor([0.5, 0.25, 0.125, 0.06, 0.03, -0.01])))


@pytest.mark.every_backend
@pytest.mark.parametrize("step, rank", [(0, 0), (1, 0), (2, 3), (-1, 0), (-3, 2)])
@pytest.mark.parametrize("local, vert, size", [(1, 4, 32), (2, 3, 64), (0, 2, 16)])
def test_block_sparse(backend, step, rank, local, vert, size):
    lengths = [1, 40, 700]
    query, paged = make(lengths, 6, 2, 32, 16, torch.float32)
    names = ("tp_rank", "blocksparse_local_blocks", "blocksparse_vert_stride", "blocksparse_block_size")
    sparse = dict(zip((*names, "blocksparse_head_sliding_step"), (rank, local, vert, size, step), strict=True))
    check(backend, query, paged, lengths, oracle.Rules(0.2, sparse=sparse))
    slopes = torch.linspace(0.01, 0.3, 6)
    check(backend, query, paged, lengths, oracle.Rules(0.2, sparse=sparse, slopes=slopes))


def test_blocks_hidden_by_block_sparse_may_hold_nan(backend):
    # local 1, stride 4, one head: key blocks 0 .. 9 of 32 tokens; seen are 9 (local) and those with (b + 1) % 4 == 0.
    query, paged = make([320], 1, 1, 32, 16, torch.float32)
    hidden = [b for b in range(10) if b != 9 and (b + 1) % 4]
    for b in hidden:
        ids = paged.block_tables[0, 2 * b : 2 * b + 2].long()
        paged.key_cache[ids] = paged.value_cache[ids] = float("nan")
    sparse = {"tp_rank": 0, "blocksparse_local_blocks": 1, "blocksparse_vert_stride": 4, "blocksparse_block_size": 32}
    check(backend, query, paged, [320], oracle.Rules(0.2, sparse=sparse | {"blocksparse_head_sliding_step": 0}))


def test_empty_batch(backend):
    query, paged = make([16], 2, 1, 32, 16, torch.float32)
    paged.block_tables = paged.block_tables[:0]
    out = decode(backend, query[:0], paged, torch.empty(0, dtype=torch.int32), 1.0)
    assert out.shape == (0, 2, 32)


def test_strided_views(backend):
    lengths = [30, 50]
    query, paged = make(lengths, 4, 2, 32, 16, torch.float16)
    exact = expected(query, paged, lengths, oracle.Rules(0.3))
    wide = torch.zeros(2, 4, 96, dtype=torch.float16)
    wide[..., 32:64] = query
    by_head = poisoned((4, 2, 32), torch.float16).transpose(0, 1)
    paged.block_tables = torch.stack([paged.block_tables] * 2, -1)[..., 0]
    lens = torch.tensor([30, -1, 50, -1])[::2]
    out = decode(backend, wide[..., 32:64], paged, lens, 0.3, out=by_head, lens_dtype=torch.int64)
    oracle.assert_within_contract(out, exact)
    # Caches that are slices of a larger pool: K and V interleaved by block.
    pool = torch.stack([paged.key_cache.flatten(1), paged.value_cache.flatten(1)], 1)
    paged.key_cache = pool[:, 0].unflatten(1, paged.key_cache.shape[1:])
    paged.value_cache = pool[:, 1].unflatten(1, paged.value_cache.shape[1:])
    oracle.assert_within_contract(decode(backend, query, paged, lengths, 0.3), exact)


def test_error_norm_is_that_of_rounding(backend):
    """On random inputs 16-bit outputs are within 1.1 times the error of rounding the exact result, float32 within 2e-6."""
    lengths = [600, 900]
    for dtype in DTYPES:
        query, paged = make(lengths, 4, 1, 128, 16, dtype)
        exact = expected(query, paged, lengths, oracle.Rules(128**-0.5)).out
        error = (decode(backend, query, paged, lengths, 128**-0.5).double() - exact).norm()
        if dtype == torch.float32:
            assert error <= 2e-6 * exact.norm()
        else:
            assert error <= 1.1 * (exact.to(dtype).double() - exact).norm()


@pytest.mark.every_backend
def test_same_signed_products_keep_float32_grade_logits(backend):
    """All products positive: a plain running sum over 256 dims would lose what the contract promises."""
    lengths = [513]
    query = torch.rand(1, 2, 256) + 0.5
    keys, values = torch.rand(513, 1, 256) + 0.5, torch.randn(513, 1, 256)
    check(backend, query, page([keys], [values], 16), lengths, oracle.Rules(1.0))


@pytest.mark.heavy
@settings(deadline=None, derandomize=True, max_examples=40, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_call(backend, data):
    draw = data.draw
    dtype = draw(st.sampled_from(DTYPES))
    kv_cache_dtype = draw(st.sampled_from(["auto", "fp8_e4m3", "fp8_e5m2"]))
    unit = 16 if kv_cache_dtype != "auto" else 16 // dtype.itemsize
    head_size = unit * draw(st.integers(1, 9))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    block_size = draw(st.sampled_from([1, 3, 8, 16, 24, 32]))
    lengths = draw(st.lists(st.integers(0, 600), min_size=1, max_size=3))
    scales = [draw(st.sampled_from([0.5, 1.0, 2.0])) for _ in range(2)] if kv_cache_dtype != "auto" else (1.0, 1.0)
    torch.manual_seed(draw(st.integers(0, 1000)))
    table = draw(st.sampled_from([torch.int32, torch.int64]))
    query, paged = make(
        lengths,
        kv_heads * group,
        kv_heads,
        head_size,
        block_size,
        dtype,
        kv_cache_dtype=kv_cache_dtype,
        k_scale=scales[0],
        v_scale=scales[1],
        table_dtype=table,
    )
    slopes = torch.rand(kv_heads * group) if draw(st.booleans()) else None
    check(backend, query, paged, lengths, oracle.Rules(draw(st.sampled_from([0.05, 0.3])), slopes=slopes))


@pytest.mark.every_backend
@pytest.mark.parametrize(
    "error, name, options",
    [
        (TypeError, "key_cache", {"kv_cache_dtype": "fp8"}),
        (ValueError, "kv_cache_dtype is 'int3'", {"kv_cache_dtype": "int3"}),
        (ValueError, "alibi_slopes", {"alibi_slopes": torch.ones(3)}),
        (ValueError, "blocksparse_block_size is 24", {"blocksparse_vert_stride": 2, "blocksparse_block_size": 24}),
    ],
)
def test_wrong_calls_are_errors_on_every_backend(backend, error, name, options):
    """The fallbacks refuse what the operators refuse, before anything is written."""
    query, paged = make([20], 4, 2, 32, 16, torch.float32)
    paged.kv_cache_dtype = options.get("kv_cache_dtype", "auto")
    options = {k: v for k, v in options.items() if k != "kv_cache_dtype"}
    out = poisoned(query.shape)
    with pytest.raises(error, match=name):
        decode(backend, query, paged, [20], 1.0, out=out, **options)
    assert out.isnan().all()


@pytest.mark.every_backend
@pytest.mark.cpu_only  # NaN rows on a GPU: test_device_errors.py
def test_a_length_beyond_the_longest_is_an_error(backend):
    query, paged = make([20], 4, 2, 32, 16, torch.float32)
    out = poisoned(query.shape)
    with pytest.raises(ValueError, match=r"seq_lens\[0\] is 20"):
        decode(backend, query, paged, [20], 1.0, out=out, max_seq_len=19)
    assert out.isnan().all()
