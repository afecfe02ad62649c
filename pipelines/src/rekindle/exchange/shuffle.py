"""The hash exchange: groups an epoch by the shares of the consumer partitions, at the producer.

In Flux the producer routes by hash; here the stream server does, so that each consumer gets only
its rows, in row order, and consumers with the same `keyBy` and partitions use one grouped table. A
pure function of the rows; does not know transport, replicas or time.

Design: docs/design/streams.md#exchange.
Paper: Flux (Shah et al. 2004), section 4.1.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rekindle.exchange.hashing import hash_rows
from rekindle.table_memory import memory_bytes


@dataclass(frozen=True, slots=True)
class Shares:
    """The rows of an epoch, grouped by share; those of a share are contiguous, in row order. One
    table, so that an epoch of few rows costs the same for any number of shares."""

    rows: pa.Table
    ends: npt.NDArray[np.int64]
    """Where each share ends in `rows`."""

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, share: int) -> pa.Table:
        if not 0 <= share < len(self.ends):
            raise IndexError(share)
        begin = int(self.ends[share - 1]) if share else 0
        return self.rows.slice(begin, int(self.ends[share]) - begin)

    def tables(self) -> tuple[pa.Table, ...]:
        return tuple(self[share] for share in range(len(self)))

    @property
    def nbytes(self) -> int:
        """The memory that it takes, including the overhead of its Arrow objects."""
        return memory_bytes(self.rows) + int(self.ends.nbytes)


def group_by_share(rows: pa.Table, key_by: Sequence[str], partitions: int) -> Shares:
    """The rows by the share to which their key hashes."""
    if not rows.num_rows or partitions == 1:
        return Shares(rows, np.full(partitions, rows.num_rows, dtype=np.int64))
    hashes = np.asarray(hash_rows(rows, list(key_by)), dtype=np.uint64)
    target = (hashes % np.uint64(partitions)).astype(np.int64)
    order = np.argsort(target, kind="stable")
    counts = np.bincount(target, minlength=partitions)
    grouped = rows.take(pa.array(order)).combine_chunks()
    return Shares(grouped, np.cumsum(counts, dtype=np.int64))


class SharesCache:
    """An LRU cache of shares. Thread-safe; those of an epoch are computed once.

    The newest one stays even if it alone exceeds the budget, because its other consumers will
    request it next.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._shares_cache: OrderedDict[Hashable, Future[Shares]] = OrderedDict()
        self._sizes: dict[Hashable, int] = {}
        self._bytes = 0

    def __len__(self) -> int:
        with self._lock:
            return len(self._shares_cache)

    def get(self, key: Hashable, compute: Callable[[], Shares]) -> Shares:
        with self._lock:
            future = self._shares_cache.get(key)
            must_compute = future is None
            if future is None:
                future = self._shares_cache[key] = Future()
            self._shares_cache.move_to_end(key)
        if must_compute:
            self._compute(key, future, compute)
        return future.result()

    def _compute(
        self, key: Hashable, future: Future[Shares], compute: Callable[[], Shares]
    ) -> None:
        try:
            computed = compute()
        except BaseException as error:
            with self._lock:
                self._shares_cache.pop(key, None)
            future.set_exception(error)
            return
        future.set_result(computed)
        with self._lock:
            self._sizes[key] = computed.nbytes
            self._bytes += self._sizes[key]
            for old in list(self._shares_cache):
                if self._bytes <= self._max_bytes:
                    break
                if old in self._sizes and old != key:
                    del self._shares_cache[old]
                    self._bytes -= self._sizes.pop(old)
