"""Attention over a paged KV cache: hand-written kernels as PyTorch operators, without Triton."""

from . import _loader

_C = _loader.load()  # registers torch.ops.paged_attn
_loader.load_gpu()

from . import ops  # noqa: E402
from .attention import PagedAttention, PagedAttentionMetadata  # noqa: E402
from .ops import check  # noqa: E402

__all__ = ["PagedAttention", "PagedAttentionMetadata", "check", "ops"]
__version__ = "0.1.0"
