"""Live sources in a reference execution."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from rekindle.checkpoints.cuts import CutObjects
from rekindle.checkpoints.store import Store
from rekindle.connectors.cut_records import CutRecord, encode_cut_record
from rekindle.errors import RekindleError
from rekindle.reference.live import open_recorded
from rekindle.topology.model import Node
from rekindle.topology.spec import SourceSpec
from rekindle.topology.sql.ddl import ddl_to_schema


def test_a_chain_that_lacks_a_record_is_refused(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    objects = CutObjects(Store(url), "uid", "op", 0)
    for first in (0, 2):
        objects.create(first, encode_cut_record(CutRecord(first, first, {}, {})))
    spec = SourceSpec.model_validate({"name": "clicks", "schema": "id BIGINT", "generator": None})
    node = Node("clicks", "op", spec, (), ddl_to_schema("id BIGINT"), None, 1)
    with contextlib.ExitStack() as stack, pytest.raises(RekindleError, match="record of epoch 1:"):
        open_recorded(node, spec, 1_000_000, tmp_path, f"{url}/uid", stack)
