"""Environment switches: what they are, what they take, and one reader that refuses everything else."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Switch:
    """An environment variable. `choices` None: free text or a number, checked where it is used."""

    name: str
    default: str
    meaning: str
    choices: tuple[str, ...] | None = None


BACKEND = Switch(
    "PAGED_ATTN_BACKEND", "auto", "kernels or PyTorch fallback behind PagedAttention", ("auto", "native", "pytorch")
)
PRECISION = Switch("PAGED_ATTN_PRECISION", "default", "precision of forward_prefix", ("default", "float32"))
DISPATCH = Switch(
    "PAGED_ATTN_DISPATCH",
    "kv_heads",
    "blocks counted as filling the card: per KV head, or per query head",
    ("kv_heads", "heads"),
)
PYTORCH_THRESHOLD = Switch("PAGED_ATTN_PYTORCH_THRESHOLD", "", "max_seq_len above which decode takes the PyTorch fallback")
WORKSPACE_MIB = Switch("PAGED_ATTN_WORKSPACE_MIB", "512", "bound of the cached v2 workspaces, in MiB")

SWITCHES = (
    BACKEND,
    PRECISION,
    DISPATCH,
    PYTORCH_THRESHOLD,
    WORKSPACE_MIB,
    Switch(
        "PAGED_ATTN_CHECK",
        "0",
        "raise GPU errors at each call, waiting for the device (else: paged_attn_ext.check())",
        ("0", "1"),
    ),
    Switch("PAGED_ATTN_CPU_ISA", "", "best instruction set that may be used", ("avx512bf16", "avx512", "avx2", "portable")),
    Switch("PAGED_ATTN_TOOLCHAIN", "auto", "what to build for", ("auto", "cpu", "cuda", "corex")),
    Switch("PAGED_ATTN_CACHE", "", "folder for libraries compiled at first import"),
    Switch("MAX_JOBS", "", "compilers at once"),
    Switch("TORCH_CUDA_ARCH_LIST", "", "CUDA architectures to build for"),
    Switch("COREX_ROOT", "", "folder of the CoreX SDK (also COREX_HOME)"),
    Switch("COREX_ARCH", "ivcore10", "CoreX architecture to build for"),
)


def get(switch: Switch, environ=os.environ) -> str:
    """The switch's value. Raises ValueError for one that is not among its choices."""
    value = environ.get(switch.name) or switch.default
    if switch.choices and value and value not in switch.choices:
        raise ValueError(f"{switch.name} is {value!r}, takes one of {', '.join(switch.choices)}")
    return value


def get_int(switch: Switch, environ=os.environ) -> int | None:
    """The switch's value as a number of 0 or more; None where it is not set."""
    value = get(switch, environ)
    if not value:
        return None
    if not value.isdigit():
        raise ValueError(f"{switch.name} is {value!r}, takes a number, 0 or more")
    return int(value)
