"""`rekindle tail`: a process that follows two real servers, and its lines."""

from __future__ import annotations

import base64
import copy
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import pyarrow as pa
import pytest
from cluster_documents import TOPOLOGIES, FakeApiServer, Observed, served
from test_stream_sinks_server import IDENTITY, Task
from topology_specs import query, source, topology_spec, window

from rekindle import names
from rekindle.cli.kubernetes_api import ApiUnavailable, ClusterReader, KubernetesError
from rekindle.cli.tail import TOKEN_VARIABLE, QueryPods
from rekindle.cli.tail_lines import FailureWriter, LineWriter
from rekindle.errors import BelowFloor, RekindleError
from rekindle.protocol import STREAM_SINK_PORT, ConsistencyState
from rekindle.stream_sinks.client import (
    CALL_S,
    PROBE_S,
    NoLongerKept,
    ReadRefused,
    Received,
    ReplicaUnavailable,
    read_call,
)
from rekindle.stream_sinks.cursor import Cursor
from rekindle.stream_sinks.follow import (
    FAILED_S,
    REFUSED_S,
    STALL_S,
    Followed,
    FoundReplicas,
    PartitionFollower,
    follow,
)
from rekindle.stream_sinks.ticket import Ticket, parse_ticket


def received(
    kind: str,
    epoch: int,
    rows: int = 0,
    ticket: Ticket | None = None,
    state: ConsistencyState = ConsistencyState.STABLE,
) -> Received:
    following = f"after {epoch}" if ticket is None else ticket.encode()
    return Received(kind, epoch, pa.table({"n": list(range(rows))}), following, state)


def test_corrections_are_marked() -> None:
    writer = LineWriter(1, as_json=False)
    story = [("STABLE", 1), ("TENTATIVE", 2), ("UNDO", 2), ("STABLE", 2), ("REC_DONE", 2)]
    lines = [line for kind, at in story for line in writer.lines(0, received(kind, at, 1))]
    assert lines == [
        '       1             {"n": 0}',
        '       2  tentative  {"n": 0}',
        "       2  -- undo: drop from epoch 2 on",
        '       2  corrected  {"n": 0}',
        "       2  -- corrected through epoch 2",
    ]


def test_each_line_can_be_json() -> None:
    writer = LineWriter(2, as_json=True)
    (line,) = writer.lines(1, received("STABLE", 4, 1))
    assert json.loads(line) == {"partition": 1, "epoch": 4, "kind": "STABLE", "row": {"n": 0}}


def test_a_message_is_printed_once_until_there_are_rows_again() -> None:
    failures = FailureWriter()
    story = [
        (0, "a does not respond"),
        (0, "no replica is running"),
        (0, "a does not respond"),
        (1, "a does not respond"),
        (0, None),
        (0, "a does not respond"),
    ]
    printed = [
        failures.line(Followed(at, received("STABLE", 1) if text is None else None, text or ""))
        for at, text in story
    ]
    a, none = "a does not respond; trying again", "no replica is running; trying again"
    assert printed == [a, none, None, a, None, a]


def test_an_address_without_a_server_is_reported_without_grpc() -> None:
    with pytest.raises(ReplicaUnavailable) as caught:
        list(read_call("127.0.0.1:1", Ticket("q").encode(), None))
    assert str(caught.value) == "127.0.0.1:1 cannot be read: Connection refused"


class Replicas:
    """What calls of replicas return, by address. `listed`: the addresses that are found; None: they
    cannot be listed now."""

    def __init__(self, **answers: list[Received] | Exception) -> None:
        self.answers = answers
        self.listed: list[str] | None = list(answers)
        self.segment, self.partitions = "segment", 1
        self.calls: list[tuple[str, str]] = []
        self.deadlines: list[float] = []
        self.now = 0.0

    def find(self, partition: int) -> FoundReplicas:
        if self.listed is None:
            raise ReplicaUnavailable("the API server does not respond")
        return FoundReplicas(self.segment, self.partitions, self.listed)

    def read(self, address: str, ticket: str, timeout_s: float) -> Iterator[Received]:
        self.calls.append((address, ticket))
        self.deadlines.append(timeout_s)
        answer = self.answers[address]
        if isinstance(answer, Exception):
            raise answer
        yield from answer

    def reader(self, ticket: Ticket | None = None) -> PartitionFollower:
        return PartitionFollower(
            0, ticket or Ticket("q"), self.find, self.read, clock=lambda: self.now
        )

    def messages(self, reader: PartitionFollower) -> list[str]:
        """Of one step."""
        return [f.message for f in reader.step()]


