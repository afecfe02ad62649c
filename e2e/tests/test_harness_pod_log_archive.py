"""Logs outlive the nodes that wrote them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rekindle_testing.harness.nodes import ProcessNodes
from rekindle_testing.harness.pod_log_archive import PodLogArchive


def _write(nodes: Path, text: str, name: str = "log") -> None:
    pod = nodes / "node-1" / "data" / "pods" / "uid-1"
    (pod / "containers" / "task" / "0").mkdir(parents=True, exist_ok=True)
    (pod / "pod.json").write_text(json.dumps({"metadata": {"name": "a-task"}}))
    (pod / "containers" / "task" / "0" / name).write_text(text)


def _kept(directory: Path) -> list[str]:
    return sorted(p.read_text() for p in (directory / "a-task").glob("task-0.log*"))


def test_the_log_of_a_lost_node_is_kept_to_its_end(tmp_path: Path) -> None:
    log_archive = PodLogArchive(ProcessNodes(), tmp_path / "nodes", tmp_path / "kept")
    _write(tmp_path / "nodes", "first")
    log_archive.preserve_new()
    _write(tmp_path / "nodes", "first and last")
    shutil.rmtree(tmp_path / "nodes")
    log_archive.copy_to(tmp_path / "evidence")
    assert _kept(tmp_path / "evidence") == ["first and last"]


def test_a_rotated_log_is_kept_beside_the_new_one(tmp_path: Path) -> None:
    log_archive = PodLogArchive(ProcessNodes(), tmp_path / "nodes", tmp_path / "kept")
    _write(tmp_path / "nodes", "old")
    log_archive.preserve_new()
    log = tmp_path / "nodes" / "node-1" / "data" / "pods" / "uid-1" / "containers" / "task" / "0"
    (log / "log").rename(log / "log.1")
    _write(tmp_path / "nodes", "new")
    log_archive.copy_to(tmp_path / "evidence")
    assert _kept(tmp_path / "evidence") == ["new", "old"]


def test_a_pod_without_its_record_is_skipped(tmp_path: Path) -> None:
    log_archive = PodLogArchive(ProcessNodes(), tmp_path / "nodes", tmp_path / "kept")
    _write(tmp_path / "nodes", "text")
    (tmp_path / "nodes" / "node-1" / "data" / "pods" / "uid-1" / "pod.json").unlink()
    log_archive.copy_to(tmp_path / "evidence")
    assert not (tmp_path / "evidence").exists()
