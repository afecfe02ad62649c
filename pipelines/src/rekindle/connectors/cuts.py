"""Which epoch a row belongs to: integer arithmetic, the same on every machine.

Pure: times and row numbers in, epochs out. Rates are floats in the resource; they are used as the
exact decimal number that the user wrote, so 0.1 is one tenth.

Design: docs/design/epochs.md#cuts, docs/design/exactly-once.md#sources.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

INT64_MAX = 2**63 - 1
SECOND_US = 1_000_000
MAX_EPOCH = 10**12 - 1
"""The newest epoch that a row can be in: file names of sinks have twelve digits for it."""


def exact_fraction(rate: float) -> Fraction:
    """The decimal number that the user wrote: exact_fraction(0.1) == 1/10."""
    return Fraction(repr(rate))


def epochs_by_time(times: Int64s, first_us: int, speedup: float, epoch_interval_us: int) -> Int64s:
    """floor(((t − t_first) / speedup) / Δ) for times in microseconds that are not before the
    first."""
    rate = exact_fraction(speedup)
    return scaled(times - first_us, rate.denominator, rate.numerator * epoch_interval_us)


def epochs_by_count(numbers: Int64s, rows_per_second: float, epoch_interval_us: int) -> Int64s:
    """floor((i / rowsPerSecond) / Δ) for row numbers i, from 0."""
    rate = exact_fraction(rows_per_second)
    return scaled(numbers, rate.denominator * SECOND_US, rate.numerator * epoch_interval_us)


def first_row(epoch: int, rows_per_second: float, epoch_interval_us: int) -> int:
    """The lowest row number whose `epochs_by_count` is at least `epoch`."""
    rate = exact_fraction(rows_per_second)
    numerator = epoch * epoch_interval_us * rate.numerator
    return -(-numerator // (rate.denominator * SECOND_US))


def scaled(values: Int64s, multiplier: int, divisor: int, addend: int = 0) -> Int64s:
    """floor((values · multiplier + addend) / divisor) for non-negative values; falls back to
    Python's integers where 64 bits would overflow."""
    top = max(int(values.max(initial=0)), 1) * multiplier + addend
    if max(top, divisor) <= INT64_MAX:
        small: Int64s = (values * np.int64(multiplier) + np.int64(addend)) // np.int64(divisor)
        return small
    big: Any = (values.astype(object) * multiplier + addend) // divisor
    return np.asarray(big, dtype=np.int64)
