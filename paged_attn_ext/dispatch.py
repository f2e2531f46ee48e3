"""Which path a decode takes: v1, v2, or the PyTorch fallback. Pure Python over what the host knows; nothing waits for
the device.

The rule is CUB's GridEvenShare: a card is full at sm_count * occupancy * subscription blocks. v1 launches one block
per sequence and KV head; when these fill the card, or one partition is all there is, splitting further only adds a reduction.
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass

import torch

from . import settings

PARTITION_TOKENS = 512
SUBSCRIPTION = 5  # CUB's CUB_SUBSCRIPTION_FACTOR: blocks per resident block that even out their unequal ends

logger = logging.getLogger("paged_attn_ext")


@dataclass(frozen=True)
class DeviceProfile:
    """How many blocks fill a device: multiprocessors (or threads), resident blocks on each, blocks per resident block."""

    name: str
    sm_count: int
    occupancy: int
    subscription: int

    @property
    def max_blocks(self) -> int:
        return self.sm_count * self.occupancy * self.subscription


# 16 SMs as reported by ixsmi on the card; its driver is not asked, since its answers differ between versions.
BI_V100 = DeviceProfile("Iluvatar BI-V100", 16, 1, SUBSCRIPTION)


@functools.cache
def _cuda_profile(index: int) -> DeviceProfile:
    properties = torch.cuda.get_device_properties(index)
    if "BI-V100" in properties.name:
        return BI_V100
    return DeviceProfile(properties.name, properties.multi_processor_count, 1, SUBSCRIPTION)


def profile_for(device: torch.device) -> DeviceProfile:
    """The profile of a tensor's device."""
    if device.type == "cuda":
        return _cuda_profile(device.index if device.index is not None else torch.cuda.current_device())
    # CPU kernels split v1 over partitions too, so one block per thread is enough to keep it.
    return DeviceProfile(device.type, torch.get_num_threads(), 1, 1)


@dataclass(frozen=True)
class Choice:
    """path: "v1", "v2" or "pytorch"; partitions of 512 tokens that max_seq_len has; why."""

    path: str
    partitions: int
    reason: str


def choose_decode(
    num_seqs: int, num_heads: int, num_kv_heads: int, max_seq_len: int, profile: DeviceProfile, environ=os.environ
) -> Choice:
    """The path for a decode of these sizes. v1 and v2 give the same bits: between them a choice costs time only.

    Raises ValueError for a setting that is not among its choices.
    """
    partitions = -(-max_seq_len // PARTITION_TOKENS)
    threshold = settings.get_int(settings.PYTORCH_THRESHOLD, environ)
    if threshold is not None and max_seq_len > threshold:
        return Choice("pytorch", partitions, f"max_seq_len {max_seq_len} > {settings.PYTORCH_THRESHOLD.name} {threshold}")
    by_head = settings.get(settings.DISPATCH, environ) == "heads"
    blocks = num_seqs * (num_heads if by_head else num_kv_heads)
    if partitions <= 1:
        return Choice("v1", partitions, "one partition")
    if blocks >= profile.max_blocks:
        return Choice("v1", partitions, f"{blocks} blocks fill {profile.name} ({profile.max_blocks})")
    return Choice(
        "v2", partitions, f"{blocks} blocks leave {profile.name} ({profile.max_blocks}) room for {partitions} partitions"
    )


@functools.cache
def log_once(message: str) -> None:
    """Log a decision the first time it is made."""
    logger.info(message)