STABLE, UP_FAILURE, CORRECTING = (
    ConsistencyState.STABLE,
    ConsistencyState.UP_FAILURE,
    ConsistencyState.STABILIZATION,
)


class StateStory:
    """A reader of replicas whose output has these states; each call that waits takes a second."""

    def __init__(self, tentative: bool, **states: ConsistencyState) -> None:
        self.replicas = Replicas(**{address: [] for address in states})
        self.asked: list[Ticket] = []
        self.reader = self.replicas.reader(Ticket("q", tentative=tentative))
        self.set(**states)

    def set(self, **states: ConsistencyState) -> None:
        for address, state in states.items():
            following = Ticket("q", cursor=Cursor(1))
            self.replicas.answers[address] = [received("STABLE", 0, 0, following, state)]

    def step(self) -> str:
        """One call; the address that was called."""
        list(self.reader.step())
        address, ticket = self.replicas.calls[-1]
        self.asked.append(parse_ticket(ticket.encode()))
        self.replicas.now += max(self.asked[-1].wait_s, 0.01)
        return address

    def steps(self, number: int) -> str:
        return "".join(self.step() for _ in range(number))


@pytest.mark.parametrize("tentative", [True, False])
@pytest.mark.parametrize("state", [UP_FAILURE, CORRECTING])
def test_a_reader_goes_to_a_stable_replica(tentative: bool, state: ConsistencyState) -> None:
    story = StateStory(tentative, a=STABLE, b=STABLE, c=state)
    assert story.steps(3) == "aaa"
    story.set(a=state)
    assert story.steps(4) == "abbb"
    # The first call of another replica does not wait, and is soon given up.
    assert [asked.wait_s for asked in story.asked[3:6]] == [1.0, 0.0, 1.0]
    assert story.replicas.deadlines[3:6] == [CALL_S, PROBE_S, CALL_S]


def test_while_none_is_stable_a_reader_of_tentative_results_stays_with_one_that_serves() -> None:
    story = StateStory(True, a=CORRECTING, b=UP_FAILURE)
    story.steps(9)
    waited = [c for c, t in zip(story.replicas.calls, story.asked, strict=True) if t.wait_s > 0]
    assert {address for address, _ in waited[1:]} == {"b"}


def test_while_none_is_stable_a_reader_of_stable_results_prefers_one_that_corrects() -> None:
    story = StateStory(False, a=UP_FAILURE, b=CORRECTING)
    story.steps(9)
    waited = [c for c, t in zip(story.replicas.calls, story.asked, strict=True) if t.wait_s > 0]
    assert {address for address, _ in waited[1:]} == {"b"}


def test_a_replica_that_cannot_be_read_is_not_asked_again_at_once() -> None:
    story = StateStory(True, a=UP_FAILURE, b=UP_FAILURE)
    story.replicas.answers["b"] = ReplicaUnavailable("gone")
    assert story.steps(9).count("b") == 1
    story.replicas.now += FAILED_S
    story.set(b=STABLE)
    assert story.steps(4) == "abbb"


def test_a_refusal_keeps_no_reader_from_a_stable_replica() -> None:
    for refusal in (NoLongerKept("gone", 120), ReadRefused("another topology")):
        story = StateStory(True, b=STABLE, a=UP_FAILURE, c=STABLE)
        story.replicas.answers["b"] = refusal
        assert story.steps(4)[-1] == "c"


def test_replicas_that_hang_cost_a_reader_little() -> None:
    story = StateStory(True, a=UP_FAILURE, h=UP_FAILURE, i=UP_FAILURE, z=STABLE)
    for address in "hi":
        story.replicas.answers[address] = ReplicaUnavailable("it does not respond")
    called = story.steps(8)
    assert called.endswith("zz")
    hung = [
        d
        for (at, _), d in zip(story.replicas.calls, story.replicas.deadlines, strict=True)
        if at in "hi"
    ]
    assert hung == [PROBE_S] * 2
    story = StateStory(True, a=UP_FAILURE, h=UP_FAILURE)
    story.replicas.answers["h"] = ReplicaUnavailable("it does not respond")
    assert "hh" not in story.steps(30)


