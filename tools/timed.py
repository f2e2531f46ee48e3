"""Run a command under a budget of minutes: print the budget, then the time it took, and fail when it took longer.

Usage: timed.py NAME MINUTES -- COMMAND...   (BUDGET=off: report only)
"""

import os
import subprocess
import sys
import time


def main() -> int:
    name, minutes, separator, *command = sys.argv[1:]
    if separator != "--" or not command:
        sys.exit(__doc__)
    print(f"[{name}] budget {minutes} min", flush=True)
    begin = time.monotonic()
    status = subprocess.run(command).returncode
    took = (time.monotonic() - begin) / 60
    late = took > float(minutes)
    print(f"[{name}] took {took:.1f} of {minutes} min{', over budget' if late else ''}", flush=True)
    if status == 0 and late and os.environ.get("BUDGET") != "off":
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
