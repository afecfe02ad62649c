"""The command line: `rekindle COMMAND`, one module for each command.

The module of a command has `EXAMPLES`, `add_arguments(parser)` and `run(args)`; it imports other
modules only in `run`, so that help and usage errors are printed without delay.
"""

from __future__ import annotations

import argparse
import atexit
import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from typing import NoReturn

from rekindle.errors import InvalidTopology, RekindleError
from rekindle.termination import Terminated, end_process, terminated_by_signals

COMMANDS = {
    "validate": "report all problems of a topology",
    "graph": "show segments, tasks, exchanges and resources as text, SVG or Mermaid",
    "run": "run a topology in this process, without a cluster",
    "warm-up": "create the class archive (AppCDS) that halves the start time of Spark",
    "status": "show the queries and tasks of a topology in a cluster",
    "tail": "print the rows of a query with a stream sink as they come",
    "plan": "choose the queries that are worth the capacity there is",
    "timeline": "draw the history of a topology in a cluster",
}


def main_process() -> NoReturn:
    """`main`, as the whole of a process. The interpreter does not end it: a thread that returned
    from a call of Arrow Flight meanwhile could crash it."""
    status: object = 1
    # The first that is registered is the last that is called: temporary files are removed before.
    atexit.register(lambda: end_process(status if isinstance(status, int) else 1))
    try:
        status = main()
    except SystemExit as end:  # of argparse
        status = end.code
        raise
    sys.exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code. 0: success; 1: the topology is invalid or the command failed; 2: usage error;
    128 + n: terminated by signal n."""
    try:
        with terminated_by_signals():
            return _main(sys.argv[1:] if arguments is None else list(arguments))
    except Terminated as end:
        print(f"rekindle: terminated by {end}", file=sys.stderr)
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
        return "(unknown version)"
