"""The command line: `rekindle COMMAND`, one module a command.

A module of a command has `EXAMPLES`, `add_arguments(parser)` and `run(args)`; what it needs beyond
argparse it imports when it runs, so that help and errors of usage come at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module, metadata

from rekindle.errors import InvalidTopology, RekindleError
from rekindle.termination import Terminated, terminated_by_signals

COMMANDS = {
    "validate": "say all that is wrong with a topology",
    "graph": "show segments, tasks, exchanges and resources, as text or drawn",
    "run": "run a topology in this process, without a cluster",
    "warm-up": "make the archive with which Spark starts in half the time, once",
    "status": "show the queries and tasks of a topology in a cluster",
    "timeline": "draw what happened to a topology in a cluster",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """0: done; 1: the topology is wrong or the command failed; 2: wrong usage; 128 + n: ended by
    signal n."""
    try:
        with terminated_by_signals():
            return _main(sys.argv[1:] if arguments is None else list(arguments))
    except Terminated as end:
        print(f"rekindle: ended by {end}", file=sys.stderr)
        return end.exit_code


def _main(given: Sequence[str]) -> int:
    args = _parser().parse_args(given)
    try:
        return int(args.command(args) or 0)
    except InvalidTopology as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        return 1
    except (RekindleError, OSError) as error:
        print(f"rekindle {args.name}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rekindle", description="Topologies with and without a cluster."
    )
    parser.add_argument("--version", action="version", version=f"rekindle {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, help in COMMANDS.items():
        module = import_module(f"rekindle.cli.{name.replace('-', '_')}")
        command = commands.add_parser(
            name,
            help=help,
            description=f"{help[0].upper()}{help[1:]}.",
            epilog=f"examples:\n{module.EXAMPLES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(command=module.run, name=name)
    return parser


def _version() -> str:
    try:
        return metadata.version("rekindle")
    except metadata.PackageNotFoundError:
        return "of an unknown version"
