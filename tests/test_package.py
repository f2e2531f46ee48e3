"""The package from outside: what importing it does and does not do, what it says of its build, and how work is shared out."""

import json
import subprocess
import sys

import pytest
import torch

from paged_attn_ext import _C

AFTER_IMPORT = """
import json, sys
import torch
import paged_attn_ext
print(json.dumps({
    "triton": "triton" in sys.modules,
    "cuda": torch.cuda.is_initialized(),
    "demo": any(name.startswith("paged_attn_ext.demo") for name in sys.modules),
    "operators": [name for name in paged_attn_ext.ops.OPERATORS if hasattr(torch.ops.paged_attn, name)],
    "threads": torch.get_num_threads(),
    "default": str(torch.get_default_dtype()),
    "subnormals": sys.float_info.min / 2 > 0,
}))
"""


@pytest.fixture(scope="module")
def after_import():
    result = subprocess.run([sys.executable, "-c", AFTER_IMPORT], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


def test_import_loads_no_triton_and_touches_no_gpu(after_import):
    assert not after_import["triton"]
    assert not after_import["cuda"]


def test_import_registers_the_operators_and_leaves_out_the_demo(after_import):
    assert len(after_import["operators"]) == 10
    assert not after_import["demo"]


def test_import_changes_no_settings_of_torch(after_import):
    bare = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.get_num_threads(), torch.get_default_dtype())"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert bare.stdout.split() == [str(after_import["threads"]), after_import["default"]]


def test_import_does_not_flush_subnormals(after_import):
    """A library linked with -ffast-math does, for the whole process."""
    assert after_import["subnormals"]


def test_build_info_is_what_the_compiler_saw():
    info = _C.build_info()
    assert set(info) == {"compiler", "cxx_standard", "torch_version", "cxx11_abi", "openmp"}
    assert info["compiler"].split()[0] in ("gcc", "clang")
    assert int(info["cxx_standard"].rstrip("L")) >= 201703
    assert info["torch_version"].split("+")[0] == torch.__version__.split("+")[0]
    assert bool(int(info["cxx11_abi"])) == torch.compiled_with_cxx11_abi()
    assert info["openmp"].isdigit(), "compiled without OpenMP: one thread does all the work"


def shares(num_items, num_workers):
    """Contiguous runs, the first ones longer by one item."""
    base, longer = divmod(num_items, num_workers)
    ends = [0]
    for worker in range(num_workers):
        ends.append(ends[-1] + base + (worker < longer))
    return list(zip(ends, ends[1:], strict=False))


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7, 64])
def test_even_share(num_workers):
    for num_items in [*range(20), 63, 64, 65, 1000, 2**31, 2**40 + 3]:
        plan = _C.even_share(num_items, num_workers)
        assert plan == shares(num_items, num_workers)
        assert plan[0][0] == 0
        assert plan[-1][1] == num_items


@pytest.mark.parametrize(
    ("num_items", "num_workers", "named"), [(-1, 2, "num_items"), (2, 0, "num_workers"), (2, -3, "num_workers")]
)
def test_even_share_of_wrong_numbers(num_items, num_workers, named):
    with pytest.raises(ValueError, match=f"even_share: {named} is"):
        _C.even_share(num_items, num_workers)
