"""Which toolchain a build is for: cpu, cuda or corex.

Asked of compilers and of torch's own build, never of a device: a build host has no GPU, and torch.cuda must not be initialised
at build or import.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CHOICES = ("auto", "cpu", "cuda", "corex")
COREX_PREFIX = "/usr/local/corex"
COREX_DEFAULT_ARCH = "ivcore10"  # BI-V100; ivcore11 is BI-V150 and MR-V100
# PTX of the newest lets later cards compile for themselves.
CUDA_DEFAULT_ARCHS = "7.5;8.0;8.6;8.9;9.0+PTX"


@dataclass(frozen=True)
class Toolchain:
    """A compiler family, the folder of its SDK (None for cpu), its target architectures, and why it was chosen."""

    name: str
    root: str | None
    archs: tuple[str, ...]
    reason: str


def corex_root(environ=os.environ) -> str | None:
    """The CoreX SDK: the first of COREX_ROOT, COREX_HOME, /usr/local/corex, /usr/local/corex-* that holds bin/clang++."""
    prefix = Path(environ.get("PAGED_ATTN_COREX_PREFIX", COREX_PREFIX))
    candidates = [environ.get("COREX_ROOT"), environ.get("COREX_HOME"), str(prefix)]
    candidates += sorted((str(p) for p in prefix.parent.glob(prefix.name + "-*")), reverse=True)
    for candidate in candidates:
        if candidate and (Path(candidate) / "bin" / "clang++").is_file():
            return candidate
    return None


def torch_is_corex(torch) -> bool:
    """Whether this torch says of itself that it is Iluvatar's."""
    return getattr(torch, "corex", False) is True or "corex" in torch.__version__


def cuda_root(environ=os.environ) -> str | None:
    """The CUDA toolkit of the nvcc on PATH (or in CUDA_HOME), as nvcc itself reports it.

    nvcc may be a wrapper script in a folder of its own, so its place says nothing; `--dryrun` prints the toolkit's TOP.
    """
    home = environ.get("CUDA_HOME")
    nvcc = str(Path(home) / "bin" / "nvcc") if home else shutil.which("nvcc", path=environ.get("PATH"))
    if not nvcc or not Path(nvcc).is_file():
        return None
    try:
        shown = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True, timeout=60, env=dict(environ))
    except (OSError, subprocess.TimeoutExpired):
        return None
    for line in (shown.stdout + shown.stderr).splitlines():
        if line.startswith("#$ TOP="):
            return str(Path(line[len("#$ TOP=") :].strip()).resolve())
    return None  # CoreX's nvcc is a stub that only prints a version


def cuda_version(root: str) -> str | None:
    """The release of the toolkit in this folder, as its nvcc says it ("13.0"); None where it does not say."""
    try:
        shown = subprocess.run([str(Path(root) / "bin" / "nvcc"), "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"release (\d+\.\d+)", shown.stdout)
    return found[1] if found else None


def detect(torch, gpu_sources: list[str], environ=os.environ) -> Toolchain:
    """The toolchain of this build.

    torch: the module (its version strings are read, nothing else). gpu_sources: what there is to compile for a GPU.
    Raises ValueError for an unknown PAGED_ATTN_TOOLCHAIN, RuntimeError when the one asked for is not found.
    """
    wanted = environ.get("PAGED_ATTN_TOOLCHAIN", "auto")
    if wanted not in CHOICES:
        raise ValueError(f"PAGED_ATTN_TOOLCHAIN is {wanted!r}, takes one of {', '.join(CHOICES)}")
    if wanted == "cpu":
        return Toolchain("cpu", None, (), "PAGED_ATTN_TOOLCHAIN=cpu")
    # CoreX first: its torch also calls itself a CUDA build.
    if wanted == "corex" or (wanted == "auto" and torch_is_corex(torch)):
        root = corex_root(environ)
        if root:
            arch = environ.get("COREX_ARCH", COREX_DEFAULT_ARCH)
            return _if_sources("corex", root, (arch,), f"CoreX clang++ in {root}", gpu_sources)
        if wanted == "corex":
            raise RuntimeError("PAGED_ATTN_TOOLCHAIN=corex, but no bin/clang++ in COREX_ROOT, COREX_HOME or /usr/local/corex*")
        return Toolchain("cpu", None, (), "torch is a CoreX build, but no CoreX compiler was found")
    torch_cuda = getattr(torch.version, "cuda", None)
    if wanted == "auto" and not torch_cuda:
        return Toolchain("cpu", None, (), "torch is a CPU build")
    root = cuda_root(environ)
    if root:
        # Another major version is another runtime library: the two cannot be linked together.
        version = cuda_version(root)
        if torch_cuda and version and version.split(".")[0] != torch_cuda.split(".")[0]:
            reason = f"torch is a build for CUDA {torch_cuda}, and the nvcc of {root} is {version}"
            if wanted == "cuda":
                raise RuntimeError(
                    f"PAGED_ATTN_TOOLCHAIN=cuda, but {reason}: set CUDA_HOME to a toolkit of torch's CUDA version"
                )
            return Toolchain("cpu", None, (), reason)
        archs = environ.get("TORCH_CUDA_ARCH_LIST", CUDA_DEFAULT_ARCHS).replace(" ", ";")
        return _if_sources("cuda", root, tuple(a for a in archs.split(";") if a), f"nvcc of {root}", gpu_sources)
    if wanted == "cuda":
        raise RuntimeError("PAGED_ATTN_TOOLCHAIN=cuda, but no nvcc on PATH or in CUDA_HOME that reports its toolkit")
    return Toolchain("cpu", None, (), "torch is a CUDA build, but no nvcc was found")


def _if_sources(name: str, root: str, archs: tuple[str, ...], reason: str, gpu_sources: list[str]) -> Toolchain:
    if gpu_sources:
        return Toolchain(name, root, archs, reason)
    return Toolchain("cpu", None, (), f"{reason}, but this version has no GPU sources: CPU libraries only")
