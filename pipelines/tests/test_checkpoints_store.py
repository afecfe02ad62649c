"""The store: put-if-absent, moved roots, transient errors, and what it refuses."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from rekindle.checkpoints.store import Store
from rekindle.errors import ObjectMissing, StoreError
from rekindle.objects import (
    LocalObjects,
    ObjectInfo,
    Objects,
    Retry,
    numbered_name,
    open_objects,
)
from rekindle_testing.waiting import eventually


class FailingObjects:
    """Faults for tests: `fault(operation, name)` raises what the file system would."""

    def __init__(self, inner: Objects, fault: Callable[[str, str], None]) -> None:
        self.url = inner.url
        self._inner = inner
        self._fault = fault

    def open_root(self, name: str, data: bytes | None) -> bytes:
        self._fault("open_root", name)
        return self._inner.open_root(name, data)

    def put(self, name: str, data: bytes) -> bool:
        self._fault("put", name)
        return self._inner.put(name, data)

    def get(self, name: str) -> bytes:
        self._fault("get", name)
        return self._inner.get(name)

    def exists(self, name: str) -> bool:
        self._fault("exists", name)
        return self._inner.exists(name)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        self._fault("list", prefix)
        return self._inner.list(prefix)

    def newest_number(self, stem: str, suffix: str, after: int, through: int) -> int | None:
        self._fault("list", stem)
        return self._inner.newest_number(stem, suffix, after, through)

    def delete(self, name: str) -> None:
        self._fault("delete", name)
        self._inner.delete(name)


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/s" if request.param == "file" else f"memory://{uuid.uuid4().hex}/s"


def test_an_object_is_created_once(url: str) -> None:
    store = Store(url)
    assert store.put("a/b/c", b"1")
    assert not store.put("a/b/c", b"2")
    assert store.get("a/b/c") == b"1"
    assert store.exists("a/b/c")
    assert not store.exists("a/b/d")
    assert not Store(url).put("a/b/c", b"3")


def test_objects_are_listed_by_prefix_and_deleted(url: str) -> None:
    store = Store(url)
    for name in ("a/2", "a/10", "ab", "b/c/d"):
        store.put(name, b"xyz")
    assert [i.name for i in store.list()] == ["a/10", "a/2", "ab", "b/c/d"]
    assert [i.name for i in store.list("a")] == ["a/10", "a/2", "ab"]
    assert [i.name for i in store.list("a/1")] == ["a/10"]
    assert store.list("nothing/") == []
    assert store.list("ab")[0].bytes == 3
    assert store.list("ab")[0].modified > 1e9
    store.delete("ab")
    store.delete("ab")
    assert [i.name for i in store.list("a")] == ["a/10", "a/2"]


def test_a_missing_object_raises_an_error_with_the_url(url: str) -> None:
    with pytest.raises(ObjectMissing, match=url):
        Store(url).get("x")


def test_one_of_many_writers_wins(url: str) -> None:
    payloads = [bytes([i]) * 200_000 for i in range(16)]
    seen: list[bytes] = []
    done = threading.Event()
    reader_store = Store(url)

    def read() -> None:
        while not done.is_set():
            if reader_store.exists("k/o"):
                seen.append(reader_store.get("k/o"))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with ThreadPoolExecutor(16) as pool:
            won = list(pool.map(lambda p: Store(url).put("k/o", p), payloads))
    finally:
        done.set()
        reader.join()
    # fsspec's in-memory file system checks and creates in two steps; real stores do it in one
    assert sum(won) == 1 or (url.startswith("memory") and sum(won) >= 1)
    winner = reader_store.get("k/o")
    assert winner in payloads
    if url.startswith("file"):
        assert payloads.index(winner) == won.index(True)
        assert set(seen) <= {winner}


def test_a_root_that_is_moved_away_fails_writes_until_it_is_back(tmp_path: Path) -> None:
    root, away = tmp_path / "store", tmp_path / "away"
    store = Store(f"file://{root}")
    store.put("x", b"1")
    root.rename(away)
    for action in (lambda: store.put("y", b"1"), lambda: store.list("")):
        with pytest.raises(StoreError, match="is gone"):
            action()
    assert not root.exists()
    away.rename(root)
    assert store.put("y", b"1")


def test_a_store_that_may_not_be_written_names_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(f"file://{tmp_path}", retry=Retry(attempts=1))

    def refuse(path: object, *arguments: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)  # root ignores permissions
    with pytest.raises(StoreError, match=f"Permission denied.*user {os.getuid()}.*fsGroup"):
        store.put("a", b"")


def test_a_missing_store_is_an_error_without_create(url: str) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        Store(url, create=False)
    Store(url).put("x", b"1")
    assert Store(url, create=False).get("x") == b"1"


def test_another_store_at_the_same_url_is_detected(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = Store(f"file://{root}")
    root.rename(tmp_path / "away")
    other = Store(f"file://{root}")
    with pytest.raises(StoreError, match="was replaced"):
        store.put("y", b"1")
    assert other.put("y", b"1")


def test_a_file_in_place_of_the_root_fails_every_call(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = Store(f"file://{root}")
    store.put("x", b"1")
    root.rename(tmp_path / "away")
    root.write_text("in the way")
    with pytest.raises(StoreError):
        store.put("y", b"1")
    with pytest.raises(StoreError):
        store.get("x")
    with pytest.raises(StoreError, match=str(root)):
        Store(f"file://{root}", retry=Retry(sleep=lambda s: None))


def test_transient_errors_are_retried_with_back_off(tmp_path: Path) -> None:
    failures = [OSError(5, "Input/output error"), TimeoutError(), None]

    def fault(operation: str, name: str) -> None:
        if operation == "put" and (error := failures.pop(0)):
            raise error

    slept: list[float] = []
    objects = FailingObjects(open_objects(f"file://{tmp_path}/s"), fault)
    store = Store(objects.url, objects=objects, retry=Retry(sleep=slept.append))
    assert store.put("x", b"1")
    assert slept == [0.05, 0.2]


def test_permanent_errors_end_after_bounded_attempts(tmp_path: Path) -> None:
    def fault(operation: str, name: str) -> None:
        if operation == "put":
            raise OSError(28, "No space left on device")

    slept: list[float] = []
    objects = FailingObjects(open_objects(f"file://{tmp_path}/s"), fault)
    store = Store(objects.url, objects=objects, retry=Retry(sleep=slept.append))
    with pytest.raises(StoreError, match=r"cannot write x: .*No space left"):
        store.put("x", b"1")
    assert len(slept) == 3


def test_a_store_that_cannot_create_conditionally_is_refused() -> None:
    with pytest.raises(StoreError, match="ftp:// cannot create an object only if it is absent"):
        Store("ftp://host/x")


def test_old_temporary_files_are_removed(tmp_path: Path) -> None:
    now = 1e9
    objects = LocalObjects("file://x", tmp_path, clock=lambda: now)
    (tmp_path / "d").mkdir()
    for name, age in (("d/.old.tmp", 3600), (".new.tmp", 5), ("kept.tmp", 3600)):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (now - age, now - age))
    assert objects.remove_stale_temps() == 1, (
        "earlier versions wrote temporary files beside the objects"
    )
    assert sorted(p.name for p in tmp_path.rglob("*.tmp")) == [".new.tmp", ".tmp", "kept.tmp"]
    for name, age in ((".tmp/.old.tmp", 3600), (".tmp/.new.tmp", 5)):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (now - age, now - age))
    assert objects.remove_stale_temps() == 1
    assert [p.name for p in (tmp_path / ".tmp").iterdir()] == [".new.tmp"]


_WRITE = """
import sys
from pathlib import Path
from rekindle.objects import LocalObjects
objects = LocalObjects("file://x", Path(sys.argv[1]))
for n in range(10_000):
    objects.put(f"a/{n}", b"x" * 100_000)
