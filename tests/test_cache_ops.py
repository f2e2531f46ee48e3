"""Storing tokens, copying blocks, swapping blocks: exactly the elements that are meant change, and nothing else."""

import pytest
import torch

pytestmark = pytest.mark.every_backend
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SENTINEL = 77.0


def caches(num_blocks, num_kv_heads, head_size, block_size, dtype=torch.float32, fill=SENTINEL):
    x = 16 // torch.empty((), dtype=dtype).element_size()
    key_cache = torch.full((num_blocks, num_kv_heads, head_size // x, block_size, x), fill, dtype=dtype)
    return key_cache, torch.full((num_blocks, num_kv_heads, head_size, block_size), fill, dtype=dtype)


def tokens_of(key_cache, value_cache):
    """Both caches as [slots, KV heads, head size]."""
    blocks, heads, _, block_size, _ = key_cache.shape
    keys = key_cache.permute(0, 3, 1, 2, 4).reshape(blocks * block_size, heads, -1)
    return keys, value_cache.permute(0, 3, 1, 2).reshape(blocks * block_size, heads, -1)


def stored(key, value, slots, key_cache, value_cache):
    """What the slots of both caches should hold afterwards: one Python assignment per token, in order."""
    keys, values = (cache.clone() for cache in tokens_of(key_cache, value_cache))
    for token, slot in enumerate(slots):
        if slot >= 0:
            keys[slot], values[slot] = key[token], value[token]
    return keys, values


def check_store(backend, slots, slot_mapping, num_blocks=4, heads=2, head_size=24, block_size=8, dtype=torch.float32, extra=0):
    torch.manual_seed(0)
    rows = len(slots) + extra
    key, value = (torch.randn(rows, heads, head_size).to(dtype) for _ in range(2))
    key_cache, value_cache = caches(num_blocks, heads, head_size, block_size, dtype)
    expected = stored(key, value, slots, key_cache, value_cache)
    backend.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)
    for got, want in zip(tokens_of(key_cache, value_cache), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.needs("reshape_and_cache")
class TestReshapeAndCache:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("block_size", [1, 5, 8, 16, 48])
    @pytest.mark.parametrize("head_size", [8, 24, 80, 128])
    def test_tokens_reach_their_slots(self, backend, dtype, block_size, head_size):
        num_blocks = -(-24 // block_size) + 1
        slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(1))[:19]
        check_store(
            backend, slots.tolist(), slots, num_blocks, head_size=head_size, block_size=block_size, heads=3, dtype=dtype
        )

    @pytest.mark.parametrize("index_type", [torch.int32, torch.int64], ids=str)
    def test_index_types(self, backend, index_type):
        slots = [3, 20, 0, 31]
        check_store(backend, slots, torch.tensor(slots, dtype=index_type))

    def test_negative_slots_are_skipped(self, backend):
        slots = [3, -1, -1, 20, -7, -(2**31)]
        check_store(backend, slots, torch.tensor(slots))
        check_store(backend, [-1] * 5, torch.full((5,), -1))

    @pytest.mark.parametrize("extra", [1, 8])
    def test_the_mapping_says_how_many_are_stored(self, backend, extra):
        slots = [4, 9, 2, 30, 11]
        check_store(backend, slots, torch.tensor(slots), extra=extra)

    def test_two_dimensional_and_strided_mappings(self, backend):
        check_store(backend, [0, 2, 4, 6], torch.arange(8)[::2])
        check_store(backend, [0, 2, 4, 6], torch.arange(8, dtype=torch.int32)[::2])
        check_store(backend, [5, 1, 9, 30], torch.tensor([[5, 1], [9, 30]]))
        transposed = torch.arange(6).view(2, 3).T
        check_store(backend, [0, 3, 1, 4, 2, 5], transposed)
        check_store(backend, [17], torch.tensor(17))

    @pytest.mark.cpu_only  # two threads of a GPU store in any order
    def test_the_later_of_two_tokens_stays(self, backend):
        slots = [5] * 40 + [6, 5]
        check_store(backend, slots, torch.tensor(slots))

    def test_nothing_to_store(self, backend):
        check_store(backend, [], torch.empty(0, dtype=torch.int64))
        check_store(backend, [], torch.empty(0, dtype=torch.int32), extra=3)

    def test_strided_keys_values_and_caches(self, backend):
        """Keys and values as slices of one projection; caches as layers of one allocation, the layer not outermost."""
        torch.manual_seed(2)
        heads, head_size, block_size, x = 2, 32, 8, 4
        qkv = torch.randn(6, 4, heads, head_size)
        key, value = qkv[:, 1], torch.randn(6, heads, 2 * head_size)[..., ::2]
        keys_room = torch.full((3, 2, heads, head_size // x, block_size, x), SENTINEL)
        values_room = torch.full((3, 2, heads, head_size, block_size), SENTINEL)
        key_cache, value_cache = keys_room[:, 1], values_room[:, 1]
        slots = [0, 9, 23, 7, 16, 1]
        expected = stored(key, value, slots, key_cache, value_cache)
        backend.reshape_and_cache(key, value, key_cache, value_cache, torch.tensor(slots))
        for got, want in zip(tokens_of(key_cache, value_cache), expected, strict=True):
            assert torch.equal(got, want)
        assert (keys_room[:, 0] == SENTINEL).all()
        assert (values_room[:, 0] == SENTINEL).all()

    def test_scales_do_not_touch_a_cache_of_the_keys_type(self, backend):
        key, value = torch.randn(2, 1, 8), torch.randn(2, 1, 8)
        key_cache, value_cache = caches(1, 1, 8, 16)
        backend.reshape_and_cache(key, value, key_cache, value_cache, torch.arange(2), "auto", 2.0, torch.tensor([4.0]))
        keys, values = tokens_of(key_cache, value_cache)
        assert torch.equal(keys[:2], key)
        assert torch.equal(values[:2], value)

    def test_values_are_kept_bit_for_bit(self, backend):
        bits = torch.tensor([0x7FC12345, -0x003EDCBB, 0x7F800000, -0x00800000, 1, -0x80000000, 0x00000001, 0x3F800001])
        key = bits.to(torch.int32).view(torch.float32).view(1, 1, 8)
        key_cache, value_cache = caches(1, 1, 8, 16)
        backend.reshape_and_cache(key, key, key_cache, value_cache, torch.zeros(1, dtype=torch.int64))
        for stored_row in tokens_of(key_cache, value_cache):
            assert torch.equal(stored_row[0, 0].contiguous().view(torch.int32), key.view(-1).view(torch.int32))


def copied(cache, pairs):
    before, after = cache.clone(), cache.clone()
    for source, target in pairs:
        after[target] = before[source]
    return after


def layers(count=2, num_blocks=6, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    keys = [torch.randn(num_blocks, 2, 4, 8, 4, generator=generator).to(dtype) for _ in range(count)]
    return keys, [torch.randn(num_blocks, 2, 24, 8, generator=generator).to(dtype) for _ in range(count)]


PAIRS = {
    "fork": [[0, 1], [0, 2]],
    "chain": [[0, 1], [1, 2], [2, 3]],
    "chain, backwards": [[2, 3], [1, 2], [0, 1]],
    "cycle": [[0, 1], [1, 2], [2, 0]],
    "exchange": [[4, 5], [5, 4]],
    "to itself": [[3, 3], [3, 1]],
}


@pytest.mark.needs("copy_blocks")
class TestCopyBlocks:
    @pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
    @pytest.mark.parametrize("index_type", [torch.int32, torch.int64], ids=str)
    def test_every_source_is_read_as_it_was(self, backend, pairs, index_type):
        keys, values = layers()
        expected = [copied(cache, pairs) for cache in keys + values]
        backend.copy_blocks(keys, values, torch.tensor(pairs, dtype=index_type))
        for got, want in zip(keys + values, expected, strict=True):
            assert torch.equal(got, want)

    def test_random_maps(self, backend):
        """Any sources, targets each written once."""
        generator = torch.Generator().manual_seed(4)
        for _ in range(20):
            targets = torch.randperm(12, generator=generator)[:8]
            pairs = torch.stack([torch.randint(12, (8,), generator=generator), targets], dim=1)
            cache = torch.randn(12, 3, 5, generator=generator)
            expected = copied(cache, pairs.tolist())
            backend.copy_blocks([cache], [cache.clone()], pairs)
            assert torch.equal(cache, expected)

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bfloat16, torch.float64], ids=str)
    @pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 2, 3, 1, 7)], ids=str)
    def test_any_rank_and_type(self, backend, dtype, shape):
        cache = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
        other = cache + 1
        expected = [copied(cache, [[0, 4], [4, 1]]), copied(other, [[0, 4], [4, 1]])]
        backend.copy_blocks([cache], [other], torch.tensor([[0, 4], [4, 1]]))
        assert torch.equal(cache, expected[0])
        assert torch.equal(other, expected[1])

    def test_keys_and_values_of_different_size(self, backend):
        """Blocks of the value cache are counted in its own elements."""
        key_cache, value_cache = torch.randn(3, 2), torch.randn(3, 50)
        expected = [copied(key_cache, [[0, 2]]), copied(value_cache, [[0, 2]])]
        backend.copy_blocks([key_cache], [value_cache], torch.tensor([[0, 2]]))
        assert torch.equal(key_cache, expected[0])
        assert torch.equal(value_cache, expected[1])

    def test_no_pairs_and_no_layers(self, backend):
        keys, values = layers()
        expected = [cache.clone() for cache in keys + values]
        backend.copy_blocks(keys, values, torch.empty(0, 2, dtype=torch.int64))
        for got, want in zip(keys + values, expected, strict=True):
            assert torch.equal(got, want)
        backend.copy_blocks([], [], torch.tensor([[0, 1]]))

    @pytest.mark.heavy
    def test_seventy_thousand_pairs(self, backend):
        pairs = 70_000
        cache = torch.zeros(2 * pairs, 4, dtype=torch.int32)
        cache[:pairs] = torch.arange(pairs, dtype=torch.int32)[:, None]
        targets = torch.randperm(pairs, generator=torch.Generator().manual_seed(5)) + pairs
        backend.copy_blocks([cache], [cache.clone()], torch.stack([torch.arange(pairs), targets], dim=1))
        assert torch.equal(cache[targets], cache[:pairs])

    def test_blocks_that_lie_apart(self, backend):
        room = torch.randn(5, 2, 3, 8)
        before = room.clone()
        backend.copy_blocks([room[:, 0]], [room[:, 1]], torch.tensor([[0, 3]]))
        expected = copied(before, [[0, 3]])
        assert torch.equal(room, expected)

    def test_a_strided_mapping(self, backend):
        cache = torch.randn(6, 4)
        expected = copied(cache, [[0, 1], [2, 3]])
        mapping = torch.tensor([[0, 9, 1, 9], [9, 9, 9, 9], [2, 9, 3, 9]])[::2, ::2]
        backend.copy_blocks([cache], [cache.clone()], mapping)
        assert torch.equal(cache, expected)


