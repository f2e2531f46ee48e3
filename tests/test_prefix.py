"""prefix_attention against the oracle: chunks over cached contexts, every rule and combination."""

import itertools
import math

import hypothesis.strategies as st
import oracle
import pytest
import torch
from helpers import make_chunk, poisoned, prefix
from hypothesis import HealthCheck, given, settings

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make(shape, heads, kv_heads, head_size, block_size, dtype, **options):
    """A chunk; shape: (queries, context) of each sequence."""
    queries = [torch.randn(n, heads, head_size).to(dtype) for n, _ in shape]
    keys, values = ([torch.randn(n + c, kv_heads, head_size).to(dtype) for n, c in shape] for _ in range(2))
    chunk = make_chunk(queries, keys, values, [c for _, c in shape], block_size, **options)
    for s, (_, context) in enumerate(shape):  # the chunk's own keys are read as they are, not from the cache
        chunk.paged.keys[s] = torch.cat([chunk.paged.keys[s][:context], keys[s][context:].double()])
        chunk.paged.values[s] = torch.cat([chunk.paged.values[s][:context], values[s][context:].double()])
    return chunk


def expected(chunk, rules):
    rows = zip(chunk.starts, chunk.starts[1:], chunk.contexts, chunk.paged.keys, chunk.paged.values, strict=False)
    return oracle.concatenate([oracle.attend(chunk.query[a:b], k, v, rules, c) for a, b, c, k, v in rows])


def options_of(rules):
    return {
        "alibi_slopes": rules.slopes,
        "sliding_window": rules.window,
        "logits_soft_cap": rules.soft_cap,
        "sinks": rules.sinks,
    }


def check(backend, chunk, rules=None, precisions=("default", "float32"), **options):
    rules = rules or oracle.Rules(chunk.query.shape[-1] ** -0.5)
    exact = expected(chunk, rules)
    for precision in precisions:
        out, lse = prefix(backend, chunk, rules.scale, precision=precision, **options_of(rules), **options)
        oracle.assert_within_contract(out, exact, precision == "default", lse)


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (6, 1), (4, 2), (3, 3)])
def test_chunks_and_contexts(backend, dtype, heads, kv_heads):
    check(backend, make([(1, 0), (1, 40), (17, 0), (5, 127), (9, 129), (0, 30), (33, 16)], heads, kv_heads, 64, 16, dtype))


@pytest.mark.parametrize("head_size", [8, 32, 72, 80, 96, 112, 120, 128, 144, 160, 192, 256, 512, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_sizes(backend, head_size, dtype):
    check(backend, make([(7, 20)], 4, 2, head_size, 16, dtype))


@pytest.mark.every_backend
def test_head_size_100_in_float32(backend):
    check(backend, make([(3, 20)], 2, 1, 100, 16, torch.float32))


@pytest.mark.every_backend
@pytest.mark.parametrize("block_size", [1, 5, 8, 32, 96, 128])
def test_block_sizes(backend, block_size):
    check(backend, make([(6, 133), (2, 1)], 2, 1, 32, block_size, torch.bfloat16))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 16, 71])
def test_groups(backend, group):
    check(backend, make([(5, 30)], group, 1, 32, 16, torch.bfloat16))


@pytest.mark.every_backend
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_context_with_scales(backend, kv_cache_dtype, dtype):
    for scales in [(0.5, 2.0), (torch.tensor([0.25, 1.5]), torch.tensor([3.0, 0.125]))]:
        options = {"kv_cache_dtype": kv_cache_dtype, "k_scale": scales[0], "v_scale": scales[1]}
        check(backend, make([(5, 140), (9, 0)], 4, 2, 32, 16, dtype, **options))


RULES = {
    "alibi": {"slopes": torch.tensor([0.5, 0.25, 0.06, -0.02])},
    "window": {"window": 21},
    "cap": {"soft_cap": 1.5},
    "sinks": {"sinks": torch.tensor([0.5, 2.0, -1.0, 4.0])},
}


@pytest.mark.every_backend
@pytest.mark.parametrize("names", [c for n in range(1, 5) for c in itertools.combinations(RULES, n)], ids="-".join)
def test_rules_together(backend, names):
    rules = oracle.Rules(0.4, **{k: v for name in names for k, v in RULES[name].items()})
    for dtype in (torch.float32, torch.bfloat16):
        check(backend, make([(13, 150), (40, 0), (1, 7)], 4, 2, 32, 16, dtype), rules)


def test_every_rule_over_an_fp8_context(backend):
    rules = oracle.Rules(0.4, **{k: v for rule in RULES.values() for k, v in rule.items()})
    scale = torch.tensor([0.5, 2.0])
    for dtype in DTYPES:
        chunk = make([(13, 150)], 4, 2, 32, 16, dtype, kv_cache_dtype="fp8_e4m3", k_scale=scale, v_scale=scale)
        check(backend, chunk, rules)


@pytest.mark.every_backend
@pytest.mark.parametrize("window", [1, 2, 16, 128, 129, 1000])
def test_windows(backend, window):
    check(backend, make([(20, 290)], 2, 1, 16, 16, torch.float32), oracle.Rules(0.3, window=window))


