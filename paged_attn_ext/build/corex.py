"""The direct CoreX build: one clang++ line per library, without ninja and without importing torch.

For images of Iluvatar cards, where a build host has no card and importing torch there may crash. Run by path:

    python paged_attn_ext/build/corex.py --dry-run      # print the lines, touch nothing
    python paged_attn_ext/build/corex.py --out DIR      # build, print the SHA-256 of each file

Environment: COREX_ROOT or COREX_HOME (the SDK), COREX_ARCH (default ivcore10), TORCH_ROOT (default
$COREX_ROOT/lib64/python3/dist-packages/torch). Run it with the Python that will import the package.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

if __name__ == "__main__":  # by path: the package's __init__ loads what is built here, so a stand-in parent takes its place
    _package = types.ModuleType("paged_attn_ext")
    _package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["paged_attn_ext"] = _package

from paged_attn_ext.build import record
from paged_attn_ext.build.plan import CSRC, KERNEL_LINK_FLAGS, Library, accepts, gpu_sources, make_plan
from paged_attn_ext.build.toolchain import COREX_DEFAULT_ARCH, Toolchain, corex_root

TORCH_IN_SDK = "lib64/python3/dist-packages/torch"
TORCH_INCLUDES = ("include", "include/torch/csrc/api/include", "include/TH", "include/THC")
TORCH_LIBRARIES = ("torch_python", "torch_cpu", "torch", "c10")
GPU_LIBRARIES = ("torch_cuda", "c10_cuda", "cudart")


def torch_root(sdk: str, environ=os.environ) -> Path:
    """The folder of torch, from TORCH_ROOT or the SDK. Raises RuntimeError where its libraries are not there."""
    root = Path(environ.get("TORCH_ROOT") or Path(sdk) / TORCH_IN_SDK)
    if not (root / "lib" / "libc10.so").is_file():
        raise RuntimeError(f"no torch in {root} (lib/libc10.so is missing): set TORCH_ROOT")
    return root


def abi_of_libraries(torch: Path) -> int:
    """Torch's C++11 ABI flag, read from libc10.so: names of the new ABI's std::string hold `__cxx11`."""
    return int(b"__cxx11" in (torch / "lib" / "libc10.so").read_bytes())


def torch_as_recorded(torch: Path) -> types.SimpleNamespace:
    """What the build record asks of the torch module, read from its files. Raises RuntimeError without a version."""
    file = torch / "version.py"
    found = re.search(r"^__version__ = ['\"](.+?)['\"]", file.read_text(), re.MULTILINE) if file.is_file() else None
    if not found:
        raise RuntimeError(f"no __version__ in {file}: set TORCH_ROOT")
    return types.SimpleNamespace(__version__=found[1], _C=types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=abi_of_libraries(torch)))


def torch_flags(sdk: str, torch: Path, module: str, gpu: bool) -> list[str]:
    """What torch.utils.cpp_extension would add: macros, include folders, libraries and where they are found at run time."""
    folders = [str(torch / "lib"), str(Path(sdk) / "lib64")]
    return [
        f"-D_GLIBCXX_USE_CXX11_ABI={abi_of_libraries(torch)}",
        f"-DTORCH_EXTENSION_NAME={module}",
        "-DTORCH_API_INCLUDE_EXTENSION_H",
        *(f"-I{torch / include}" for include in TORCH_INCLUDES),
        f"-I{Path(sdk) / 'include'}",
        f"-I{sysconfig.get_paths()['include']}",
        *(f"-L{folder}" for folder in folders),
        *(f"-Wl,-rpath,{folder}" for folder in folders),
        *(f"-l{name}" for name in (*TORCH_LIBRARIES, *(GPU_LIBRARIES if gpu else ()))),
    ]


def command(library: Library, sdk: str, torch: Path, out: Path) -> list[str]:
    """The clang++ line that makes one library of the plan in `out`."""
    line = [f"{sdk}/bin/clang++", "-shared", *library.flags, f"-I{CSRC}"]
    is_module = library.name == "_C"
    if is_module:
        line += ["-std=c++17", "-fPIC"]  # the kernels' flags say so themselves
    line += library.sources  # before -l: the linker takes from a library what was asked for by then
    if library.links_torch:
        line += torch_flags(sdk, torch, library.name, gpu=library.toolchain == "corex")
    else:
        line += KERNEL_LINK_FLAGS
    suffix = sysconfig.get_config_var("EXT_SUFFIX") if is_module else ".so"
    return [*line, "-o", str(out / f"{library.name}{suffix}")]


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def build(out: Path, dry_run: bool, environ=os.environ) -> None:
    """Print every line of the build and, unless dry_run, carry it out, print SHA-256 sums and write the build record.

    Raises RuntimeError where the SDK or torch is not found, and where a line fails.
    """
    sdk = corex_root(environ)
    if sdk is None:
        raise RuntimeError("no bin/clang++ in COREX_ROOT, COREX_HOME or /usr/local/corex*")
    torch = torch_root(sdk, environ)
    clang = f"{sdk}/bin/clang++"
    arch = environ.get("COREX_ARCH", COREX_DEFAULT_ARCH)
    toolchain = Toolchain("corex" if gpu_sources() else "cpu", sdk, (arch,), f"CoreX clang++ in {sdk}")
    # A dry run starts no compiler, so it shows every instruction set.
    check = (lambda flags, cxx: True) if dry_run else accepts
    plan = make_plan(toolchain, log, clang, check)
    described = torch_as_recorded(torch)
    log(f"corex build: torch {described.__version__} in {torch}, {arch}")
    if not dry_run:
        out.mkdir(parents=True, exist_ok=True)
    for library in plan:
        line = command(library, sdk, torch, out)
        print(shlex.join(line), flush=True)
        if dry_run:
            continue
        if subprocess.run(line).returncode != 0:
            raise RuntimeError(f"clang++ failed on {library.name}")
        print(f"sha256 {hashlib.sha256(Path(line[-1]).read_bytes()).hexdigest()}  {line[-1]}", flush=True)
    if not dry_run:
        record.write(out, record.make_record(described, toolchain, plan, clang))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    package = Path(__file__).resolve().parents[1]
    parser.add_argument("--out", type=Path, default=package, help="folder for the libraries (default: the package)")
    parser.add_argument("--dry-run", action="store_true", help="print the lines only")
    options = parser.parse_args()
    try:
        build(options.out, options.dry_run)
    except RuntimeError as error:
        log(f"corex build: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
