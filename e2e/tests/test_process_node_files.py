"""What a process node writes and reads on disk: logs, volumes, memory; no node needed."""

import asyncio
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from rekindle_testing.embedded.process_node import logs, payloads, rootfs
from rekindle_testing.embedded.process_node.api import ApiClient
from rekindle_testing.embedded.process_node.environment import ConfigError, ObjectReference, Objects
from rekindle_testing.embedded.process_node.fields import DownwardValues
from rekindle_testing.embedded.process_node.indexes import IndexReservation, IndexTakenError
from rekindle_testing.embedded.process_node.logs import LogQuery
from rekindle_testing.embedded.process_node.memory import ProcessTree
from rekindle_testing.embedded.process_node.objects import TokenReader
from rekindle_testing.embedded.process_node.payloads import File
from rekindle_testing.embedded.process_node.shim import Log, timestamp

DOWNWARD_VALUES = DownwardValues(
    pod_ip="127.7.1.1", host_ip="127.7.0.1", allocatable={"cpu": "4", "memory": "8Gi"}
)
POD: dict[str, Any] = {
    "metadata": {"name": "p", "namespace": "d", "uid": "u", "labels": {"a": "1"}},
    "spec": {"containers": [{"name": "c", "resources": {"limits": {"cpu": "2"}}}]},
}


# --- logs -------------------------------------------------------------------


def read(path: Path, **query: Any) -> bytes:
    async def collect() -> bytes:
        pieces = [piece async for piece in logs.read(path, LogQuery(**query), lambda: True)]
        return b"".join(pieces)

    return asyncio.run(collect())


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    log = Log(tmp_path / "log", limit_bytes=10_000)
    log.add("stdout", b"one\ntwo\nthr")
    log.add("stderr", b"oops\n")
    log.add("stdout", b"ee\nend")
    log.close()
    return tmp_path / "log"


def test_lines_are_read_complete_and_in_order(log_file: Path) -> None:
    assert read(log_file) == b"one\ntwo\noops\nthree\nend"


def test_tail_and_limit_cut_the_log(log_file: Path) -> None:
    assert read(log_file, tail_lines=2) == b"three\nend"
    assert read(log_file, tail_lines=0) == b""
    assert read(log_file, limit_bytes=5) == b"one\nt"


def test_timestamps_and_since_use_the_time_of_each_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    stamps = [timestamp(second * 10**9) for second in (100, 200)]
    path.write_text("".join(f"{stamp} stdout F line\n" for stamp in stamps))
    assert read(path, since=150.0) == b"line\n"
    assert read(path, timestamps=True).startswith(b"1970-01-01T00:01:40.000000000Z line")


def test_a_full_log_is_rotated_and_both_files_are_read(tmp_path: Path) -> None:
    log = Log(tmp_path / "log", limit_bytes=500)
    for number in range(15):
        log.add("stdout", b"line %d\n" % number)
    log.close()
    assert (tmp_path / "log.1").exists()
    assert read(tmp_path / "log", tail_lines=12).splitlines()[-1] == b"line 14"


def test_a_carriage_return_ends_no_line_of_a_rotated_log(tmp_path: Path) -> None:
    log = Log(tmp_path / "log", limit_bytes=1)
    log.add("stdout", b"10 %\r100 %\n")
    log.close()
    assert (tmp_path / "log.1").exists()
    assert read(tmp_path / "log") == b"10 %\r100 %\n"


def test_follow_misses_nothing_of_a_rotation_while_it_sends(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"t1 stdout F a\nt1 stdout F b\n")

    async def follow() -> list[bytes]:
        pieces = logs.read(path, LogQuery(follow=True), lambda: True)
        found = [await anext(pieces)]  # the client is slow
        with path.open("ab") as file:
            file.write(b"t1 stdout F c\n")
        path.rename(tmp_path / "log.1")
        path.write_bytes(b"t1 stdout F d\n")
        return [*found, *[piece async for piece in pieces]]

    assert asyncio.run(follow()) == [b"a\n", b"b\n", b"c\n", b"d\n"]


def test_follow_continues_after_a_rotation_until_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_POLL_S", 0.06)

    async def follow() -> list[bytes]:
        log = Log(tmp_path / "log", limit_bytes=400)
        over = False
        seen: list[bytes] = []
        numbers = itertools.count()
        log.add("stdout", b"line %d\n" % next(numbers))

        async def write() -> None:
            nonlocal over
            while len(seen) < 20:
                log.add("stdout", b"line %d\n" % next(numbers))
                await asyncio.sleep(0.02)
            log.close()
            over = True

        writer = asyncio.create_task(write())
        async for piece in logs.read(tmp_path / "log", LogQuery(follow=True), lambda: over):
            seen.append(piece)
        await writer
        return seen

    lines = asyncio.run(follow())
    assert lines == [b"line %d\n" % number for number in range(len(lines))]
    assert len(lines) >= 20
    assert (tmp_path / "log.1").exists(), "the log was rotated"


def test_the_query_of_kubectl_is_understood() -> None:
    query = {"follow": "true", "tailLines": "5", "sinceSeconds": "10", "previous": "true"}
    parsed = LogQuery.parse(query, now=100.0)
    assert parsed == LogQuery(follow=True, previous=True, tail_lines=5, since=90.0)
    assert LogQuery.parse({"sinceTime": "1970-01-01T00:01:00Z"}, 0.0).since == 60.0


