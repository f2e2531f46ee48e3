"""Greedy generation for several prompts at once: prompts prefilled in chunks, then one token for every sequence per step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .blocks import BlockPool, Sequence
from .model import PagedLlama, Step


@dataclass
class Statistics:
    """Tokens computed and seconds taken, of the two phases."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    reused_tokens: int = 0
    used_blocks: int = 0
    shared_blocks: int = 0


def make_step(work: list[tuple[Sequence, int]], decode: bool) -> Step:
    """The forward pass that computes the next `count` tokens of each sequence. Reserves their blocks."""
    tokens, positions, slots, starts = [], [], [], [0]
    for sequence, count in work:
        begin, end = sequence.cached, sequence.cached + count
        sequence.reserve(end)
        tokens += sequence.tokens[begin:end]
        positions += range(begin, end)
        slots += [sequence.slot(p) for p in range(begin, end)]
        starts.append(starts[-1] + count)
    width = max(len(sequence.blocks) for sequence, _ in work)
    tables = [sequence.blocks + [-1] * (width - len(sequence.blocks)) for sequence, _ in work]
    contexts = torch.tensor([sequence.cached for sequence, _ in work], dtype=torch.int32)
    counts = torch.tensor([count for _, count in work], dtype=torch.int32)
    return Step(
        tokens=torch.tensor(tokens),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=contexts + counts,
        context_lens=contexts,
        max_query_len=int(counts.max()),
        decode=decode,
    )


def generate(
    model: PagedLlama,
    pool: BlockPool,
    prompts: list[list[int]],
    max_new_tokens: int,
    chunk: int,
    on_token: Callable[[int, int], None] = lambda sequence, token: None,
) -> tuple[list[Sequence], Statistics]:
    """Sequences with max_new_tokens greedy tokens each, and what it took.

    Prompts are prefilled `chunk` tokens at a time, one after the other, so that a later prompt finds the blocks of an
    earlier one's equal beginning; all sequences are then decoded together. on_token(sequence index, token) is called
    as tokens come. Past the end-of-text token generation goes on: the comparison with a reference wants equal lengths.
    """
    statistics = Statistics()
    sequences: list[Sequence] = []
    for index, prompt in enumerate(prompts):
        sequence = Sequence.start(pool, prompt)
        sequences.append(sequence)
        statistics.reused_tokens += sequence.cached
        while sequence.cached < len(prompt):
            begin = time.perf_counter()
            count = min(chunk, len(prompt) - sequence.cached)
            logits = model.forward(make_step([(sequence, count)], decode=False), torch.tensor([count - 1]))
            sequence.cached += count
            statistics.prefill_tokens += count
            statistics.prefill_seconds += time.perf_counter() - begin
        sequence.publish()
        _append(sequence, index, logits[0], on_token)
    for _ in range(max_new_tokens - 1):
        begin = time.perf_counter()
        step = make_step([(sequence, 1) for sequence in sequences], decode=True)
        logits = model.forward(step, torch.arange(len(sequences)))
        for index, sequence in enumerate(sequences):
            sequence.cached += 1
            _append(sequence, index, logits[index], on_token)
        statistics.decode_tokens += len(sequences)
        statistics.decode_seconds += time.perf_counter() - begin
    statistics.used_blocks, statistics.shared_blocks = pool.num_used, pool.num_shared
    return sequences, statistics


def _append(sequence: Sequence, index: int, logits: torch.Tensor, on_token: Callable[[int, int], None]) -> None:
    token = int(logits.argmax())
    sequence.tokens.append(token)
    on_token(index, token)
