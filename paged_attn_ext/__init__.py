"""Attention over a paged KV cache: hand-written kernels as PyTorch operators, without Triton."""

from . import _loader

_C = _loader.load()  # registers torch.ops.paged_attn

__version__ = "0.1.0"