"""


@pytest.mark.process
def test_a_killed_writer_leaves_whole_objects_and_old_temporary_files(tmp_path: Path) -> None:
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", _WRITE, str(tmp_path)])
        before = len(list((tmp_path / "a").glob("*")))
        eventually(lambda n=before: len(list((tmp_path / "a").glob("*"))) > n + 20)  # type: ignore[misc]
        writer.kill()
        writer.wait()
    objects = LocalObjects("file://x", tmp_path, clock=lambda: time.time() + 3600)
    assert {info.bytes for info in objects.list()} == {100_000}
    objects.remove_stale_temps("a")
    assert not list((tmp_path / "a" / ".tmp").iterdir())


def test_a_writer_whose_temporary_was_removed_writes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, calls = os.link, []

    def vanish_once(src: Path, dst: Path) -> None:
        calls.append(src)
        if len(calls) == 1:
            src.unlink()
        link(src, dst)

    monkeypatch.setattr(os, "link", vanish_once)
    store = LocalObjects("file://x", tmp_path)
    assert store.put("a", b"1")
    assert len(calls) == 2
    assert sorted(os.listdir(tmp_path)) == [".tmp", "a"]  # noqa: PTH208
    assert not list((tmp_path / ".tmp").iterdir())


def _opened(url: str) -> Objects:
    objects = open_objects(url)
    objects.open_root("_marker.json", b"{}")
    return objects


@given(
    numbers=st.sets(st.one_of(st.integers(0, 30), st.integers(0, 30_000)), max_size=8),
    after=st.integers(-1, 9000),
    through=st.one_of(st.integers(0, 40), st.integers(0, 40_000)),
)
def test_the_newest_number_is_found(numbers: set[int], after: int, through: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for url in (f"file://{directory}", f"memory://{uuid.uuid4().hex}/s"):
            objects = _opened(url)
            for number in numbers:
                objects.put(numbered_name("d/x-", number, ".a"), b"")
            for other in ("d/x-000000000001.b", "d/x-y.a", "d/x-000000000099.a.a", "d/y"):
                objects.put(other, b"")
            wanted = max((n for n in numbers if after < n <= through), default=None)
            assert objects.newest_number("d/x-", ".a", after, through) == wanted


def test_a_search_for_the_newest_number_lists_few_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = _opened(f"memory://{uuid.uuid4().hex}/s")
    for number in (*range(0, 1_500, 3), 700_000):
        objects.put(numbered_name("x-", number, ""), b"")
    listed: list[int] = []
    original = objects.list

    def count(prefix: str = "") -> list[ObjectInfo]:
        found = original(prefix)
        listed.append(len(found))
        return found

    monkeypatch.setattr(objects, "list", count)
    assert objects.newest_number("x-", "", -1, 1_250) == 1248
    assert sum(listed) <= 200
    listed.clear()
    assert objects.newest_number("x-", "", 3_000, 10**9) == 700_000
    assert len(listed) <= 100


def test_a_search_on_a_disk_reads_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = _opened(f"file://{tmp_path}")
    objects.put(numbered_name("x-", 5, ""), b"")
    monkeypatch.setattr(os, "scandir", lambda path: pytest.fail("the directory is read"))
    assert objects.newest_number("x-", "", -1, 1000) == 5
    assert objects.newest_number("x-", "", 5, 1000) is None


class RefusedByServer(Exception):
    """Like botocore's ClientError."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}}


