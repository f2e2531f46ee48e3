"""Toolchain detection, flags, build record, the cache of the first import, and the loader's refusals: no compiling here."""

import os
import signal
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest

from paged_attn_ext import _loader
from paged_attn_ext.build import compile as compiling
from paged_attn_ext.build import jit, plan, record, toolchain
from paged_attn_ext.build.toolchain import Toolchain, detect

ROOT = Path(__file__).resolve().parents[1]
GPU_SOURCES = ["kernel.cu"]
TOOLCHAINS = {
    "cpu": Toolchain("cpu", None, (), "test"),
    "cuda": Toolchain("cuda", "/opt/cuda", ("8.0", "9.0+PTX"), "test"),
    "corex": Toolchain("corex", "/opt/corex", ("ivcore10",), "test"),
}


def fake_torch(version="2.5.1", cuda=None, abi=1, **attributes):
    return types.SimpleNamespace(
        __version__=version,
        version=types.SimpleNamespace(cuda=cuda),
        _C=types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=bool(abi)),
        **attributes,
    )


CPU_TORCH = fake_torch("2.5.1+cpu")
CUDA_TORCH = fake_torch("2.5.1+cu124", cuda="12.4")
COREX_TORCH = fake_torch("2.1.0+corex.3.2.3", cuda="10.2", abi=0)
UNMARKED_COREX_TORCH = fake_torch("2.1.0", cuda="10.2", abi=0, corex=True)


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path):
    """A machine made of folders: makes nvcc and CoreX SDKs, and an environment that sees nothing else."""

    class Machine:
        environ = {"PATH": str(tmp_path / "bin"), "PAGED_ATTN_COREX_PREFIX": str(tmp_path / "corex")}

        def nvcc(self, at="bin"):
            top = tmp_path / "toolkit"
            top.mkdir(exist_ok=True)
            script(tmp_path / at / "nvcc", f"echo '#$ _SPACE_=' >&2\necho '#$ TOP={top}/bin/..' >&2")
            (top / "bin").mkdir(exist_ok=True)
            return str(top)

        def stub_nvcc(self):
            script(tmp_path / "bin" / "nvcc", "echo 'Cuda compilation tools, release 10.2, V10.2.89'")

        def corex(self, name="corex"):
            script(tmp_path / name / "bin" / "clang++", "exit 0")
            return str(tmp_path / name)

    (tmp_path / "bin").mkdir()
    return Machine()


# Toolchain detection


def test_cpu_torch_ignores_an_nvcc(machine):
    machine.nvcc()
    assert detect(CPU_TORCH, GPU_SOURCES, machine.environ).name == "cpu"


def test_cuda_torch_with_nvcc_takes_the_toolkit_nvcc_reports(machine):
    top = machine.nvcc()
    found = detect(CUDA_TORCH, GPU_SOURCES, machine.environ)
    assert (found.name, found.root) == ("cuda", top)


