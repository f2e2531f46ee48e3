"""fp8 caches, code by code: what is stored for a number and what attention reads for a code, against plain Python."""

import math

import pytest
import torch

pytestmark = pytest.mark.every_backend
FORMATS = {"fp8_e4m3": (4, 3), "fp8_e5m2": (5, 2)}  # exponent bits, mantissa bits
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
SMALLEST = {"fp8_e4m3": 2.0**-9, "fp8_e5m2": 2.0**-16}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_SIZE = 16  # x of a one-byte cache: the smallest head


def decode(code: int, name: str) -> float:
    """The number an fp8 code stands for (OCP 8-bit floating point specification, tables 1 and 2)."""
    exponent_bits, mantissa_bits = FORMATS[name]
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code & 0x7F) >> mantissa_bits
    mantissa = code & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    if name == "fp8_e5m2" and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if name == "fp8_e4m3" and code & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def encode(number: float, name: str) -> int:
    """The nearest code, the even one of two, the largest finite one beyond the range."""
    sign = 0x80 if math.copysign(1.0, number) < 0 else 0
    finite = [code for code in range(0x80) if math.isfinite(decode(code, name))]
    magnitude = min(abs(number), LARGEST[name])
    return sign | min(finite, key=lambda code: (abs(decode(code, name) - magnitude), code & 1))