@pytest.mark.needs("swap_blocks")
class TestSwapBlocks:
    @pytest.mark.parametrize("index_type", [torch.int32, torch.int64], ids=str)
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32], ids=str)
    def test_between_two_caches(self, backend, index_type, dtype):
        src, dst = (100 * torch.randn(4, 2, 3, 5)).to(dtype), torch.zeros(7, 2, 3, 5, dtype=dtype)
        expected, source = dst.clone(), src.clone()
        expected[6], expected[0], expected[2] = src[0], src[3], src[0]
        backend.swap_blocks(src, dst, torch.tensor([[0, 6], [3, 0], [0, 2]], dtype=index_type))
        assert torch.equal(dst, expected)
        assert torch.equal(src, source)

    @pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
    def test_within_one_cache(self, backend, pairs):
        cache = torch.randn(6, 3, 7)
        expected = copied(cache, pairs)
        backend.swap_blocks(cache, cache, torch.tensor(pairs))
        assert torch.equal(cache, expected)

    def test_between_overlapping_views_of_one_cache(self, backend):
        """Block i of one view is block i + 1 of the other, which block ids do not tell."""
        cache = torch.randn(7, 16)
        expected = cache.clone()
        expected[1:4] = cache[0:3]
        backend.swap_blocks(cache[:-1], cache[1:], torch.tensor([[0, 0], [1, 1], [2, 2]]))
        assert torch.equal(cache, expected)

    def test_no_pairs(self, backend):
        cache = torch.randn(3, 4)
        expected = cache.clone()
        backend.swap_blocks(torch.randn(3, 4), cache, torch.empty(0, 2, dtype=torch.int32))
        assert torch.equal(cache, expected)

    def test_blocks_that_lie_apart(self, backend):
        src, room = torch.randn(4, 9), torch.zeros(4, 2, 9)
        backend.swap_blocks(src, room[:, 1], torch.tensor([[2, 3]]))
        assert torch.equal(room[3, 1], src[2])
        room[3, 1] = 0
        assert not room.any()
