"""The archive of Spark's JVM in the cache: whole, or made anew."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness import archive


def test_an_archive_whose_training_was_interrupted_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Path] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if command[1] == "-c":
            return subprocess.CompletedProcess(command, 0, stdout="0123456789abcdef0\n")
        path = Path(command[-1])
        trained.append(path)
        path.touch()
        path.with_name(path.name + ".key").touch()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path))
    monkeypatch.setattr(archive.subprocess, "run", run)
    (tmp_path / "appcds").mkdir()
    (tmp_path / "appcds" / "spark-0123456789abcdef.jsa").touch()
    first = archive.ensure_cds_archive(tmp_path, print)
    assert trained == [first]
    assert archive.ensure_cds_archive(tmp_path, print) == first
    assert trained == [first]