def test_a_stable_replica_that_lags_takes_no_reader_of_tentative_results() -> None:
    """One that was replaced is stable from its start, and has nothing that the reader lacks."""
    replicas = Replicas(a=[], b=[])
    reader = replicas.reader(Ticket("q", tentative=True, cursor=Cursor(100)))
    called, newest = "", 100
    for _ in range(40):
        newest += 1
        following = Ticket("q", tentative=True, cursor=Cursor(100, held=(101, newest)))
        replicas.answers["a"] = [received("TENTATIVE", newest, 1, following, UP_FAILURE)]
        replicas.answers["b"] = [received("END", 99, 0, following, STABLE)]
        list(reader.step())
        called += replicas.calls[-1][0]
        replicas.now += 0.5 if called[-1] == "a" else 0.01
    assert called.count("a") > 2 * called.count("b") > 4
    assert "bb" not in called


def test_a_reader_goes_on_at_the_next_replica() -> None:
    replicas = Replicas(a=[received("STABLE", 1)], b=[received("STABLE", 2)])
    reader = replicas.reader()
    list(reader.step())
    replicas.answers["a"] = ReplicaUnavailable("gone")
    assert [f.message for f in reader.step()] == ["gone"]
    list(reader.step())
    assert [address for address, _ in replicas.calls] == ["a", "a", "b"]
    assert [ticket for _, ticket in replicas.calls[1:]] == ["after 1"] * 2


def test_a_replica_that_stalls_is_abandoned() -> None:
    following = Ticket("q", cursor=Cursor(2))
    # The end of a call, without an epoch.
    replicas = Replicas(a=[received("END", 1, ticket=following)], b=[])
    reader = replicas.reader()
    list(reader.step())
    replicas.now = STALL_S + 1
    list(reader.step())
    list(reader.step())
    assert [address for address, _ in replicas.calls] == ["a", "a", "b"]


def test_only_if_no_replica_has_the_epoch_the_reader_ends() -> None:
    replicas = Replicas(a=NoLongerKept("floor 7", 7), b=NoLongerKept("floor 9", 9))
    reader = replicas.reader()
    assert [f.message for f in reader.step()] == ["floor 7"]
    with pytest.raises(BelowFloor, match="floor 7"):
        list(reader.step())


def test_addresses_that_cannot_be_listed_end_no_reader() -> None:
    replicas = Replicas(a=[received("STABLE", 1)])
    replicas.listed = None
    reader = replicas.reader()
    assert replicas.messages(reader) == ["the API server does not respond"]
    replicas.listed = ["a"]
    assert [f.received and f.received.epoch for f in reader.step()] == [1]


def test_a_list_that_is_stale_ends_no_reader() -> None:
    replicas = Replicas(a=[received("STABLE", 1)])
    reader = replicas.reader()
    list(reader.step())
    replicas.answers["a"], replicas.listed = NoLongerKept("floor 7", 7), None
    assert replicas.messages(reader) == ["floor 7", "the API server does not respond"]
    replicas.answers["b"], replicas.listed = [received("STABLE", 2)], ["b"]
    list(reader.step())
    assert [f.received and f.received.epoch for f in reader.step()] == [2]


@pytest.mark.parametrize("reused", [ReadRefused("needs another token"), ReplicaUnavailable("?")])
def test_an_address_that_is_reused_ends_no_reader(reused: Exception) -> None:
    replicas = Replicas(a=[received("STABLE", 1)])
    reader = replicas.reader()
    list(reader.step())
    replicas.answers["a"] = reused
    for _ in range(3):
        assert replicas.messages(reader) == [str(reused)]
    replicas.answers["b"], replicas.listed = [received("STABLE", 2)], ["b"]
    list(reader.step())
    assert [f.received and f.received.epoch for f in reader.step()] == [2]


def test_a_refusal_that_lasts_ends_the_reader() -> None:
    replicas = Replicas(a=[received("STABLE", 1)])
    reader = replicas.reader()
    list(reader.step())
    replicas.answers["a"] = ReadRefused("needs another token")
    replicas.messages(reader)
    replicas.now = REFUSED_S + 1
    with pytest.raises(ReadRefused, match="another token"):
        list(reader.step())


def test_a_wrong_token_ends_the_reader_at_once() -> None:
    replicas = Replicas(a=ReadRefused("needs the token"), b=ReadRefused("needs the token"))
    reader = replicas.reader()
    assert replicas.messages(reader) == ["needs the token"]
    with pytest.raises(ReadRefused):
        list(reader.step())


