"""The operators, typed: functions over torch.ops.paged_attn with the same names and order of arguments, and their fakes.

What they add to the raw operators: a scale may be a float or a tensor, a float8 cache is taken as it is, and
`decode_attention` allocates. Shapes: T tokens, S sequences, H query heads, G KV heads, D head size, B block size, N
blocks, M blocks per sequence, P partitions of 512 tokens, x = 16 / bytes per cache element. docs/contract.md has the
semantics. All raise ValueError for wrong shapes and values and TypeError for wrong types, naming the argument, before
anything is written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import dispatch, workspace

_operators = torch.ops.paged_attn

OPERATORS = (
    "paged_attention_v1",
    "paged_attention_v2",
    "prefix_attention",
    "merge_attn_states",
    "reshape_and_cache",
    "gather_blocks",
    "pack_blocks",
    "scatter_blocks",
    "copy_blocks",
    "swap_blocks",
)

Scale = float | Tensor
_FLOAT8 = tuple(getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name))


def _codes(cache: Tensor) -> Tensor:
    """A float8 cache as the uint8 codes that the operators take (float8 tensors cannot pass through opcheck)."""
    return cache.view(torch.uint8) if cache.dtype in _FLOAT8 else cache


def _split_scale(scale: Scale) -> tuple[float, Tensor | None]:
    """(float, tensor) as the operators take them. A tensor is passed on as one: .item() would wait for the device."""
    if isinstance(scale, Tensor):
        return 1.0, scale.reshape(1) if scale.dim() == 0 else scale
    return scale, None


def paged_attention_v1(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Decode: the last token of each sequence attends to the sequence's cached keys, its own included.

    out, query: [S, H, D], float32, float16 or bfloat16. key_cache: [N, G, D/x, B, x]; value_cache: [N, G, D, B], of
    the query's dtype, or uint8 or float8 with kv_cache_dtype "fp8" (= "fp8_e4m3") or "fp8_e5m2". block_tables: [S, M],
    seq_lens: [S], int32 or int64. alibi_slopes: [H] float32. k_scale, v_scale: float, or float32 tensor of one element
    or [G]; value = code * scale. Block-sparse arguments as in vLLM 0.6.3, on when blocksparse_vert_stride > 1.

    Method: PagedAttention (Kwon et al. 2023), one state of online softmax per 512 tokens, merged in order.
    """
    k_float, k_tensor = _split_scale(k_scale)
    v_float, v_tensor = _split_scale(v_scale)
    _operators.paged_attention_v1(
        out,
        query,
        _codes(key_cache),
        _codes(value_cache),
        num_kv_heads,
        scale,
        block_tables,
        seq_lens,
        block_size,
        max_seq_len,
        alibi_slopes,
        kv_cache_dtype,
        k_float,
        v_float,
        tp_rank,
        blocksparse_local_blocks,
        blocksparse_vert_stride,
        blocksparse_block_size,
        blocksparse_head_sliding_step,
        k_scales=k_tensor,
        v_scales=v_tensor,
    )


def paged_attention_v2(
    out: Tensor,
    exp_sums: Tensor,
    max_logits: Tensor,
    tmp_out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """`paged_attention_v1`, bit for bit, that also leaves the softmax state of each partition of 512 tokens.

    exp_sums, max_logits: [S, H, P] float32, natural base, written (0 and -inf where a partition has no key); P >=
    max_seq_len / 512, rounded up. tmp_out: [S, H, P, D] scratch, float32; in the query's dtype it is accepted and not
    used. The rest as in v1.
    """
    k_float, k_tensor = _split_scale(k_scale)
    v_float, v_tensor = _split_scale(v_scale)
    _operators.paged_attention_v2(
        out,
        exp_sums,
        max_logits,
        tmp_out,
        query,
        _codes(key_cache),
        _codes(value_cache),
        num_kv_heads,
        scale,
        block_tables,
        seq_lens,
        block_size,
        max_seq_len,
        alibi_slopes,
        kv_cache_dtype,
        k_float,
        v_float,
        tp_rank,
        blocksparse_local_blocks,
        blocksparse_vert_stride,
        blocksparse_block_size,
        blocksparse_head_sliding_step,
        k_scales=k_tensor,
        v_scales=v_tensor,
    )


def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    max_seq_len: int | None = None,
    alibi_slopes: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    **blocksparse: int,
) -> Tensor:
    """Decode that allocates its output and workspace and picks v1 or v2 (the same bits, so the choice costs time only).

    Returns [S, H, D], contiguous. max_seq_len: an upper bound of seq_lens, by default what the block table has room
    for. The rest as in `paged_attention_v1`.
    """
    num_seqs, num_heads, head_size = query.shape
    num_kv_heads, block_size = value_cache.shape[1], value_cache.shape[3]
    if max_seq_len is None:
        max_seq_len = block_tables.shape[1] * block_size
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    rest = (query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size, max_seq_len)
    rest += (alibi_slopes, kv_cache_dtype, k_scale, v_scale)
    choice = dispatch.choose_decode(num_seqs, num_heads, num_kv_heads, max_seq_len, dispatch.profile_for(query.device))
    if choice.path == "v1":
        paged_attention_v1(out, *rest, **blocksparse)
    else:
        scratch = workspace.partition_workspace(num_seqs, num_heads, choice.partitions, head_size, query.device)
        paged_attention_v2(out, *scratch, *rest, **blocksparse)
    return out


