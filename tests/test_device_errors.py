"""Wrong values where nobody waits for them: NaN rows, no write beyond the cache, and a sticky word that check() raises.

Rule 5 of docs/contract.md for GPU kernels. On the CPU such calls are errors: test_errors.py.
"""

import os
import subprocess
import sys

import pytest
import torch
from helpers import decode, make_chunk, page, poisoned, prefix

import paged_attn_ext
from paged_attn_ext import ops

H, G, D, B = 4, 2, 64, 16
LENGTHS = [40, 600, 20]


@pytest.fixture(params=["simt32", "simt64"])
def gpu(request, simt_backend):
    backend = simt_backend(request.param)
    clear()
    yield backend
    clear()


def clear():
    try:
        ops.check()
    except ValueError:
        pass


def batch():
    keys, values = ([torch.randn(n, G, D) for n in LENGTHS] for _ in range(2))
    return torch.randn(len(LENGTHS), H, D), page(keys, values, B)


def break_length(paged, lengths):
    return [lengths[0], -1, lengths[2]], {}


def break_max_seq_len(paged, lengths):
    return lengths, {"max_seq_len": 599}


def break_table(paged, lengths):
    paged.block_tables = paged.block_tables[:, :37]  # 592 tokens
    return lengths, {}


def break_block(paged, lengths):
    paged.block_tables[1, 36] = paged.key_cache.shape[0]  # in the second partition
    return lengths, {}


def break_block_below_zero(paged, lengths):
    paged.block_tables[1, 0] = -1
    return lengths, {}


BREAKS = (break_length, break_max_seq_len, break_table, break_block, break_block_below_zero)


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("spoil", BREAKS)
def test_decode(gpu, version, spoil):
    query, paged = batch()
    right = decode(gpu, query, paged, LENGTHS, 0.1)
    lengths, options = spoil(paged, list(LENGTHS))
    options.setdefault("max_seq_len", 600)
    out = torch.zeros_like(query)
    decode(gpu, query, paged, lengths, 0.1, version=version, out=out, **options)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], right[[0, 2]]), "another sequence suffered"
    with pytest.raises(ValueError, match="paged_attention_v1 or _v2: sequence 1 has"):
        paged_attn_ext.check()
    paged_attn_ext.check()  # raised once, then forgotten


def test_v2_without_room_for_a_partition(gpu):
    """max_seq_len 0, and a sequence that is longer."""
    query, paged = batch()
    out = torch.zeros_like(query)
    decode(gpu, query, paged, [0, 5, 0], 0.1, version="v2", out=out, max_seq_len=0)
    assert out[1].isnan().all() and not out[[0, 2]].any()


CHUNKS = [(30, 50), (10, 100), (5, 20)]  # queries, context


def chunk():
    queries = [torch.randn(n, H, D) for n, _ in CHUNKS]
    keys, values = ([torch.randn(n + c, G, D) for n, c in CHUNKS] for _ in range(2))
    return make_chunk(queries, keys, values, [c for _, c in CHUNKS], B)


def prefix_with(gpu, call, spoil=lambda arguments: None):
    """prefix() with its raw arguments spoilt on the way."""

    class Spoilt:
        @staticmethod
        def prefix_attention(*arguments, **options):
            arguments = list(arguments)
            spoil(arguments)
            gpu.prefix_attention(*arguments, **options)

    return prefix(Spoilt, call, 0.1, out=torch.zeros_like(call.query))


TABLES, STARTS, LENS, CONTEXTS, LONGEST = 6, 7, 8, 9, 10  # places of arguments


def spoil_length(arguments):
    arguments[LENS][1] += 1


def spoil_context(arguments):
    arguments[CONTEXTS][1] = -1


def spoil_table(arguments):
    arguments[TABLES] = arguments[TABLES][:, :6]  # 96 tokens


def spoil_block(arguments):
    arguments[TABLES][1, 5] = 1 << 20


@pytest.mark.parametrize("spoil", [spoil_length, spoil_context, spoil_table, spoil_block])
def test_prefix(gpu, spoil):
    call = chunk()
    right, right_lse = prefix_with(gpu, call)
    out, lse = prefix_with(gpu, call, spoil)
    wrong = slice(30, 40)
    assert out[wrong].isnan().all() and lse[:, wrong].isnan().all()
    for others in (slice(0, 30), slice(40, 45)):
        assert torch.equal(out[others], right[others]) and torch.equal(lse[:, others], right_lse[:, others])
    with pytest.raises(ValueError, match="prefix_attention: sequence 1 has"):
        paged_attn_ext.check()


