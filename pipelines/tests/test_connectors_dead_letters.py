"""Bad records in a directory: each once, whoever finds them and however often."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.connectors.dead_letters import DeadLetter, DeadLetterFiles
from rekindle.errors import SourceFailed

ONE, OTHER = (DeadLetter("t", 0, n, None, None, b"v", "wrong") for n in (1, 2))


def letters_in(directory: Path, uid: str = "uid", operator: str = "op") -> DeadLetterFiles:
    return DeadLetterFiles(f"file://{directory}", "clicks", operator, 0, uid)


def test_replicas_and_replays_write_each_cut_once(tmp_path: Path) -> None:
    for replica in (letters_in(tmp_path), letters_in(tmp_path)):
        replica.put(7, [ONE])
        replica.put(7, [ONE])
        replica.put(12, [OTHER, ONE])
    files = sorted(tmp_path.glob("*.jsonl"))
    assert [path.name for path in files] == [
        f"clicks-op-p000-e{epoch:012d}.jsonl" for epoch in (7, 12)
    ]
    assert [path.read_bytes() for path in files] == [
        ONE.line(),
        OTHER.line() + ONE.line(),
    ]


def test_another_definition_of_the_source_has_files_of_its_own(tmp_path: Path) -> None:
    letters_in(tmp_path).put(7, [ONE])
    letters_in(tmp_path, operator="other").put(7, [OTHER])
    assert len(list(tmp_path.glob("*.jsonl"))) == 2


def test_a_directory_of_another_topology_is_refused(tmp_path: Path) -> None:
    letters_in(tmp_path).put(7, [ONE])
    with pytest.raises(SourceFailed, match=r"source clicks: deadLetters: .*another url"):
        letters_in(tmp_path, uid="other").put(7, [ONE])


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceFailed, match="deadLetters"):
        letters_in(tmp_path / "file").put(7, [ONE])
