"""Instruction sets: which are chosen, and that each library holds its own instructions, one symbol, and no torch."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paged_attn_ext import _C
from paged_attn_ext.build import plan

ISAS = ("avx512bf16", "avx512", "avx2", "portable")  # best first
LIBRARIES = sorted(Path(_C.__file__).parent.glob("libpaged_attn_cpu_*.so"))
ENTRY = "paged_attn_cpu_kernels"
PREFIX = "libpaged_attn_cpu_"


def python(code, **environment):
    environment = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


def tool(*command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def by_isa(isa):
    for library in LIBRARIES:
        if library.name == f"{PREFIX}{isa}.so":
            return library
    pytest.skip(f"no {isa} library was built")


def test_all_that_run_here_are_listed_best_first():
    listed = _C.cpu_isas()
    assert listed == [isa for isa in ISAS if isa in listed]
    assert listed[-1] == "portable"
    assert {f"{PREFIX}{isa}.so" for isa in listed} <= {library.name for library in LIBRARIES}


@pytest.mark.parametrize("cap", ISAS)
def test_the_environment_caps_the_choice(cap):
    result = python("import paged_attn_ext as p; print(p._C.cpu_isa())", PAGED_ATTN_CPU_ISA=cap)
    assert result.returncode == 0, result.stderr
    allowed = [isa for isa in _C.cpu_isas() if ISAS.index(isa) >= ISAS.index(cap)]
    assert result.stdout.split() == [allowed[0]]


def test_the_best_is_chosen_without_a_cap():
    result = python("import paged_attn_ext as p; print(p._C.cpu_isa())", PAGED_ATTN_CPU_ISA="")
    assert result.stdout.split() == _C.cpu_isas()[:1]


def test_an_unknown_name_in_the_environment_is_an_error():
    result = python("import paged_attn_ext as p; print(p._C.cpu_isa())", PAGED_ATTN_CPU_ISA="sse9")
    assert result.returncode != 0
    message = next(line for line in result.stderr.splitlines() if line.startswith("ValueError"))
    assert "PAGED_ATTN_CPU_ISA" in message
    assert "sse9" in message
    assert all(isa in message for isa in ISAS)


def test_an_unknown_name_is_an_error_and_changes_nothing():
    before = _C.cpu_isa()
    with pytest.raises(ValueError, match="sse9.*portable"):
        _C.set_cpu_isa("sse9")
    assert _C.cpu_isa() == before


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 registers")
@pytest.mark.parametrize(
    ("isa", "has", "has_not"),
    [
        ("portable", "%xmm", "%ymm|%zmm"),
        ("avx2", "%ymm", "%zmm"),
        ("avx512", "%zmm", "vdpbf16ps|vcvtne2?ps2?bf16"),
        ("avx512bf16", "vdpbf16ps", None),
    ],
)
def test_registers_and_instructions_of_each_library(isa, has, has_not):
    """A library that runs on machines of its instruction set must hold nothing beyond it, and must use it."""
    listing = tool("objdump", "-d", "--no-show-raw-insn", str(by_isa(isa)))
    assert re.search(has, listing)
    if has_not:
        assert re.search(has_not, listing) is None


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.stem)
def test_one_symbol_is_exported(library):
    """Inline functions of one library must not stand in for another's: whichever is loaded first would win."""
    names = [line.split()[-1] for line in tool("nm", "-D", "--defined-only", str(library)).splitlines()]
    assert names == [ENTRY]


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.stem)
def test_kernels_know_no_torch(library):
    dynamic = tool("readelf", "-d", str(library))
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert needed
    assert not [name for name in needed if re.search("torch|c10|python", name)]
    undefined = tool("nm", "-D", "--undefined-only", "--demangle", str(library))
    assert not re.search(r"\b(at|c10|torch)::|\bPy[A-Z_]", undefined)


def test_no_flags_that_change_arithmetic():
    """Infinities and NaN are part of the contract, and a library must run on every machine of its instruction set."""
    for isa, flags in plan.instruction_sets().items():
        command = " ".join((*plan.KERNEL_FLAGS, *plan.OPERATOR_FLAGS, *flags))
        assert "-ffp-contract=off" in command, isa
        assert not re.search("fast|finite|unsafe|associative|reciprocal|march=native|mtune=native", command), isa