def test_prefix_with_a_wrong_block_that_the_window_hides(gpu):
    """A sequence is wrong as a whole."""
    call = chunk()

    def spoil(arguments):
        arguments[TABLES][1, 0] = -7

    class Spoilt:
        @staticmethod
        def prefix_attention(*arguments, **options):
            spoil(arguments)
            gpu.prefix_attention(*arguments, **options)

    out, _ = prefix(Spoilt, call, 0.1, sliding_window=8)
    assert out[30:40].isnan().all() and not out[:30].isnan().any()


def test_prefix_with_more_queries_than_the_longest(gpu):
    call = chunk()

    def spoil(arguments):
        arguments[LONGEST] = 12

    out, lse = prefix_with(gpu, call, spoil)
    assert out[:30].isnan().all() and lse[:, :30].isnan().all() and not out[30:].isnan().any()


def test_prefix_with_starts_that_go_back_or_beyond_the_end(gpu):
    call = chunk()

    def spoil(arguments):
        arguments[STARTS][:] = torch.tensor([0, 30, 60, 45])

    out, _ = prefix_with(gpu, call, spoil)
    assert not out[:30].isnan().any() and out[30:].isnan().all()


def test_slots_beyond_the_cache_are_not_written(gpu):
    key, value = torch.randn(3, G, D), torch.randn(3, G, D)
    cache = poisoned((5, G, D // 4, B, 4)), poisoned((5, G, D, B))
    inner = cache[0][:3], cache[1][:3]
    gpu.reshape_and_cache(key, value, *inner, torch.tensor([1, 3 * B, 2]))
    assert cache[0][3:].isnan().all() and cache[1][3:].isnan().all()
    assert torch.equal(cache[1][0, :, :, 1], value[0]) and torch.equal(cache[1][0, :, :, 2], value[2])
    with pytest.raises(ValueError, match="reshape_and_cache: token 1 has a slot beyond the cache"):
        paged_attn_ext.check()


@pytest.mark.parametrize("pair", [(0, 3), (3, 0), (-1, 1), (1, -1)])
def test_copy_blocks_skips_what_names_no_block(gpu, pair):
    cache = torch.randn(3, 8)
    before = cache.clone()
    gpu.copy_blocks([cache], [torch.randn(3, 8)], torch.tensor([pair, (0, 2)]))
    assert torch.equal(cache[2], before[0]) and torch.equal(cache[:2], before[:2])
    with pytest.raises(ValueError, match="copy_blocks: entry 0 names no block"):
        paged_attn_ext.check()


@pytest.mark.parametrize("block", [-1, 3])
def test_gather_pack_and_scatter(gpu, block):
    keys, values = torch.randn(3, 1, 16, 8, 4), torch.randn(3, 1, 64, 8)
    key, value = torch.zeros(24, 1, 64), torch.zeros(24, 1, 64)
    gpu.gather_blocks(key, value, keys, values, torch.tensor([0, block, 2]))
    assert key[8:16].isnan().all() and value[8:16].isnan().all()
    assert torch.equal(value[16:], values[2].permute(2, 0, 1))
    with pytest.raises(ValueError, match="gather_blocks: entry 1 names no block"):
        paged_attn_ext.check()
    buffer = torch.zeros(2, 1, 512)
    gpu.pack_blocks(buffer, [keys], torch.tensor([block, 2]))
    assert not buffer[0].any() and torch.equal(buffer[1, 0], keys[2].flatten())
    with pytest.raises(ValueError, match="pack_blocks: entry 0 names no block"):
        paged_attn_ext.check()
    before = keys.clone()
    gpu.scatter_blocks([keys], torch.ones(2, 1, 512), torch.tensor([block, 1]))
    assert torch.equal(keys[[0, 2]], before[[0, 2]]) and (keys[1] == 1).all()
    with pytest.raises(ValueError, match="scatter_blocks: entry 0 names no block"):
        paged_attn_ext.check()


def test_the_first_error_stays(gpu):
    cache = torch.randn(3, 8)
    gpu.copy_blocks([cache], [cache.clone()], torch.tensor([(0, 9)]))
    query, paged = batch()
    decode(gpu, query, paged, [-1, 5, 5], 0.1, max_seq_len=600)
    with pytest.raises(ValueError, match="copy_blocks"):
        paged_attn_ext.check()


def test_each_call_raises_when_asked_to(gpu, monkeypatch):
    query, paged = batch()
    monkeypatch.setenv("PAGED_ATTN_CHECK", "1")
    with pytest.raises(ValueError, match="sequence 2 has a length"):
        decode(gpu, query, paged, [1, 2, -3], 0.1, max_seq_len=600)
    monkeypatch.setenv("PAGED_ATTN_CHECK", "0")
    decode(gpu, query, paged, [1, 2, -3], 0.1, max_seq_len=600)


def test_check_on_a_cpu_build_has_nothing_to_do():
    code = "import paged_attn_ext; paged_attn_ext.check(); paged_attn_ext.check('cuda:0'); print('fine')"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), timeout=300)
    assert shown.stdout.strip() == "fine", shown.stderr
