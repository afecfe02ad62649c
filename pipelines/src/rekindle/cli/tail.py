"""`rekindle tail TOPOLOGY QUERY`: rows of a stream sink, and their corrections, as they come."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rekindle import names
from rekindle.cli.kubernetes_api import (
    ApiUnavailable,
    ClusterReader,
    KubernetesError,
    add_cluster_arguments,
    open_cluster,
)
from rekindle.cli.option_types import host_and_port, not_empty, number_from
from rekindle.errors import InvalidTopology, RekindleError
from rekindle.termination import Terminated

if TYPE_CHECKING:
    from rekindle.stream_sinks.follow import Find, FoundReplicas
    from rekindle.topology.model import Segment

TOKEN_VARIABLE = "REKINDLE_READER_TOKEN"
TOPOLOGY_INTERVAL_S = 2.0
"""While replicas fail, the topology is read again at this interval: it may have been edited."""
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
        type=host_and_port,
        action="append",
        metavar="HOST:PORT",
        help="address of a replica of a query with one partition; may be repeated, for each "
        f"replica (default: addresses of the pods). The token is ${TOKEN_VARIABLE}, if it is set",
    )


def run(args: argparse.Namespace) -> int:
    from rekindle.cli.tail_lines import FailureWriter, LineWriter
    from rekindle.stream_sinks.client import read_call
    from rekindle.stream_sinks.cursor import Cursor
    from rekindle.stream_sinks.follow import follow
    from rekindle.stream_sinks.ticket import Ticket

    token = os.environ.get(TOKEN_VARIABLE) or None
    if args.address:
        partitions, find = 1, _fixed(args.address)
    else:
        source = QueryPods(open_cluster(args), args.topology, args.query)
        token = token or source.reader_token()
        partitions, find = source.segment.partitions, source.find
    cursor = None if args.from_epoch is None else Cursor(args.from_epoch)
    ticket = Ticket(args.query, cursor=cursor, tentative=args.tentative)
    writer, failures = LineWriter(partitions, as_json=args.json), FailureWriter()
    try:
        for followed in follow(ticket, find, lambda to, text, s: read_call(to, text, token, s)):
            if failure := failures.line(followed):
                print(f"rekindle tail: {failure}", file=sys.stderr)
            if followed.received is None:
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


def _fixed(addresses: Sequence[str]) -> Find:
    from rekindle.stream_sinks.follow import FoundReplicas

    return lambda partition: FoundReplicas(segment="", partitions=1, addresses=addresses)


class QueryPods:
    """The task pods of a query's partitions. Thread-safe."""

    def __init__(
        self,
        cluster: ClusterReader,
        topology: str,
        query: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._query = query
        self._clock = clock
        self._lock = threading.Lock()
        self._topology = cluster.topology(topology)
        self._read_at = clock()
        self._segments = [_segment(self._topology, query)]  # newest first
        self._gone: RekindleError | None = None

    @property
    def segment(self) -> Segment:
        """That of the newest definition of the query."""
        return self._segments[0]

    def find(self, partition: int) -> FoundReplicas:
        """The running pods, by replica: those of the newest definition of the query; while none of
        them runs, those of the definition before it. Raises ReplicaUnavailable while the API server
        does not respond, RekindleError if the query is gone."""
        from rekindle.stream_sinks.client import ReplicaUnavailable

        try:
            with self._lock:
                self._notice_edits()
                return self._found(partition)
        except ApiUnavailable as error:
            raise ReplicaUnavailable(str(error)) from error
        except KubernetesError as error:
            if error.status == 404:
                raise
            raise ReplicaUnavailable(str(error)) from error

    def _notice_edits(self) -> None:
        if self._clock() - self._read_at < TOPOLOGY_INTERVAL_S:
            return
        before, meta = self._topology, self._topology["metadata"]
        after = self._cluster.topology(meta["name"])
        if after["metadata"]["uid"] != meta["uid"]:
            raise RekindleError(f"topology {meta['name']} was deleted; another has its name now")
        self._topology, self._read_at = after, self._clock()
        if after["metadata"].get("generation") == before["metadata"].get("generation"):
            return
        self._gone = None
        try:
            segment = _segment(after, self._query)
        except InvalidTopology:  # the last accepted generation goes on
            return
        except RekindleError as error:
            self._gone = error
            return
        self._segments = [segment, *(s for s in self._segments if s.id != segment.id)]

    def _found(self, partition: int) -> FoundReplicas:
        from rekindle.stream_sinks.follow import FoundReplicas

        running = list(_running(self._cluster.task_pods(self._topology)))
        with_pods = {labels.get(names.LABEL_SEGMENT) for labels, _ in running}
        segment = next((s for s in self._segments if s.id in with_pods), None)
        if segment is None and self._gone is not None:
            raise self._gone
        segment = segment or self.segment
        wanted = {names.LABEL_SEGMENT: segment.id, names.LABEL_PARTITION: str(partition)}
        addresses = sorted(
            (int(labels.get(names.LABEL_REPLICA, 0)), address)
            for labels, address in running
            if wanted.items() <= labels.items()
        )
        return FoundReplicas(segment.id, segment.partitions, [a for _, a in addresses])

    def reader_token(self) -> str:
        try:
            return self._cluster.reader_token(self._topology)
        except KubernetesError as error:
            hint = f"set {TOKEN_VARIABLE} to the token (docs/read-a-stream.md#access)"
            raise RekindleError(f"the reader's token cannot be read: {error}; {hint}") from error


def _running(pods: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, str], str]]:
    """Labels of pods that run, and where they serve stream sinks."""
    from rekindle.protocol import STREAM_SINK_PORT

    for pod in pods:
        meta, status = pod["metadata"], pod.get("status") or {}
        ip = status.get("podIP")
        if ip and status.get("phase") == "Running" and "deletionTimestamp" not in meta:
            host = f"[{ip}]" if ":" in ip else ip
            yield meta.get("labels") or {}, f"{host}:{STREAM_SINK_PORT}"


def _segment(document: dict[str, object], query: str) -> Segment:
    """The segment whose output the query reads. Raises InvalidTopology, RekindleError."""
    from rekindle.topology.compile import compile_topology
    from rekindle.topology.load import load_spec

    meta = document["metadata"]
    assert isinstance(meta, dict)
    topology = compile_topology(load_spec(document.get("spec")), meta["name"], accepted=True)
    found = {q.name: q for q in topology.spec.queries}
    if query not in found:
        known = ", ".join(sorted(found))
        raise RekindleError(f"topology {meta['name']} has no query {query}; it has {known}")
    if found[query].sink.stream is None:
        kind, _ = found[query].sink.kind
        raise RekindleError(f"query {query} has a {kind} sink; only a stream sink can be followed")
    return next(s for s in topology.segments if query in s.queries)
