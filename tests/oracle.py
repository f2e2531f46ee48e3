"""What the operators should compute, in float64: slow, and obvious on reading. Straight from docs/contract.md.

Sequences are logical here: keys and values [L, G, D] in order, no pages. Each result comes with the bound that the
contract gives it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

PARTITION_TOKENS = 512


@dataclass
class Rules:
    """The options of one call; None or 0 is off."""

    scale: float
    soft_cap: float = 0.0
    slopes: Tensor | None = None
    window: int = 0
    sinks: Tensor | None = None
    # tp_rank, local_blocks, vert_stride, block_size, head_sliding_step, as keyword arguments of v1 and v2
    sparse: dict[str, int] = field(default_factory=dict)


@dataclass
class Expected:
    """One row: the exact output [D], what Σ p|v| and the largest scale * Σ|q k| are, and the state of the softmax."""

    out: Tensor
    weight: Tensor  # Σ p|v|, [D]
    condition: float  # max over keys of |scale| * Σ_d |q_d k_d|
    lse: float
    logits: Tensor  # [L], -inf where not seen


def sees(rules: Rules, head: int, num_heads: int, num_kv_heads: int, q_pos: int, k_pos: int) -> bool:
    """Whether the query at q_pos sees the key at k_pos."""
    if k_pos > q_pos:
        return False
    if rules.window > 0 and q_pos - k_pos >= rules.window:
        return False
    sparse = rules.sparse
    if sparse and sparse["blocksparse_vert_stride"] > 1:
        size = sparse["blocksparse_block_size"]
        q_block, k_block = q_pos // size, k_pos // size
        step, rank = sparse["blocksparse_head_sliding_step"], sparse["tp_rank"]
        kv_head = head // (num_heads // num_kv_heads)
        offset = (rank * num_heads + head) * step + 1 if step >= 0 else (rank * num_kv_heads + kv_head) * -step + 1
        local = k_block > q_block - sparse["blocksparse_local_blocks"]
        return local or (k_block + offset) % sparse["blocksparse_vert_stride"] == 0
    return True


def attend_row(q: Tensor, keys: Tensor, values: Tensor, rules: Rules, head: int, num_heads: int, q_pos: int) -> Expected:
    """One query head: q [D], keys and values [L, G, D] at positions 0 .. L - 1."""
    num_kv_heads = keys.shape[1]
    kv_head = head // (num_heads // num_kv_heads)
    q, k, v = q.double(), keys[:, kv_head].double(), values[:, kv_head].double()
    seen = torch.tensor([sees(rules, head, num_heads, num_kv_heads, q_pos, p) for p in range(len(k))], dtype=torch.bool)
    k, v = torch.where(seen[:, None], k, 0.0), torch.where(seen[:, None], v, 0.0)  # what is not seen may be NaN
    logits = rules.scale * (k @ q)
    condition = float((abs(rules.scale) * (k.abs() @ q.abs())).max()) if len(k) else 0.0
    if rules.soft_cap:
        logits = rules.soft_cap * torch.tanh(logits / rules.soft_cap)
    if rules.slopes is not None:
        logits = logits + rules.slopes[head].double() * (torch.arange(len(k)) - q_pos)
    logits = torch.where(seen, logits, -math.inf)
    all_logits = logits
    if rules.sinks is not None:
        all_logits = torch.cat([logits, rules.sinks[head].double().view(1)])
    lse = torch.logsumexp(all_logits, 0).item() if len(all_logits) else -math.inf
    if lse == -math.inf:
        zeros = torch.zeros(v.shape[1], dtype=torch.float64)
        return Expected(zeros, zeros, 0.0, lse, logits)
    p = torch.exp(logits - lse)
    return Expected(p @ v, p @ v.abs(), condition, lse, logits)


@dataclass
class Batch:
    """Rows stacked: out, weight [R, H, D]; condition, lse [R, H]; logits per row and head."""

    out: Tensor
    weight: Tensor
    condition: Tensor
    lse: Tensor
    rows: list[list[Expected]]


def attend(query: Tensor, keys: Tensor, values: Tensor, rules: Rules, first_position: int) -> Batch:
    """query [R, H, D] at positions first_position, first_position + 1, ..; keys, values [L, G, D]."""
    num_heads = query.shape[1]
    rows = [
        [attend_row(row[h], keys, values, rules, h, num_heads, first_position + r) for h in range(num_heads)]
        for r, row in enumerate(query)
    ]
    return _stack(rows)


def _stack(rows: list[list[Expected]]) -> Batch:
    if not rows:
        return Batch(torch.zeros(0), torch.zeros(0), torch.zeros(0), torch.zeros(0), rows)
    return Batch(
        torch.stack([torch.stack([e.out for e in row]) for row in rows]),
        torch.stack([torch.stack([e.weight for e in row]) for row in rows]),
        torch.tensor([[e.condition for e in row] for row in rows], dtype=torch.float64),
        torch.tensor([[e.lse for e in row] for row in rows], dtype=torch.float64),
        rows,
    )


def concatenate(batches: list[Batch]) -> Batch:
    return _stack([row for batch in batches for row in batch.rows])


def partition_states(expected: Expected, partitions: int) -> tuple[list[float], list[float]]:
    """(max_logits, exp_sums) of each partition of 512 tokens."""
    maxima, sums = [], []
    for i in range(partitions):
        part = expected.logits[i * PARTITION_TOKENS : (i + 1) * PARTITION_TOKENS]
        m = part.max().item() if len(part) else -math.inf
        maxima.append(m)
        sums.append(0.0 if m == -math.inf else torch.exp(part - m).sum().item())
    return maxima, sums


def rounding(dtype: torch.dtype) -> float:
    """Half the distance of neighbours, relative to the larger power of two below: what rounding to the output type may cost."""
    return torch.finfo(dtype).eps / 2


def tolerance(expected: Batch, dtype: torch.dtype, rounded_probabilities: bool) -> Tensor:
    """The contract's bound on |actual - exact|, [R, H, D]."""
    float32 = 4e-6 + 2.0**-22 * expected.condition
    if rounded_probabilities:
        float32 = float32 + {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(dtype, 0.0)
    smallest = torch.finfo(dtype).tiny if dtype != torch.float16 else 2.0**-24
    return float32[..., None] * expected.weight + rounding(dtype) * expected.out.abs() * 1.001 + smallest


def assert_within_contract(
    actual: Tensor, expected: Batch, rounded_probabilities: bool = False, lse: Tensor | None = None
) -> None:
    """actual [R, H, D], and lse [H, R] where given, against the oracle."""
    error = (actual.double() - expected.out).abs()
    bound = tolerance(expected, actual.dtype, rounded_probabilities)
    excess = torch.where(error.isnan(), math.inf, error - bound)
    worst = excess.argmax().item() if excess.numel() else 0
    assert not excess.numel() or excess.flatten()[worst] <= 0, (
        f"element {worst} of {tuple(actual.shape)}: got {actual.flatten()[worst]}, exact {expected.out.flatten()[worst]}, "
        f"bound {bound.flatten()[worst]:.3g}; {int((excess > 0).sum())} elements are out of bounds"
    )
    if lse is not None:
        exact, got = expected.lse.T, lse.double()
        empty = exact == -math.inf
        assert torch.equal(got == -math.inf, empty), "lse is -inf in the wrong rows"
        bound = 1e-5 * exact.abs().clamp(min=1) + 2.0**-22 * expected.condition.T
        close = ((got - exact).abs() <= bound) | empty
        assert close.all(), f"lse: got {got[~close][:3]}, exact {exact[~close][:3]}"
