"""`python -m paged_attn_ext info`: what is installed, built and in use. Touches no GPU."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import torch

from . import _loader, settings
from .build import record


def collect(environ=os.environ) -> dict:
    """Everything as plain data."""
    import paged_attn_ext

    library = Path(paged_attn_ext._C.__file__)
    devices = ["cpu"]
    if getattr(torch.version, "cuda", None) and torch.cuda.is_initialized():
        devices += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    has_cuda = torch._C._dispatch_has_kernel_for_dispatch_key("paged_attn::paged_attention_v1", "CUDA")
    return {
        "versions": {
            "paged_attn_ext": paged_attn_ext.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "library": str(library),
        "build": {**(record.read(library.parent) or {}), "compiled": paged_attn_ext._C.build_info()},
        "cpu": {
            "instruction_set": paged_attn_ext._C.cpu_isa(),
            "available": paged_attn_ext._C.cpu_isas(),
            "threads": torch.get_num_threads(),
        },
        "gpu_library": str(_loader.gpu_library() or "not built"),
        "backends": {"cpu": "native kernels", "cuda": "native kernels" if has_cuda else "PyTorch fallback"},
        "devices": devices,
        "switches": {
            switch.name: {"value": environ.get(switch.name, ""), "default": switch.default, "meaning": switch.meaning}
            for switch in settings.SWITCHES
        },
    }


def as_text(info: dict) -> str:
    lines = [" ".join(f"{name} {version}," for name, version in info["versions"].items()).rstrip(",")]
    lines.append(f"library           {info['library']}")
    build = info["build"]
    built_for = f"torch {build.get('torch', '?')}, ABI {build.get('cxx11_abi', '?')}, {build.get('toolchain', '?')}"
    lines.append(f"built for         {built_for}")
    lines.append(f"compiler          {build['compiled']['compiler']}, git {build.get('git_revision') or 'none'}")
    cpu = info["cpu"]
    lines.append(f"CPU kernels       {cpu['instruction_set']} of {', '.join(cpu['available'])}; {cpu['threads']} threads")
    lines.append(f"GPU library       {info['gpu_library']}")
    lines += [f"{device + ' tensors':18s}{path}" for device, path in info["backends"].items()]
    lines.append(f"devices           {', '.join(info['devices'])}")
    lines.append("environment switches:")
    for name, switch in info["switches"].items():
        value = switch["value"] or f"({switch['default'] or 'not set'})"
        lines.append(f"  {name:30s} {value:20s} {switch['meaning']}")
    return "\n".join(lines)


def run(as_json: bool) -> int:
    info = collect()
    print(json.dumps(info, indent=2) if as_json else as_text(info))
    return 0
