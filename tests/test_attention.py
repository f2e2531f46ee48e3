"""PagedAttention, the drop-in: vLLM 0.6.3's signatures, and every method against the oracle."""

import inspect
import logging

import oracle
import pytest
import torch
from helpers import make_chunk, page, poisoned

from paged_attn_ext import PagedAttention, PagedAttentionMetadata, dispatch, fallback, ops

SIGNATURES = {
    "get_supported_head_sizes": "",
    "get_kv_cache_shape": "num_blocks block_size num_kv_heads head_size",
    "split_kv_cache": "kv_cache num_kv_heads head_size",
    "write_to_paged_cache": "key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale",
    "forward_decode": "query key_cache value_cache block_tables seq_lens max_seq_len kv_cache_dtype num_kv_heads scale "
    "alibi_slopes k_scale v_scale tp_rank=0 blocksparse_local_blocks=0 blocksparse_vert_stride=0 blocksparse_block_size=64 "
    "blocksparse_head_sliding_step=0",
    "forward_prefix": "query key value kv_cache_dtype key_cache value_cache block_tables query_start_loc seq_lens_tensor "
    "context_lens max_query_len alibi_slopes sliding_window k_scale v_scale",
    "_forward_decode_pytorch": "query key_cache value_cache block_tables seq_lens scale",
    "_forward_prefix_pytorch": "query key value key_cache value_cache block_tables query_start_loc seq_lens_tensor "
    "context_lens",
    "swap_blocks": "src_kv_cache dst_kv_cache src_to_dst",
    "copy_blocks": "kv_caches src_to_dists",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_vllms(name):
    parameters = inspect.signature(getattr(PagedAttention, name)).parameters.values()
    positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in positional]
    assert " ".join(shown) == SIGNATURES[name]


def test_metadata_fields():
    assert list(inspect.signature(PagedAttentionMetadata).parameters) == [
        "seq_lens_tensor",
        "max_decode_seq_len",
        "block_tables",
    ]


def test_cache_shape_and_views():
    shape = PagedAttention.get_kv_cache_shape(5, 16, 2, 64)
    assert shape == (2, 5, 16 * 2 * 64)
    for dtype, x in ((torch.float32, 4), (torch.float16, 8), (torch.uint8, 16)):
        key_cache, value_cache = PagedAttention.split_kv_cache(torch.zeros(shape, dtype=dtype), 2, 64)
        assert key_cache.shape == (5, 2, 64 // x, 16, x) and value_cache.shape == (5, 2, 64, 16)
    assert 256 in PagedAttention.get_supported_head_sizes()


def _spy(original, where, called):
    def spy(*args, **kwargs):
        called.append(where)
        return original(*args, **kwargs)

    return spy


@pytest.fixture(params=["native", "pytorch", "v2", "threshold"])
def path(request, monkeypatch):
    """Every way through forward_decode."""
    if request.param == "v2":
        monkeypatch.setattr(dispatch, "profile_for", lambda device: dispatch.BI_V100)
    elif request.param == "threshold":
        monkeypatch.setenv("PAGED_ATTN_PYTORCH_THRESHOLD", "10")
    else:
        monkeypatch.setenv("PAGED_ATTN_BACKEND", request.param)
    called = []
    for module in (ops, fallback):
        for name in ("paged_attention_v1", "paged_attention_v2", "prefix_attention"):
            original = getattr(module, name)

            where = (module.__name__.split(".")[-1], name)
            monkeypatch.setattr(module, name, _spy(original, where, called))
    yield request.param, called


EXPECTED_PATH = {
    "native": ("ops", "paged_attention_v1"),
    "pytorch": ("fallback", "paged_attention_v1"),
    "v2": ("ops", "paged_attention_v2"),
    "threshold": ("fallback", "paged_attention_v1"),
}


def test_forward_decode(path, threads):
    threads(1)
    lengths = [600, 9]
    query = torch.randn(4, 2, 64).transpose(0, 1)  # permuted: the result must be contiguous all the same
    keys, values = ([torch.randn(n, 2, 64) for n in lengths] for _ in range(2))
    paged = page(keys, values, 16)
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4])
    out = PagedAttention.forward_decode(
        query,
        paged.key_cache,
        paged.value_cache,
        paged.block_tables,
        torch.tensor(lengths),
        600,
        "auto",
        2,
        0.2,
        slopes,
        1.0,
        1.0,
    )
    assert out.is_contiguous() and path[1] == [EXPECTED_PATH[path[0]]]
    rules = oracle.Rules(0.2, slopes=slopes)
    exact = [oracle.attend(query[s : s + 1], paged.keys[s], paged.values[s], rules, n - 1) for s, n in enumerate(lengths)]
    oracle.assert_within_contract(out, oracle.concatenate(exact))


def test_forward_decode_takes_none_for_no_vertical_stride():
    paged = page([torch.randn(20, 1, 64)], [torch.randn(20, 1, 64)], 16)
    arguments = (paged.key_cache, paged.value_cache, paged.block_tables, torch.tensor([20]), 20, "auto", 1, 0.2, None, 1.0, 1.0)
    query = torch.randn(1, 2, 64)
    assert torch.equal(
        PagedAttention.forward_decode(query, *arguments, blocksparse_vert_stride=None),
        PagedAttention.forward_decode(query, *arguments),
    )


