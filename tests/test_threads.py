"""Threads: they take part, they change no bit, and operators may be called from several Python threads at once."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from paged_attn_ext import ops

TASKS = Path("/proc/self/task")
HEADS, KV_HEADS, HEAD_SIZE, BLOCK, X = 8, 4, 128, 16, 4


def batch(lengths, dtype=torch.float32, seed=0):
    """Caches, tables and queries for sequences of these lengths, pages shuffled."""
    generator = torch.Generator().manual_seed(seed)
    x = 16 // torch.empty((), dtype=dtype).element_size()
    per_sequence = -(-max(lengths) // BLOCK)
    num_blocks = per_sequence * len(lengths)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "query": randn(len(lengths), HEADS, HEAD_SIZE),
        "key_cache": randn(num_blocks, KV_HEADS, HEAD_SIZE // x, BLOCK, x),
        "value_cache": randn(num_blocks, KV_HEADS, HEAD_SIZE, BLOCK),
        "num_kv_heads": KV_HEADS,
        "scale": HEAD_SIZE**-0.5,
        "block_tables": torch.randperm(num_blocks, generator=generator).view(len(lengths), per_sequence).int(),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "block_size": BLOCK,
        "max_seq_len": max(lengths),
    }


def v1(call):
    out = torch.empty_like(call["query"])
    ops.paged_attention_v1(out, **call)
    return (out,)


def v2(call):
    seqs = len(call["seq_lens"])
    partitions = -(-call["max_seq_len"] // 512)
    out = torch.empty_like(call["query"])
    sums, maxima = torch.empty(seqs, HEADS, partitions), torch.empty(seqs, HEADS, partitions)
    ops.paged_attention_v2(out, sums, maxima, torch.empty(seqs, HEADS, partitions, HEAD_SIZE), **call)
    return out, sums, maxima


def prefix(call, query_len=37):
    """A chunk of each sequence over its cache."""
    seqs = len(call["seq_lens"])
    generator = torch.Generator().manual_seed(9)
    dtype = call["query"].dtype
    query = torch.randn(seqs * query_len, HEADS, HEAD_SIZE, generator=generator).to(dtype)
    key, value = (torch.randn(seqs * query_len, KV_HEADS, HEAD_SIZE, generator=generator).to(dtype) for _ in range(2))
    out, lse = torch.empty_like(query), torch.empty(HEADS, seqs * query_len)
    ops.prefix_attention(
        out,
        query,
        key,
        value,
        call["key_cache"],
        call["value_cache"],
        call["block_tables"],
        torch.arange(seqs + 1) * query_len,
        call["seq_lens"] + query_len,
        call["seq_lens"],
        query_len,
        call["scale"],
        lse=lse,
    )
    return out, lse


@pytest.mark.parametrize("operator", [v1, v2, prefix], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [[1300], [1, 700, 0, 33, 512]], ids=str)
def test_the_number_of_threads_changes_no_bit(threads, operator, dtype, lengths):
    call = batch(lengths, dtype)
    threads(1)
    expected = operator(call)
    for count in (2, 3, 7):
        threads(count)
        for got, want in zip(operator(call), expected, strict=True):
            assert torch.equal(got, want)


def test_stores_to_one_slot_keep_the_last_at_any_number_of_threads(threads):
    key = torch.randn(200, KV_HEADS, HEAD_SIZE)
    slots = torch.arange(200) % 7
    for count in (1, 2, 5):
        threads(count)
        call = batch([16])
        ops.reshape_and_cache(key, key, call["key_cache"], call["value_cache"], slots)
        for slot in range(7):
            last = max(token for token in range(200) if token % 7 == slot)
            assert torch.equal(call["value_cache"][0, :, :, slot], key[last])


# Run with the operator's name: CPU seconds that each thread of the process spent in many calls with two threads.
PROBE = """
import json, os, pathlib, sys, time
import torch
import test_threads as t

def seconds():  # utime and stime of every thread: proc(5)
    tick = os.sysconf("SC_CLK_TCK")
    stats = {task.name: (task / "stat").read_text().rsplit(")", 1)[1].split() for task in t.TASKS.iterdir()}
    return {task: (int(fields[11]) + int(fields[12])) / tick for task, fields in stats.items()}

torch.set_num_threads(2)
operator, call = getattr(t, sys.argv[1]), t.batch([1024] * 4)
operator(call)
before, begin = seconds(), time.process_time()
while time.process_time() - begin < 0.8:
    operator(call)
print(json.dumps([after - before.get(task, 0.0) for task, after in seconds().items()]))
"""


@pytest.mark.skipif(not TASKS.is_dir(), reason="needs /proc")
@pytest.mark.parametrize("operator", ["v1", "v2", "prefix"])
def test_two_threads_share_the_work(operator):
    """By CPU time rather than by the clock, which says little on a busy machine; waiting threads are told to sleep, so that
    what is counted is work."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "2", "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", PROBE, operator]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    shares = sorted(json.loads(result.stdout), reverse=True)
    assert len(shares) >= 2
    assert shares[1] > 0.25 * sum(shares), shares


def test_python_threads_may_call_at_once(threads):
    """Operators keep no state between calls, so concurrent calls give the bits of calls one after another."""
    threads(1)
    calls = [batch([200 + 100 * i, 17], seed=i) for i in range(4)]
    expected = [(*v1(call), *v2(call), *prefix(call)) for call in calls]
    results = [[] for _ in calls]
    start = threading.Barrier(len(calls))

    def work(index):
        start.wait()
        for _ in range(5):
            call = calls[index]
            results[index].append((*v1(call), *v2(call), *prefix(call)))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for got_rounds, want in zip(results, expected, strict=True):
        assert len(got_rounds) == 5
        for got in got_rounds:
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
