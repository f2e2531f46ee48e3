"""Compile at first import, into a cache, once, whoever comes first.

The lock is the operating system's (flock on a file): held by a process, gone with it, so it is never stale. torch's
own file baton is not: a killed build leaves it behind, and every later import waits for ever. Libraries are built in a
temporary folder and renamed into place, so a folder that exists is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

from . import record
from .plan import Library, source_hash
from .toolchain import Toolchain


def cache_root(environ=os.environ) -> Path:
    """PAGED_ATTN_CACHE, or paged_attn_ext in XDG_CACHE_HOME, or in ~/.cache."""
    if environ.get("PAGED_ATTN_CACHE"):
        return Path(environ["PAGED_ATTN_CACHE"])
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paged_attn_ext"


def cache_key(torch, toolchain: Toolchain, plan: list[Library], sources: str | None = None) -> str:
    """Everything that the compiled bytes depend on: sources, flags, torch version, ABI, Python, toolchain."""
    what = {
        "sources": sources or source_hash(toolchain.name),
        "flags": [[library.name, *library.flags] for library in plan],
        "torch": torch.__version__,
        "abi": record.abi_of(torch),
        "python": record.python_abi(),
        "toolchain": [toolchain.name, toolchain.root, *toolchain.archs],
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:24]


@contextlib.contextmanager
def lock(path: Path):
    """Hold the file's lock; waits for another holder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_once(folder: Path, build, log) -> Path:
    """`folder`, built by build(temporary folder) if it is not there yet. Several processes may ask at once: one builds."""
    if folder.is_dir():
        return folder
    with lock(folder.with_suffix(".lock")):
        if folder.is_dir():  # another process built it while this one waited
            return folder
        log(f"paged_attn_ext: compiling for the first import into {folder} (a minute or two) ...")
        begin = time.monotonic()
        temporary = Path(tempfile.mkdtemp(prefix="build-", dir=folder.parent))
        try:
            build(temporary)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        log(f"paged_attn_ext: compiled in {time.monotonic() - begin:.0f} s")
    return folder


def libraries() -> Path:
    """The folder with this configuration's libraries, compiled now if need be."""
    import torch

    from . import compile as compiling
    from .plan import gpu_sources, make_plan
    from .toolchain import detect

    toolchain = detect(torch, gpu_sources())
    plan = make_plan(toolchain, compiling.log)
    folder = cache_root() / cache_key(torch, toolchain, plan)
    return build_once(folder, compiling.build_into, compiling.log)
