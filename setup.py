"""Builds the libraries of paged_attn_ext/build/plan.py; everything else is in pyproject.toml."""

import importlib
import sys
import types
from pathlib import Path

from setuptools import setup

try:
    import torch  # noqa: F401
except ImportError:
    sys.exit(
        "paged_attn_ext is compiled against the torch it will run with: install torch, then pip install --no-build-isolation ."
    )

ROOT = Path(__file__).resolve().parent

# The package's __init__ loads what is built here, so a stand-in parent takes its place while building.
package = types.ModuleType("paged_attn_ext")
package.__path__ = [str(ROOT / "paged_attn_ext")]
sys.modules["paged_attn_ext"] = package
build = importlib.import_module("paged_attn_ext.build.compile")

setup(license="Apache-2.0", **build.setup_arguments(ROOT))
