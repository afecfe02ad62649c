"""Which partitions, and which of their rows, a consumer's partition reads."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from rekindle.exchange.routing import Share, partitions_read, share_read
from rekindle.exchange.shuffle import group_by_share
from rekindle.topology.model import Exchange, Input
from rekindle.topology.schema import Field, Scalar, Schema


def _input(exchange: Exchange, partitions: int = 3) -> Input:
    schema = Schema((Field("k", Scalar.BIGINT),))
    return Input("stream", "name", schema, partitions, exchange, ("k",))


def test_forward_reads_the_partition_of_the_same_number() -> None:
    forward = _input(Exchange.FORWARD)
    assert [list(partitions_read(forward, i)) for i in range(3)] == [[0], [1], [2]]
    assert share_read(forward, 3, 1) is None


def test_gather_reads_all_rows_of_every_partition() -> None:
    gather = _input(Exchange.GATHER)
    assert list(partitions_read(gather, 0)) == [0, 1, 2]
    assert share_read(gather, 1, 0) is None


def test_hash_reads_a_share_of_every_partition() -> None:
    hashed = _input(Exchange.HASH)
    assert list(partitions_read(hashed, 1)) == [0, 1, 2]
    assert share_read(hashed, 4, 1) == Share(("k",), 4, 1)


def test_a_single_consumer_reads_all_rows() -> None:
    assert share_read(_input(Exchange.HASH), 1, 0) is None


@given(st.lists(st.integers()), st.integers(2, 8))
def test_each_row_goes_to_one_consumer(keys: list[int], consumers: int) -> None:
    keys = [key % 1000 for key in keys]
    shares = [share_read(_input(Exchange.HASH), consumers, i) for i in range(consumers)]
    rows = pa.table({"k": pa.array(keys, pa.int64())})
    parts = [group_by_share(rows, s.key_by, s.partitions)[s.index] for s in shares if s is not None]
    assert sorted(k for part in parts for k in part["k"].to_pylist()) == sorted(keys)
