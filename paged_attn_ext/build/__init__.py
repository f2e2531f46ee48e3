"""How the compiled libraries are made: toolchain, flags, plan, record, JIT.

Used by setup.py and by the loader alike, and importable without the rest of the package (which needs what is built here).

- `toolchain`: which compiler family, found without touching a GPU
- `plan`: which libraries from which sources with which flags
- `compile`: the plan carried out by torch.utils.cpp_extension and ninja
- `record`: what was built for what, kept beside the libraries and checked at import
- `jit`: compile into a cache at first import
- `corex`: one clang++ line per library, for images without ninja and without importing torch
"""