def prefix_attention(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    context_lens: Tensor,
    max_query_len: int,
    scale: float,
    alibi_slopes: Tensor | None = None,
    sliding_window: int | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    logits_soft_cap: float | None = None,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    precision: str = "default",
) -> None:
    """Chunked prefill: the last tokens of each sequence attend to its cached context and, causally, to each other.

    out, query: [T, H, D]; key, value: [T, G, D], the chunk's own, not read from the cache. Sequence s owns tokens
    query_start_loc[s] to query_start_loc[s + 1] ([S + 1]); seq_lens = context_lens + its tokens ([S] each);
    max_query_len bounds the tokens of one sequence. Caches, tables, slopes and scales as in `paged_attention_v1`.
    sliding_window: keeps q_pos - k_pos < window; None or <= 0: off. logits_soft_cap: None or 0: off. sinks: [H]
    float32 logits added to the softmax denominator. lse: [H, T] float32, written: natural logarithm of the
    denominator, -inf for a row without keys. precision: "default" may round probabilities to the 16-bit operand type;
    "float32" does not. Rows of out beyond the last query_start_loc are left as they are.

    Method: FlashAttention-2's loop (Dao 2023) over tiles of 128 keys at absolute positions.
    """
    k_float, k_tensor = _split_scale(k_scale)
    v_float, v_tensor = _split_scale(v_scale)
    _operators.prefix_attention(
        out,
        query,
        key,
        value,
        _codes(key_cache),
        _codes(value_cache),
        block_tables,
        query_start_loc,
        seq_lens,
        context_lens,
        max_query_len,
        scale,
        alibi_slopes,
        sliding_window,
        kv_cache_dtype,
        k_float,
        v_float,
        logits_soft_cap,
        sinks,
        lse,
        k_scales=k_tensor,
        v_scales=v_tensor,
        precision=precision,
    )


def merge_attn_states(
    out: Tensor, out_lse: Tensor | None, prefix_out: Tensor, prefix_lse: Tensor, suffix_out: Tensor, suffix_lse: Tensor
) -> None:
    """One attention result from two over disjoint keys.

    out, prefix_out, suffix_out: [T, H, D], one float dtype; out may be one of the parts. prefix_lse, suffix_lse,
    out_lse: [H, T] float32, natural logarithm; -inf (or +inf) marks a row without keys, whose values are not read. Two
    such rows give zeros and -inf.

    Method: section 2.2 of "Efficient attention via log-sum-exp merging" as in FlashInfer's cascade and vLLM's
    merge_attn_states.
    """
    _operators.merge_attn_states(out, out_lse, prefix_out, prefix_lse, suffix_out, suffix_lse)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
) -> None:
    """Store new keys and values in the cache.

    key, value: [T, G, D]. slot_mapping: int32 or int64, any shape; element i says where token i goes, block * B +
    place in the block; negative: skip; it alone says how many tokens are stored. fp8 caches get the code nearest to
    value / scale (ties to even), saturating; NaN stays NaN.
    """
    k_float, k_tensor = _split_scale(k_scale)
    v_float, v_tensor = _split_scale(v_scale)
    _operators.reshape_and_cache(
        key,
        value,
        _codes(key_cache),
        _codes(value_cache),
        slot_mapping,
        kv_cache_dtype,
        k_float,
        v_float,
        k_scales=k_tensor,
        v_scales=v_tensor,
    )


