"""Attention over a paged KV cache: hand-written kernels as PyTorch operators, without Triton."""

from . import _loader

_C = _loader.load()  # registers torch.ops.paged_attn

from . import ops  # noqa: E402
from .attention import PagedAttention, PagedAttentionMetadata  # noqa: E402

__all__ = ["PagedAttention", "PagedAttentionMetadata", "ops"]
__version__ = "0.1.0"
