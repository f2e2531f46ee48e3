"""Compile for the host executor: the GPU kernels as operators under torch.ops.paged_attn_simt32 and _simt64, and planted bugs.

Into build/simt/ of the checkout, by ninja, so only what changed is compiled again; under a lock, since pytest's workers
come at the same time.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from paged_attn_ext.build.jit import lock
from paged_attn_ext.build.plan import CSRC, ROOT, compiler, gpu_sources, job_count
from paged_attn_ext.build.record import abi_of

LANES = (32, 64)
TESTS = ROOT / "tests"
FOLDER = ROOT / "build" / "simt"

# As on the device: no contraction of a * b + c, one rounding rule for all. -O2: -O3 compiles twice as long.
KERNEL_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wno-unknown-pragmas")
OPERATOR_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden")
SANITIZER_FLAGS = {
    None: (),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-O1", "-g"),
    "thread": ("-fsanitize=thread", "-O1", "-g"),
}


def defines(lanes: int) -> list[str]:
    return [
        "-DPAGED_ATTN_SIMT",
        f"-DPAGED_ATTN_SIMT_LANES={lanes}",
        f"-DPAGED_ATTN_NAMESPACE=paged_attn_simt{lanes}",
        "-DPAGED_ATTN_FEWER_SIZES",
        f"-I{CSRC}",
        f"-I{TESTS}",
    ]


def executor_flags(sanitizer: str | None) -> list[str]:
    """The executor's own: ThreadSanitizer watches the kernels alone, and is told about fibers by this file."""
    flags = [*KERNEL_FLAGS, f"-I{TESTS}"]
    return [*flags, "-DPAGED_ATTN_SIMT_TSAN"] if sanitizer == "thread" else [*flags, *SANITIZER_FLAGS[sanitizer]]


def _escape(path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def ninja_file(objects: list[tuple[Path, list[str]]], folder: Path, target: Path, link_flags: list[str]) -> str:
    """Each (source, flags) to an object in `folder`, all of them to `target`."""
    lines = [
        "rule compile",
        f"  command = {compiler()} -x c++ $flags -MMD -MF $out.d -c $in -o $out",
        "  deps = gcc",
        "  depfile = $out.d",
        "rule link",
        f"  command = {compiler()} $in $flags -o $out",
    ]
    names = []
    for source, flags in objects:
        names.append(_escape(folder / f"{source.parent.name}_{source.name}.o"))
        lines += [f"build {names[-1]}: compile {_escape(source)}", f"  flags = {' '.join(flags)}"]
    lines += [f"build {_escape(target)}: link {' '.join(names)}", f"  flags = {' '.join(link_flags)}"]
    return "\n".join(lines) + "\n"


def build(objects: list[tuple[Path, list[str]]], folder: Path, target: Path, link_flags: list[str]) -> Path:
    """Run ninja over `ninja_file`. Raises RuntimeError with the compiler's words where it fails."""
    import ninja

    with lock(folder.with_suffix(".lock")):
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "build.ninja"
        text = ninja_file(objects, folder, target, link_flags)
        if not file.is_file() or file.read_text() != text:
            file.write_text(text)
        command = [str(Path(ninja.BIN_DIR) / "ninja"), "-f", str(file), "-j", str(job_count())]
        if "no work to do" not in subprocess.run([*command, "-n"], capture_output=True, text=True, cwd=folder).stdout:
            print(f"tests: compiling {target.name} for the host executor (a minute)", file=sys.stderr, flush=True)
        made = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if made.returncode != 0:
            raise RuntimeError(f"{target.name}:\n{made.stdout}{made.stderr}")
    return target


def library(lanes: int, sanitizer: str | None = None) -> Path:
    """The operators over the host executor, for torch.ops.load_library."""
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={abi_of(torch)}"
    kernels = [*KERNEL_FLAGS, *defines(lanes), *SANITIZER_FLAGS[sanitizer]]
    operators = [*OPERATOR_FLAGS, *defines(lanes), abi, *(f"-isystem{path}" for path in include_paths())]
    operators += SANITIZER_FLAGS[sanitizer]
    objects = [(Path(source), kernels) for source in gpu_sources()]
    objects += [(CSRC / "ops" / f"{name}.cpp", operators) for name in ("schema", "arguments", "gpu")]
    objects.append((TESTS / "simt" / "executor.cpp", executor_flags(sanitizer)))
    libraries = library_paths()
    link = ["-shared", "-pthread", *SANITIZER_FLAGS[sanitizer], *(f"-L{path}" for path in libraries)]
    link += [*(f"-Wl,-rpath,{path}" for path in libraries), "-ltorch", "-ltorch_cpu", "-lc10"]
    name = f"simt{lanes}" + (f"-{sanitizer}" if sanitizer else "")
    return build(objects, FOLDER / name, FOLDER / f"libpaged_attn_{name}.so", link)


def planted(lanes: int, sanitizer: str | None = None, ucontext: bool = False) -> Path:
    """The executable of tests/simt/planted. `ucontext`: with the portable switch between fibers."""
    switch = ["-DPAGED_ATTN_SIMT_UCONTEXT"] if ucontext else []
    kernels = [*KERNEL_FLAGS, *defines(lanes), *SANITIZER_FLAGS[sanitizer]]
    objects = [(source, kernels) for source in sorted((TESTS / "simt" / "planted").glob("*.cpp"))]
    objects.append((TESTS / "simt" / "executor.cpp", [*executor_flags(sanitizer), *switch]))
    name = f"planted{lanes}" + (f"-{sanitizer}" if sanitizer else "") + ("-ucontext" if ucontext else "")
    return build(objects, FOLDER / name, FOLDER / name / "planted", ["-pthread", *SANITIZER_FLAGS[sanitizer]])