def gather_blocks(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
) -> None:
    """Read a sequence's keys and values out of the cache, token by token: the inverse of `reshape_and_cache`.

    key, value: [T, G, D], any strides, written whole; token t comes from place t % B of block block_table[t // B], and
    entries beyond T are not looked at. block_table: [n] int32 or int64, n * B >= T. Caches and scales as in
    `paged_attention_v1`, but "auto" is the caches' own dtype. Of that dtype, key and value are a copy bit for bit; of
    another of float32, float16 and bfloat16, they are rounded; from an fp8 cache they are code * scale, or, as uint8,
    the codes themselves. Neither may overlap a cache.

    For moving a cache to a host, a file, or a cache of another layout.
    """
    k_float, k_tensor = _split_scale(k_scale)
    v_float, v_tensor = _split_scale(v_scale)
    _operators.gather_blocks(
        key,
        value,
        _codes(key_cache),
        _codes(value_cache),
        block_table,
        kv_cache_dtype,
        k_float,
        v_float,
        k_scales=k_tensor,
        v_scales=v_tensor,
    )


def pack_blocks(buffer: Tensor, caches: list[Tensor], block_ids: Tensor) -> None:
    """Collect blocks of several caches, as they are, in one piece of memory: buffer[i, c] = caches[c][block_ids[i]].

    caches: C tensors, at least one, of any rank >= 1, one dtype and one shape of block, blocks first, each block
    contiguous: K and V caches of several layers. block_ids: [n] int32 or int64. buffer: [n, C, E], contiguous, of the
    caches' dtype, E elements in a block, apart from the caches.

    For offloading blocks in one transfer, however many layers they have.
    """
    _operators.pack_blocks(_codes(buffer), [_codes(cache) for cache in caches], block_ids)


def scatter_blocks(caches: list[Tensor], buffer: Tensor, block_ids: Tensor) -> None:
    """The inverse of `pack_blocks`: caches[c][block_ids[i]] = buffer[i, c]. Of equal ids the last wins.

    Arguments as in `pack_blocks`.
    """
    _operators.scatter_blocks([_codes(cache) for cache in caches], _codes(buffer), block_ids)


def copy_blocks(key_caches: list[Tensor], value_caches: list[Tensor], block_mapping: Tensor) -> None:
    """In every cache, copy block block_mapping[i, 0] to block block_mapping[i, 1], all sources as they were before the call.

    Caches: any rank >= 1 and any dtype, blocks first, each block contiguous. block_mapping: [n, 2] int32 or int64.
    """
    _operators.copy_blocks([_codes(cache) for cache in key_caches], [_codes(cache) for cache in value_caches], block_mapping)


def swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    """Copy block block_mapping[i, 0] of src to block block_mapping[i, 1] of dst.

    src, dst: caches of any rank >= 1 with equal blocks, blocks first. block_mapping: [n, 2] int32 or int64.
    """
    _operators.swap_blocks(_codes(src), _codes(dst), block_mapping)


def check(device: torch.device | str | int | None = None) -> None:
    """Raise what went wrong on a GPU since the last call, and forget it.

    A GPU operator does not wait to see lengths, block ids and slots. A sequence whose length does not fit, or with a
    block id that names no block, gets NaN rows and NaN lse; a slot beyond the cache is not written; and the device keeps
    the first such event. This waits for the device and raises ValueError naming the operator and the sequence, token or
    entry. With PAGED_ATTN_CHECK=1 in the environment every operator does so at once. Nothing to do, and nothing done, on
    the CPU, whose operators refuse such calls before anything is written.

    device: a CUDA device; default: the current one.
    """
    if not hasattr(_operators, "check_device_errors"):
        return  # the GPU library is not loaded: there can be no such event
    if device is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    else:
        index = torch.device("cuda", device).index if isinstance(device, int) else torch.device(device).index or 0
    _operators.check_device_errors(index)


def _fake(*args, **kwargs) -> None:
    """Operators return () and write in place, so in tracing there is nothing to compute and no shape to infer."""


if hasattr(torch.library, "register_fake"):  # torch 2.4
    for _name in OPERATORS:
        torch.library.register_fake(f"paged_attn::{_name}")(_fake)
else:
    _meta = torch.library.Library("paged_attn", "IMPL", "Meta")  # kept: what it registers goes when it does
    for _name in OPERATORS:
        _meta.impl(_name, _fake)
