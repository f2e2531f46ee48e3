"""v2's workspace: kept between decode steps, bounded, and never shared by two calls that may run at once.

Calls on one stream from one thread follow each other, so they may share memory; others may not. Hence one buffer per
(device, stream, thread), which grows, and the least recently used go when all together pass the bound.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch
from torch import Tensor

from . import settings

_buffers: OrderedDict[tuple, Tensor] = OrderedDict()
_lock = threading.Lock()


def _key(device: torch.device) -> tuple:
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return (device, stream, threading.get_ident())


def partition_workspace(
    num_seqs: int, num_heads: int, partitions: int, head_size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """(exp_sums, max_logits, tmp_out): [S, H, P], [S, H, P], [S, H, P, D], float32, not initialised.

    Views of a buffer that the next call from this thread on this stream may reuse.
    """
    rows = num_seqs * num_heads * partitions
    need = rows * (2 + head_size)
    bound = settings.get_int(settings.WORKSPACE_MIB) * 2**20 // 4
    key = _key(device)
    with _lock:
        buffer = _buffers.pop(key, None)
        if buffer is None or buffer.numel() < need:
            buffer = torch.empty(need, dtype=torch.float32, device=device)
        if buffer.numel() <= bound:  # a larger one serves this call and is not kept
            _buffers[key] = buffer
        while sum(b.numel() for b in _buffers.values()) > bound:
            _buffers.popitem(last=False)
    exp_sums, max_logits, tmp_out = buffer[:need].split([rows, rows, rows * head_size])
    shape = (num_seqs, num_heads, partitions)
    return exp_sums.view(shape), max_logits.view(shape), tmp_out.view(*shape, head_size)


def cached_bytes() -> int:
    """Memory that is kept at the moment."""
    with _lock:
        return sum(4 * b.numel() for b in _buffers.values())


def clear() -> None:
    """Give all kept memory back."""
    with _lock:
        _buffers.clear()
