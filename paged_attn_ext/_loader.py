"""Finds and opens the compiled operators: `_C`, which registers torch.ops.paged_attn.

Order: the library installed beside the package; else, where the sources are, one compiled into the cache. A library
that was built for another torch is refused in one sentence; one that is older than the sources of the checkout it lies
in is left for a fresh one, with a message.

The kernels for a GPU are a library of their own, opened only where there is one: loading a CoreX library in a process
without a card crashes it. No device is initialised.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import torch

from .build import record

PACKAGE_FOLDER = Path(__file__).resolve().parent
MODULE = "paged_attn_ext._C"
GPU_TOOLCHAINS = ("cuda", "corex")


def library_in(folder: Path) -> Path | None:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"_C{suffix}"
        if path.is_file():
            return path
    return None


def find_folder() -> Path:
    """The folder with the libraries to use. Raises ImportError, saying what to do."""
    from .build.plan import CSRC, source_hash

    have_sources = (CSRC / "ops" / "schema.cpp").is_file()
    if library_in(PACKAGE_FOLDER):
        built = record.read(PACKAGE_FOLDER)
        if built is None:
            raise ImportError(
                f"paged_attn_ext: {record.FILE_NAME} is missing beside the library: rebuild with {record.REBUILD}"
            )
        problem = record.mismatch(built, torch)
        if problem:
            raise ImportError(problem)
        if not have_sources or built["source_hash"] == source_hash(built["toolchain"]):
            return PACKAGE_FOLDER
        print("paged_attn_ext: the sources changed since the library beside them was built", file=sys.stderr, flush=True)
    if not have_sources:
        raise ImportError(f"paged_attn_ext has no compiled library and no sources to compile: install it with {record.REBUILD}")
    from .build import jit

    return jit.libraries()


def gpu_library() -> Path | None:
    """The GPU library beside the operators in use, if one was built."""
    folder = Path(sys.modules[MODULE].__file__).parent
    return next((path for name in GPU_TOOLCHAINS if (path := folder / f"libpaged_attn_{name}.so").is_file()), None)


def load_gpu() -> Path | None:
    """Open the GPU library, where it was built and there is a GPU; returns its path, or None. Raises ImportError with the
    reason where it does not open. torch.cuda.is_available() asks the driver and initialises nothing."""
    library = gpu_library()
    if library is None or not torch.cuda.is_available():
        return None
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise ImportError(f"paged_attn_ext: {library} does not open: {error}; rebuild it with {record.REBUILD}") from error
    return library


def load():
    """The module `_C`."""
    if MODULE in sys.modules:
        return sys.modules[MODULE]
    path = library_in(find_folder())
    spec = importlib.util.spec_from_file_location(MODULE, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[MODULE]
        raise
    return module
