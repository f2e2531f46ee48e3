"""A Llama-style decoder in plain PyTorch whose attention is the package's operators over a paged cache.

The weights are a transformers checkpoint's, read by name; nothing of transformers runs. Shapes: T tokens of all
sequences in a step, H query heads, G KV heads, D head size, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .. import ops
from ..attention import PagedAttention


@dataclass
class Config:
    """What a forward pass needs to know of a checkpoint."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rope_theta: float
    norm_epsilon: float


@dataclass
class Step:
    """One forward pass: which tokens, where their keys and values go, and whom they belong to.

    tokens, positions, slots: [T] int64. block_tables: [S, M] int32. query_start_loc [S + 1], seq_lens, context_lens
    [S] int32. max_query_len: 1 where every sequence has one token, its last: then attention is decode, else prefix.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    context_lens: Tensor
    max_query_len: int
    decode: bool


class PagedLlama:
    """Weights and cache of one model."""

    def __init__(
        self, config: Config, weights: dict[str, Tensor], num_blocks: int, block_size: int, kv_cache_dtype: str = "auto"
    ):
        self.config = config
        self.weights = weights
        self.kv_cache_dtype = kv_cache_dtype
        shape = PagedAttention.get_kv_cache_shape(num_blocks, block_size, config.num_kv_heads, config.head_size)
        dtype = torch.float32 if kv_cache_dtype == "auto" else torch.uint8
        caches = [torch.zeros(shape, dtype=dtype) for _ in range(config.num_layers)]
        self.caches = [PagedAttention.split_kv_cache(cache, config.num_kv_heads, config.head_size) for cache in caches]
        frequency = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
        self.inverse_frequency = config.rope_theta**-frequency

    def forward(self, step: Step, rows: Tensor) -> Tensor:
        """Logits [len(rows), vocabulary] of the tokens `rows` of the step; all tokens' keys and values go to the cache."""
        w, c = self.weights, self.config
        hidden = functional.embedding(step.tokens, w["model.embed_tokens.weight"])
        angle = step.positions[:, None] * self.inverse_frequency
        cos, sin = (torch.cat([f(angle)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
        for layer in range(c.num_layers):
            prefix = f"model.layers.{layer}."
            x = self._norm(hidden, prefix + "input_layernorm.weight")
            query, key, value = (
                functional.linear(x, w[f"{prefix}self_attn.{name}_proj.weight"]).view(len(x), -1, c.head_size) for name in "qkv"
            )
            query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
            attended = self._attend(layer, step, query, key, value).reshape(len(x), -1)
            hidden = hidden + functional.linear(attended, w[prefix + "self_attn.o_proj.weight"])
            x = self._norm(hidden, prefix + "post_attention_layernorm.weight")
            gate = functional.silu(functional.linear(x, w[prefix + "mlp.gate_proj.weight"]))
            up = functional.linear(x, w[prefix + "mlp.up_proj.weight"])
            hidden = hidden + functional.linear(gate * up, w[prefix + "mlp.down_proj.weight"])
        x = self._norm(hidden[rows], "model.norm.weight")
        return functional.linear(x, w.get("lm_head.weight", w["model.embed_tokens.weight"]))

    def _attend(self, layer: int, step: Step, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[T, H, D]: new keys and values into the cache, then attention over it."""
        key_cache, value_cache = self.caches[layer]
        scale = self.config.head_size**-0.5
        ops.reshape_and_cache(key, value, key_cache, value_cache, step.slots, self.kv_cache_dtype)
        if step.decode:
            return ops.decode_attention(
                query, key_cache, value_cache, step.block_tables, step.seq_lens, scale, kv_cache_dtype=self.kv_cache_dtype
            )
        out = torch.empty_like(query)
        ops.prefix_attention(
            out,
            query,
            key,
            value,
            key_cache,
            value_cache,
            step.block_tables,
            step.query_start_loc,
            step.seq_lens,
            step.context_lens,
            step.max_query_len,
            scale,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        return out

    def _norm(self, x: Tensor, weight: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.norm_epsilon) * self.weights[weight]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [T, heads, D], halves paired as in Llama (Su et al. 2021)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
