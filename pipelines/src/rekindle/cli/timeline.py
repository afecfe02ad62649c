"""`rekindle timeline TOPOLOGY`: draws the history of its queries."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rekindle.cli.kubernetes_api import add_cluster_arguments, open_cluster
from rekindle.cli.option_types import duration_us, path_with_ending
from rekindle.errors import RekindleError

EXAMPLES = """\
  rekindle timeline flights                        # writes flights-timeline.svg
  rekindle timeline flights --since 15m -o out.png
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=path_with_ending(".svg", ".png", ".pdf"),
        metavar="FILE",
        help=".svg, .png or .pdf (default: TOPOLOGY-timeline.svg)",
    )
    parser.add_argument(
        "--since",
        type=duration_us,
        metavar="DURATION",
        help="how far back, such as 90s, 15m or 2h (default: to the oldest Event or "
        "recovery in the status)",
    )


def run(args: argparse.Namespace) -> int:
    from rekindle.timeline.api_objects import read_timeline

    try:
        from rekindle.timeline.picture import draw
    except ModuleNotFoundError as error:
        raise RekindleError(f"no {error.name}: install rekindle[cli]") from error
    cluster = open_cluster(args)
    resource = cluster.topology(args.topology)
    now = datetime.now(UTC)
    timeline = read_timeline(
        resource,
        cluster.events(resource),
        cluster.nodes(),
        now,
        now - timedelta(microseconds=args.since) if args.since is not None else None,
    )
    if not timeline.history.changes:
        raise RekindleError(f"{args.topology} has no queries in its status yet: nothing to draw")
    output = args.output or Path(f"{args.topology}-timeline.svg")
    draw(timeline.history, output, f"Rekindle: {args.topology}", timeline.time_axis)
    print(f"{output}: {len(timeline.history.queries())} queries, {timeline.time_axis}")
    return 0