def test_an_nvcc_of_another_major_version_is_left_alone(machine):
    top = machine.nvcc()
    script(Path(top) / "bin" / "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    found = detect(CUDA_TORCH, GPU_SOURCES, machine.environ)
    assert found.name == "cpu" and "CUDA 12.4" in found.reason and "is 13.0" in found.reason
    with pytest.raises(RuntimeError, match=r"PAGED_ATTN_TOOLCHAIN=cuda, but torch is a build for CUDA 12\.4"):
        detect(CUDA_TORCH, GPU_SOURCES, {**machine.environ, "PAGED_ATTN_TOOLCHAIN": "cuda"})
    script(Path(top) / "bin" / "nvcc", "echo 'Cuda compilation tools, release 12.8, V12.8.93'")
    assert detect(CUDA_TORCH, GPU_SOURCES, machine.environ).name == "cuda"


def test_cuda_home_wins_over_path(machine, tmp_path):
    machine.stub_nvcc()
    top = machine.nvcc(at="home/bin")
    found = detect(CUDA_TORCH, GPU_SOURCES, {**machine.environ, "CUDA_HOME": str(tmp_path / "home")})
    assert (found.name, found.root) == ("cuda", top)


@pytest.mark.parametrize("stub", [True, False])
def test_cuda_torch_without_a_real_nvcc_is_cpu(machine, stub):
    if stub:
        machine.stub_nvcc()
    found = detect(CUDA_TORCH, GPU_SOURCES, machine.environ)
    assert found.name == "cpu" and "no nvcc" in found.reason


@pytest.mark.parametrize("torch", [COREX_TORCH, UNMARKED_COREX_TORCH], ids=["version", "attribute"])
def test_corex_torch_wins_over_nvcc(machine, torch):
    machine.nvcc()
    root = machine.corex()
    found = detect(torch, GPU_SOURCES, machine.environ)
    assert (found.name, found.root, found.archs) == ("corex", root, ("ivcore10",))


def test_corex_arch_is_taken_from_the_environment(machine):
    machine.corex()
    found = detect(COREX_TORCH, GPU_SOURCES, {**machine.environ, "COREX_ARCH": "ivcore11"})
    assert found.archs == ("ivcore11",)


def test_corex_torch_without_its_compiler_is_cpu_even_with_nvcc(machine):
    machine.nvcc()
    found = detect(COREX_TORCH, GPU_SOURCES, machine.environ)
    assert found.name == "cpu" and "CoreX" in found.reason


def test_corex_root_order(machine, tmp_path):
    older, newer = machine.corex("corex-3.1.0"), machine.corex("corex-3.2.3")
    assert older != newer and toolchain.corex_root(machine.environ) == newer
    link = machine.corex("corex")
    assert toolchain.corex_root(machine.environ) == link
    home = machine.corex("home")
    assert toolchain.corex_root({**machine.environ, "COREX_HOME": home}) == home
    root = machine.corex("root")
    assert toolchain.corex_root({**machine.environ, "COREX_HOME": home, "COREX_ROOT": root}) == root
    empty = str(tmp_path / "empty")
    assert toolchain.corex_root({**machine.environ, "COREX_ROOT": empty, "COREX_HOME": home}) == home


def test_a_gpu_toolchain_without_gpu_sources_builds_for_cpu(machine):
    machine.nvcc()
    found = detect(CUDA_TORCH, [], machine.environ)
    assert found.name == "cpu" and "no GPU sources" in found.reason


def test_the_toolchain_can_be_asked_for(machine):
    top, root = machine.nvcc(), machine.corex()
    for name, expected in [("cpu", None), ("cuda", top), ("corex", root)]:
        found = detect(COREX_TORCH, GPU_SOURCES, {**machine.environ, "PAGED_ATTN_TOOLCHAIN": name})
        assert (found.name, found.root) == (name, expected)


@pytest.mark.parametrize("name", ["cuda", "corex"])
def test_a_toolchain_asked_for_and_not_found_is_an_error(machine, name):
    machine.stub_nvcc()
    with pytest.raises(RuntimeError, match=f"PAGED_ATTN_TOOLCHAIN={name}"):
        detect(CPU_TORCH, GPU_SOURCES, {**machine.environ, "PAGED_ATTN_TOOLCHAIN": name})


def test_an_unknown_toolchain_is_an_error(machine):
    with pytest.raises(ValueError, match="'rocm', takes one of auto, cpu, cuda, corex"):
        detect(CPU_TORCH, GPU_SOURCES, {**machine.environ, "PAGED_ATTN_TOOLCHAIN": "rocm"})


# Flags


@pytest.mark.parametrize("name", TOOLCHAINS)
def test_no_library_is_built_with_a_forbidden_flag(name):
    libraries = plan.make_plan(TOOLCHAINS[name])
    if name != "cpu":
        assert libraries[-1].toolchain == name
    for library in libraries:
        for flag in (*plan.FORBIDDEN_FLAGS, "-march=native"):
            assert flag not in library.flags, library.name


def test_kernel_libraries_see_nothing_of_torch():
    for library in plan.make_plan(TOOLCHAINS["cpu"]):
        built = compiling.extension(library)
        mentions_torch = "torch" in built.libraries or any("torch" in str(folder) for folder in built.include_dirs)
        assert mentions_torch == (library.name == "_C"), library.name


def test_corex_gets_no_nvcc_flag():
    flags = plan.gpu_flags(TOOLCHAINS["corex"])
    for prefix in ("-gencode", "-arch=sm", "--expt", "-Xcompiler"):
        assert not [flag for flag in flags if flag.startswith(prefix)]
    assert {"--cuda-gpu-arch=ivcore10", "--cuda-path=/opt/corex", "--no-cuda-version-check"} <= set(flags)


@pytest.mark.parametrize("listed", ["8.0;9.0+PTX", "8.0 9.0+PTX"])
def test_architecture_list(machine, listed):
    machine.nvcc()
    found = detect(CUDA_TORCH, GPU_SOURCES, {**machine.environ, "TORCH_CUDA_ARCH_LIST": listed})
    assert [flag for flag in plan.gpu_flags(found) if "gencode" in flag] == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]


def test_an_instruction_set_the_compiler_lacks_is_left_out_with_a_line(tmp_path, monkeypatch):
    old = script(tmp_path / "old-c++", 'for flag; do [ "$flag" = -mavx512bf16 ] && exit 1; done\nexit 0')
    monkeypatch.setenv("CXX", str(old))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    lines = []
    names = [library.name for library in plan.make_plan(TOOLCHAINS["cpu"], lines.append)]
    assert names == ["_C", "libpaged_attn_cpu_avx512", "libpaged_attn_cpu_avx2", "libpaged_attn_cpu_portable"]
    assert len(lines) == 1 and "avx512bf16" in lines[0] and str(old) in lines[0]


