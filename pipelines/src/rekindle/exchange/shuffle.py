"""The hash exchange: splits an epoch into the shares of the consumer partitions, at the producer.

In Flux the producer routes by hash; here the Flight server does, so that each consumer gets only
its rows, in row order, and all consumers with the same key share one split. A pure function of the
rows; does not know transport, replicas or time.

Design: docs/design/streams.md#exchange.
Paper: Flux (Shah et al. 2004), section 4.1.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pyarrow as pa

from rekindle.exchange.hashing import hash_rows

SHARE_BYTES = 8 << 10
"""Memory of the Arrow and Python objects of one share, without its rows."""


def split(rows: pa.Table, key_by: Sequence[str], partitions: int) -> tuple[pa.Table, ...]:
    """One table for each of `partitions`: the rows whose key hashes there, in row order."""
    if not rows.num_rows or partitions == 1:
        return (rows,) + (rows.slice(0, 0),) * (partitions - 1)
    hashes = np.asarray(hash_rows(rows, list(key_by)), dtype=np.uint64)
    target = (hashes % np.uint64(partitions)).astype(np.int64)
    order = np.argsort(target, kind="stable")
    counts = np.bincount(target, minlength=partitions)
    grouped = rows.take(pa.array(order)).combine_chunks()
    ends = np.cumsum(counts)
    return tuple(
        grouped.slice(int(end - count), int(count)) for end, count in zip(ends, counts, strict=True)
    )


class SplitCache:
    """An LRU cache of splits. Thread-safe; each split is computed once.

    The newest one stays even if it alone exceeds the budget, because its other consumers will
    request it next.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._splits: OrderedDict[Hashable, Future[tuple[pa.Table, ...]]] = OrderedDict()
        self._sizes: dict[Hashable, int] = {}
        self._bytes = 0

    def __len__(self) -> int:
        with self._lock:
            return len(self._splits)

    def get(
        self, key: Hashable, compute: Callable[[], tuple[pa.Table, ...]]
    ) -> tuple[pa.Table, ...]:
        with self._lock:
            future = self._splits.get(key)
            mine = future is None
            if future is None:
                future = self._splits[key] = Future()
            self._splits.move_to_end(key)
        if mine:
            self._compute(key, future, compute)
        return future.result()

    def _compute(self, key: Hashable, future: Future[Any], compute: Callable[[], Any]) -> None:
        try:
            tables = compute()
        except BaseException as error:
            with self._lock:
                self._splits.pop(key, None)
            future.set_exception(error)
            return
        future.set_result(tables)
        with self._lock:
            self._sizes[key] = sum(t.nbytes + SHARE_BYTES for t in tables)
            self._bytes += self._sizes[key]
            for old in list(self._splits):
                if self._bytes <= self._max_bytes:
                    break
                if old in self._sizes and old != key:
                    del self._splits[old]
                    self._bytes -= self._sizes.pop(old)
