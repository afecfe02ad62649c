"""`rekindle plan`: which queries would run with the capacity there is, or would be there."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rekindle.cli.kubernetes_api import add_kubeconfig_arguments
from rekindle.cli.option_types import kubernetes_name, number_from, path
from rekindle.errors import RekindleError
from rekindle.quantities import parse_quantity

_MAX_EFFORT = 60_000_000
_PLANS = "rekindle.plans"  # entry points: rekindle-operator has the planner of topologies

EXAMPLES = """\
  rekindle plan flights --lose node-3,node-7                     # in a cluster
  rekindle plan flights --lose node-3 --add 2x4cpu,8Gi
  rekindle plan -f topology.yaml --nodes nodes.yaml --lose node-3
  rekindle plan --instance instance.json      # {"queries": [...], "profit": 210, "bound": 210, ...}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "topologies",
        nargs="*",
        type=kubernetes_name,
        metavar="TOPOLOGY",
        help="names of StreamTopologies in a cluster",
    )
    parser.add_argument(
        "-f",
        "--file",
        action="append",
        type=path,
        default=[],
        metavar="FILE",
        help="a StreamTopology in YAML, instead of those of a cluster; with --nodes",
    )
    parser.add_argument(
        "--nodes", type=path, metavar="FILE", help="Nodes in YAML: names and status.allocatable"
    )
    parser.add_argument(
        "--lose",
        type=lambda text: [kubernetes_name(name) for name in text.split(",")],
        default=[],
        metavar="NODE,NODE",
        help="as if these nodes were lost",
    )
    parser.add_argument(
        "--add",
        action="append",
        type=_added_nodes,
        default=[],
        metavar="2x4cpu,8Gi",
        help="as if there were more nodes, with so much CPU and memory, and further resources as "
        "NAME=AMOUNT",
    )
    parser.add_argument(
        "--instance",
        type=path,
        metavar="FILE.json",
        help='a problem by itself: {"capacity": {RESOURCE: AMOUNT}, "operators": {NAME: {RESOURCE: '
        'COST}}, "queries": {NAME: {"priority": N, "operators": [NAME, ...]}}}',
    )
    parser.add_argument(
        "--effort",
        type=number_from(0, _MAX_EFFORT),
        default=3_000_000,
        metavar="N",
        help="of the search for an instance, in units of about a microsecond (default: 3000000); "
        "equal inputs and efforts give equal plans",
    )
    parser.add_argument(
        "--max-nodes",
        type=number_from(0),
        default=1000,
        metavar="N",
        help="nodes of the solver's search tree for an instance, if highspy is installed (default: "
        "1000; 0: no solver)",
    )
    add_kubeconfig_arguments(parser)


def _added_nodes(text: str) -> list[dict[str, str]]:
    """`2x4cpu,8Gi,nvidia.com/gpu=1` -> the allocatable resources of two nodes."""
    number, _, each = text.replace("×", "x").partition("x")
    cpu, *rest = each.split(",")
    memory = [part for part in rest if "=" not in part]
    others = dict(part.split("=", 1) for part in rest if "=" in part)
    is_number = number.isascii() and number.isdigit() and len(number) <= 4
    resources = {"cpu": cpu.removesuffix("cpu"), "memory": "".join(memory), **others}
    if not is_number or not cpu.endswith("cpu") or not _are_quantities(resources.values()):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: write it like 2x4cpu,8Gi")
    return [resources] * int(number)


def _are_quantities(values: Iterable[str]) -> bool:
    try:
        return all(parse_quantity(value) >= 0 for value in values)
    except ValueError:
        return False


def run(args: argparse.Namespace) -> int:
    if args.instance is not None:
        if args.topologies or args.file:
            raise RekindleError("--instance is a problem by itself: name no topology")
        return _plan_instance(args)
    if bool(args.topologies) == bool(args.file):
        raise RekindleError("name topologies of a cluster, or give files with -f, or --instance")
    if bool(args.file) != bool(args.nodes):
        raise RekindleError("-f needs --nodes, and --nodes needs -f")
    what_if = _planner()
    if args.file:
        topologies = [raw for file in args.file for raw in _manifests(file, "StreamTopology")]
        nodes, pods = _manifests(args.nodes, "Node"), list[Any]()
    else:
        from rekindle.cli.kubernetes_api import open_cluster

        cluster = open_cluster(args)
        topologies = [cluster.topology(name) for name in args.topologies]
        nodes, pods = cluster.nodes(), cluster.pods()
        if not nodes or not pods:
            raise RekindleError("a plan needs the right to list nodes, and pods of all namespaces")
    added = [node for nodes_added in args.add for node in nodes_added]
    for line in what_if(topologies, nodes, pods, args.lose, added):
        print(line)
    return 0


def _planner() -> Callable[..., list[str]]:
    from importlib import metadata

    for entry in metadata.entry_points(group=_PLANS):
        found: Callable[..., list[str]] = entry.load()
        return found
    raise RekindleError(
        "plans of topologies need the operator's package: install rekindle-operator"
    )


def _manifests(file: Path, kind: str) -> list[Any]:
    import yaml

    try:
        documents = [d for d in yaml.safe_load_all(file.read_text()) if d]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RekindleError(f"{file} is not YAML: {error}") from error
    objects = [d for d in documents if isinstance(d, dict)]
    listed = [i for d in objects for i in (d["items"] if _is_list(d) else [d])]
    found = [i for i in listed if isinstance(i, dict) and i.get("kind", kind) == kind]
    if not found:
        raise RekindleError(f"{file} has no {kind}")
    return found


def _is_list(document: dict[str, Any]) -> bool:
    return isinstance(document.get("items"), list)


def _plan_instance(args: argparse.Namespace) -> int:
    import json
    import time

    from rekindle.knapsack.exact import best_known
    from rekindle.knapsack.instance import parse_instance

    try:
        document = json.loads(args.instance.read_text())
    except (ValueError, RecursionError) as error:
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
