"""Build the package and run its tests on several torch versions, each in an environment of its own that is deleted after.

Usage: compat.py [VERSION ...] [-- PYTEST_ARGUMENT ...]    (default: 2.1.2 2.5.1 newest; tests)

Needs several GB of downloads; pip's own variables (PIP_EXTRA_INDEX_URL and so on) choose where torch comes from, and TMPDIR
where the environments lie. Prints a table; exits non-zero where any version failed.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_VERSIONS = ("2.1.2", "2.5.1", "newest")
NEWEST = "newest"
BUILD_TOOLS = ("wheel", "ninja", "packaging")


def requirements(version: str) -> list[str]:
    """What pip is asked for: torch, and older companions for a torch that was made before NumPy 2 and setuptools 81."""
    if version == NEWEST:
        return ["torch", "setuptools"]
    wanted = [f"torch=={version}", "setuptools<81"]
    major, minor = (int(part) for part in version.split(".")[:2])
    return [*wanted, "numpy<2"] if (major, minor) < (2, 3) else wanted


def copy_sources(target: Path) -> None:
    """The checkout without what git ignores: the libraries in it are for another torch, and the tests import from here."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def check(version: str, pytest_arguments: list[str]) -> tuple[str, str]:
    """(torch version installed, "passed" or the step that failed)."""
    with tempfile.TemporaryDirectory(prefix="compat-") as folder:
        sources, venv = Path(folder) / "sources", Path(folder) / "venv"
        python = str(venv / "bin" / "python")
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-cache-dir"]
        copy_sources(sources)
        wanted = requirements(version)
        # Named again with the package, so that no test requirement moves them.
        steps = [
            ("venv", [sys.executable, "-m", "venv", str(venv)]),
            ("install torch", [*pip, *BUILD_TOOLS, *wanted]),
            ("build", [*pip, "--no-build-isolation", "-e", ".[test]", *wanted]),
            ("tests", [python, "-m", "pytest", "-q", *pytest_arguments]),
        ]
        environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        installed = "-"
        for name, command in steps:
            print(f"[{version}] {name}", flush=True)
            if subprocess.run(command, cwd=sources, env=environ).returncode != 0:
                return installed, f"{name} failed"
            if name == "install torch":
                # From its metadata: importing takes seconds and says no more.
                script = "from importlib.metadata import version; print(version('torch'))"
                installed = subprocess.run([python, "-c", script], capture_output=True, text=True).stdout.strip()
        return installed, "passed"


def main() -> int:
    arguments = sys.argv[1:]
    if "-h" in arguments or "--help" in arguments:
        print(__doc__)
        return 0
    at = arguments.index("--") if "--" in arguments else len(arguments)
    versions, pytest_arguments = arguments[:at] or list(DEFAULT_VERSIONS), arguments[at + 1 :] or ["tests"]
    for version in versions:
        if version != NEWEST and not re.match(r"\d+\.\d+", version):
            sys.exit(f"compat.py: {version!r} is no version such as 2.5.1, nor {NEWEST}")
    rows = []
    for version in versions:
        begin = time.monotonic()
        rows.append((version, *check(version, pytest_arguments), f"{(time.monotonic() - begin) / 60:.1f} min"))
    print(f"\nPython {sys.version.split()[0]}")
    for row in [("asked", "torch", "result", "took"), *rows]:
        print(f"  {row[0]:10s} {row[1]:18s} {row[2]:22s} {row[3]}")
    return 0 if all(row[2] == "passed" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
