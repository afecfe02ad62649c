"""Finds a key that more than half of the rows of a partition have. Pure.

Rows with one key are in one partition, whatever the number of partitions: so none has less work
than that key, and a partition in which a key has more than half of the rows keeps more than half of
them, into however many it is divided.

Blocks of epochs are judged, by a sample of the rows of each epoch: what is found is a function of
the rows by epoch, so replicas that have read the same blocks find the same; one that has begun
later may not have found a key yet that is below half by now. In a sample of 64 rows a key
that half of the rows have is once in 10,000 epochs less than a quarter; keys below a quarter of an
epoch's sample do not count in it, so few have to be remembered, and what is found is rather too
little than too much.

Design: docs/decisions/0070-keys-that-most-rows-have.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rekindle.exchange.hashing import hash_rows, mix

BLOCK_EPOCHS = 32
SAMPLE_ROWS = 64
COUNTED_FROM = SAMPLE_ROWS // 4
HOT_SHARE, COOL_SHARE = 0.5, 0.4
"""Above which share of a block's rows a key becomes hot, and at which it is not hot any more."""
SAMPLED_FROM = 0.25
"""Of an epoch with less than this part of `many_rows`, all keys count as different ones."""
SHOWN_CHARS = 40


@dataclass(frozen=True, slots=True)
class HotKey:
    """`values`: of the columns of the key, as text. `share`: of the rows of the block."""

    hash: int
    values: tuple[str, ...]
    share: float
    block: int


@dataclass(slots=True)
class KeyShares:
    """Of the rows that one partition reads from one input. `key_by`: the columns by which rows are
    distributed, each once. `many_rows`: of how many rows an epoch, in the mean, one key is looked
    for."""

    key_by: Sequence[str]
    many_rows: int
    _newest: int = -1
    _rows: int = 0  # of the block so far
    _counted: dict[int, float] = field(default_factory=dict)  # rows of the block, by hash
    _keys: dict[int, pa.Table] = field(default_factory=dict)  # one row for each of these
    _hot: HotKey | None = None

    def add(self, epoch: int, rows: pa.Table) -> None:
        """The rows of an epoch, in the order that replicas have in common. An epoch that is
        repeated has no effect."""
        if epoch <= self._newest:
            return
        if epoch // BLOCK_EPOCHS != self._newest // BLOCK_EPOCHS:
            self._hot = self._found()
            self._rows, self._counted, self._keys = 0, {}, {}
        self._newest = epoch
        self._rows += rows.num_rows
        if rows.num_rows < self.many_rows * SAMPLED_FROM:
            return
        numbers = np.arange(epoch * SAMPLE_ROWS, (epoch + 1) * SAMPLE_ROWS, dtype=np.uint64)
        # Not at equal distances: rows of several keys may come in turns.
        chosen = mix(numbers) % np.uint64(rows.num_rows)
        keys = rows.select(list(self.key_by)).take(pa.array(chosen))
        _, first, counts = np.unique(_groups(keys), return_index=True, return_counts=True)
        counted = np.flatnonzero(counts >= COUNTED_FROM)
        if not len(counted):
            return
        keys = keys.take(pa.array(first[counted]))
        for at, of_key in enumerate(hash_rows(keys, self.key_by).tolist()):
            share = int(counts[counted[at]]) / SAMPLE_ROWS
            self._counted[of_key] = self._counted.get(of_key, 0.0) + rows.num_rows * share
            if of_key not in self._keys:
                self._keys[of_key] = keys.slice(at, 1)

    def hot(self, epoch: int) -> HotKey | None:
        """The key that was hot in the newest block before that of `epoch`, through which all epochs
        are added or have no rows. May be called by another thread."""
        hot = self._hot
        return hot if hot is not None and epoch // BLOCK_EPOCHS <= hot.block + 1 else None

    def _found(self) -> HotKey | None:
        """Of the block that is complete. Less is asked of a key that is hot, so that one near a
        limit does not come and go."""
        if not self._counted:
            return None
        block, before = self._newest // BLOCK_EPOCHS, self.hot(self._newest)
        of_key = max(self._counted, key=lambda one: (self._counted[one], one))
        hot_share, many = HOT_SHARE, self.many_rows * BLOCK_EPOCHS
        if before is not None and self._counted.get(before.hash, 0) > COOL_SHARE * self._rows:
            of_key, hot_share = before.hash, COOL_SHARE
        if before is not None:
            many //= 2
        share = self._counted[of_key] / self._rows
        if share <= hot_share or self._rows < many:
            return None
        row = [self._keys[of_key].column(name)[0] for name in self.key_by]
        return HotKey(of_key, tuple(map(_shown, row)), share, block)


def _groups(rows: pa.Table) -> npt.NDArray[np.int64]:
    """Numbers that are equal for rows with equal values."""
    numbers = np.zeros(rows.num_rows, dtype=np.int64)
    for column in rows.columns:
        encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
        numbers = numbers * len(encoded.dictionary) + encoded.indices.to_numpy()
        _, numbers = np.unique(numbers, return_inverse=True)
    return numbers


def _shown(value: pa.Scalar) -> str:
    if not value.is_valid:
        return "NULL"
    if pa.types.is_timestamp(value.type):
        value = value.cast(pa.timestamp("us"))
    if pa.types.is_temporal(value.type):  # Python has no time after the year 9999
        text = str(value.cast(pa.string()))
    elif isinstance(plain := value.as_py(), str | bytes):
        text = repr(plain)
    else:
        text = str(plain)
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 1]}…"