def test_after_an_edit_the_reader_goes_on_in_the_new_segment() -> None:
    replicas = Replicas(a=[received("STABLE", 4, ticket=Ticket("q", cursor=Cursor(5)))])
    reader = replicas.reader()
    list(reader.step())
    replicas.answers = {"a": ReplicaUnavailable("gone"), "b": NoLongerKept("floor 9", 9)}
    replicas.listed, replicas.segment = ["b"], "edited"
    assert replicas.messages(reader) == ["gone"]
    (message,) = replicas.messages(reader)
    assert "edited" in message
    assert "begins with epoch 9" in message
    with pytest.raises(BelowFloor):  # from now on it is a floor as any other
        list(reader.step())
    asked = parse_ticket(replicas.calls[-1][1].encode())
    assert asked.cursor == Cursor(9)


def test_what_is_tentative_is_dropped_before_an_edited_query() -> None:
    ticket = Ticket("q", cursor=Cursor(5, held=(5, 6)), tentative=True)
    replicas = Replicas(a=[received("TENTATIVE", 6, ticket=ticket)])
    reader = replicas.reader()
    list(reader.step())
    replicas.answers = {"a": ReplicaUnavailable("gone"), "b": NoLongerKept("floor 9", 9)}
    replicas.listed, replicas.segment = ["b"], "edited"
    list(reader.step())
    found = [f.received.kind for f in reader.step() if f.received is not None]
    assert found == ["UNDO"]


class FakeCluster:
    """A topology whose query `delays` has a stream sink, and its pods."""

    def __init__(self, partitions: int = 2) -> None:
        stream = query("delays", "hourly", sink={"stream": {}})
        spec = topology_spec(
            [source()], [window("hourly", "s", partitions=partitions, keyBy=["origin"])], [stream]
        )
        spec["queries"].append(query("files", "hourly"))
        meta: dict[str, Any] = {"name": "t", "uid": "u", "generation": 1}
        self.document: dict[str, Any] = {"metadata": meta, "spec": spec}
        self.pods: list[dict[str, Any]] = []
        self.unavailable = False

    @property
    def segment(self) -> str:
        """Its id, of the topology as it is now."""
        return QueryPods(cast(ClusterReader, self), "t", "delays").segment.id

    def topology(self, name: str) -> dict[str, Any]:
        if self.unavailable:
            raise ApiUnavailable("no response")
        return copy.deepcopy(self.document)

    def edit(self, partitions: int = 2, sink: dict[str, Any] | None = None) -> None:
        self.document["metadata"]["generation"] += 1
        self.document["spec"]["operators"][0]["partitions"] = partitions
        self.document["spec"]["queries"][0]["sink"] = sink or {"stream": {}}

    def task_pods(self, topology: dict[str, Any]) -> list[dict[str, Any]]:
        if self.unavailable:
            raise ApiUnavailable("no response")
        return self.pods

    def add(self, segment: str, partition: int, replica: int, ip: str, **metadata: Any) -> None:
        labels = {
            names.LABEL_SEGMENT: segment,
            names.LABEL_PARTITION: str(partition),
            names.LABEL_REPLICA: str(replica),
        }
        status = {"podIP": ip, "phase": "Running"}
        self.pods.append({"metadata": {"labels": labels, **metadata}, "status": status})


def test_the_pods_of_a_partition_are_found_by_replica() -> None:
    cluster = FakeCluster()
    pods = QueryPods(cast(ClusterReader, cluster), "t", "delays")
    segment = pods.segment.id
    assert pods.find(0) == FoundReplicas(segment, 2, [])
    cluster.add(segment, 1, 1, "10.0.0.3")
    cluster.add(segment, 1, 0, "fd00::1")
    cluster.add(segment, 1, 2, "10.0.0.4", deletionTimestamp="now")
    cluster.add(segment, 0, 0, "10.0.0.1")
    cluster.add("another", 1, 0, "10.0.0.2")
    found = ["[fd00::1]:8816", "10.0.0.3:8816"]
    assert pods.find(1).addresses == found
    cluster.unavailable = True
    with pytest.raises(ReplicaUnavailable, match="no response"):
        pods.find(1)


