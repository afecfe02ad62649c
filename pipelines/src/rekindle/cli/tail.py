"""`rekindle tail TOPOLOGY QUERY`: rows of a stream sink, and their corrections, as they come."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rekindle.cli.kubernetes_api import (
    ApiError,
    ApiUnavailable,
    ClusterReader,
    add_cluster_arguments,
    open_cluster,
)
from rekindle.cli.option_types import not_empty, number_from
from rekindle.errors import RekindleError
from rekindle.termination import Terminated

if TYPE_CHECKING:
    from rekindle.stream_sinks.follow import Addresses
    from rekindle.topology.model import Segment

TOKEN_VARIABLE = "REKINDLE_READER_TOKEN"
EXAMPLES = """\
  rekindle tail flights delay-board
  rekindle tail flights delay-board --tentative   # also tentative results and their corrections
  rekindle tail flights delay-board --json --from-epoch 1200
  rekindle tail flights delay-board --address localhost:8816   # after kubectl port-forward
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)
    parser.add_argument("query", type=not_empty, metavar="QUERY", help="a query with a stream sink")
    parser.add_argument(
        "--tentative", action="store_true", help="print tentative results and their corrections"
    )
    parser.add_argument(
        "--from-epoch",
        type=number_from(0),
        metavar="EPOCH",
        help="first epoch (default: the oldest one that is kept)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object for each line")
    parser.add_argument(
        "--address",
        type=not_empty,
        action="append",
        metavar="HOST:PORT",
        help="address of a replica of a query with one partition; may be repeated, for each "
        f"replica (default: addresses of the pods). The token is ${TOKEN_VARIABLE}, if it is set",
    )


def run(args: argparse.Namespace) -> int:
    from rekindle.cli.tail_lines import LineWriter
    from rekindle.stream_sinks.cursor import Cursor
    from rekindle.stream_sinks.follow import follow
    from rekindle.stream_sinks.ticket import Ticket

    token = os.environ.get(TOKEN_VARIABLE) or None
    if args.address:
        partitions, addresses = 1, _fixed(args.address)
    else:
        source = QueryPods(open_cluster(args), args.topology, args.query)
        token = token or source.reader_token()
        partitions, addresses = source.segment.partitions, source.addresses
    cursor = None if args.from_epoch is None else Cursor(args.from_epoch)
    ticket = Ticket(args.query, cursor=cursor, tentative=args.tentative)
    writer = LineWriter(partitions, as_json=args.json)
    try:
        for followed in follow(ticket, partitions, addresses, token):
            if followed.received is None:
                print(f"rekindle tail: {followed.message}; trying again", file=sys.stderr)
                continue
            for line in writer.lines(followed.partition, followed.received):
                print(line)
            sys.stdout.flush()
    except Terminated as end:
        if end.number != signal.SIGINT:
            raise
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    return 0


def _fixed(addresses: Sequence[str]) -> Addresses:
    return lambda partition: addresses


class QueryPods:
    """The task pods of a query's partitions."""

    def __init__(self, cluster: ClusterReader, topology: str, query: str) -> None:
        self._cluster = cluster
        self._topology = cluster.topology(topology)
        self.segment = _segment(self._topology, query)
        self._known: dict[int, list[str]] = {}

    def addresses(self, partition: int) -> list[str]:
        """Addresses of the running pods, in the order of replicas; while the API server does not
        respond, those found last."""
        with contextlib.suppress(ApiError, ApiUnavailable):
            self._known[partition] = self._found(partition)
        return self._known.get(partition, [])

    def _found(self, partition: int) -> list[str]:
        from rekindle import names
        from rekindle.protocol import STREAM_SINK_PORT

        found: list[tuple[int, str]] = []
        for pod in self._cluster.task_pods(self._topology):
            labels, ip = pod["metadata"].get("labels") or {}, pod.get("status", {}).get("podIP")
            is_wanted = (
                labels.get(names.LABEL_SEGMENT) == self.segment.id
                and labels.get(names.LABEL_PARTITION) == str(partition)
                and pod["status"].get("phase") == "Running"
            )
            if ip and is_wanted and "deletionTimestamp" not in pod["metadata"]:
                host = f"[{ip}]" if ":" in ip else ip
                replica = int(labels.get(names.LABEL_REPLICA, 0))
                found.append((replica, f"{host}:{STREAM_SINK_PORT}"))
        return [address for _, address in sorted(found)]

    def reader_token(self) -> str:
        try:
            return self._cluster.reader_token(self._topology)
        except ApiError as error:
            hint = f"set {TOKEN_VARIABLE} to the token (docs/read-a-stream.md#access)"
            raise RekindleError(f"the reader's token cannot be read: {error}; {hint}") from error


def _segment(document: dict[str, object], query: str) -> Segment:
    """The segment whose output the query reads. Raises InvalidTopology, RekindleError."""
    from rekindle.topology.compile import compile_topology
    from rekindle.topology.load import load_spec

    meta = document["metadata"]
    assert isinstance(meta, dict)
    topology = compile_topology(load_spec(document.get("spec")), meta["name"])
    found = {q.name: q for q in topology.spec.queries}
    if query not in found:
        known = ", ".join(sorted(found))
        raise RekindleError(f"topology {meta['name']} has no query {query}; it has {known}")
    if found[query].sink.stream is None:
        kind, _ = found[query].sink.kind
        raise RekindleError(f"query {query} has a {kind} sink; only a stream sink can be followed")
    return next(s for s in topology.segments if query in s.queries)
