"""What was built for what: `_build_info.json` beside the libraries, checked before they are opened.

A library built for another torch fails to open with an undefined symbol, or worse, opens; one sentence before that is kinder.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

from .plan import ROOT, Library, compiler, source_hash
from .toolchain import Toolchain

FILE_NAME = "_build_info.json"
REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps paged_attn_ext (or `pip install .` in a checkout)"


def abi_of(torch) -> int:
    """Torch's C++11 ABI flag, 0 or 1."""
    return int(torch._C._GLIBCXX_USE_CXX11_ABI)


def python_abi() -> str:
    return f"{sys.implementation.cache_tag}-{platform.machine()}"


def git_revision() -> str | None:
    try:
        shown = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    except OSError:
        return None
    return shown.stdout.strip() or None


def make_record(torch, toolchain: Toolchain, plan: list[Library], cxx: str | None = None) -> dict:
    cxx = cxx or compiler()
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True).stdout
    return {
        "torch": torch.__version__,
        "cxx11_abi": abi_of(torch),
        "python": python_abi(),
        "toolchain": toolchain.name,
        "instruction_sets": [lib.target for lib in plan if lib.name.startswith("libpaged_attn_cpu_")],
        "compiler": version.splitlines()[0] if version else cxx,
        "git_revision": git_revision(),
        "source_hash": source_hash(toolchain.name),
        "flags": {lib.name: " ".join(lib.flags) for lib in plan},
    }


def write(folder: Path, record: dict) -> None:
    (folder / FILE_NAME).write_text(json.dumps(record, indent=2) + "\n")


def read(folder: Path) -> dict | None:
    path = folder / FILE_NAME
    return json.loads(path.read_text()) if path.is_file() else None


def mismatch(record: dict, torch) -> str | None:
    """One sentence that says what does not fit the running torch and what to do; None where all fits."""
    if record["torch"] != torch.__version__:
        return (
            f"paged_attn_ext was built for torch {record['torch']}, and this is torch {torch.__version__}: "
            f"rebuild it with {REBUILD}"
        )
    if record["cxx11_abi"] != abi_of(torch):
        return (
            f"paged_attn_ext was built for torch's C++11 ABI {record['cxx11_abi']}, and this torch has {abi_of(torch)}: "
            f"rebuild it with {REBUILD}"
        )
    if record["python"] != python_abi():
        return f"paged_attn_ext was built for {record['python']}, and this is {python_abi()}: rebuild it with {REBUILD}"
    return None
