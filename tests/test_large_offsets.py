"""Caches of more than 2^31 elements: what lies beyond what 32 bits count is found, written, and copied.

torch.empty leaves pages that nobody touches unbacked, so the caches take address space and hardly any memory.
"""

import pytest
import torch

pytestmark = [pytest.mark.every_backend]
KV_HEADS, HEAD_SIZE, BLOCK, X = 8, 128, 16, 16
BLOCK_ELEMENTS = KV_HEADS * HEAD_SIZE * BLOCK
BORDER = 2**31 // BLOCK_ELEMENTS  # the first block whose elements lie at 2^31 and beyond
NUM_BLOCKS = 2 * BORDER + 2  # and room for blocks beyond 2^32
BLOCKS = [BORDER - 1, BORDER, 2 * BORDER, NUM_BLOCKS - 1]
ALIASES = [block % BORDER for block in BLOCKS]  # where a wrapped offset would land


def reserve(*shape, dtype):
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError as error:
        pytest.skip(f"this machine does not give address space for {shape}: {error}")


def check_same(backend, got, want):
    if backend.name == "pytorch":
        torch.testing.assert_close(got, want)
    else:
        assert torch.equal(got, want)


@pytest.fixture
def caches():
    key_cache = reserve(NUM_BLOCKS, KV_HEADS, HEAD_SIZE // X, BLOCK, X, dtype=torch.uint8)
    value_cache = reserve(NUM_BLOCKS, KV_HEADS, HEAD_SIZE, BLOCK, dtype=torch.uint8)
    for alias in {0, 1, *ALIASES} - set(BLOCKS):
        key_cache[alias], value_cache[alias] = 0x7F, 0x7F  # NaN in e4m3
    assert key_cache.numel() > 2**32
    return key_cache, value_cache


def fill(caches, blocks):
    """Finite codes in these blocks, and the same blocks as a small cache."""
    generator = torch.Generator().manual_seed(0)
    for cache in caches:
        for block in blocks:
            codes = torch.randint(0, 0x50, cache.shape[1:], generator=generator, dtype=torch.uint8)
            cache[block] = codes | (torch.randint(0, 2, codes.shape, generator=generator, dtype=torch.uint8) << 7)
    return tuple(torch.stack([cache[block] for block in blocks]) for cache in caches)


def decode(backend, operator, caches, table):
    seqs, heads = len(table), 2 * KV_HEADS
    length = table.shape[1] * BLOCK
    query = torch.randn(seqs, heads, HEAD_SIZE, generator=torch.Generator().manual_seed(1))
    out = torch.empty_like(query)
    rest = (query, *caches, KV_HEADS, 0.05, table, torch.full((seqs,), length), BLOCK, length, None, "fp8", 0.5, 0.25)
    if operator == "paged_attention_v1":
        backend.paged_attention_v1(out, *rest)
    else:
        states = torch.empty(seqs, heads, 1), torch.empty(seqs, heads, 1), torch.empty(seqs, heads, 1, HEAD_SIZE)
        backend.paged_attention_v2(out, *states, *rest)
    return out


@pytest.mark.needs("paged_attention_v1", "paged_attention_v2")
@pytest.mark.parametrize("operator", ["paged_attention_v1", "paged_attention_v2"])
def test_decode(backend, operator, caches):
    """The bits of the same blocks in a small cache."""
    small = fill(caches, BLOCKS)
    expected = decode(backend, operator, small, torch.tensor([[0, 1, 2, 3], [3, 1, 0, 2]]))
    far = torch.tensor(BLOCKS)[torch.tensor([[0, 1, 2, 3], [3, 1, 0, 2]])]
    out = decode(backend, operator, caches, far)
    assert expected.isfinite().all()
    assert expected.abs().max() > 0.01
    check_same(backend, out, expected)


@pytest.mark.needs("prefix_attention")
def test_prefix(backend, caches):
    small = fill(caches, BLOCKS)
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(5, 2 * KV_HEADS, HEAD_SIZE, generator=generator)
    key, value = (torch.randn(5, KV_HEADS, HEAD_SIZE, generator=generator) for _ in range(2))
    context = len(BLOCKS) * BLOCK

    def attend(pair, table):
        out = torch.empty_like(query)
        starts, lens, contexts = torch.tensor([0, 5]), torch.tensor([context + 5]), torch.tensor([context])
        backend.prefix_attention(
            out, query, key, value, *pair, table, starts, lens, contexts, 5, 0.05, None, None, "fp8", 0.5, 0.25
        )
        return out

    expected = attend(small, torch.arange(len(BLOCKS))[None])
    assert expected.isfinite().all()
    check_same(backend, attend(caches, torch.tensor([BLOCKS])), expected)


@pytest.mark.needs("reshape_and_cache")
def test_store(backend, caches):
    key = torch.randint(1, 8, (len(BLOCKS), KV_HEADS, HEAD_SIZE), generator=torch.Generator().manual_seed(3)).float()
    slots = torch.tensor([block * BLOCK + 3 + i for i, block in enumerate(BLOCKS)])
    backend.reshape_and_cache(key, -key, *caches, slots, "fp8_e5m2")
    small = (
        torch.zeros(len(BLOCKS), KV_HEADS, HEAD_SIZE // X, BLOCK, X, dtype=torch.uint8),
        torch.zeros(len(BLOCKS), KV_HEADS, HEAD_SIZE, BLOCK, dtype=torch.uint8),
    )
    backend.reshape_and_cache(key, -key, *small, torch.arange(len(BLOCKS)) * (BLOCK + 1) + 3, "fp8_e5m2")
    for i, block in enumerate(BLOCKS):
        assert torch.equal(caches[0][block, :, :, 3 + i], small[0][i, :, :, 3 + i])
        assert torch.equal(caches[1][block, :, :, 3 + i], small[1][i, :, :, 3 + i])
        assert small[0][i, :, :, 3 + i].all()
    for cache in caches:
        for alias in {0, 1, *ALIASES} - set(BLOCKS):
            assert (cache[alias] == 0x7F).all()


@pytest.mark.needs("copy_blocks", "swap_blocks")
@pytest.mark.parametrize("operator", ["copy_blocks", "swap_blocks"])
def test_whole_blocks(backend, operator, caches):
    small = fill(caches, [BORDER, NUM_BLOCKS - 1])
    pairs = torch.tensor([[BORDER, BORDER - 1], [NUM_BLOCKS - 1, 2 * BORDER]])
    if operator == "copy_blocks":
        backend.copy_blocks([caches[0]], [caches[1]], pairs)
    else:
        for cache in caches:
            backend.swap_blocks(cache, cache, pairs)
    for cache, blocks in zip(caches, small, strict=True):
        for (source, target), block in zip(pairs.tolist(), blocks, strict=True):
            assert torch.equal(cache[source], block)
            assert torch.equal(cache[target], block)
        for alias in {0, 1}:
            assert (cache[alias] == 0x7F).all()


@pytest.mark.heavy
@pytest.mark.native
@pytest.mark.needs("paged_attention_v2")
def test_partition_outputs_beyond_32_bits(backend):
    """The offset of a row in tmp_out is sequence * heads * partitions * head size: 255 * 128 * 257 * 256 > 2^31."""
    seqs, heads, head_size, partitions, block_size = 256, 128, 256, 257, 16
    max_seq_len = partitions * 512
    generator = torch.Generator().manual_seed(4)
    length, blocks = 513, 33
    key_cache = torch.randn(blocks, 1, head_size // 4, block_size, 4, generator=generator)
    value_cache = torch.randn(blocks, 1, head_size, block_size, generator=generator)
    table = torch.zeros(seqs, blocks, dtype=torch.int32)
    table[-1] = torch.arange(blocks)
    # Tables hold the blocks of the longest sequence only; the lengths, not max_seq_len, say how many are needed.
    lens = torch.ones(seqs, dtype=torch.int32)
    lens[-1] = length
    query = torch.randn(seqs, heads, head_size, generator=generator)
    out, expected = torch.empty_like(query), torch.empty(1, heads, head_size)
    sums, maxima = torch.empty(seqs, heads, partitions), torch.empty(seqs, heads, partitions)
    tmp_out = reserve(seqs, heads, partitions, head_size, dtype=torch.float32)
    backend.paged_attention_v2(
        out, sums, maxima, tmp_out, query, key_cache, value_cache, 1, 0.1, table, lens, block_size, max_seq_len
    )
    small = torch.empty(1, heads, 2), torch.empty(1, heads, 2), torch.empty(1, heads, 2, head_size)
    backend.paged_attention_v2(
        expected, *small, query[-1:], key_cache, value_cache, 1, 0.1, table[-1:], lens[-1:], block_size, 1024
    )
    assert torch.equal(out[-1:], expected)
    assert torch.equal(maxima[-1, :, :2], small[1][0])
    assert (maxima[-1, :, 2:] == float("-inf")).all()
    assert torch.equal(out[:-1], value_cache[0, 0, :, 0].expand(seqs - 1, heads, head_size))


@pytest.mark.needs("paged_attention_v1", "paged_attention_v2")
def test_thousands_of_partitions(backend):
    """A bound of 6,145 partitions for a sequence that fills two: the rest are marked empty."""
    partitions, length, heads, head_size, block_size = 6145, 600, 2, 64, 16
    blocks = -(-length // block_size)
    key_cache, value_cache = (
        torch.randn(blocks, 1, head_size // 4, block_size, 4),
        torch.randn(blocks, 1, head_size, block_size),
    )
    query = torch.randn(1, heads, head_size)
    rest = (query, key_cache, value_cache, 1, 0.1, torch.arange(blocks)[None], torch.tensor([length]), block_size)
    expected, out = torch.empty_like(query), torch.empty_like(query)
    backend.paged_attention_v1(expected, *rest, length)
    sums, maxima = torch.empty(1, heads, partitions), torch.empty(1, heads, partitions)
    backend.paged_attention_v2(out, sums, maxima, torch.empty(1, heads, partitions, head_size), *rest, partitions * 512)
    check_same(backend, out, expected)
    assert (sums[..., :2] > 0).all()
    assert (sums[..., 2:] == 0).all()
    assert (maxima[..., 2:] == float("-inf")).all()