@pytest.mark.every_backend
@pytest.mark.parametrize("window", [None, 0, -1])
def test_window_off(backend, window):
    chunk = make([(5, 30)], 2, 1, 16, 16, torch.float32)
    out, _ = prefix(backend, chunk, 0.3, sliding_window=window)
    oracle.assert_within_contract(out, expected(chunk, oracle.Rules(0.3)))


@pytest.mark.every_backend
def test_context_before_the_window_may_hold_nan(backend):
    """Keys that no row of the call sees: whole blocks, and the first tokens of the block where the window begins."""
    chunk = make([(4, 300)], 2, 1, 16, 16, torch.float32)
    rules = oracle.Rules(0.3, window=37)
    exact = expected(chunk, rules)
    first = 300 - 37 + 1
    ids = chunk.paged.block_tables[0].long()
    chunk.paged.key_cache[ids[: first // 16]] = chunk.paged.value_cache[ids[: first // 16]] = math.nan
    chunk.paged.key_cache[ids[first // 16], :, :, : first % 16] = math.nan
    chunk.paged.value_cache[ids[first // 16], :, :, : first % 16] = math.nan
    out, lse = prefix(backend, chunk, 0.3, sliding_window=37)
    oracle.assert_within_contract(out, exact, lse=lse)


def test_rows_beyond_the_last_query_are_left_alone(backend):
    chunk = make([(5, 30)], 2, 1, 16, 16, torch.float32)
    exact = expected(chunk, oracle.Rules(0.3))
    for name in ("query", "key", "value"):
        tensor = getattr(chunk, name)
        setattr(chunk, name, torch.cat([tensor, poisoned((3, *tensor.shape[1:]))]))
    out, lse = prefix(backend, chunk, 0.3, out=torch.full((8, 2, 16), 7.0))
    oracle.assert_within_contract(out[:5], exact, lse=lse[:, :5])
    assert (out[5:] == 7.0).all() and lse[:, 5:].isnan().all()


def test_a_table_without_columns_serves_empty_contexts(backend):
    chunk = make([(5, 0), (3, 0)], 2, 1, 16, 16, torch.float32, padding=0)
    assert chunk.paged.block_tables.shape == (2, 0)
    check(backend, chunk)


def test_strided_views(backend):
    chunk = make([(6, 50), (9, 3)], 4, 2, 32, 16, torch.float16)
    exact = expected(chunk, oracle.Rules(0.2))
    # Query, key and value as slices of one projection, as models have them.
    packed = torch.cat([chunk.query, chunk.key, chunk.value], 1)
    chunk.query, chunk.key, chunk.value = packed[:, :4], packed[:, 4:6], packed[:, 6:]
    by_head = poisoned((4, 15, 32), torch.float16).transpose(0, 1)
    out, lse = prefix(backend, chunk, 0.2, out=by_head, lens_dtype=torch.int64)
    oracle.assert_within_contract(out, exact, True, lse)
    chunk.query = chunk.query.transpose(1, 2).contiguous().transpose(1, 2)  # stride of dims is not 1
    out, lse = prefix(backend, chunk, 0.2)
    oracle.assert_within_contract(out, exact, True, lse)


def test_error_norm_is_near_that_of_rounding(backend):
    for dtype in (torch.float16, torch.bfloat16):
        chunk = make([(40, 300)], 2, 1, 64, 16, dtype)
        exact = expected(chunk, oracle.Rules(0.125)).out
        rounded = (exact.to(dtype).double() - exact).norm()
        for precision, factor in (("default", 1.5), ("float32", 1.1)):
            out, _ = prefix(backend, chunk, 0.125, precision=precision)
            assert (out.double() - exact).norm() <= factor * rounded


@pytest.mark.heavy
@settings(deadline=None, derandomize=True, max_examples=40, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_call(backend, data):
    draw = data.draw
    dtype = draw(st.sampled_from(DTYPES))
    kv_cache_dtype = draw(st.sampled_from(["auto", "fp8_e4m3", "fp8_e5m2"]))
    unit = 16 if kv_cache_dtype != "auto" else 16 // dtype.itemsize
    head_size = unit * draw(st.integers(1, 7))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 7))
    heads = kv_heads * group
    block_size = draw(st.sampled_from([1, 3, 8, 16, 32]))
    shape = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 270)), min_size=1, max_size=3))
    torch.manual_seed(draw(st.integers(0, 1000)))
    rules = oracle.Rules(
        draw(st.sampled_from([0.05, 0.3])),
        soft_cap=draw(st.sampled_from([0.0, 2.0])),
        slopes=torch.rand(heads) if draw(st.booleans()) else None,
        window=draw(st.sampled_from([0, 1, 30, 200])),
        sinks=torch.randn(heads) if draw(st.booleans()) else None,
    )
    if sum(n for n, _ in shape) == 0:
        return
    check(backend, make(shape, heads, kv_heads, head_size, block_size, dtype, kv_cache_dtype=kv_cache_dtype), rules)
