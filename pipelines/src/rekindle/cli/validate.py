"""`rekindle validate FILE`: reports all problems of a topology, without Spark or a cluster; with
`--against` also what begins anew if it takes the place of a running one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rekindle.cli.kubernetes_api import add_kubeconfig_arguments, open_cluster
from rekindle.cli.option_types import kubernetes_name, not_empty
from rekindle.cli.topology_file import add_file_argument, read_file
from rekindle.errors import InvalidTopology

if TYPE_CHECKING:
    from rekindle.topology.model import Topology

EXAMPLES = """\
  rekindle validate topology.yaml
  rekindle validate --local topology.yaml
  rekindle validate topology.yaml --against flights      # what an edit of it would lose
  rekindle validate topology.yaml --against before.yaml  # the same without a cluster
  kubectl get streamtopology flights -o yaml | rekindle validate -
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file_argument(parser)
    parser.add_argument(
        "--local", action="store_true", help="for a run on this machine: file:// needs no volume"
    )
    parser.add_argument(
        "--against",
        type=not_empty,
        metavar="NAME",
        help="list which operators of this topology of the cluster (or file) keep their state",
    )
    add_kubeconfig_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from rekindle.topology.load import load_topology
    from rekindle.topology.validate import validate

    name, spec = load_topology(read_file(args.file))
    problems = validate(spec, name, skip_cluster_checks=args.local)
    if problems:
        raise InvalidTopology(problems)
    print(f"{name}: valid")
    if args.against is not None:
        from rekindle.topology.changes import compare
        from rekindle.topology.compile import compile_topology

        new = compile_topology(spec, name, skip_cluster_checks=True)
        for line in compare(_running(args), new).lines():
            print(line)
    return 0


def _running(args: argparse.Namespace) -> Topology:
    """The topology of `--against`. Raises RekindleError, OSError."""
    from rekindle.topology.compile import compile_topology
    from rekindle.topology.load import load_spec, load_topology

    if Path(args.against).is_file():
        name, spec = load_topology(read_file(args.against))
    else:
        try:
            name = kubernetes_name(args.against)
        except argparse.ArgumentTypeError as error:
            raise FileNotFoundError(f"--against: no such file, and {error}") from error
        spec = load_spec(open_cluster(args).topology(name).get("spec"))
    return compile_topology(spec, name, skip_cluster_checks=True, accepted=True)
