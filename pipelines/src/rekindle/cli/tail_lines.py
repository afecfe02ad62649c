"""The lines of `rekindle tail`: rows, with a mark on tentative rows and corrections. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rekindle.stream_sinks.client import Received
    from rekindle.stream_sinks.follow import Followed

_MARKS = {"STABLE": "", "TENTATIVE": "tentative", "CORRECTED": "corrected"}


class FailureWriter:
    """Why replicas could not be read: each message once, until its partition is read again."""

    def __init__(self) -> None:
        self._said: dict[int, set[str]] = {}

    def line(self, followed: Followed) -> str | None:
        if followed.received is not None:
            self._said.pop(followed.partition, None)
            return None
        said = self._said.setdefault(followed.partition, set())
        if followed.message in said:
            return None
        said.add(followed.message)
        return f"{followed.message}; trying again"


class LineWriter:
    """Formats messages of a stream sink. Its state: which partitions are being corrected."""

    def __init__(self, partitions: int, *, as_json: bool) -> None:
        self._shows_partition = partitions > 1
        self._as_json = as_json
        self._correcting: set[int] = set()

    def lines(self, partition: int, received: Received) -> Iterator[str]:
        kind, epoch = received.kind, received.epoch
        self._shows_partition = self._shows_partition or partition > 0  # an edit has added it
        if kind == "UNDO":
            self._correcting.add(partition)
            yield self._control(partition, kind, epoch, f"undo: drop from epoch {epoch} on")
        elif kind == "REC_DONE":
            self._correcting.discard(partition)
            yield self._control(partition, kind, epoch, f"corrected through epoch {epoch}")
        else:
            shown = "CORRECTED" if kind == "STABLE" and partition in self._correcting else kind
            for row in received.rows.to_pylist():
                yield self._row(partition, shown, epoch, row)

    def _row(self, partition: int, kind: str, epoch: int, row: dict[str, Any]) -> str:
        if self._as_json:
            line = {"partition": partition, "epoch": epoch, "kind": kind, "row": row}
            return json.dumps(line, default=str)
        shown = json.dumps(row, default=str, ensure_ascii=False)
        return f"{self._where(partition, epoch)}  {_MARKS[kind]:<9}  {shown}"

    def _control(self, partition: int, kind: str, epoch: int, text: str) -> str:
        if self._as_json:
            return json.dumps({"partition": partition, "epoch": epoch, "kind": kind})
        return f"{self._where(partition, epoch)}  -- {text}"

    def _where(self, partition: int, epoch: int) -> str:
        return f"{epoch:>8}" if not self._shows_partition else f"{partition:>2} {epoch:>8}"
