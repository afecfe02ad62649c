"""`rekindle run FILE`: runs a topology in this process, with progress and a table of results.

Progress and messages go to stderr, the table to stdout. The first line is printed before any slow
import; Spark's log goes to a file.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from rekindle.cli.option_types import not_empty, number_from, path
from rekindle.cli.topology_file import add_file_argument, read_file
from rekindle.errors import InvalidTopology, RekindleError

EXAMPLES = """\
  rekindle run topology.yaml --output out
  rekindle run topology.yaml --input data --output out   # its file:// sources from ./data
  rekindle run topology.yaml --output out --overwrite --show alarms 20   # its first 20 rows
  rekindle run topology.yaml --output out --until-epoch 100 --master 'local[*]'
"""
_KEPT_LOGS = 20  # newest log files that are not deleted
SHOWN_ROWS = 10
MAX_EPOCH = 10**12 - 1
"""The same as in `rekindle.connectors.cuts`, whose import would delay the first line."""


class ShowAction(argparse.Action):
    """A query and a number of rows."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        query, *number = values
        if not query or len(number) > 1 or not all(n.isdecimal() for n in number):
            raise argparse.ArgumentError(
                self, f"expected QUERY [N], got {' '.join(values)}: put FILE before --show"
            )
        namespace.show = (query, int(number[0]) if number else SHOWN_ROWS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file_argument(parser)
    parser.add_argument(
        "--input",
        type=path,
        metavar="DIR",
        help="read files sources from this directory, by file name and, if that is ambiguous, "
        "parent directories (default: from their own URLs)",
    )
    parser.add_argument(
        "--cuts",
        type=not_empty,
        metavar="STORE/UID",
        help="read live sources (kafka) in the epochs that a topology has recorded: its checkpoint "
        "store and its UID",
    )
    parser.add_argument(
        "--output",
        type=path,
        metavar="DIR",
        help="write each query's files to DIR/<query> (default: to its sink)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="delete the output of earlier runs in the directory of --output first",
    )
    parser.add_argument(
        "--show",
        nargs="+",
        action=ShowAction,
        metavar=("QUERY", "N"),
        help=f"print the first N rows of a query, as JSON (default: {SHOWN_ROWS} rows)",
    )
    parser.add_argument(
        "--until-epoch",
        type=number_from(0, MAX_EPOCH),
        metavar="N",
        help="stop after this epoch; the first is 0 (default: at the end of all sources)",
    )
    parser.add_argument(
        "--epochs-per-job",
        type=number_from(1),
        metavar="N",
        default=64,
        help="maximum number of epochs in one call of a chain (default: %(default)s)",
    )
    parser.add_argument(
        "--master",
        default="local[2]",
        help="Spark's master: local[n] or local[*] (default: %(default)s)",
    )
    parser.add_argument(
        "--spark-log",
        type=path,
        metavar="FILE",
        help="log of Spark (default: a new file in ~/.local/state/rekindle)",
    )


def run(args: argparse.Namespace) -> int:
    print(f"rekindle run: {args.file}", file=sys.stderr, flush=True)
    # Imported late because these take a second.
    from rekindle.cli.run_display import FirstRows, open_display, print_result
    from rekindle.directories import cache_root
    from rekindle.engine.spark.archive_cache import ARCHIVE_DIRECTORY
    from rekindle.reference import SparkOptions, run_reference
    from rekindle.topology.load import load_topology

    log: Path | None = args.spark_log
    try:
        name, spec = load_topology(read_file(args.file))
        log = log or _new_log(name)
        shown = FirstRows(*args.show) if args.show else None
        if shown is not None:
            shown.check({query.name for query in spec.queries})
        with open_display(sys.stderr, name, log) as display:
            result = run_reference(
                spec,
                name,
                output=args.output,
                overwrite=args.overwrite,
                input=args.input,
                cuts=args.cuts,
                until_epoch=args.until_epoch,
                epochs_per_call=args.epochs_per_job,
                spark=SparkOptions(args.master, log, cache_root(os.environ) / ARCHIVE_DIRECTORY),
                on_event=display.report,
                on_rows=shown.take if shown is not None else lambda *_: None,
            )
    except InvalidTopology as error:
        count = len(error.problems)
        print(f"{args.file}: {count} problem{'s' if count > 1 else ''}", file=sys.stderr)
        print("\n".join(f"  {problem}" for problem in error.problems), file=sys.stderr)
        return 1
    except RekindleError:
        if log is not None and log.exists():
            print(f"Spark's log: {log}", file=sys.stderr)
        raise
    print_result(sys.stdout, name, result)
    if shown is not None:
        shown.print(sys.stdout, result.rows[shown.query])
    return 0


def _new_log(topology: str) -> Path:
    """A new file in the user's state directory; old logs are deleted."""
    from rekindle.directories import state_root

    directory = state_root(os.environ)
    for old in sorted(directory.glob("run-*.log"), key=lambda p: p.stat().st_mtime)[:-_KEPT_LOGS]:
        old.unlink(missing_ok=True)
    return directory / f"run-{topology}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.log"
