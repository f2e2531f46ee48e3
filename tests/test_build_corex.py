"""The direct CoreX build against an SDK made of folders: its clang++ writes down its arguments and makes the output file."""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from paged_attn_ext.build import corex, plan
from paged_attn_ext.build.toolchain import Toolchain

ROOT = Path(__file__).resolve().parents[1]
CLANG = r"""#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
[ "$1" = --version ] && { echo "clang version 16.0.6"; exit 0; }
for flag; do [ "$flag" = -mavx512bf16 ] && exit 1; last=$flag; done
printf made > "$last"
"""


@pytest.fixture
def sdk(tmp_path):
    root = tmp_path / "corex"
    torch = root / corex.TORCH_IN_SDK
    (torch / "lib").mkdir(parents=True)
    (torch / "lib" / "libc10.so").write_bytes(b"\x7fELF _ZN3c105ErrorC1ESs")
    (torch / "version.py").write_text("__all__ = []\n__version__ = '2.1.0+corex.3.2.3'\n")
    (root / "bin").mkdir()
    (root / "bin" / "clang++").write_text(CLANG)
    (root / "bin" / "clang++").chmod(0o755)
    return root


def run(sdk, *arguments, **environ):
    # A torch that cannot be imported: the direct build must not try.
    (sdk / "no-torch").mkdir(exist_ok=True)
    (sdk / "no-torch" / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    return subprocess.run(
        [sys.executable, str(ROOT / "paged_attn_ext" / "build" / "corex.py"), *arguments],
        env={**os.environ, "COREX_ROOT": str(sdk), "PYTHONPATH": str(sdk / "no-torch"), **environ},
        cwd=sdk,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_dry_run_prints_a_line_per_library_and_touches_nothing(sdk, tmp_path):
    out = tmp_path / "out"
    shown = run(sdk, "--dry-run", "--out", str(out))
    assert shown.returncode == 0, shown.stderr
    assert not out.exists() and not (sdk / "bin" / "calls").exists()
    lines = [shlex.split(line) for line in shown.stdout.splitlines()]
    names = [re.split(r"\.", Path(line[-1]).name)[0] for line in lines]
    assert names == ["_C", *(f"libpaged_attn_cpu_{isa}" for isa in plan.instruction_sets()), "libpaged_attn_corex"]
    assert all(line[0] == str(sdk / "bin" / "clang++") and "-shared" in line and "-fPIC" in line for line in lines)
    assert "ivcore10" in shown.stderr and "2.1.0+corex.3.2.3" in shown.stderr


def test_the_operator_line_has_what_torch_asks_for(sdk):
    operators, *kernels, gpu = [shlex.split(line) for line in run(sdk, "--dry-run").stdout.splitlines()]
    torch = sdk / corex.TORCH_IN_SDK
    for flag in (
        "-D_GLIBCXX_USE_CXX11_ABI=0",
        "-DTORCH_EXTENSION_NAME=_C",
        "-DTORCH_API_INCLUDE_EXTENSION_H",
        "-std=c++17",
        "-fopenmp",
        f"-I{torch / 'include'}",
        f"-L{torch / 'lib'}",
        f"-Wl,-rpath,{torch / 'lib'}",
        f"-Wl,-rpath,{sdk / 'lib64'}",
        "-ltorch_python",
        "-lc10",
    ):
        assert flag in operators, flag
    assert "-lc10_cuda" in gpu and "-lcudart" in gpu and "--cuda-gpu-arch=ivcore10" in gpu and "-ffp-contract=off" in gpu
    assert {Path(word).name for word in gpu} >= {"decode.cu", "prefix.cu", "gpu.cpp", "arguments.cpp"}
    assert not any(Path(word).name == "gpu.cpp" for word in operators)
    for line in kernels:
        assert not [word for word in line if "torch" in word.replace(str(ROOT), "").replace(str(sdk), "")]
        assert set(plan.KERNEL_FLAGS) | set(plan.KERNEL_LINK_FLAGS) <= set(line)


def test_the_abi_flag_follows_the_libraries(sdk):
    (sdk / corex.TORCH_IN_SDK / "lib" / "libc10.so").write_bytes(b"\x7fELF _ZNSt7__cxx1112basic_stringE")
    assert "-D_GLIBCXX_USE_CXX11_ABI=1" in run(sdk, "--dry-run").stdout


def test_torch_root_moves_torch(sdk, tmp_path):
    (sdk / corex.TORCH_IN_SDK).rename(tmp_path / "elsewhere")
    shown = run(sdk, "--dry-run")
    assert shown.returncode == 1 and "set TORCH_ROOT" in shown.stderr and "Traceback" not in shown.stderr
    assert f"-L{tmp_path / 'elsewhere' / 'lib'}" in run(sdk, "--dry-run", TORCH_ROOT=str(tmp_path / "elsewhere")).stdout


def test_no_sdk_is_one_sentence(sdk):
    (sdk / "bin" / "clang++").unlink()
    shown = run(sdk, "--dry-run", COREX_HOME="", PAGED_ATTN_COREX_PREFIX=str(sdk / "none"))
    assert shown.returncode == 1 and "no bin/clang++" in shown.stderr and "Traceback" not in shown.stderr


def test_the_gpu_line(sdk):
    toolchain = Toolchain("corex", str(sdk), ("ivcore11",), "test")
    library = plan.Library("libpaged_attn_corex", ("kernel.cu",), plan.gpu_flags(toolchain), True, "corex", "ivcore11")
    line = corex.command(library, str(sdk), sdk / corex.TORCH_IN_SDK, Path("out"))
    for word in ("--cuda-gpu-arch=ivcore11", f"--cuda-path={sdk}", "--no-cuda-version-check", "-lcudart", "-ltorch_cuda"):
        assert word in line, word
    assert line.index("kernel.cu") < line.index("-lcudart")
    assert line[-2:] == ["-o", "out/libpaged_attn_corex.so"]


def test_build_prints_sums_leaves_out_a_refused_set_and_writes_the_record(sdk, tmp_path):
    out = tmp_path / "out"
    shown = run(sdk, "--out", str(out))
    assert shown.returncode == 0, shown.stderr
    made = sorted(path for path in out.iterdir() if path.suffix == ".so")
    names = {path.name.split(".")[0] for path in made}
    assert names == {
        "_C",
        *(f"libpaged_attn_cpu_{isa}" for isa in plan.instruction_sets() if isa != "avx512bf16"),
        "libpaged_attn_corex",
    }
    expected = hashlib.sha256(b"made").hexdigest()
    sums = [line for line in shown.stdout.splitlines() if line.startswith("sha256 ")]
    assert sorted(sums) == sorted(f"sha256 {expected}  {path}" for path in made)
    written = json.loads((out / "_build_info.json").read_text())
    assert (written["torch"], written["cxx11_abi"]) == ("2.1.0+corex.3.2.3", 0)
    assert written["compiler"] == "clang version 16.0.6" and written["source_hash"] == plan.source_hash("corex")


def test_a_failing_line_fails_the_build(sdk, tmp_path):
    (sdk / "bin" / "clang++").write_text("#!/bin/sh\nexit 1\n")
    shown = run(sdk, "--out", str(tmp_path / "out"))
    assert shown.returncode == 1 and "clang++ failed on _C" in shown.stderr
    assert not (tmp_path / "out" / "_build_info.json").exists()
