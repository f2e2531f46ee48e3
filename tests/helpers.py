"""Paged caches made from logical keys and values, hostile where they may be.

Permuted blocks, NaN in every unused slot and block and in every output, garbage in the padding of the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

GARBAGE_IDS = (-1, 2**31 - 1, 7, -(2**31))
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
PARTITION_TOKENS = 512


@dataclass
class Paged:
    """A batch in the cache. keys, values: what each sequence's logical [L, G, D] decode to, in float64-safe precision."""

    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    block_size: int
    kv_cache_dtype: str
    k_scale: float | Tensor
    v_scale: float | Tensor


def encode(x: Tensor, kv_cache_dtype: str, scale: float | Tensor) -> tuple[Tensor, Tensor]:
    """([L, G, D] as stored, what it decodes to in float64). scale: number or [G]."""
    if kv_cache_dtype == "auto":
        return x, x.double()
    factor = scale.view(1, -1, 1) if isinstance(scale, Tensor) else scale
    dtype = FP8[kv_cache_dtype]
    limit = torch.finfo(dtype).max
    codes = (x.float() / factor).clamp(-limit, limit).to(dtype)
    return codes.view(torch.uint8), codes.double() * (factor.double() if isinstance(factor, Tensor) else factor)


def page(
    keys: list[Tensor],
    values: list[Tensor],
    block_size: int,
    *,
    kv_cache_dtype: str = "auto",
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    cached: list[int] | None = None,
    table_dtype: torch.dtype = torch.int32,
    spare_blocks: int = 5,
    padding: int = 2,
    seed: int = 0,
) -> Paged:
    """Pack sequences into a cache in layout x. cached: how many tokens of each are in it (default all)."""
    generator = torch.Generator().manual_seed(seed)
    cached = [len(k) for k in keys] if cached is None else cached
    num_kv_heads, head_size = keys[0].shape[1:]
    stored = [
        (encode(k, kv_cache_dtype, k_scale), encode(v, kv_cache_dtype, v_scale)) for k, v in zip(keys, values, strict=True)
    ]
    dtype = stored[0][0][0].dtype
    poison = 0x7F if dtype == torch.uint8 else math.nan
    x = 16 // dtype.itemsize
    blocks = [-(-n // block_size) for n in cached]
    total = sum(blocks) + spare_blocks
    key_cache = torch.full((total, num_kv_heads, head_size // x, block_size, x), poison, dtype=dtype)
    value_cache = torch.full((total, num_kv_heads, head_size, block_size), poison, dtype=dtype)
    ids = torch.randperm(total, generator=generator).tolist()
    width = max(blocks, default=0) + padding
    tables = torch.tensor(GARBAGE_IDS, dtype=table_dtype).repeat(len(keys), width)[:, :width].clone()
    for s, n in enumerate(cached):
        for b in range(blocks[s]):
            block = tables[s, b] = ids.pop()
            size = min(block_size, n - b * block_size)
            here = slice(b * block_size, b * block_size + size)
            k, v = stored[s][0][0][here], stored[s][1][0][here]
            key_cache[block, :, :, :size] = k.view(size, num_kv_heads, head_size // x, x).permute(1, 2, 0, 3)
            value_cache[block, :, :, :size] = v.permute(1, 2, 0)
    logical = [([k[1] for k, _ in stored]), ([v[1] for _, v in stored])]
    return Paged(key_cache, value_cache, tables, *logical, block_size, kv_cache_dtype, k_scale, v_scale)


def poisoned(shape, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(tuple(shape), math.nan, dtype=dtype)


def decode(backend, query: Tensor, paged: Paged, seq_lens, scale: float, *, version="v1", tmp_dtype=torch.float32, **options):
    """Run v1 or v2 into poisoned outputs. Returns out, or (out, exp_sums, max_logits) for v2."""
    num_seqs, num_heads, head_size = query.shape
    seq_lens = torch.as_tensor(seq_lens, dtype=options.pop("lens_dtype", torch.int32))
    longest = int(seq_lens.max()) if num_seqs else 0
    max_seq_len = options.pop("max_seq_len", longest)
    out = options.pop("out", None)
    out = poisoned(query.shape, query.dtype) if out is None else out
    arguments = (query, paged.key_cache, paged.value_cache, paged.key_cache.shape[1], scale, paged.block_tables, seq_lens)
    arguments += (paged.block_size, max_seq_len, options.pop("alibi_slopes", None), paged.kv_cache_dtype)
    arguments += (paged.k_scale, paged.v_scale)
    if version == "v1":
        backend.paged_attention_v1(out, *arguments, **options)
        return out
    partitions = -(-max_seq_len // PARTITION_TOKENS) + 1
    exp_sums, max_logits = poisoned((num_seqs, num_heads, partitions)), poisoned((num_seqs, num_heads, partitions))
    tmp_out = poisoned((num_seqs, num_heads, partitions, head_size), tmp_dtype)
    backend.paged_attention_v2(out, exp_sums, max_logits, tmp_out, *arguments, **options)
    return out, exp_sums, max_logits


@dataclass
class Chunk:
    """A prefix call: the last tokens of each sequence are queries."""

    query: Tensor
    key: Tensor
    value: Tensor
    paged: Paged
    starts: list[int]
    contexts: list[int]

    @property
    def lengths(self) -> list[int]:
        return [c + b - a for c, a, b in zip(self.contexts, self.starts, self.starts[1:], strict=False)]


def make_chunk(
    queries: list[Tensor], keys: list[Tensor], values: list[Tensor], contexts: list[int], block_size: int, **options
) -> Chunk:
    """queries[s] [n, H, D] are the last n tokens of sequence s, whose keys and values are whole [L, G, D]; the first
    contexts[s] are cached."""
    paged = page(keys, values, block_size, cached=contexts, **options)
    starts = [0]
    for q in queries:
        starts.append(starts[-1] + len(q))
    fresh = [[t[c:] for t, c in zip(all_of, contexts, strict=True)] for all_of in (keys, values)]
    return Chunk(torch.cat(queries), torch.cat(fresh[0]), torch.cat(fresh[1]), paged, starts, contexts)


def prefix(backend, chunk: Chunk, scale: float, *, with_lse: bool = True, **options):
    """Run prefix_attention into poisoned outputs. Returns (out, lse)."""
    p = chunk.paged
    out = options.pop("out", None)
    out = poisoned(chunk.query.shape, chunk.query.dtype) if out is None else out
    lse = poisoned((chunk.query.shape[1], chunk.query.shape[0])) if with_lse else None
    dtype = options.pop("lens_dtype", torch.int32)
    lens = [torch.tensor(x, dtype=dtype) for x in (chunk.starts, chunk.lengths, chunk.contexts)]
    longest = max((b - a for a, b in zip(chunk.starts, chunk.starts[1:], strict=False)), default=0)
    backend.prefix_attention(
        out,
        chunk.query,
        chunk.key,
        chunk.value,
        p.key_cache,
        p.value_cache,
        p.block_tables,
        *lens,
        longest,
        scale,
        kv_cache_dtype=p.kv_cache_dtype,
        k_scale=p.k_scale,
        v_scale=p.v_scale,
        lse=lse,
        **options,
    )
    return out, lse
