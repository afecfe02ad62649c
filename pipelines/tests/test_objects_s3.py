"""Put-if-absent on S3: real HTTP and s3fs against moto's server, which knows If-None-Match."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import boto3
import pyarrow as pa
import pytest
from s3fs import S3FileSystem
from state_parts import count_state, value_in_state

from rekindle.checkpoints import Manifest, ManifestStore, StateStore, Store
from rekindle.connectors.registry import open_sink
from rekindle.errors import StoreError
from rekindle.objects import RemoteObjects, numbered_name, open_objects
from rekindle.streams.epochs import BatchKind, EpochBatch
from rekindle.topology.spec import SinkSpec
from rekindle_testing.waiting import eventually

pytestmark = pytest.mark.process
MIB = 2**20


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    # Not in processes that only collect this module.
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer

    put, lock = S3Response.put_object, Lock()

    def put_alone(response: S3Response) -> Any:
        """moto looks for the object, and then writes it; S3 does both as one."""
        with lock:
            return put(response)

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(S3Response, "put_object", put_alone)
        yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket for each test: s3fs caches listings."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server,
    }.items():
        monkeypatch.setenv(name, value)
    name = f"rekindle-{uuid.uuid4().hex}"
    boto3.client("s3").create_bucket(Bucket=name)
    return f"s3://{name}"


def test_of_many_writers_one_wins(bucket: str) -> None:
    places = [open_objects(f"{bucket}/place") for _ in range(8)]
    for place in places:
        place.open_root("_marker.json", b"{}")
    with ThreadPoolExecutor(len(places)) as pool:
        won = list(pool.map(lambda n: places[n].put("a/x", str(n).encode()), range(len(places))))
    assert sum(won) == 1
    assert places[0].get("a/x") == str(won.index(True)).encode()
    assert [info.name for info in places[0].list("a/")] == ["a/x"]
    places[0].delete("a/x")
    places[1].delete("a/x")
    assert not places[2].exists("a/x")


def test_a_store_that_ignores_the_condition_is_refused(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(f"{bucket}/checkpoints")
    call = S3FileSystem._call_s3

    async def without_header(self: Any, method: str, *args: Any, **options: Any) -> Any:
        options.pop("IfNoneMatch", None)
        return await call(self, method, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(S3FileSystem, "_call_s3", without_header)
        for url in (f"{bucket}/checkpoints", f"{bucket}/others"):
            with pytest.raises(StoreError, match="honours If-None-Match"):
                Store(url)
    assert Store(f"{bucket}/checkpoints").id == store.id


def test_names_are_searched_and_listed_by_prefix(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = open_objects(f"{bucket}/place")
    for number in (1, 998, 1001, 1002):
        place.put(numbered_name("a/q-e", number, ".x"), b"")
    place.put(numbered_name("a/q-e", 1003, ".y"), b"")
    assert isinstance(place, RemoteObjects)
    found: list[int] = []
    find = place._fs.find

    def count(*args: Any, **options: Any) -> Any:
        found.append(len(listed := find(*args, **options)))
        return listed

    monkeypatch.setattr(place._fs, "find", count)
    assert place.newest_number("a/q-e", ".x", after=0, through=1500) == 1002
    assert place.newest_number("a/q-e", ".x", after=500, through=1000) == 998
    assert place.newest_number("a/q-e", ".x", after=1002, through=1500) is None
    assert found == [3, 3, 2, 3], "the server filters"
    assert [info.name for info in place.list("a/q-e000000002")] == []
    assert len(place.list("a/q-e00000000100")) == 3


def test_multipart_uploads_are_conditional_too(bucket: str) -> None:
    place = open_objects(f"{bucket}/place")
    place.open_root("_marker.json", b"{}")
    big = b"x" * (60 * MIB)
    assert place.put("big", big)
    assert not place.put("big", big[:-1])
    assert place.get("big") == big


def test_a_checkpoint_is_committed_once_and_deleted(bucket: str) -> None:
    store = Store(f"{bucket}/checkpoints")
    states, manifests = StateStore(store, "uid"), ManifestStore(store, "uid")
    for seq in range(3):
        if seq == 2:  # S3 has modification times in whole seconds
            second = int(time.time())
            eventually(lambda s=second: int(time.time()) > s)  # type: ignore[misc]
        ref = states.save(
            "seg",
            0,
            epoch=seq * 10 + 9,
            watermark=0,
            operator_ids=("op",),
            state=count_state("op", seq),
            previous=None,
        )
        manifest = Manifest(
            seq, ref.epoch, generation=1, fence=1, time="", entries={"seg/0": (ref,)}
        )
        assert manifests.write(manifest)
        assert manifests.write(manifest), "writing the same again is not a lost race"
    rival = Manifest(2, 99, generation=1, fence=7, time="", entries={})
    assert not ManifestStore(Store(f"{bucket}/checkpoints"), "uid").write(rival)
    manifests.collect_garbage(retain=1)
    newest = manifests.newest()
    assert newest is not None
    assert manifests.seqs() == [2]
    assert ref.object is not None
    assert value_in_state(states.load(ref.object)[1], "op") == 2


@pytest.mark.parametrize("format", ["parquet", "json"])
def test_a_sink_takes_each_epoch_once(bucket: str, format: str) -> None:
    spec = SinkSpec.model_validate({"files": {"url": f"{bucket}/out", "format": format}})
    rows = pa.table({"n": [1, 2]})
    first, second = (open_sink("q", spec, 0, "uid", rows.schema) for _ in range(2))
    batch = EpochBatch("s", 0, 7, 0, rows, "", BatchKind.STABLE)
    assert first.write(batch)
    assert not second.write(batch)
    assert open_sink("q", spec, 0, "uid", rows.schema).last_epoch() == 7