class FakeS3(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The relevant part of s3fs: a refused conditional put is an OSError."""

    protocol = ("s3",)
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    refusals: ClassVar[list[str]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("s3://", "memory://")))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        code = FakeS3.refusals.pop(0) if FakeS3.refusals else ""
        if mode == "create" and self.exists(path):
            code = code or "PreconditionFailed"
        if code:
            raise OSError(5, "refused") from RefusedByServer(code)
        super().pipe_file(path, value)


def use(monkeypatch: pytest.MonkeyPatch, fs: FakeS3) -> None:
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url, **o: (fs, fs._strip_protocol(url)))


def test_a_refused_conditional_put_is_not_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, FakeS3())
    store = Store("s3://bucket/path", retry=Retry(sleep=lambda s: None))
    assert store.put("a/x", b"1")
    assert not store.put("a/x", b"2")
    FakeS3.refusals[:] = ["SlowDown", "InternalError"]
    assert store.put("a/y", b"2")
    FakeS3.refusals[:] = ["SlowDown"] * 4
    with pytest.raises(StoreError, match="s3://bucket/path cannot write a/z"):
        store.put("a/z", b"3")
    assert [i.name for i in store.list("a/")] == ["a/x", "a/y"]
    assert store.get("a/x") == b"1"


def test_an_s3_file_system_too_old_for_conditional_puts_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Old(FakeS3):
        def pipe_file(self, path: str, value: bytes) -> None:  # type: ignore[override]
            raise AssertionError("not reached")

    use(monkeypatch, Old())
    with pytest.raises(StoreError, match="too old to create"):
        Store("s3://bucket/path")


class ReplacingS3(FakeS3):
    """Ignores `If-None-Match: *`."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value)


def test_a_store_that_ignores_the_condition_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"s3://bucket/{uuid.uuid4().hex}"
    use(monkeypatch, ReplacingS3())
    for create in (True, True, False):
        with pytest.raises(StoreError, match=r"it replaced _rekindle_store\.json.*If-None-Match"):
            Store(url, create=create)


def test_the_marker_stays_where_the_condition_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"s3://bucket/{uuid.uuid4().hex}"
    use(monkeypatch, FakeS3())
    store = Store(url)
    use(monkeypatch, ReplacingS3())
    with pytest.raises(StoreError, match="does not create objects only if they are absent"):
        Store(url)
    use(monkeypatch, FakeS3())
    assert Store(url, create=False).id == store.id


def test_a_store_that_is_missing_is_not_created_by_the_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = f"s3://bucket/{uuid.uuid4().hex}"
    use(monkeypatch, FakeS3())
    for _ in range(2):
        with pytest.raises(StoreError, match="does not exist"):
            Store(url, create=False)