def test_other_machines_get_the_portable_kernels_only(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    names = [library.name for library in plan.make_plan(TOOLCHAINS["cpu"])]
    assert names == ["_C", "libpaged_attn_cpu_portable"]


def test_job_count():
    assert plan.job_count({"MAX_JOBS": "3"}, cores=1, free_gib=1) == 3
    assert plan.job_count({}, cores=4, free_gib=64) == 4
    assert plan.job_count({}, cores=16, free_gib=5) == 2  # memory for two compilers
    assert plan.job_count({}, cores=16, free_gib=0.1) == 1


@pytest.mark.parametrize("value", ["many", "0", "-2", "1.5"])
def test_job_count_refuses(value):
    with pytest.raises(ValueError, match="MAX_JOBS"):
        plan.job_count({"MAX_JOBS": value})


# Cache key and record


def test_cache_key_depends_on_every_ingredient(monkeypatch):
    library = plan.Library("_C", (), ("-O2",), True, "cpu", "")
    cuda = TOOLCHAINS["cuda"]
    base = (fake_torch(), cuda, [library], "hash")
    keys = [
        jit.cache_key(*base),
        jit.cache_key(fake_torch("2.5.2"), *base[1:]),
        jit.cache_key(fake_torch(abi=0), *base[1:]),
        jit.cache_key(base[0], replace(cuda, name="cpu"), *base[2:]),
        jit.cache_key(base[0], replace(cuda, root="/opt/other"), *base[2:]),
        jit.cache_key(base[0], replace(cuda, archs=("8.0",)), *base[2:]),
        jit.cache_key(*base[:2], [replace(library, flags=("-O3",))], "hash"),
        jit.cache_key(*base[:3], "other"),
    ]
    assert jit.cache_key(*base) == keys[0]
    monkeypatch.setattr(record, "python_abi", lambda: "cpython-399-x86_64")
    keys.append(jit.cache_key(*base))
    assert len(set(keys)) == len(keys)


def test_source_hash_sees_names_and_contents(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "CSRC", tmp_path)
    (tmp_path / "a.h").write_text("one")
    first = plan.source_hash("cpu")
    (tmp_path / "a.h").write_text("two")
    second = plan.source_hash("cpu")
    (tmp_path / "a.h").rename(tmp_path / "b.h")
    assert len({first, second, plan.source_hash("cpu")}) == 3


def test_cache_root():
    assert jit.cache_root({"PAGED_ATTN_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert jit.cache_root({"XDG_CACHE_HOME": "/b"}) == Path("/b/paged_attn_ext")
    assert jit.cache_root({}) == Path.home() / ".cache" / "paged_attn_ext"


def built_for(**changes):
    return {"torch": "2.5.1", "cxx11_abi": 1, "python": record.python_abi(), **changes}


@pytest.mark.parametrize(
    ("built", "says"),
    [
        (built_for(torch="2.1.0"), ("built for torch 2.1.0", "this is torch 2.5.1")),
        (built_for(cxx11_abi=0), ("C++11 ABI 0", "this torch has 1")),
        (built_for(python="cpython-399-mips"), ("cpython-399-mips", record.python_abi())),
    ],
    ids=["torch", "abi", "python"],
)
def test_mismatch_says_both_sides_and_what_to_do(built, says):
    sentence = record.mismatch(built, fake_torch("2.5.1"))
    assert all(part in sentence for part in (*says, "rebuild it with", "--no-build-isolation"))
    assert "\n" not in sentence


def test_no_mismatch_where_all_fits():
    assert record.mismatch(built_for(), fake_torch("2.5.1")) is None


# The cache: one builder, whoever dies

# A process of its own, without torch: the build folder of the package under a stand-in parent, as setup.py does.
BUILDER = """
import sys, time, types
from pathlib import Path
package = types.ModuleType("paged_attn_ext")
package.__path__ = [sys.argv[1]]
sys.modules["paged_attn_ext"] = package
from paged_attn_ext.build import jit

def build(folder):
    with open(sys.argv[3], "a") as begun:
        begun.write("begun\\n")
    time.sleep(float(sys.argv[4]))
    (folder / "library").write_text("whole")

print((jit.build_once(Path(sys.argv[2]), build, lambda line: None) / "library").read_text())
"""


def start_builder(folder: Path, begun: Path, seconds: float) -> subprocess.Popen:
    command = [sys.executable, "-c", BUILDER, str(ROOT / "paged_attn_ext"), str(folder), str(begun), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> str:
    try:
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out.strip()


def test_two_processes_at_once_build_once(tmp_path):
    begun = tmp_path / "begun"
    processes = [start_builder(tmp_path / "key", begun, 1.0) for _ in range(2)]
    assert [finish(process) for process in processes] == ["whole", "whole"]
    assert begun.read_text() == "begun\n"


def test_a_killed_builder_does_not_block_the_next(tmp_path):
    begun = tmp_path / "begun"
    first = start_builder(tmp_path / "key", begun, 60)
    deadline = time.monotonic() + 20
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert begun.exists()
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert not (tmp_path / "key").exists()
    assert finish(start_builder(tmp_path / "key", begun, 0)) == "whole"


def test_a_failed_build_leaves_no_folder_and_the_next_one_builds(tmp_path):
    def fail(folder):
        (folder / "half").write_text("")
        raise RuntimeError("compiler said no")

    with pytest.raises(RuntimeError, match="compiler said no"):
        jit.build_once(tmp_path / "key", fail, lambda line: None)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    jit.build_once(tmp_path / "key", lambda folder: (folder / "library").write_text("whole"), lambda line: None)
    assert (tmp_path / "key" / "library").read_text() == "whole"


# setup.py and the loader


def test_setup_without_torch_names_the_pip_option(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch in this environment')\n")
    shown = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.returncode != 0
    assert "--no-build-isolation" in shown.stderr and "Traceback" not in shown.stderr


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package folder with a library and a record that fits, and a JIT that only says it was asked."""
    (tmp_path / f"_C{_loader.importlib.machinery.EXTENSION_SUFFIXES[0]}").write_text("")
    monkeypatch.setattr(_loader, "PACKAGE_FOLDER", tmp_path)
    monkeypatch.setattr(jit, "libraries", lambda: Path("jit"))
    fits = {
        "torch": _loader.torch.__version__,
        "cxx11_abi": record.abi_of(_loader.torch),
        "python": record.python_abi(),
        "toolchain": "cpu",
        "source_hash": plan.source_hash("cpu"),
    }
    record.write(tmp_path, fits)
    return tmp_path


def test_loader_takes_the_library_that_fits(installed, capsys):
    assert _loader.find_folder() == installed
    assert capsys.readouterr().err == ""


def test_loader_leaves_a_library_older_than_its_sources(installed, capsys):
    record.write(installed, {**record.read(installed), "source_hash": "older"})
    assert _loader.find_folder() == Path("jit")
    assert "sources changed" in capsys.readouterr().err


def test_loader_takes_an_installed_library_where_there_are_no_sources(installed, monkeypatch, tmp_path):
    record.write(installed, {**record.read(installed), "source_hash": "of the wheel"})
    monkeypatch.setattr(plan, "CSRC", tmp_path / "none")
    assert _loader.find_folder() == installed


def test_loader_refuses_a_library_for_another_torch(installed):
    record.write(installed, {**record.read(installed), "torch": "1.0.0"})
    with pytest.raises(ImportError, match="built for torch 1.0.0"):
        _loader.find_folder()


def test_loader_refuses_a_library_without_a_record(installed):
    (installed / record.FILE_NAME).unlink()
    with pytest.raises(ImportError, match=f"{record.FILE_NAME} is missing"):
        _loader.find_folder()


def test_loader_without_library_and_sources_says_how_to_install(installed, monkeypatch, tmp_path):
    for library in installed.glob("_C*"):
        library.unlink()
    monkeypatch.setattr(plan, "CSRC", tmp_path / "none")
    with pytest.raises(ImportError, match="--no-build-isolation"):
        _loader.find_folder()


def test_libraries_that_are_up_to_date_are_not_built_again(tmp_path, monkeypatch):
    """What makes `make demo` and `make test` compile once between them."""
    from setuptools import Distribution
    from torch.utils.cpp_extension import BuildExtension

    from paged_attn_ext.build import compile as compiling
    from paged_attn_ext.build.plan import Library
    from paged_attn_ext.build.toolchain import Toolchain

    runs = []

    def run(self):
        runs.append(1)
        output = Path(self.get_ext_fullpath("paged_attn_ext._C"))
        output.parent.mkdir(parents=True, exist_ok=True)
        output.touch()

    monkeypatch.setattr(BuildExtension, "run", run)
    monkeypatch.setattr(compiling, "log", lambda line: None)
    cpu = Toolchain("cpu", None, (), "test")

    def build(flags):
        plan = [Library("_C", ("a.cpp",), flags, True, "cpu", "torch operators")]
        distribution = Distribution({"name": "paged_attn_ext"})
        command = compiling.make_command(plan, cpu)(distribution)
        command.build_lib = str(tmp_path)
        command.ensure_finalized()
        command.run()
        return next(tmp_path.rglob("_C*.so"))

    library = build(("-O2",))
    build(("-O2",))
    assert len(runs) == 1
    build(("-O3",))  # other flags
    assert len(runs) == 2
    library.unlink()
    build(("-O3",))
    assert len(runs) == 3
