"""One valid call per operator, small: what the tests of wrong calls and of tracing start from."""

import torch

S, H, G, D, B, N, M, T, P = 2, 4, 2, 16, 16, 6, 2, 5, 1
INT = torch.int32


def cache_pair():
    return {"key_cache": torch.randn(N, G, D // 4, B, 4), "value_cache": torch.randn(N, G, D, B)}


def paged_attention_v1():
    return {
        "out": torch.randn(S, H, D),
        "query": torch.randn(S, H, D),
        **cache_pair(),
        "num_kv_heads": G,
        "scale": 0.25,
        "block_tables": torch.tensor([[0, 1], [2, 3]], dtype=INT),
        "seq_lens": torch.tensor([5, 20], dtype=INT),
        "block_size": B,
        "max_seq_len": 20,
    }


def paged_attention_v2():
    return {
        **paged_attention_v1(),
        "exp_sums": torch.randn(S, H, P),
        "max_logits": torch.randn(S, H, P),
        "tmp_out": torch.randn(S, H, P, D),
    }


def prefix_attention():
    return {
        "out": torch.randn(T, H, D),
        "query": torch.randn(T, H, D),
        "key": torch.randn(T, G, D),
        "value": torch.randn(T, G, D),
        **cache_pair(),
        "block_tables": torch.tensor([[0, 1], [2, 3]], dtype=INT),
        "query_start_loc": torch.tensor([0, 2, 5], dtype=INT),
        "seq_lens": torch.tensor([18, 5], dtype=INT),
        "context_lens": torch.tensor([16, 2], dtype=INT),
        "max_query_len": 3,
        "scale": 0.25,
        "lse": torch.randn(H, T),
    }


def merge_attn_states():
    return {
        "out": torch.randn(T, H, D),
        "out_lse": torch.randn(H, T),
        "prefix_out": torch.randn(T, H, D),
        "prefix_lse": torch.randn(H, T),
        "suffix_out": torch.randn(T, H, D),
        "suffix_lse": torch.randn(H, T),
    }


def reshape_and_cache():
    return {
        "key": torch.randn(T, G, D),
        "value": torch.randn(T, G, D),
        **cache_pair(),
        "slot_mapping": torch.tensor([3, -1, 20, 5]),
    }


def gather_blocks():
    return {
        "key": torch.randn(B + 4, G, D),
        "value": torch.randn(B + 4, G, D),
        **cache_pair(),
        "block_table": torch.tensor([3, 0], dtype=INT),
    }


def pack_blocks():
    return {
        "buffer": torch.randn(3, 2, G * D),
        "caches": [torch.randn(N, G, D), torch.randn(N + 1, G, D)],
        "block_ids": torch.tensor([4, 0, 5], dtype=INT),
    }


def scatter_blocks():
    arguments = pack_blocks()
    return {name: arguments[name] for name in ("caches", "buffer", "block_ids")}


def copy_blocks():
    return {
        "key_caches": [torch.randn(N, G, D), torch.randn(N, G, D)],
        "value_caches": [torch.randn(N, D), torch.randn(N, D)],
        "block_mapping": torch.tensor([[0, 1], [2, 3]]),
    }


def swap_blocks():
    return {"src": torch.randn(N, G, D), "dst": torch.randn(N + 1, G, D), "block_mapping": torch.tensor([[0, 1], [2, 6]])}


VALID = {
    call.__name__: call
    for call in (
        paged_attention_v1,
        paged_attention_v2,
        prefix_attention,
        merge_attn_states,
        reshape_and_cache,
        gather_blocks,
        pack_blocks,
        scatter_blocks,
        copy_blocks,
        swap_blocks,
    )
}