def empty_caches(num_blocks, num_kv_heads=1, block_size=16, head_size=HEAD_SIZE, fill=0):
    key_cache = torch.full((num_blocks, num_kv_heads, head_size // 16, block_size, 16), fill, dtype=torch.uint8)
    value_cache = torch.full((num_blocks, num_kv_heads, head_size, block_size), fill, dtype=torch.uint8)
    return key_cache, value_cache


def store(backend, numbers, name, k_scale=1.0, v_scale=1.0, dtype=torch.float32):
    """Codes stored for a vector of numbers, from the key and from the value cache."""
    rows = torch.zeros(-(-len(numbers) // HEAD_SIZE) * HEAD_SIZE, dtype=dtype)
    rows[: len(numbers)] = torch.as_tensor(numbers).to(dtype)
    rows = rows.view(-1, 1, HEAD_SIZE)
    key_cache, value_cache = empty_caches(num_blocks=-(-len(rows) // 16))
    slots = torch.arange(len(rows))
    backend.reshape_and_cache(rows, rows.clone(), key_cache, value_cache, slots, name, k_scale, v_scale)
    keys = key_cache.permute(0, 3, 1, 2, 4).reshape(-1)
    values = value_cache.permute(0, 3, 1, 2).reshape(-1)
    return keys[: len(numbers)].tolist(), values[: len(numbers)].tolist()


def read(backend, name, dtype, k_scale=1.0, v_scale=1.0):
    """All 256 codes as attention reads them: sequence s holds one token whose key has code s in its dimension s % D and
    whose value is code s throughout, so that its logit is the key's number and its output is the value's."""
    codes = torch.arange(256, dtype=torch.uint8)
    key_cache, value_cache = empty_caches(num_blocks=256)
    key_cache[torch.arange(256), 0, 0, 0, torch.arange(256) % HEAD_SIZE] = codes
    value_cache[:, 0, :, 0] = codes[:, None]
    query = torch.zeros(256, 1, HEAD_SIZE, dtype=dtype)
    query[torch.arange(256), 0, torch.arange(256) % HEAD_SIZE] = 1
    out = torch.empty_like(query)
    exp_sums, max_logits = torch.empty(256, 1, 1), torch.empty(256, 1, 1)
    backend.paged_attention_v2(
        out,
        exp_sums,
        max_logits,
        torch.empty(256, 1, 1, HEAD_SIZE),
        query,
        key_cache,
        value_cache,
        1,
        1.0,
        torch.arange(256, dtype=torch.int32).view(256, 1),
        torch.ones(256, dtype=torch.int32),
        16,
        16,
        None,
        name,
        k_scale,
        v_scale,
    )
    return max_logits.view(256), out.view(256, HEAD_SIZE)


@pytest.mark.parametrize("name", FORMATS)
def test_plain_python_tables_agree_with_torch(name):
    dtype = getattr(torch, {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}[name], None)
    if dtype is None:
        pytest.skip("this torch has no float8")
    theirs = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    ours = torch.tensor([decode(code, name) for code in range(256)])
    assert torch.equal(theirs.isnan(), ours.isnan())
    assert torch.equal(theirs.nan_to_num(nan=0.0), ours.nan_to_num(nan=0.0))
    assert max(x for x in ours.tolist() if math.isfinite(x)) == LARGEST[name]
    assert min(x for x in ours.tolist() if x > 0) == SMALLEST[name]


@pytest.mark.needs("reshape_and_cache")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_finite_code_is_stored_as_itself(backend, name, dtype):
    codes = [code for code in range(256) if math.isfinite(decode(code, name))]
    keys, values = store(backend, [decode(code, name) for code in codes], name, dtype=dtype)
    assert keys == codes
    assert values == codes


@pytest.mark.needs("reshape_and_cache")
@pytest.mark.parametrize("name", FORMATS)
def test_rounds_to_nearest_ties_to_even(backend, name):
    finite = sorted({decode(code, name) for code in range(256) if math.isfinite(decode(code, name))})
    ties = [(low + high) / 2 for low, high in zip(finite, finite[1:], strict=False)]  # exact in float32
    below = [torch.nextafter(torch.tensor(tie), torch.tensor(-math.inf)).item() for tie in ties]
    above = [torch.nextafter(torch.tensor(tie), torch.tensor(math.inf)).item() for tie in ties]
    numbers = ties + below + above
    expected = [encode(number, name) for number in numbers]
    keys, values = store(backend, numbers, name)
    assert keys == expected
    assert values == expected


@pytest.mark.needs("reshape_and_cache")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("sign", [1, -1])
def test_saturates(backend, name, sign):
    largest = LARGEST[name]
    numbers = [sign * x for x in (largest * 1.01, largest * 1.0625, 2 * largest, 1e6, 3e38, math.inf)]
    keys, values = store(backend, numbers, name)
    assert [decode(code, name) for code in keys] == [sign * largest] * len(numbers)
    assert [decode(code, name) for code in values] == [sign * largest] * len(numbers)


@pytest.mark.needs("reshape_and_cache")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_stays_nan_and_its_neighbours_stay(backend, name, dtype):
    keys, values = store(backend, [1.0, math.nan, -2.0, -math.nan] * 4, name, dtype=dtype)
    for codes in (keys, values):
        numbers = [decode(code, name) for code in codes]
        assert all(math.isnan(number) for number in numbers[1::2])
        assert numbers[0::2] == [1.0, -2.0] * 4


@pytest.mark.needs("reshape_and_cache")
@pytest.mark.parametrize("name", FORMATS)
def test_underflow_and_signed_zero(backend, name):
    smallest = SMALLEST[name]
    numbers = [0.0, -0.0, smallest / 2, -smallest / 2, smallest * 0.51, smallest / 1024, 1e-38, smallest * 1.5]
    keys, values = store(backend, numbers, name)
    assert keys == values == [0, 0x80, 0, 0x80, 1, 0, 0, 2]


@pytest.mark.needs("reshape_and_cache")
def test_stores_the_value_divided_by_the_scale(backend):
    keys, values = store(backend, [0.3], "fp8_e4m3", k_scale=0.5, v_scale=0.25)
    assert decode(keys[0], "fp8_e4m3") == 0.625  # the e4m3 number nearest to 0.6
    assert decode(values[0], "fp8_e4m3") == 1.25  # and to 1.2


@pytest.mark.needs("reshape_and_cache")
def test_scales_per_kv_head_at_the_store(backend):
    num_kv_heads = 4
    key = torch.full((1, num_kv_heads, HEAD_SIZE), 6.0)
    key_cache, value_cache = empty_caches(1, num_kv_heads)
    k_scales, v_scales = torch.tensor([0.5, 1.0, 2.0, 4.0]), torch.tensor([8.0, 4.0, 2.0, 1.0])
    slots = torch.zeros(1, dtype=torch.int64)
    backend.reshape_and_cache(key, key.clone(), key_cache, value_cache, slots, "fp8", k_scales, v_scales)
    for head in range(num_kv_heads):
        assert key_cache[0, head, :, 0].unique().tolist() == [encode(6.0 / k_scales[head].item(), "fp8_e4m3")]
        assert value_cache[0, head, :, 0].unique().tolist() == [encode(6.0 / v_scales[head].item(), "fp8_e4m3")]


@pytest.mark.needs("reshape_and_cache")
def test_a_scale_tensor_of_one_element_is_the_float(backend):
    numbers = torch.linspace(-3, 3, 64).tolist()
    as_floats = store(backend, numbers, "fp8_e5m2", 0.375, 1.5)
    assert store(backend, numbers, "fp8_e5m2", torch.tensor([0.375]), torch.tensor([1.5])) == as_floats


@pytest.mark.needs("paged_attention_v2")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_reads_every_code(backend, name, dtype):
    numbers = torch.tensor([decode(code, name) for code in range(256)])
    finite = numbers.isfinite()
    logits, out = read(backend, name, dtype)
    assert torch.equal(logits[finite], numbers[finite])
    expected = numbers.to(dtype).view(256, 1).expand(256, HEAD_SIZE)
    assert torch.equal(out[finite], expected[finite])
    assert out[numbers.isnan()].isnan().all()


@pytest.mark.needs("paged_attention_v2")
@pytest.mark.parametrize("name", FORMATS)
def test_attention_multiplies_by_the_scales(backend, name):
    numbers = torch.tensor([decode(code, name) for code in range(256)])
    finite = numbers.isfinite()
    logits, out = read(backend, name, torch.float32, k_scale=0.375, v_scale=torch.tensor([1.25]))
    torch.testing.assert_close(logits[finite], numbers[finite] * 0.375, rtol=1e-6, atol=0)
    torch.testing.assert_close(out[finite, 0], numbers[finite] * 1.25, rtol=1e-6, atol=0)


@pytest.mark.needs("reshape_and_cache", "paged_attention_v1")
@pytest.mark.parametrize("per_head", [False, True])
def test_what_is_stored_with_scales_is_read_with_them(backend, per_head):
    """0.3 stored at scale 0.5 reads 0.3125; each KV head takes its own scale, and each query head its KV head's."""
    num_kv_heads, num_heads = 2, 4
    value = torch.tensor([0.3, 0.3])[None, :, None].repeat(1, 1, HEAD_SIZE)
    key_cache, value_cache = empty_caches(1, num_kv_heads, fill=0x7F)  # NaN wherever nothing is stored
    scales = torch.tensor([0.5, 0.25]) if per_head else 0.5
    backend.reshape_and_cache(value, value, key_cache, value_cache, torch.zeros(1, dtype=torch.int32), "fp8", scales, scales)
    out = torch.empty(1, num_heads, HEAD_SIZE)
    tables, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    query = torch.ones(1, num_heads, HEAD_SIZE)
    backend.paged_attention_v1(
        out, query, key_cache, value_cache, num_kv_heads, 1.0, tables, lens, 16, 16, None, "fp8", scales, scales
    )
    assert out[0, :, 0].tolist() == [0.3125] * num_heads
    if per_head:  # swapped scales: nothing but the scale tells the heads apart
        backend.paged_attention_v1(
            out, query, key_cache, value_cache, num_kv_heads, 1.0, tables, lens, 16, 16, None, "fp8", scales, scales.flip(0)
        )
        assert out[0, :, 0].tolist() == [0.15625, 0.15625, 0.625, 0.625]


@pytest.mark.needs("paged_attention_v1")
def test_fp8_is_e4m3(backend):
    key_cache, value_cache = empty_caches(1)
    value_cache.fill_(0x78)
    outs = []
    for name in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        out = torch.empty(1, 1, HEAD_SIZE)
        tables, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        query = torch.ones(1, 1, HEAD_SIZE)
        backend.paged_attention_v1(out, query, key_cache, value_cache, 1, 1.0, tables, lens, 16, 16, None, name)
        outs.append(out[0, 0, 0].item())
    assert outs == [decode(0x78, "fp8_e4m3"), decode(0x78, "fp8_e4m3"), decode(0x78, "fp8_e5m2")]


def test_float8_tensors_are_taken_as_their_codes():
    if not hasattr(torch, "float8_e4m3fn"):
        pytest.skip("this torch has no float8")
    from paged_attn_ext import ops

    key = torch.randn(4, 1, HEAD_SIZE)
    codes = empty_caches(1)
    floats = tuple(cache.clone().view(torch.float8_e4m3fn) for cache in codes)
    for caches in (codes, floats):
        ops.reshape_and_cache(key, key, *caches, torch.arange(4), "fp8")
    for ours, theirs in zip(codes, floats, strict=True):
        assert torch.equal(ours, theirs.view(torch.uint8))
        assert ours.any()
