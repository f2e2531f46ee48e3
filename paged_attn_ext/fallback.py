"""Decode and prefix attention in PyTorch, for any device that has no kernels: the operators' signatures and semantics.

A second implementation, independent of the kernels: tiles of keys, whose size spreads a sequence over a few iterations
within a bound on the score tensor, and an online softmax <m, l, o> over them (Dao et al. 2022). Float32 arithmetic,
whatever the precision asked for. It reads lengths on the host, so on a GPU it synchronises and cannot be captured in a
CUDA graph; and it is not bit-invariant.

Errors: ValueError and TypeError as from the operators, naming the argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PARTITION_TOKENS = 512

# A tile's scores [H, queries, tile] in float32 stay below this: 4096 queries x 6 heads x 1024 keys, which a 32 GB card
# holds beside its model.
SCORE_BUDGET_BYTES = 96 * 2**20
# Iterations that a sequence is spread over: each costs a few launches and Python, so few and large.
TARGET_TILES = 4
# Below this a matrix product no longer fills a card.
MIN_TILE_TOKENS = 2048

# Terms of q.k in one running sum.
DOT_RUN = 64

_CODES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def tile_tokens(num_keys: int, score_row_bytes: int) -> int:
    """Keys per tile: an even spread over TARGET_TILES, not below MIN_TILE_TOKENS, within the score budget.

    CUB's spread_out_items_per_thread: items = clamp(ceil(n / workers), min, max). score_row_bytes: scores of one key,
    for all heads and queries.
    """
    spread = max(MIN_TILE_TOKENS, -(-num_keys // TARGET_TILES))
    return max(1, min(spread, SCORE_BUDGET_BYTES // max(score_row_bytes, 1)))


@dataclass
class _Rules:
    """What turns q.k into a masked logit, for the H heads of one call."""

    scale: float
    soft_cap: float = 0.0
    slopes: Tensor | None = None
    window: int = 0
    sparse: tuple[int, int, int, int, int] | None = None  # vert_stride, local_blocks, block_size, head_sliding_step, tp_rank

    def visible(self, q_pos: Tensor, k_pos: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
        """[H or 1, queries, keys]: which keys each query sees."""
        distance = q_pos[:, None] - k_pos[None, :]
        seen = distance >= 0
        if self.window > 0:
            seen &= distance < self.window
        seen = seen[None]
        if self.sparse:
            vert_stride, local_blocks, block_size, step, tp_rank = self.sparse
            head = torch.arange(num_heads, device=q_pos.device)
            if step >= 0:
                offset = (tp_rank * num_heads + head) * step + 1
            else:
                offset = (tp_rank * num_kv_heads + head // (num_heads // num_kv_heads)) * -step + 1
            k_block = k_pos // block_size
            local = k_block[None, :] > q_pos[:, None] // block_size - local_blocks
            vertical = (k_block[None, :] + offset[:, None]) % vert_stride == 0
            seen = seen & (local[None] | vertical[:, None])
        return seen

    def logits(self, dots: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """dots [H, queries, keys] -> logits before masks, in place."""
        dots *= self.scale
        if self.soft_cap:
            dots = torch.tanh(dots / self.soft_cap) * self.soft_cap
        if self.slopes is not None:
            dots += self.slopes[:, None, None] * (k_pos[None, :] - q_pos[:, None])
        return dots


class _State:
    """<m, l, o> of online softmax for [H, queries] rows."""

    def __init__(self, num_heads: int, num_queries: int, head_size: int, device: torch.device):
        self.m = torch.full((num_heads, num_queries), -math.inf, device=device)
        self.l = torch.zeros(num_heads, num_queries, device=device)
        self.o = torch.zeros(num_heads, num_queries, head_size, device=device)

    def absorb(self, logits: Tensor, values: Tensor) -> None:
        """logits [H, queries, keys], -inf where masked; values [G, keys, D], finite where no row sees the key."""
        m = torch.maximum(self.m, logits.amax(-1))
        finite = m.masked_fill(m == -math.inf, 0.0)  # of an empty row, whose differences would be NaN
        rescale = torch.exp(self.m - finite)
        p = torch.exp(logits - finite[..., None])
        self.l = self.l * rescale + p.sum(-1)
        self.o = self.o * rescale[..., None] + _grouped_product(p, values)
        self.m = m

    def add_sinks(self, sinks: Tensor) -> None:
        """A key with this logit and value zero, once per row."""
        m = torch.maximum(self.m, sinks[:, None])
        rescale = torch.exp(self.m - m)
        self.l = self.l * rescale + torch.exp(sinks[:, None] - m)
        self.o = self.o * rescale[..., None]
        self.m = m

    def finalize(self) -> tuple[Tensor, Tensor]:
        """out [queries, H, D], lse [H, queries]; zeros and -inf for empty rows."""
        empty = self.l == 0
        out = self.o / self.l.masked_fill(empty, 1.0)[..., None]
        return out.transpose(0, 1), torch.where(empty, -math.inf, self.m + torch.log(self.l))


def _grouped_product(a: Tensor, b: Tensor) -> Tensor:
    """[H, queries, n] x [G, n, d] -> [H, queries, d]: each KV head serves its group of query heads."""
    num_heads, num_queries, n = a.shape
    num_kv_heads = b.shape[0]
    grouped = a.reshape(num_kv_heads, num_heads // num_kv_heads * num_queries, n)
    return torch.matmul(grouped, b).view(num_heads, num_queries, b.shape[-1])


def _dots(q: Tensor, keys: Tensor) -> Tensor:
    """q.k, [H, queries, D] x [G, D, n]: sums of at most DOT_RUN terms, added up: one long running sum loses accuracy."""
    runs = zip(q.split(DOT_RUN, -1), keys.split(DOT_RUN, 1), strict=True)
    return sum(_grouped_product(a, b) for a, b in runs)


def _check(condition: bool, op: str, message: str, error: type[Exception] = ValueError) -> None:
    if not condition:
        raise error(f"{op}: {message}")


def _head_vector(op: str, name: str, tensor: Tensor | None, num_heads: int) -> Tensor | None:
    """One float32 number per query head, or None."""
    if tensor is not None:
        _check(tensor.dtype == torch.float32, op, f"{name} has dtype {tensor.dtype}, takes float32", TypeError)
        _check(tensor.shape == (num_heads,), op, f"{name} has shape {list(tensor.shape)}, takes [{num_heads}] (query heads)")
    return tensor


@dataclass
class _Cache:
    """One paged cache, read a run of tokens at a time, as float32."""

    op: str
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    k_scale: Tensor | float
    v_scale: Tensor | float
    code: torch.dtype | None = None  # of an fp8 cache, which is indexed as uint8: older torch cannot index float8

    @classmethod
    def of(
        cls, op, query, key_cache, value_cache, block_tables, kv_cache_dtype, k_scale, v_scale, k_scales, v_scales
    ) -> _Cache:
        num_kv_heads = value_cache.shape[1]
        _check(
            query.shape[1] % num_kv_heads == 0,
            op,
            f"query has {query.shape[1]} heads, takes a multiple of the {num_kv_heads} KV heads of key_cache",
        )
        _check(
            kv_cache_dtype == "auto" or kv_cache_dtype in _CODES,
            op,
            f"kv_cache_dtype is '{kv_cache_dtype}', takes 'auto', 'fp8', 'fp8_e4m3' or 'fp8_e5m2'",
        )
        stored = query.dtype if kv_cache_dtype == "auto" else torch.uint8
        for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
            _check(
                cache.dtype == stored or (kv_cache_dtype in _CODES and cache.dtype == getattr(torch, _CODES[kv_cache_dtype])),
                op,
                f"{name} has dtype {cache.dtype}, takes {stored} with kv_cache_dtype '{kv_cache_dtype}'",
                TypeError,
            )
        if kv_cache_dtype == "auto":
            return cls(op, key_cache, value_cache, block_tables, 1.0, 1.0)
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
        scales = []
        for scale, tensor in ((k_scale, k_scales), (v_scale, v_scales)):
            tensor = scale if tensor is None and isinstance(scale, Tensor) else tensor
            scales.append(scale if tensor is None else tensor.float().reshape(-1, 1, 1))
        return cls(op, key_cache, value_cache, block_tables, *scales, getattr(torch, _CODES[kv_cache_dtype]))

    @property
    def block_size(self) -> int:
        return self.value_cache.shape[3]

    def check_length(self, sequence: int, length: int, name: str) -> None:
        blocks = -(-length // self.block_size)
        width = self.block_tables.shape[1]
        _check(
            blocks <= width,
            self.op,
            f"block_tables has {width} blocks of {self.block_size} tokens per sequence, takes {blocks} for "
            f"{name}[{sequence}] = {length}",
        )

    def read(self, sequence: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys [G, D, n] and values [G, n, D] of tokens begin .. end."""
        first = begin // self.block_size
        blocks = self.block_tables[sequence, first : -(-end // self.block_size)].long()
        inside = slice(begin - first * self.block_size, end - first * self.block_size)
        # [n, G, D/x, B, x] -> [G, D/x, x, n, B] -> [G, D, n * B]; one copy each.
        keys = self.key_cache[blocks].permute(1, 2, 4, 0, 3).flatten(3).flatten(1, 2)[..., inside]
        values = self.value_cache[blocks].permute(1, 2, 0, 3).flatten(2)[..., inside]
        if self.code:
            keys, values = keys.view(self.code), values.view(self.code)
        return keys.float() * self.k_scale, values.float().transpose(1, 2) * self.v_scale


def _block_sparse(op: str, cache: _Cache, local_blocks: int, vert_stride: int, block_size: int, step: int, tp_rank: int):
    if vert_stride <= 1:
        return None
    _check(
        block_size > 0 and block_size % cache.block_size == 0,
        op,
        f"blocksparse_block_size is {block_size}, takes a positive multiple of block_size {cache.block_size}",
    )
    return (vert_stride, local_blocks, block_size, step, tp_rank)


def _attend_tile(state: _State, rules: _Rules, q: Tensor, keys: Tensor, values: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """One tile into the state; returns the masked logits [H, queries, keys]."""
    seen = rules.visible(q_pos, k_pos, q.shape[0], keys.shape[0])
    logits = rules.logits(_dots(q, keys), q_pos, k_pos).masked_fill_(~seen, -math.inf)
    # What no row sees may be NaN, and 0 * NaN is NaN.
    unseen = ~seen.flatten(0, 1).any(0)
    state.absorb(logits, values.masked_fill(unseen[None, :, None], 0.0))
    return logits


def _decode(
    op: str,
    out: Tensor,
    query: Tensor,
    cache: _Cache,
    rules: _Rules,
    seq_lens: Tensor,
    max_seq_len: int,
    exp_sums: Tensor | None = None,
    max_logits: Tensor | None = None,
) -> None:
    num_seqs, num_heads, head_size = query.shape
    lengths = seq_lens.tolist()
    for s, length in enumerate(lengths):
        _check(0 <= length <= max_seq_len, op, f"seq_lens[{s}] is {length}, takes 0 to max_seq_len = {max_seq_len}")
        cache.check_length(s, length, "seq_lens")
    for s, length in enumerate(lengths):
        q = query[s].float()[:, None]
        q_pos = torch.tensor([length - 1], device=query.device)
        state = _State(num_heads, 1, head_size, query.device)
        step = -(-tile_tokens(length, 4 * num_heads) // PARTITION_TOKENS) * PARTITION_TOKENS
        for begin in range(0, length, step):
            end = min(begin + step, length)
            k_pos = torch.arange(begin, end, device=query.device)
            logits = _attend_tile(state, rules, q, *cache.read(s, begin, end), q_pos, k_pos)[:, 0]
            if exp_sums is not None:
                padded = torch.nn.functional.pad(logits, (0, -logits.shape[1] % PARTITION_TOKENS), value=-math.inf)
                padded = padded.view(num_heads, -1, PARTITION_TOKENS)
                m = padded.amax(-1)
                where = slice(begin // PARTITION_TOKENS, begin // PARTITION_TOKENS + m.shape[1])
                max_logits[s, :, where] = m
                exp_sums[s, :, where] = torch.exp(padded - m.masked_fill(m == -math.inf, 0.0)[..., None]).sum(-1)
        out[s] = state.finalize()[0][0].to(out.dtype)


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
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """`ops.paged_attention_v1` in PyTorch: the same arguments, shapes and errors."""
    op = "paged_attention_v1"
    cache = _Cache.of(op, query, key_cache, value_cache, block_tables, kv_cache_dtype, k_scale, v_scale, k_scales, v_scales)
    sparse = _block_sparse(
        op,
        cache,
        blocksparse_local_blocks,
        blocksparse_vert_stride,
        blocksparse_block_size,
        blocksparse_head_sliding_step,
        tp_rank,
    )
    slopes = _head_vector(op, "alibi_slopes", alibi_slopes, query.shape[1])
    _decode(op, out, query, cache, _Rules(scale, slopes=slopes, sparse=sparse), seq_lens, max_seq_len)


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
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """`ops.paged_attention_v2` in PyTorch: writes exp_sums and max_logits too; tmp_out is not used."""
    op = "paged_attention_v2"
    needed = -(-max_seq_len // PARTITION_TOKENS)
    _check(
        max_logits.shape[2] >= needed,
        op,
        f"max_logits has {max_logits.shape[2]} partitions, takes at least {needed} of {PARTITION_TOKENS} tokens for "
        f"max_seq_len {max_seq_len}",
    )
    cache = _Cache.of(op, query, key_cache, value_cache, block_tables, kv_cache_dtype, k_scale, v_scale, k_scales, v_scales)
    sparse = _block_sparse(
        op,
        cache,
        blocksparse_local_blocks,
        blocksparse_vert_stride,
        blocksparse_block_size,
        blocksparse_head_sliding_step,
        tp_rank,
    )
    slopes = _head_vector(op, "alibi_slopes", alibi_slopes, query.shape[1])
    exp_sums.zero_()
    max_logits.fill_(-math.inf)
    rules = _Rules(scale, slopes=slopes, sparse=sparse)
    _decode(op, out, query, cache, rules, seq_lens, max_seq_len, exp_sums, max_logits)


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
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    logits_soft_cap: float | None = None,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    precision: str = "default",
) -> None:
    """`ops.prefix_attention` in PyTorch: the same arguments, shapes and errors; float32 at either precision."""
    op = "prefix_attention"
    _check(precision in ("default", "float32"), op, f"precision is '{precision}', takes 'default' or 'float32'")
    cache = _Cache.of(op, query, key_cache, value_cache, block_tables, kv_cache_dtype, k_scale, v_scale, k_scales, v_scales)
    slopes = _head_vector(op, "alibi_slopes", alibi_slopes, query.shape[1])
    _head_vector(op, "sinks", sinks, query.shape[1])
    rules = _Rules(scale, logits_soft_cap or 0.0, slopes, sliding_window or 0)
    starts, contexts, lengths = query_start_loc.tolist(), context_lens.tolist(), seq_lens.tolist()
    for s, context in enumerate(contexts):
        num_queries = starts[s + 1] - starts[s]
        _check(
            lengths[s] == context + num_queries,
            op,
            f"seq_lens[{s}] is {lengths[s]}, takes context_lens + queries = {context + num_queries}",
        )
        cache.check_length(s, context, "context_lens")
    num_heads, head_size = query.shape[1:]
    for s, context in enumerate(contexts):
        tokens = slice(starts[s], starts[s + 1])
        num_queries = tokens.stop - tokens.start
        if num_queries == 0:
            continue
        q = query[tokens].float().transpose(0, 1)
        q_pos = torch.arange(context, lengths[s], device=query.device)
        state = _State(num_heads, num_queries, head_size, query.device)
        step = tile_tokens(lengths[s], 4 * num_heads * num_queries)
        first = max(0, context + 1 - rules.window) if rules.window > 0 else 0  # what the first query, and so every one, sees
        for begin in range(first, context, step):
            end = min(begin + step, context)
            k_pos = torch.arange(begin, end, device=query.device)
            _attend_tile(state, rules, q, *cache.read(s, begin, end), q_pos, k_pos)
        for begin in range(0, num_queries, step):
            end = min(begin + step, num_queries)
            keys = key[tokens][begin:end].float().permute(1, 2, 0)
            values = value[tokens][begin:end].float().transpose(0, 1)
            k_pos = torch.arange(context + begin, context + end, device=query.device)
            _attend_tile(state, rules, q, keys, values, q_pos, k_pos)
        if sinks is not None:
            state.add_sinks(sinks)
        result, result_lse = state.finalize()
        out[tokens] = result.to(out.dtype)
        if lse is not None:
            lse[:, tokens] = result_lse