@pytest.mark.parametrize("backend_name", ["native", "pytorch"])
@pytest.mark.parametrize(
    "extras",
    [{}, {"scale": 0.5}, {"scale": 0.5, "logits_soft_cap": 2.0, "sinks": torch.tensor([1.0, 2.0]), "precision": "float32"}],
)
def test_forward_prefix(monkeypatch, backend_name, extras):
    monkeypatch.setenv("PAGED_ATTN_BACKEND", backend_name)
    keys, values = torch.randn(50, 1, 64), torch.randn(50, 1, 64)
    chunk = make_chunk([torch.randn(9, 2, 64)], [keys], [values], [41], 16)
    p = chunk.paged
    slopes = torch.tensor([0.1, 0.3])
    lse = poisoned((2, 9))
    tables = (p.block_tables, torch.tensor([0, 9]), torch.tensor([50]), torch.tensor([41]))
    out = PagedAttention.forward_prefix(
        chunk.query,
        chunk.key,
        chunk.value,
        "auto",
        p.key_cache,
        p.value_cache,
        *tables,
        9,
        slopes,
        20,
        1.0,
        1.0,
        lse=lse,
        **extras,
    )
    rules = oracle.Rules(extras.get("scale", 0.125), extras.get("logits_soft_cap", 0.0), slopes, 20, extras.get("sinks"))
    oracle.assert_within_contract(out, oracle.attend(chunk.query, keys, values, rules, 41), lse=lse)


def test_forward_prefix_takes_its_precision_from_the_environment(monkeypatch):
    seen = []
    monkeypatch.setattr(ops, "prefix_attention", lambda *args, precision: seen.append(precision))
    empty = torch.zeros(0, 1, 64)
    for value in ("float32", "default"):
        monkeypatch.setenv("PAGED_ATTN_PRECISION", value)
        PagedAttention.forward_prefix(empty, empty, empty, "auto", *[empty] * 6, 0, None, None, 1.0, 1.0)
    assert seen == ["float32", "default"]


def test_the_pytorch_paths_by_their_old_names():
    keys, values = torch.randn(50, 1, 64), torch.randn(50, 1, 64)
    paged = page([keys], [values], 16)
    query = torch.randn(1, 2, 64)
    caches = (paged.key_cache, paged.value_cache, paged.block_tables)
    out = PagedAttention._forward_decode_pytorch(query, *caches, torch.tensor([50]), 0.2)
    oracle.assert_within_contract(out, oracle.attend(query, keys, values, oracle.Rules(0.2), 49))
    chunk = make_chunk([torch.randn(9, 2, 64)], [keys], [values], [41], 16)
    caches = (chunk.paged.key_cache, chunk.paged.value_cache, chunk.paged.block_tables)
    lens = (torch.tensor([0, 9]), torch.tensor([50]), torch.tensor([41]))
    out = PagedAttention._forward_prefix_pytorch(chunk.query, chunk.key, chunk.value, *caches, *lens)
    oracle.assert_within_contract(out, oracle.attend(chunk.query, keys, values, oracle.Rules(0.125), 41))


def test_cache_methods():
    shape = PagedAttention.get_kv_cache_shape(4, 16, 1, 32)
    cache = torch.zeros(shape)
    key_cache, value_cache = PagedAttention.split_kv_cache(cache, 1, 32)
    key, value = torch.randn(2, 1, 32), torch.randn(2, 1, 32)
    PagedAttention.write_to_paged_cache(key, value, key_cache, value_cache, torch.tensor([[5], [17]]), "auto", 1.0, 1.0)
    assert torch.equal(key_cache[1, 0, :, 1].flatten(), key[1, 0]) and torch.equal(value_cache[0, 0, :, 5], value[0, 0])
    other = torch.zeros(shape)
    PagedAttention.swap_blocks(cache, other, torch.tensor([[0, 3], [1, 2]]))
    assert torch.equal(other[:, 3], cache[:, 0]) and torch.equal(other[:, 2], cache[:, 1])
    PagedAttention.copy_blocks([cache, other], torch.tensor([[1, 3]]))
    assert torch.equal(cache[:, 3], cache[:, 1]) and torch.equal(other[:, 3], other[:, 1])


def test_the_path_is_logged_once(caplog):
    dispatch.log_once.cache_clear()
    paged = page([torch.randn(20, 1, 64)], [torch.randn(20, 1, 64)], 16)
    arguments = (paged.key_cache, paged.value_cache, paged.block_tables, torch.tensor([20]), 20, "auto", 1, 0.2, None, 1.0, 1.0)
    with caplog.at_level(logging.INFO, "paged_attn_ext"):
        for _ in range(2):
            PagedAttention.forward_decode(torch.randn(1, 2, 64), *arguments)
    messages = [r.message for r in caplog.records]
    assert len(messages) == len(set(messages)) == 2
    assert any("native kernels" in m for m in messages) and any("decode takes v1: one partition" in m for m in messages)


def test_decode_attention_allocates():
    lengths = [600, 9]
    query = torch.randn(2, 4, 64)
    keys, values = ([torch.randn(n, 2, 64) for n in lengths] for _ in range(2))
    paged = page(keys, values, 16)
    out = ops.decode_attention(query, paged.key_cache, paged.value_cache, paged.block_tables, torch.tensor(lengths), 0.2)
    exact = [
        oracle.attend(query[s : s + 1], paged.keys[s], paged.values[s], oracle.Rules(0.2), n - 1) for s, n in enumerate(lengths)
    ]
    oracle.assert_within_contract(out, oracle.concatenate(exact))