def test_pods_of_an_edited_query_are_found() -> None:
    cluster, now = FakeCluster(), [0.0]
    pods = QueryPods(cast(ClusterReader, cluster), "t", "delays", clock=lambda: now[0])
    before = pods.segment.id
    cluster.add(before, 0, 0, "10.0.0.1")
    cluster.edit(partitions=3)
    now[0] += 60
    assert pods.find(0) == FoundReplicas(before, 2, ["10.0.0.1:8816"]), "while the new ones start"
    cluster.add(pods.segment.id, 0, 0, "10.0.0.2")
    found = pods.find(0)
    assert found.segment != before
    assert (found.partitions, found.addresses) == (3, ["10.0.0.2:8816"])


def test_an_edit_that_is_invalid_changes_nothing() -> None:
    cluster, now = FakeCluster(), [0.0]
    pods = QueryPods(cast(ClusterReader, cluster), "t", "delays", clock=lambda: now[0])
    cluster.add(pods.segment.id, 0, 0, "10.0.0.1")
    cluster.edit(partitions=-1)
    now[0] += 60
    assert pods.find(0).addresses == ["10.0.0.1:8816"]


def test_a_query_that_is_gone_ends_the_reader() -> None:
    cluster, now = FakeCluster(), [0.0]
    pods = QueryPods(cast(ClusterReader, cluster), "t", "delays", clock=lambda: now[0])
    cluster.edit(sink={"files": {"url": "file:///var/lib/rekindle/x"}})
    now[0] += 60
    with pytest.raises(RekindleError, match="has a files sink"):
        pods.find(0)


def test_another_topology_of_the_same_name_ends_the_reader() -> None:
    cluster, now = FakeCluster(), [0.0]
    pods = QueryPods(cast(ClusterReader, cluster), "t", "delays", clock=lambda: now[0])
    cluster.document["metadata"]["uid"] = "another"
    now[0] += 60
    with pytest.raises(RekindleError, match="was deleted"):
        pods.find(0)


def test_readers_of_added_partitions_begin() -> None:
    replicas = Replicas(a=ReplicaUnavailable("gone"))
    partitions = set[int]()
    for followed in follow(Ticket("q"), replicas.find, replicas.read):
        partitions.add(followed.partition)
        replicas.partitions = 3
        if partitions == {0, 1, 2}:
            return


@pytest.mark.process
def test_a_signal_that_another_thread_takes_ends_the_reader() -> None:
    """The kernel may give it to a thread of gRPC; the main thread waits for rows meanwhile."""
    program = (
        "import signal, threading, time\n"
        "from rekindle.stream_sinks.follow import FoundReplicas, follow\n"
        "from rekindle.stream_sinks.ticket import Ticket\n"
        "from rekindle.termination import Terminated, terminated_by_signals\n"
        "def read(address, ticket, timeout_s):\n"
        "    time.sleep(0.5)\n"
        "    signal.pthread_kill(threading.get_ident(), signal.SIGINT)\n"
        "    time.sleep(600)\n"
        "try:\n"
        "    with terminated_by_signals():\n"
        "        next(follow(Ticket('q'), lambda partition: FoundReplicas('s', 1, ['a']), read))\n"
        "except Terminated as end:\n"
        "    print(end)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "SIGINT\n"


def test_an_unexpected_error_ends_the_reader_with_it() -> None:
    replicas = Replicas(a=ZeroDivisionError("a mistake"))
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        list(follow(Ticket("q"), replicas.find, replicas.read))


class SecretReader(ClusterReader):
    """A cluster whose API server returns one Secret."""

    secret: ClassVar[dict[str, str]] = {}

    def _get(self, path: str, query: object = ()) -> dict[str, Any]:
        assert "/secrets/" in path
        return {"data": {k: base64.b64encode(v.encode()).decode() for k, v in self.secret.items()}}


@pytest.mark.parametrize("keys", [("token", "reader"), ("token",)])
def test_a_secret_of_before_stream_sinks_is_enough(
    monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]
) -> None:
    content = {"token": str(IDENTITY.token), "reader": str(IDENTITY.reader_token)}
    monkeypatch.setattr(SecretReader, "secret", {key: content[key] for key in keys})
    cluster = SecretReader(cast(Any, None), "default")
    found = cluster.reader_token({"metadata": {"name": "t", "uid": "u"}})
    assert found == IDENTITY.reader_token


def test_a_secret_without_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SecretReader, "secret", {"other": "x"})
    cluster = SecretReader(cast(Any, None), "default")
    with pytest.raises(KubernetesError, match="has no key reader"):
        cluster.reader_token({"metadata": {"name": "t", "uid": "u"}})


