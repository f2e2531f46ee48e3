"""The `backend` fixture: a namespace of operators, one per implementation that this machine runs.

cpu-*: the CPU kernels, per instruction set. pytorch: the fallbacks. simt32, simt64: the GPU kernels under the host executor
(simt/), with 32 and 64 lanes per warp; PAGED_ATTN_SIMT_SANITIZER=address or thread compiles those for a sanitizer.

A test that takes `backend` runs on the first native variant, on `pytorch`, and on a fixed sample of the others; marked
`every_backend`, on all but the executor, which sees half of those; with --all-backends, on all. `needs("op", ...)` keeps
it to variants with these operators, `native` to those that promise equal bits, `cpu_only` to those on the CPU, which refuse
wrong values before anything runs and store in order. `heavy` tests meet the executor with --all-backends alone.
"""

from __future__ import annotations

import functools
import hashlib
import os
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from simt import build

import paged_attn_ext
from paged_attn_ext import fallback, ops

FALLBACK_OPERATORS = ("paged_attention_v1", "paged_attention_v2", "prefix_attention")
SAMPLE = 4  # one test in so many runs on a variant beyond the first


@dataclass(frozen=True)
class Variant:
    """An implementation: its operators by name, whether it promises equal bits, whether what holds on the CPU alone holds here,
    and what to switch to: an instruction set, or the lanes of the executor."""

    name: str
    operators: tuple[str, ...]
    bit_invariant: bool
    on_cpu: bool = True
    isa: str | None = None
    lanes: int | None = None


VARIANTS = [Variant(f"cpu-{isa}", ops.OPERATORS, True, isa=isa) for isa in paged_attn_ext._C.cpu_isas()]
VARIANTS += [Variant(f"simt{lanes}", ops.OPERATORS, True, on_cpu=False, lanes=lanes) for lanes in build.LANES]
VARIANTS.append(Variant("pytorch", FALLBACK_OPERATORS, False))


def pytest_addoption(parser):
    parser.addoption("--all-backends", action="store_true", help="every test on every backend")


def pytest_configure(config):
    config.addinivalue_line("markers", "every_backend: run on every backend, not on a sample")
    config.addinivalue_line("markers", "native: only on backends that promise equal bits")
    config.addinivalue_line("markers", "cpu_only: not on GPU kernels")
    config.addinivalue_line("markers", "heavy: on the host executor only with --all-backends")
    config.addinivalue_line("markers", "needs(*operators): only on backends that have these operators")


def pytest_generate_tests(metafunc):
    if "backend" not in metafunc.fixturenames:
        return
    needs = {name for marker in metafunc.definition.iter_markers("needs") for name in marker.args}
    native = any(metafunc.definition.iter_markers("native"))
    cpu_only = any(metafunc.definition.iter_markers("cpu_only"))
    usable = [v for v in VARIANTS if needs <= set(v.operators) and (v.bit_invariant or not native)]
    usable = [v for v in usable if v.on_cpu or not cpu_only]
    metafunc.parametrize("backend", usable, indirect=True, ids=[v.name for v in usable])


def pytest_collection_modifyitems(config, items):
    if config.getoption("--all-backends"):
        return
    kept = []
    for item in items:
        callspec = getattr(item, "callspec", None)
        variant = callspec.params.get("backend") if callspec else None
        digest = hashlib.sha256(item.nodeid.encode()).digest()[0]
        every = item.get_closest_marker("every_backend") is not None
        if variant and variant.lanes:  # slow, and two of a kind: one of them is enough for most
            heavy = item.get_closest_marker("heavy") is not None
            keep = not heavy and digest % (2 if every else SAMPLE) == 0
        else:
            keep = every or variant in (None, VARIANTS[0], VARIANTS[-1]) or digest % SAMPLE == 0
        if keep:
            kept.append(item)
    items[:] = kept


@functools.cache
def simt_operators(lanes: int):
    """The operators of the host executor, compiled if need be."""
    torch.ops.load_library(str(build.library(lanes, os.environ.get("PAGED_ATTN_SIMT_SANITIZER"))))
    return getattr(torch.ops, f"paged_attn_simt{lanes}")


@pytest.fixture
def backend(request, monkeypatch):
    variant: Variant = request.param
    source = fallback if variant.name == "pytorch" else ops
    namespace = SimpleNamespace(name=variant.name, **{name: getattr(source, name) for name in variant.operators})
    before = paged_attn_ext._C.cpu_isa()
    if variant.isa:
        paged_attn_ext._C.set_cpu_isa(variant.isa)
    if variant.lanes:
        monkeypatch.setattr(ops, "_operators", simt_operators(variant.lanes))
    yield namespace
    paged_attn_ext._C.set_cpu_isa(before)


@pytest.fixture
def simt_backend(monkeypatch):
    """The namespace of a variant of the host executor, by name, for tests of GPU kernels alone."""

    def select(name: str):
        variant = next(variant for variant in VARIANTS if variant.name == name)
        monkeypatch.setattr(ops, "_operators", simt_operators(variant.lanes))
        return SimpleNamespace(name=name, **{operator: getattr(ops, operator) for operator in variant.operators})

    return select


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def threads():
    """Sets torch's thread count for a test; the old one comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
