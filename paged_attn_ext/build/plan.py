"""The library plan: what is compiled from what, with which flags. The one place that knows a flag."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .toolchain import Toolchain

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
MODULE = "_C"  # the one library that Python imports

# Infinities carry meaning here (an empty state's maximum is -inf), and -ffast-math under clang drops them: none of these, ever.
FORBIDDEN_FLAGS = (
    "-ffast-math",
    "-Ofast",
    "-ffinite-math-only",
    "--use_fast_math",
    "-use_fast_math",
    "-funsafe-math-optimizations",
)

GPU_HOST_FLAGS = ("-O2",)  # for the registration beside the kernels
OPERATOR_FLAGS = ("-O2", "-fopenmp")  # without -fopenmp ATen/Parallel.h is silently serial
KERNEL_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off")
# libstdc++ gives its templates default visibility whatever -fvisibility says, so what is exported is said to the linker.
KERNEL_LINK_FLAGS = (f"-Wl,--version-script={CSRC / 'cpu' / 'kernels' / 'exports.map'}",)

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
# Best first, as csrc/ops/cpu_kernels.cpp picks them.
X86_INSTRUCTION_SETS = {
    "avx512bf16": (*_AVX512, "-mavx512bf16"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "portable": (),
}

GIB_PER_JOB = 2.0  # one compiler over torch's headers


@dataclass(frozen=True)
class Library:
    """One shared library. `links_torch`: sees torch's headers and libraries, and is an extension module; kernels do not."""

    name: str
    sources: tuple[str, ...]
    flags: tuple[str, ...]
    links_torch: bool
    toolchain: str
    target: str  # instruction set or architectures


def instruction_sets(machine: str | None = None) -> dict[str, tuple[str, ...]]:
    """Instruction sets to compile for on this kind of machine, best first, with their flags."""
    machine = machine or platform.machine()
    return X86_INSTRUCTION_SETS if machine in ("x86_64", "AMD64") else {"portable": ()}


def compiler() -> str:
    """The host compiler, as setuptools and torch choose it."""
    return os.environ.get("CXX", "c++" if shutil.which("c++") else "g++")


def accepts(flags: tuple[str, ...], cxx: str | None = None) -> bool:
    """Whether the compiler takes these flags (gcc 9 lacks -mavx512bf16, for one)."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "empty.cpp"
        source.write_text("int main() { return 0; }\n")
        command = [cxx or compiler(), *flags, "-c", str(source), "-o", str(Path(folder) / "empty.o")]
        return subprocess.run(command, capture_output=True).returncode == 0


def sources(pattern: str) -> tuple[str, ...]:
    return tuple(sorted(str(p) for p in CSRC.glob(pattern)))


GPU_OPERATORS = CSRC / "ops" / "gpu.cpp"


def gpu_sources() -> list[str]:
    """The kernels for a GPU."""
    return list(sources("gpu/*.cu"))


def gpu_library_sources() -> tuple[str, ...]:
    """The kernels and their registration, which checks arguments as every backend does."""
    return (*gpu_sources(), str(GPU_OPERATORS), str(CSRC / "ops" / "arguments.cpp"))


def gpu_flags(toolchain: Toolchain) -> tuple[str, ...]:
    """Device compiler flags: nvcc's for cuda, clang++'s for corex (which refuses every flag that is nvcc's alone)."""
    if toolchain.name == "corex":
        archs = tuple(f"--cuda-gpu-arch={arch}" for arch in toolchain.archs)
        where = (f"--cuda-path={toolchain.root}", *archs, "--no-cuda-version-check")
        # -Wno-pass-failed: a loop that could not be unrolled is no news.
        return ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-Wno-pass-failed", *where)
    # One rounding per operation written, as on the CPU: fused multiply-adds are written out where they are wanted.
    flags: list[str] = ["-std=c++17", "-O3", "-fmad=false"]
    for arch in toolchain.archs:
        number = arch.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return tuple(flags)


def make_plan(toolchain: Toolchain, log=lambda line: None, cxx: str | None = None, check=accepts) -> list[Library]:
    """Every library of a build; sets that the compiler lacks, by check(flags, cxx), are left out, with a line in the log."""
    cxx = cxx or compiler()
    operators = tuple(source for source in sources("ops/*.cpp") if source != str(GPU_OPERATORS))
    plan = [Library(MODULE, operators, OPERATOR_FLAGS, True, "cpu", "torch operators")]
    for isa, flags in instruction_sets().items():
        if not check(flags, cxx):
            log(f"paged_attn_ext: {cxx} does not take {' '.join(flags)}: no kernels for {isa}")
            continue
        defined = (*KERNEL_FLAGS, f"-DPAGED_ATTN_CPU_ISA={isa}", *flags)
        plan.append(Library(f"libpaged_attn_cpu_{isa}", sources("cpu/kernels/*.cpp"), defined, False, "cpu", isa))
    if toolchain.name != "cpu":
        target = " ".join(toolchain.archs)
        plan.append(
            Library(
                f"libpaged_attn_{toolchain.name}", gpu_library_sources(), gpu_flags(toolchain), True, toolchain.name, target
            )
        )
    return plan


def describe(plan: list[Library], toolchain: Toolchain, torch_version: str, abi: int, jobs: int) -> str:
    """The build log: what is built for what."""
    head = [f"paged_attn_ext: toolchain {toolchain.name} ({toolchain.reason})"]
    head.append(f"paged_attn_ext: torch {torch_version}, C++11 ABI {abi}, {compiler()}, {jobs} jobs")
    rows = [f"  {lib.name:30s} {lib.toolchain:6s} {lib.target:16s} {' '.join(lib.flags)}" for lib in plan]
    return "\n".join(head + rows)


def source_hash(toolchain: str) -> str:
    """SHA-256 over the files of csrc/ that a build for this toolchain sees, by name and content."""
    digest = hashlib.sha256()
    for path in sorted(p for p in CSRC.rglob("*") if p.is_file()):
        if toolchain == "cpu" and (CSRC / "gpu" in path.parents or path.name.startswith("gpu")):
            continue
        digest.update(str(path.relative_to(CSRC)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def job_count(environ=os.environ, cores: int | None = None, free_gib: float | None = None) -> int:
    """Compilers at once: MAX_JOBS where set, otherwise what cores and free memory allow."""
    if environ.get("MAX_JOBS"):
        try:
            jobs = int(environ["MAX_JOBS"])
        except ValueError:
            jobs = 0
        if jobs < 1:
            raise ValueError(f"MAX_JOBS is {environ['MAX_JOBS']!r}, takes a positive integer")
        return jobs
    cores = cores or len(os.sched_getaffinity(0))
    free_gib = _free_gib() if free_gib is None else free_gib
    return max(1, min(cores, int(free_gib / GIB_PER_JOB)))


def _free_gib() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 2**20
    return GIB_PER_JOB
