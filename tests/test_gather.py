"""Reading the cache back: tokens of blocks as rows, and whole blocks to and from one buffer."""

import math

import pytest
import torch
from helpers import page, poisoned

pytestmark = pytest.mark.every_backend
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
PER_HEAD = torch.tensor([0.75, 2.0, 0.01])
LENGTHS = (37, 0, 100)
UNTOUCHED = 5  # rows after the last token, which stay as they are


def sequences(heads, head_size, dtype=torch.float32, lengths=LENGTHS):
    return [[3 * torch.randn(n, heads, head_size).to(dtype) for n in lengths] for _ in range(2)]


def room(tokens, heads, head_size, dtype):
    """Rows to gather into, poisoned."""
    if dtype == torch.uint8:
        return torch.full((tokens, heads, head_size), 0xA5, dtype=dtype)
    return poisoned((tokens, heads, head_size), dtype)


def gather(backend, paged, s, key, value, table=None):
    """Into the rows of sequence s alone; the table keeps its padding of garbage."""
    backend.gather_blocks(
        key,
        value,
        paged.key_cache,
        paged.value_cache,
        paged.block_tables[s] if table is None else table,
        paged.kv_cache_dtype,
        paged.k_scale,
        paged.v_scale,
    )


BITS = {torch.uint8: torch.uint8, torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


def same(got, want):
    """Bit for bit, NaN included."""
    return got.dtype == want.dtype and torch.equal(got.view(BITS[got.dtype]), want.view(BITS[want.dtype]))


def check(backend, paged, dtype):
    """Every sequence, as numbers: what is stored, rounded to float32 and then to the type of the rows."""
    heads, head_size = paged.keys[0].shape[1:]
    for s, (keys, values) in enumerate(zip(paged.keys, paged.values, strict=True)):
        key, value = (room(len(keys) + UNTOUCHED, heads, head_size, dtype) for _ in range(2))
        untouched = key[len(keys) :].clone()
        gather(backend, paged, s, key[: len(keys)], value[: len(keys)])
        for rows, logical in ((key, keys), (value, values)):
            assert same(rows[: len(keys)], logical.float().to(dtype))
            assert same(rows[len(keys) :], untouched)


@pytest.mark.needs("gather_blocks")
class TestGatherBlocks:
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize("block_size", [1, 5, 8, 16, 48, 80])
    @pytest.mark.parametrize("head_size", [8, 24, 80, 256])
    def test_every_token_bit_for_bit(self, backend, dtype, block_size, head_size):
        check(backend, page(*sequences(3, head_size, dtype), block_size), dtype)

    @pytest.mark.parametrize("kv_cache_dtype", FP8)
    @pytest.mark.parametrize("block_size", [1, 5, 16, 80])
    @pytest.mark.parametrize("head_size", [16, 80, 256])
    def test_codes_as_they_are(self, backend, kv_cache_dtype, block_size, head_size):
        """uint8 rows get the codes, and scales do not matter."""
        paged = page(*sequences(3, head_size), block_size, kv_cache_dtype=kv_cache_dtype)
        paged.k_scale, paged.v_scale = PER_HEAD, 3.0
        for s, keys in enumerate(paged.keys):
            key, value = (room(len(keys), 3, head_size, torch.uint8) for _ in range(2))
            gather(backend, paged, s, key, value)
            dtype = torch.float8_e5m2 if kv_cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn
            assert torch.equal(key.view(dtype).double(), keys)
            assert torch.equal(value.view(dtype).double(), paged.values[s])

    @pytest.mark.parametrize("stored", FLOATS, ids=str)
    @pytest.mark.parametrize("wanted", FLOATS, ids=str)
    @pytest.mark.parametrize("block_size", [5, 16, 48])
    def test_float_types_convert(self, backend, stored, wanted, block_size):
        check(backend, page(*sequences(2, 40, stored), block_size), wanted)

    @pytest.mark.parametrize("kv_cache_dtype", FP8)
    @pytest.mark.parametrize("wanted", FLOATS, ids=str)
    @pytest.mark.parametrize(
        ("k_scale", "v_scale"), [(1.0, 0.375), (0.75, PER_HEAD), (PER_HEAD, 1.5), (torch.tensor([0.3]), PER_HEAD.flip(0))]
    )
    def test_codes_are_decoded_with_their_scales(self, backend, kv_cache_dtype, wanted, k_scale, v_scale):
        sizes = {"kv_cache_dtype": kv_cache_dtype, "k_scale": k_scale, "v_scale": v_scale}
        if isinstance(k_scale, torch.Tensor) and len(k_scale) == 1:
            paged = page(*sequences(3, 48), 16, **{**sizes, "k_scale": k_scale.expand(3)})
            paged.k_scale = k_scale
        else:
            paged = page(*sequences(3, 48), 16, **sizes)
        check(backend, paged, wanted)

    def test_scales_do_not_touch_an_auto_cache(self, backend):
        paged = page(*sequences(3, 16), 16)
        paged.k_scale, paged.v_scale = 2.0, PER_HEAD
        check(backend, paged, torch.float32)
        check(backend, paged, torch.float16)

    @pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
    @pytest.mark.parametrize("wanted", FLOATS, ids=str)
    def test_every_code(self, backend, kv_cache_dtype, wanted):
        """NaN and infinity too."""
        dtype = torch.float8_e5m2 if kv_cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn
        codes = torch.arange(256, dtype=torch.uint8)
        key_cache = codes.view(1, 1, 1, 16, 16)
        value_cache = codes.view(1, 1, 16, 16)
        key, value = (room(16, 1, 16, wanted) for _ in range(2))
        backend.gather_blocks(key, value, key_cache, value_cache, torch.tensor([0]), kv_cache_dtype)
        numbers = codes.view(dtype).float().to(wanted).view(16, 16)
        torch.testing.assert_close(key[:, 0], numbers, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(value[:, 0], numbers.T, rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize("dim_stride", [1, 2])
    def test_the_caches_type_keeps_every_bit(self, backend, dim_stride):
        """All float16 bit patterns, signalling NaN and subnormal ones included."""
        patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
        paged = page([patterns.view(-1, 1, 256)], [patterns.flip(0).view(-1, 1, 256)], 16)
        key, value = (room(256, 1, 256 * dim_stride, torch.float16)[..., ::dim_stride] for _ in range(2))
        gather(backend, paged, 0, key, value)
        assert same(key.flatten(), patterns)
        assert same(value.flatten(), patterns.flip(0))

    @pytest.mark.parametrize(("stored", "wanted"), [("auto", torch.float32), ("auto", torch.bfloat16), ("fp8", torch.uint8)])
    def test_strided_rows(self, backend, stored, wanted):
        """K and V as slices of one tensor, heads first, dims apart, tokens backwards through a slice: nothing between
        them is written."""
        heads, head_size, tokens = 3, 32, 21
        paged = page(*sequences(heads, head_size, lengths=(tokens,)), 16, kv_cache_dtype=stored)
        key, value = (room(tokens, heads, head_size, wanted) for _ in range(2))
        gather(backend, paged, 0, key, value)
        layouts = {
            (tokens, 2, heads, head_size): lambda whole: (whole[:, 0], whole[:, 1]),
            (2, heads, tokens, head_size): lambda whole: (whole[0].transpose(0, 1), whole[1].transpose(0, 1)),
            (tokens, heads, head_size, 2): lambda whole: (whole[..., 0], whole[..., 1]),
            (2, 3 * tokens, heads, head_size + 8): lambda whole: (whole[0, ::3, :, 8:], whole[1, 1::3, :, :head_size]),
            (2, head_size, heads, tokens): lambda whole: (whole[0].permute(2, 1, 0), whole[1].permute(2, 1, 0)),
        }
        for shape, parts in layouts.items():
            whole = room(math.prod(shape), 1, 1, wanted).view(shape)
            poison = whole.flatten()[0].clone()
            written = torch.zeros(shape, dtype=torch.bool)
            for part in parts(written):
                part.fill_(True)
            gather(backend, paged, 0, *parts(whole))
            assert same(parts(whole)[0], key)
            assert same(parts(whole)[1], value)
            assert same(whole[~written], poison.expand(int((~written).sum())))

    @pytest.mark.parametrize("wanted", [torch.float32, torch.float16], ids=str)
    def test_strided_caches(self, backend, wanted):
        """Layers of one allocation, the layer not outermost; tokens of V apart; groups of K apart."""
        paged = page(*sequences(2, 24), 16)
        blocks = len(paged.key_cache)
        keys = torch.full((blocks, 2, 16, 2, 6, 4), math.nan)
        values = torch.full((blocks, 2, 2, 24, 32), math.nan)
        key_cache, value_cache = keys[:, 1].permute(0, 2, 3, 1, 4), values[:, 1, ..., ::2]
        paged.key_cache, paged.value_cache = key_cache.copy_(paged.key_cache), value_cache.copy_(paged.value_cache)
        check(backend, paged, wanted)

    @pytest.mark.heavy
    @pytest.mark.parametrize(("stored", "wanted"), [("auto", torch.float32), ("auto", torch.float16), ("fp8", torch.uint8)])
    @pytest.mark.parametrize("block_size", [5, 16, 80])
    @pytest.mark.parametrize("misaligned", [0, 1])
    def test_more_than_the_caches_hold(self, backend, stored, wanted, block_size, misaligned):
        """Rows too large to be worth caching, at any address."""
        heads, head_size, tokens = 2, 80, 13_200  # 2 MiB of codes
        rows = (torch.randint(-8, 8, (tokens, heads, head_size), dtype=torch.int8) for _ in range(2))
        keys, values = (r.to(torch.float32 if stored == "fp8" else wanted) for r in rows)
        paged = page([keys], [values], block_size, kv_cache_dtype=stored)
        key, value = (room(tokens + 1, heads, head_size + 16, wanted)[..., misaligned:][..., :head_size] for _ in range(2))
        gather(backend, paged, 0, key[:tokens], value[:tokens])
        for got, want, last in ((key, keys, key[-1]), (value, values, value[-1])):
            got = got[:tokens].view(torch.float8_e4m3fn) if stored == "fp8" else got[:tokens]
            assert torch.equal(got.to(want.dtype), want)
            assert same(last, room(1, heads, head_size, wanted)[0])

    @pytest.mark.parametrize("index_type", [torch.int32, torch.int64], ids=str)
    @pytest.mark.parametrize("stride", [1, 3])
    def test_index_types_and_strided_tables(self, backend, index_type, stride):
        paged = page(*sequences(2, 16), 8, table_dtype=index_type)
        tables = torch.full((*paged.block_tables.shape, stride), -7, dtype=index_type)
        tables[..., 0] = paged.block_tables
        paged.block_tables = tables[..., 0]
        check(backend, paged, torch.float32)

    def test_a_block_more_than_once(self, backend):
        paged = page(*sequences(2, 16, lengths=(8,)), 8)
        key, value = (room(20, 2, 16, torch.float32) for _ in range(2))
        gather(backend, paged, 0, key, value, paged.block_tables[0, :1].expand(3))
        assert same(key, paged.keys[0].float().repeat(3, 1, 1)[:20])
        assert same(value, paged.values[0].float().repeat(3, 1, 1)[:20])

    def test_no_tokens(self, backend):
        paged = page(*sequences(2, 16), 16)
        empty = torch.empty(0, 2, 16)
        gather(backend, paged, 0, empty, empty.clone(), torch.empty(0, dtype=torch.int32))
        gather(backend, paged, 0, empty, empty.clone())

    @pytest.mark.parametrize("count", [1, 2, 3])
    @pytest.mark.parametrize("wanted", [torch.float32, torch.float16], ids=str)
    def test_any_number_of_threads(self, backend, threads, count, wanted):
        threads(count)
        check(backend, page(*sequences(5, 16), 8), wanted)

    def test_float8_caches(self, backend):
        paged = page(*sequences(2, 16), 16, kv_cache_dtype="fp8")
        paged.key_cache, paged.value_cache = (c.view(torch.float8_e4m3fn) for c in (paged.key_cache, paged.value_cache))
        check(backend, paged, torch.float32)

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
    @pytest.mark.parametrize("block_size", [5, 16])
    def test_what_was_stored_comes_back(self, backend, dtype, kv_cache_dtype, block_size):
        """Stored and read through the operators alone. What an fp8 cache gives back, it stores unchanged."""
        tokens, heads, head_size = 43, 3, 32
        one_byte = kv_cache_dtype != "auto"
        x = 16 if one_byte else 16 // torch.empty((), dtype=dtype).element_size()
        cache_type = torch.uint8 if one_byte else dtype
        key_cache = torch.full((12, heads, head_size // x, block_size, x), 0x7F, dtype=cache_type)
        value_cache = torch.full((12, heads, head_size, block_size), 0x7F, dtype=cache_type)
        table = torch.randperm(12)
        slots = (table[:, None] * block_size + torch.arange(block_size)).flatten()[:tokens]
        caches, scales = (key_cache, value_cache), (kv_cache_dtype, 0.5, torch.tensor([0.25, 1.0, 2.0]))
        key, value = (torch.randn(tokens, heads, head_size).to(dtype) for _ in range(2))
        backend.reshape_and_cache(key, value, *caches, slots, *scales)
        first, second = ([room(tokens, heads, head_size, dtype) for _ in range(2)] for _ in range(2))
        backend.gather_blocks(*first, *caches, table, *scales)
        if one_byte:
            backend.reshape_and_cache(*first, *caches, slots, *scales)
            backend.gather_blocks(*second, *caches, table, *scales)
            assert same(first[0], second[0])
            assert same(first[1], second[1])
            torch.testing.assert_close(first[0], key, rtol=0.13, atol=0.01)
            torch.testing.assert_close(first[1], value, rtol=0.13, atol=0.01)
        else:
            assert same(first[0], key)
            assert same(first[1], value)


def layers(shape=(2, 3, 8), dtype=torch.float32, blocks=(9, 9, 7, 11)):
    return [(50 * torch.randn(n, *shape)).to(dtype) for n in blocks]


def packed(caches, ids):
    """[n, C, E] by plain indexing."""
    return torch.stack([cache[ids.long()].reshape(len(ids), cache.shape[1:].numel()) for cache in caches], dim=1)


def scattered(caches, buffer, ids):
    expected = [cache.clone() for cache in caches]
    for i, block in enumerate(ids.tolist()):
        for c, cache in enumerate(expected):
            cache[block] = buffer[i, c].view(cache.shape[1:])
    return expected


IDS = torch.tensor([5, 0, 3, 6, 1])


@pytest.mark.needs("pack_blocks", "scatter_blocks")
class TestPackAndScatterBlocks:
    def check(self, backend, caches, ids):
        elements = caches[0].shape[1:].numel()
        before = [cache.clone() for cache in caches]
        buffer = torch.full((len(ids), len(caches), elements), 77, dtype=caches[0].dtype)
        backend.pack_blocks(buffer, caches, ids)
        assert torch.equal(buffer, packed(caches, ids))
        assert all(torch.equal(cache, was) for cache, was in zip(caches, before, strict=True))

        incoming = (90 * torch.rand(buffer.shape)).to(buffer.dtype)
        given = incoming.clone()
        expected = scattered(caches, incoming, ids)
        backend.scatter_blocks(caches, incoming, ids)
        assert all(torch.equal(cache, want) for cache, want in zip(caches, expected, strict=True))
        assert torch.equal(incoming, given)

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bfloat16, torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("shape", [(), (3,), (2, 5, 7), (2, 3, 1, 4, 3)], ids=str)
    def test_any_rank_and_type(self, backend, dtype, shape):
        self.check(backend, layers(shape, dtype), IDS)

    @pytest.mark.parametrize("index_type", [torch.int32, torch.int64], ids=str)
    def test_index_types_and_strided_ids(self, backend, index_type):
        self.check(backend, layers(), IDS.to(index_type))
        self.check(backend, layers(), torch.stack([IDS, IDS - 99], dim=1).to(index_type)[:, 0])

    def test_blocks_that_lie_apart(self, backend):
        room = torch.randn(9, 5, 2, 8)
        before = room.clone()
        self.check(backend, [room[:, 3], room[:, 1], torch.randn(9, 2, 8)], IDS)
        for untouched in (0, 2, 4):
            assert torch.equal(room[:, untouched], before[:, untouched])

    def test_of_equal_ids_the_last_wins(self, backend, threads):
        self.check(backend, layers(blocks=(9,)), torch.tensor([2, 5, 2]))
        self.check(backend, layers(), torch.randint(7, (500,)))
        # Two threads: the first comes to block 5 at its end, long after the second, whose entry is the last.
        threads(2)
        self.check(backend, layers((256, 256), blocks=(9,)), torch.tensor([2] * 19 + [5] + [5] + [3] * 19))

    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_any_number_of_threads(self, backend, threads, count):
        threads(count)
        self.check(backend, layers(), IDS)

    def test_no_ids(self, backend):
        self.check(backend, layers(), torch.empty(0, dtype=torch.int32))
        self.check(backend, layers(blocks=(0, 3)), torch.empty(0, dtype=torch.int64))

    def test_empty_blocks(self, backend):
        caches = [torch.empty(4, 0, 3), torch.empty(4, 0, 3)]
        buffer = torch.empty(2, 2, 0)
        backend.pack_blocks(buffer, caches, torch.tensor([1, 3]))
        backend.scatter_blocks(caches, buffer, torch.tensor([1, 3]))

    def test_every_bit(self, backend):
        patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).view(64, 1024)
        buffer = torch.zeros(64, 1, 1024, dtype=torch.float16)
        backend.pack_blocks(buffer, [patterns], torch.arange(64))
        assert same(buffer.flatten(), patterns.flatten())
        cache = torch.zeros_like(patterns)
        backend.scatter_blocks([cache], buffer, torch.arange(64))
        assert same(cache, patterns)

    def test_float8_caches(self, backend):
        caches = [cache.view(torch.float8_e4m3fn) for cache in layers(dtype=torch.uint8)]
        buffer = torch.zeros(5, 4, 48, dtype=torch.uint8).view(torch.float8_e4m3fn)
        backend.pack_blocks(buffer, caches, IDS)
        assert torch.equal(buffer.view(torch.uint8), packed([cache.view(torch.uint8) for cache in caches], IDS))

    def test_a_cache_moved_and_brought_back(self, backend):
        """K and V of three layers in layout x, both of one size of block, to other blocks of other caches."""
        keys = [torch.randn(9, 2, 4, 16, 4) for _ in range(3)]
        values = [torch.randn(9, 2, 16, 16) for _ in range(3)]
        caches = [cache.view(9, -1) for cache in keys + values]
        buffer = torch.full((5, 6, 512), math.nan)
        backend.pack_blocks(buffer, caches, IDS)
        others = [torch.full((20, 512), math.nan) for _ in range(6)]
        targets = torch.tensor([19, 2, 11, 3, 7])
        backend.scatter_blocks(others, buffer, targets)
        for cache, other in zip(caches, others, strict=True):
            assert torch.equal(other[targets], cache[IDS])
            assert int(other.isnan().sum()) == 15 * 512
