"""Wrong calls: one valid call per operator, and each wrong argument put into it alone. The error has the right type, names
the operator and the argument, and comes before anything is written."""

import math

import pytest
import torch
from calls import INT, VALID, B, D, G, H, N, P, S, T

from paged_attn_ext import ops

FP8 = {
    "key_cache": torch.zeros(N, G, D // 16, B, 16, dtype=torch.uint8),
    "value_cache": torch.zeros(N, G, D, B, dtype=torch.uint8),
}
CASES = []


def wrong(operators, error, named, why, **arguments):
    """A case: `arguments` replace those of the valid call; a callable gets the valid one. `named` must be in the message."""
    for operator in operators.split():
        CASES.append(pytest.param(operator, error, named, arguments, id=f"{operator}-{named}-{why}".replace(" ", "-")))


def as_type(dtype):
    return lambda tensor: tensor.to(dtype)


def expanded(dim):
    """The same shape, all elements of a dimension in one place."""
    return lambda tensor: tensor.select(dim, 0).unsqueeze(dim).expand(tensor.shape)


def item(index, number):
    def change(tensor):
        tensor = tensor.clone()
        tensor[index] = number
        return tensor

    return change


def smaller(dim):
    return lambda tensor: tensor.narrow(dim, 0, tensor.shape[dim] - 1).contiguous()


def flat(tensor):
    return tensor.reshape(-1)


DECODE = "paged_attention_v1 paged_attention_v2"
ATTENTION = DECODE + " prefix_attention"
LIKE_QUERY = ATTENTION + " reshape_and_cache"  # "auto" caches have the type of other arguments
CACHED = LIKE_QUERY + " gather_blocks"

# What all that touch the cache have in common.
for bad in (torch.float64, torch.int32):
    wrong(DECODE + " prefix_attention", TypeError, "query", f"is {bad}", query=as_type(bad))
wrong(ATTENTION, TypeError, "out", "of another type", out=as_type(torch.float16))
wrong(ATTENTION, ValueError, "query", "of rank 1", query=flat)
wrong(ATTENTION, ValueError, "out", "of rank 1", out=flat)
for dim, meaning in enumerate(("tokens", "heads", "head size")):
    wrong(ATTENTION, ValueError, "out", f"too few {meaning}", out=smaller(dim))
wrong(ATTENTION, ValueError, "out", "shares memory", out=expanded(0))
wrong(ATTENTION, ValueError, "query", "heads not a multiple", query=smaller(1), out=smaller(1))
wrong(ATTENTION, ValueError, "query", "no heads", query=lambda q: q[:, :0], out=lambda o: o[:, :0])
wrong(LIKE_QUERY, TypeError, "key_cache", "of another type", key_cache=as_type(torch.float16))
wrong(CACHED, TypeError, "value_cache", "of another type", value_cache=as_type(torch.float16))
wrong(CACHED, TypeError, "key_cache", "codes with auto", key_cache=FP8["key_cache"])
wrong(CACHED, TypeError, "key_cache", "floats with fp8", kv_cache_dtype="fp8")
wrong(CACHED, TypeError, "value_cache", "floats with fp8", kv_cache_dtype="fp8_e5m2", key_cache=FP8["key_cache"])
wrong(CACHED, ValueError, "kv_cache_dtype", "unknown", kv_cache_dtype="int8")
wrong(CACHED, ValueError, "key_cache", "of rank 4", key_cache=lambda c: c[..., 0])
wrong(CACHED, ValueError, "value_cache", "of rank 3", value_cache=lambda c: c[..., 0])
wrong(CACHED, ValueError, "key_cache", "head size", key_cache=smaller(2))
wrong(CACHED, ValueError, "key_cache", "x of another type", key_cache=torch.randn(N, G, D // 8, B, 8))
wrong(CACHED, ValueError, "key_cache", "x not dense", key_cache=torch.randn(N, G, D // 4, 4, B).transpose(3, 4))
for dim, meaning in enumerate(("blocks", "KV heads", "head size", "block size")):
    wrong(CACHED, ValueError, "value_cache", f"too few {meaning}", value_cache=smaller(dim))
wrong(CACHED, ValueError, "key_cache", "block size 0", key_cache=lambda c: c[:, :, :, :0], value_cache=lambda c: c[..., :0])
for argument in ("k_scale", "v_scale"):
    for number in (0.0, -1.0, math.nan, math.inf):
        wrong(CACHED, ValueError, argument, f"is {number}", **FP8, kv_cache_dtype="fp8", **{argument: number})
    wrong(CACHED, ValueError, argument + "s", "too many", **FP8, kv_cache_dtype="fp8", **{argument: torch.ones(G + 1)})
    wrong(CACHED, ValueError, argument + "s", "of rank 2", **FP8, kv_cache_dtype="fp8", **{argument: torch.ones(1, G)})
    wrong(CACHED, TypeError, argument + "s", "float64", **FP8, kv_cache_dtype="fp8", **{argument: torch.ones(G).double()})
for argument in ("block_tables", "seq_lens"):
    for bad in (torch.float32, torch.int16, torch.uint8):
        wrong(ATTENTION, TypeError, argument, f"is {bad}", **{argument: as_type(bad)})
wrong(ATTENTION, ValueError, "block_tables", "too few sequences", block_tables=smaller(0))
wrong(ATTENTION, ValueError, "block_tables", "of rank 1", block_tables=flat)
wrong(ATTENTION, ValueError, "seq_lens", "of rank 2", seq_lens=lambda t: t[:, None])
wrong(ATTENTION, ValueError, "block_tables", "a block too high", block_tables=item((0, 0), N))
wrong(ATTENTION, ValueError, "block_tables", "a block below 0", block_tables=item((0, 0), -1))
for number in (math.nan, math.inf):
    wrong(ATTENTION, ValueError, "scale", f"is {number}", scale=number)
wrong(ATTENTION, TypeError, "alibi_slopes", "float16", alibi_slopes=torch.ones(H, dtype=torch.float16))
wrong(ATTENTION, ValueError, "alibi_slopes", "per KV head", alibi_slopes=torch.ones(G))
wrong(ATTENTION, ValueError, "alibi_slopes", "of rank 2", alibi_slopes=torch.ones(1, H))

# Decode.
wrong(DECODE, ValueError, "seq_lens", "fewer than queries", seq_lens=smaller(0), block_tables=smaller(0))
wrong(DECODE, ValueError, "num_kv_heads", "not the cache's", num_kv_heads=H)
wrong(DECODE, ValueError, "block_size", "not the cache's", block_size=2 * B)
wrong(DECODE, ValueError, "max_seq_len", "below 0", max_seq_len=-1, seq_lens=torch.zeros(S, dtype=INT))
wrong(DECODE, ValueError, "seq_lens", "below 0", seq_lens=item(0, -1))
wrong(DECODE, ValueError, "seq_lens", "above max_seq_len", seq_lens=item(0, 21))
wrong(DECODE, ValueError, "block_tables", "too narrow", seq_lens=item(0, 33), max_seq_len=40)
SPARSE = {"blocksparse_vert_stride": 2, "blocksparse_local_blocks": 1, "blocksparse_block_size": 32}
wrong(DECODE, ValueError, "blocksparse_block_size", "is 0", **{**SPARSE, "blocksparse_block_size": 0})
wrong(DECODE, ValueError, "blocksparse_block_size", "no multiple", **{**SPARSE, "blocksparse_block_size": 24})
wrong(DECODE, ValueError, "blocksparse_local_blocks", "below 0", **{**SPARSE, "blocksparse_local_blocks": -1})
wrong(DECODE, ValueError, "tp_rank", "below 0", **SPARSE, tp_rank=-1)
V2 = "paged_attention_v2"
for argument in ("exp_sums", "max_logits"):
    wrong(V2, TypeError, argument, "float16", **{argument: as_type(torch.float16)})
    wrong(V2, ValueError, argument, "of rank 2", **{argument: lambda t: t[..., 0]})
    wrong(V2, ValueError, argument, "too few sequences", **{argument: smaller(0)})
    wrong(V2, ValueError, argument, "too few heads", **{argument: smaller(1)})
    wrong(V2, ValueError, argument, "shares memory", **{argument: expanded(1)})
wrong(V2, ValueError, "max_logits", "too few partitions", max_seq_len=513)
wrong(V2, ValueError, "exp_sums", "too few partitions", exp_sums=smaller(2))
wrong(V2, TypeError, "tmp_out", "float16", tmp_out=as_type(torch.float16))
wrong(V2, ValueError, "tmp_out", "of rank 3", tmp_out=lambda t: t[:, :, 0])
for dim, meaning in enumerate(("sequences", "heads", "partitions", "head size")):
    wrong(V2, ValueError, "tmp_out", f"too few {meaning}", tmp_out=smaller(dim))
wrong(V2, ValueError, "tmp_out", "not contiguous", tmp_out=torch.randn(D, P, H, S).permute(3, 2, 1, 0))

# Prefix.
PREFIX = "prefix_attention"
for argument in ("key", "value"):
    wrong(PREFIX, TypeError, argument, "of another type", **{argument: as_type(torch.bfloat16)})
    wrong(PREFIX, ValueError, argument, "of rank 2", **{argument: lambda t: t[:, 0]})
    for dim, meaning in enumerate(("tokens", "KV heads", "head size")):
        wrong(PREFIX, ValueError, argument, f"too few {meaning}", **{argument: smaller(dim)})
for argument in ("query_start_loc", "context_lens"):
    wrong(PREFIX, TypeError, argument, "float32", **{argument: as_type(torch.float32)})
    wrong(PREFIX, ValueError, argument, "too short", **{argument: smaller(0)})
    wrong(PREFIX, ValueError, argument, "of rank 2", **{argument: lambda t: t[:, None]})
wrong(PREFIX, ValueError, "query_start_loc", "below 0", query_start_loc=item(0, -1))
wrong(PREFIX, ValueError, "query_start_loc", "falls", query_start_loc=item(1, 6))
wrong(PREFIX, ValueError, "query_start_loc", "beyond query", query_start_loc=item(2, T + 1))
wrong(PREFIX, ValueError, "context_lens", "below 0", context_lens=item(1, -1), seq_lens=item(1, 2))
wrong(PREFIX, ValueError, "seq_lens", "not context and queries", seq_lens=item(0, 19))
wrong(PREFIX, ValueError, "max_query_len", "too small", max_query_len=2)
wrong(PREFIX, ValueError, "max_query_len", "below 0", max_query_len=-1)
wrong(PREFIX, ValueError, "block_tables", "too narrow", context_lens=item(0, 33), seq_lens=item(0, 35))
for number in (-1.0, math.nan, math.inf):
    wrong(PREFIX, ValueError, "logits_soft_cap", f"is {number}", logits_soft_cap=number)
wrong(PREFIX, TypeError, "sinks", "float16", sinks=torch.ones(H, dtype=torch.float16))
wrong(PREFIX, ValueError, "sinks", "per KV head", sinks=torch.ones(G))
wrong(PREFIX, TypeError, "lse", "float16", lse=as_type(torch.float16))
wrong(PREFIX, ValueError, "lse", "transposed", lse=lambda t: t.T)
wrong(PREFIX, ValueError, "lse", "shares memory", lse=expanded(0))
wrong(PREFIX, ValueError, "precision", "unknown", precision="fast")

# Merge.
MERGE = "merge_attn_states"
wrong(MERGE, TypeError, "out", "float64", out=as_type(torch.float64))
wrong(MERGE, ValueError, "out", "of rank 2", out=lambda t: t[0])
wrong(MERGE, ValueError, "out", "shares memory", out=expanded(0))
for argument in ("prefix_out", "suffix_out"):
    wrong(MERGE, TypeError, argument, "of another type", **{argument: as_type(torch.float16)})
    for dim, meaning in enumerate(("tokens", "heads", "head size")):
        wrong(MERGE, ValueError, argument, f"too few {meaning}", **{argument: smaller(dim)})
for argument in ("prefix_lse", "suffix_lse", "out_lse"):
    wrong(MERGE, TypeError, argument, "float64", **{argument: as_type(torch.float64)})
    wrong(MERGE, ValueError, argument, "transposed", **{argument: lambda t: t.T})
wrong(MERGE, ValueError, "out_lse", "shares memory", out_lse=expanded(1))
_room = torch.randn(T + 1, H, D)
wrong(MERGE, ValueError, "out", "overlaps a part", out=_room[:-1], prefix_out=_room[1:])
_lse_room = torch.randn(H * T + 1)
wrong(MERGE, ValueError, "out_lse", "overlaps a part", out_lse=_lse_room[1:].view(H, T), suffix_lse=_lse_room[:-1].view(H, T))

# Store.
STORE = "reshape_and_cache"
wrong(STORE, TypeError, "key", "float64", key=as_type(torch.float64))
wrong(STORE, TypeError, "value", "of another type", value=as_type(torch.float16))
for argument in ("key", "value"):
    wrong(STORE, ValueError, argument, "of rank 2", **{argument: lambda t: t[:, 0]})
    wrong(STORE, ValueError, argument, "too few KV heads", **{argument: smaller(1)})
    wrong(STORE, ValueError, argument, "too few tokens", **{argument: lambda t: t[:3]})
wrong(STORE, ValueError, "value", "head size", value=smaller(2))
wrong(STORE, ValueError, "key", "head size 0", key=lambda t: t[..., :0])
wrong(STORE, ValueError, "key_cache", "head size no multiple of x", key=smaller(2), value=smaller(2))
wrong(STORE, ValueError, "key_cache", "shares memory", key_cache=expanded(0))
wrong(STORE, ValueError, "value_cache", "shares memory", value_cache=expanded(0))
for bad in (torch.float32, torch.int16, torch.bool):
    wrong(STORE, TypeError, "slot_mapping", f"is {bad}", slot_mapping=as_type(bad))
wrong(STORE, ValueError, "slot_mapping", "beyond the cache", slot_mapping=item(3, N * B))
wrong(STORE, ValueError, "slot_mapping", "far beyond the cache", slot_mapping=item(3, 2**62))

# Gather.
GATHER = "gather_blocks"
wrong(GATHER, TypeError, "key_cache", "float64", key_cache=as_type(torch.float64))
for argument in ("key", "value"):
    for bad in (torch.float64, torch.int32, torch.uint8):
        wrong(GATHER, TypeError, argument, f"is {bad}", **{argument: as_type(bad)})
    wrong(GATHER, TypeError, argument, "int8 of codes", **FP8, kv_cache_dtype="fp8", **{argument: as_type(torch.int8)})
    wrong(GATHER, ValueError, argument, "of rank 2", **{argument: lambda t: t[:, 0]})
    wrong(GATHER, ValueError, argument, "too few KV heads", **{argument: smaller(1)})
    wrong(GATHER, ValueError, argument, "shares memory", **{argument: expanded(0)})
wrong(GATHER, TypeError, "value", "of another type", value=as_type(torch.float16))
wrong(GATHER, TypeError, "value", "codes beside numbers", **FP8, kv_cache_dtype="fp8", value=as_type(torch.uint8))
wrong(GATHER, ValueError, "value", "too few tokens", value=smaller(0))
wrong(GATHER, ValueError, "value", "head size", value=smaller(2))
wrong(GATHER, ValueError, "key", "head size 0", key=lambda t: t[..., :0])
wrong(GATHER, ValueError, "head size", "no multiple of x", key=smaller(2), value=smaller(2))
for bad in (torch.float32, torch.int16):
    wrong(GATHER, TypeError, "block_table", f"is {bad}", block_table=as_type(bad))
wrong(GATHER, ValueError, "block_table", "of rank 2", block_table=lambda t: t[None])
wrong(GATHER, ValueError, "block_table", "too short", block_table=smaller(0))
wrong(GATHER, ValueError, "block_table[1]", "too high", block_table=item(1, N))
wrong(GATHER, ValueError, "block_table[0]", "below 0", block_table=item(0, -1))
_cache = torch.randn(N, G, D, B)
_tokens = _cache.view(-1)[: (B + 4) * G * D].view(B + 4, G, D)
for argument in ("key", "value"):
    wrong(GATHER, ValueError, argument, "in the value cache", value_cache=_cache, **{argument: _tokens})
    wrong(GATHER, ValueError, argument, "in the key cache", key_cache=_cache.view(N, G, D // 4, B, 4), **{argument: _tokens})
wrong(GATHER, ValueError, "value", "is key", key=_tokens, value=_tokens)

# Pack and scatter.
TRANSFER = "pack_blocks scatter_blocks"
wrong(TRANSFER, ValueError, "caches", "none", caches=[], buffer=torch.randn(3, 0, G * D))
wrong(TRANSFER, ValueError, "caches", "a scalar", caches=lambda c: [c[0], torch.tensor(1.0)])
wrong(TRANSFER, ValueError, "caches", "a scalar first", caches=lambda c: [torch.tensor(1.0), c[0]])
wrong(TRANSFER, ValueError, "caches", "blocks not dense", caches=lambda c: [c[0], c[1].transpose(1, 2)])
wrong(TRANSFER, ValueError, "caches", "other blocks", caches=lambda c: [c[0], c[1].view(-1, D, G)])
wrong(TRANSFER, TypeError, "caches", "of another type", caches=lambda c: [c[0], c[1].half()])
wrong("scatter_blocks", ValueError, "caches", "shares memory", caches=lambda c: [c[0], c[1][:1].expand(c[1].shape)])
wrong(TRANSFER, TypeError, "buffer", "of another type", buffer=as_type(torch.float16))
wrong(TRANSFER, ValueError, "buffer", "of rank 2", buffer=lambda b: b.flatten(1))
for dim, meaning in enumerate(("ids", "caches", "elements")):
    wrong(TRANSFER, ValueError, "buffer", f"too few {meaning}", buffer=smaller(dim))
wrong(TRANSFER, ValueError, "buffer", "not contiguous", buffer=torch.randn(3, G * D, 2).transpose(1, 2))
_room = torch.randn(N + 6, G, D)
wrong(TRANSFER, ValueError, "buffer", "in a cache", buffer=_room[:6].view(3, 2, G * D), caches=lambda c: [c[1], _room[4:]])
for bad in (torch.float32, torch.int16):
    wrong(TRANSFER, TypeError, "block_ids", f"is {bad}", block_ids=as_type(bad))
wrong(TRANSFER, ValueError, "block_ids", "of rank 2", block_ids=lambda t: t[:, None])
wrong(TRANSFER, ValueError, "block_ids[2]", "beyond the smaller cache", block_ids=item(2, N))
wrong(TRANSFER, ValueError, "block_ids[0]", "below 0", block_ids=item(0, -1))

# Whole blocks.
BLOCKS = "copy_blocks swap_blocks"
wrong(BLOCKS, TypeError, "block_mapping", "float32", block_mapping=as_type(torch.float32))
wrong(BLOCKS, TypeError, "block_mapping", "int16", block_mapping=as_type(torch.int16))
wrong(BLOCKS, ValueError, "block_mapping", "flat", block_mapping=flat)
wrong(BLOCKS, ValueError, "block_mapping", "three columns", block_mapping=torch.zeros(2, 3, dtype=torch.int64))
for column in (0, 1):
    wrong(BLOCKS, ValueError, "block_mapping", f"below 0 in column {column}", block_mapping=item((1, column), -1))
    wrong(BLOCKS, ValueError, "block_mapping", f"too high in column {column}", block_mapping=item((1, column), N + column))
wrong("copy_blocks", ValueError, "value_caches", "a layer missing", value_caches=lambda layers: layers[:1])
wrong("copy_blocks", ValueError, "block_mapping", "beyond one layer", value_caches=lambda v: [v[0], v[1][:3].clone()])
for argument in ("key_caches", "value_caches"):
    wrong("copy_blocks", ValueError, argument, "a scalar", **{argument: lambda c: [c[0], torch.tensor(1.0)]})
    wrong("copy_blocks", ValueError, argument, "blocks not dense", **{argument: lambda c: [c[0], torch.randn(N, 4, 2)[..., 0]]})
    wrong("copy_blocks", ValueError, argument, "shares memory", **{argument: lambda c: [c[0], c[1][:1].expand(c[1].shape)]})
wrong("swap_blocks", TypeError, "dst", "of another type", dst=as_type(torch.float16))
wrong("swap_blocks", ValueError, "dst", "other blocks", dst=smaller(2))
wrong("swap_blocks", ValueError, "src", "a scalar", src=torch.tensor(1.0))
wrong("swap_blocks", ValueError, "src", "blocks not dense", src=lambda t: t.transpose(1, 2))
wrong("swap_blocks", ValueError, "dst", "blocks not dense", dst=lambda t: t.transpose(1, 2))
wrong("swap_blocks", ValueError, "dst", "shares memory", dst=expanded(0))


def tensors(arguments):
    for value in arguments.values():
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list):
            yield from value


@pytest.mark.parametrize("operator", VALID)
def test_the_call_that_the_cases_start_from_is_valid(operator):
    assert getattr(ops, operator)(**VALID[operator]()) is None


@pytest.mark.parametrize(("operator", "error", "named", "changes"), CASES)
def test_wrong_call(operator, error, named, changes):
    arguments = VALID[operator]()
    for name, change in changes.items():
        arguments[name] = change(arguments[name]) if callable(change) else change
    before = [tensor.clone() for tensor in tensors(arguments)]
    with pytest.raises(error) as raised:
        getattr(ops, operator)(**arguments)
    first_line = str(raised.value).splitlines()[0]
    assert first_line.startswith(operator + ": ")
    assert named in first_line
    for tensor, was in zip(tensors(arguments), before, strict=True):
        assert torch.equal(tensor, was)
