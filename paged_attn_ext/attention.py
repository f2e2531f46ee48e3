"""Drop-in for vLLM 0.6.3's `PagedAttention` and `PagedAttentionMetadata`: the same names, signatures and cache shapes,
without vLLM.

Which path runs is PAGED_ATTN_BACKEND's and dispatch.py's decision, logged once; nothing falls back in silence, and
nothing catches an exception to print it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import dispatch, fallback, ops, settings, workspace

# Sizes with loops of their own; any other that the layout holds works too.
_FAST_HEAD_SIZES = [64, 80, 96, 112, 120, 128, 192, 256]


@dataclass
class PagedAttentionMetadata:
    """Metadata for PagedAttention."""

    # [S]: tokens seen so far of each sequence, the new ones included.
    seq_lens_tensor: Tensor | None
    # Largest sequence length of the decode batch; 0 if there is only prefill.
    max_decode_seq_len: int
    # [S, M]: block b of sequence s holds its tokens from b * block size on.
    block_tables: Tensor | None


def _has_kernels(device: torch.device) -> bool:
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device.type)
    return key is not None and torch._C._dispatch_has_kernel_for_dispatch_key("paged_attn::paged_attention_v1", key)


def _native(device: torch.device) -> bool:
    """Whether the kernels serve this device, by setting or because they are there."""
    backend = settings.get(settings.BACKEND)
    if backend != "auto":
        dispatch.log_once(f"{settings.BACKEND.name}={backend}: {device.type} tensors take the {backend} path")
        return backend == "native"
    found = _has_kernels(device)
    dispatch.log_once(
        f"{device.type} tensors take the {'native kernels' if found else 'PyTorch fallback: no kernels for them'}"
    )
    return found


class PagedAttention:
    """Static methods over a cache tensor [2, N, B * G * D], as vLLM calls them."""

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """Fast head sizes; others that are multiples of 16 bytes work too."""
        return list(_FAST_HEAD_SIZES)

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Shape of one layer's cache: keys and values, blocks, elements of a block."""
        return (2, num_blocks, block_size * num_kv_heads * head_size)

    @staticmethod
    def split_kv_cache(kv_cache: Tensor, num_kv_heads: int, head_size: int) -> tuple[Tensor, Tensor]:
        """Views of [2, N, B * G * D] as key cache [N, G, D/x, B, x] and value cache [N, G, D, B]."""
        x = 16 // kv_cache.element_size()
        num_blocks = kv_cache.shape[1]
        key_cache = kv_cache[0].view(num_blocks, num_kv_heads, head_size // x, -1, x)
        value_cache = kv_cache[1].view(num_blocks, num_kv_heads, head_size, -1)
        return key_cache, value_cache

    @staticmethod
    def write_to_paged_cache(
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: float,
        v_scale: float,
    ) -> None:
        """Store key, value [T, G, D] at their slots; see `ops.reshape_and_cache`."""
        ops.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping.flatten(), kv_cache_dtype, k_scale, v_scale)

    @staticmethod
    def forward_decode(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        kv_cache_dtype: str,
        num_kv_heads: int,
        scale: float,
        alibi_slopes: Tensor | None,
        k_scale: float,
        v_scale: float,
        tp_rank: int = 0,
        blocksparse_local_blocks: int = 0,
        blocksparse_vert_stride: int = 0,
        blocksparse_block_size: int = 64,
        blocksparse_head_sliding_step: int = 0,
    ) -> Tensor:
        """Decode: [S, H, D], contiguous. Arguments as in `ops.paged_attention_v1`; max_seq_len bounds seq_lens."""
        num_seqs, num_heads, head_size = query.shape
        block_size = value_cache.shape[3]
        # Not empty_like: of a permuted query it would keep the strides, and callers view the result as [S, H * D].
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        arguments = (query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size, max_seq_len)
        arguments += (alibi_slopes, kv_cache_dtype, k_scale, v_scale, tp_rank, blocksparse_local_blocks)
        arguments += (blocksparse_vert_stride or 0, blocksparse_block_size, blocksparse_head_sliding_step)
        profile = dispatch.profile_for(query.device)
        choice = dispatch.choose_decode(num_seqs, num_heads, num_kv_heads, max_seq_len, profile)
        if choice.path == "pytorch" or not _native(query.device):
            fallback.paged_attention_v1(out, *arguments)
        elif choice.path == "v1":
            ops.paged_attention_v1(out, *arguments)
        else:
            scratch = workspace.partition_workspace(num_seqs, num_heads, choice.partitions, head_size, query.device)
            ops.paged_attention_v2(out, *scratch, *arguments)
        dispatch.log_once(f"decode takes {choice.path}: {choice.reason}")
        return out

    @staticmethod
    def forward_prefix(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache_dtype: str,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens_tensor: Tensor,
        context_lens: Tensor,
        max_query_len: int,
        alibi_slopes: Tensor | None,
        sliding_window: int | None,
        k_scale: float,
        v_scale: float,
        *,
        scale: float | None = None,
        logits_soft_cap: float | None = None,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
        precision: str | None = None,
    ) -> Tensor:
        """Chunked prefill: [T, H, D], contiguous. Arguments as in `ops.prefix_attention`.

        scale: by default 1 / sqrt(D). precision: by default PAGED_ATTN_PRECISION. Rows beyond the last query_start_loc
        are not initialised.
        """
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        attend = ops.prefix_attention if _native(query.device) else fallback.prefix_attention
        attend(
            out,
            query,
            key,
            value,
            key_cache,
            value_cache,
            block_tables,
            query_start_loc,
            seq_lens_tensor,
            context_lens,
            max_query_len,
            query.shape[-1] ** -0.5 if scale is None else scale,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            k_scale,
            v_scale,
            logits_soft_cap,
            sinks,
            lse,
            precision=precision or settings.get(settings.PRECISION),
        )
        return out

    @staticmethod
    def _forward_decode_pytorch(
        query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float
    ) -> Tensor:
        """The PyTorch decode by the name that deployments call it."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        num_kv_heads, block_size = value_cache.shape[1], value_cache.shape[3]
        capacity = block_tables.shape[1] * block_size
        fallback.paged_attention_v1(
            out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size, capacity
        )
        return out

    @staticmethod
    def _forward_prefix_pytorch(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens_tensor: Tensor,
        context_lens: Tensor,
    ) -> Tensor:
        """The PyTorch prefix by the name that deployments call it."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        caches = (key_cache, value_cache, block_tables, query_start_loc, seq_lens_tensor, context_lens)
        fallback.prefix_attention(out, query, key, value, *caches, query.shape[0], query.shape[-1] ** -0.5)
        return out

    @staticmethod
    def swap_blocks(src_kv_cache: Tensor, dst_kv_cache: Tensor, src_to_dst: Tensor) -> None:
        """Copy blocks of one layer's cache to another's, keys and values; src_to_dst: [n, 2]."""
        for part in (0, 1):
            ops.swap_blocks(src_kv_cache[part], dst_kv_cache[part], src_to_dst)

    @staticmethod
    def copy_blocks(kv_caches: list[Tensor], src_to_dists: Tensor) -> None:
        """Copy blocks within each layer's cache, keys and values; src_to_dists: [n, 2]."""
        ops.copy_blocks([cache[0] for cache in kv_caches], [cache[1] for cache in kv_caches], src_to_dists)
