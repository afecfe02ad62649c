"""`rekindle validate FILE`: reports all problems of a topology, without Spark or a cluster."""

from __future__ import annotations

import argparse

from rekindle.cli.topology_file import add_file_argument, read_file
from rekindle.errors import InvalidTopology

EXAMPLES = """\
  rekindle validate topology.yaml
  rekindle validate --local topology.yaml
  kubectl get streamtopology flights -o yaml | rekindle validate -
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file_argument(parser)
    parser.add_argument(
        "--local", action="store_true", help="for a run on this machine: file:// needs no volume"
    )


def run(args: argparse.Namespace) -> int:
    from rekindle.topology.load import load_topology
    from rekindle.topology.validate import validate

    name, spec = load_topology(read_file(args.file))
    problems = validate(spec, name, skip_cluster_checks=args.local)
    if problems:
        raise InvalidTopology(problems)
    print(f"{name}: valid")
    return 0
