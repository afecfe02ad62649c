"""The evidence of a failure on an embedded cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from rekindle_testing.embedded.errors import EmbeddedError
from rekindle_testing.harness.cluster import EmbeddedCluster
from rekindle_testing.harness.evidence import keep_evidence
from rekindle_testing.harness.nodes import ProcessNodes
from rekindle_testing.harness.pod_log_archive import PodLogArchive


class _Cluster:
    """Has a sink's file, a component's log, and an API server that may be gone."""

    def __init__(self, directory: Path, *, responds: bool) -> None:
        self.control_plane = self
        self.shared = directory / "shared"
        (self.shared / "meters").mkdir(parents=True)
        (self.shared / "meters" / "rows.jsonl").write_text("{}\n")
        self._responds = responds

    def kubectl(self, *arguments: str) -> str:
        if not self._responds:
            raise EmbeddedError("connection refused")
        return " ".join(arguments)

    def keep_logs(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "etcd.log").write_text("started")


@pytest.mark.parametrize("responds", [True, False])
def test_evidence_is_kept_also_without_the_api(responds: bool, tmp_path: Path) -> None:
    cluster: Any = _Cluster(tmp_path, responds=responds)
    evidence = tmp_path / "evidence"
    log_archive = PodLogArchive(ProcessNodes(), tmp_path / "nodes", tmp_path / "kept")
    keep_evidence(evidence, cast(EmbeddedCluster, cluster), {"failure.txt": "stuck"}, log_archive)
    assert (evidence / "failure.txt").read_text() == "stuck\n"
    assert (evidence / "logs" / "etcd.log").read_text() == "started"
    assert (evidence / "shared" / "meters" / "rows.jsonl").exists()
    assert (evidence / "events.txt").exists() == responds
    assert (evidence / "objects.yaml").exists() == responds
