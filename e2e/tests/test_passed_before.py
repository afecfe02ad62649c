"""Tests of the test platform run again once a file that they test has changed."""

from __future__ import annotations

import os
from pathlib import Path

import passed_before
import pytest


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one part, in place of `rekindle_testing`."""
    monkeypatch.setattr(passed_before, "ROOT", tmp_path)
    monkeypatch.setattr(passed_before, "_SOURCES", tmp_path)
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "a.py").write_text("a = 1\n")
    (tmp_path / "other.py").write_text("b = 1\n")
    return tmp_path


def version(parts: Path) -> str:
    passed_before.version.cache_clear()
    return passed_before.version(("part",), (parts / "other.py",))


@pytest.mark.parametrize("changed", ["part/a.py", "other.py", "part/new.py", "part/deep/new.py"])
def test_a_changed_file_is_another_version(parts: Path, changed: str) -> None:
    before = version(parts)
    assert version(parts) == before
    at = parts / changed
    at.parent.mkdir(exist_ok=True)
    at.write_text("c = 2\n")
    assert version(parts) != before


def test_compiled_files_and_times_are_no_other_version(parts: Path) -> None:
    before = version(parts)
    (parts / "part/__pycache__").mkdir()
    (parts / "part/__pycache__/a.pyc").write_text("compiled")
    os.utime(parts / "part/a.py", (0, 0))
    assert version(parts) == before


def test_a_part_that_does_not_exist_is_an_error(parts: Path) -> None:
    with pytest.raises(pytest.UsageError, match="gone does not exist"):
        passed_before.version(("gone",), ())


def test_versions_that_are_long_unused_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path))
    for version, age_days in (("old", 31), ("new", 29)):
        at = tmp_path / "passed" / version / "test"
        at.parent.mkdir(parents=True)
        at.touch()
        os.utime(at, (1e9 - age_days * 86_400,) * 2)
    passed_before.forget_old_versions(1e9)
    assert [at.parent.name for at in tmp_path.glob("passed/*/*")] == ["new"]
