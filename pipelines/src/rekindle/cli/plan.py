"""`rekindle plan`: which queries of a problem to start with the capacity there is."""

from __future__ import annotations

import argparse
from pathlib import Path

from rekindle.errors import RekindleError

_MAX_EFFORT = 60_000_000

EXAMPLES = """\
  rekindle plan --instance instance.json      # {"queries": [...], "profit": 210, "bound": 210, ...}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--instance",
        type=Path,
        required=True,
        metavar="FILE.json",
        help='{"capacity": {RESOURCE: AMOUNT}, "operators": {NAME: {RESOURCE: COST}}, '
        '"queries": {NAME: {"priority": N, "operators": [NAME, ...]}}}',
    )
    parser.add_argument(
        "--effort",
        type=_effort,
        default=3_000_000,
        metavar="N",
        help="of the search, in units of about a microsecond (default: 3000000); equal inputs and "
        "efforts give equal plans",
    )
    parser.add_argument(
        "--max-nodes",
        type=int,
        default=1000,
        metavar="N",
        help="nodes of the solver's search tree, if highspy is installed (default: 1000; 0: no "
        "solver)",
    )


def _effort(text: str) -> int:
    value = int(text)
    if not 0 <= value <= _MAX_EFFORT:
        raise argparse.ArgumentTypeError(f"must be from 0 to {_MAX_EFFORT}")
    return value


def run(args: argparse.Namespace) -> int:
    import json
    import time

    from rekindle.knapsack.exact import best_known
    from rekindle.knapsack.instance import parse_instance

    try:
        document = json.loads(args.instance.read_text())
    except ValueError as error:
        raise RekindleError(f"{args.instance} is not JSON: {error}") from error
    began = time.monotonic()
    instance = parse_instance(document)
    queries, bound = best_known(instance.problem, args.effort, args.max_nodes)
    answer = {
        "queries": [instance.query_names[q] for q in queries],
        "profit": instance.problem.worth(queries)[0],
        "bound": bound,
        "seconds": round(time.monotonic() - began, 3),
    }
    print(json.dumps(answer))
    return 0
