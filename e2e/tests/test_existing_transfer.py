"""Files to and from a volume by pods: the pods' program runs here, on a directory."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rekindle_testing.harness.existing_cluster import in_pod, transfer
from rekindle_testing.harness.existing_cluster.transfer import TransferError, Volume, pod_manifest


class Core:
    """The part of the API that a volume uses. A pod has ended when it was created."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self.root, self.scratch = root, scratch
        self.maps: dict[str, bytes] = {}
        self.logs: dict[str, str] = {}
        self.phases: dict[str, str] = {}
        self.created: list[str] = []

    def create_namespaced_config_map(self, namespace: str, body: dict[str, Any]) -> None:
        (item,) = body["binaryData"].items()
        self.maps[item[0]] = base64.b64decode(item[1])

    def delete_namespaced_config_map(self, name: str, namespace: str, **_: object) -> None:
        del self.maps[name]

    def create_namespaced_pod(self, namespace: str, body: dict[str, Any]) -> None:
        name = body["metadata"]["name"]
        self.created.append(name)
        parts = self.scratch / name
        parts.mkdir()
        for volume in body["spec"]["volumes"]:
            for source in volume.get("projected", {}).get("sources", ()):
                key = source["configMap"]["name"]
                (parts / key).write_bytes(self.maps[key])
        _, _, program, _, _, *words = body["spec"]["containers"][0]["args"]
        command = [sys.executable, "-c", program, str(self.root), str(parts), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.logs[name] = done.stderr + done.stdout
        self.phases[name] = "Failed" if done.returncode else "Succeeded"

    def read_namespaced_pod(self, name: str, namespace: str) -> Any:
        return SimpleNamespace(status=SimpleNamespace(phase=self.phases[name]))

    def delete_namespaced_pod(self, name: str, namespace: str, **_: object) -> None:
        del self.phases[name]


@pytest.fixture
def core(tmp_path: Path) -> Core:
    (tmp_path / "volume").mkdir()
    (tmp_path / "scratch").mkdir()
    return Core(tmp_path / "volume", tmp_path / "scratch")


@pytest.fixture
def volume(core: Core) -> Volume:
    return Volume(core, "tests", "claim", "image:1", core.logs.__getitem__)  # type: ignore[arg-type]


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.mark.process
def test_a_folder_arrives_in_several_config_maps(
    core: Core, volume: Volume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_CONFIG_MAP_PART_BYTES", 50)
    _write(tmp_path / "local/input/a.csv", bytes(range(256)) * 4)
    _write(tmp_path / "local/input/deep/b.csv", b"b")
    volume.write(tmp_path / "local", "input")
    assert (core.root / "input/a.csv").read_bytes() == bytes(range(256)) * 4
    assert (core.root / "input/deep/b.csv").read_bytes() == b"b"
    assert (core.maps, core.phases) == ({}, {})


@pytest.mark.process
def test_a_single_file_replaces_the_one_before(core: Core, volume: Volume, tmp_path: Path) -> None:
    for content in (b"first", b"second"):
        _write(tmp_path / "local/rows.json", content)
        volume.write(tmp_path / "local", "rows.json")
    assert (core.root / "rows.json").read_bytes() == b"second"


@pytest.mark.process
@pytest.mark.parametrize("part_bytes", [60, 10_000])
def test_a_read_folder_is_as_on_the_volume(
    core: Core, volume: Volume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(transfer, "_LOG_PART_BYTES", part_bytes)
    _write(core.root / "t/output/q/0-0-5.parquet", b"rows")
    _write(core.root / "t/other", b"other")
    _write(tmp_path / "local/t/output/q/old", b"of before")
    volume.read("t/output", tmp_path / "local")
    found = [p for p in (tmp_path / "local").rglob("*") if p.is_file()]
    assert found == [tmp_path / "local/t/output/q/0-0-5.parquet"]
    assert found[0].read_bytes() == b"rows"
    written = (core.root / "t/output/q/0-0-5.parquet").stat().st_mtime
    assert found[0].stat().st_mtime == pytest.approx(written, abs=1)
    assert (len(core.created) > 1) == (part_bytes == 60)
    assert volume.entries() == ["t"]


@pytest.mark.process
def test_a_folder_that_is_not_there_is_empty(volume: Volume, tmp_path: Path) -> None:
    volume.read("nothing", tmp_path / "local")
    assert not (tmp_path / "local/nothing").exists()


@pytest.mark.process
def test_a_volume_is_moved_and_cleared(core: Core, volume: Volume) -> None:
    _write(core.root / "t/checkpoints/1", b"1")
    (core.root / "lost+found").mkdir()
    volume.move("t/checkpoints", "t/removed")
    assert (core.root / "t/removed/1").exists()
    volume.clear()
    assert volume.entries() == []
    assert [p.name for p in core.root.iterdir()] == ["lost+found"]


@pytest.mark.process
def test_a_failed_pod_shows_its_log_and_is_deleted(core: Core, volume: Volume) -> None:
    with pytest.raises(TransferError, match="FileNotFoundError"):
        volume.move("missing", "other")
    assert core.phases == {}


def test_a_damaged_log_is_noticed(core: Core, volume: Volume, tmp_path: Path) -> None:
    answer = json.dumps({"size": 3, "sha256": "0", "data": base64.b64encode(b"abc").decode()})
    damaged = Volume(core, "tests", "claim", "image:1", lambda _: answer)  # type: ignore[arg-type]
    with pytest.raises(TransferError, match="damaged"):
        damaged.read("t", tmp_path)


def test_an_archive_cannot_leave_the_directory(tmp_path: Path) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("../outside"))
    content.seek(0)
    with tarfile.open(fileobj=content) as tar, pytest.raises(TransferError, match="outside"):
        transfer._extract(tar, tmp_path / "base")


def test_pods_have_the_group_of_the_volume() -> None:
    plain = pod_manifest("p", "claim", "image:1", ["list"], [], None)["spec"]
    assert "fsGroup" not in plain["securityContext"]
    spec = pod_manifest("p", "claim", "image:1", ["list"], [], 10001)["spec"]
    assert spec["securityContext"]["fsGroup"] == 10001


def test_the_program_has_nothing_that_kubernetes_expands() -> None:
    assert "$(" not in Path(in_pod.__file__).read_text()