@pytest.mark.parametrize(
    ("name", "message"),
    [("files", "has a files sink; only a stream"), ("delay", "no query delay; it has delays")],
)
def test_a_query_that_cannot_be_followed_is_refused(name: str, message: str) -> None:
    with pytest.raises(RekindleError, match=message):
        QueryPods(cast(ClusterReader, FakeCluster()), "t", name)


class Process:
    def __init__(self, *arguments: str) -> None:
        environment = os.environ | {TOKEN_VARIABLE: str(IDENTITY.reader_token)}
        command = [sys.executable, "-m", "rekindle.cli", "tail", "t", "delays", *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.strip())

    def take(self, count: int) -> list[str]:
        return [self.lines.get(timeout=60) for _ in range(count)]

    def stop(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGINT)
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors


@pytest.mark.process
@pytest.mark.timeout(180)
def test_rows_come_once_while_replicas_change(tmp_path: Path) -> None:
    first, second = Task(tmp_path / "a", tentative=True), Task(tmp_path / "b", tentative=True)
    first.append(0)
    second.append(0, 1)
    addresses = [f"127.0.0.1:{task.server.port}" for task in (first, second)]
    flags = [part for address in addresses for part in ("--address", address)]
    tail = Process("--tentative", *flags)
    try:
        assert [line.split()[0] for line in tail.take(3)] == ["0"] * 3
        first.append_tentative(1)
        assert [line.split()[:2] for line in tail.take(2)] == [["1", "tentative"]] * 2
        # The output of the second one is stable.
        assert tail.take(1) == ["1  -- undo: drop from epoch 1 on"]
        assert [line.split()[:2] for line in tail.take(3)] == [["1", "corrected"]] * 3
        assert tail.take(1) == ["1  -- corrected through epoch 1"]
        second.append(2)
        assert [line.split()[0] for line in tail.take(3)] == ["2"] * 3
        first.correct(1, 2, 3)
        second.server.stop()
        assert [line.split()[0] for line in tail.take(3)] == ["3"] * 3
    finally:
        code, errors = tail.stop()
        first.server.stop()
    assert code == 0, errors
    assert f"{addresses[1]} cannot be read" in errors or f"{addresses[1]}: " in errors


class ServedCluster(FakeApiServer):
    """The API server of a `FakeCluster`."""

    def __init__(self, cluster: FakeCluster) -> None:
        super().__init__(Observed("running"))
        self._cluster = cluster

    def answer(self, path: str, query: dict[str, list[str]]) -> tuple[int, dict[str, Any]]:
        if path == f"{TOPOLOGIES}/t":
            return 200, self._cluster.topology("t")
        if path.endswith("/pods"):
            return 200, {"items": list(self._cluster.pods)}
        return super().answer(path, query)


@pytest.mark.process
@pytest.mark.timeout(180)
def test_rows_of_an_edited_query_come_from_its_new_pods(tmp_path: Path) -> None:
    """The port of stream sinks is fixed, so each pod has an address of its own."""
    cluster, addresses = FakeCluster(partitions=1), ("127.0.71.1", "127.0.71.2")
    old, new = (
        Task(tmp_path / address, address=address, port=STREAM_SINK_PORT) for address in addresses
    )
    old.append(0)
    cluster.add(cluster.segment, 0, 0, addresses[0])
    with served(ServedCluster(cluster), tmp_path) as kubeconfig:
        tail = Process("--kubeconfig", str(kubeconfig), "--context", "test", "--from-epoch", "0")
        try:
            assert [line.split()[0] for line in tail.take(3)] == ["0"] * 3
            before = cluster.segment
            cluster.document["spec"]["operators"][0]["window"]["size"] = "2h"
            cluster.document["metadata"]["generation"] += 1
            assert cluster.segment != before
            new.log.start_at(5)
            new.append(5)
            cluster.pods.clear()
            cluster.add(cluster.segment, 0, 0, addresses[1])
            old.server.stop()
            assert [line.split()[0] for line in tail.take(3)] == ["5"] * 3
            new.append(6)
            assert [line.split()[0] for line in tail.take(3)] == ["6"] * 3
        finally:
            code, errors = tail.stop()
            old.server.stop()
            new.server.stop()
    assert code == 0, errors
    assert "begins with epoch 5" in errors
