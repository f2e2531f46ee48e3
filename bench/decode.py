"""Decode of one long sequence: v1 and v2 beside the PyTorch fallback and a plain read of as many bytes.

The floor is the bytes of K and V, read once, over the memory's bandwidth; the last row measures that bandwidth in the
same seconds. Every contender is checked against the fallback before it is timed, and all are timed in turn, so that
they share the machine's moods.
"""

import argparse
import statistics
import time

import torch

from paged_attn_ext import fallback, ops

PARTITION_TOKENS = 512


def milliseconds(call) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=7)
    a = parser.parse_args()

    torch.manual_seed(0)
    dtype = getattr(torch, a.dtype)
    x = 16 // torch.empty(0, dtype=dtype).element_size()
    blocks = -(-a.tokens // a.block_size)
    pool = blocks + 64  # more blocks than the sequence has, in random order, as after hours of serving
    key_cache = torch.randn(pool, a.kv_heads, a.head_size // x, a.block_size, x).to(dtype)
    value_cache = torch.randn(pool, a.kv_heads, a.head_size, a.block_size).to(dtype)
    block_tables = torch.randperm(pool)[:blocks].int().unsqueeze(0)
    seq_lens = torch.tensor([a.tokens], dtype=torch.int32)
    query = torch.randn(1, a.heads, a.head_size).to(dtype)
    out = torch.empty_like(query)
    partitions = -(-a.tokens // PARTITION_TOKENS)
    exp_sums, max_logits = torch.empty(2, 1, a.heads, partitions)
    tmp_out = torch.empty(1, a.heads, partitions, a.head_size)
    rest = (query, key_cache, value_cache, a.kv_heads, a.head_size**-0.5, block_tables, seq_lens, a.block_size, a.tokens)
    kv_bytes = 2 * a.tokens * a.kv_heads * a.head_size * query.element_size()
    memory = torch.zeros(kv_bytes // 4, dtype=torch.int32)

    contenders = {
        "v1": lambda: ops.paged_attention_v1(out, *rest),
        "v2": lambda: ops.paged_attention_v2(out, exp_sums, max_logits, tmp_out, *rest),
        "PyTorch fallback": lambda: fallback.paged_attention_v1(out, *rest),
        "plain read": lambda: memory.max(),
    }
    contenders["PyTorch fallback"]()
    expected = out.clone()
    for name in ("v1", "v2"):
        out.fill_(float("nan"))
        contenders[name]()
        torch.testing.assert_close(out, expected)

    times = {name: [] for name in contenders}
    for _ in range(a.repeats):
        for name, call in contenders.items():
            times[name].append(milliseconds(call))
    median = {name: statistics.median(values) for name, values in times.items()}
    print(
        f"{a.tokens} tokens, {a.heads}/{a.kv_heads} heads of {a.head_size}, {a.dtype}, {torch.get_num_threads()} threads, "
        f"{kv_bytes / 2**20:.0f} MiB of K and V, median of {a.repeats}"
    )
    for name, ms in median.items():
        print(f"{name:18s} {ms:10.2f} ms {kv_bytes / ms / 1e6:8.1f} GB/s {median['PyTorch fallback'] / ms:8.1f} x fallback")


if __name__ == "__main__":
    main()
