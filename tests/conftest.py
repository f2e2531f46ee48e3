"""The `backend` fixture: a namespace of operators, one per implementation that this machine runs.

A test that takes `backend` runs on the first native variant, on `pytorch`, and on a fixed sample of the others; marked
`every_backend`, or with --all-backends, on all. `needs("op", ...)` keeps it to variants with these operators, `native` to
those that promise equal bits.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

import paged_attn_ext
from paged_attn_ext import fallback, ops

FALLBACK_OPERATORS = ("paged_attention_v1", "paged_attention_v2", "prefix_attention")
SAMPLE = 4  # one test in so many runs on a variant beyond the first


@dataclass(frozen=True)
class Variant:
    """An implementation: its operators by name, whether it promises equal bits, and the instruction set to switch to."""

    name: str
    operators: tuple[str, ...]
    bit_invariant: bool
    isa: str | None = None


VARIANTS = [Variant(f"cpu-{isa}", ops.OPERATORS, True, isa) for isa in paged_attn_ext._C.cpu_isas()]
VARIANTS.append(Variant("pytorch", FALLBACK_OPERATORS, False))


def pytest_addoption(parser):
    parser.addoption("--all-backends", action="store_true", help="every test on every backend")


def pytest_configure(config):
    config.addinivalue_line("markers", "every_backend: run on every backend, not on a sample")
    config.addinivalue_line("markers", "native: only on backends that promise equal bits")
    config.addinivalue_line("markers", "needs(*operators): only on backends that have these operators")


def pytest_generate_tests(metafunc):
    if "backend" not in metafunc.fixturenames:
        return
    needs = {name for marker in metafunc.definition.iter_markers("needs") for name in marker.args}
    native = any(metafunc.definition.iter_markers("native"))
    usable = [v for v in VARIANTS if needs <= set(v.operators) and (v.bit_invariant or not native)]
    metafunc.parametrize("backend", usable, indirect=True, ids=[v.name for v in usable])


def pytest_collection_modifyitems(config, items):
    if config.getoption("--all-backends"):
        return
    kept = []
    for item in items:
        callspec = getattr(item, "callspec", None)
        variant = callspec.params.get("backend") if callspec else None
        always = variant is None or variant in (VARIANTS[0], VARIANTS[-1]) or item.get_closest_marker("every_backend")
        if always or hashlib.sha256(item.nodeid.encode()).digest()[0] % SAMPLE == 0:
            kept.append(item)
    items[:] = kept


@pytest.fixture
def backend(request):
    variant: Variant = request.param
    source = fallback if variant.isa is None else ops
    namespace = SimpleNamespace(name=variant.name, **{name: getattr(source, name) for name in variant.operators})
    before = paged_attn_ext._C.cpu_isa()
    if variant.isa:
        paged_attn_ext._C.set_cpu_isa(variant.isa)
    yield namespace
    paged_attn_ext._C.set_cpu_isa(before)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def threads():
    """Sets torch's thread count for a test; the old one comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