# --- volumes ----------------------------------------------------------------


def test_a_projection_joins_its_sources() -> None:
    volume = {
        "name": "v",
        "projected": {
            "defaultMode": 0o440,
            "sources": [
                {"serviceAccountToken": {"path": "token"}},
                {"configMap": {"name": "cm", "items": [{"key": "a", "path": "x/a"}]}},
                {"secret": {"name": "s", "optional": True}},
                {
                    "downwardAPI": {
                        "items": [
                            {"path": "ip", "fieldRef": {"fieldPath": "status.podIP"}},
                            {
                                "path": "cpu",
                                "resourceFieldRef": {
                                    "containerName": "c",
                                    "resource": "limits.cpu",
                                },
                            },
                        ]
                    }
                },
            ],
        },
    }
    objects: Objects = {ObjectReference("ConfigMap", "cm"): {"data": {"a": "1", "b": "2"}}}
    files = payloads.payload(POD, volume, objects, {"token": "t"}, DOWNWARD_VALUES)
    assert files == {
        "token": File(b"t", 0o600),
        "x/a": File(b"1", 0o440),
        "ip": File(b"127.7.1.1", 0o440),
        "cpu": File(b"2", 0o440),
    }
    assert set(payloads.references(volume)) == {
        ObjectReference("ConfigMap", "cm"),
        ObjectReference("Secret", "s"),
    }


def test_a_missing_key_of_a_volume_is_named() -> None:
    source = {"name": "cm", "items": [{"key": "z", "path": "z"}]}
    objects: Objects = {ObjectReference("ConfigMap", "cm"): {"data": {}}}
    with pytest.raises(ConfigError, match="no key 'z'"):
        payloads.payload(POD, {"name": "v", "configMap": source}, objects, {}, DOWNWARD_VALUES)


def test_a_volume_is_updated_atomically(tmp_path: Path) -> None:
    payloads.write(tmp_path, {"a": File(b"1"), "d/b": File(b"2")})
    first = (tmp_path / "..data").resolve()
    payloads.write(tmp_path, {"a": File(b"1"), "d/b": File(b"2")})
    assert (tmp_path / "..data").resolve() == first
    payloads.write(tmp_path, {"a": File(b"3"), "c": File(b"4", 0o600)})
    assert not first.exists()
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith("..")) == ["a", "c"]
    assert (tmp_path / "a").read_bytes() == b"3"
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o600


def test_a_volume_is_updated_after_a_writer_was_killed(tmp_path: Path) -> None:
    payloads.write(tmp_path, {"a": File(b"1")})
    (tmp_path / "..data_new").symlink_to("..1")
    payloads.write(tmp_path, {"a": File(b"2")})
    assert (tmp_path / "a").read_bytes() == b"2"


# --- the root of a container ------------------------------------------------


def test_disks_outside_of_system_folders_and_the_nodes_data_get_an_overlay() -> None:
    points = ["/", "/dev/shm", "/run", "/runner", "/data", "/data/node-1", "/data2"]
    lines = [f"1 1 8:1 / {point} rw shared:1 - ext4 /dev/vda rw" for point in points]
    overlaid = rootfs.storage_below_root("\n".join(lines), "/data")
    assert overlaid == ["/data2", "/runner"]


# --- tokens -----------------------------------------------------------------


class Issuer:
    """Issues a new token for each request, and records the requests."""

    def __init__(self) -> None:
        self.requested: list[dict[str, Any]] = []

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.requested.append(body["spec"])
        return {"status": {"token": f"token {len(self.requested)}"}}


def test_a_token_is_renewed_at_80_percent_of_its_lifetime() -> None:
    issuer, now = Issuer(), 0.0
    tokens = TokenReader(cast(ApiClient, issuer), clock=lambda: now)
    source = {"path": "t", "expirationSeconds": 1000, "audience": "store"}

    async def look() -> list[str]:
        nonlocal now
        seen = []
        for now in (0.0, 799.0, 801.0):  # noqa: B007 - the clock reads it
            seen.append(await tokens.token(POD, source))
        return seen

    assert asyncio.run(look()) == ["token 1", "token 1", "token 2"]
    assert issuer.requested[0] == {
        "expirationSeconds": 1000,
        "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u"},
        "audiences": ["store"],
    }


# --- processes and addresses ------------------------------------------------


def test_memory_is_that_of_the_whole_tree_and_shared_pages_count_once() -> None:
    script = (
        "import os, sys; data = bytearray(os.urandom(30 << 20));\n"
        "for _ in range(3): os.fork() or (sys.stdin.read(), os._exit(0))\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-S", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        tree = ProcessTree()
        pids = [child.pid, *tree.descendants(child.pid)]
        assert len(pids) == 4
        assert child.pid in tree.descendants(os.getpid())
        assert tree.exceeds(pids, 30 << 20)
        # Four copies would be 120 MiB.
        assert not tree.exceeds(pids, 90 << 20)
        child.communicate()


def test_an_address_range_has_one_owner_at_a_time() -> None:
    """The index is the second number of the addresses."""
    first = IndexReservation(None)
    with pytest.raises(IndexTakenError, match=f"index {first.index}"):
        IndexReservation(first.index)
    first.release()
    IndexReservation(first.index).release()
    with pytest.raises(IndexTakenError, match=r"1\.\.254"):
        IndexReservation(255)
