"""The command line: `rekindle validate | graph | run`. A command imports what it needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rekindle.errors import InvalidTopology, RekindleError
from rekindle.termination import Terminated, terminated_by_signals


def main(arguments: Sequence[str] | None = None) -> int:
    """0: done; 1: the topology is wrong or the run failed; 2: wrong usage; 128 + n: ended by
    signal n."""
    try:
        with terminated_by_signals():
            return _main(sys.argv[1:] if arguments is None else list(arguments))
    except Terminated as end:
        print(f"rekindle: ended by {end}", file=sys.stderr)
        return end.exit_code


def _main(given: Sequence[str]) -> int:
    args = _parser(given[:1]).parse_args(given)
    try:
        return int(args.command(args) or 0)
    except InvalidTopology as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        return 1
    except (RekindleError, OSError) as error:
        print(f"rekindle: {error}", file=sys.stderr)
        return 1


def _parser(command: Sequence[str]) -> argparse.ArgumentParser:
    """`command` is the one that will run, if any: only its own arguments may cost imports."""
    parser = argparse.ArgumentParser(prog="rekindle", description="Topologies without a cluster.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    validate = commands.add_parser("validate", help="say all that is wrong with a topology")
    validate.add_argument("file", metavar="FILE", help="a StreamTopology in YAML; - is stdin")
    validate.add_argument(
        "--local", action="store_true", help="for a run on this machine: file:// needs no volume"
    )
    validate.set_defaults(command=_validate)

    graph = commands.add_parser("graph", help="show segments, tasks, exchanges and resources")
    graph.add_argument("file", metavar="FILE", help="a StreamTopology in YAML; - is stdin")
    graph.add_argument("--svg", metavar="OUT", help="write a drawing instead; - is stdout")
    graph.set_defaults(command=_graph)

    run = commands.add_parser("run", help="run a bounded topology in this process")
    if command == ["run"]:
        from rekindle.reference import add_arguments

        add_arguments(run)
    run.set_defaults(command=_run)
    return parser


def _read(file: str) -> bytes:
    return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()


def _validate(args: argparse.Namespace) -> int:
    from rekindle.topology.load import load_topology
    from rekindle.topology.validate import validate

    name, spec = load_topology(_read(args.file))
    problems = validate(spec, name, local=args.local)
    if problems:
        raise InvalidTopology(problems)
    print(f"{name}: valid")
    return 0


def _graph(args: argparse.Namespace) -> int:
    from rekindle.topology.compile import compile_topology
    from rekindle.topology.drawing import draw_svg
    from rekindle.topology.load import load_topology
    from rekindle.topology.text import describe

    name, spec = load_topology(_read(args.file))
    topology = compile_topology(spec, name, local=True)
    if args.svg is None:
        print(describe(topology))
    elif args.svg == "-":
        print(draw_svg(topology), end="")
    else:
        Path(args.svg).write_text(draw_svg(topology))
    return 0


def _run(args: argparse.Namespace) -> int:
    from rekindle.reference import run_command

    return run_command(args)


if __name__ == "__main__":
    sys.exit(main())
