"""The plan carried out by torch.utils.cpp_extension: its BuildExtension brings torch's flags and ninja."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from . import record
from .plan import CSRC, GPU_HOST_FLAGS, KERNEL_LINK_FLAGS, MODULE, Library, describe, gpu_sources, job_count, make_plan
from .toolchain import Toolchain, detect

PACKAGE = "paged_attn_ext"


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def extension(library: Library, base: Path | None = None):
    """A setuptools Extension for one library of the plan; sources relative to `base` where given."""
    from setuptools import Extension
    from torch.utils.cpp_extension import CppExtension, CUDAExtension

    include = [str(CSRC)]
    sources = [os.path.relpath(source, base) if base else source for source in library.sources]
    name = f"{PACKAGE}.{library.name}"
    if library.toolchain != "cpu":
        device = list(library.flags)
        # CoreX's build of torch has looked for the device flags under its own compiler's name.
        flags = {"cxx": list(GPU_HOST_FLAGS), "nvcc": device, "clang++": device}
        return CUDAExtension(name, sources, include_dirs=include, extra_compile_args=flags)
    if library.links_torch:
        return CppExtension(
            name,
            sources,
            include_dirs=include,
            extra_compile_args=list(library.flags),
            extra_link_args=["-fopenmp"],
        )
    # A plain Extension: no torch headers, no torch libraries.
    return Extension(
        name,
        sources,
        include_dirs=include,
        extra_compile_args=list(library.flags),
        extra_link_args=list(KERNEL_LINK_FLAGS),
        language="c++",
    )


def make_command(plan: list[Library], toolchain: Toolchain):
    """The build_ext command class: BuildExtension, names of kernel libraries as the loader looks for them, and the record."""
    import torch
    from torch.utils.cpp_extension import BuildExtension

    plain = {library.name for library in plan if library.name != MODULE}

    class BuildLibraries(BuildExtension):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **{**kwargs, "use_ninja": shutil.which("ninja") is not None or _has_ninja_module()})

        def get_ext_filename(self, fullname):
            name = fullname.split(".")[-1]
            if name in plain:
                return os.path.join(*fullname.split(".")[:-1], f"{name}.so")
            return super().get_ext_filename(fullname)

        def get_export_symbols(self, ext):
            return ext.export_symbols  # only one of the libraries is a Python module

        def run(self):
            os.environ["MAX_JOBS"] = str(job_count())
            log(describe(plan, toolchain, torch.__version__, record.abi_of(torch), job_count()))
            outputs = [Path(self.get_ext_fullpath(f"{PACKAGE}.{library.name}")) for library in plan]
            built = record.make_record(torch, toolchain, plan)
            if record.read(outputs[0].parent) == built and all(output.is_file() for output in outputs):
                return log(f"paged_attn_ext: the libraries in {outputs[0].parent} are up to date")
            super().run()
            record.write(outputs[0].parent, built)

    return BuildLibraries


def _has_ninja_module() -> bool:
    try:
        import ninja
    except ImportError:
        return False
    os.environ["PATH"] = f"{ninja.BIN_DIR}{os.pathsep}{os.environ.get('PATH', '')}"
    return True


def setup_arguments(base: Path | None = None) -> dict:
    """ext_modules and cmdclass for setuptools.setup, which wants sources relative to setup.py's folder, `base`."""
    import torch

    toolchain = detect(torch, gpu_sources())
    if toolchain.root:
        os.environ["CUDA_HOME"] = toolchain.root  # before torch.utils.cpp_extension is imported and guesses
    plan = make_plan(toolchain, log)
    return {
        "ext_modules": [extension(library, base) for library in plan],
        "cmdclass": {"build_ext": make_command(plan, toolchain)},
    }


def build_into(folder: Path) -> None:
    """Compile every library of the plan into `folder` (the JIT's way; pip goes through setup.py)."""
    from setuptools import Distribution

    distribution = Distribution({"name": PACKAGE, **setup_arguments()})
    command = distribution.get_command_obj("build_ext")
    command.build_lib = str(folder / "lib")
    command.build_temp = str(folder / "objects")
    distribution.run_command("build_ext")
    for built in (folder / "lib" / PACKAGE).iterdir():
        shutil.move(str(built), str(folder / built.name))
    shutil.rmtree(folder / "lib")
    shutil.rmtree(folder / "objects")
