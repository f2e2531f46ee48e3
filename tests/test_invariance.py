"""The same bits, whatever the batch, the placement, the version, the threads, the chunking: what a caller may rely on."""

import pytest
import torch
from helpers import decode, make_chunk, page, prefix

pytestmark = [pytest.mark.native, pytest.mark.every_backend]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LENGTHS = [1, 700, 37, 2600]


def sequences(heads=6, kv_heads=2, head_size=64, dtype=torch.bfloat16, lengths=LENGTHS):
    query = torch.randn(len(lengths), heads, head_size).to(dtype)
    keys, values = ([torch.randn(n, kv_heads, head_size).to(dtype) for n in lengths] for _ in range(2))
    return query, keys, values


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_alone_or_in_a_batch(backend, dtype):
    query, keys, values = sequences(dtype=dtype)
    together = decode(backend, query, page(keys, values, 16), LENGTHS, 0.125)
    for s, n in enumerate(LENGTHS):
        alone = decode(backend, query[s : s + 1], page(keys[s : s + 1], values[s : s + 1], 16, seed=s), [n], 0.125)
        assert torch.equal(alone[0], together[s])


@pytest.mark.parametrize("block_size", [8, 16, 5])
def test_decode_wherever_the_blocks_lie(backend, block_size):
    query, keys, values = sequences()
    first = decode(backend, query, page(keys, values, block_size, seed=1), LENGTHS, 0.125)
    assert torch.equal(decode(backend, query, page(keys, values, block_size, seed=2), LENGTHS, 0.125), first)
    # The block size decides where a chunk is read from, not what is computed.
    assert torch.equal(decode(backend, query, page(keys, values, 32, seed=3), LENGTHS, 0.125), first)


@pytest.mark.parametrize("dtype", DTYPES)
def test_v1_and_v2(backend, dtype):
    query, keys, values = sequences(dtype=dtype)
    paged = page(keys, values, 16)
    v1 = decode(backend, query, paged, LENGTHS, 0.125)
    for tmp_dtype in {torch.float32, dtype}:
        v2, _, _ = decode(backend, query, paged, LENGTHS, 0.125, version="v2", tmp_dtype=tmp_dtype)
        assert torch.equal(v1, v2)


def test_max_seq_len_changes_nothing(backend):
    query, keys, values = sequences()
    paged = page(keys, values, 16)
    assert torch.equal(
        decode(backend, query, paged, LENGTHS, 0.125), decode(backend, query, paged, LENGTHS, 0.125, max_seq_len=100_000)
    )


def test_long_decode_on_one_or_two_threads_by_v1_or_v2(backend, threads):
    """Long enough for v1 to take several rounds of 32 partitions per thread, carrying state from one to the next; v2, with
    room for all states, takes one."""
    query, keys, values = sequences(2, 1, 16, torch.bfloat16, [40_000, 700])
    paged = page(keys, values, 16)
    results = []
    for count in (1, 2, 2):
        threads(count)
        results.append(decode(backend, query, paged, [40_000, 700], 0.25))
        results.append(decode(backend, query, paged, [40_000, 700], 0.25, version="v2")[0])
    assert all(torch.equal(results[0], other) for other in results[1:])


def chunked(backend, query, keys, values, cuts, precision):
    """All queries of a sequence of len(query) tokens, chunk by chunk; the cache holds what came before."""
    outs, lses = [], []
    for begin, end in zip([0, *cuts], [*cuts, len(query)], strict=True):
        chunk = make_chunk([query[begin:end]], [keys[:end]], [values[:end]], [begin], 16)
        out, lse = prefix(backend, chunk, 0.125, precision=precision, sliding_window=200, logits_soft_cap=5.0)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", ["default", "float32"])
def test_prefix_wherever_chunks_begin(backend, dtype, precision):
    """Which also moves keys between the cache and this call's tensors, and puts a token among other neighbours, or alone."""
    query, keys, values = (torch.randn(300, h, 64).to(dtype) for h in (4, 2, 2))
    whole = chunked(backend, query, keys, values, [], precision)
    for cuts in ([128], [100, 131, 132], [1, 2, 299], [16, 32, 290]):
        out, lse = chunked(backend, query, keys, values, cuts, precision)
        assert torch.equal(out, whole[0]) and torch.equal(lse, whole[1])


def test_prefix_alone_or_in_a_batch_on_one_or_two_threads(backend, threads):
    shape = [(40, 130), (7, 0), (1, 300)]
    queries = [torch.randn(n, 4, 32).bfloat16() for n, _ in shape]
    keys, values = ([torch.randn(n + c, 2, 32).bfloat16() for n, c in shape] for _ in range(2))
    contexts = [c for _, c in shape]
    threads(1)
    together, _ = prefix(backend, make_chunk(queries, keys, values, contexts, 16), 0.2)
    threads(2)
    again, _ = prefix(backend, make_chunk(queries, keys, values, contexts, 16, seed=4), 0.2)
    assert torch.equal(together, again)
    parts = [
        prefix(backend, make_chunk([queries[s]], [keys[s]], [values[s]], [contexts[s]], 16), 0.2)[0] for s in range(len(shape))
    ]
    assert torch.equal(torch.cat(parts), together)
