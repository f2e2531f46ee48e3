"""python -m paged_attn_ext info | demo"""

import argparse
import sys

from . import info
from .demo import cli


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m paged_attn_ext", description="Attention over a paged KV cache.")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("info", help="versions, build, instruction set, devices, environment switches")
    show.add_argument("--json", action="store_true", help="as JSON")
    cli.add_arguments(commands.add_parser("demo", help="a real model answers prompts over the paged cache"))
    arguments = parser.parse_args(argv)
    return info.run(arguments.json) if arguments.command == "info" else cli.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
